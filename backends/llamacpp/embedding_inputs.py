"""What an embedding or reranking model is given: the tokens of each input, checked so that none can fail the others."""

from __future__ import annotations

import re
from typing import assert_never

import numpy as np

from backends.llamacpp.bindings import Model, Tokens
from backends.vocabulary import checked_tokens, mixed_tokens
from protocols.calls import EmbeddingRequest, RerankRequest
from protocols.errors import ContextOverflow, InvalidRequest
from protocols.request import MixedPrompt, TextPrompt, TokenPrompt


def embedding_inputs(model: Model, request: EmbeddingRequest, limit: int) -> list[Tokens]:
    """Raises `InvalidRequest` for an input that is empty, or longer than `limit` tokens."""
    if request.normalize < -1:
        raise InvalidRequest(f"There is no norm {request.normalize}", param="embd_normalize")
    inputs = [_tokens(model, prompt, f"input[{index}]") for index, prompt in enumerate(request.inputs)]
    return _checked_lengths(inputs, "input", limit)


def rerank_inputs(model: Model, request: RerankRequest, limit: int) -> list[Tokens]:
    """Query and document together, one of them for each document."""
    query = model.tokenize(request.query, add_special=False, parse_special=False)
    inputs = [
        _from_template(model, request.query, document)
        if model.rerank_template
        else _query_and_document(model, query, model.tokenize(document, add_special=False, parse_special=False))
        for document in request.documents
    ]
    return _checked_lengths(inputs, "documents", limit)


def _tokens(model: Model, prompt: TextPrompt | TokenPrompt | MixedPrompt, param: str) -> Tokens:
    match prompt:
        case TextPrompt(text=text):
            return model.tokenize(text, add_special=True, parse_special=True)
        case TokenPrompt(tokens=tokens):
            return checked_tokens(tokens, model, param)
        case MixedPrompt(parts=parts):
            return mixed_tokens(model, parts, param, add_special=True, parse_special=True)
        case _:
            assert_never(prompt)


def _from_template(model: Model, query: str, document: str) -> Tokens:
    """In one pass: a query that contains `{document}` is only a query."""
    texts = {"{query}": query, "{document}": document}
    text = re.sub(r"\{query\}|\{document\}", lambda found: texts[found[0]], model.rerank_template)
    return model.tokenize(text, add_special=False, parse_special=True)


def _query_and_document(model: Model, query: Tokens, document: Tokens) -> Tokens:
    """ "[BOS] query [EOS] [SEP] document [EOS], each special token only if the model adds/has it" """
    bos = [model.bos] if model.adds_bos and model.bos >= 0 else []
    end = model.eos if model.eos >= 0 else model.sep
    eos = [end] if model.adds_eos and end >= 0 else []
    sep = [model.sep] if model.adds_sep and model.sep >= 0 else []
    return np.concatenate([bos, query, eos, sep, document, eos]).astype(np.int32)


def _checked_lengths(inputs: list[Tokens], param: str, limit: int) -> list[Tokens]:
    if not inputs:
        raise InvalidRequest("There is nothing to compute: the list is empty", param=param)
    for index, tokens in enumerate(inputs):
        if not len(tokens):
            raise InvalidRequest(f"Item {index} is empty", param=f"{param}[{index}]")
        if len(tokens) > limit:
            raise ContextOverflow.of_item(index, len(tokens), limit, param)
    return inputs
