"""What vLLM makes of a request, on a real model: constraints, probabilities, choices, caching, resuming, ending."""

from __future__ import annotations

import asyncio
import json
import re
from typing import TYPE_CHECKING

import msgspec
import pytest

from protocols.errors import InvalidRequest, NotSupported
from protocols.request import (
    ChatPrompt,
    GbnfConstraint,
    InfillPrompt,
    JsonSchemaConstraint,
    LogprobOptions,
    LoraScale,
    Message,
    Sampling,
    SlotOptions,
    TextPart,
    TextPrompt,
    TokenBias,
    TokenPrompt,
    Tool,
    ToolChoice,
)
from tests.backends.contract import GREEDY, answer, chat, until
from tests.backends.vllm.conftest import SLOTS, greedy

pytest.importorskip("vllm", reason="vLLM is not installed")

if TYPE_CHECKING:
    from backends.vllm.backend import VllmBackend

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
HOT = Sampling(temperature=1.2, seed=11)


# --- constraints ------------------------------------------------------------


@pytest.mark.parametrize("sampling", [GREEDY, HOT])
async def test_a_schema_is_kept(engine: VllmBackend, sampling: Sampling) -> None:
    got = await answer(
        engine, greedy("Describe a person.", 60, constraint=JsonSchemaConstraint(PERSON), sampling=sampling)
    )
    assert got.choice.reason == "stop"
    person = json.loads(got.choice.text)
    assert person.keys() == {"name", "age"}
    assert len(person["name"]) <= 12
    assert isinstance(person["age"], int)


async def test_any_json_is_json(engine: VllmBackend) -> None:
    got = await answer(engine, greedy("Write JSON.", 24, constraint=JsonSchemaConstraint({})))
    if got.choice.reason == "stop":
        json.loads(got.choice.text)
    else:
        assert got.choice.text.lstrip()[0] in '{["0123456789-tfn'


async def test_a_grammar_is_kept(engine: VllmBackend) -> None:
    grammar = GbnfConstraint('root ::= ("red" | "green" | "blue") "-" [0-9]{3}')
    got = await answer(engine, greedy("A colour?", 32, constraint=grammar, sampling=HOT))
    assert re.fullmatch(r"(red|green|blue)-[0-9]{3}", got.choice.text)


async def test_a_complete_answer_ends_even_where_ends_are_ignored(engine: VllmBackend) -> None:
    got = await answer(engine, greedy("Yes?", 32, constraint=GbnfConstraint('root ::= "yes" | "no"'), ignore_eos=True))
    assert got.choice.text in ("yes", "no")


@pytest.mark.parametrize(
    "constraint",
    [GbnfConstraint("root ::= ("), GbnfConstraint("nonsense"), JsonSchemaConstraint({"type": "nothing"})],
)
async def test_a_bad_constraint_is_the_clients_error(
    engine: VllmBackend, constraint: GbnfConstraint | JsonSchemaConstraint
) -> None:
    with pytest.raises(InvalidRequest):
        await answer(engine, greedy("x", constraint=constraint))
    assert len((await answer(engine, greedy("Hi", 3, ignore_eos=True))).tokens) == 3


# --- probabilities and biases ------------------------------------------------------------


async def test_probabilities(engine: VllmBackend) -> None:
    got = await answer(engine, greedy("Tell me a story.", 8, logprobs=LogprobOptions(5), ignore_eos=True))
    entries = got.choice.logprobs
    assert [entry.token for entry in entries] == list(got.tokens)
    assert b"".join(entry.data for entry in entries).decode() == got.choice.text
    for entry in entries:
        assert len(entry.top) == 5
        assert entry.top[0].token == entry.token, "greedy takes the likeliest"
        values = [other.logprob for other in entry.top]
        assert values == sorted(values, reverse=True)
        assert all(value <= 0 for value in values)


async def test_only_the_tokens_own_probability(engine: VllmBackend) -> None:
    got = await answer(engine, greedy("Tell me a story.", 4, logprobs=LogprobOptions(0), ignore_eos=True))
    assert [entry.token for entry in got.choice.logprobs] == list(got.tokens)
    assert all(not entry.top for entry in got.choice.logprobs)


