"""llama.cpp as a `Backend`: loads the model, turns requests into token sequences, and streams what the engine makes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import msgspec

from backends.adapters import adapter_set
from backends.base import BackendStats, ModelCard, Unsupported
from backends.grammar.tool_grammar import demands_grammar, with_tool_grammar
from backends.limits import check_limits
from backends.llamacpp.bindings import Model, Tokens
from backends.llamacpp.embedding_inputs import rerank_inputs
from backends.llamacpp.engine import Engine
from backends.llamacpp.loading import Generating, Loaded, load
from backends.llamacpp.logprobs import check_options
from backends.llamacpp.parameters import is_quick, sampler_spec
from backends.llamacpp.sampler import SamplerSpec
from backends.llamacpp.sequence import Generation
from backends.llamacpp.settings import LlamaCppSettings
from backends.llamacpp.slot_store import SlotStore, erase
from backends.output.selection import ParserSpec
from backends.pooling import Matrix, embedding_inputs
from backends.prompts import Prepared, prompt_chars
from backends.vocabulary import mixed_tokens, text_of
from protocols.calls import (
    Adapter,
    Embedding,
    EmbeddingRequest,
    Piece,
    Relevance,
    RerankRequest,
    SlotFile,
    SlotState,
)
from protocols.errors import ContextOverflow, InvalidRequest, NotSupported, ServingError, Unavailable
from protocols.events import Echo, Finished, Frame, SpeculationKind
from protocols.request import ChatPrompt, LoraScale, Request, TokenBias
from protocols.sink import Sink

T = TypeVar("T")

_INLINE_SIZE = 4096
"""Prompts of so many characters are tokenised in a millisecond or two; larger ones leave the event loop."""


class LlamaCppBackend(Unsupported):
    def __init__(self, settings: LlamaCppSettings) -> None:
        self._settings = settings
        self._loaded: Loaded | None = None
        self._engine: Engine | None = None
        self._tokenizers = ThreadPoolExecutor(2, thread_name_prefix="llamacpp-tokenize")
        self._scales = tuple(LoraScale(id, adapter.scale) for id, adapter in enumerate(settings.adapters))
        self._closed = False

    async def start(self) -> ModelCard:
        self._loaded = loaded = await asyncio.to_thread(load, self._settings)
        runner = None if loaded.generating is None else loaded.generating.runner
        self._engine = Engine(runner, loaded.embedder, context_shift=self._settings.context_shift)
        self._engine.start()
        return loaded.card

    def card(self) -> ModelCard:
        return self._alive()[0].card

    async def generate(self, request: Request, sink: Sink | None = None) -> AsyncGenerator[Frame, None]:
        loaded, engine, generating = self._generating()
        _check_slots(request, loaded.card.slots)
        check_limits(request)
        check_options(request.logprobs)
        scales = self._scales if request.lora is None else request.lora
        adapters = adapter_set(scales, len(generating.adapters))
        prepared = await self._prepare(request)
        prompt = prepared.tokens
        if len(prompt) >= loaded.card.context_length:
            raise ContextOverflow.of(len(prompt), loaded.card.context_length)
        sampling = await self._sampling(request, prepared.parser)
        speculation = self._speculation(request)
        echo = (
            await self._aside(partial(_echo, loaded.model, prompt, sampling, speculation), len(prompt))
            if request.extras.echo
            else None
        )
        stream = engine.submit(
            Generation(
                id=request.id,
                prompt=prompt,
                sampling=sampling,
                max_tokens=request.max_tokens,
                stop=request.stop,
                ignore_eos=request.ignore_eos,
                resume=loaded.tokenizer.checked(request.resume, "resume"),
                stop_indent=request.stop_indent,
                max_predict_ms=request.max_predict_ms,
                n=request.n,
                first_choice=request.choice,
                slot=request.slot,
                adapters=adapters,
                extras=request.extras,
                echo=echo,
                speculate=speculation != "off",
                parser=prepared.parser,
                shown=prepared.shown,
            ),
            sink,
        )
        open_choices = request.n
        try:
            while open_choices:
                item = await stream.items.get()
                if isinstance(item, ServingError):
                    raise item
                yield item
                if item.events and isinstance(item.events[-1], Finished):
                    open_choices -= 1
        finally:
            engine.cancel(stream)

    async def count_tokens(self, request: Request) -> int:
        self._generating()
        return len(await self._tokens(request))

    async def embed(self, request: EmbeddingRequest) -> list[Embedding]:
        loaded, engine = self._alive()
        if "embed" not in loaded.card.tasks:
            return await super().embed(request)
        if request.pooled and loaded.card.pooling == "none":
            raise InvalidRequest("This model does not pool: it has no vector for a whole input", param="model")
        chars = sum(prompt_chars(prompt) for prompt in request.inputs)
        inputs = await self._aside(partial(embedding_inputs, loaded.model, request, loaded.input_length), chars)
        # "Pooling none is never normalised."
        vectors = await _vectors(engine, inputs, -1 if loaded.card.pooling == "none" else request.normalize)
        return [
            Embedding(matrix.astype("<f4").tobytes(), matrix.shape[1], len(tokens))
            for matrix, tokens in zip(vectors, inputs, strict=True)
        ]

    async def rerank(self, request: RerankRequest) -> list[Relevance]:
        loaded, engine = self._alive()
        if "rerank" not in loaded.card.tasks:
            return await super().rerank(request)
        chars = sum(len(request.query) + len(document) for document in request.documents)
        inputs = await self._aside(partial(rerank_inputs, loaded.model, request, loaded.input_length), chars)
        scores = await _vectors(engine, inputs, -1)
        return [Relevance(float(row[0, 0]), len(tokens)) for row, tokens in zip(scores, inputs, strict=True)]

    async def tokenize(self, *parts: str | int, add_special: bool = False, parse_special: bool = True) -> list[Piece]:
        loaded, _ = self._alive()

        def pieces() -> list[Piece]:
            tokens = mixed_tokens(loaded.model, parts, "content", add_special=add_special, parse_special=parse_special)
            return [Piece(token, loaded.model.special_piece(token)) for token in tokens.tolist()]

        return await self._aside(pieces, sum(len(part) if isinstance(part, str) else 1 for part in parts))

    async def detokenize(self, tokens: Sequence[int]) -> str:
        loaded, _ = self._alive()

        def text() -> str:
            return text_of(loaded.model, loaded.tokenizer.checked(tokens, "tokens"))

        return await self._aside(text, len(tokens))

    async def apply_template(self, prompt: ChatPrompt) -> str:
        loaded, _, _ = self._generating()
        return await self._aside(partial(loaded.tokenizer.templates.render, prompt), prompt_chars(prompt))

    def adapters(self) -> list[Adapter]:
        loaded, _ = self._alive()
        files = () if loaded.generating is None else loaded.generating.adapters
        scales = {item.id: item.scale for item in self._scales}
        return [
            Adapter(id, settings.path, scales.get(id, 0.0), adapter.task_name, adapter.prompt_prefix)
            for id, (settings, adapter) in enumerate(zip(self._settings.adapters, files, strict=True))
        ]

    async def set_adapters(self, scales: Sequence[LoraScale]) -> None:
        _, _, generating = self._generating()
        self._scales = tuple(LoraScale(id, scale) for id, scale in adapter_set(scales, len(generating.adapters)))

    async def slots(self) -> list[SlotState]:
        _, engine, _ = self._generating()
        return await engine.ask(lambda runner: runner.slot_states())

    async def save_slot(self, slot: int, filename: str) -> SlotFile:
        store, engine = self._slot_store(slot)
        return await store.save(engine, slot, filename)

    async def restore_slot(self, slot: int, filename: str) -> SlotFile:
        store, engine = self._slot_store(slot)
        return await store.restore(engine, slot, filename)

    async def erase_slot(self, slot: int) -> int:
        _, engine, _ = self._generating()
        _check_slot(slot, self._settings.slots)
        return await erase(engine, slot)

    def stats(self) -> BackendStats:
        if self._engine is None:
            return BackendStats(slots=self._settings.slots, running=0, waiting=0)
        return self._engine.stats()

    async def check_health(self) -> None:
        self._alive()

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._engine is not None:
            self._engine.stop("The model is being shut down.")
            await asyncio.to_thread(self._engine.join)
        # The model must outlive whoever is still tokenising with it.
        await asyncio.to_thread(self._tokenizers.shutdown)
        if self._loaded is not None:
            self._loaded.close()

    def _alive(self) -> tuple[Loaded, Engine]:
        if self._loaded is None or self._engine is None or self._closed:
            raise Unavailable("The model is not loaded.")
        if self._engine.failure is not None:
            raise Unavailable(self._engine.failure)
        return self._loaded, self._engine

    def _generating(self) -> tuple[Loaded, Engine, Generating]:
        loaded, engine = self._alive()
        if loaded.generating is None:
            raise NotSupported("This model does not generate text")
        return loaded, engine, loaded.generating

    def _slot_store(self, slot: int) -> tuple[SlotStore, Engine]:
        _, engine, generating = self._generating()
        _check_slot(slot, self._settings.slots)
        if generating.slot_store is None:
            raise NotSupported(
                "Slots can be saved and restored where the model's setting slot_save_path names a folder"
            )
        return generating.slot_store, engine

    async def _sampling(self, request: Request, parser: ParserSpec | None) -> SamplerSpec:
        """What `request` says about its tokens. Grammars and long lists take a while."""
        loaded, _ = self._alive()

        def spec() -> SamplerSpec:
            return sampler_spec(loaded.model, with_tool_grammar(request, parser), parser)

        quick = is_quick(request) and not demands_grammar(request)
        return await self._aside(spec, 0 if quick else _INLINE_SIZE + 1)

    def _speculation(self, request: Request) -> SpeculationKind:
        """ "Requests can turn it off, or n-grams on." """
        kind = self._settings.speculation.kind
        if request.speculate is None:
            return kind
        if not request.speculate:
            return "off"
        return "ngram" if kind == "off" else kind

    async def _prepare(self, request: Request) -> Prepared:
        """The prompt of `request`, as `count_tokens` and `generate` both see it."""
        loaded, _ = self._alive()
        return await self._aside(partial(loaded.tokenizer.prepare, request), prompt_chars(request.prompt))

    async def _tokens(self, request: Request) -> Tokens:
        return (await self._prepare(request)).tokens

    async def _aside(self, make: Callable[[], T], size: int) -> T:
        """What `make` returns. It runs on another thread if `size` says that it may take a while."""
        if size <= _INLINE_SIZE:
            return make()
        return await asyncio.get_running_loop().run_in_executor(self._tokenizers, make)


def _echo(model: Model, prompt: Tokens, spec: SamplerSpec, speculation: SpeculationKind) -> Echo:
    # Suppressed tokens are the model's, not the request's.
    given = [(token, bias) for token, bias in spec.biases.items() if token not in model.suppressed_tokens]
    biases = tuple(TokenBias(token, bias) for token, bias in given)
    sampling = msgspec.structs.replace(spec.params.to_sampling(), logit_bias=biases)
    return Echo(text_of(model, prompt), sampling, "" if spec.grammar is None else spec.grammar.gbnf, speculation)


async def _vectors(engine: Engine, inputs: Sequence[Tokens], normalize: int) -> list[Matrix]:
    call = engine.embed(inputs, normalize)
    try:
        return await call.answer
    finally:
        engine.cancel_call(call)


def _check_slots(request: Request, slots: int) -> None:
    if request.n > slots:
        raise InvalidRequest(f"This model produces at most {slots} choices per request", param="n")
    if request.slot.id is not None:
        _check_slot(request.slot.id, slots)


def _check_slot(id: int, slots: int) -> None:
    if not 0 <= id < slots:
        raise InvalidRequest(f"There is no slot {id}: this model has {slots}", param="id_slot")
