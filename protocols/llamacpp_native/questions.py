"""llama.cpp's routes that are one question and one answer: their bodies in, the bodies of their answers out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field, Tag

from protocols.body import LIST, STRING, STRING_OR_LIST, ModelName, Wire, parse_json, parse_object, validated
from protocols.calls import (
    Adapter,
    ApplyTemplate,
    Detokenize,
    Embedding,
    EmbeddingRequest,
    EraseSlot,
    GetAdapters,
    GetCard,
    GetSlots,
    Piece,
    Relevance,
    RerankRequest,
    RestoreSlot,
    SaveSlot,
    SetAdapters,
    SlotFile,
    SlotState,
    Tokenize,
)
from protocols.card import ModelCard
from protocols.codec import Ask, Reader
from protocols.errors import InvalidRequest
from protocols.llamacpp_native.chat import decode_chat
from protocols.llamacpp_native.prompts import MAX_PROMPTS, prompts, sequence
from protocols.llamacpp_native.settings import short_settings
from protocols.openai_shared import FINGERPRINT
from protocols.request import ChatPrompt, LoraScale, TokenPrompt
from protocols.sampling_fields import I32, LoraField, Natural

_encode = msgspec.json.Encoder().encode
Token = Annotated[int, Field(ge=0, le=I32)]


Content = Annotated[Annotated[str, Tag(STRING)] | Annotated[list[Any], Tag(LIST)], STRING_OR_LIST]


class _Body(Wire):
    model: ModelName = ""


# --- text and tokens ------------------------------------------------------------


class _TokenizeBody(_Body):
    content: Content = ""
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


def tokenize(body: bytes, request_id: str) -> Ask[list[Piece]]:
    wire = validated(_TokenizeBody, parse_object(body))

    def render(pieces: list[Piece], model: str) -> bytes:
        if wire.with_pieces:
            return _encode({"tokens": [{"id": piece.token, "piece": _piece(piece.data)} for piece in pieces]})
        return _encode({"tokens": [piece.token for piece in pieces]})

    parts = (wire.content,) if isinstance(wire.content, str) else _parts(wire.content)
    return Ask(Tokenize(request_id, wire.model, parts, wire.add_special, wire.parse_special), render)


def _parts(content: list[Any]) -> tuple[str | int, ...]:
    prompt = sequence(content, "content")
    return prompt.tokens if isinstance(prompt, TokenPrompt) else prompt.parts


def _piece(data: bytes) -> str | list[int]:
    """ "piece = string, or byte list if not valid UTF-8" """
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


class _DetokenizeBody(_Body):
    tokens: list[Token] = []


def detokenize(body: bytes, request_id: str) -> Ask[str]:
    wire = validated(_DetokenizeBody, parse_object(body))
    return Ask(Detokenize(request_id, wire.model, tuple(wire.tokens)), lambda text, _: _encode({"content": text}))


def apply_template(body: bytes, request_id: str) -> Ask[str]:
    request = decode_chat(body, request_id).request
    assert isinstance(request.prompt, ChatPrompt)
    question = ApplyTemplate(request_id, request.model, request.prompt)
    return Ask(question, lambda text, _: _encode({"prompt": text}))


# --- embeddings ------------------------------------------------------------


class _EmbeddingBody(_Body):
    input: Any = None
    content: Any = None
    encoding_format: Literal["float", "base64"] = "float"
    embd_normalize: Annotated[int, Field(ge=-1, le=I32)] = 2
    dimensions: Annotated[int, Field(ge=1, le=I32)] | None = None


def embeddings(body: bytes, request_id: str) -> Ask[list[Embedding]]:
    """llama.cpp's own shape: a vector for each input, or one for each of its tokens where the model does not pool."""
    question, _ = _embedding_request(body, request_id, pooled=False)
    return Ask(question, lambda answers, _: _rows(answers))


def openai_embeddings(body: bytes, request_id: str) -> Ask[list[Embedding]]:
    """ "`content` field is not OAI compatible": it is answered in llama.cpp's shape."""
    question, wire = _embedding_request(body, request_id, pooled=True)

    def render(answers: list[Embedding], model: str) -> bytes:
        if wire.input is None:
            return _rows(answers)
        tokens = sum(answer.prompt_tokens for answer in answers)
        return _encode(
            {
                "model": model,
                "object": "list",
                "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
                "data": [_openai_embedding(index, answer, wire) for index, answer in enumerate(answers)],
            }
        )

    return Ask(question, render)


def _embedding_request(body: bytes, request_id: str, *, pooled: bool) -> tuple[EmbeddingRequest, _EmbeddingBody]:
    wire = validated(_EmbeddingBody, parse_object(body))
    name, value = ("content", wire.content) if wire.input is None else ("input", wire.input)
    if value is None:
        raise InvalidRequest("Missing required parameter: 'input'.", param="input")
    inputs = prompts(value, name, content=True)
    pooled = pooled and wire.input is not None
    return EmbeddingRequest(request_id, wire.model, inputs, wire.embd_normalize, pooled), wire


def _rows(answers: Sequence[Embedding]) -> bytes:
    return _encode([{"index": index, "embedding": answer.vectors()} for index, answer in enumerate(answers)])


def _openai_embedding(index: int, answer: Embedding, wire: _EmbeddingBody) -> dict[str, Any]:
    if wire.dimensions not in (None, answer.dimensions):
        raise InvalidRequest(
            f"Invalid 'dimensions': the vectors of this model have {answer.dimensions}.", param="dimensions"
        )
    item = {"object": "embedding", "index": index}
    if wire.encoding_format == "base64":
        return item | {"embedding": answer.base64, "encoding_format": "base64"}
    return item | {"embedding": answer.vectors()[0]}


