"""llama.cpp's routes over HTTP, with the fake engine behind them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from backends.fake import FakeBackend, FakeFault, FakeSettings
from deployments.http import build_app
from deployments.local import LocalPool
from deployments.models import ModelEntry
from deployments.settings import GatewaySettings
from protocols.calls import ApplyTemplate, Detokenize, Embedding, Piece, SlotState, Tokenize
from protocols.errors import BackendLost
from protocols.llamacpp_native import questions
from protocols.sse import SseParser
from tests.deployments.support import HELLO, STARTED, Exchange, ScriptedPool, eventually, text

SETTINGS = GatewaySettings(headers_after_s=1000, keepalive_s=1000)
FAKE = FakeSettings(slots=2, context_length=64, tokens=4, adapters=("a.gguf",))


@pytest.fixture
async def backend() -> AsyncIterator[FakeBackend]:
    backend = FakeBackend(FAKE)
    await backend.start()
    yield backend
    await backend.aclose()


@pytest.fixture
async def http(backend: FakeBackend) -> AsyncIterator[httpx.AsyncClient]:
    app = build_app(LocalPool({"m": backend}, {"m": 100}), SETTINGS, echo_request_id=False)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        yield client


async def post(http: httpx.AsyncClient, path: str, body: Any, status: int = 200) -> Any:
    response = await http.post(path, json=body)
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    return response.json()


async def get(http: httpx.AsyncClient, path: str, status: int = 200) -> Any:
    response = await http.get(path)
    assert response.status_code == status, response.text
    return response.json()


async def streamed(http: httpx.AsyncClient, path: str, body: Any) -> list[Any]:
    response = await http.post(path, json={**body, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    return [json.loads(event.data) for event in SseParser().feed(response.content)]


# --- completions ------------------------------------------------------------


@pytest.mark.parametrize("path", ["/completion", "/completions"])
async def test_a_completion_has_all_that_llama_cpp_says(http: httpx.AsyncClient, path: str) -> None:
    body = await post(http, path, {"prompt": "one two", "n_predict": 3, "return_tokens": True})
    assert list(body) == [
        "index", "content", "tokens", "id_slot", "stop", "model", "tokens_predicted", "tokens_evaluated",
        "generation_settings", "prompt", "has_new_line", "truncated", "stop_type", "stopping_word", "tokens_cached",
        "timings",
    ]  # fmt: skip
    assert body["content"] == "".join(f" token{token}" for token in body["tokens"])
    assert (body["tokens_predicted"], body["tokens_evaluated"], body["tokens_cached"]) == (3, 2, 5)
    assert (body["model"], body["prompt"], body["stop_type"], body["id_slot"]) == ("m", "one two", "limit", 0)
    assert body["generation_settings"]["n_predict"] == 3


async def test_streamed_and_whole_are_the_same(http: httpx.AsyncClient) -> None:
    asked = {"prompt": "one", "return_tokens": True}
    whole = await post(http, "/completion", asked)
    *partials, final = await streamed(http, "/completion", asked)
    assert "".join(item["content"] for item in partials) == whole["content"]
    assert [token for item in partials for token in item["tokens"]] == whole["tokens"]
    assert [item["stop"] for item in partials] == [False] * len(partials)
    assert (final["stop"], final["content"], final["tokens_predicted"]) == (True, "", whole["tokens_predicted"])


async def test_no_tokens_wanted_still_yields_one(http: httpx.AsyncClient) -> None:
    assert (await post(http, "/completion", {"prompt": "one", "n_predict": 0}))["tokens_predicted"] == 1


@pytest.mark.parametrize(("fields", "count"), [({"prompt": ["a", [1, "b"], {"prompt_string": "a"}]}, 3), ({"n": 2}, 2)])
async def test_several_answers_are_a_list(http: httpx.AsyncClient, fields: dict[str, Any], count: int) -> None:
    asked = {"prompt": "a", **fields}
    whole = await post(http, "/completion", asked)
    assert [item["index"] for item in whole] == list(range(count))
    stream = await streamed(http, "/completion", asked)
    for item in whole:
        mine = [partial for partial in stream if partial["index"] == item["index"]]
        assert "".join(partial["content"] for partial in mine) == item["content"]
        assert [partial["stop"] for partial in mine].count(True) == 1
        assert mine[-1]["prompt"] == item["prompt"]


@pytest.mark.parametrize("path", ["/completion", "/chat/completions"])
async def test_a_model_of_null_is_none(http: httpx.AsyncClient, path: str) -> None:
    asked = {"model": None, "prompt": "a", "messages": [{"role": "user", "content": "a"}], "n_predict": 1}
    assert (await post(http, path, asked))["model"] == "m"
    await post(http, "/tokenize", {"model": None, "content": "a"}, status=501)  # the fake has no tokenizer


async def test_progress_goes_from_what_was_cached_to_all(http: httpx.AsyncClient) -> None:
    reports = [
        item["prompt_progress"]
        for item in await streamed(http, "/completion", {"prompt": "a b", "return_progress": True})
        if "prompt_progress" in item
    ]
    assert [(item["processed"], item["total"], item["cache"]) for item in reports] == [(0, 2, 0), (2, 2, 0)]


async def test_progress_comes_with_timings_where_those_are_asked_for(http: httpx.AsyncClient) -> None:
    asked = {"prompt": "a b", "return_progress": True, "timings_per_token": True}
    begun, done = [item["timings"] for item in await streamed(http, "/completion", asked) if "prompt_progress" in item]
    assert (begun["prompt_n"], begun["prompt_ms"], begun["predicted_n"]) == (0, 0.0, 0)
    assert (done["prompt_n"], done["predicted_n"]) == (2, 0)


async def test_timings_come_with_each_token_where_they_are_asked_for(http: httpx.AsyncClient) -> None:
    *partials, final = await streamed(http, "/completion", {"prompt": "a", "timings_per_token": True})
    assert [item["timings"]["predicted_n"] for item in partials] == [1, 2, 3, 4]
    assert "timings" in final
    *partials, final = await streamed(http, "/completion", {"prompt": "a"})
    assert not any("timings" in item for item in partials)


@pytest.mark.parametrize("path", ["/chat/completions", "/v1/chat/completions", "/v1/completions"])
async def test_progress_and_timings_are_extras_of_openais_streams_too(http: httpx.AsyncClient, path: str) -> None:
    prompt = {"messages": [{"role": "user", "content": "a b"}]} if "chat" in path else {"prompt": "a b"}
    asked = {"model": "m", **prompt, "n_predict": 4, "return_progress": True, "timings_per_token": True, "stream": True}
    events = SseParser().feed((await http.post(path, json=asked)).content)
    chunks = [json.loads(event.data) for event in events if event.data != "[DONE]"]
    told = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    total = told[-1]["total"]
    assert [(item["processed"], item["cache"]) for item in told] == [(0, 0), (total, 0)], "the prompt took one step"
    assert [chunk["timings"]["predicted_n"] for chunk in chunks if "timings" in chunk] == [1, 2, 3, 4, 4]


async def test_an_answer_that_fills_the_context_is_truncated(http: httpx.AsyncClient) -> None:
    asked = {"prompt": "a", "ignore_eos": True}
    assert (await post(http, "/completion", asked))["truncated"]
    assert not (await post(http, "/completion", {**asked, "n_predict": 3}))["truncated"]


async def test_a_gap_is_filled(http: httpx.AsyncClient) -> None:
    body = await post(http, "/infill", {"input_prefix": "a b", "input_suffix": "c", "prompt": "d"})
    assert body["tokens_evaluated"] == 4


@pytest.mark.parametrize("path", ["/completion", "/infill", "/chat/completions", "/tokenize", "/embedding", "/rerank"])
async def test_errors_are_in_llama_cpps_words(http: httpx.AsyncClient, path: str) -> None:
    response = await http.post(path, content=b"{")
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["type"]) == (400, 400, "invalid_request_error")


async def test_a_prompt_that_is_too_long_names_both_lengths(http: httpx.AsyncClient) -> None:
    error = (await post(http, "/completion", {"prompt": "a " * 100}, 400))["error"]
    assert (error["type"], error["n_prompt_tokens"], error["n_ctx"]) == ("exceed_context_size_error", 100, 64)


@pytest.mark.parametrize("path", ["/nothing", "/v1/nothing"])
async def test_an_unknown_route_is_told_in_the_words_of_its_prefix(http: httpx.AsyncClient, path: str) -> None:
    error = (await get(http, path, 404))["error"]
    assert error["code"] == ("not_found" if path.startswith("/v1/") else 404)


async def test_an_error_after_the_headers_ends_the_stream_in_llama_cpps_words() -> None:
    app = build_app(ScriptedPool([STARTED, text("a", 1), BackendLost("lost")]), SETTINGS, echo_request_id=False)
    exchange = await Exchange(app, "POST", "/completion", b'{"prompt": "a", "stream": true}').done()
    partial, error = (json.loads(event.data) for event in SseParser().feed(exchange.body))
    assert (exchange.status, partial["content"]) == (200, "a")
    assert error == {"error": {"code": 503, "message": "lost", "type": "unavailable_error"}}


async def test_silence_is_filled() -> None:
    gate = asyncio.Event()
    settings = GatewaySettings(headers_after_s=0.01, keepalive_s=0.01)
    app = build_app(ScriptedPool([gate, *HELLO]), settings, echo_request_id=False)
    exchange = Exchange(app, "POST", "/completion", b'{"prompt": "a", "stream": true}')
    await eventually(lambda: exchange.body.startswith(b": keep-alive\n\n"))
    gate.set()
    await exchange.done()
    assert [json.loads(event.data)["content"] for event in SseParser().feed(exchange.body)] == ["Hel", "lo", ""]


async def test_a_client_that_leaves_frees_its_slot(backend: FakeBackend) -> None:
    app = build_app(LocalPool({"m": backend}, {"m": 1}), SETTINGS, echo_request_id=False)
    exchange = Exchange(app, "POST", "/completion", b'{"prompt": "a", "stream": true, "n_predict": 1000}')
    await eventually(lambda: exchange.sent)
    exchange.disconnect()
    await exchange.done()
    assert backend.stats().running == 0


async def test_chat_without_a_model_begins_with_a_null_role_chunk(http: httpx.AsyncClient) -> None:
    asked = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
    response = await http.post("/chat/completions", json=asked)
    first = json.loads(SseParser().feed(response.content)[0].data)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": None}
    assert first["model"] == "m"
    error = (await post(http, "/v1/chat/completions", asked, 400))["error"]
    assert error["param"] == "model"


# --- which model ------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [("POST", "/completion", {"prompt": "a"}), ("POST", "/embeddings", {"input": "a"}), ("GET", "/slots", None)],
)
async def test_who_names_no_model_is_told_which_there_are(method: str, path: str, body: Any) -> None:
    async def answer(models: list[ModelEntry], path: str = path) -> Exchange:
        app = build_app(ScriptedPool(HELLO, models), SETTINGS, echo_request_id=False)
        return await Exchange(app, method, path, json.dumps(body).encode()).done()

    several = await answer([ModelEntry("a", 1), ModelEntry("b", 1)])
    assert several.status == 400
    assert several.json["error"]["message"] == "Say in 'model' which one is asked: a, b."
    assert (await answer([])).status == 503


async def test_the_model_of_a_question_may_stand_in_the_query(backend: FakeBackend) -> None:
    pool = ScriptedPool(HELLO, [ModelEntry("a", 1), ModelEntry("b", 1)])
    pool.backend = backend
    app = build_app(pool, SETTINGS, echo_request_id=False)
    assert (await Exchange(app, "GET", "/slots?model=b").done()).status == 200
    assert pool.calls[0].model == "b"


# --- questions ------------------------------------------------------------


class Canned(ScriptedPool):
    """A pool whose model answers every question the same."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self._answer = answer

    async def call(self, call: Any) -> Any:
        self.calls.append(call)
        return self._answer


