"""What a reranking model is given: the tokens of each query with its document."""

from __future__ import annotations

import re

import numpy as np

from backends.llamacpp.bindings import Model, Tokens
from backends.pooling import checked_lengths
from protocols.calls import RerankRequest


def rerank_inputs(model: Model, request: RerankRequest, limit: int) -> list[Tokens]:
    """Query and document together, one of them for each document."""
    query = model.tokenize(request.query, add_special=False, parse_special=False)
    inputs = [
        _from_template(model, request.query, document)
        if model.rerank_template
        else _query_and_document(model, query, model.tokenize(document, add_special=False, parse_special=False))
        for document in request.documents
    ]
    return checked_lengths(inputs, "documents", limit)


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
