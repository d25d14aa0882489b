"""The command: a llama-server command line in, a server out."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path

import uvloop

from backends import create
from backends.base import BackendStartError
from deployments import local
from deployments.http import build_app
from deployments.llama_server.access import ApiKeys, Cors, keeping_case
from deployments.llama_server.bodies import LooseBodies
from deployments.llama_server.flags import Options, UsageError, parse
from deployments.llama_server.looks import Looks
from deployments.llama_server.pool import OneModelPool
from deployments.llama_server.settings import api_keys, cors, defaults, model_settings
from deployments.llama_server.sleep import SleepingPool
from deployments.models import ModelEntry, ModelPool
from deployments.monitor import Monitor
from deployments.settings import GatewaySettings, ModelSettings

logger = logging.getLogger(__name__)


def main() -> None:
    """Ends with 1 and one line where the command line or the model cannot be used."""
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    try:
        options = parse(sys.argv[1:])
        settings = ModelSettings(backend=model_settings(options))
        if options.without_meaning:
            logger.warning("without meaning here: %s", " ".join(dict.fromkeys(options.without_meaning)))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(options, settings))
    except (UsageError, BackendStartError, OSError) as error:
        sys.exit(f"tokenyard-llama-server: {error}")


async def serve(options: Options, settings: ModelSettings) -> None:
    """Until the process is told to stop. Raises `BackendStartError`, and `OSError` for an address that is not free."""
    names = sorted(options.aliases) or [Path(options.model or "").stem]
    entry = ModelEntry(names[0], int(time.time()), aliases=tuple(names), tags=tuple(sorted(options.tags)))
    keys = api_keys(options)
    async with _models(entry.id, settings, options.sleep_after_s) as models:
        pool = OneModelPool(models, entry, defaults(options), show_slots=options.show_slots)
        gateway = GatewaySettings()
        monitor = Monitor(pool)
        app = build_app(pool, gateway, echo_request_id=True, monitor=monitor)
        app = LooseBodies(app, entry.id, gateway.max_body_bytes)
        app = Looks(app, pool, monitor, metrics=options.show_metrics, page=options.show_page)
        guarded = keeping_case(Cors(ApiKeys(app, keys), cors(options)))
        await local.listen(guarded, options.hosts, options.port, lambda: logger.info("%s is ready", entry.id))


@asynccontextmanager
async def _models(model: str, settings: ModelSettings, sleep_after_s: int) -> AsyncIterator[ModelPool]:
    make, limit = partial(create, settings.backend), settings.max_queued_requests
    if sleep_after_s >= 0:
        sleeping = SleepingPool(make, model, limit, sleep_after_s)
        await sleeping.start()
        async with aclosing(sleeping):
            yield sleeping
    else:
        backend = make()
        await backend.start()
        async with aclosing(backend):
            yield local.LocalPool({model: backend}, {model: limit})


if __name__ == "__main__":
    main()
