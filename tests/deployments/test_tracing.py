"""Spans of requests: one each, with what the log's line has, under the caller's trace, and nothing of what was said."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from deployments import tracing
from deployments.request_log import Line
from deployments.tracing import ATTRIBUTES, Spans
from protocols.errors import BackendLost, InternalError
from tests.deployments.http_support import CHAT, app, client
from tests.deployments.support import HELLO, ScriptedPool, Step, chat_body

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
ENDPOINT = "http://127.0.0.1:9/v1/traces"


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(tracing, "otlp", lambda endpoint: Spans(SimpleSpanProcessor(exporter)))
    return exporter


async def asked(
    exporter: InMemorySpanExporter, script: Sequence[Step] = HELLO, traceparent: str = "", **fields: Any
) -> tuple[ReadableSpan, ...]:
    headers = {"traceparent": traceparent, "tracestate": "vendor=markedstate", "x-request-id": "r1"}
    async with client(app(ScriptedPool(script), trace_endpoint=ENDPOINT)) as http:
        await http.get("/health")
        await http.post(CHAT, content=chat_body(**fields), headers=headers)
    return exporter.get_finished_spans()


async def test_a_span_has_what_the_log_has(exporter: InMemorySpanExporter, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="tokenyard.request")
    (span,) = await asked(exporter)
    (line,) = [json.loads(r.getMessage()) for r in caplog.records if r.name == "tokenyard.request"]
    assert (span.name, span.kind, span.parent) == ("generate openai_chat", SpanKind.SERVER, None)
    found = {name: value for name, value in (span.attributes or {}).items() if not name.endswith("_s")}
    told = {ATTRIBUTES[name]: value for name, value in line.items() if not name.endswith("_s")}
    assert found == told
    assert found["tokenyard.request_id"] == "r1"
    assert span.start_time is not None and span.end_time is not None and span.end_time >= span.start_time
    assert span.status.status_code is StatusCode.UNSET


def test_every_field_of_a_line_has_a_name() -> None:
    assert set(ATTRIBUTES) | {"total_s"} == set(Line.__struct_fields__)
    assert len(set(ATTRIBUTES.values())) == len(ATTRIBUTES)


@pytest.mark.parametrize("stream", [False, True])
async def test_it_is_a_part_of_the_callers_trace(exporter: InMemorySpanExporter, stream: bool) -> None:
    (span,) = await asked(exporter, traceparent=f"00-{TRACE}-{CALLER}-01", stream=stream)
    assert span.parent is not None and span.context is not None
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, CALLER)


async def test_a_trace_that_is_not_recorded_has_no_span(exporter: InMemorySpanExporter) -> None:
    assert await asked(exporter, traceparent=f"00-{TRACE}-{CALLER}-00") == ()


@pytest.mark.parametrize("junk", ["", "00-1-2-01", f"00-{'0' * 32}-{CALLER}-01", "ß" * 500])
async def test_what_is_no_traceparent_begins_a_trace(exporter: InMemorySpanExporter, junk: str) -> None:
    async with client(app(trace_endpoint=ENDPOINT)) as http:
        await http.post(CHAT, content=chat_body(), headers=[(b"traceparent", junk.encode())])
    (span,) = exporter.get_finished_spans()
    assert span.parent is None


@pytest.mark.parametrize("stream", [False, True])
async def test_what_fails_is_an_error_and_a_clients_fault_is_none(exporter: InMemorySpanExporter, stream: bool) -> None:
    (span,) = await asked(exporter, [*HELLO[:2], BackendLost("gone")], stream=stream)
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, BackendLost.kind)
    exporter.clear()
    (span,) = await asked(exporter, messages="none", stream=stream)
    assert (span.attributes or {})["http.response.status_code"] == 400
    assert span.status.status_code is StatusCode.UNSET


async def test_nothing_that_was_said_is_in_a_span(exporter: InMemorySpanExporter) -> None:
    said = [{"role": "user", "content": "markedprompt"}]
    for script in (HELLO, [InternalError("markeddetail")]):
        for fields in ({"messages": said}, {"messages": "markedprompt"}, {"messages": said, "model": "markedmodel"}):
            await asked(exporter, script, f"00-{TRACE}-{CALLER}-01", **fields, user="markeduser")
    spans = exporter.get_finished_spans()
    assert len(spans) == 6
    assert [span for span in spans if "marked" in span.to_json()] == []


async def test_what_is_left_is_sent_when_the_server_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = InMemorySpanExporter()
    processor = BatchSpanProcessor(exporter, schedule_delay_millis=1e6)
    monkeypatch.setattr(tracing, "otlp", lambda endpoint: Spans(processor))
    served = app(trace_endpoint=ENDPOINT)
    async with client(served) as http:
        await http.post(CHAT, content=chat_body())
    assert exporter.get_finished_spans() == ()
    told: list[str] = []
    events = iter(("lifespan.startup", "lifespan.shutdown"))

    async def receive() -> dict[str, str]:
        return {"type": next(events)}

    async def send(message: Mapping[str, Any]) -> None:
        told.append(message["type"])

    await served({"type": "lifespan"}, receive, send)
    assert told == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    assert len(exporter.get_finished_spans()) == 1


def test_without_an_endpoint_nothing_of_it_is_imported() -> None:
    code = "import sys, tests.deployments.http_support as h; h.app(); print([m for m in sys.modules if 'tracing' in m])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "deployments.tracing" not in found.stdout
