"""How models mark what they think before they answer."""

from __future__ import annotations

import msgspec


class ReasoningFormat(msgspec.Struct, frozen=True):
    """`begins` and `ends` are alternatives. `dropped` is markup around the answer that comes with it."""

    name: str
    begins: tuple[str, ...]
    ends: tuple[str, ...]
    dropped: tuple[str, ...] = ()

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
        ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    ReasoningFormat("granite", ("<think>",), ("</think>",), ("<response>", "</response>")),
    ReasoningFormat("granite-3.2", ("Here is my thought process:",), ("Here is my response:",)),
    ReasoningFormat("think", ("<think>",), ("</think>",)),
)
"""From the specific to the general: the first whose markup a template's source has is the model's."""

_BY_NAME = {format.name: format for format in REASONING_FORMATS}


def reasoning_format(name: str) -> ReasoningFormat:
    return _BY_NAME[name]


def detect_reasoning(template: str) -> ReasoningFormat | None:
    """The format that a chat template's source shows, or None."""
    for format in REASONING_FORMATS:
        dropped = not format.dropped or format.name == "cohere" or format.dropped[0] in template
        if dropped and (format.begins[0] in template or format.ends[0] in template):
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