# --- ranking ------------------------------------------------------------


class _RerankBody(_Body):
    query: str
    documents: Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)] | None = None
    texts: Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)] | None = None
    top_n: Natural | None = None
    return_text: bool = False
    return_documents: bool = False


def rerank(body: bytes, request_id: str) -> Ask[list[Relevance]]:
    """Jina's form, or with `texts` that of Text Embeddings Inference. Best first."""
    wire = validated(_RerankBody, parse_object(body))
    documents = wire.documents if wire.texts is None else wire.texts
    if documents is None:
        raise InvalidRequest("Missing required parameter: 'documents'.", param="documents")

    def render(answers: list[Relevance], model: str) -> bytes:
        order = sorted(range(len(answers)), key=lambda index: -answers[index].score)[: wire.top_n]
        if wire.texts is not None:
            return _encode(
                [
                    {"index": index, "score": answers[index].score}
                    | ({"text": documents[index]} if wire.return_text else {})
                    for index in order
                ]
            )
        tokens = sum(answer.prompt_tokens for answer in answers)
        results = [
            {"index": index, "relevance_score": answers[index].score}
            | ({"document": {"text": documents[index]}} if wire.return_documents else {})
            for index in order
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return _encode({"model": model, "object": "list", "usage": usage, "results": results})

    return Ask(RerankRequest(request_id, wire.model, wire.query, tuple(documents)), render)


# --- the model, its slots and adapters ------------------------------------------------------------


def props(body: bytes, request_id: str) -> Ask[ModelCard]:
    return Ask(GetCard(request_id, ""), _props)


def _props(card: ModelCard, model: str) -> bytes:
    return _encode(
        {
            "default_generation_settings": {
                "params": short_settings(card.sampling, None),
                "n_ctx": card.context_length,
            },
            "total_slots": card.slots,
            "model_alias": model,
            "model_path": card.path,
            "modalities": {"vision": False, "video": False, "audio": False},
            "endpoint_slots": True,
            "endpoint_props": False,
            "endpoint_metrics": False,
            "ui": False,
            "chat_template": card.chat_template,
            "bos_token": card.bos_text,
            "eos_token": card.eos_text,
            "build_info": FINGERPRINT,
            "is_sleeping": card.asleep,
        }
    )


def slots(body: bytes, request_id: str) -> Ask[list[SlotState]]:
    return Ask(GetSlots(request_id, ""), lambda states, _: _encode([_slot(state) for state in states]))


def _slot(state: SlotState) -> dict[str, Any]:
    """What an idle slot computed last is not known: it has no `params`. Slots of several replicas have the same ids."""
    busy = bool(state.request)
    left = -1 if state.max_tokens is None else state.max_tokens - state.generated_tokens
    shown: dict[str, Any] = {
        "id": state.id,
        "n_ctx": state.context_length,
        "speculative": state.speculative,
        "is_processing": busy,
        "n_prompt_tokens": state.prompt_tokens if busy else state.cached_tokens,
        "n_prompt_tokens_processed": state.processed_tokens,
        "next_token": [{"has_next_token": busy, "n_remain": left, "n_decoded": state.generated_tokens}],
    }
    if state.replica:
        shown["replica"] = state.replica
    if state.sampling is not None:
        shown |= {"id_task": state.request, "params": short_settings(state.sampling, state.max_tokens)}
    return shown


class _SlotBody(_Body):
    filename: Annotated[str, Field(min_length=1)] | None = None


def slot_action(slot: str, action: str) -> Reader:
    """`POST /slots/{slot}?action=…`"""
    if not (slot.isascii() and slot.isdigit() and len(slot) < 10):
        raise InvalidRequest(f"Invalid slot id: '{slot[:40]}' is no number.", param="id_slot")
    if action not in ("save", "restore", "erase"):
        raise InvalidRequest("Invalid 'action': expected save, restore or erase.", param="action")

    def read(body: bytes, request_id: str) -> Ask[Any]:
        wire = validated(_SlotBody, parse_object(body or b"{}"))
        id = int(slot)
        if action == "erase":
            erased = EraseSlot(request_id, wire.model, id)
            return Ask(erased, lambda tokens, _: _encode({"id_slot": id, "n_erased": tokens}))
        if wire.filename is None:
            raise InvalidRequest("Missing required parameter: 'filename'.", param="filename")
        if action == "save":
            return Ask(SaveSlot(request_id, wire.model, id, wire.filename), _saved)
        return Ask(RestoreSlot(request_id, wire.model, id, wire.filename), _restored)

    return read


def _saved(file: SlotFile, model: str) -> bytes:
    counts = {"n_saved": file.tokens, "n_written": file.bytes}
    return _encode({"id_slot": file.slot, "filename": file.filename, **counts, "timings": {"save_ms": file.ms}})


def _restored(file: SlotFile, model: str) -> bytes:
    counts = {"n_restored": file.tokens, "n_read": file.bytes}
    return _encode({"id_slot": file.slot, "filename": file.filename, **counts, "timings": {"restore_ms": file.ms}})


def adapters(body: bytes, request_id: str) -> Ask[list[Adapter]]:
    return Ask(GetAdapters(request_id, ""), lambda answers, _: _encode(answers))


class _Scales(Wire):
    adapters: Annotated[list[LoraField], Field(max_length=1024)]


def set_adapters(body: bytes, request_id: str) -> Ask[None]:
    """The body is a list: what is wrong with it is said of `adapters[0]` and so on."""
    wire = validated(_Scales, {"adapters": parse_json(body)})
    scales = tuple(LoraScale(item.id, item.scale) for item in wire.adapters)
    return Ask(SetAdapters(request_id, "", scales), lambda _, __: b'{"success":true}')