async def asked(answer: Any, path: str, body: Any) -> tuple[Any, Any]:
    """What the model was asked, and what came out."""
    pool = Canned(answer)
    exchange = await Exchange(
        build_app(pool, SETTINGS, echo_request_id=False), "POST", path, json.dumps(body).encode()
    ).done()
    assert exchange.status == 200, exchange.body
    return pool.calls[0], exchange.json


async def test_a_text_is_tokenised() -> None:
    pieces = [Piece(1, b"a"), Piece(2, b"\xe5")]
    question, body = await asked(pieces, "/tokenize", {"content": "aå", "parse_special": False})
    assert (question.parts, question.parse_special) == (("aå",), False) and isinstance(question, Tokenize)
    assert body == {"tokens": [1, 2]}
    _, body = await asked(pieces, "/tokenize", {"content": "aå", "with_pieces": True})
    assert body == {"tokens": [{"id": 1, "piece": "a"}, {"id": 2, "piece": [0xE5]}]}


async def test_tokens_are_a_text() -> None:
    question, body = await asked("ab", "/detokenize", {"tokens": [1, 2]})
    assert isinstance(question, Detokenize) and body == {"content": "ab"}


async def test_a_template_is_applied() -> None:
    question, body = await asked("<user>Hi", "/apply-template", {"messages": [{"role": "user", "content": "Hi"}]})
    assert isinstance(question, ApplyTemplate) and body == {"prompt": "<user>Hi"}


