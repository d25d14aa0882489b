"""Documents against the grammars of their schemas, read by llama.cpp, token by token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.backends.grammar.test_json_schema import CASES, check

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from backends.llamacpp.grammar import Grammar, GrammarSpec

if TYPE_CHECKING:
    from backends.llamacpp.bindings import Model


@pytest.mark.model
def test_documents_with_llama_cpp(model: Model) -> None:
    def reads(gbnf: str, text: str) -> bool:
        grammar = Grammar(model, GrammarSpec(gbnf))
        try:
            for token in model.tokenize(text, add_special=False, parse_special=False).tolist():
                if not grammar.allows(token):
                    return False
                grammar.accept(token)
            return all(grammar.allows(token) for token in model.end_tokens)
        finally:
            grammar.close()

    for case in CASES.values():
        check(reads, *case)