async def test_a_banned_token_does_not_come(engine: VllmBackend) -> None:
    request = greedy("Tell me a story.", 8, ignore_eos=True)
    first = (await answer(engine, request)).tokens[0]
    banned = Sampling(temperature=0.0, logit_bias=(TokenBias(first, float("-inf")),))
    assert first not in (await answer(engine, msgspec.structs.replace(request, sampling=banned))).tokens


async def test_ends_that_are_ignored_do_not_come(engine: VllmBackend) -> None:
    got = await answer(engine, greedy("Say hi.", 40, ignore_eos=True))
    assert len(got.tokens) == 40
    assert not set(got.tokens) & engine._alive().vocabulary.end_tokens


# --- choices ------------------------------------------------------------


async def test_three_choices(engine: VllmBackend) -> None:
    request = greedy("Tell me a story.", 10, n=3, sampling=HOT, ignore_eos=True)
    got = await answer(engine, request)
    texts = [choice.text for choice in got.completion.choices]
    assert len(set(texts)) == 3
    assert got.completion.usage.completion_tokens == 30
    assert got.completion.usage.prompt_tokens == await engine.count_tokens(request)


async def test_a_choice_that_fails_ends_all(engine: VllmBackend) -> None:
    with pytest.raises(InvalidRequest):
        await answer(engine, greedy("x", n=3, sampling=HOT, constraint=GbnfConstraint("root ::= (")))
    await until(engine, running=0)


# --- prefixes ------------------------------------------------------------

STORY = "The old mill stands by the river, and nobody has been there for years. " * 8


def turns(*texts: str) -> ChatPrompt:
    roles = ("user", "assistant")
    return ChatPrompt(tuple(Message(roles[i % 2], (TextPart(text),)) for i, text in enumerate(texts)))  # type: ignore[arg-type]


async def test_a_conversations_second_turn_finds_the_first_cached(engine: VllmBackend) -> None:
    question = STORY + "Why?"
    first = await answer(engine, greedy(turns(question), 8))
    second = await answer(engine, greedy(turns(question, first.choice.text, "And then?"), 8))
    usage = second.completion.usage
    assert first.completion.usage.prompt_tokens // 32 * 32 <= usage.cached_tokens + 32
    assert 0 < usage.cached_tokens < usage.prompt_tokens
    whole = await answer(
        engine, greedy(turns(question, first.choice.text, "And then?"), 8, slot=SlotOptions(reuse=False))
    )
    assert whole.completion.usage.cached_tokens == 0


# --- resuming ------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"constraint": JsonSchemaConstraint(PERSON), "sampling": HOT},
        {"sampling": HOT, "ignore_eos": True},
        {"sampling": Sampling(temperature=0.0, presence_penalty=2.0, frequency_penalty=1.0), "ignore_eos": True},
    ],
    ids=["schema", "seed", "penalties"],
)
async def test_an_answer_goes_on_in_the_middle(engine: VllmBackend, fields: dict[str, object]) -> None:
    """Where its own tokens matter: the grammar goes on, the same numbers are drawn, penalties count what there was."""
    request = greedy("Describe a person.", 32, **fields)
    await answer(engine, request)
    whole = await answer(engine, request)
    for k in (1, len(whole.tokens) // 2, len(whole.tokens) - 1):
        rest = await answer(engine, msgspec.structs.replace(request, resume=whole.tokens[:k]))
        assert whole.tokens[:k] + rest.tokens == whole.tokens
        assert rest.choice.reason == whole.choice.reason
        assert rest.completion.usage.completion_tokens == len(whole.tokens)


# --- many at once ------------------------------------------------------------


async def test_streams_are_batched(engine: VllmBackend) -> None:
    """As many steps as one of them takes alone, and a few for their prompts."""
    await asyncio.gather(*(answer(engine, greedy(f"Count to {i}.", 2)) for i in range(SLOTS)))
    before = engine.stats()
    got = await asyncio.gather(*(answer(engine, greedy(f"Count to {i}.", 24, ignore_eos=True)) for i in range(SLOTS)))
    after = engine.stats()
    assert [len(one.tokens) for one in got] == [24] * SLOTS
    assert after.generated_tokens_total - before.generated_tokens_total == 24 * SLOTS
    assert after.steps_total - before.steps_total < 2 * 24


async def test_a_cancelled_request_leaves_the_engine(engine: VllmBackend) -> None:
    stream = engine.generate(greedy("Tell me a story.", 900, ignore_eos=True))
    await anext(stream)
    await stream.aclose()
    await until(engine, running=0)
    await asyncio.sleep(0.5)
    steps = engine.stats().steps_total
    await asyncio.sleep(0.5)
    assert engine.stats().steps_total == steps, "nothing is computed any more"


# --- text ------------------------------------------------------------


async def test_pieces_are_the_text(engine: VllmBackend) -> None:
    for text in ("", "Hello, world", "zwölf Boxkämpfer 🥊 jagen", "<|im_start|>user\nhi<|im_end|>", "a  b\n\n\tc"):
        pieces = await engine.tokenize(text)
        assert b"".join(piece.data for piece in pieces).decode() == text
        assert await engine.detokenize([piece.token for piece in pieces]) == text
    assert len(await engine.tokenize("<|im_start|>")) == 1
    assert len(await engine.tokenize("<|im_start|>", parse_special=False)) > 1


async def test_a_prompt_of_tokens(engine: VllmBackend) -> None:
    tokens = tuple(piece.token for piece in await engine.tokenize("Once upon a time"))
    by_tokens = await answer(engine, greedy(TokenPrompt(tokens), 6))
    by_text = await answer(engine, greedy(TextPrompt("Once upon a time"), 6))
    assert by_tokens.tokens == by_text.tokens
    with pytest.raises(InvalidRequest):
        await answer(engine, greedy(TokenPrompt((10**6,)), 6))


async def test_text_is_what_the_tokens_say(engine: VllmBackend) -> None:
    """However the characters lie over the tokens."""
    got = await answer(engine, greedy("Write ten emoji 🎉🥊🚀 and nothing else.", 24, sampling=HOT, ignore_eos=True))
    vocabulary = engine._alive().vocabulary
    assert got.choice.text == b"".join(map(vocabulary.piece, got.tokens)).decode("utf-8", "replace")


WEATHER = Tool(
    "get_weather",
    "The weather in a city",
    {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]},
)


