"""What a format of tool calls declares."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from backends.output.reading import Reading
from backends.output.tools.grammar import CallGrammar
from backends.output.writer import Writer
from protocols.request import Tool


class ToolFormat(msgspec.Struct, frozen=True):
    """One way in which models write calls.

    `shown_by`: a chat template whose source has all texts of one of these groups is for a model that writes this.
    `markers` begin calls anywhere; `naked_markers` do at the beginning of a line, if the name of a tool follows.
    `special_tokens` may be control tokens in the vocabulary, which have no text unless they are asked for.
    `read` is a parser: sent the characters behind a marker, it writes calls, and returns what it has read too much.
    None where calls are no part of the text but of what structures it all (Harmony).
    `grammar` says how calls of `tools` are written, for a model that must call, or may only call in the right form.
    `own_ids` makes ids that the model's template takes of arbitrary ones.
    """

    name: str
    grammar: Callable[[Sequence[Tool]], CallGrammar]
    read: Callable[[Writer, str], Reading[str]] | None = None
    shown_by: tuple[tuple[str, ...], ...] = ()
    markers: tuple[str, ...] = ()
    naked_markers: tuple[str, ...] = ()
    special_tokens: tuple[str, ...] = ()
    own_ids: Callable[[str], str] | None = None
