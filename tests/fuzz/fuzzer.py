"""Random requests to every route of the HTTP side, over the fake engine. Everything follows from one number."""

from __future__ import annotations

import asyncio
import logging
import random
import re
import tempfile
import traceback
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from backends.fake import FakeBackend, FakeSettings
from deployments.http import build_app
from deployments.local import LocalPool
from deployments.middleware import ASGIApp
from deployments.settings import GatewaySettings, SqliteStoreSettings
from protocols.calls import AnswerT, ModelCall, Question
from protocols.events import Event, Frame
from protocols.request import Request
from protocols.sink import Sink
from tests.deployments.support import Exchange
from tests.fuzz import mutations
from tests.fuzz.judge import Sent, judge
from tests.fuzz.routes import ODD_PATHS, ROUTES, Route, recorded
from tests.protocols.scripts import FAILING, SCRIPTS

_RESPONSE_ID = re.compile(r'"id":"(resp_[0-9a-f]+)"')
_ITEM_ID = re.compile(r'"id":"((?:msg|rs|fc|ctc)_\w+)"')

MAX_BODY = 1_000_000
MAX_TOKENS = 12
"""Of one answer: the fake would write as many as a body asks for."""


class BriefBackend(FakeBackend):
    """Plays `script` where there is one; else writes at most `MAX_TOKENS`."""

    script: Iterable[Event] | None = None

    def generate(self, request: Request, sink: Sink | None = None) -> AsyncGenerator[Frame, None]:
        if self.script is not None:
            self.enqueue(self.script)
        request = _over_the_wire(request)
        tokens = MAX_TOKENS if request.max_tokens is None else min(request.max_tokens, MAX_TOKENS)
        return super().generate(msgspec.structs.replace(request, max_tokens=tokens), sink)


class WirePool(LocalPool):
    """Questions, and in `BriefBackend` requests, go through what takes them to a replica."""

    async def call(self, call: Question[AnswerT]) -> AnswerT:
        again: object = msgspec.msgpack.decode(msgspec.msgpack.encode(call), type=ModelCall)
        assert again == call
        return await super().call(call)


def _over_the_wire(request: Request) -> Request:
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=Request)
    assert again == request
    return again


@dataclass
class Report:
    """What was sent, and what came: counts of answers by route and status, and the first faults of each kind."""

    requests: int = 0
    statuses: Counter[tuple[str, str]] = field(default_factory=Counter)
    faults: dict[str, str] = field(default_factory=dict)

    def fault(self, sent: Sent, seed: str, error: BaseException) -> None:
        trace = traceback.extract_tb(error.__traceback__)
        place = next(
            (f"{f.filename.rpartition('/')[2]}:{f.lineno}" for f in reversed(trace) if "/tests/" in f.filename), ""
        )
        kind = f"{sent.route.method} {sent.route.path} {type(error).__name__} at {place} {str(error)[:60]}"
        if kind not in self.faults:
            self.faults[kind] = f"seed {seed}\n{sent}\n{''.join(traceback.format_exception(error, limit=-8))[-4000:]}"


