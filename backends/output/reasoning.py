"""How models mark what they think before they answer."""

from __future__ import annotations

import msgspec


class ReasoningFormat(msgspec.Struct, frozen=True):
    """`begins` and `ends` are alternatives. `dropped` is markup around the answer that comes with it.

    A chat template whose source has one of `shown_by` (by default, of `begins`) is for a model that writes this.
    """

    name: str
    begins: tuple[str, ...]
    ends: tuple[str, ...]
    dropped: tuple[str, ...] = ()
    shown_by: tuple[str, ...] = ()

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """May be control tokens in the vocabulary, which have no text unless they are asked for."""
        return (*self.begins, *self.ends, *self.dropped)


REASONING_FORMATS: tuple[ReasoningFormat, ...] = (
    ReasoningFormat("harmony", ("<|channel|>analysis<|message|>",), ("<|end|>",)),
    ReasoningFormat("gemma", ("<|channel>thought",), ("<channel|>",)),
    ReasoningFormat("mistral", ("[THINK]",), ("[/THINK]",)),
    ReasoningFormat("seed", ("<seed:think>",), ("</seed:think>",)),
    ReasoningFormat(
        "cohere",
        ("<|START_THINKING|>",),
        ("<|END_THINKING|>",),
        dropped=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    ReasoningFormat(
        "granite", ("<think>",), ("</think>",), ("<response>", "</response>"), shown_by=("<response></response>",)
    ),
    ReasoningFormat("granite-3.2", ("Here is my thought process:",), ("Here is my response:",)),
    ReasoningFormat("think", ("<think>",), ("</think>",), shown_by=("<think>", "</think>")),
)
"""From the specific to the general: the first that a template shows is the model's."""

_BY_NAME = {format.name: format for format in REASONING_FORMATS}


def reasoning_format(name: str) -> ReasoningFormat:
    return _BY_NAME[name]


def detect_reasoning(template: str) -> ReasoningFormat | None:
    """The format that a chat template's source shows, or None."""
    for format in REASONING_FORMATS:
        if any(text in template for text in format.shown_by or format.begins):
            return format
    return None


def is_thinking(format: ReasoningFormat, prompt_tail: str, *, continues: bool) -> bool:
    """Whether the answer begins inside the thinking, because the prompt has opened it.

    With `continues` the prompt ends with the beginning of the answer, which may be some way into the thinking.
    """
    if any(prompt_tail.rstrip().endswith(mark) for mark in format.begins):
        return True
    begins, ends = (max(map(prompt_tail.rfind, marks)) for marks in (format.begins, format.ends))
    return continues and begins > ends
