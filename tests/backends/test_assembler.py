"""Bytes to text: whatever the pieces are, the text and the stop are the same."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from backends.output.assembler import Assembler
from backends.output.indent import IndentLimit
from backends.output.selection import OutputFormats, parser_for
from backends.output.stops import StopMatcher
from protocols.events import (
    Event,
    FinishReason,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallEnded,
    ToolCallStarted,
)
from protocols.request import ChatPrompt, Tool, ToolChoice


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


def run(pieces: list[bytes], stops: tuple[str, ...] = ()) -> tuple[str, str | None]:
    """Feeds until a stop string matches, as an engine does."""
    assembler = Assembler(stops)
    text = ""
    for piece in pieces:
        text += text_of(assembler.feed(piece))
        if assembler.stop_sequence is not None:
            break
    return text + text_of(assembler.finish()), assembler.stop_sequence


def reference(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """The definition: read character by character; the first complete stop string ends it, the longest of several."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


@st.composite
def split(draw: st.DrawFn, data: bytes) -> list[bytes]:
    cuts = sorted(draw(st.sets(st.integers(0, len(data)))) | {0, len(data)})
    return [data[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]


few_letters = st.text("abü日👩", max_size=24)
stop_strings = st.lists(st.text("abü日👩", max_size=5), max_size=4).map(tuple)


@given(few_letters, stop_strings, st.data())
def test_any_split_gives_the_same_text_and_stop(text: str, stops: tuple[str, ...], data: st.DataObject) -> None:
    pieces = data.draw(split(text.encode()))
    assert run(pieces, stops) == reference(text, stops)


@given(st.binary(max_size=24), stop_strings, st.data())
@example(b"\xf0\x80\xe6\x97", (), None)
def test_any_split_of_any_bytes(raw: bytes, stops: tuple[str, ...], data: st.DataObject | None) -> None:
    pieces = data.draw(split(raw)) if data is not None else [bytes([byte]) for byte in raw]
    assert run(pieces, stops) == reference(raw.decode("utf-8", "replace"), stops)


@given(few_letters, stop_strings)
def test_only_the_longest_possible_beginning_of_a_stop_string_is_held_back(text: str, stops: tuple[str, ...]) -> None:
    matcher = StopMatcher(stops)
    sent = ""
    for count, char in enumerate(text, 1):
        sent += matcher.feed(char)
        if matcher.matched is not None:
            return
        seen = text[:count]
        tails = (
            seen[i:] for i in range(count) if any(stop != seen[i:] and stop.startswith(seen[i:]) for stop in stops)
        )
        assert sent + next(tails, "") == seen


@given(few_letters, stop_strings, st.data())
def test_resuming_after_any_piece_loses_and_repeats_nothing(
    text: str, stops: tuple[str, ...], data: st.DataObject
) -> None:
    pieces = data.draw(split(text.encode()))
    at = data.draw(st.integers(0, len(pieces)))
    first, second = Assembler(stops), Assembler(stops)
    delivered = ""
    for piece in pieces[:at]:
        delivered += text_of(first.feed(piece))
        second.feed(piece)
        if first.stop_sequence is not None:
            return
    for piece in pieces[at:]:
        delivered += text_of(second.feed(piece))
        if second.stop_sequence is not None:
            break
    delivered += text_of(second.finish())
    assert (delivered, second.stop_sequence) == reference(text, stops)


@pytest.mark.parametrize(
    ("pieces", "stops", "text", "stop"),
    [
        (["Hello", " wor", "ld"], (), "Hello world", None),
        (["one STO", "P two"], ("STOP",), "one ", "STOP"),
        (["one STO"], ("STOP",), "one STO", None),  # flushed when the budget ends the answer
        (["aab"], ("aab", "ab"), "", "aab"),  # complete at the same character: the longest
        (["abcd"], ("bcd", "c"), "ab", "c"),  # complete first, though the other begins earlier
        (["aaaab"], ("aaab",), "a", "aaab"),  # the match begins inside a failed one
        (["text"], ("", ""), "text", None),
        ([], ("x",), "", None),
    ],
)
def test_cases(pieces: list[str], stops: tuple[str, ...], text: str, stop: str | None) -> None:
    assert run([piece.encode() for piece in pieces], stops) == (text, stop)


def test_half_a_character_is_held_back() -> None:
    assembler = Assembler()
    fox = "🦊".encode()
    assert assembler.feed(b"a" + fox[:3]) == [TextDelta("a")]
    assert assembler.feed(fox[3:]) == [TextDelta("🦊")]
    assert assembler.feed(fox[:2]) == []
    assert assembler.finish() == [TextDelta("\ufffd")]


@pytest.mark.parametrize("size", range(1, 8))
def test_B52_the_stream_goes_on_behind_a_split_character(size: int) -> None:
    """Whatever the tokens, deltas are parts of the whole, and none waits for more than a character."""
    text = "日本語の長い答え、絵文字🦊も。" * 20
    data = text.encode()
    assembler = Assembler()
    shown = ""
    for end in range(size, len(data) + size, size):
        shown += text_of(assembler.feed(data[end - size : end]))
        assert shown == data[:end].decode(errors="ignore")
    assert (shown, text_of(assembler.finish())) == (text, "")


def test_B57_a_stop_string_may_span_tokens() -> None:
    letters = " ".join("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    pieces = [piece.encode() for piece in re.split("(?= )", letters)]
    assert run(pieces, ("O P Q",)) == ("A B C D E F G H I J K L M N ", "O P Q")


@pytest.mark.parametrize("pieces", [["Alice!"], ["Al", "ice", "!"], list("Alice!")])
def test_B58_what_was_held_back_is_sent_once(pieces: list[str]) -> None:
    assembler = Assembler(("\n", "Alice:"))
    shown = [text_of(assembler.feed(piece.encode())) for piece in pieces]
    assert "".join(shown) == "Alice!"
    assert text_of(assembler.feed(b" Alice:")) == " "
    assert (assembler.stop_sequence, assembler.finish()) == ("Alice:", [])


def test_the_cost_of_a_token_does_not_grow_with_the_answer() -> None:
    assembler = Assembler(("a" * 40 + "b",))

    def cost(pieces: int) -> float:
        start = time.perf_counter()
        for _ in range(pieces):
            assembler.feed(b"aaaa")
        return time.perf_counter() - start

    cost(500)
    early = min(cost(500) for _ in range(5))
    cost(50_000)
    late = min(cost(500) for _ in range(5))
    assert late < 5 * early


# --- indentation ------------------------------------------------------------------------------------------------------


def reference_cut(text: str, least: int) -> tuple[str, bool]:
    """The definition: the first later line whose first character that is no blank has fewer than `least` before it."""
    start = text.find("\n") + 1
    while start:
        line = text[start:].partition("\n")[0]
        blanks = len(line) - len(line.lstrip(" \t"))
        ended = start + blanks < len(text)
        if ended and blanks < least:
            return text[: start + blanks], True
        start = text.find("\n", start) + 1
    return text, False


@given(st.text("a \t\n", max_size=24), st.integers(1, 4), st.data())
def test_indentation_is_measured_however_the_text_is_split(text: str, least: int, data: st.DataObject) -> None:
    assembler = Assembler(indent=least)
    seen = ""
    for piece in data.draw(split(text.encode())):
        seen += text_of(assembler.feed(piece))
        if assembler.outdented:
            break
    assert (seen + text_of(assembler.finish()), assembler.outdented) == reference_cut(text, least)


@pytest.mark.parametrize(
    ("text", "cut"),
    [
        ("x\n    y\nz", "x\n    y\n"),
        ("x\n    y\n  z", "x\n    y\n  "),
        ("x\n    y\n\n    z", "x\n    y\n"),  # an empty line ends it too
        ("x\n    y\n    z\n  ", "x\n    y\n    z\n  "),  # blanks alone decide nothing yet
        ("no lines", "no lines"),
    ],
)
def test_blocks(text: str, cut: str) -> None:
    limit = IndentLimit(4)
    assert limit.feed(text) == cut
    assert limit.reached == (cut != text)


def test_what_comes_first_ends_the_answer() -> None:
    def ended_by(text: str) -> tuple[str, str | None, bool]:
        assembler = Assembler(("STOP",), indent=2)
        seen = text_of(assembler.feed(text.encode())) + text_of(assembler.finish())
        return seen, assembler.stop_sequence, assembler.outdented

    assert ended_by("a\n  b STOP\nc") == ("a\n  b ", "STOP", False)
    assert ended_by("a\nb STOP") == ("a\n", None, True)
    assert ended_by("a\nSTO") == ("a\n", None, True)


# --- log-probabilities ------------------------------------------------------------------------------------------------


def entry(index: int, data: bytes) -> TokenLogprob:
    return TokenLogprob(index, data, -1.0)


@given(st.text("abü日👩", max_size=16), stop_strings, st.data())
def test_entries_come_in_order_with_their_text_and_none_is_lost(
    text: str, stops: tuple[str, ...], data: st.DataObject
) -> None:
    pieces = data.draw(split(text.encode()))
    for at in data.draw(st.sets(st.integers(0, len(pieces)), max_size=3)):
        pieces.insert(at, b"")  # control tokens have no text
    assembler = Assembler(stops)
    events: list[Event] = []
    for index, piece in enumerate(pieces):
        events += assembler.feed(piece, entry(index, piece))
        if assembler.stop_sequence is not None:
            break
    events += assembler.finish()
    deltas = [event for event in events if isinstance(event, TextDelta)]
    seen = [one.token for delta in deltas for one in delta.logprobs]
    assert seen == list(range(len(seen)))
    expected, stop = reference(text, stops)
    assert text_of(events) == expected
    if stop is None:
        assert len(seen) == len(pieces)
    shown = b"".join(pieces[: len(seen)])
    assert shown.startswith(expected.encode()), "whoever has text has an entry"
    emitted = 0
    begins = [len(b"".join(pieces[:index])) for index in range(len(pieces))]
    for delta in deltas:
        before, emitted = emitted, emitted + len(delta.text.encode())
        for one in delta.logprobs:
            end = begins[one.token] + len(pieces[one.token])
            assert begins[one.token] < emitted or stop is None and delta is deltas[-1] or not pieces[one.token]
            assert end > before or not pieces[one.token], "never later than its text"


def test_entries_of_a_stop_go_with_it() -> None:
    assembler = Assembler(("STOP",))
    entries = [entry(i, piece) for i, piece in enumerate((b"a ", b"ST", b"", b"OP"))]
    events = [event for one in entries for event in assembler.feed(one.data, one)] + assembler.finish()
    assert events == [TextDelta("a ", (entries[0],))]


def test_an_entry_without_text_comes_at_the_end() -> None:
    assembler = Assembler()
    first, last = entry(0, b"a"), entry(1, b"")
    assert assembler.feed(b"a", first) == [TextDelta("a", (first,))]
    assert assembler.feed(b"", last) == []
    assert assembler.finish() == [TextDelta("", (last,))]
    assert assembler.finish() == []


# --- with a parser ----------------------------------------------------------------------------------------------------


CALL = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'


def chat_assembler(stops: tuple[str, ...] = (), *, parallel: bool = True) -> Assembler:
    tools = (Tool("now"),)
    prompt = ChatPrompt((), tools, tool_choice=ToolChoice(parallel=parallel))
    spec = parser_for(prompt, OutputFormats.of("<tool_call><think>"), "")
    assert spec is not None
    return Assembler(stops, parser=spec.make("r", 0))


def fed(assembler: Assembler, pieces: list[bytes]) -> list[Event]:
    return [event for index, piece in enumerate(pieces) for event in assembler.feed(piece, entry(index, piece))]


def test_B51_half_a_character_inside_a_call_is_held_back() -> None:
    assembler = chat_assembler()
    fox = "🦊".encode()
    raw = b'<tool_call>{"name": "now", "arguments": {"a": "' + fox + b'"}}</tool_call>'
    events = [event for byte in raw for event in assembler.feed(bytes([byte]))] + assembler.finish()
    assert "".join(event.arguments for event in events if isinstance(event, ToolCallDelta)) == '{"a": "🦊"}'


def test_the_answer_ends_as_its_calls_say() -> None:
    cases: tuple[tuple[str, FinishReason, str], ...] = (
        (CALL, "stop", "tool_calls"),
        (CALL, "length", "length"),
        (CALL[:-16], "stop", "stop"),
        (f"{CALL}<tool_call>" + '{"name": "now", "arguments": {"a"', "stop", "stop"),
        ("Hello", "stop", "stop"),
    )
    for text, reason, expected in cases:
        assembler = chat_assembler()
        assembler.feed(text.encode())
        assembler.finish(reason)
        assert assembler.finish_reason(reason) == expected
    assert Assembler().finish_reason("length") == "length"


def test_one_call_ends_the_answer_where_only_one_is_allowed() -> None:
    assembler = chat_assembler(parallel=False)
    events = assembler.feed(f"{CALL}{CALL} and so on".encode())
    assert assembler.stop_now
    assert [type(event) for event in events + assembler.finish()] == [ToolCallStarted, ToolCallDelta, ToolCallEnded]
    assert not Assembler().stop_now


def test_stop_strings_end_thinking_and_calls_alike() -> None:
    assembler = chat_assembler(("STOP",))
    assert assembler.feed(b"<think>a STOP b") == [ReasoningDelta("a")]
    assert assembler.stop_sequence == "STOP"
    assert assembler.finish() == [ReasoningDelta(" ")]
    assembler = chat_assembler(("STOP",))
    assembler.feed(b'<tool_call>{"name": "now", "arguments": {"a": "STOP')
    assert [type(event) for event in assembler.finish()] == [ToolCallEnded]
    assert assembler.finish_reason("stop") == "stop"


def test_tokens_of_thinking_are_counted() -> None:
    assembler = chat_assembler()
    for piece in (b"<think>", b"\n", b"I ", b"am", b"</think>", b"\n\n", b"So", b"."):
        assembler.feed(piece)
    assert assembler.reasoning_tokens == 4
    empty = chat_assembler()
    for piece in (b"<think>", b"\n\n", b"</think>", b"So"):
        empty.feed(piece)
    assert empty.reasoning_tokens == 0
    assert Assembler().reasoning_tokens == 0


def test_probabilities_go_with_text_alone() -> None:
    pieces = [b"<think>", b"a", b"</think>", b"\n", b"So", b" it", b".", b"\n", b"<tool_", b"call>", CALL[11:].encode()]
    pieces += [b"\n", b"Done", b" <to", b"ol", b""]
    assembler = chat_assembler()
    events = fed(assembler, pieces) + assembler.finish()
    deltas = [event for event in events if isinstance(event, TextDelta)]
    assert "".join(event.text for event in deltas) == "So it.\nDone <tool"
    assert [one.token for event in deltas for one in event.logprobs] == [4, 5, 6, 12, 13, 14, 15]
    assert ReasoningDelta("a") in events


@given(st.text("ab <\n日", max_size=16), st.data())
def test_text_has_the_same_probabilities_with_a_parser_and_without(text: str, data: st.DataObject) -> None:
    pieces = [*data.draw(split(text.encode())), b""]
    seen = []
    for assembler in (Assembler(), chat_assembler()):
        deltas = [event for event in fed(assembler, pieces) + assembler.finish() if isinstance(event, TextDelta)]
        seen.append(("".join(e.text for e in deltas), [one.token for e in deltas for one in e.logprobs]))
    assert seen[0] == seen[1]
