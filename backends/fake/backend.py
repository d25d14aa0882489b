"""The backend's interface over the scheduler, and what needs no step: embeddings, adapters, slots."""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Sequence

from backends.adapters import adapter_set
from backends.base import BackendStats, ModelCard, Unsupported
from backends.fake.answers import Generated, Scripted, Source
from backends.fake.scheduler import Scheduler, Stream
from backends.fake.settings import FakeFault, FakeSettings
from backends.fake.tokens import VOCAB_SIZE, prompt_length, vector
from protocols.calls import Adapter, Embedding, EmbeddingRequest, Relevance, RerankRequest, SlotFile, SlotState
from protocols.errors import ContextOverflow, InvalidRequest, NotSupported, ServingError
from protocols.events import Event, Frame
from protocols.request import LoraScale, Request
from protocols.sink import Sink


class FakeBackend(Unsupported):
    def __init__(self, settings: FakeSettings) -> None:
        self._settings = settings
        self._scripts: deque[list[Event | Frame]] = deque()
        self._faults_left = settings.fail_at.times if settings.fail_at else 0
        self._engine = Scheduler(settings)
        self._scales: tuple[LoraScale, ...] = ()
        self._saved: dict[str, int] = {}  # filename -> tokens

    def enqueue(self, script: Iterable[Event | Frame]) -> None:
        """The next call of `generate` that finds no earlier script answers exactly this, one frame per step."""
        self._scripts.append(list(script))

    async def start(self) -> ModelCard:
        self._engine.start()
        return self.card()

    def card(self) -> ModelCard:
        return ModelCard(
            self._settings.context_length,
            self._settings.slots,
            engine="fake",
            vocab_size=VOCAB_SIZE,
            tasks=self._settings.tasks,
            embedding_length=self._settings.embedding_length,
            pooling="mean",
        )

    def generate(self, request: Request, sink: Sink | None = None) -> AsyncGenerator[Frame, None]:
        # Taken at the call, not at the first frame: tests count on the order of their calls.
        script = self._scripts.popleft() if self._scripts else None
        return self._generate(request, script, self._take_fault() if script is None else None, sink)

    async def _generate(
        self, request: Request, script: list[Event | Frame] | None, fault: FakeFault | None, sink: Sink | None
    ) -> AsyncGenerator[Frame, None]:
        loop = self._engine.alive()
        if "generate" not in self._settings.tasks:
            raise NotSupported("This model does not generate text")
        prompt_tokens = prompt_length(request.prompt)
        source: Source
        if script is None:
            scales = self._scales if request.lora is None else request.lora
            adapters = adapter_set(scales, len(self._settings.adapters))
            source = Generated(request, prompt_tokens, self._settings, fault, loop.time, adapters)
        else:
            source = Scripted(script)
        stream = Stream(source, request, prompt_tokens, sink)
        try:
            self._engine.enter(stream, loop)
            while (item := await stream.made.get()) is not None:
                if isinstance(item, ServingError):
                    raise item
                yield item
        finally:
            self._engine.release(stream, loop)

    async def embed(self, request: EmbeddingRequest) -> list[Embedding]:
        self._engine.alive()
        if "embed" not in self._settings.tasks:
            return await super().embed(request)
        counts = [prompt_length(prompt) for prompt in request.inputs]
        self._count_inputs(counts, "input")
        vectors = [vector(prompt, self._settings.embedding_length) for prompt in request.inputs]
        return [
            Embedding(struct.pack(f"<{len(values)}f", *values), len(values), count)
            for values, count in zip(vectors, counts, strict=True)
        ]

    async def rerank(self, request: RerankRequest) -> list[Relevance]:
        self._engine.alive()
        if "rerank" not in self._settings.tasks:
            return await super().rerank(request)
        query = request.query.lower().split()
        words = [document.lower().split() for document in request.documents]
        counts = [len(query) + len(document) or 1 for document in words]
        self._count_inputs(counts, "documents")
        return [
            Relevance(sum(word in document for word in query) / (len(query) or 1), count)
            for document, count in zip(words, counts, strict=True)
        ]

    def _count_inputs(self, counts: Sequence[int], param: str) -> None:
        if not counts:
            raise InvalidRequest("There is nothing to compute: the list is empty", param=param)
        for index, count in enumerate(counts):
            if count > self._settings.context_length:
                raise ContextOverflow.of_item(index, count, self._settings.context_length, param)
        self._engine.prompt_tokens_total += sum(counts)

    async def count_tokens(self, request: Request) -> int:
        return prompt_length(request.prompt)

    def adapters(self) -> list[Adapter]:
        scales = {item.id: item.scale for item in self._scales}
        return [Adapter(id, path, scales.get(id, 0.0)) for id, path in enumerate(self._settings.adapters)]

    async def set_adapters(self, scales: Sequence[LoraScale]) -> None:
        self._scales = tuple(LoraScale(id, scale) for id, scale in adapter_set(scales, len(self._settings.adapters)))

    async def slots(self) -> list[SlotState]:
        states = [SlotState(id, self._settings.context_length, held) for id, held in enumerate(self._engine.held)]
        for stream in self._engine.running:
            states[stream.slot] = SlotState(
                stream.slot,
                self._settings.context_length,
                cached_tokens=stream.prompt_tokens + stream.generated,
                request=stream.request.id,
                prompt_tokens=stream.prompt_tokens,
                processed_tokens=stream.prompt_tokens,
                generated_tokens=stream.generated,
                max_tokens=stream.request.max_tokens,
                sampling=stream.request.sampling,
            )
        return states

    async def save_slot(self, slot: int, filename: str) -> SlotFile:
        """There are no files; names are remembered as long as the backend lives."""
        await self._idle_slot(slot)
        self._saved[filename] = self._engine.held[slot]
        return SlotFile(slot, filename, self._engine.held[slot], 4 * self._engine.held[slot], 0.0)

    async def restore_slot(self, slot: int, filename: str) -> SlotFile:
        await self._idle_slot(slot)
        self._engine.held[slot] = self._saved.get(filename, 0)
        if filename not in self._saved:
            raise InvalidRequest(f"There is no readable file {filename!r}", param="filename")
        return SlotFile(slot, filename, self._engine.held[slot], 4 * self._engine.held[slot], 0.0)

    async def erase_slot(self, slot: int) -> int:
        await self._idle_slot(slot)
        held, self._engine.held[slot] = self._engine.held[slot], 0
        return held

    async def _idle_slot(self, slot: int) -> None:
        if not 0 <= slot < self._settings.slots:
            raise InvalidRequest(f"There is no slot {slot}: this model has {self._settings.slots}", param="id_slot")
        engine = self._engine
        while engine.alive() and (busy := next((s for s in engine.running if s.slot == slot), None)) is not None:
            busy.gone = busy.gone or asyncio.Event()
            await busy.gone.wait()

    def stats(self) -> BackendStats:
        engine = self._engine
        return BackendStats(
            slots=self._settings.slots,
            running=len(engine.running),
            waiting=len(engine.waiting),
            queued_prompt_tokens=sum(stream.prompt_tokens for stream in engine.waiting),
            uncached_tokens_queued=sum(s.prompt_tokens for s in (*engine.waiting, *engine.prefilling)),
            kv_tokens_used=sum(stream.prompt_tokens + stream.generated for stream in engine.running),
            kv_tokens_capacity=self._settings.slots * self._settings.context_length,
            prompt_tokens_total=engine.prompt_tokens_total,
            cached_tokens_total=engine.cached_tokens_total,
            generated_tokens_total=engine.generated_tokens_total,
            steps_total=engine.steps_total,
        )

    async def check_health(self) -> None:
        self._engine.alive()

    async def aclose(self) -> None:
        self._engine.die("the backend is closed")

    def _take_fault(self) -> FakeFault | None:
        if self._faults_left == 0:
            return None
        if self._faults_left is not None:
            self._faults_left -= 1
        return self._settings.fail_at
