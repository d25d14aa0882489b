"""A few seconds of the fuzzer, with another seed each time; `make fuzz` runs it for longer."""

from __future__ import annotations

import random

from tests.deployments.support import Exchange
from tests.fuzz.fuzzer import fuzzer
from tests.fuzz.routes import ROUTES

REQUESTS = 6000


async def test_nothing_that_comes_breaks_the_server() -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    async with fuzzer(seed) as fuzz:
        report = await fuzz.run(requests=REQUESTS)
    assert not report.faults, "\n\n".join(report.faults.values())
    answered = {path for path, status in report.statuses if status != "left"}
    assert answered >= {route.path for route in ROUTES}
    statuses = {status for _, status in report.statuses}
    assert statuses >= {"200", "400", "404", "405", "413", "415"}


async def test_no_route_is_left_out() -> None:
    async with fuzzer(0) as fuzz:
        got = await Exchange(fuzz.app, "GET", "/nowhere").done()
    there_are = got.json["error"]["message"].partition("Routes: ")[2].removesuffix(".").split(", ")
    fuzzed = {"/slots/{id}" if route.path.startswith("/slots/") else route.path for route in ROUTES}
    assert set(there_are) <= fuzzed


async def test_a_seed_is_a_request() -> None:
    async with fuzzer(1) as one, fuzzer(1) as other:
        first, again = await one.run(requests=300), await other.run(requests=300)
    assert first.statuses == again.statuses
