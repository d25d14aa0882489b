"""Answers that must match a grammar or a JSON schema: on a real model, with every kind of sampling."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from backends.llamacpp.settings import LlamaCppSettings
from protocols.errors import InternalError, InvalidRequest
from protocols.request import (
    Constraint,
    GbnfConstraint,
    GrammarTrigger,
    JsonSchemaConstraint,
    LogprobOptions,
    Request,
    Sampling,
    TextPrompt,
    TokenBias,
)
from tests.backends.contract import answer, chat, until

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from backends.llamacpp.backend import LlamaCppBackend
from backends.llamacpp.bindings import LlamaCppError, Model
from backends.llamacpp.grammar import Grammar

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
}
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 1.5, "seed": 5, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    {"temperature": 1.0, "seed": 5, "top_k": 1},
    {"temperature": 1.0, "seed": 5, "mirostat": 2},
    {"temperature": 1.0, "seed": 5, "samplers": ("k", "a"), "adaptive_target": 0.3},
    {"temperature": 1.0, "seed": 5, "samplers": ("i",)},
    {"temperature": 0.0, "repeat_penalty": 1.5, "dry_multiplier": 2.0},
    {"temperature": 1.0, "seed": 5, "xtc_probability": 1.0},
    {"temperature": 1.0, "seed": 5, "top_n_sigma": 0.5, "typical_p": 0.5},
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend(demo_model: str) -> AsyncIterator[LlamaCppBackend]:
    backend = LlamaCppBackend(LlamaCppSettings(model=demo_model, slots=4, context_length=512))
    await backend.start()
    yield backend
    await until(backend, running=0)
    await backend.check_health()
    await backend.aclose()


def asking(constraint: Constraint, max_tokens: int = 80, prompt: str = "Describe a person.", **fields: Any) -> Request:
    values = {"sampling": Sampling(temperature=0.0)} | fields
    request = Request("test", "m", chat(prompt), max_tokens=max_tokens, constraint=constraint)
    return msgspec.structs.replace(request, **values)


def check(text: str, schema: Any) -> None:
    pytest.importorskip("jsonschema").validate(json.loads(text), schema)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
async def test_a_schema_is_kept(backend: LlamaCppBackend, sampling: dict[str, Any]) -> None:
    request = asking(JsonSchemaConstraint(PERSON), 150, sampling=Sampling(**sampling))
    got = await answer(backend, request)
    assert got.choice.reason == "stop", got.choice.text
    check(got.choice.text, PERSON)


@pytest.mark.parametrize(
    "schema", [{}, True, {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4}]
)
async def test_other_schemas(backend: LlamaCppBackend, schema: Any) -> None:
    got = await answer(backend, asking(JsonSchemaConstraint(schema), 200))
    if got.choice.reason == "stop":
        check(got.choice.text, schema)
    else:
        assert schema in ({}, True), "any JSON may be long"


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
async def test_a_grammar_is_kept(backend: LlamaCppBackend, sampling: dict[str, Any]) -> None:
    grammar = 'root ::= ("red" | "green" | "blue") (", " ("one" | "two")){2} "!"'
    got = await answer(backend, asking(GbnfConstraint(grammar), sampling=Sampling(**sampling)))
    assert got.choice.reason == "stop"
    assert re.fullmatch("(red|green|blue)(, (one|two)){2}!", got.choice.text)
    assert got.tokens[-1] in backend._loaded.model.end_tokens  # type: ignore[union-attr]


async def test_what_the_grammar_allows_anyway_is_drawn_as_without_it(backend: LlamaCppBackend) -> None:
    for sampling in (Sampling(temperature=0.0), Sampling(temperature=1.0, seed=4)):
        request = asking(GbnfConstraint("root ::= [^\\x00]*"), 16, sampling=sampling)
        free = await answer(backend, msgspec.structs.replace(request, constraint=None))
        bound = await answer(backend, request)
        assert bound.tokens == free.tokens


async def test_the_end_comes_when_the_grammar_is_complete_even_if_it_may_not(backend: LlamaCppBackend) -> None:
    constraint = GbnfConstraint('root ::= "yes" | "no"')
    got = await answer(backend, asking(constraint))
    banned = await answer(backend, asking(constraint, ignore_eos=True))
    assert banned.choice == got.choice
    assert banned.tokens == got.tokens[:-1], "no token could say that it is over"
    assert banned.completion.usage.completion_tokens == len(banned.tokens)
    assert banned.choice.reason == "stop"


async def test_a_grammar_that_only_banned_tokens_satisfy_ends_at_once(backend: LlamaCppBackend, model: Model) -> None:
    ids = [t for t in range(model.vocab_size) if b"y" in model.piece(t) or b"n" in model.piece(t)]
    sampling = Sampling(temperature=0.0, logit_bias=tuple(TokenBias(token, -float("inf")) for token in ids))
    got = await answer(backend, asking(GbnfConstraint('root ::= "yes" | "no"'), sampling=sampling))
    assert (got.choice.text, got.tokens, got.choice.reason) == ("", (), "stop")


async def test_many_biases_beside_a_grammar(backend: LlamaCppBackend, model: Model) -> None:
    biased = tuple(TokenBias(token, 0.5 if token % 2 else -float("inf")) for token in range(1000, 6000))
    request = asking(JsonSchemaConstraint(PERSON), 150, sampling=Sampling(temperature=1.0, seed=2, logit_bias=biased))
    got = await answer(backend, request)
    assert got.choice.reason == "stop"
    check(got.choice.text, PERSON)
    assert not {bias.token for bias in biased if bias.bias < 0} & set(got.tokens)


@pytest.mark.parametrize("cut", [0, 1, 3, 6])
async def test_a_resumed_answer_stays_in_the_grammar(backend: LlamaCppBackend, cut: int) -> None:
    request = asking(JsonSchemaConstraint(PERSON))
    whole = await answer(backend, request)
    assert len(whole.tokens) > 8
    rest = await answer(backend, msgspec.structs.replace(request, resume=whole.tokens[:cut]))
    assert whole.tokens[:cut] + rest.tokens == whole.tokens
    complete = await answer(backend, msgspec.structs.replace(request, resume=whole.tokens))
    assert (complete.tokens, complete.choice.reason) == ((), "stop")


async def test_resuming_what_the_grammar_forbids_is_refused(backend: LlamaCppBackend) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await answer(backend, asking(GbnfConstraint('root ::= "yes"'), resume=(504, 505)))
    assert caught.value.param == "resume"
    assert (await answer(backend, asking(GbnfConstraint('root ::= "yes"')))).choice.text == "yes"


async def test_a_lazy_grammar_waits_for_its_trigger(backend: LlamaCppBackend) -> None:
    prompt = TextPrompt("1, 2, 3, 4, 5, 6, 7, 8, 9, 10")
    free = await answer(
        backend, msgspec.structs.replace(asking(GbnfConstraint("")), prompt=prompt, constraint=None, max_tokens=30)
    )
    assert ", 12" in free.choice.text
    lazy = GbnfConstraint('root ::= "12" " done."', lazy=True, triggers=(GrammarTrigger("word", "12"),))
    got = await answer(backend, msgspec.structs.replace(asking(lazy, 30), prompt=prompt))
    before = free.choice.text.partition("12")[0]
    assert got.choice.text == before + "12 done."
    assert got.choice.reason == "stop"


async def test_preserved_tokens_are_text(backend: LlamaCppBackend) -> None:
    plain = 'root ::= <|im_start|> "hi"'
    hidden = await answer(backend, asking(GbnfConstraint(plain)))
    assert hidden.choice.text == "hi"
    shown = await answer(
        backend, asking(GbnfConstraint(plain, preserved_tokens=("<|im_start|>",)), logprobs=LogprobOptions(0))
    )
    assert shown.choice.text == "<|im_start|>hi"
    assert b"".join(entry.data for entry in shown.choice.logprobs) == b"<|im_start|>hi"


@pytest.mark.parametrize(
    "constraint",
    [
        GbnfConstraint("root ::= ["),
        GbnfConstraint("root ::= nothing"),
        GbnfConstraint(""),
        GbnfConstraint('root ::= "a"', lazy=True),
        GbnfConstraint('root ::= "a"', lazy=True, triggers=(GrammarTrigger("pattern", "("),)),
        GbnfConstraint('root ::= "a"', lazy=True, triggers=(GrammarTrigger("token", token=10**6),)),
        GbnfConstraint('root ::= "a"', lazy=True, triggers=(GrammarTrigger("token"),)),
        JsonSchemaConstraint({"type": "nonsense"}),
        JsonSchemaConstraint({"$ref": "#/nowhere"}),
        JsonSchemaConstraint(7),
    ],
    ids=str,
)
async def test_what_cannot_be_a_constraint_is_refused(backend: LlamaCppBackend, constraint: Constraint) -> None:
    beside = asyncio.create_task(answer(backend, asking(JsonSchemaConstraint(PERSON))))
    with pytest.raises(InvalidRequest) as caught:
        await answer(backend, asking(constraint))
    assert caught.value.param
    check((await beside).choice.text, PERSON)


async def test_a_request_whose_grammar_fails_fails_alone(
    backend: LlamaCppBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    allows = Grammar.allows
    errors: list[Exception] = [InvalidRequest("too ambiguous", param="grammar"), LlamaCppError("read otherwise")]

    def fail(self: Grammar, token: int) -> bool:
        if "poison" in self.spec.gbnf and errors:
            raise errors.pop()
        return allows(self, token)

    monkeypatch.setattr(Grammar, "allows", fail)
    poison = GbnfConstraint('root ::= "poison"')
    for expected in (InternalError, InvalidRequest):
        good, bad = await asyncio.gather(
            answer(backend, asking(JsonSchemaConstraint(PERSON))),
            answer(backend, asking(poison)),
            return_exceptions=True,
        )
        assert not isinstance(good, BaseException)
        assert type(bad) is expected
    assert (await answer(backend, asking(poison))).choice.text == "poison"


async def test_several_choices_keep_it_each_on_their_own(backend: LlamaCppBackend) -> None:
    request = asking(JsonSchemaConstraint(PERSON), 150, n=3, sampling=Sampling(temperature=1.0, seed=3))
    got = await answer(backend, request)
    texts = [choice.text for choice in got.completion.choices]
    for text in texts:
        check(text, PERSON)
    assert len(set(texts)) > 1


async def test_closing_in_the_middle_frees_everything(backend: LlamaCppBackend) -> None:
    stream = backend.generate(asking(JsonSchemaConstraint(PERSON)))
    async for frame in stream:
        if frame.tokens:
            break
    await stream.aclose()
    await until(backend, running=0)
