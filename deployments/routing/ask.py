"""What a gateway asks a replica before it routes a request, and what the replica answers: hashes and counts only."""

from __future__ import annotations

import enum

import msgspec

VERSION = 1
"""Of the messages and of how keys are made. A replica of another version is routed to by its load alone."""


class AskFlag(enum.IntFlag):
    """What else a replica says in its answer."""

    DRAINING = 1
    """It is going away: only as a last resort."""
    FULL = 2
    """It has as many requests as it takes."""
    ADAPTER_COLD = 4
    """It would have to load the request's adapter first."""


class Ask(msgspec.Struct, frozen=True, array_like=True):
    """Which of these prefixes do you hold? `rungs` root first, at most 24; `adapter` 0: none."""

    version: int
    rungs: tuple[int, ...]
    adapter: int = 0


class AskReply(msgspec.Struct, frozen=True, array_like=True):
    """`depth`: how many of the asked rungs, counted from the root, are held (0: none).

    `queued_tokens`: uncached prompt tokens of requests without a first token yet. `ongoing`: requests. `prefill_rate`:
    tokens per second (0: not known yet). `calibration`: how much of what it believes to hold its engine has really
    found, in percent. `generation` changes when all is forgotten.
    """

    version: int
    generation: int
    depth: int
    queued_tokens: int
    ongoing: int
    flags: int = 0
    prefill_rate: int = 0
    calibration: int = 100


class Intent(msgspec.Struct, frozen=True, array_like=True):
    """Sent to the replica a request was routed to, ahead of the request: others that ask meanwhile see it in the queue.

    `leaf` is the last rung of the request, `anchor` the one its owners are drawn by. `off_primary`: it went to another
    replica than its first owner, so other gateways would not look for it there (tier C's digest tells them).
    """

    version: int
    leaf: int
    anchor: int
    uncached_tokens: int
    off_primary: bool


class DigestPull(msgspec.Struct, frozen=True, array_like=True):
    """Which requests came to you off their first owner since position `since`?

    `replicas`: how many the model has. Where they are many, each says less often how it is (`Tracker.stats`).
    """

    version: int
    since: int
    replicas: int


class Digest(msgspec.Struct, frozen=True, array_like=True):
    """Requests that landed off their first owner since `since`, as (anchor, leaf); at most 200, the newest.

    `position` is what to ask from the next time.
    """

    version: int
    generation: int
    position: int
    landed: tuple[tuple[int, int], ...]


class ToReplica(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message beside the frames, on a gateway's connection. A map: what a later version adds is passed over.

    `number` comes back with the answer.
    """

    number: int = 0
    ask: Ask | None = None
    intent: Intent | None = None
    pull: DigestPull | None = None


class ToGateway(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a replica answers, likewise."""

    number: int
    reply: AskReply | None = None
    digest: Digest | None = None
