"""One request: sent, its stream read to the end, and timed."""

from __future__ import annotations

import time

import aiohttp
import msgspec

from deployments.bench.dialects import PATHS, Dialect, headers
from deployments.bench.streams import MalformedEvent, Reading, error_of, reader
from protocols.sse import SseParser

KEPT_ALIVE_S = 2.0
"""Idle connections are not used again after this: shorter than servers keep them, so none is closed as it is taken."""


class Failure(msgspec.Struct, frozen=True):
    """`kind` is the same for requests that fail in the same way."""

    kind: str
    message: str


class Outcome(msgspec.Struct):
    """What became of a request. Seconds; `due` and `sent` count from the start of the load, the rest from `due`."""

    due: float
    sent: float
    first_output: float | None = None
    end: float = 0.0
    gaps: list[float] = msgspec.field(default_factory=list)
    """Between one piece of output and the next; 0 for those that were read together."""
    outputs: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    failure: Failure | None = None

    @property
    def tokens(self) -> int:
        """As the server counts them, or the pieces of output where it does not."""
        return self.outputs if self.output_tokens is None else self.output_tokens


class Server(msgspec.Struct, frozen=True):
    """Whom to ask, and how. `base` is without the dialect's path."""

    base: str
    dialect: Dialect
    api_key: str | None = None
    timeout_s: float = 600.0


def base_of(url: str) -> str:
    """`url` as a client's setting has it: with or without the `/v1`."""
    url = url if "://" in url else f"http://{url}"
    return url.rstrip("/").removesuffix("/v1")


def session(server: Server) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_ALIVE_S),
        timeout=aiohttp.ClientTimeout(total=server.timeout_s),
        headers=headers(server.dialect, server.api_key),
    )


class NoModel(Exception):
    """The server does not say which model to ask."""


async def only_model(server: Server) -> str:
    """The id of the one model that the server lists. Raises `NoModel`."""
    try:
        async with session(server) as http, http.get(f"{server.base}/v1/models") as answer:
            listed = [str(model["id"]) for model in (await answer.json())["data"]]
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as error:
        raise NoModel(f"cannot list the models of {server.base} ({error}): name one with --model") from None
    if len(listed) != 1:
        raise NoModel(f"name one of the server's models with --model: {', '.join(listed) or 'it lists none'}")
    return listed[0]


async def ask(http: aiohttp.ClientSession, server: Server, body: bytes, began: float, due: float) -> Outcome:
    """`began` and `due` are times of `time.perf_counter`. Fails only in the outcome."""
    outcome = Outcome(due - began, time.perf_counter() - began)
    try:
        async with http.post(server.base + PATHS[server.dialect], data=body) as answer:
            if answer.status != 200:
                kind, message = error_of(await answer.read()) or ("", answer.reason or "")
                outcome.failure = Failure(f"HTTP {answer.status} {kind}".rstrip(), message)
            elif answer.content_type != "text/event-stream":
                outcome.failure = Failure("no stream", f"the answer is {answer.content_type}")
            else:
                await _read(answer, server.dialect, outcome, due)
    except MalformedEvent as error:
        outcome.failure = Failure("malformed event", str(error))
    except TimeoutError:
        outcome.failure = Failure("timed out", f"after {server.timeout_s:g} s")
    except aiohttp.ClientConnectorError as error:
        outcome.failure = Failure("cannot connect", str(error))
    except aiohttp.ClientError as error:
        outcome.failure = Failure("connection lost", str(error) or type(error).__name__)
    outcome.end = time.perf_counter() - due
    return outcome


async def _read(answer: aiohttp.ClientResponse, dialect: Dialect, outcome: Outcome, due: float) -> None:
    reading, parser, read = Reading(), SseParser(), reader(dialect)
    last = 0.0
    try:
        async for chunk in answer.content.iter_any():
            now = time.perf_counter()
            for event in parser.feed(chunk):
                before = reading.outputs
                read(reading, event)
                if reading.outputs > before:
                    if outcome.first_output is None:
                        outcome.first_output = now - due
                    else:
                        outcome.gaps.append(now - last)
                    last = now
    finally:
        outcome.outputs, outcome.output_tokens = reading.outputs, reading.output_tokens
        outcome.prompt_tokens, outcome.cached_tokens = reading.prompt_tokens, reading.cached_tokens
    if reading.error is not None:
        kind, message = reading.error
        outcome.failure = Failure(f"stream error {kind}", message)
    elif not reading.ended:
        outcome.failure = Failure("cut off", "the stream ended without an end")