async def test_vectors_in_llama_cpps_shape(http: httpx.AsyncClient) -> None:
    body = await post(http, "/embeddings", {"input": ["one", [1, 2]]})
    assert [item["index"] for item in body] == [0, 1]
    assert all(len(item["embedding"]) == 1 and len(item["embedding"][0]) == 8 for item in body)
    assert await post(http, "/embedding", {"content": ["one", [1, 2]]}) == body
    assert await post(http, "/v1/embeddings", {"content": ["one", [1, 2]]}) == body


async def test_vectors_of_single_tokens_are_rows() -> None:
    answer = [Embedding(bytes(24), 2, 3)]
    assert (await asked(answer, "/embedding", {"input": "a"}))[1] == [{"index": 0, "embedding": [[0.0, 0.0]] * 3}]


async def test_the_openai_sdk_gets_vectors(backend: FakeBackend) -> None:
    pool = LocalPool({"m": backend}, {"m": 100})
    app = build_app(pool, SETTINGS, echo_request_id=False)
    transport = openai.DefaultAsyncHttpxClient(transport=_asgi(app))
    async with openai.AsyncOpenAI(base_url="http://test/v1", api_key="k", http_client=transport) as sdk:
        both = [
            await sdk.embeddings.create(model="m", input=["one", "two three"], encoding_format=form)
            for form in ("float", "base64")
        ]
        assert [len(item.embedding) for item in both[0].data] == [8, 8]
        assert both[0].usage.prompt_tokens == 3
        with pytest.raises(openai.BadRequestError, match="have 8"):
            await sdk.embeddings.create(model="m", input="one", dimensions=4)
        with pytest.raises(openai.NotFoundError) as caught:
            await sdk.embeddings.create(model="other", input="one")
        assert caught.value.code == "model_not_found"


