"""Aliases, adapters as models of their own, and what a model's config adds to requests."""

from __future__ import annotations

from typing import Any

import pytest

from backends.fake import FakeBackend, FakeSettings
from deployments import config
from deployments.http import build_app
from deployments.models import ModelEntry, NamedAdapter, Offer, the_only_model
from deployments.naming import NamedModels, offer_of, with_defaults
from deployments.settings import ConfigError, GatewaySettings
from protocols.calls import CountTokens, EmbeddingRequest
from protocols.request import ChatPrompt, LoraScale, Reasoning, Sampling, TextPrompt
from tests.deployments.support import HELLO, ScriptedPool, request

LLAMACPP = {"kind": "llamacpp", "model": "m.gguf"}


def entry(id: str, **offer: Any) -> ModelEntry:
    return ModelEntry(id, 7, offer=Offer(**offer))


async def sent(pool: ScriptedPool, **fields: Any) -> Any:
    """What the pool is asked, for a request with `fields`."""
    assert [frame async for frame in NamedModels(pool).stream(request(**fields))] == HELLO
    return pool.requests[-1]


# --- names ---------------------------------------------------------------------


async def test_an_alias_is_its_model() -> None:
    pool = ScriptedPool(HELLO, [entry("m", aliases=("gpt-4o",)), entry("other")])
    assert (await sent(pool, model="gpt-4o")).model == "m"
    assert (await sent(pool, model="other")).model == "other"


async def test_a_name_nobody_has_is_left_to_the_pool() -> None:
    """It looks for models it does not know yet, and lists those it knows."""
    assert (await sent(ScriptedPool(HELLO, [entry("m")]), model="new")).model == "new"


async def test_an_id_is_not_taken_over_by_anothers_alias() -> None:
    pool = ScriptedPool(HELLO, [entry("a", aliases=("b",)), entry("b")])
    assert (await sent(pool, model="b")).model == "b"
    assert [e.id for e in NamedModels(pool).models()] == ["a", "b"]


async def test_an_adapter_is_a_model_of_its_own() -> None:
    pool = ScriptedPool(HELLO, [entry("m", adapters=(NamedAdapter("sql", 0), NamedAdapter("law", 1, 0.5)))])
    assert (await sent(pool, model="m")).lora is None
    asked = await sent(pool, model="m:law")
    assert (asked.model, asked.lora) == ("m", (LoraScale(1, 0.5),))
    asked = await sent(pool, model="m:law", lora=(LoraScale(0, 2.0),))
    assert asked.lora == (LoraScale(0, 2.0),), "a request's own scales count"


async def test_questions_know_the_names_too() -> None:
    pool = ScriptedPool(HELLO, [entry("m", aliases=("x",), max_tokens=5)])
    pool.backend = FakeBackend(FakeSettings())
    await pool.backend.start()
    named = NamedModels(pool)
    assert await named.call(EmbeddingRequest("q", "x", (TextPrompt("a"),)))
    assert await named.call(CountTokens("q", "x", request(model="x"))) > 0
    assert [call.model for call in pool.calls] == ["m", "m"]
    assert pool.counted[0].model == "m"
    await pool.backend.aclose()


async def test_all_names_are_listed_and_one_model_is_still_the_only_one() -> None:
    pool = NamedModels(ScriptedPool(HELLO, [entry("m", aliases=("gpt-4o",), adapters=(NamedAdapter("sql", 0),))]))
    assert [(e.id, e.of) for e in pool.models()] == [("gpt-4o", "m"), ("m", ""), ("m:sql", "m")]
    assert the_only_model(pool) == "m"
    build_app(pool, GatewaySettings(), echo_request_id=True)


# --- defaults ------------------------------------------------------------------


