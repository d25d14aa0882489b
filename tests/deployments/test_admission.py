"""The line in front of a model: fair, bounded, and without places that get lost."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack

import pytest

from deployments.admission import FLOOR, RETRY_AFTER_S, Line
from protocols.errors import Overloaded, Unavailable
from tests.deployments.support import settle


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def line(clock: Clock, capacity: int = FLOOR, max_waiting: int = 100) -> Line:
    made = Line("m", max_waiting, clock)
    made.set_capacity(capacity)
    return made


class Guests:
    """Requests at the line: who is in, in the order they came in, and how to end one."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.inside: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._ends: dict[str, asyncio.Event] = {}

    async def come(self, name: str, tenant: str = "") -> None:
        self._ends[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._stay(name, tenant))
        await settle()

    async def _stay(self, name: str, tenant: str) -> None:
        async with self.line.place(60, tenant):
            self.inside.append(name)
            await self._ends[name].wait()

    async def go(self, name: str) -> None:
        self._ends[name].set()
        await self.tasks[name]
        await settle()

    async def all_go(self) -> None:
        for end in self._ends.values():
            end.set()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)


async def test_first_come_first_served(clock: Clock) -> None:
    guests = Guests(line(clock))
    for number in range(FLOOR + 3):
        await guests.come(str(number))
    assert guests.inside == [str(number) for number in range(FLOOR)]
    await guests.go("2")
    await guests.go("0")
    assert guests.inside[FLOOR:] == [str(FLOOR), str(FLOOR + 1)]
    guests.line.check_integrity()
    await guests.all_go()
    assert (guests.line.inside, guests.line.waiting) == (0, 0)


async def test_tenants_take_turns(clock: Clock) -> None:
    """One with a hundred requests in line does not keep out one with a single request."""
    guests = Guests(line(clock))
    for number in range(FLOOR):
        await guests.come(f"in{number}")
    for number in range(5):
        await guests.come(f"a{number}", "a")
    await guests.come("b0", "b")
    await guests.come("c0", "c")
    for number in range(FLOOR):
        await guests.go(f"in{number}")
    assert guests.inside[FLOOR:] == ["a0", "b0", "c0", "a1"]
    await guests.all_go()


async def test_a_newcomer_does_not_overtake(clock: Clock) -> None:
    guests = Guests(line(clock))
    for number in range(FLOOR + 1):
        await guests.come(str(number))
    guests.line.set_capacity(FLOOR + 1)
    await guests.come("new")
    assert guests.inside[-1] == str(FLOOR)
    await guests.all_go()


async def test_a_full_line_refuses_and_says_when(clock: Clock) -> None:
    guests = Guests(line(clock, max_waiting=2))
    for number in range(FLOOR + 2):
        await guests.come(str(number))
    await guests.come("late")
    error = guests.tasks["late"].exception()
    assert isinstance(error, Overloaded)
    assert error.retry_after_s == RETRY_AFTER_S[0]  # nothing is known of the pace yet
    # Two places freed 10 seconds apart, and two requests wait: the third from now has one in some 15 seconds.
    for number in range(2):
        await guests.go(str(number))
        clock.now += 10
    for number in (100, 101):
        await guests.come(str(number))
    await guests.come("later")
    error = guests.tasks["later"].exception()
    assert isinstance(error, Overloaded)
    assert error.retry_after_s == pytest.approx(3 / (2 / 20))
    await guests.all_go()


async def test_what_is_told_is_bounded(clock: Clock) -> None:
    guests = Guests(line(clock))
    for number in range(FLOOR):
        await guests.come(str(number))
    await guests.go("0")
    await guests.go("1")
    clock.now = 1e6
    assert guests.line.retry_after_s() == RETRY_AFTER_S[1]
    await guests.all_go()


async def test_less_capacity_than_requests_inside_only_stops_others(clock: Clock) -> None:
    guests = Guests(line(clock, capacity=8))
    for number in range(8):
        await guests.come(str(number))
    guests.line.set_capacity(FLOOR)
    await guests.come("next")
    for number in range(8 - FLOOR):
        await guests.go(str(number))
    assert "next" not in guests.inside
    await guests.go("7")
    assert guests.inside[-1] == "next"
    await guests.all_go()


async def test_a_model_without_replicas_lets_some_pass(clock: Clock) -> None:
    asleep = line(clock, capacity=0)
    async with AsyncExitStack() as stack:
        for _ in range(FLOOR):
            await stack.enter_async_context(asleep.place(60))
        assert asleep.inside == FLOOR


@pytest.mark.parametrize("seed", range(20))
async def test_no_place_is_lost(seed: int, clock: Clock) -> None:
    """Whoever comes, goes, gives up while waiting, or in the very moment of being let in."""
    draw = random.Random(seed)
    guests = Guests(line(clock))
    alive: list[str] = []
    for number in range(200):
        match draw.randrange(4):
            case 0 | 1:
                await guests.come(str(number), draw.choice("abc"))
                alive.append(str(number))
            case 2 if alive:
                name = alive.pop(draw.randrange(len(alive)))
                guests.tasks[name].cancel()
                if draw.random() < 0.5:
                    await settle()
            case 3 if alive:
                name = alive.pop(draw.randrange(len(alive)))
                guests._ends[name].set()
                if alive and draw.random() < 0.5:  # the place it frees goes to one that leaves at once
                    await asyncio.sleep(0)
                    guests.tasks[alive.pop(0)].cancel()
        await settle()
        guests.line.check_integrity()
    await guests.all_go()
    assert (guests.line.inside, guests.line.waiting) == (0, 0)


async def test_nobody_waits_forever(clock: Clock) -> None:
    guests = Guests(line(clock))
    for number in range(FLOOR):
        await guests.come(str(number))
    with pytest.raises(Unavailable):
        async with guests.line.place(0.01):
            pytest.fail("there was no place")
    assert guests.line.waiting == 0
    await guests.all_go()


async def test_one_tenant_does_not_fill_the_line_for_another(clock: Clock) -> None:
    guests = Guests(line(clock, max_waiting=2))
    for number in range(FLOOR + 2):
        await guests.come(f"a{number}", "a")
    await guests.come("late", "a")
    assert isinstance(guests.tasks["late"].exception(), Overloaded)
    for name in ("b0", "b1"):
        await guests.come(name, "b")
    await guests.go("a0")
    await guests.go("a1")
    assert guests.inside[FLOOR:] == [f"a{FLOOR}", "b0"]
    await guests.all_go()


async def test_a_line_without_a_floor_lets_in_only_what_there_is_room_for(clock: Clock) -> None:
    made = Line("m", 0, clock, floor=0)
    made.set_capacity(1)
    async with made.place(60):
        with pytest.raises(Overloaded):
            async with made.place(60):
                pytest.fail("there was no place")