def _asgi(app: Any) -> Any:
    import httpx2

    return httpx2.ASGITransport(app)


async def test_documents_are_ranked(http: httpx.AsyncClient) -> None:
    asked = {"query": "one two", "documents": ["two", "none", "one two"], "top_n": 2}
    for path in ("/rerank", "/reranking", "/v1/rerank", "/v1/reranking"):
        body = await post(http, path, asked)
        assert [item["index"] for item in body["results"]] == [2, 0]
        assert body["usage"] == {"prompt_tokens": 10, "total_tokens": 10}
        assert (body["model"], body["object"]) == ("m", "list")
    texts = {"query": "one two", "texts": ["two", "one two"], "return_text": True}
    assert await post(http, "/rerank", texts) == [
        {"index": 1, "score": 1.0, "text": "one two"},
        {"index": 0, "score": 0.5, "text": "two"},
    ]


async def test_what_a_model_cannot_do_is_501(http: httpx.AsyncClient) -> None:
    error = (await post(http, "/tokenize", {"content": "a"}, 501))["error"]
    assert error["type"] == "not_supported_error"


async def test_props_say_what_the_model_is(http: httpx.AsyncClient) -> None:
    body = await get(http, "/props")
    assert (body["total_slots"], body["default_generation_settings"]["n_ctx"]) == (2, 64)
    assert body["model_alias"] == "m"
    assert "seed" in body["default_generation_settings"]["params"]


