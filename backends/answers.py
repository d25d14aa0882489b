"""From a `ModelCall` to the method of `Backend` that answers it."""

from __future__ import annotations

from typing import assert_never, cast

from backends.base import Backend
from protocols.calls import (
    AnswerT,
    ApplyTemplate,
    CountTokens,
    Detokenize,
    EmbeddingRequest,
    EraseSlot,
    GetAdapters,
    GetAllStats,
    GetCard,
    GetSlots,
    GetStats,
    ModelCall,
    Question,
    ReplicaStats,
    RerankRequest,
    RestoreSlot,
    SaveSlot,
    SetAdapters,
    Tokenize,
)


async def answer(backend: Backend, call: Question[AnswerT]) -> AnswerT:
    """Raises what the backend raises, `ServingError` among it."""
    # `Question` names the answer's type, `ModelCall` the questions there are: no annotation can say both.
    return cast(AnswerT, await _answer(backend, cast(ModelCall, call)))


async def _answer(backend: Backend, call: ModelCall) -> object:
    match call:
        case EmbeddingRequest():
            return await backend.embed(call)
        case RerankRequest():
            return await backend.rerank(call)
        case CountTokens(request=request):
            return await backend.count_tokens(request)
        case Tokenize(parts=parts, add_special=add_special, parse_special=parse_special):
            return await backend.tokenize(*parts, add_special=add_special, parse_special=parse_special)
        case Detokenize(tokens=tokens):
            return await backend.detokenize(tokens)
        case ApplyTemplate(prompt=prompt):
            return await backend.apply_template(prompt)
        case GetCard():
            return backend.card()
        case GetStats():
            return backend.stats()
        case GetAllStats():
            return [ReplicaStats(backend.stats())]
        case GetSlots():
            return await backend.slots()
        case SaveSlot(slot=slot, filename=filename):
            return await backend.save_slot(slot, filename)
        case RestoreSlot(slot=slot, filename=filename):
            return await backend.restore_slot(slot, filename)
        case EraseSlot(slot=slot):
            return await backend.erase_slot(slot)
        case GetAdapters():
            return backend.adapters()
        case SetAdapters(scales=scales):
            await backend.set_adapters(scales)
            return None
        case _:
            assert_never(call)
