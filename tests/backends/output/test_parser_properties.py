"""What holds for any text, whatever it is and however it is split."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.output.parser import MAX_HELD
from backends.output.reasoning import REASONING_FORMATS
from backends.output.tools.table import TOOL_FORMATS, tool_format
from protocols.events import FinishReason, ToolCallDelta
from tests.backends.output.samples import SAMPLES
from tests.backends.output.support import Output, events_of, run, spec

_FRAGMENTS = [
    *(token for format in TOOL_FORMATS for token in (*format.markers, *format.naked_markers, *format.special_tokens)),
    *(token for format in REASONING_FORMATS for token in format.special_tokens),
    *(
        "get_weather",
        "now",
        '"',
        "'",
        "\\",
        "{",
        "}",
        "[",
        "]",
        "(",
        ")",
        ":",
        ",",
        "=",
        "\n",
        " ",
        "日",
        "👩",
        "\u3000",
    ),
    *(
        '{"name": "now", "arguments": {',
        '"city": "Paris"',
        "call:now",
        "functions.now:0",
        "assistant",
        " to=functions.",
    ),
    *("<function=now>", "<parameter=city>", "</parameter>", "</function>", "now(city=", "null", "-1.5e3", "\\u00e9"),
]
_SPECS = [
    *(spec(format.name, reasoning) for format in TOOL_FORMATS for reasoning in (None, "think")),
    *(spec(None, format.name) for format in REASONING_FORMATS[1:]),
    spec("harmony", "harmony"),
    spec("harmony", "harmony", tail="<|start|>assistant<|channel|>final<|message|>"),
    spec("hermes", "think", parallel=False),
    spec("hermes", "think", tail="<think>\n"),
]
specs = st.sampled_from(_SPECS)
samples = st.sampled_from([sample.output for sample in SAMPLES])
fragments = st.lists(st.sampled_from(_FRAGMENTS) | st.text(max_size=3), max_size=24).map("".join)
reasons = st.sampled_from(["stop", "length"])


@st.composite
def damaged(draw: st.DrawFn) -> str:
    """A sample with something put into it or taken out of it."""
    text = draw(samples)
    left, right = sorted(draw(st.tuples(*[st.integers(0, len(text))] * 2)))
    return text[:left] + draw(fragments) + text[draw(st.sampled_from([left, right])) :]


texts = fragments | damaged()


def pieces_of(data: st.DataObject, text: str) -> list[str]:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=12)) | {0, len(text)})
    return [text[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]


@settings(max_examples=300, deadline=None)
@given(specs, texts, reasons, st.data())
def test_any_split_gives_the_same(parser, text: str, reason: FinishReason, data: st.DataObject) -> None:
    """Nothing raises, and the order of events is legal: the collector sees to that."""
    whole = run(parser, [text], reason)
    assert run(parser, pieces_of(data, text), reason) == whole
    assert run(parser, list(text), reason) == whole


@settings(max_examples=300, deadline=None)
@given(specs, texts)
def test_no_character_is_lost_where_there_is_no_markup(parser, text: str) -> None:
    output = run(parser, [text])
    if parser.formats.tools is not None and parser.formats.tools.name == "harmony":
        return
    if parser.thinking or output.calls or output.reasoning:
        return
    reasoning = parser.formats.reasoning
    if reasoning is not None and any(mark in text for mark in reasoning.special_tokens):
        return
    assert output.text == text


@settings(max_examples=200, deadline=None)
@given(specs, texts)
def test_what_comes_out_was_put_in(parser, text: str) -> None:
    """Text and thinking are the input with parts left out: in its order, nothing twice, nothing invented."""
    output = run(parser, [text])
    for out in (output.text, output.reasoning):
        rest = iter(text)
        assert all(char in rest for char in out)


@settings(max_examples=200, deadline=None)
@given(specs, texts)
def test_little_is_held_back(parser, text: str) -> None:
    parser = parser.make("r", 0)
    for char in text:
        parser.feed(char)
        assert parser.undecided <= MAX_HELD
        if parser.stop_now:
            break


@pytest.mark.parametrize(
    "opening", ["<tool_call>", '<tool_call>{"name": "', '<tool_call>{"arguments": {"a": "', " ", "<"]
)
@pytest.mark.parametrize("filling", ["x", " ", "<", "{", '"x": 1, '])
def test_the_bound_holds_for_endless_text(opening: str, filling: str) -> None:
    parser = spec("hermes", "think").make("r", 0)
    given, seen = opening + filling * (3 * MAX_HELD), 0
    for count, char in enumerate(given, 1):
        seen += sum(len(getattr(event, "text", "")) for event in parser.feed(char))
        assert count - seen <= MAX_HELD


def test_a_string_is_held_back_no_longer_than_its_end_may_be() -> None:
    parser = spec("qwen3_coder").make("r", 0)
    parser.feed("<tool_call>\n<function=get_weather>\n<parameter=city>\n")
    given = seen = 0
    for char in ("a < b </param \n\n" * 50) + "x":
        given += len(char)
        for event in parser.feed(char):
            assert isinstance(event, ToolCallDelta)
            seen += len(event.arguments.replace("\\n", "n"))
        assert given - seen < len("\n</parameter>")


@settings(max_examples=100, deadline=None)
@given(specs, texts, st.data())
def test_resuming_anywhere_loses_and_repeats_nothing(parser, text: str, data: st.DataObject) -> None:
    """Another replica feeds what was delivered, drops the events, and goes on."""
    pieces = pieces_of(data, text)
    at = data.draw(st.integers(0, len(pieces)))
    first, second = parser.make("r", 0), parser.make("r", 0)
    events = []
    for piece in pieces[:at]:
        events += first.feed(piece)
        second.feed(piece)
        if first.stop_now:
            assert second.stop_now
            return
    assert fold(events + events_of(second, pieces[at:])) == fold(events_of(parser.make("r", 0), [text]))


def fold(events) -> list[tuple[str, str]]:
    """Neighbours of one kind joined."""
    parts: list[tuple[str, str]] = []
    for event in events:
        kind = type(event).__name__
        text = getattr(event, "text", None) or getattr(event, "arguments", None) or repr(event)
        if parts and parts[-1][0] == kind:
            parts[-1] = (kind, parts[-1][1] + text)
        else:
            parts.append((kind, text))
    return parts


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(SAMPLES), st.text(alphabet="ab.日\n ", max_size=12), st.text(alphabet="ab.日", max_size=12))
def test_text_around_calls(sample, before: str, after: str) -> None:
    if sample.format in ("harmony", "gemma3"):
        return
    before = before and before + ".\n"
    calls = run(spec(sample.format), [sample.output]).calls
    expected = Output((before if after else before.rstrip()) + after, "", calls, "tool_calls")
    assert run(spec(sample.format), [before + sample.output + "\n" + after]) == expected


def test_formats_are_known_by_their_names() -> None:
    assert [tool_format(format.name) for format in TOOL_FORMATS] == list(TOOL_FORMATS)
