"""What a step computes, who waits for whom, and who has to make room: decisions only, nothing is carried out here.

What following a common beginning is worth (SmolLM2-135M, 8 users arriving together with a system prompt of 1,079 tokens
and a short question of their own, one thread on a busy machine; CPU seconds until all have a first token, which is
what they wait for when the machine is theirs): 13.7 with one KV cache per slot and 9.9 with a common one, of which the
first user's own prompt took 8. Without sharing: 88.4 and 102.4.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np

from backends.adapters import NO_ADAPTERS, AdapterSet
from backends.llamacpp.sequence import Generation, Sequence
from backends.llamacpp.slots import Choice, Tokens, common_prefix
from backends.llamacpp.speculation import Drafter
from backends.llamacpp.streams import Stream


class Task:
    """One choice of a request, from its arrival to its end.

    It waits without a slot, then holds one: first perhaps following another task, whose computed prompt it will copy,
    then active. A paused task has been active, and waits again. `ticket` counts arrivals.
    """

    def __init__(self, ticket: int, sequence: Sequence, stream: Stream) -> None:
        self.ticket = ticket
        self.sequence = sequence
        self.stream = stream
        self.choice: Choice | None = None
        self.leader: Task | None = None
        self.drafter: Drafter | None = None  # if its next tokens are to be guessed
        self.promised = 0  # as many of the leader's tokens as are of use
        self.begun = False  # has been active before
        self.cached_tokens = 0  # of the prompt, when it began
        self.uncached = 0  # tokens to compute, as far as could be told when it began to wait
        self.done = False

    @property
    def generation(self) -> Generation:
        return self.sequence.generation

    @property
    def adapters(self) -> AdapterSet:
        return self.sequence.generation.adapters

    @property
    def active(self) -> bool:
        return self.choice is not None and self.leader is None

    @property
    def prefilling(self) -> bool:
        return self.active and self.sequence.uncomputed > 0

    @property
    def remaining(self) -> int:
        """Tokens to compute before its next one is drawn."""
        if self.choice is None:
            return self.uncached
        return self.sequence.uncomputed if self.leader is None else len(self.sequence.tokens) - self.promised


class Work(msgspec.Struct, frozen=True):
    """One task's share of a step: tokens to compute next, and whether the last one's logits are needed.

    The last `guesses` of them may be wrong. Each needs its own logits, as does the token before them.
    """

    task: Task
    tokens: Tokens
    logits: bool
    guesses: int = 0

    @property
    def outputs(self) -> int:
        """How many of the last tokens need logits."""
        return 1 + self.guesses if self.logits else 0


def plan(tasks: Iterable[Task], capacity: int, prefill_chunk: int, adapters: AdapterSet = NO_ADAPTERS) -> list[Work]:
    """One token of everyone who generates, and then prompts, first come first served; only tasks with `adapters`.

    In the order of slots: with one KV cache per slot, llama.cpp computes only runs of neighbouring sequences together,
    and sees them as neighbours only in ascending order.
    """
    work: list[Work] = []
    prompts: list[Task] = []
    others_generate = False
    for task in tasks:
        if not task.active:
            continue
        if task.adapters != adapters:
            others_generate = others_generate or not task.sequence.uncomputed
        elif task.sequence.uncomputed:
            prompts.append(task)
        else:
            work.append(Work(task, np.array([task.sequence.next_token], np.int32), logits=True))
    room = capacity - len(work)
    if work or others_generate:
        room = min(room, prefill_chunk)
    prompts.sort(key=lambda task: task.ticket)
    for task in prompts:
        if room <= 0:
            break
        sequence = task.sequence
        start = sequence.slot.length
        tokens = sequence.tokens[start : start + room]
        work.append(Work(task, tokens, logits=len(tokens) == sequence.uncomputed))
        room -= len(tokens)
    work.sort(key=lambda part: part.task.sequence.slot.id)
    return work


def shrunk(work: list[Work]) -> list[Work] | None:
    """The same with prompts cut in half: less room is needed and nobody who generates waits. None at the smallest."""
    if all(len(part.tokens) == 1 for part in work):
        return None
    return [
        part
        if len(part.tokens) == 1
        else msgspec.structs.replace(part, tokens=part.tokens[: len(part.tokens) // 2], logits=False)
        for part in work
    ]


def without_guesses(work: list[Work]) -> list[Work] | None:
    """The same with nothing that may be wrong. None if there was nothing of it."""
    if not any(part.guesses for part in work):
        return None
    return [
        msgspec.structs.replace(part, tokens=part.tokens[: len(part.tokens) - part.guesses], guesses=0) for part in work
    ]


def leader(task: Task, tasks: Iterable[Task], within_reach: int, min_copy: int) -> tuple[Task, int] | None:
    """Who is about to compute much of what `task` needs, and how much of it; None when waiting is not worth it.

    Only of those who came earlier and compute already. So nobody waits in a circle, or for work that would not have
    gone first anyway: prompts are computed in the order of arrival.
    """
    best: tuple[Task, int] | None = None
    needed = task.sequence.tokens[:-1]  # the last one is always computed again
    for other in tasks:
        if other.ticket >= task.ticket or not other.prefilling or other.adapters != task.adapters:
            continue
        promised = common_prefix(other.sequence.tokens, needed)
        if promised >= within_reach + min_copy and (best is None or promised > best[1]):
            best = (other, promised)
    return best


def uncached(task: Task, others: Iterable[Task], within_reach: int) -> int:
    """How many tokens of `task` are neither `within_reach` nor going to be computed by any of `others` either.

    An estimate: until it runs, what is there may go, and more may come. The last token is always computed.
    """
    tokens = task.sequence.tokens
    for other in others:
        if other.adapters == task.adapters:
            within_reach = max(within_reach, common_prefix(other.sequence.tokens, tokens))
    return len(tokens) - min(within_reach, len(tokens) - 1)


def shift_range(task: Task, length: int, context_length: int, keep_more: int) -> tuple[int, int]:
    """Which of `length` tokens a context shift drops: (how many stay in front, how many go)."""
    wish = task.generation.slot
    keep = wish.keep if wish.keep >= 0 else len(task.generation.prompt)
    keep = max(min(keep + keep_more, context_length - 4), 0)
    left = length - keep
    return keep, max(min(wish.discard or left // 2, left - 1), 1)


def still_following(task: Task) -> bool:
    """Whether the leader is alive, and has not computed yet what it promised."""
    head = task.leader
    return head is not None and head.prefilling and head.sequence.slot.length < task.promised


def youngest(tasks: Iterable[Task]) -> Task | None:
    """Who makes room when there is none: the task that came last, of those that hold any."""
    return max((task for task in tasks if task.active), key=lambda task: task.ticket, default=None)
