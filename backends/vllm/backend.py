"""vLLM as a `Backend`: prompts and answers are made here as for every engine, and vLLM computes the tokens."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from backends.adapters import AdapterSet, adapter_set
from backends.base import BackendStartError, BackendStats, ModelCard, Unsupported
from backends.grammar.tool_grammar import demands_grammar
from backends.pooling import Matrix, checked_lengths, embedding_inputs, normalized
from backends.prompts import Prepared, prompt_chars
from backends.vllm.accounts import Accounts, Run
from backends.vllm.answer import VllmAnswer
from backends.vllm.compat import (
    EngineDeadError,
    LoRARequest,
    PoolingParams,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
    TokensPrompt,
    VLLMClientError,
    tokens_input,
)
from backends.vllm.constraints import constrained, structured
from backends.vllm.loading import Loaded, load
from backends.vllm.params import check_request, for_choice, needs_replay, sampling_arguments
from backends.vllm.replay import ARGUMENT
from backends.vllm.settings import VllmSettings
from backends.vllm.streams import merged
from backends.vocabulary import Tokens, checked_tokens, mixed_tokens, text_of
from protocols.calls import Adapter, Embedding, EmbeddingRequest, Piece, Relevance, RerankRequest
from protocols.errors import (
    BackendLost,
    ContextOverflow,
    InternalError,
    InvalidRequest,
    NotSupported,
    ServingError,
    Unavailable,
)
from protocols.events import Echo, FinishReason, Frame, Started
from protocols.request import ChatPrompt, GbnfConstraint, LoraScale, Request
from protocols.sink import Sink

T = TypeVar("T")

_TASKS = {"generate": "generate", "embed": "embed", "classify": "rerank"}
"""vLLM's tasks that are ours too."""

_INLINE_SIZE = 4096
"""Prompts of so many characters are tokenised in a millisecond or two; larger ones leave the event loop."""


