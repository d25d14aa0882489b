"""One OpenTelemetry span per request, made of the line that the log has of it. Off, unless an endpoint is set.

The extra `otel` brings the packages; nothing imports this module where there is no endpoint. A span has the numbers,
ids and words of `request_log.Line`, and so nothing that was said. It is made when the request is over.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from deployments.middleware import Scope, header
from deployments.request_log import CLIENT_GONE, OK, Line

ATTRIBUTES: Mapping[str, str] = {
    "id": "tokenyard.request_id",
    "status": "http.response.status_code",
    "outcome": "tokenyard.outcome",
    "key": "tokenyard.key",
    "model": "gen_ai.request.model",
    "dialect": "tokenyard.dialect",
    "operation": "tokenyard.operation",
    "stream": "tokenyard.stream",
    "replica": "tokenyard.replica",
    "moves": "tokenyard.moves",
    "queue_wait_s": "tokenyard.queue_wait_s",
    "first_token_s": "tokenyard.first_token_s",
    "inter_token_s": "tokenyard.inter_token_s",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "cached_tokens": "tokenyard.cached_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
}
"""By the fields of `Line`; OpenTelemetry's own names where it has them. `total_s` is the span's length."""

_TRACEPARENT = "traceparent"


class Spans:
    """Belongs to one process. `processor` sends what ends; it waits for nobody."""

    def __init__(self, processor: SpanProcessor) -> None:
        # Whether a request is recorded is said by its traceparent; one without is.
        self._provider = TracerProvider(resource=Resource.create({SERVICE_NAME: "tokenyard"}))
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("tokenyard")
        self._propagator = TraceContextTextMapPropagator()

    def ended(self, scope: Scope, line: Line, ended_ns: int) -> None:
        """A request is over. `ended_ns` is when, in Unix nanoseconds.

        Of what the client sent only `traceparent` is read, which is ids; `tracestate` could be any text.
        """
        carrier = {_TRACEPARENT: header(scope, _TRACEPARENT.encode()).decode("latin-1")}
        span = self._tracer.start_span(
            f"{line.operation} {line.dialect}".strip() or "request",
            context=self._propagator.extract(carrier),
            kind=SpanKind.SERVER,
            attributes={ATTRIBUTES[name]: value for name, value in _shown(line).items()},
            start_time=ended_ns - round(line.total_s * 1e9),
        )
        if line.outcome not in (OK, CLIENT_GONE) and not 400 <= line.status < 500:
            span.set_status(Status(StatusCode.ERROR, line.outcome))
        span.end(ended_ns)

    def close(self) -> None:
        """Sends what is left. Waits for it, some seconds at most."""
        self._provider.shutdown()


def _shown(line: Line) -> dict[str, str | int | float | bool]:
    fields: dict[str, str | int | float | bool] = msgspec.to_builtins(line)
    del fields["total_s"]
    return fields


def otlp(endpoint: str) -> Spans:
    """Spans that go to `endpoint` over HTTP, in batches, from a thread of their own."""
    return Spans(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
