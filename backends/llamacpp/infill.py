"""Fill-in-the-middle prompts: code with a gap, in the order of special tokens that the model was trained with.

    [repository] name  ([file] filename  text)*  [file] filename  [prefix] prefix [suffix] suffix [middle]

The form with files is Qwen2.5-Coder's (arXiv 2409.12186); models without a file token get them as plain text. What
is next to the gap matters most, so where there is too much, the beginning of the prefix, the end of the suffix and the
first of the files are left out.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from backends.llamacpp.bindings import FimTokens, Model, Tokens
from protocols.errors import NotSupported
from protocols.request import InfillFile, InfillPrompt

WINDOW = 2048
"""Most tokens around the gap, three quarters of them before it: llama-server's proportion and its usual batch."""

_PROJECT = "myproject\n"
_CURRENT_FILE = "filename\n"
_SNIPPET = "\n\n--- snippet ---\n\n"

Tokenize = Callable[[str], Tokens]


class _Parts(msgspec.Struct, frozen=True):
    files: Tokens
    prefix: Tokens
    suffix: Tokens


def infill_tokens(
    prompt: InfillPrompt, model: Model, *, context_length: int, max_tokens: int | None, suffix_first: bool = False
) -> Tokens:
    """The whole prompt. `NotSupported` if the model has no tokens for gaps.

    It leaves `max_tokens` of the context for the answer, but never more than half; None counts as a quarter.
    """
    fim = model.fim
    if not fim.complete:
        raise NotSupported(f"This model cannot fill gaps: it has no {' and no '.join(fim.missing)} token")
    answer = context_length // 4 if max_tokens is None else min(max_tokens, context_length // 2)
    begin = [model.bos] if model.adds_bos else []
    room = context_length - answer - len(begin) - 4  # three special tokens, and one that stays free
    parts = _cut(prompt, fim, lambda text: model.tokenize(text, add_special=False, parse_special=False), room)
    before = [[fim.prefix], parts.prefix]
    behind = [[fim.suffix], parts.suffix]
    around = [*behind, *before] if suffix_first else [*before, *behind]
    return np.concatenate([begin, parts.files, *around, [fim.middle]]).astype(np.int32)


def _cut(prompt: InfillPrompt, fim: FimTokens, tokenize: Tokenize, room: int) -> _Parts:
    start = tokenize(prompt.start)
    window = max(min(WINDOW, room), 0)
    prefix = np.concatenate([tokenize(prompt.prefix), start])
    most_before = max(3 * window // 4, len(start))
    prefix = prefix[max(len(prefix) - most_before, 0) :]
    suffix = tokenize(prompt.suffix)[: min(window // 4, max(window - len(prefix), 0))]
    files = _files(prompt.files, fim, tokenize)
    left = max(room - len(prefix) - len(suffix), 0)
    return _Parts(files[max(len(files) - left, 0) :], prefix, suffix)


def _files(files: tuple[InfillFile, ...], fim: FimTokens, tokenize: Tokenize) -> Tokens:
    parts: list[Tokens | list[int]] = []
    if fim.repository >= 0:
        parts += [[fim.repository], tokenize(_PROJECT)]
    for file in files:
        named = fim.file >= 0
        parts += [[fim.file], tokenize(f"{file.filename}\n")] if named else [tokenize(_SNIPPET)]
        parts.append(tokenize(file.text))
    if fim.file >= 0:
        parts += [[fim.file], tokenize(_CURRENT_FILE)]
    return np.concatenate(parts).astype(np.int32) if parts else np.empty(0, np.int32)