class _Errors(logging.Handler):
    """What the application logs as an error is an exception that it did not expect."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(logging.Formatter().format(record))


class Fuzzer:
    def __init__(self, app: ASGIApp, backend: BriefBackend, seed: int) -> None:
        self.report = Report()
        self.app = app
        self._backend = backend
        self._seed = seed
        self._errors = _Errors()
        self._recorded = recorded()
        logging.getLogger("deployments").addHandler(self._errors)
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(lambda _, context: self._errors.seen.append(repr(context)))
        self._own_tasks = asyncio.all_tasks()

    async def run(self, requests: int | None = None, seconds: float | None = None, first: int = 0) -> Report:
        """As many requests, or for as long."""
        deadline = None if seconds is None else self._loop.time() + seconds
        number = first
        while number - first != requests and (deadline is None or self._loop.time() < deadline):
            await self._one(f"{self._seed}-{number}")
            number += 1
        return self.report

    async def one(self, seed: str) -> Report:
        """The request of that seed again, as it stands in a fault."""
        await self._one(seed)
        return self.report

    async def _one(self, seed: str) -> None:
        rng = random.Random(seed)
        sent = self._sent = self._request(rng)
        self._backend.script = self._script(sent, rng)
        try:
            got = await self._exchange(sent, rng)
            if got is not None:
                answer = judge(sent, got)
                if answer is not None and sent.plain is not None and rng.random() < 0.25:
                    await self._other_mode(sent, answer)
                if answer is not None and sent.route.path == "/v1/responses":
                    await self._what_is_stored(got.body, rng)
            await self._nothing_left()
            self._backend.script = None
            if rng.random() < 0.05:
                await self._still_answers()
            if rng.random() < 0.02:
                await self._several_at_once(rng)
                await self._nothing_left()
        except Exception as error:  # an assertion, or what the application let through: either is a finding
            self.report.fault(self._sent, seed, error)
            await self._let_go()
        finally:
            self._errors.seen.clear()

    # --- making a request ---

    def _request(self, rng: random.Random) -> Sent:
        route = rng.choice(ROUTES)
        sent = Sent(route, route.method, route.path, route.query, b"", [], [], good=True)
        if route.seeds:
            self._fill(sent, rng)
        elif rng.random() < 0.2:
            sent.body = rng.choice(mutations.RAW)
        if rng.random() < 0.06:
            sent.method, sent.good = rng.choice(mutations.METHODS), False
        if rng.random() < 0.03:
            sent.path, sent.good = rng.choice(ODD_PATHS), False
            if rng.random() < 0.5:
                sent.method = rng.choice(("GET", "DELETE", "POST"))
        if rng.random() < 0.1:
            sent.query, sent.good = rng.choice(mutations.QUERIES), False
        if rng.random() < 0.3:
            sent.headers.append((b"content-type", rng.choice(mutations.CONTENT_TYPES)))
        while rng.random() < 0.15:
            sent.headers.append(rng.choice(mutations.ODD_HEADERS))
        return sent

    def _fill(self, sent: Sent, rng: random.Random) -> None:
        route = sent.route
        value = rng.choice((*route.seeds, *self._recorded.get(route.path, ())))
        if isinstance(value, dict) and route.sampler is not None:
            value = dict(value)
            match rng.randrange(10):
                case 0:
                    value = {**route.sampler.body(rng, rng.choice((0.05, 0.3))), "model": "m"}
                    sent.good = False
                    sent.what.append("made by the schema")
                case 1 | 2 | 3:
                    value |= {**route.sampler.fields(rng, rng.randint(1, 4)), "model": "m"}
                    sent.good = False
                    sent.what.append("with fields by the schema")
            if route.dialect is not None:
                value["stream"] = rng.random() < 0.6
        changes = rng.choice((0, 1, 1, 1, 2, 5))
        if changes:
            value, sent.touched, what = mutations.mutated(value, rng, changes)
            sent.what += what
            sent.good = False
        sent.body = sent.plain = mutations.encoded(value, rng)
        if rng.random() < 0.1:
            sent.body, what_bytes = mutations.damaged(sent.body, rng)
            sent.plain, sent.touched, sent.good = sent.body, (), False
            sent.what.append(what_bytes)
        if rng.random() < 0.1:
            sent.body, name, wrong = mutations.coded(sent.body, rng)
            sent.headers.append((b"content-encoding", name))
            if wrong:
                sent.plain, sent.touched, sent.good = None, (), False
                sent.what.append(wrong)

    def _script(self, sent: Sent, rng: random.Random) -> Iterable[Event] | None:
        """Sometimes the model says something particular, or fails; only where an answer is one choice."""
        route = sent.route
        if route.dialect is None or route.decode is None or sent.plain is None or rng.random() < 0.6:
            return None
        try:
            call = route.decode(sent.plain, "r")
        except Exception:  # whatever is wrong with it, the application is to find
            return None
        if len(call.requests) != 1 or call.requests[0].n != 1:
            return None
        name = rng.choice(sorted(SCRIPTS))
        sent.fails = name in FAILING
        sent.what.append(f"answered by {name}")
        return route.dialect.playable(SCRIPTS[name])

    # --- sending it ---

    async def _exchange(self, sent: Sent, rng: random.Random) -> Exchange | None:
        """The answer; None where the client left before it."""
        self._sent = sent
        leaves = rng.random() < 0.04
        path = sent.path + (f"?{sent.query}" if sent.query else "")
        exchange = Exchange(self.app, sent.method, path, None, sent.headers)
        cuts = sorted(rng.randint(0, len(sent.body)) for _ in range(rng.choice((0, 0, 0, 1, 5))))
        for a, b in zip([0, *cuts], [*cuts, None], strict=True):
            last = b is None
            if last and leaves and rng.random() < 0.3:
                break
            exchange.upload(sent.body[a:b], more=not last)
        if leaves:
            for _ in range(rng.choice((0, 1, 5, 20))):
                await asyncio.sleep(0)
            exchange.disconnect()
        await exchange.done()
        self.report.requests += 1
        status = "left" if leaves else str(exchange.status)
        self.report.statuses[sent.route.path, status] += 1
        assert not self._errors.seen, self._errors.seen[0]
        return None if leaves else exchange

    async def _other_mode(self, sent: Sent, answer: Any) -> None:
        """The same body with the other `stream` has the same answer: but for ids, which are drawn."""
        dialect = sent.route.dialect
        assert dialect is not None and sent.plain is not None
        try:
            body = msgspec.json.decode(sent.plain)
        except msgspec.DecodeError:
            return  # numbers that only some parsers read
        flipped = {**body, "stream": not body.get("stream")}
        other = replace(sent, body=msgspec.json.encode(flipped), plain=msgspec.json.encode(flipped), good=False)
        other.headers = [(name, value) for name, value in sent.headers if name != b"content-encoding"]
        got = await self._exchange(other, random.Random(1))
        again = None if got is None else judge(other, got)
        if again is None:
            return
        told = answer.usage if again.usage is None else again.usage if answer.usage is None else None
        if told is not None:  # by one of them only
            answer, again = answer._replace(usage=None), again._replace(usage=None)
        ours, theirs = ([choice._replace(ids=()) for choice in a.choices] for a in (answer, again))
        assert ours == theirs, "a stream and a body say different things"
        assert answer.usage == again.usage

    async def _what_is_stored(self, body: bytes, rng: random.Random) -> None:
        """Asks for the response that was made, builds on it, deletes it."""
        self._backend.script = None
        (id,) = set(_RESPONSE_ID.findall(body.decode()))
        items = sorted(set(_ITEM_ID.findall(body.decode())))
        follow_up = {"model": "m", "input": [{"role": "user", "content": "And?"}], "previous_response_id": id}
        follow_up["stream"] = rng.random() < 0.5
        if items:
            reference = {"type": "item_reference", "id": rng.choice(items)}
            follow_up["input"] = [reference, {"role": "user", "content": "And?"}]
        for _ in range(rng.randrange(4)):
            if rng.random() < 0.3:
                raw = mutations.encoded(mutations.mutated(follow_up, rng, rng.randrange(2)).value, rng)
                route = next(route for route in ROUTES if route.path == "/v1/responses")
                sent = Sent(route, "POST", route.path, "", raw, [], ["builds on a response"], plain=raw)
            else:
                method, path = rng.choice(
                    (("GET", id), ("GET", f"{id}/input_items"), ("POST", f"{id}/cancel"), ("DELETE", id))
                )
                query = rng.choice(mutations.QUERIES) if rng.random() < 0.5 else ""
                route = Route(method, f"/v1/responses/{path.replace(id, 'ID')}", "openai")
                sent = Sent(route, method, f"/v1/responses/{path}", query, b"", [], [])
            got = await self._exchange(sent, rng)
            if got is not None:
                judge(sent, got)

    async def _nothing_left(self) -> None:
        stats = self._backend.stats()
        assert not stats.running and not stats.waiting, f"left behind: {stats.running} running, {stats.waiting} waiting"
        for _ in range(30):
            left = asyncio.all_tasks() - self._own_tasks
            if not left:
                return
            await asyncio.sleep(0)
        raise AssertionError(f"left behind: {left}")

    async def _several_at_once(self, rng: random.Random) -> None:
        all_sent = [self._request(rng) for _ in range(8)]
        answers = await asyncio.gather(*(self._exchange(sent, rng) for sent in all_sent))
        for sent, got in zip(all_sent, answers, strict=True):
            self._sent = sent
            if got is not None:
                judge(sent, got)

    async def _let_go(self) -> None:
        """After a fault, so that it is found once."""
        left = asyncio.all_tasks() - self._own_tasks
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def _still_answers(self) -> None:
        for route in (ROUTES[0], ROUTES[5]):
            exchange = Exchange(self.app, "POST", route.path, mutations.encoded(route.seeds[0], random.Random(0)))
            assert (await exchange.done()).status == 200


@asynccontextmanager
async def fuzzer(seed: int) -> AsyncIterator[Fuzzer]:
    backend = BriefBackend(FakeSettings(slots=64, context_length=100_000, adapters=("a.gguf",)))
    await backend.start()
    with tempfile.TemporaryDirectory() as folder:
        store = SqliteStoreSettings(path=str(Path(folder) / "responses.db"))
        settings = GatewaySettings(max_body_bytes=MAX_BODY, response_store=store)
        app = build_app(WirePool({"m": backend}, {"m": 10_000}), settings, echo_request_id=True)
        yield Fuzzer(app, backend, seed)
        await _shut_down(app)
    await backend.aclose()


async def _shut_down(app: ASGIApp) -> None:
    messages = iter(({"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}))

    async def receive() -> Any:
        return next(messages)

    async def send(_: Any) -> None:
        pass

    await app({"type": "lifespan"}, receive, send)
