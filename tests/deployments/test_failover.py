"""A request that loses its replicas: what is asked next, and that the client sees one undisturbed answer."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.fake import FakeBackend, FakeSettings
from deployments.failover import MAX_DEATHS, PAUSE_S, Journey
from protocols.collect import Collector
from protocols.errors import BackendLost, InternalError, Overloaded, ReplicaStopping
from protocols.events import Finished, Frame, Progress, Started, TextDelta, Usage
from protocols.request import Extras, Request, Sampling
from tests.deployments.support import request, text

LOST = BackendLost("The replica was lost.")
RETRIES = 8
STOPPING = ReplicaStopping("The replica stops.")


async def run(asked: Request) -> list[Frame]:
    backend = FakeBackend(FakeSettings())
    await backend.start()
    frames = [frame async for frame in backend.generate(asked)]
    await backend.aclose()
    return frames


def without_times(frames: list[Frame]) -> list[object]:
    """The events of `frames`, text joined per choice, without what differs between two computations."""
    collector = Collector(1 + max(frame.choice for frame in frames))
    for frame in frames:
        for event in frame.events:
            collector.feed(event)
    return [msgspec.structs.replace(choice, started=None, finished=None) for choice in collector.result().choices]


@given(
    cuts=st.lists(st.integers(0, 30), max_size=4),
    n=st.integers(1, 3),
    stop=st.sampled_from([(), ("7 token", "never")]),
    progress=st.booleans(),
)
async def test_the_client_sees_one_answer(cuts: list[int], n: int, stop: tuple[str, ...], progress: bool) -> None:
    """Whatever was delivered when a replica stopped, the rest comes from the next ones, in a legal order."""
    asked = request(
        n=n, max_tokens=9, stop=stop, sampling=Sampling(temperature=1, seed=3), extras=Extras(progress=progress)
    )
    undisturbed = await run(asked)
    journey = Journey(asked, RETRIES)
    seen: list[Frame] = []
    for cut in [*cuts, 10_000]:
        for part in journey.requests():
            for frame in (await run(part))[:cut]:
                seen.append(journey.observe(frame))
        if journey.complete:
            break
        journey.lost(STOPPING)
    assert without_times(seen) == without_times(undisturbed)
    for choice in range(n):
        assert [t for f in seen if f.choice == choice for t in f.tokens] == [
            t for f in undisturbed if f.choice == choice for t in f.tokens
        ]


def test_nothing_delivered_is_asked_again_as_it_was() -> None:
    asked = request(n=2)
    journey = Journey(asked, RETRIES)
    journey.observe(Frame((Started(3, 0),)))
    journey.observe(Frame((Progress(1, 0, 3, 1.0),)))
    journey.lost(LOST)
    assert journey.requests() == (asked,)
    assert journey.observe(Frame((Started(3, 0),))) == Frame(())
    assert journey.observe(Frame((Progress(1, 0, 3, 1.0),))).events  # the client still waits for its first token


def test_tokens_whose_text_is_held_back_are_not_generated_again() -> None:
    journey = Journey(request(), RETRIES)
    journey.observe(Frame((Started(3, 0),)))
    journey.observe(Frame((), (11, 12)))
    journey.lost(LOST)
    (rest,) = journey.requests()
    assert rest.resume == (11, 12)


def test_what_a_request_resumed_itself_comes_first() -> None:
    journey = Journey(request(resume=(1, 2)), RETRIES)
    assert journey.requests()[0].resume == (1, 2)
    journey.observe(text("a", 3))
    journey.lost(LOST)
    assert journey.requests()[0].resume == (1, 2, 3)


def test_complete_choices_are_not_asked_for() -> None:
    journey = Journey(request(n=3), RETRIES)
    journey.observe(Frame((Started(3, 0),)))
    for choice in (0, 2):
        journey.observe(text("a", choice, choice))
    journey.observe(Frame((Finished("stop", Usage(3, 1), choice=0),)))
    journey.lost(LOST)
    assert [(part.n, part.choice, part.resume) for part in journey.requests()] == [(1, 1, ()), (1, 2, (2,))]
    for choice in (1, 2):
        journey.observe(Frame((Finished("stop", Usage(3, 1), choice=choice),), choice=choice))
    assert journey.complete


def test_progress_behind_text_is_left_out() -> None:
    journey = Journey(request(), RETRIES)
    journey.observe(Frame((Started(3, 0),)))
    journey.observe(text("a", 1))
    journey.lost(LOST)
    frame = journey.observe(Frame((Progress(1, 0, 3, 1.0), TextDelta("b")), (2,)))
    assert frame == Frame((TextDelta("b"),), (2,))


def died(journey: Journey, *nodes: str) -> None:
    """Replicas on these nodes, one after the other, with the request on them."""
    for node in nodes:
        journey.requests()
        journey.observe(Frame((Started(3, 0),)))
        journey.lost(LOST, node)


def test_a_request_that_ends_its_replicas_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    journey = Journey(request(), RETRIES)
    died(journey, *["a"] * (MAX_DEATHS - 1))
    assert not journey.suspected
    died(journey, "b")
    assert journey.suspected
    with pytest.raises(InternalError):
        journey.refuse()
    assert "request r1: 2 replicas died while they ran it" in caplog.text


def test_what_died_with_its_node_is_not_counted() -> None:
    journey = Journey(request(), RETRIES)
    died(journey, "a", "b")
    journey.acquit({"b", "c"})
    assert not journey.suspected
    assert journey.died_on == ["a"]
    died(journey, "")
    assert journey.suspected
    journey.acquit({"b", "c"})
    assert journey.suspected, "of a node that nobody knows it cannot be said that it is gone"


def test_losses_before_a_replica_began_are_no_deaths() -> None:
    journey = Journey(request(), RETRIES)
    pauses = []
    for _ in range(RETRIES):
        journey.requests()
        pauses.append(journey.lost(LOST))
    assert journey.moves == 0
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == PAUSE_S
    with pytest.raises(BackendLost):
        journey.lost(LOST)


def test_moves_are_bounded() -> None:
    journey = Journey(request(), RETRIES)
    for _ in range(RETRIES):
        journey.observe(text("a", 1))
        journey.lost(STOPPING)
        journey.requests()
    journey.observe(text("a", 1))
    with pytest.raises(ReplicaStopping):
        journey.lost(STOPPING)


def test_any_other_error_is_the_client_s() -> None:
    journey = Journey(request(), RETRIES)
    with pytest.raises(Overloaded):
        journey.lost(Overloaded("full"))
