"""What every dialect owes its clients, for every script: one answer in both modes, whole and in order."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.output.assembler import Assembler
from backends.output.selection import ParserSpec
from protocols.collect import Collector
from protocols.errors import ErrorInfo, InternalError
from protocols.events import Event, Failed, Finished, FinishReason, Started, Usage
from tests.backends.output.samples import SAMPLES, Sample
from tests.backends.output.support import spec
from tests.protocols.dialects import DIALECTS, Answer, Dialect, without_ids
from tests.protocols.scripts import COMPLETE, FAILING, LOGPROBS, SCRIPTS, STAMP, TWO_CHOICES, legal_scripts

every_dialect = pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
with_choices = pytest.mark.parametrize("dialect", [d for d in DIALECTS if d.has_n], ids=lambda dialect: dialect.name)


def check(dialect: Dialect, script: tuple[Event, ...], n: int = 1) -> Answer:
    """Stream and body are one answer, and it is what the events say."""
    script = dialect.playable(script)
    streamed = dialect.read_stream(dialect.stream(script, n), n)
    assert streamed == dialect.read_body(dialect.body(script, n))
    assert without_ids(streamed) == dialect.expected(dialect.completion(script, n))
    for choice in streamed.choices:
        assert len(set(choice.ids)) == len(choice.calls)
        assert all(choice.ids)
    return streamed


@every_dialect
@pytest.mark.parametrize("name", COMPLETE)
def test_named_scripts(dialect: Dialect, name: str) -> None:
    check(dialect, SCRIPTS[name])


@every_dialect
def test_probabilities(dialect: Dialect) -> None:
    check(dialect, LOGPROBS)


@with_choices
def test_two_choices(dialect: Dialect) -> None:
    answer = check(dialect, TWO_CHOICES, n=2)
    assert [choice.text for choice in answer.choices] == ["A", "B"]


@every_dialect
@settings(deadline=None)
@given(script=legal_scripts(logprobs=True))
def test_any_script(dialect: Dialect, script: tuple[Event, ...]) -> None:
    check(dialect, script)


@with_choices
@settings(deadline=None)
@given(data=st.data(), n=st.integers(2, 4))
def test_any_script_of_several_choices(dialect: Dialect, data: st.DataObject, n: int) -> None:
    check(dialect, data.draw(legal_scripts(n, logprobs=True)), n)


# --- failures and silence ------------------------------------------------------------


@every_dialect
@pytest.mark.parametrize("name", sorted(FAILING))
def test_scripts_that_fail(dialect: Dialect, name: str) -> None:
    error = dialect.read_failure(dialect.stream(SCRIPTS[name]))
    assert error["message"]


@every_dialect
@settings(deadline=None)
@given(data=st.data(), n=st.integers(1, 3))
def test_a_failure_anywhere_is_the_end(dialect: Dialect, data: st.DataObject, n: int) -> None:
    n = n if dialect.has_n else 1
    script = dialect.playable(data.draw(legal_scripts(n, logprobs=True)))
    cut = data.draw(st.integers(0, len(script) - 1))
    raw = dialect.stream((*script[:cut], Failed(ErrorInfo("internal", "a secret"))), n)
    assert dialect.read_failure(raw, n)["message"] == InternalError.PUBLIC_MESSAGE
    assert b"a secret" not in raw


@every_dialect
@settings(deadline=None)
@given(script=legal_scripts(), places=st.lists(st.integers(0, 14)))
def test_keepalives_may_come_anywhere(dialect: Dialect, script: tuple[Event, ...], places: list[int]) -> None:
    script = dialect.playable(script)
    encoder = dialect.codec.encoder(dialect.call(stream=True), STAMP)
    raw = b"".join(encoder.keepalive() * places.count(i) + encoder.feed(event) for i, event in enumerate(script))
    plain = dialect.codec.encoder(dialect.call(stream=True), STAMP)
    assert dialect.read_stream(raw) == dialect.read_stream(b"".join(plain.feed(event) for event in script))


# --- what models write ------------------------------------------------------------

THOUGHT = "<think>\nHm, ü.\n</think>\n\n"


def written(parser: ParserSpec, pieces: list[bytes], stop: tuple[str, ...], reason: FinishReason) -> tuple[Event, ...]:
    """The events of a model that writes `pieces`, each a token, until one of `stop` or its parser ends it."""
    assembler = Assembler(stop, parser=parser.make("request", 0))
    events: list[Event] = [Started(10, 2)]
    count = 0
    for piece in pieces:
        events += assembler.feed(piece)
        count += 1
        if assembler.stop_sequence is not None or assembler.stop_now:
            reason = "stop"
            break
    events += assembler.finish(reason)
    usage = Usage(10, count, 2, assembler.reasoning_tokens)
    return (*events, Finished(assembler.finish_reason(reason), usage, assembler.stop_sequence))


@st.composite
def outputs(draw: st.DrawFn) -> tuple[ParserSpec, bytes, tuple[str, ...], FinishReason]:
    """What a model of some format writes, perhaps with thinking before it, cut short, or ended by a stop string."""
    sample: Sample = draw(st.sampled_from(SAMPLES))
    text = sample.output
    thinks = sample.format != "harmony" and draw(st.booleans())
    parser = spec(sample.format, "think" if thinks else None)
    text = THOUGHT + text if thinks else text
    match draw(st.sampled_from(("whole", "cut", "stopped"))):
        case "cut":
            raw = text.encode()
            return parser, raw[: draw(st.integers(0, len(raw)))], (), "length"
        case "stopped":
            at = draw(st.integers(0, len(text) - 1))
            return parser, text.encode(), (text[at : at + draw(st.integers(1, 6))],), "stop"
    return parser, text.encode(), (), "stop"


@every_dialect
@settings(deadline=None)
@given(output=outputs(), data=st.data())
def test_any_split_of_what_a_model_writes(dialect: Dialect, output: Any, data: st.DataObject) -> None:
    parser, raw, stop, reason = output
    cuts = sorted(data.draw(st.sets(st.integers(0, len(raw)), max_size=12)) | {0, len(raw)})
    pieces = [raw[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
    whole = written(parser, [raw], stop, reason)
    for split in (pieces, [raw[i : i + 1] for i in range(len(raw))]):
        script = dialect.playable(written(parser, split, stop, reason))
        streamed = dialect.read_stream(dialect.stream(script))
        assert streamed == dialect.read_body(dialect.body(script))
        if dialect.playable(whole) == whole:
            expected = dialect.expected(dialect.completion(whole))
            assert without_ids(streamed).choices == expected.choices


def test_the_events_of_models_are_in_order() -> None:
    for sample in SAMPLES:
        collector = Collector()
        for event in written(spec(sample.format), [sample.output.encode()], (), "stop"):
            collector.feed(event)
        assert len(collector.result().choices[0].tool_calls) == len(sample.calls)
