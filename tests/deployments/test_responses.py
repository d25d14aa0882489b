"""Responses over HTTP, judged by the official SDK: the whole application over a fake engine, wires cut at random."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from openai.types.responses import Response, ResponseCompletedEvent, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from backends.fake import FakeBackend, FakeSettings
from deployments.http import build_app
from deployments.local import LocalPool
from deployments.middleware import KEY, ASGIApp, Receive, Scope, Send
from deployments.response_store import create
from deployments.responses import ResponseMemory
from deployments.settings import GatewaySettings, SqliteStoreSettings
from protocols.codec import Stamp
from protocols.errors import ContextOverflow, Unavailable
from protocols.events import Finished, TextDelta, ToolCallDelta, ToolCallEnded, ToolCallStarted, Usage
from protocols.request import ChatPrompt, Request
from protocols.sink import Sink
from protocols.sse import KEEPALIVE
from tests.deployments.support import HELLO, STARTED, Exchange, ScriptedPool, sse_events, text
from tests.protocols.openai_responses.support import AGENTS, FUNCTION, PATCH, SEARCH, read
from tests.protocols.openai_responses.test_decode import capture
from tests.protocols.scripts import COMPLETE, SCRIPTS, START

SEEDS = range(3)
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


class _Pieces(httpx2.AsyncByteStream):
    def __init__(self, raw: bytes, rng: random.Random) -> None:
        self._raw = raw
        self._rng = rng

    async def __aiter__(self) -> AsyncIterator[bytes]:
        raw, longest = self._raw, self._rng.choice((1, 3, 40, 10_000))
        while raw:
            size = self._rng.randint(1, longest)
            yield raw[:size]
            raw = raw[size:]


class Wire(httpx2.AsyncBaseTransport):
    """The app's answers in pieces of random size, with a keep-alive before each event of a stream."""

    def __init__(self, app: ASGIApp, seed: int) -> None:
        self._app = httpx2.ASGITransport(app)
        self._rng = random.Random(seed)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        answer = await self._app.handle_async_request(request)
        raw = await answer.aread()
        if answer.headers["content-type"].startswith("text/event-stream"):
            raw = raw.replace(b"event: ", KEEPALIVE + b"event: ")
        return httpx2.Response(answer.status_code, headers=answer.headers, stream=_Pieces(raw, self._rng))


class Served:
    """The application over one fake engine, whose requests are kept."""

    def __init__(self, path: Path, seed: int) -> None:
        self.backend = FakeBackend(FakeSettings(tokens=4))
        self.requests: list[Request] = []
        self.app = build_app(_Seen(self), settings(path), echo_request_id=True)
        self.sdk = openai.AsyncOpenAI(
            base_url="http://test/v1",
            api_key="k",
            max_retries=0,
            http_client=httpx2.AsyncClient(transport=Wire(self.app, seed)),
        )

    @property
    def prompt(self) -> ChatPrompt:
        """That of the last request."""
        prompt = self.requests[-1].prompt
        assert isinstance(prompt, ChatPrompt)
        return prompt


class _Seen(LocalPool):
    def __init__(self, served: Served) -> None:
        super().__init__({"m": served.backend}, {"m": 8})
        self._served = served

    def stream(self, request: Request, sink: Sink | None = None) -> Any:
        self._served.requests.append(request)
        return super().stream(request, sink)


def settings(path: Path) -> GatewaySettings:
    return GatewaySettings(
        headers_after_s=1000, keepalive_s=1000, response_store=SqliteStoreSettings(path=str(path / "responses"))
    )


@pytest.fixture
async def serve(tmp_path: Path) -> AsyncIterator[Callable[[int], Awaitable[Served]]]:
    running: list[Served] = []

    async def start(seed: int = 0) -> Served:
        running.append(Served(tmp_path, seed))
        await running[-1].backend.start()
        return running[-1]

    yield start
    for served in running:
        await served.sdk.close()
        await served.backend.aclose()


Serve = Callable[..., Awaitable[Served]]


