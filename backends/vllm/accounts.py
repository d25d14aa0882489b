"""Which requests run and which wait, and what was computed. vLLM tells little of it while it happens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from backends.base import BackendStats


class Run:
    """One choice of a request, from its submission to its end. `leads`: it counts the request's prompt."""

    def __init__(self, id: str, prompt_tokens: int, *, leads: bool) -> None:
        self.id = id
        self.prompt_tokens = prompt_tokens
        self.leads = leads
        self.generated = 0
        self.computed = False


class Accounts:
    """vLLM's scheduler takes the requests in their order, so those that run are the first `slots` there are."""

    def __init__(self, slots: int) -> None:
        self.kv_tokens = 0  # what the KV cache holds
        self._slots = slots
        self._runs: dict[Run, None] = {}
        self._inputs = 0  # of embeddings and rankings
        self._input_tokens = 0
        self._prompt = self._cached = self._generated = self._steps = 0

    @property
    def ids(self) -> list[str]:
        return [run.id for run in self._runs]

    @contextmanager
    def entered(self, run: Run) -> Iterator[None]:
        self._runs[run] = None
        try:
            yield
        finally:
            del self._runs[run]

    @contextmanager
    def pooling(self, tokens: int) -> Iterator[None]:
        self._inputs += 1
        self._input_tokens += tokens
        try:
            yield
            self._prompt += tokens
        finally:
            self._inputs -= 1
            self._input_tokens -= tokens

    def step(self) -> None:
        self._steps += 1

    def computed(self, run: Run, cached_tokens: int) -> None:
        run.computed = True
        if run.leads:
            self._prompt += run.prompt_tokens
            self._cached += cached_tokens

    def generated(self, run: Run, tokens: int) -> None:
        run.generated += tokens
        self._generated += tokens

    def stats(self) -> BackendStats:
        runs = list(self._runs)
        running, waiting = runs[: self._slots], runs[self._slots :]
        return BackendStats(
            slots=self._slots,
            running=len(running) + self._inputs,
            waiting=len(waiting),
            queued_prompt_tokens=sum(run.prompt_tokens for run in waiting if run.leads),
            uncached_tokens_queued=self._input_tokens + sum(run.prompt_tokens for run in runs if not run.computed),
            kv_tokens_used=min(sum(run.prompt_tokens + run.generated for run in running), self.kv_tokens),
            kv_tokens_capacity=self.kv_tokens,
            prompt_tokens_total=self._prompt,
            cached_tokens_total=self._cached,
            generated_tokens_total=self._generated,
            steps_total=self._steps,
        )
