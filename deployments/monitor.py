"""What is counted of requests and read of models, for `/metrics`, `/api/status` and whoever else collects it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence, Set

import msgspec

from deployments import metrics
from deployments.metrics import Registry, Sample, Sink
from deployments.model_states import ModelState, ModelStates
from deployments.models import ModelEntry, ModelPool
from deployments.request_log import GENERATE, OK, Record
from protocols.card import BackendStats
from protocols.errors import ModelNotFound
from protocols.llamacpp_native.metrics import Totals, text


class Replica(msgspec.Struct, frozen=True):
    """One on the page: what `BackendStats` says, as far as people want to know it."""

    name: str
    slots: int
    running: int
    waiting: int
    kv_tokens: int
    kv_tokens_used: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


class Model(msgspec.Struct, frozen=True):
    """`state` is "ready", "loading" or "asleep"; `active` are the generations of this gateway alone.

    `replicas` are those that answered, which may be fewer than are `running`.
    """

    id: str
    names: tuple[str, ...]
    state: str
    running: int
    starting: int
    active: int
    replicas: tuple[Replica, ...]


class Status(msgspec.Struct, frozen=True):
    """The body of `/api/status`. `up_s` is how long this process is up; totals of replicas are since they started."""

    up_s: float
    models: tuple[Model, ...]


class Monitor:
    """Belongs to one gateway. `sinks` get what its own registry gets."""

    def __init__(self, pool: ModelPool, *sinks: Sink) -> None:
        self._pool = pool
        self._registry = Registry()
        self._sinks: tuple[Sink, ...] = (self._registry, *sinks)
        self._states = ModelStates(pool)
        self._open: set[Record] = set()
        self._labels: dict[str, str] = {}
        self._totals: dict[str, Totals] = {}
        self._started = time.monotonic()

    # --- requests -----------------------------------------------------------------

    def opened(self, record: Record) -> None:
        self._open.add(record)

    def closed(self, record: Record) -> str:
        """Counts it. Returns the label of its model."""
        self._open.discard(record)
        model = self._label(record.model)
        if record.operation or record.outcome != OK:
            self._count(record, model)
        return model

    def _count(self, record: Record, model: str) -> None:
        of = (model, record.dialect)
        self._add(metrics.REQUESTS, (*of, record.outcome), 1)
        if record.rejected:
            self._add(metrics.REJECTIONS, (*of, record.outcome), 1)
        if record.moves:
            self._add(metrics.MOVES, of, record.moves)
        if record.operation != GENERATE:
            return
        self._add(metrics.DURATION, of, record.age_s)
        if record.queue_wait_s is None:
            return  # no engine had it
        self._add(metrics.QUEUE_WAIT, of, record.queue_wait_s)
        self._add(metrics.PROMPT_TOKENS, of, record.prompt_tokens)
        self._add(metrics.CACHED_TOKENS, of, record.cached_tokens)
        self._add(metrics.OUTPUT_TOKENS, of, record.output_tokens)
        if record.prompt_tokens:
            self._add(metrics.HIT_RATIO, of, record.cached_tokens / record.prompt_tokens)
        if record.first_token_s is not None:
            self._add(metrics.FIRST_TOKEN, of, record.first_token_s)
        for gap_s in record.gaps_s:
            self._add(metrics.INTER_TOKEN, of, gap_s)
        totals = self._totals.setdefault(model, Totals())
        totals.prompt_tokens += record.prefill_tokens
        totals.prompt_s += record.prefill_s
        totals.output_tokens += record.output_tokens
        totals.output_s += record.decode_s
        totals.longest = max(totals.longest, record.longest)

    def _add(self, metric: metrics.Metric, labels: tuple[str, ...], value: float) -> None:
        for sink in self._sinks:
            sink.add(metric, labels, value)

    def _label(self, name: str) -> str:
        """The id of the model that `name` means, or `UNKNOWN`; "" where none was named."""
        if not name:
            return ""
        label = self._labels.get(name)
        if label is None:
            label = next((entry.of or entry.id for entry in self._pool.models() if entry.id == name), None)
            if label is None:
                return metrics.UNKNOWN  # and not kept: there is no end of such names
            self._labels[name] = label
        return label

    def _active(self) -> Counter[tuple[str, str]]:
        """Generations by the labels of model and dialect."""
        generations = (record for record in self._open if record.operation == GENERATE)
        return Counter((self._label(record.model), record.dialect) for record in generations)

    # --- for those who look ---------------------------------------------------------

    def gauges(self) -> list[Sample]:
        """Those that this gateway knows without asking a replica."""
        active = [Sample(metrics.ACTIVE, labels, count) for labels, count in sorted(self._active().items())]
        entries = [entry for entry in self._pool.models() if not entry.of]
        running = [Sample(metrics.REPLICAS, (entry.id, "running"), entry.replicas) for entry in entries]
        starting = [Sample(metrics.REPLICAS, (entry.id, "starting"), entry.starting) for entry in entries]
        return [*active, *running, *starting]

    async def metrics(self, models: Set[str] | None) -> bytes:
        """In Prometheus's format: all, or those about `models` and about none."""
        of_replicas = [
            sample
            for state in await self._states.look()
            for replica in state.replicas or ()
            for sample in replica_samples(state.entry.id, replica.replica, replica.stats)
        ]
        return self._registry.text([*self.gauges(), *of_replicas], models)

    async def llamacpp_metrics(self, name: str, seen: Sequence[ModelEntry]) -> bytes:
        """Those of one model of `seen`, in llama.cpp's names. Raises `ModelNotFound`."""
        entry = next((entry for entry in seen if entry.id == name), None)
        if entry is None:
            raise ModelNotFound.of(name, [entry.id for entry in seen])
        model = entry.of or entry.id
        states = {state.entry.id: state.replicas or () for state in await self._states.look()}
        return text([replica.stats for replica in states.get(model, ())], self._totals.get(model, Totals()))

    def llamacpp_totals(self) -> Totals:
        """Of all models together, and of names that are none."""
        return Totals.of(self._totals.values())

    async def status(self, seen: Sequence[ModelEntry]) -> Status:
        """Of the models in `seen`. One that is seen only by other names bears the first of them."""
        ids = {entry.id for entry in seen}
        active: Counter[str] = Counter()
        for (model, _), count in self._active().items():
            active[model] += count
        models = []
        for state in await self._states.look():
            if names := [name for name in (state.entry.id, *state.names) if name in ids]:
                models.append(_shown(state, names, active[state.entry.id]))
        return Status(round(time.monotonic() - self._started, 1), tuple(models))


def replica_samples(model: str, replica: str, stats: BackendStats) -> Iterator[Sample]:
    of = (model, replica)
    yield Sample(metrics.SLOTS, of, stats.slots)
    yield Sample(metrics.SLOTS_BUSY, of, stats.running)
    yield Sample(metrics.WAITING, of, stats.waiting)
    yield Sample(metrics.KV_TOKENS, of, stats.kv_tokens_capacity)
    yield Sample(metrics.KV_TOKENS_USED, of, stats.kv_tokens_used)


def _shown(state: ModelState, names: Sequence[str], active: int) -> Model:
    entry = state.entry
    if not entry.ready:
        word = "loading"
    elif entry.replicas:
        word = "ready"
    else:
        word = "loading" if entry.starting else "asleep"
    return Model(
        names[0],
        tuple(names[1:]),
        word,
        entry.replicas,
        entry.starting,
        active,
        tuple(
            Replica(
                replica.replica,
                stats.slots,
                stats.running,
                stats.waiting,
                stats.kv_tokens_capacity,
                stats.kv_tokens_used,
                stats.prompt_tokens_total,
                stats.cached_tokens_total,
                stats.generated_tokens_total,
            )
            for replica in state.replicas or ()
            for stats in (replica.stats,)
        ),
    )