def strict(response: Response) -> dict[str, Any]:
    """Its JSON, which the SDK's types take as it is."""
    raw = response.to_dict(mode="json")
    Response.model_validate(raw, strict=False)
    return raw


def said(item: Any) -> str:
    """The text of an input item that is a message."""
    text: str = item.content[0].text
    return text


# --- answers ------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", COMPLETE)
async def test_an_answer_streamed_and_whole(serve: Serve, name: str, seed: int) -> None:
    served = await serve(seed)
    served.backend.enqueue(SCRIPTS[name])
    whole = await served.sdk.responses.create(model="m", input="Hi")
    served.backend.enqueue(SCRIPTS[name])
    found = []
    async for event in await served.sdk.responses.create(model="m", input="Hi", stream=True):
        checked = EVENT.validate_python(event.to_dict(mode="json"))
        assert type(checked) is type(event)
        found.append(event)
    last = found[-1]
    assert last.type == ("response.incomplete" if name == "length" else "response.completed")
    kept = "output_text", "status", "usage", "error", "incomplete_details"
    assert {key: getattr(last.response, key) for key in kept} == {key: getattr(whole, key) for key in kept}
    strip = {"id": None}
    assert [{**item, **strip} for item in strict(last.response)["output"]] == [
        {**item, **strip} for item in strict(whole)["output"]
    ]


# The helper raises on an answer that was cut, as on one that failed: see the test of it.
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", [name for name in COMPLETE if name != "length"])
async def test_B31_the_stream_helper(serve: Serve, name: str, seed: int) -> None:
    served = await serve(seed)
    served.backend.enqueue(SCRIPTS[name])
    snapshots = ""
    async with served.sdk.responses.stream(model="m", input="Hi") as stream:
        async for event in stream:
            if event.type == "response.output_text.delta":
                snapshots = event.snapshot
        final = await stream.get_final_response()
    assert final.output_text == snapshots
    stored = await served.sdk.responses.retrieve(final.id)
    assert stored.output_text == final.output_text
    assert [item["id"] for item in strict(stored)["output"]] == [item["id"] for item in strict(final)["output"]]


@pytest.mark.parametrize("name", ["length", "failed_mid_stream", "failed_first"])
async def test_the_stream_helper_of_an_answer_without_its_end(serve: Serve, name: str) -> None:
    served = await serve()
    served.backend.enqueue(SCRIPTS[name])
    if name == "failed_first":
        with pytest.raises(openai.BadRequestError) as refused:
            async with served.sdk.responses.stream(model="m", input="Hi") as stream:
                await stream.until_done()
        assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "input")
        return
    async with served.sdk.responses.stream(model="m", input="Hi") as stream:
        kinds = [event.type async for event in stream]
        with pytest.raises(RuntimeError, match="response.completed"):
            await stream.get_final_response()
    assert kinds[-1] == ("response.incomplete" if name == "length" else "response.failed")


class Weather(BaseModel):
    city: str


@pytest.mark.parametrize("seed", SEEDS)
async def test_structured_output(serve: Serve, seed: int) -> None:
    served = await serve(seed)
    script = (START, TextDelta('{"city":'), TextDelta('"Bern"}'), Finished("stop", Usage(10, 5)))
    served.backend.enqueue(script)
    parsed = await served.sdk.responses.parse(model="m", input="Hi", text_format=Weather)
    assert parsed.output_parsed == Weather(city="Bern")
    assert served.requests[-1].constraint is not None
    served.backend.enqueue(script)
    async with served.sdk.responses.stream(model="m", input="Hi", text_format=Weather) as stream:
        assert (await stream.get_final_response()).output_parsed == Weather(city="Bern")