async def test_slots_say_who_has_them() -> None:
    backend = FakeBackend(FAKE.model_copy(update={"fail_at": FakeFault(after_tokens=1, action="hang")}))
    await backend.start()
    app = build_app(LocalPool({"m": backend}, {"m": 1}), SETTINGS, echo_request_id=False)
    running = Exchange(app, "POST", "/completion", b'{"prompt": "a b", "stream": true, "n_predict": 50, "seed": 5}')
    await eventually(lambda: b'"tokens_predicted":1' in running.body)
    busy, idle = (await Exchange(app, "GET", "/slots").done()).json
    running.disconnect()
    await running.done()
    assert (busy["id"], busy["n_ctx"], busy["is_processing"], busy["n_prompt_tokens"]) == (0, 64, True, 2)
    assert busy["next_token"] == [{"has_next_token": True, "n_remain": 49, "n_decoded": 1}]
    assert busy["params"]["seed"] == 5
    assert (idle["id"], idle["is_processing"], "params" in idle) == (1, False, False)
    assert idle["next_token"] == [{"has_next_token": False, "n_remain": -1, "n_decoded": 0}]
    await backend.aclose()


def test_slots_of_several_replicas_are_told_apart() -> None:
    ask = questions.slots(b"", "r1")
    told = json.loads(ask.render([SlotState(0, 64, 3, replica="alpha"), SlotState(0, 64, 0, replica="beta")], "m"))
    assert [(slot["id"], slot["replica"], slot["n_prompt_tokens"]) for slot in told] == [
        (0, "alpha", 3), (0, "beta", 0),
    ]  # fmt: skip
    (alone,) = json.loads(ask.render([SlotState(0, 64, 3)], "m"))
    assert "replica" not in alone


async def test_slots_are_saved_restored_and_erased(http: httpx.AsyncClient) -> None:
    await post(http, "/completion", {"prompt": "one two", "n_predict": 3, "id_slot": 0})
    saved = await post(http, "/slots/0?action=save", {"filename": "f"})
    assert saved == {
        "id_slot": 0, "filename": "f", "n_saved": 5, "n_written": 20, "timings": {"save_ms": 0.0},
    }  # fmt: skip
    assert (await http.post("/slots/0?action=erase")).json() == {"id_slot": 0, "n_erased": 5}
    restored = await post(http, "/slots/0?action=restore", {"filename": "f"})
    assert (restored["n_restored"], restored["n_read"]) == (5, 20)


@pytest.mark.parametrize("path", ["/slots/x?action=save", "/slots/0?action=copy", "/slots/0", "/slots/9?action=erase"])
async def test_what_cannot_be_done_to_a_slot_is_400(http: httpx.AsyncClient, path: str) -> None:
    error = (await post(http, path, {}, 400))["error"]
    assert error["type"] == "invalid_request_error"


async def test_adapters_are_listed_and_scaled(http: httpx.AsyncClient) -> None:
    assert await post(http, "/lora-adapters", [{"id": 0, "scale": 0.5}]) == {"success": True}
    assert await get(http, "/lora-adapters") == [
        {"id": 0, "path": "a.gguf", "scale": 0.5, "task_name": "", "prompt_prefix": ""}
    ]


async def test_a_question_ends_with_its_client(backend: FakeBackend) -> None:
    """A slot that is busy is waited for."""
    app = build_app(LocalPool({"m": backend}, {"m": 1}), SETTINGS, echo_request_id=False)
    waiting = asyncio.Event()
    left = asyncio.Event()

    async def wait(slot: int) -> int:
        waiting.set()
        try:
            await asyncio.Event().wait()
        finally:
            left.set()
        return 0

    backend.erase_slot = wait  # type: ignore[method-assign]
    exchange = Exchange(app, "POST", "/slots/0?action=erase", b"")
    await eventually(waiting.is_set)
    exchange.disconnect()
    await exchange.done()
    assert left.is_set() and exchange.sent == []
