"""Clients that ask without a pause, and what became of every request."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import httpx2
import msgspec

from tests.chaos.asks import Ask, BrokenAnswer, GatewayGone, answer

WITHIN_S = 240.0
RETRY_AFTER_S = 0.5
"""What the SDKs of OpenAI and Anthropic wait before their first retry. Whoever retries within milliseconds may be sent
over a connection that HAProxy had kept to the dead gateway and has not found broken yet, and fails a second time.
"""


class Outcome(msgspec.Struct):
    """`began`, `ended` and when connections broke are seconds of `time.monotonic`. `text` is None after an error, or if
    the client left.
    """

    ask: Ask
    began: float
    ended: float = 0.0
    text: str | None = None
    left: bool = False
    broken_connections: list[tuple[float, str]] = []
    error: str = ""
    longest_gap_s: float = 0.0


class InFlight:
    """The requests that have begun and not ended, one for each client. Written by the load, read by any thread."""

    def __init__(self) -> None:
        self._began: dict[int, tuple[float, str]] = {}

    @contextmanager
    def request(self, client: int, model: str) -> Iterator[None]:
        self._began[client] = time.monotonic(), model
        try:
            yield
        finally:
            del self._began[client]

    def since(self, when: float, model: str | None = None) -> bool:
        """Whether one (of `model`) that began before `when` still runs, here or there."""
        return any(began < when and model in (None, its) for began, its in list(self._began.values()))


async def once(client: httpx2.AsyncClient, ask: Ask, leave_after_s: float | None = None) -> Outcome:
    """One request as a client with one retry makes it: again after a broken connection, never after an error.

    A gateway that is killed takes its connections along. Everything else has to be invisible.
    """
    outcome = Outcome(ask, time.monotonic())
    for attempt in range(2):
        gaps: list[float] = []
        try:
            async with asyncio.timeout(leave_after_s if leave_after_s is not None else WITHIN_S):
                outcome.text = await answer(client, ask, gaps, time.monotonic)
            outcome.longest_gap_s = max(gaps, default=0.0)
            break
        except TimeoutError:
            outcome.left = leave_after_s is not None
            outcome.error = "" if outcome.left else f"no answer within {WITHIN_S:.0f} s"
            break
        except (httpx2.TransportError, GatewayGone) as error:
            outcome.broken_connections.append((time.monotonic(), f"{type(error).__name__}: {error}"))
            if attempt:
                outcome.error = f"{type(error).__name__} again: {error}"
            else:
                await asyncio.sleep(RETRY_AFTER_S)
        except BrokenAnswer as error:
            outcome.error = str(error)
            if leave_after_s is not None:
                left_s = leave_after_s + outcome.began - time.monotonic()
                outcome.error += f" (its client would have left {left_s:.2f} s later)"
            break
    outcome.ended = time.monotonic()
    return outcome


async def load(
    url: str,
    asks: Sequence[Ask],
    clients: int,
    until: Callable[[], bool],
    seed: int = 0,
    leaving: float = 0.0,
    in_flight: InFlight | None = None,
) -> list[Outcome]:
    """`clients` of them, each asking something at random until `until` holds. A share of `leaving` go away early."""
    outcomes: list[Outcome] = []
    in_flight = in_flight or InFlight()

    async def one(number: int) -> None:
        draw = random.Random(seed * 1000 + number)
        async with httpx2.AsyncClient(base_url=url, timeout=WITHIN_S) as client:
            while not until():
                leave_after_s = draw.uniform(0.01, 1.5) if draw.random() < leaving else None
                ask = draw.choice(asks)
                with in_flight.request(number, ask.body["model"]):
                    outcomes.append(await once(client, ask, leave_after_s))

    await asyncio.gather(*[one(number) for number in range(clients)])
    return outcomes


async def references(url: str, asks: Sequence[Ask]) -> dict[str, str]:
    """The undisturbed answers, by `key`. Of a real model one at a time: its rounding depends on who is beside it."""
    async with httpx2.AsyncClient(base_url=url, timeout=WITHIN_S) as client:
        fake = [ask for ask in asks if ask.body["model"] == "fake"]
        answers = dict(zip(map(key, fake), await asyncio.gather(*(answer(client, ask) for ask in fake)), strict=True))
        return answers | {key(ask): await answer(client, ask) for ask in asks if key(ask) not in answers}


def key(ask: Ask) -> str:
    return msgspec.json.encode((ask.dialect, ask.body)).decode()


def common_prefix(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def table(outcomes: Sequence[Outcome], expected: Mapping[str, str]) -> str:
    """One row for each way of asking."""
    lines = [
        "| asked | requests | failed | retried | client left | identical | longest gap |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in sorted({outcome.ask.name for outcome in outcomes}):
        rows = [outcome for outcome in outcomes if outcome.ask.name == name]
        answered = [row for row in rows if row.text is not None]
        same = sum(row.text == expected[key(row.ask)] for row in answered)
        share = f"{same} of {len(answered)}"
        lines.append(
            f"| {name} | {len(rows)} | {sum(bool(row.error) for row in rows)} "
            f"| {sum(bool(row.broken_connections) for row in rows)} | {sum(row.left for row in rows)} | {share} "
            f"| {max((row.longest_gap_s for row in rows), default=0):.1f} s |"
        )
    return "\n".join(lines)