@pytest.mark.parametrize("seed", SEEDS)
async def test_B24_a_round_of_tools(serve: Serve, seed: int) -> None:
    """Calls of every kind, then their outputs, with the whole history sent back and nothing stored."""
    served = await serve(seed)
    served.backend.enqueue(
        (
            START,
            TextDelta("Let me."),
            ToolCallStarted(0, "call_a", "agents__spawn"),
            ToolCallDelta(0, '{"x":1}'),
            ToolCallEnded(0),
            ToolCallStarted(1, "call_b", "apply_patch"),
            ToolCallDelta(1, '{"input":"*** Begin'),
            ToolCallDelta(1, '\\n"}'),
            ToolCallEnded(1),
            Finished("tool_calls", Usage(10, 5)),
        )
    )
    tools: Any = [FUNCTION, PATCH, AGENTS, SEARCH]
    async with served.sdk.responses.stream(model="m", input="Hi", tools=tools, store=False) as stream:
        final = await stream.get_final_response()
    message, spawn, patch = final.output
    assert spawn.type == "function_call" and patch.type == "custom_tool_call"
    assert (spawn.name, spawn.namespace, spawn.arguments) == ("spawn", "agents", '{"x":1}')
    assert (patch.name, patch.input) == ("apply_patch", "*** Begin\n")
    history: Any = [
        {"role": "user", "content": "Hi"},
        *(item.to_dict() for item in (message, spawn, patch)),
        {"type": "function_call_output", "call_id": "call_a", "output": "7"},
        {"type": "custom_tool_call_output", "call_id": "call_b", "output": "done"},
    ]
    again = await served.sdk.responses.create(model="m", input=history, tools=tools, store=False)
    assert again.status == "completed"
    made = served.prompt.messages[1]
    assert (made.text, [call.name for call in made.tool_calls]) == ("Let me.", ["agents__spawn", "apply_patch"])
    assert made.tool_calls[1].arguments == '{"input":"*** Begin\\n"}'
    with pytest.raises(openai.NotFoundError):
        await served.sdk.responses.retrieve(again.id)


# --- what is stored ------------------------------------------------------------


@pytest.mark.parametrize("streamed", [True, False])
async def test_B27_a_conversation_by_previous_response_id(serve: Serve, streamed: bool) -> None:
    served = await serve()
    previous: str | None = None
    said: list[str] = []
    for turn in range(3):
        said.append(f"turn {turn}")
        if streamed:
            stream = await served.sdk.responses.create(
                model="m", input=said[-1], previous_response_id=previous, instructions=f"i{turn}", stream=True
            )
            answer = [event async for event in stream if isinstance(event, ResponseCompletedEvent)][-1].response
        else:
            answer = await served.sdk.responses.create(
                model="m", input=said[-1], previous_response_id=previous, instructions=f"i{turn}"
            )
        messages = served.prompt.messages
        assert [message.text for message in messages] == [f"i{turn}", *said]
        assert answer.previous_response_id == previous
        said.append(answer.output_text)
        previous = answer.id


async def test_the_response_is_stored_before_its_last_event_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = json.dumps({"model": "m", "input": "Hi", "stream": True}).encode()
    exchange = Exchange(build_app(ScriptedPool(HELLO), settings(tmp_path), echo_request_id=True), "POST", URL, body)
    before: list[bytes] = []
    record = ResponseMemory._record

    async def watched(memory: ResponseMemory, recorder: Any, events: Any) -> None:
        await record(memory, recorder, events)
        if recorder.record is not None:
            assert await memory.retrieve(recorder.record.id, "", b"")
            before.append(exchange.body)

    monkeypatch.setattr(ResponseMemory, "_record", watched)
    await exchange.done()
    (sent,) = before
    assert b"response.output_text.delta" in sent and b"response.completed" not in sent
    assert b"response.completed" in exchange.body


async def test_a_response_can_be_retrieved_and_deleted(serve: Serve) -> None:
    served = await serve()
    made = await served.sdk.responses.create(
        model="m",
        input="Hi",
        metadata={"k": "v"},
        instructions="i",
        temperature=0.5,
        tools=[PATCH],  # type: ignore[list-item]
    )
    kept = await served.sdk.responses.retrieve(made.id)
    assert strict(kept) == strict(made)
    assert made.completed_at is not None and made.completed_at >= made.created_at
    assert (kept.metadata, kept.instructions, kept.temperature) == ({"k": "v"}, "i", 0.5)
    await served.sdk.responses.delete(made.id)
    for use in (served.sdk.responses.retrieve, served.sdk.responses.delete):
        with pytest.raises(openai.NotFoundError, match="not found"):
            await use(made.id)