def test_defaults_are_for_what_a_request_leaves_open() -> None:
    offer = Offer(sampling=Sampling(temperature=0.6, top_p=0.9), max_tokens=100, reasoning=Reasoning(effort="low"))
    filled = with_defaults(request(), offer)
    assert filled.sampling == Sampling(temperature=0.6, top_p=0.9)
    assert filled.max_tokens == 100
    assert isinstance(filled.prompt, ChatPrompt) and filled.prompt.reasoning == Reasoning(effort="low")
    own = request(sampling=Sampling(temperature=0.0, seed=1), max_tokens=7)
    assert with_defaults(own, offer).sampling == Sampling(temperature=0.0, top_p=0.9, seed=1)
    assert with_defaults(own, offer).max_tokens == 7
    assert with_defaults(own, Offer()) is own


def test_a_request_that_says_anything_about_reasoning_is_left_as_it_is() -> None:
    prompt = ChatPrompt((), reasoning=Reasoning(enabled=False))
    asked = request()
    asked = type(asked)(asked.id, asked.model, prompt)
    assert with_defaults(asked, Offer(reasoning=Reasoning(effort="high"))).prompt == prompt


# --- configs -------------------------------------------------------------------


def test_what_a_config_offers() -> None:
    adapters = [{"path": "a/sql.gguf"}, {"path": "hf://o/r/law.gguf@v1", "scale": 0}, {"path": "x.gguf", "name": "y"}]
    offer = offer_of(
        {
            "args": {
                "backend": {**LLAMACPP, "adapters": adapters},
                "aliases": ["gpt-4o"],
                "defaults": {"temperature": 0.2, "max_tokens": 9, "reasoning": {"enabled": False}},
            }
        }
    )
    assert offer == Offer(
        ("gpt-4o",),
        (NamedAdapter("sql", 0), NamedAdapter("law", 1), NamedAdapter("y", 2)),
        Sampling(temperature=0.2),
        9,
        Reasoning(enabled=False),
    )
    fake = {"backend": {"kind": "fake", "adapters": ["z.gguf"]}}
    assert offer_of({"args": fake}).adapters == (NamedAdapter("z", 0),)
    assert offer_of({"args": {"unknown": 1}}) == Offer()


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        ({"aliases": ["b"]}, {}, "model 'a': cannot be called 'b' too, which model 'b' is called"),
        ({"aliases": ["x"]}, {"aliases": ["x"]}, "model 'b': cannot be called 'x' too, which model 'a' is called"),
        ({"aliases": ["a"]}, {}, "model 'a': cannot be called 'a' too, which model 'a' is called"),
        (
            {"adapters": ["p/z.gguf", "q/z.gguf"]},
            {},
            "model 'a': cannot be called 'a:z' too, which model 'a' is called",
        ),
    ],
)
def test_a_name_for_two_is_an_error(first: dict[str, Any], second: dict[str, Any], says: str) -> None:
    def app(name: str, given: dict[str, Any]) -> dict[str, Any]:
        backend = {"kind": "fake", "adapters": given.get("adapters", [])}
        args = {"backend": backend, "aliases": given.get("aliases", [])}
        return {"name": name, "import_path": config.MODEL_IMPORT, "args": args}

    with pytest.raises(ConfigError) as caught:
        config.our_parts({"applications": [app("a", first), app("b", second)]})
    assert str(caught.value) == says


@pytest.mark.parametrize(
    ("defaults", "says"),
    [
        ({"temprature": 1}, "args.defaults.temprature: unknown key, did you mean 'temperature'?"),
        ({"temperature": -1}, "args.defaults.temperature: "),
        ({"reasoning": {"efort": "low"}}, "args.defaults.reasoning.efort: unknown key, did you mean 'effort'?"),
    ],
)
def test_wrong_defaults_are_named(defaults: dict[str, Any], says: str) -> None:
    app = {"name": "m", "import_path": config.MODEL_IMPORT, "args": {"backend": LLAMACPP, "defaults": defaults}}
    with pytest.raises(ConfigError) as caught:
        config.our_parts({"applications": [app]})
    assert says in str(caught.value)
