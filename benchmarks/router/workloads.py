"""What the simulated clients send: requests with their prompts as chains of hash blocks.

A block stands for `block_tokens` tokens and for everything before them: two prompts share a block if and only if they
are the same up to its end. Traces come that way; generated prompts are made so by `Chains`.
"""

from __future__ import annotations

import functools
import itertools
import json
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.router import generated

TRACES = Path(__file__).parents[3] / "shared" / "data" / "traces"
TRACE_FILES = {
    "conversation": "mooncake_conversation_trace.jsonl",
    "synthetic": "mooncake_synthetic_trace.jsonl",
    "gmi": "lmbench_gmi_trace.jsonl",
}
MOONCAKE_BLOCK = 512
GMI_BLOCKS_PER_RUNG = 8
GMI_BLOCK = 34 * GMI_BLOCKS_PER_RUNG
GMI_SPAN_S = 1200.0
"""The day of the gmi trace is squeezed to this, so that its few requests meet each other."""


class Request(msgspec.Struct, frozen=True):
    """`cacheable`: tokens an infinite cache, shared by all replicas, would have. `parent`: the turn before, if any.

    `message_ends`: blocks at which a message ends, rising. `session` is the same for all turns of a conversation.
    """

    index: int
    at: float
    tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    message_ends: tuple[int, ...]
    session: int
    parent: int | None
    cacheable: int


class Workload(msgspec.Struct, frozen=True):
    name: str
    block_tokens: int
    requests: tuple[Request, ...]

    @property
    def span_s(self) -> float:
        return self.requests[-1].at

    @property
    def tokens(self) -> int:
        return sum(request.tokens for request in self.requests)

    @property
    def bound(self) -> float:
        """Token hit rate of an infinite cache that all replicas share."""
        return sum(request.cacheable for request in self.requests) / self.tokens

    def cached(self, request: Request, blocks: int) -> int:
        """Tokens saved by `blocks` of the prompt being there: the last token is always computed."""
        return min(blocks * self.block_tokens, request.tokens - 1)


class Raw(msgspec.Struct, frozen=True):
    """A request as a trace has it. A trace names no sessions and no messages: these are found from what is shared."""

    at: float
    tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    message_ends: tuple[int, ...] | None = None
    session: int | None = None
    is_follow_up: bool = False


def workload(name: str, block_tokens: int, raws: Iterable[Raw]) -> Workload:
    """Orders the requests and works out what each shares with those before it.

    A trace has no messages, but a message ended wherever two of its prompts part, or one of them ends.
    """
    last_with: dict[int, int] = {}
    last_of_session: dict[int, int] = {}
    requests: list[Request] = []
    raws = sorted(raws, key=lambda raw: raw.at)
    common, last_of_messages = _blocks_of_most(raws), _last_of_messages(raws, block_tokens)
    for index, raw in enumerate(raws):
        shared = 0
        for block in raw.blocks:
            if block not in last_with:
                break
            shared += 1
        before = last_with[raw.blocks[shared - 1]] if shared else None
        ends = raw.message_ends
        if ends is None:
            ends = tuple(n for n, block in enumerate(raw.blocks, 1) if block in last_of_messages)
        if raw.session is not None:
            session = raw.session
            parent = last_of_session.get(session) if raw.is_follow_up else None
        else:
            parent = before if shared and raw.blocks[shared - 1] not in common else None
            session = index if parent is None else requests[parent].session
        last_of_session[session] = index
        cacheable = min(shared * block_tokens, raw.tokens - 1)
        requests.append(
            Request(index, raw.at, raw.tokens, raw.output_tokens, raw.blocks, ends, session, parent, cacheable)
        )
        for block in raw.blocks:
            last_with[block] = index
    return Workload(name, block_tokens, tuple(requests))


def _blocks_of_most(raws: Sequence[Raw]) -> set[int]:
    """Blocks in more than 1 % of the prompts: shared by all the world, so no sign of one conversation."""
    counts: dict[int, int] = {}
    for raw in raws:
        for block in raw.blocks:
            counts[block] = counts.get(block, 0) + 1
    return {block for block, count in counts.items() if count > max(0.01 * len(raws), 20)}