async def test_input_items_in_pages(serve: Serve) -> None:
    served = await serve()
    made = await served.sdk.responses.create(model="m", input=[{"role": "user", "content": f"{i}"} for i in range(5)])
    items = served.sdk.responses.input_items
    assert [said(item) async for item in items.list(made.id)] == list("43210")
    pages = [said(item) async for item in items.list(made.id, limit=2, order="asc")]
    assert pages == list("01234")
    page = await items.list(made.id, limit=2, order="asc")
    assert page.has_more and len({item.id for item in page.data}) == 2
    rest = await items.list(made.id, limit=3, order="asc", after=str(page.data[-1].id))
    assert [said(item) for item in rest.data] == list("234")
    assert not rest.has_more
    bad: list[tuple[dict[str, Any], type[openai.APIStatusError]]] = [
        ({"limit": 0}, openai.BadRequestError),
        ({"limit": 101}, openai.BadRequestError),
        ({"order": "up"}, openai.BadRequestError),
        ({"after": "msg_none"}, openai.NotFoundError),
    ]
    for query, raised in bad:
        with pytest.raises(raised) as caught:
            await items.list(made.id, **query)
        assert caught.value.param == next(iter(query))


async def test_items_are_found_by_reference(serve: Serve) -> None:
    """As the AI SDK sends them: by the ids of the items, without `previous_response_id`."""
    served = await serve()
    served.backend.enqueue(SCRIPTS["reasoning_then_text"])
    made = await served.sdk.responses.create(model="m", input="Hi")
    references: Any = [{"type": "item_reference", "id": item.id} for item in made.output]
    await served.sdk.responses.create(model="m", input=[*references, {"role": "user", "content": "And?"}])
    assert [(m.role, m.text, m.reasoning) for m in served.prompt.messages] == [
        ("assistant", "42", "Let me think."),
        ("user", "And?", None),
    ]


async def test_an_unknown_id_is_404_everywhere(serve: Serve) -> None:
    responses = (await serve()).sdk.responses
    uses: list[Callable[[], Awaitable[object]]] = [
        lambda: responses.retrieve("resp_none"),
        lambda: responses.retrieve("resp_none", stream=True),
        lambda: responses.delete("resp_none"),
        lambda: responses.cancel("resp_none"),
        lambda: responses.create(model="m", input="Hi", previous_response_id="resp_none"),
    ]
    for use in uses:
        with pytest.raises(openai.NotFoundError) as caught:
            await use()
        assert "'resp_none' not found" in caught.value.message
    with pytest.raises(openai.NotFoundError):
        await responses.input_items.list("resp_none")


async def test_only_what_runs_in_the_background_can_be_cancelled(serve: Serve) -> None:
    responses = (await serve()).sdk.responses
    made = await responses.create(model="m", input="Hi")
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
        await responses.cancel(made.id)
    with pytest.raises(openai.BadRequestError, match="background"):
        await responses.create(model="m", input="Hi", background=True)
    with pytest.raises(openai.BadRequestError, match="background"):
        await responses.retrieve(made.id, stream=True)


async def test_a_stream_that_failed_is_kept_as_failed(serve: Serve) -> None:
    served = await serve()
    served.backend.enqueue(SCRIPTS["failed_mid_stream"])
    stream = await served.sdk.responses.create(model="m", input="Hi", stream=True)
    *_, error, last = [event async for event in stream]
    assert error.type == "error" and error.message == "The replica was lost"
    assert last.type == "response.failed"
    kept = await served.sdk.responses.retrieve(last.response.id)
    assert strict(kept) == strict(last.response)
    assert kept.status == "failed"


async def test_a_stream_that_broke_for_no_known_reason_is_kept_as_failed(tmp_path: Path) -> None:
    pool = ScriptedPool([STARTED, text("Hel"), ZeroDivisionError("secret")])
    app = build_app(pool, settings(tmp_path), echo_request_id=True)
    body = json.dumps({"model": "m", "input": "Hi", "stream": True}).encode()
    final = read((await Exchange(app, "POST", URL, body).done()).body)
    assert final["status"] == "failed"
    assert (await Exchange(app, "GET", f"{URL}/{final['id']}").done()).json == final


