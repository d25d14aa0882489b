"""What it costs to put one event on the wire, in every dialect: the part of the gateway's work that every token pays.

python -m benchmarks.encoding
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from protocols import anthropic_messages, llamacpp_native, openai_chat, openai_completions, openai_responses
from protocols.codec import Call, Codec, Stamp, frame_feed
from protocols.events import (
    Event,
    Finished,
    Frame,
    Progress,
    ReasoningDelta,
    Started,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallEnded,
    ToolCallStarted,
    Usage,
)

GOAL_US = 20.0
STAMP = Stamp("0123456789abcdef", 1_700_000_000)

MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT = {"model": "m", "messages": MESSAGES}
THINKING = {"thinking": {"type": "enabled", "budget_tokens": 1000}}


class Dialect(NamedTuple):
    """`plain` is a usual body; `full` one that asks for probabilities and progress, where the dialect has them."""

    name: str
    codec: Codec[Any]
    plain: dict[str, Any]
    full: dict[str, Any]
    chats: bool = True


DIALECTS = (
    Dialect("chat", openai_chat.CODEC, CHAT, CHAT | {"logprobs": True, "top_logprobs": 2, "return_progress": True}),
    Dialect(
        "completions",
        openai_completions.CODEC,
        {"model": "m", "prompt": "Hi"},
        {"model": "m", "prompt": "Hi", "logprobs": 2, "return_progress": True},
        chats=False,
    ),
    Dialect(
        "responses",
        openai_responses.CODEC,
        {"model": "m", "input": "Hi"},
        {"model": "m", "input": "Hi", "top_logprobs": 2},
    ),
    Dialect("messages", anthropic_messages.CODEC, CHAT | {"max_tokens": 9} | THINKING, CHAT | {"max_tokens": 9}),
    Dialect(
        "native",
        llamacpp_native.COMPLETION,
        {"prompt": "Hi"},
        {"prompt": "Hi", "n_probs": 2, "return_progress": True},
        chats=False,
    ),
)

START = Frame((Started(1000, 900),))
END = Frame((Finished("stop", Usage(1000, 200, 900)),))
TOP = (TokenLogprob(5, b" token", -0.25), TokenLogprob(6, b" other", -1.5))
OPEN_CALL = Frame((ToolCallStarted(0, "call_a", "get_weather"), ToolCallDelta(0, '{"city":"')))


def frame(*events: Event) -> Frame:
    return Frame(events, (7,))


class Kind(NamedTuple):
    """`repeated` is what is timed, after `before`; the cost is that of one of its frames' events."""

    name: str
    repeated: Callable[[int], Sequence[Frame]]
    before: tuple[Frame, ...] = (START,)
    full: bool = False
    in_chats_only: bool = False


def _calls(count: int) -> list[Frame]:
    events: list[Event] = []
    for index in range(count // 2):
        events += [ToolCallStarted(index, f"call_{index}", "get_weather"), ToolCallEnded(index)]
    return [frame(event) for event in events]


KINDS = (
    Kind("text", lambda count: [frame(TextDelta(" token"))] * count),
    Kind(
        "text with probabilities",
        lambda count: [frame(TextDelta(" token", (TokenLogprob(5, b" token", -0.25, TOP),)))] * count,
        full=True,
    ),
    Kind("thinking", lambda count: [frame(ReasoningDelta(" token"))] * count),
    Kind(
        "arguments", lambda count: [frame(ToolCallDelta(0, " token"))] * count, (START, OPEN_CALL), in_chats_only=True
    ),
    Kind("call begun or ended", _calls, in_chats_only=True),
    Kind("progress", lambda count: [Frame((Progress(512, 0, 1000, 1.5),))] * count, full=True),
)


def call(dialect: Dialect, full: bool) -> Call[Any]:
    body = dialect.full if full else dialect.plain
    return dialect.codec.decode(json.dumps({**body, "stream": True}).encode(), "r1")


def cost_us(dialect: Dialect, kind: Kind, count: int, repeats: int) -> float:
    """Microseconds for one event: the median of `repeats` streams of `count` of them."""
    wanted = call(dialect, kind.full)
    frames = kind.repeated(count)
    times = []
    for _ in range(repeats):
        feed = frame_feed(dialect.codec.encoder(wanted, STAMP))
        for first in kind.before:
            feed(first)
        times.append(_timed(feed, frames))
    return statistics.median(times) / len(frames) * 1e6


def stream_us(dialect: Dialect, count: int, repeats: int) -> float:
    """The same for what every stream has once: its encoder, its start and its end."""
    wanted = call(dialect, full=False)

    def one(_: Frame) -> None:
        feed = frame_feed(dialect.codec.encoder(wanted, STAMP))
        feed(START)
        feed(END)

    times = [_timed(one, [START] * (count // 10)) for _ in range(repeats)]
    return statistics.median(times) / (count // 10) * 1e6


def _timed(feed: Callable[[Frame], object], frames: Sequence[Frame]) -> float:
    gc.collect()
    gc.disable()
    try:
        began = time.perf_counter()
        for item in frames:
            feed(item)
        return time.perf_counter() - began
    finally:
        gc.enable()


def table(count: int, repeats: int) -> list[list[str]]:
    rows = [["µs per event", *(dialect.name for dialect in DIALECTS)]]
    for kind in KINDS:
        row = [kind.name]
        for dialect in DIALECTS:
            skipped = kind.in_chats_only and not dialect.chats
            row.append("–" if skipped else _shown(cost_us(dialect, kind, count, repeats)))
        rows.append(row)
    rows.append(["a stream's start and end", *(f"{stream_us(dialect, count, repeats):.0f}" for dialect in DIALECTS)])
    return rows


def _shown(cost: float) -> str:
    return f"{cost:.1f}" if cost < GOAL_US else f"**{cost:.1f}**"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=5000, help="events per stream")
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    head, *rows = table(args.count, args.repeats)
    print(f"Median of {args.repeats} streams of {args.count} events. The goal is {GOAL_US:.0f} µs; bold is above it.\n")
    for row in (head, ["---"] * len(head), *rows):
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