@pytest.mark.parametrize("sampling", [GREEDY, HOT])
async def test_a_tool_that_must_be_called_is(engine: VllmBackend, sampling: Sampling) -> None:
    prompt = msgspec.structs.replace(
        chat("How is the weather?"), tools=(WEATHER,), tool_choice=ToolChoice("required", parallel=False)
    )
    got = await answer(engine, greedy(prompt, 60, sampling=sampling))
    (call,) = got.choice.tool_calls
    assert call.name == "get_weather"
    assert json.loads(call.arguments)["city"] in ("Rome", "Oslo")
    assert got.choice.reason == "tool_calls"


async def test_a_strict_tool_need_not_be_called(engine: VllmBackend) -> None:
    """What the model says is what it says without the tool being strict; a call that it has begun fits the schema."""
    tools = {strict: (msgspec.structs.replace(WEATHER, strict=strict),) for strict in (True, False)}
    prompts = {
        strict: msgspec.structs.replace(chat("Hello!"), tools=given, tool_choice=ToolChoice(parallel=False))
        for strict, given in tools.items()
    }
    _, free, held = [  # the first is for the others, which find the prompt cached
        (await answer(engine, greedy(prompts[strict], 12))).choice.text for strict in (False, False, True)
    ]
    assert held == free
    begun = tuple(piece.token for piece in await engine.tokenize('Well. <tool_call>\n{"name": "'))
    for sampling in (GREEDY, HOT):
        got = await answer(engine, greedy(prompts[True], 80, resume=begun, sampling=sampling))
        (call,) = got.choice.tool_calls
        assert (call.name, json.loads(call.arguments)["city"] in ("Rome", "Oslo")) == ("get_weather", True)


async def test_what_it_cannot_do_is_said(engine: VllmBackend) -> None:
    with pytest.raises(NotSupported):
        await answer(engine, greedy(InfillPrompt("a", "b")))
    with pytest.raises(NotSupported):
        await engine.slots()
    with pytest.raises(InvalidRequest) as refusal:
        await answer(engine, greedy("x", lora=(LoraScale(0, 1.0),)))
    assert refusal.value.param == "lora"


async def test_the_card(engine: VllmBackend) -> None:
    card = engine.card()
    assert (card.engine, card.slots, card.context_length) == ("vllm", SLOTS, 1024)
    assert card.vocab_size == 49152
    assert "<|im_start|>" in card.chat_template
    assert card.sampling.temperature == 1.0