async def test_a_response_that_was_completed_stays_so_whatever_comes_behind_it(tmp_path: Path) -> None:
    memory = ResponseMemory(create(settings(tmp_path).response_store))
    call = await memory.decode(b'{"model": "m", "input": "Hi", "stream": true}', "r1", "")
    pool = ScriptedPool([*HELLO, ZeroDivisionError("late")])
    with pytest.raises(ZeroDivisionError):
        async for _ in memory.recorded(call, Stamp("a", 1), "", partial(pool.stream, call.request)):
            pass
    assert json.loads(await memory.retrieve("resp_a", "", b""))["status"] == "completed"
    await memory.aclose()


async def test_nobody_sees_the_responses_of_another_key(tmp_path: Path) -> None:
    app = build_app(ScriptedPool(HELLO), settings(tmp_path), echo_request_id=True)

    async def ask(key: str, method: str, path: str, **body: Any) -> Exchange:
        async def with_key(scope: Scope, receive: Receive, send: Send) -> None:
            await app({**scope, KEY: key}, receive, send)

        return await Exchange(with_key, method, path, json.dumps({"model": "m", **body}).encode()).done()

    made = (await ask("alice", "POST", URL, input="Hi")).json
    ours = f"{URL}/{made['id']}"
    reference = [{"type": "item_reference", "id": made["output"][0]["id"]}]
    for key, found in (("bob", False), ("", False), ("alice", True)):
        asked = [
            await ask(key, "GET", ours),
            await ask(key, "GET", f"{ours}/input_items"),
            await ask(key, "POST", URL, input="And?", previous_response_id=made["id"]),
            await ask(key, "POST", URL, input=reference),
            await ask(key, "POST", f"{URL}/input_tokens", input="And?", previous_response_id=made["id"]),
            await ask(key, "DELETE", ours),
        ]
        assert [exchange.status for exchange in asked] == [200 if found else 404] * len(asked)
    assert (await ask("alice", "GET", ours)).status == 404


async def test_B34_any_gateway_of_the_machine_goes_on(serve: Serve) -> None:
    one, other = await serve(), await serve()
    made = await one.sdk.responses.create(model="m", input="Hi")
    await other.sdk.responses.create(model="m", input="And?", previous_response_id=made.id)
    assert [message.text for message in other.prompt.messages] == ["Hi", made.output_text, "And?"]


async def test_without_its_store_the_api_still_answers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "responses").mkdir()  # where its file should be
    app = build_app(ScriptedPool(HELLO), settings(tmp_path), echo_request_id=True)
    body = {"model": "m", "input": "Hi", "stream": True}
    exchange = await Exchange(app, "POST", URL, json.dumps(body).encode()).done()
    assert read(exchange.body)["status"] == "completed"
    assert "is not stored" in caplog.text
    for method, path, sent in (
        ("GET", f"{URL}/resp_x", {}),
        ("DELETE", f"{URL}/resp_x", {}),
        ("POST", URL, {**body, "previous_response_id": "resp_x"}),
    ):
        exchange = await Exchange(app, method, path, json.dumps(sent).encode()).done()
        assert exchange.status == 503
        assert exchange.headers["retry-after"] == "1"


async def test_a_record_that_cannot_be_read_is_as_good_as_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = create(settings(tmp_path).response_store)
    await store.put("resp_x", b'{"id": 5}')
    await store.aclose()
    app = build_app(ScriptedPool(), settings(tmp_path), echo_request_id=True)
    assert (await Exchange(app, "GET", f"{URL}/resp_x").done()).status == 404
    assert "cannot be read" in caplog.text


async def test_a_client_that_leaves_leaves_nothing_behind(tmp_path: Path) -> None:
    pool = ScriptedPool([STARTED, text("Hel"), asyncio.Event()])
    body = json.dumps({"model": "m", "input": "Hi", "stream": True}).encode()
    exchange = Exchange(build_app(pool, settings(tmp_path), echo_request_id=True), "POST", URL, body)
    while b"Hel" not in exchange.body:
        await asyncio.sleep(0)
    exchange.disconnect()
    await exchange.done()
    assert pool.open == 0