def _last_of_messages(raws: Sequence[Raw], block_tokens: int) -> set[int]:
    """Blocks after which prompts part, and the last whole block of each."""
    following: dict[int, set[int]] = {}
    last: set[int] = set()
    for raw in raws:
        for block, next_block in itertools.pairwise(raw.blocks):
            following.setdefault(block, set()).add(next_block)
        whole = min(raw.tokens // block_tokens, len(raw.blocks))
        last.update(raw.blocks[whole - 1 : whole])
    return last | {block for block, others in following.items() if len(others) > 1}


# --- traces ----------------------------------------------------------------


def trace_path(name: str) -> Path | None:
    """The trace's file, None when it is not on this machine."""
    path = TRACES / TRACE_FILES[name]
    return path if path.exists() else None


def _lines(name: str) -> list[dict[str, Any]]:
    path = trace_path(name)
    if path is None:
        raise FileNotFoundError(TRACES / TRACE_FILES[name])
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def mooncake(name: str) -> list[Raw]:
    """Timestamps of these traces are in steps of 3 s: requests are spread over theirs, always in the same way."""
    rows = [row for row in _lines(name) if row["hash_ids"]]
    start, spread = rows[0]["timestamp"], random.Random(0)
    rows.sort(key=lambda row: float(row["timestamp"]))
    return [
        Raw(
            (row["timestamp"] - start) / 1000 + spread.random() * 3,
            max(1, row["input_length"]),
            row["output_length"],
            tuple(row["hash_ids"]),
        )
        for row in rows
    ]


def gmi() -> list[Raw]:
    """Its hashes are of single blocks and small: chained, and eight taken as one."""
    rows = sorted((row for row in _lines("gmi") if row["hash_ids"]), key=lambda row: int(row["timestamp"]))
    first, last = int(rows[0]["timestamp"]), int(rows[-1]["timestamp"])
    chains = generated.Chains()
    raws = []
    for row in rows:
        hashes = row["hash_ids"]
        groups = [tuple(hashes[k : k + GMI_BLOCKS_PER_RUNG]) for k in range(0, len(hashes), GMI_BLOCKS_PER_RUNG)]
        at = (int(row["timestamp"]) - first) / (last - first) * GMI_SPAN_S
        raws.append(Raw(at, max(1, row["input_length"]), row["output_length"], chains.of(groups)))
    return raws


def copies(raws: Sequence[Raw], count: int, span_s: float) -> list[Raw]:
    """`count` traces at once, each begun elsewhere and with blocks of its own but for the first, cut at `span_s`."""
    whole = max(raw.at for raw in raws)
    first, stride = raws[0].blocks[0], 1 + max(max(raw.blocks) for raw in raws)
    out = []
    for copy in range(count):
        for raw in raws:
            at = (raw.at + copy * whole / count) % whole
            if at <= span_s:
                blocks = tuple(block if block == first else block + copy * stride for block in raw.blocks)
                out.append(Raw(at, raw.tokens, raw.output_tokens, blocks))
    return out


def thinned(raws: Sequence[Raw], keep: int) -> list[Raw]:
    """One conversation in `keep`, told apart by the second block."""
    return [raw for raw in raws if raw.blocks[min(1, len(raw.blocks) - 1)] % keep == 0]


# --- by name ---------------------------------------------------------------


@functools.cache
def load(name: str) -> Workload:
    """`conversation`, `synthetic`, `gmi`, a generated one, or `conversation*4@1800`, `conversation/4`, `chat@300`.

    Raises `FileNotFoundError` when the trace is not on this machine.
    """
    base, _, span = name.partition("@")
    base, _, count = base.partition("*")
    base, _, keep = base.partition("/")
    limit = float(span) if span else float("inf")
    if base in TRACE_FILES:
        raws = gmi() if base == "gmi" else mooncake(base)
        block_tokens = GMI_BLOCK if base == "gmi" else MOONCAKE_BLOCK
    else:
        make: Callable[[], list[generated.Prompt]] = generated.WORKLOADS[base]
        block_tokens = generated.BLOCK_TOKENS
        raws = [
            Raw(p.at, p.tokens, p.output_tokens, p.blocks, p.message_ends, p.session, p.is_follow_up) for p in make()
        ]
    if keep:
        raws = thinned(raws, int(keep))
    raws = copies(raws, int(count), limit) if count else [raw for raw in raws if raw.at <= limit]
    return workload(name, block_tokens, raws)


def available(name: str) -> bool:
    base = name.partition("@")[0].partition("*")[0].partition("/")[0]
    return base not in TRACE_FILES or trace_path(base) is not None
