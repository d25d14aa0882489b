"""llama-server's command line, and what it makes of requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from backends.fake import FakeBackend, FakeSettings
from deployments.http import build_app
from deployments.llama_server.flags import FLAGS, REFUSED, WITHOUT_MEANING, UsageError, parse
from deployments.llama_server.pool import OneModelPool
from deployments.llama_server.settings import Defaults, defaults, model_settings
from deployments.local import LocalPool
from deployments.models import ModelEntry
from deployments.settings import GatewaySettings
from protocols.request import Sampling

# --- the command line -------------------------------------------------------------------------------------------------


def settings(line: str) -> Any:
    return model_settings(parse(["--model", "m.gguf", *line.split()]))


def test_flags_have_their_short_and_long_names() -> None:
    short, long = parse(["-m", "a", "-np", "2", "-fa", "on", "-n", "-1"]), "--model a --parallel 2 --flash-attn 1"
    assert short == parse([*long.split(), "--n-predict=-1"])
    assert (short.model, short.slots, short.flash_attention, short.max_tokens) == ("a", 2, "on", -1)


def test_the_last_word_counts_but_adapters_add_up() -> None:
    options = parse(["--slots", "--no-slots", "--lora", "a,b", "--lora-scaled", "c:0.5"])
    assert not options.show_slots
    assert options.adapters == (("a", 1.0), ("b", 1.0), ("c", 0.5))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--ctx-sise 4", "unknown flag --ctx-sise, did you mean '--ctx-size'?"),
        ("--parallel two", "argument -np/--parallel: invalid int value: 'two'"),
        ("--pooling most", "argument --pooling: expected one of none, mean, cls, last, rank, not 'most'"),
        ("--model", "argument -m/--model: expected one argument"),
        ("--hf-repo a/b", "--hf-repo cannot be followed: the model is a file here: --model FILE"),
        ("--tools=all", "--tools cannot be followed: no tools are run here"),
    ],
)
def test_what_cannot_be_followed_is_said(line: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(line.split())
    assert str(caught.value) == message


def test_flags_without_meaning_are_noted_and_take_their_values_along() -> None:
    options = parse(["--cont-batching", "--threads-http", "4", "--alias", "a"])
    assert options.without_meaning == ("--cont-batching", "--threads-http")
    assert options.aliases == ("a",)


@pytest.mark.parametrize(("flag", "words"), [("-h", "--ctx-size"), ("--version", "tokenyard ")])
def test_help_is_there(flag: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse([flag])
    assert ended.value.code == 0
    assert words in capsys.readouterr().out


def test_no_flag_has_two_meanings() -> None:
    names = [name for flag in FLAGS for name in flag.names]
    names += [*WITHOUT_MEANING, *(name for line in REFUSED.values() for name in line.split())]
    assert len(names) == len(set(names))


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "context", "kv_size"),
    [
        ("--ctx-size 512 --parallel 2", 256, None),
        ("--ctx-size 512 --parallel 2 --kv-unified", 512, 512),
        ("--ctx-size 512", 512, 512),  # four slots that share it
        ("--ctx-size 100 --parallel 4 --kv-unified", 100, 256),
        ("--parallel 2", 2**24, None),
        ("", 2**24, None),
    ],
)
def test_the_context_is_shared_out(line: str, context: int, kv_size: int | None) -> None:
    made = settings(line)
    assert (made.context_length, made.kv_size) == (context, kv_size)
    assert made.unified_kv == ("--kv-unified" in line or "--parallel" not in line)


def test_speculation_is_by_draft_where_a_draft_is_named() -> None:
    assert settings("").speculation.kind == "off"
    assert settings("--spec-type ngram-mod --model-draft d.gguf").speculation.draft_model is None
    made = settings("--model-draft d.gguf --spec-draft-n-max 8").speculation
    assert (made.kind, made.draft_model, made.max_tokens) == ("draft", "d.gguf", 8)


def test_batches_are_as_large_as_they_must_be() -> None:
    made = settings("--batch-size 16")
    assert (made.batch_size, made.micro_batch_size) == (32, 32)


def test_a_chat_template_is_a_name_a_text_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("from a file")
    assert "<|START_OF_TURN_TOKEN|>" in (settings("--chat-template command-r").chat_template or "")
    assert settings("--chat-template {{text}}").chat_template == "{{text}}"
    assert settings(f"--chat-template-file {file}").chat_template == "from a file"
    with pytest.raises(UsageError, match="No such file"):
        settings(f"--chat-template-file {file}.not")


def test_a_model_is_needed_and_a_wrong_setting_is_named() -> None:
    with pytest.raises(UsageError, match="no model"):
        model_settings(parse([]))
    with pytest.raises(UsageError, match="cache_type_k"):
        settings("--cache-type-k q9_9")


def test_what_requests_get() -> None:
    said = defaults(parse("--temp 0.5 --seed -1 --top-k 3 -n 8 --reasoning off --reasoning-budget 5 -v".split()))
    assert said == Defaults(Sampling(temperature=0.5, top_k=3), 8, False, False, 5, True)
    assert defaults(parse([])) == Defaults(think=True)


# --- requests ---------------------------------------------------------------------------------------------------------


async def answers(asked: Defaults, path: str, *bodies: Any, show_slots: bool = True) -> list[httpx.Response]:
    """What a server with these defaults answers; it has one fake model."""
    backend = FakeBackend(FakeSettings(slots=2, context_length=64, tokens=40))
    await backend.start()
    entry = ModelEntry("a", 1, aliases=("a", "b"), tags=("t",))
    pool = OneModelPool(LocalPool({"a": backend}, {"a": 9}), entry, asked, show_slots=show_slots)
    transport = httpx.ASGITransport(build_app(pool, GatewaySettings(), echo_request_id=False))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        found = [await (http.get(path) if body is None else http.post(path, json=body)) for body in bodies]
    await backend.aclose()
    return found


async def test_a_limit_is_for_those_that_have_none() -> None:
    bodies = [{"prompt": "x", **more} for more in ({}, {"n_predict": 3}, {"n_predict": 30}, {"n_predict": -1})]
    found = await answers(Defaults(max_tokens=8), "/completion", *bodies)
    assert [answer.json()["tokens_predicted"] for answer in found] == [8, 3, 30, 8]


async def test_a_request_goes_before_the_defaults() -> None:
    asked = Defaults(Sampling(temperature=0.25, seed=7), max_tokens=1)
    found = await answers(asked, "/completion", {"prompt": "x"}, {"prompt": "x", "seed": 9})
    made = [answer.json()["generation_settings"] for answer in found]
    assert [(one["temperature"], one["seed"]) for one in made] == [(0.25, 7), (0.25, 9)]
    (props,) = await answers(asked, "/props", None)
    assert props.json()["default_generation_settings"]["params"]["seed"] == 7


async def test_every_model_name_is_the_model() -> None:
    body = {"model": "gpt-x", "messages": [{"role": "user", "content": "Hi"}]}
    (answer,) = await answers(Defaults(max_tokens=1), "/v1/chat/completions", body)
    assert answer.status_code == 200
    (models,) = await answers(Defaults(), "/models", None)
    (model,) = models.json()["data"]
    assert (model["id"], model["aliases"], model["tags"]) == ("a", ["a", "b"], ["t"])


async def test_slots_are_shown_or_not() -> None:
    (hidden,) = await answers(Defaults(), "/slots", None, show_slots=False)
    assert (hidden.status_code, hidden.json()["error"]["type"]) == (501, "not_supported_error")
    (shown,) = await answers(Defaults(), "/slots", None)
    assert len(shown.json()) == 2


async def test_what_the_engine_made_of_a_chat_is_shown_where_it_is_to_be() -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    found = await answers(Defaults(max_tokens=2), "/chat/completions", body, {**body, "verbose": True})
    assert "__verbose" not in found[0].json()
    assert "Hi" in found[1].json()["__verbose"]["prompt"]
    assert found[1].json()["__verbose"]["content"] == found[1].json()["choices"][0]["message"]["content"]
    whole, streamed = await answers(
        Defaults(max_tokens=2, echo=True), "/chat/completions", body, {**body, "stream": True}
    )
    chunks = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    (verbose,) = [chunk for chunk in chunks if "__verbose" in chunk]
    assert verbose["choices"][0]["finish_reason"] == "length"
    assert verbose["__verbose"]["prompt"] == whole.json()["__verbose"]["prompt"]


async def test_a_chats_tokens_can_be_counted() -> None:
    (answer,) = await answers(
        Defaults(), "/chat/completions/input_tokens", {"messages": [{"role": "user", "content": "a b c"}]}
    )
    assert answer.json()["object"] == "response.input_tokens"
    assert answer.json()["input_tokens"] >= 3