# --- routes and errors ------------------------------------------------------------

URL = "/v1/responses"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", URL, 405),
        ("POST", f"{URL}/compact", 404),
        ("GET", f"{URL}/compact", 404),
        ("GET", f"{URL}/", 404),
        ("POST", f"{URL}/resp_x", 405),
        ("POST", f"{URL}/resp_x/input_items", 405),
        ("GET", f"{URL}/resp_x/other", 404),
        ("GET", f"{URL}/resp_x/cancel", 405),
    ],
)
async def test_paths_that_are_none_are_told_in_the_envelope(
    tmp_path: Path, method: str, path: str, status: int
) -> None:
    app = build_app(ScriptedPool(), settings(tmp_path), echo_request_id=True)
    exchange = await Exchange(app, method, path).done()
    assert exchange.status == status
    assert set(exchange.json["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("stream", [True, False])
async def test_B79_an_overflow_is_400_with_its_code(tmp_path: Path, stream: bool) -> None:
    app = build_app(ScriptedPool([ContextOverflow.of(9, 8)]), settings(tmp_path), echo_request_id=True)
    body = json.dumps({"model": "m", "input": "Hi", "stream": stream}).encode()
    exchange = await Exchange(app, "POST", URL, body).done()
    assert exchange.status == 400
    error = exchange.json["error"]
    assert (error["code"], error["param"], error["n_ctx"]) == ("context_length_exceeded", "input", 8)


async def test_B25_an_engine_that_dies_ends_the_stream_properly(tmp_path: Path) -> None:
    app = build_app(
        ScriptedPool([STARTED, text("Hel"), Unavailable("Gone.")]), settings(tmp_path), echo_request_id=True
    )
    exchange = await Exchange(
        app, "POST", URL, json.dumps({"model": "m", "input": "Hi", "stream": True}).encode()
    ).done()
    assert exchange.complete
    assert read(exchange.body)["status"] == "failed"
    assert sse_events(exchange.body)[-1].event == "response.failed"


async def test_B35_an_empty_input_is_400(serve: Serve) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await (await serve()).sdk.responses.create(model="m", input=[], max_output_tokens=1)
    assert caught.value.param == "input"


async def test_tokens_of_a_prompt_are_counted_with_what_came_before(tmp_path: Path) -> None:
    memory = ResponseMemory(create(settings(tmp_path).response_store))
    counted: list[Request] = []

    async def count(request: Request) -> int:
        counted.append(request)
        return 7

    answer = await memory.input_tokens(b'{"model": "m", "input": "Hi", "instructions": "i"}', "r1", "", count)
    assert json.loads(answer) == {"object": "response.input_tokens", "input_tokens": 7}
    assert isinstance(counted[0].prompt, ChatPrompt)
    assert [message.text for message in counted[0].prompt.messages] == ["i", "Hi"]
    await memory.aclose()


# --- real clients ------------------------------------------------------------


@pytest.mark.parametrize("name", ["codex-0.171.0_tool_turn.json", "js_sdks_vercel.json", "python_sdks_langchain.json"])
async def test_recorded_requests_are_answered(serve: Serve, name: str) -> None:
    served = await serve()
    for body in capture(name):
        served.backend.enqueue(SCRIPTS["reasoning_then_text"])
        sent = json.dumps({**body, "model": "m"}).encode()
        exchange = await Exchange(served.app, "POST", URL, sent).done()
        assert exchange.status == 200, exchange.body
        final = read(exchange.body) if body.get("stream") else exchange.json
        assert final["status"] == "completed"
        assert final["store"] is body.get("store", True)
        reasoning = final["output"][0]
        assert bool(reasoning["summary"]) == bool(body.get("reasoning", {}).get("summary"))
        assert bool(reasoning["encrypted_content"]) == ("reasoning.encrypted_content" in body.get("include", []))
