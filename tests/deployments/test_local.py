"""`serve --local`: the same HTTP side over backends of one process, and no Ray anywhere near it."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import openai
import pytest
from click.testing import CliRunner

from backends.base import BackendStartError
from backends.fake import FakeBackend, FakeFault, FakeSettings
from deployments import local
from deployments.cli import main
from deployments.config import OurParts
from deployments.local import LocalPool, running_backends
from deployments.settings import GatewaySettings, ModelSettings
from protocols.errors import BackendLost, ModelNotFound, Overloaded
from protocols.events import Frame
from protocols.request import Request
from tests.deployments.local_server import ROOT, LocalServer
from tests.deployments.support import request, tokens

# --- the pool ---------------------------------------------------------------------------------------------------------


@pytest.fixture
async def pool() -> AsyncIterator[LocalPool]:
    """Models `a`, with one slot and a queue of one, and `b`, with one slot and no queue."""
    backends = {name: FakeBackend(FakeSettings(slots=1, inter_token_s=0.001)) for name in ("b", "a")}
    for backend in backends.values():
        await backend.start()
    yield LocalPool(backends, {"a": 1, "b": 0})
    for backend in backends.values():
        await backend.aclose()


async def collect(pool: LocalPool, wanted: Request) -> list[Frame]:
    async with aclosing(pool.stream(wanted)) as frames:
        return [frame async for frame in frames]


async def test_models_are_in_order_of_their_ids(pool: LocalPool) -> None:
    assert [entry.id for entry in pool.models()] == ["a", "b"]
    assert all(abs(entry.created - time.time()) < 3600 for entry in pool.models())


async def test_a_request_is_answered_by_its_model(pool: LocalPool) -> None:
    assert len(tokens(await collect(pool, request("a", max_tokens=5)))) == 5


async def test_a_model_there_is_not_is_an_error_that_names_what_there_is(pool: LocalPool) -> None:
    with pytest.raises(ModelNotFound, match="The model 'c' does not exist. Available: a, b.") as caught:
        await collect(pool, request("c"))
    assert caught.value.param == "model"


async def test_a_backends_error_goes_through() -> None:
    backend = FakeBackend(FakeSettings(fail_at=FakeFault(kind="backend_lost")))
    await backend.start()
    with pytest.raises(BackendLost):
        await collect(LocalPool({"m": backend}, {"m": 1}), request())


async def test_a_full_queue_refuses_and_a_freed_one_accepts(pool: LocalPool) -> None:
    running = pool.stream(request("a", max_tokens=10_000))
    await anext(running)
    waiting = asyncio.create_task(collect(pool, request("a", max_tokens=3)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    for _ in range(3):
        with pytest.raises(Overloaded) as caught:
            await collect(pool, request("a"))
        assert caught.value.retry_after_s is not None
        assert "'a'" in caught.value.message
    assert not waiting.done()
    await running.aclose()
    assert len(tokens(await waiting)) == 3
    assert len(tokens(await collect(pool, request("a", max_tokens=3)))) == 3


async def test_without_a_queue_a_free_slot_is_used_and_a_taken_one_refuses(pool: LocalPool) -> None:
    running = pool.stream(request("b", max_tokens=10_000))
    await anext(running)
    with pytest.raises(Overloaded):
        await collect(pool, request("b"))
    await running.aclose()
    assert len(tokens(await collect(pool, request("b", max_tokens=3)))) == 3


async def test_a_full_queue_of_one_model_leaves_the_others_alone(pool: LocalPool) -> None:
    running = pool.stream(request("b", max_tokens=10_000))
    await anext(running)
    assert len(tokens(await collect(pool, request("a", max_tokens=3)))) == 3
    await running.aclose()


# --- backends of a config ---------------------------------------------------------------------------------------------


class RecordedBackend(FakeBackend):
    log: list[str] = []

    async def start(self) -> Any:
        if self._settings.slots == 13:
            raise BackendStartError("cannot load: unlucky")
        self.log.append(f"start {self._settings.slots}")
        return await super().start()

    async def aclose(self) -> None:
        self.log.append(f"close {self._settings.slots}")
        await super().aclose()


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(RecordedBackend, "log", [])
    monkeypatch.setattr(local, "create", RecordedBackend)
    return RecordedBackend.log


def parts(**slots: int) -> OurParts:
    models = {name: ModelSettings(backend=FakeSettings(slots=count)) for name, count in slots.items()}
    return OurParts(GatewaySettings(), models, "127.0.0.1", 0)


async def test_all_models_of_a_config_are_loaded_and_freed(log: list[str]) -> None:
    async with running_backends(parts(a=1, b=2)) as backends:
        assert sorted(backends) == ["a", "b"]
        assert log == ["start 1", "start 2"]
    assert sorted(log[2:]) == ["close 1", "close 2"]


async def test_a_model_that_cannot_be_loaded_frees_those_that_are(log: list[str]) -> None:
    with pytest.raises(BackendStartError, match="unlucky"):
        async with running_backends(parts(a=1, b=13, c=3)):
            raise AssertionError("nothing runs")
    assert log == ["start 1", "close 1"]


# --- no Ray -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "module", ["deployments.local", "deployments.http", "deployments.cli", "deployments.channel", "deployments.config"]
)
def test_ray_is_not_imported(module: str) -> None:
    code = f"import sys, {module}; print([name for name in sys.modules if name.split('.')[0] == 'ray'])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


# --- the command ------------------------------------------------------------------------------------------------------


FAKE = {"kind": "fake", "tokens": 8}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    server = LocalServer(tmp_path_factory.mktemp("local"), {"fake": FAKE, "org/other": FAKE})
    yield server
    server.stop()


@pytest.fixture
def sdk(server: LocalServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as sdk:
        yield sdk


MESSAGES: Any = [{"role": "user", "content": "Hi"}]


def test_the_sdk_gets_the_same_answer_streamed_and_whole(sdk: openai.OpenAI) -> None:
    whole = sdk.chat.completions.create(model="fake", messages=MESSAGES)
    stream = sdk.chat.completions.create(
        model="fake", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert text.split()[0].startswith("token")
    assert len(text.split()) == 8
    assert chunks[-1].usage == whole.usage
    assert whole.usage is not None and whole.usage.completion_tokens == 8


def test_the_sdk_lists_and_finds_the_models(sdk: openai.OpenAI) -> None:
    assert [model.id for model in sdk.models.list()] == ["fake", "org/other"]
    assert sdk.models.retrieve("org/other").id == "org/other"


def test_the_sdk_raises_the_errors_it_knows(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        sdk.chat.completions.create(model="none", messages=MESSAGES)
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        sdk.chat.completions.create(model="fake", messages=[])
    assert bad.value.param == "messages"


def test_the_request_id_is_echoed(server: LocalServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("GET", "/health", headers={"x-request-id": "abc"})
    response = connection.getresponse()
    assert json.loads(response.read()) == {"status": "ok"}
    assert response.headers.get_all("x-request-id") == ["abc"]
    connection.close()


def test_the_banner_shows_a_request_that_works(server: LocalServer, sdk: openai.OpenAI) -> None:
    assert f"http://127.0.0.1:{server.port}/v1" in server.output
    assert "fake, org/other" in server.output
    body = server.output.split("-d '", 1)[1].split("'\n", 1)[0]
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
    assert connection.getresponse().status == 200
    connection.close()


def test_one_can_talk_to_it(server: LocalServer) -> None:
    url = f"http://127.0.0.1:{server.port}"
    result = CliRunner().invoke(main, ["chat", "fake", "--url", url, "--max-tokens", "3"], input="Hi\nAnd?\n")
    assert result.exit_code == 0, result.output
    answers = [line for line in result.output.splitlines() if "token" in line]
    assert len(answers) == 2
    assert all(answer.count(" token") == 3 for answer in answers)


def test_talking_to_a_model_there_is_not_says_so(server: LocalServer) -> None:
    result = CliRunner().invoke(main, ["chat", "none", "--url", f"http://127.0.0.1:{server.port}"], input="Hi\n")
    assert result.exit_code == 1
    assert "The model 'none' does not exist. Available: fake, org/other." in result.output


def test_a_second_server_on_its_port_says_who_has_it(server: LocalServer) -> None:
    result = CliRunner().invoke(main, ["serve", "--local", str(server.config)])
    assert result.exit_code == 1
    (line,) = result.output.splitlines()
    assert line.startswith(f"Port {server.port} on 127.0.0.1 is taken by ")
    assert f"(pid {server.process.pid})" in line


def test_ctrl_c_stops_it(tmp_path: Path) -> None:
    server = LocalServer(tmp_path, {"fake": FAKE})
    assert server.stop() == 0, server.output
    assert server.output.endswith("stopped\n")
    assert "Traceback" not in server.output
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", server.port))