class VllmBackend(Unsupported):
    def __init__(self, settings: VllmSettings) -> None:
        self._settings = settings
        self._loaded: Loaded | None = None
        self._accounts = Accounts(settings.slots)
        self._tokenizers = ThreadPoolExecutor(2, thread_name_prefix="vllm-tokenize")
        self._scales = tuple(LoraScale(id, adapter.scale) for id, adapter in enumerate(settings.adapters))
        self._ids = itertools.count()
        self._closed = False

    async def start(self) -> ModelCard:
        self._loaded = loaded = await asyncio.to_thread(load, self._settings, self._accounts.step)
        self._accounts.kv_tokens = loaded.kv_tokens
        try:
            supported = await loaded.engine.get_supported_tasks()
            tasks = tuple(ours for theirs, ours in _TASKS.items() if theirs in supported)
            if not tasks:
                raise BackendStartError(f"model {self._settings.model!r}: nothing of {', '.join(supported)} is served")
            for id, adapter in enumerate(self._settings.adapters):
                if not await loaded.engine.add_lora(self._lora_request(id)):
                    raise BackendStartError(f"adapter {adapter.path!r}: vLLM does not take it")
        except BaseException:
            await self.aclose()
            raise
        card = msgspec.structs.replace(loaded.card, tasks=tasks)
        self._loaded = msgspec.structs.replace(loaded, card=card)
        return card

    def card(self) -> ModelCard:
        return self._alive().card

    async def generate(self, request: Request, sink: Sink | None = None) -> AsyncGenerator[Frame, None]:
        loaded = self._generating()
        check_request(request, self._settings.max_logprobs)
        adapter = self._adapter(request)
        prepared = await self._prepare(request)
        prompt_tokens, context_length = len(prepared.tokens), loaded.card.context_length
        if prompt_tokens >= context_length:
            raise ContextOverflow.of(prompt_tokens, context_length)
        checked_tokens(request.resume, loaded.vocabulary, "resume")
        quick = request.constraint is None and not demands_grammar(request)
        constrain = partial(constrained, request, prepared.parser, control_tokens=bool(prepared.shown))
        request = await self._aside(constrain, 0 if quick else _INLINE_SIZE + 1)
        arguments = sampling_arguments(request, loaded.vocabulary, loaded.defaults, structured(request.constraint))
        echo = self._echo(loaded, prepared, request) if request.extras.echo else None
        head = _Head(echo)
        replays = bool(request.resume) and needs_replay(arguments)
        choices = []
        for choice in range(request.choice, request.choice + request.n):
            answer = VllmAnswer(
                request, choice, prepared, loaded.vocabulary, context_length, time.monotonic, replays=replays
            )
            run = Run(f"{request.id}-{next(self._ids)}", prompt_tokens, leads=choice == request.choice)
            job = _Job(answer, run, prepared, for_choice(arguments, choice), adapter, replays)
            choices.append(self._frames(loaded, request, job, head))
        async with aclosing(merged(choices)) as frames:
            async for frame in frames:
                yield frame

    async def _frames(self, loaded: Loaded, request: Request, job: _Job, head: _Head) -> AsyncGenerator[Frame, None]:
        """Those of one choice."""
        answer, run = job.answer, job.run
        with self._accounts.entered(run):
            if answer.reason is not None:
                frame = answer.end(answer.reason)
                yield msgspec.structs.replace(frame, events=(*head.take(answer), *frame.events))
                return
            async with aclosing(self._outputs(loaded, request, job)) as outputs:
                async for output in outputs:
                    if not run.computed:
                        answer.computed(output.num_cached_tokens or 0)
                        self._accounts.computed(run, answer.cached_tokens)
                    (made,) = output.outputs
                    frame = answer.accept(made.token_ids, made.logprobs) or Frame((), (), answer.choice)
                    if answer.reason is None and made.finish_reason is not None:
                        frame = _joined(frame, answer.end(_reason(made.finish_reason)))
                    self._accounts.generated(run, len(frame.tokens))
                    frame = msgspec.structs.replace(frame, events=(*head.take(answer), *frame.events))
                    if frame.events or frame.tokens:
                        yield frame
                    if answer.reason is not None:
                        return

    async def _outputs(self, loaded: Loaded, request: Request, job: _Job) -> AsyncGenerator[RequestOutput, None]:
        """What the engine says, in our errors."""
        tokens = job.prepared.tokens.tolist()
        arguments = dict(job.arguments)
        limit = job.answer.limit
        if job.replays:
            arguments["extra_args"] = {ARGUMENT: list(request.resume)}
        else:
            tokens += request.resume
            limit -= len(request.resume)
        constraint = arguments.pop("structured_outputs", None)
        with _our_errors(self._lost):
            params = SamplingParams(
                **arguments,
                structured_outputs=None if constraint is None else StructuredOutputsParams(**constraint),
                max_tokens=limit,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            # A grammar takes a while to be checked; raw prompts are, and it with them, on a thread of vLLM's.
            prompt = tokens_input(tokens) if constraint is None else TokensPrompt(prompt_token_ids=tokens)
            outputs = loaded.engine.generate(prompt, params, job.run.id, lora_request=job.adapter)
            async with aclosing(outputs):
                async for output in outputs:
                    if output.outputs[0].finish_reason == "abort":
                        raise Unavailable("The model is being shut down.")
                    yield output

    async def embed(self, request: EmbeddingRequest) -> list[Embedding]:
        loaded = self._alive()
        if "embed" not in loaded.card.tasks:
            return await super().embed(request)
        chars = sum(prompt_chars(prompt) for prompt in request.inputs)
        inputs = await self._aside(
            partial(embedding_inputs, loaded.vocabulary, request, loaded.card.context_length), chars
        )
        vectors = await self._pooled(loaded, "embed", [(tokens, None) for tokens in inputs])
        return [
            Embedding(normalized(row[np.newaxis], request.normalize).astype("<f4").tobytes(), len(row), len(tokens))
            for row, tokens in zip(vectors, inputs, strict=True)
        ]

    async def rerank(self, request: RerankRequest) -> list[Relevance]:
        loaded = self._alive()
        if "rerank" not in loaded.card.tasks:
            return await super().rerank(request)
        chars = sum(len(request.query) + len(document) for document in request.documents)

        def pairs() -> list[tuple[Tokens, int | None]]:
            found = [loaded.vocabulary.pair(request.query, document) for document in request.documents]
            checked_lengths([tokens for tokens, _ in found], "documents", loaded.card.context_length)
            return found

        inputs = await self._aside(pairs, chars)
        scores = await self._pooled(loaded, "classify", inputs)
        return [Relevance(float(row[0]), len(tokens)) for row, (tokens, _) in zip(scores, inputs, strict=True)]

    async def _pooled(self, loaded: Loaded, kind: str, inputs: Sequence[tuple[Tokens, int | None]]) -> list[Matrix]:
        """What the model makes of each of `inputs`, as it is: nobody's norm, and no probability."""

        async def one(tokens: Tokens, second: int | None) -> Matrix:
            kwargs = None if second is None else {"compressed_token_type_ids": second}
            params = PoolingParams(task=kind, use_activation=False, extra_kwargs=kwargs)
            outputs = loaded.engine.encode(tokens_input(tokens.tolist()), params, f"pool-{next(self._ids)}")
            async with aclosing(outputs):
                async for output in outputs:
                    vector: Matrix = output.outputs.data.float().numpy().reshape(-1)
            return vector

        with self._accounts.pooling(sum(len(tokens) for tokens, _ in inputs)), _our_errors(self._lost):
            tasks = [asyncio.create_task(one(*given)) for given in inputs]
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()

    async def count_tokens(self, request: Request) -> int:
        self._generating()
        return len((await self._prepare(request)).tokens)

    async def tokenize(self, *parts: str | int, add_special: bool = False, parse_special: bool = True) -> list[Piece]:
        vocabulary = self._alive().vocabulary

        def pieces() -> list[Piece]:
            tokens = mixed_tokens(vocabulary, parts, "content", add_special=add_special, parse_special=parse_special)
            return [Piece(token, vocabulary.special_piece(token)) for token in tokens.tolist()]

        return await self._aside(pieces, sum(len(part) if isinstance(part, str) else 1 for part in parts))

    async def detokenize(self, tokens: Sequence[int]) -> str:
        vocabulary = self._alive().vocabulary
        return text_of(vocabulary, checked_tokens(tokens, vocabulary, "tokens"))

    async def apply_template(self, prompt: ChatPrompt) -> str:
        loaded = self._generating()
        return await self._aside(partial(loaded.tokenizer.templates.render, prompt), prompt_chars(prompt))

    def adapters(self) -> list[Adapter]:
        self._alive()
        scales = {item.id: item.scale for item in self._scales}
        return [Adapter(id, adapter.path, scales.get(id, 0.0)) for id, adapter in enumerate(self._settings.adapters)]

    async def set_adapters(self, scales: Sequence[LoraScale]) -> None:
        self._generating()
        given = adapter_set(scales, len(self._settings.adapters))
        _only_adapter(given)
        self._scales = tuple(LoraScale(id, scale) for id, scale in given)

    def stats(self) -> BackendStats:
        return self._accounts.stats()

    async def check_health(self) -> None:
        self._alive()

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._loaded is not None:
            await self._loaded.engine.abort(self._accounts.ids)
            await asyncio.to_thread(self._loaded.engine.shutdown)
        await asyncio.to_thread(self._tokenizers.shutdown)

    def _alive(self) -> Loaded:
        if self._loaded is None or self._closed:
            raise Unavailable("The model is not loaded.")
        if self._loaded.engine.errored:
            raise self._lost()
        return self._loaded

    def _generating(self) -> Loaded:
        loaded = self._alive()
        if "generate" not in loaded.card.tasks:
            raise NotSupported("This model does not generate text")
        return loaded

    def _lost(self) -> ServingError:
        if self._closed:
            return Unavailable("The model is being shut down.")
        return BackendLost("The engine has died.")

    def _adapter(self, request: Request) -> Any:
        scales = self._scales if request.lora is None else request.lora
        id = _only_adapter(adapter_set(scales, len(self._settings.adapters)))
        return None if id is None else self._lora_request(id)

    def _lora_request(self, id: int) -> Any:
        path = str(Path(self._settings.adapters[id].path).expanduser())
        return LoRARequest(f"adapter-{id}", id + 1, path)

    def _echo(self, loaded: Loaded, prepared: Prepared, request: Request) -> Echo:
        given = msgspec.structs.asdict(request.sampling)
        sampling = msgspec.structs.replace(
            loaded.card.sampling, **{name: value for name, value in given.items() if value is not None}
        )
        constraint = request.constraint
        grammar = constraint.text if isinstance(constraint, GbnfConstraint) else ""
        return Echo(text_of(loaded.vocabulary, prepared.tokens), sampling, grammar)

    async def _prepare(self, request: Request) -> Prepared:
        """The prompt of `request`, as `count_tokens` and `generate` both see it."""
        return await self._aside(partial(self._alive().tokenizer.prepare, request), prompt_chars(request.prompt))

    async def _aside(self, make: Callable[[], T], size: int) -> T:
        """What `make` returns. It runs on another thread if `size` says that it may take a while."""
        if size <= _INLINE_SIZE:
            return make()
        return await asyncio.get_running_loop().run_in_executor(self._tokenizers, make)


class _Job(msgspec.Struct, frozen=True):
    answer: VllmAnswer
    run: Run
    prepared: Prepared
    arguments: Mapping[str, Any]
    adapter: Any
    replays: bool


class _Head:
    """The `Started` of a stream, which goes with the frame that happens to be the first."""

    def __init__(self, echo: Echo | None) -> None:
        self._echo = echo
        self._due = True

    def take(self, answer: VllmAnswer) -> tuple[Started, ...]:
        if not self._due:
            return ()
        self._due = False
        return (answer.started(self._echo),)


def _joined(one: Frame, other: Frame) -> Frame:
    return Frame((*one.events, *other.events), (*one.tokens, *other.tokens), one.choice)


def _reason(said: str) -> FinishReason:
    """vLLM ended an answer for a reason of its own."""
    match said:
        case "stop":
            return "stop"
        case "length":
            return "length"
        case _:
            raise InternalError(InternalError.PUBLIC_MESSAGE)


def _only_adapter(given: AdapterSet) -> int | None:
    if len(given) > 1:
        raise InvalidRequest("This model's engine applies one LoRA adapter to a request", param="lora")
    for id, scale in given:
        if scale != 1:
            raise InvalidRequest("This model's engine applies a LoRA adapter with scale 1 or not at all", param="lora")
        return id
    return None


@contextmanager
def _our_errors(lost: Callable[[], ServingError]) -> Iterator[None]:
    """vLLM's errors as ours; `lost` says what it means that the engine is dead."""
    try:
        yield
    except VLLMClientError as error:
        raise _refused(error) from error
    except EngineDeadError as error:
        raise lost() from error


_PARAMETERS = {"repetition_penalty": "repeat_penalty", "structured_outputs": "json_schema"}


def _refused(error: VLLMClientError) -> InvalidRequest:
    """The message without what vLLM's own appends to it, and its parameter by our name."""
    param = getattr(error, "parameter", None)
    return InvalidRequest(
        str(error.args[0]) if error.args else str(error), param=None if param is None else _PARAMETERS.get(param, param)
    )
