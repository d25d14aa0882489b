"""Prompts with a gap: the order of special tokens, and what is left out when there is too much."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from backends.llamacpp.backend import LlamaCppBackend
from backends.llamacpp.bindings import FimTokens, Tokens
from backends.llamacpp.infill import WINDOW, infill_tokens
from backends.llamacpp.settings import LlamaCppSettings
from protocols.errors import NotSupported
from protocols.request import InfillFile, InfillPrompt
from tests.backends.contract import answer
from tests.backends.llamacpp.helpers import greedy

if TYPE_CHECKING:
    from backends.llamacpp.bindings import Model

BOS, PREFIX, SUFFIX, MIDDLE, REPOSITORY, FILE = range(1000, 1006)
ALL = FimTokens(PREFIX, SUFFIX, MIDDLE, REPOSITORY, FILE)
BARE = FimTokens(PREFIX, SUFFIX, MIDDLE, -1, -1)


class ByteModel:
    """Its tokens are bytes."""

    bos = BOS

    def __init__(self, fim: FimTokens = ALL, *, adds_bos: bool = False) -> None:
        self.fim = fim
        self.adds_bos = adds_bos

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> Tokens:
        assert not add_special
        assert not parse_special, "code may contain what looks like a control token"
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def infill(prompt: InfillPrompt, model: ByteModel, **options: Any) -> list[int | str]:
    values = {"context_length": 4096, "max_tokens": 64} | options
    tokens = infill_tokens(prompt, cast("Model", model), **values).tolist()
    shown: list[int | str] = []
    for token in tokens:
        if token >= BOS:
            shown.append(token)
        elif shown and isinstance(shown[-1], str):
            shown[-1] += chr(token)
        else:
            shown.append(chr(token))
    return shown


def test_the_gap() -> None:
    prompt = InfillPrompt("def f(", "):", start="x")
    assert infill(prompt, ByteModel(BARE)) == [PREFIX, "def f(x", SUFFIX, "):", MIDDLE]
    assert infill(prompt, ByteModel(BARE), suffix_first=True) == [SUFFIX, "):", PREFIX, "def f(x", MIDDLE]
    assert infill(prompt, ByteModel(BARE, adds_bos=True))[:2] == [BOS, PREFIX]
    assert infill(InfillPrompt("", ""), ByteModel(BARE)) == [PREFIX, SUFFIX, MIDDLE]


def test_other_files_come_first() -> None:
    prompt = InfillPrompt("a", "b", files=(InfillFile("x.py", "one"), InfillFile("y.py", "two")))
    named = [REPOSITORY, "myproject\n", FILE, "x.py\none", FILE, "y.py\ntwo", FILE, "filename\n"]
    gap = [PREFIX, "a", SUFFIX, "b", MIDDLE]
    assert infill(prompt, ByteModel()) == named + gap
    snippets = "\n\n--- snippet ---\n\none\n\n--- snippet ---\n\ntwo"
    assert infill(prompt, ByteModel(BARE, adds_bos=True)) == [BOS, snippets, *gap]


def test_what_is_far_from_the_gap_is_left_out() -> None:
    prompt = InfillPrompt("<" + "p" * 3000, "s" * 3000 + ">", start="!", files=(InfillFile("x", "e" * 5000 + "$"),))
    files, _, before, _, behind, _ = infill(prompt, ByteModel(BARE), max_tokens=100)
    assert before == "p" * (3 * WINDOW // 4 - 1) + "!"
    assert behind == "s" * (WINDOW // 4)
    assert files == "e" * (4096 - 100 - 4 - WINDOW - 1) + "$"
    assert infill(prompt, ByteModel(BARE), max_tokens=4000)[0] == PREFIX, "the answer's room is not for files"


@given(
    st.text("ab", max_size=300),
    st.text("ab", max_size=300),
    st.text("ab", max_size=20),
    st.lists(st.text("ab", max_size=100), max_size=3),
    st.integers(64, 400),
    st.none() | st.integers(0, 500),
)
def test_a_prompt_always_leaves_room(
    prefix: str, suffix: str, start: str, files: list[str], context_length: int, max_tokens: int | None
) -> None:
    prompt = InfillPrompt(prefix, suffix, start, tuple(InfillFile("f", text) for text in files))
    tokens = infill_tokens(
        prompt, cast("Model", ByteModel()), context_length=context_length, max_tokens=max_tokens
    ).tolist()
    answer = context_length // 4 if max_tokens is None else min(max_tokens, context_length // 2)
    assert len(tokens) < context_length - answer
    middle = tokens.index(PREFIX), tokens.index(SUFFIX), tokens.index(MIDDLE)
    assert middle == tuple(sorted(middle))
    assert middle[2] == len(tokens) - 1
    kept = bytes(tokens[middle[0] + 1 : middle[1]]).decode()
    assert (prefix + start).endswith(kept)
    assert kept.endswith(start)
    assert suffix.startswith(bytes(tokens[middle[1] + 1 : middle[2]]).decode())


def test_a_model_without_the_tokens_says_so() -> None:
    with pytest.raises(NotSupported, match="no suffix and no middle token"):
        infill(InfillPrompt("a", "b"), ByteModel(FimTokens(1, -1, -1, 2, 3)))


async def test_a_model_fills_a_gap(decoder_model: Path, synthetic: ModuleType) -> None:
    backend = LlamaCppBackend(LlamaCppSettings(model=str(decoder_model), slots=1, context_length=64, threads=1))
    await backend.start()
    request = greedy(InfillPrompt("ab", "cd", start="e"), 6)
    special = [synthetic.FIM_PREFIX, synthetic.FIM_SUFFIX, synthetic.FIM_MIDDLE]
    assert [token for token in (await backend._tokens(request)).tolist() if token in special] == special
    assert await backend.detokenize((await backend._tokens(request)).tolist()) == (
        "<|fim_prefix|>abe<|fim_suffix|>cd<|fim_middle|>"
    )
    got = await answer(backend, request)
    assert got.completion.usage.prompt_tokens == await backend.count_tokens(request)
    assert len(got.tokens) == 6
    await backend.aclose()
