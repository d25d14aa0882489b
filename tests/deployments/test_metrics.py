"""The table of metrics: that it is whole, that the code and the document have the same, and what comes of it."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from deployments import metrics
from deployments.metrics import TABLE, Metric, Registry, Sample
from deployments.models import ModelEntry
from protocols.errors import BackendLost, Overloaded
from tests.deployments.http_support import CHAT, app, client
from tests.deployments.support import HELLO, WITHIN_S, Exchange, ScriptedPool, Step, chat_body

ROOT = Path(__file__).parents[2]


async def scraped(pool: ScriptedPool, *bodies: bytes, path: str = CHAT) -> dict[str, float]:
    """All values after these requests: `name{label="value",…}` without what is 0."""
    async with client(app(pool)) as http:
        for body in bodies:
            await http.post(path, content=body)
        response = await http.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return values(response.text)


def values(text: str) -> dict[str, float]:
    return {
        f"{sample.name}{{{','.join(f'{name}={value}' for name, value in sorted(sample.labels.items()))}}}": sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.value and not sample.name.endswith(("_bucket", "_created"))
    }


# --- the table --------------------------------------------------------------------------------------------------------


def test_every_metric_of_the_module_is_in_the_table() -> None:
    assert set(TABLE) == {value for value in vars(metrics).values() if isinstance(value, Metric)}
    assert len({metric.name for metric in TABLE}) == len(TABLE)


@pytest.mark.parametrize("metric", TABLE, ids=lambda metric: metric.name)
def test_a_name_says_unit_and_kind(metric: Metric) -> None:
    """ "Metric names … should have a suffix describing the unit", and "an accumulating count has total"."""
    assert re.fullmatch(r"tokenyard_[a-z_]+", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert bool(metric.buckets) == (metric.kind == "histogram")
    assert list(metric.buckets) == sorted(metric.buckets) and all(bound > 0 for bound in metric.buckets)
    assert metric.name.endswith("_seconds") == (metric.unit == "seconds")
    assert metric.name.endswith("_ratio") == (metric.unit == "ratio")
    assert metric.help.endswith(".")


def test_the_document_has_the_same_table() -> None:
    text = (ROOT / "deployments" / "dashboards" / "METRICS.md").read_text()
    rows = re.findall(r"^\| `(tokenyard_\w+)` \| (\w+) \| (\w+) \| ([^|]*) \| ([^|]*) \|$", text, re.MULTILINE)
    assert rows == [(m.name, m.kind, m.unit, ", ".join(m.labels), m.help) for m in TABLE]


# --- the registry -----------------------------------------------------------------------------------------------------


def test_gauges_are_those_of_the_last_look_and_all_else_adds_up() -> None:
    registry = Registry()
    for _ in range(2):
        registry.add(metrics.MOVES, ("m", "d"), 2)
        registry.add(metrics.QUEUE_WAIT, ("m", "d"), 0.5)
    registry.text([Sample(metrics.SLOTS, ("m", "gone"), 4)])
    assert values(registry.text([Sample(metrics.SLOTS, ("m", "here"), 3)]).decode()) == {
        "tokenyard_moves_total{dialect=d,model=m}": 4,
        "tokenyard_queue_wait_seconds_count{dialect=d,model=m}": 2,
        "tokenyard_queue_wait_seconds_sum{dialect=d,model=m}": 1,
        "tokenyard_slots{model=m,replica=here}": 3,
    }


def test_a_label_is_escaped() -> None:
    registry = Registry()
    registry.add(metrics.MOVES, ('a"b\\c', "d"), 1)
    assert values(registry.text([]).decode()) == {'tokenyard_moves_total{dialect=d,model=a"b\\c}': 1}


# --- what is counted --------------------------------------------------------------------------------------------------


async def test_a_request_is_counted_by_model_and_dialect() -> None:
    found = await scraped(ScriptedPool(HELLO), chat_body(), chat_body(False))
    of = "{dialect=openai_chat,model=m}"
    assert found["tokenyard_requests_total{dialect=openai_chat,model=m,outcome=ok}"] == 2
    assert found[f"tokenyard_prompt_tokens_total{of}"] == 6
    assert found[f"tokenyard_output_tokens_total{of}"] == 4
    for name in ("queue_wait_seconds", "time_to_first_token_seconds", "inter_token_seconds", "request_seconds"):
        assert found[f"tokenyard_{name}_count{of}"] == 2
    assert found[f"tokenyard_prefix_hit_ratio_count{of}"] == 2


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ([Overloaded("full")], {"requests_total{%s,outcome=overloaded}", "rejections_total{%s,reason=overloaded}"}),
        ([BackendLost("gone")], {"requests_total{%s,outcome=backend_lost}"}),
    ],
)
async def test_what_fails_is_counted_by_its_kind(script: list[Step], expected: set[str]) -> None:
    found = await scraped(ScriptedPool(script), chat_body())
    counted = {name for name in found if "requests_total" in name or "rejections_total" in name}
    assert counted == {f"tokenyard_{name}" % "dialect=openai_chat,model=m" for name in expected}


async def test_names_of_models_that_there_are_not_are_one_label() -> None:
    bodies = [chat_body(model=f"none-{number}") for number in range(20)]
    found = await scraped(ScriptedPool(HELLO), *bodies)
    assert {name for name in found if "none-" in name} == set()
    assert found["tokenyard_requests_total{dialect=openai_chat,model=unknown,outcome=ok}"] == 20


async def test_a_generation_is_active_until_it_ends() -> None:
    wait = asyncio.Event()
    tested = app(ScriptedPool([*HELLO[:2], wait, *HELLO[2:]]))
    exchange = Exchange(tested, "POST", CHAT, chat_body())
    while len(exchange.sent) < 3:
        await asyncio.sleep(0)
    active = "tokenyard_active_streams{dialect=openai_chat,model=m}"
    async with client(tested) as http:
        assert values((await http.get("/metrics")).text)[active] == 1
        wait.set()
        async with asyncio.timeout(WITHIN_S):
            await exchange.done()
        assert active not in values((await http.get("/metrics")).text)


async def test_replicas_are_counted_by_their_state() -> None:
    found = await scraped(ScriptedPool(models=[ModelEntry("m", 7, replicas=2, starting=1)]))
    assert found["tokenyard_replicas{model=m,state=running}"] == 2
    assert found["tokenyard_replicas{model=m,state=starting}"] == 1
