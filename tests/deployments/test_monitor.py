"""What those see who look on: llama.cpp's metrics, `/api/status`, and what looking may not do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from backends.fake import FakeBackend, FakeSettings
from deployments import model_states
from deployments.model_states import ModelStates
from deployments.models import ModelEntry
from protocols.calls import AnswerT, GetAllStats, Question, ReplicaStats
from protocols.card import BackendStats
from protocols.errors import Unavailable
from protocols.llamacpp_native.metrics import Totals, metrics, text
from tests.deployments.http_support import CHAT, app, client
from tests.deployments.support import HELLO, ScriptedPool, chat_body


@pytest.fixture
async def backend() -> AsyncIterator[FakeBackend]:
    backend = FakeBackend(FakeSettings(slots=3))
    await backend.start()
    yield backend
    await backend.aclose()


class Pool(ScriptedPool):
    """Replicas that answer by `reply`, or raise it."""

    def __init__(self, *models: ModelEntry, reply: object = None) -> None:
        super().__init__(HELLO, models)
        self.reply = reply

    async def call(self, call: Question[AnswerT]) -> AnswerT:
        self.calls.append(call)
        if isinstance(self.reply, asyncio.Event):
            await self.reply.wait()
        if isinstance(self.reply, Exception):
            raise self.reply
        return self.reply  # type: ignore[return-value]


STATS = BackendStats(
    slots=4,
    running=2,
    waiting=1,
    kv_tokens_used=30,
    kv_tokens_capacity=100,
    prompt_tokens_total=50,
    cached_tokens_total=20,
    generated_tokens_total=7,
    steps_total=9,
    drafts_total=3,
    step_requests_total=18,
)


# --- llama.cpp's names ---------------------------------------------------------------------------------------------


def test_llamacpps_metrics_count_replicas_together() -> None:
    found = {name: value for name, _, _, value in metrics([STATS, STATS], Totals(10, 2.0, 6, 3.0, 33))}
    assert found == {
        "prompt_tokens_total": 60,
        "prompt_tokens_cached_total": 40,
        "prompt_seconds_total": 2,
        "tokens_predicted_total": 14,
        "tokens_predicted_seconds_total": 3,
        "n_decode_total": 18,
        "n_tokens_max": 33,
        "spec_decode_num_draft_tokens_total": 0,
        "spec_decode_num_accepted_tokens_total": 0,
        "spec_decode_num_drafts_total": 6,
        "n_busy_slots_per_decode": 2,
        "prompt_tokens_seconds": 5,
        "predicted_tokens_seconds": 2,
        "requests_processing": 4,
        "requests_deferred": 2,
        "kv_cache_usage_ratio": 0.3,
        "kv_cache_tokens": 60,
    }


def test_rates_can_be_since_somebody_looked() -> None:
    now, before = Totals(10, 2.0, 6, 3.0), Totals(4, 1.0, 6, 3.0)
    found = {name: value for name, _, _, value in metrics([], now, before)}
    assert (found["prompt_tokens_seconds"], found["predicted_tokens_seconds"]) == (6, 0)
    assert found["tokens_predicted_seconds_total"] == 3


def test_a_model_that_sleeps_has_zeros() -> None:
    assert {value for _, _, _, value in metrics([], Totals())} == {0.0}


def test_llamacpps_text_is_as_llamacpp_writes_it() -> None:
    assert text([STATS], Totals()).startswith(
        b"# HELP llamacpp:prompt_tokens_total Prompt tokens processed, without those from the cache.\n"
        b"# TYPE llamacpp:prompt_tokens_total counter\n"
        b"llamacpp:prompt_tokens_total 30\n"
    )


async def test_a_model_is_asked_for_by_its_names(backend: FakeBackend) -> None:
    pool = ScriptedPool(HELLO, [ModelEntry("m", 7), ModelEntry("alias", 7, of="m")])
    pool.backend = backend
    async with client(app(pool)) as http:
        for model in ("m", "alias"):
            response = await http.get("/metrics", params={"model": model})
            assert response.status_code == 200
            assert "llamacpp:requests_processing 0\n" in response.text
        assert (await http.get("/metrics", params={"model": "none"})).status_code == 404


# --- the state of things -------------------------------------------------------------------------------------------


async def test_the_status_says_how_each_model_is_doing() -> None:
    models = [
        ModelEntry("alias", 7, of="b"),
        ModelEntry("asleep", 7, replicas=0),
        ModelEntry("b", 7, replicas=2, starting=1),
        ModelEntry("coming", 7, ready=False, replicas=0, starting=1),
        ModelEntry("woken", 7, replicas=0, starting=1),
    ]
    pool = Pool(*models, reply=[ReplicaStats(STATS, "x"), ReplicaStats(STATS, "y")])
    async with client(app(pool)) as http:
        await http.post(CHAT, content=chat_body(model="b"))
        status = (await http.get("/api/status")).json()
    assert [(m["id"], m["state"], m["running"], m["starting"]) for m in status["models"]] == [
        ("asleep", "asleep", 0, 0),
        ("b", "ready", 2, 1),
        ("coming", "loading", 0, 1),
        ("woken", "loading", 0, 1),
    ]
    shown = status["models"][1]
    assert shown["names"] == ["alias"]
    assert shown["replicas"][1] == {
        "name": "y",
        "slots": 4,
        "running": 2,
        "waiting": 1,
        "kv_tokens": 100,
        "kv_tokens_used": 30,
        "prompt_tokens": 50,
        "cached_tokens": 20,
        "output_tokens": 7,
    }
    assert [call.model for call in pool.calls] == ["b"], "one that sleeps is not asked, and so not woken"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


async def test_many_looks_are_one() -> None:
    clock, pool = Clock(), Pool(ModelEntry("m", 7), reply=[ReplicaStats(STATS)])
    states = ModelStates(pool, clock)
    await asyncio.gather(*(states.look() for _ in range(10)))
    assert pool.calls == [GetAllStats("states", "m")]
    clock.now += model_states.KEPT_S
    await states.look()
    assert len(pool.calls) == 2


async def test_a_model_that_does_not_answer_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_states, "WITHIN_S", 0.01)
    clock, pool = Clock(), Pool(ModelEntry("m", 7), reply=asyncio.Event())
    states = ModelStates(pool, clock)

    async def look() -> Any:
        (state,) = await states.look()
        return state.replicas

    assert await look() is None
    clock.now += model_states.KEPT_S
    assert await look() is None
    assert len(pool.calls) == 1, "it is left alone for a while"
    clock.now += model_states.SILENT_S
    pool.reply = [ReplicaStats(STATS)]
    assert await look() == (ReplicaStats(STATS),)


async def test_a_model_whose_replicas_fail_is_shown_without_them() -> None:
    async with client(app(Pool(ModelEntry("m", 7), reply=Unavailable("no")))) as http:
        (model,) = (await http.get("/api/status")).json()["models"]
    assert (model["running"], model["replicas"]) == (1, [])
