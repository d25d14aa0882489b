"""The command: a llama-server command line in, a server out."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from pathlib import Path

import uvloop

from backends.base import BackendStartError
from deployments import local
from deployments.config import OurParts
from deployments.http import build_app
from deployments.llama_server.access import ApiKeys, Cors
from deployments.llama_server.flags import Options, UsageError, parse
from deployments.llama_server.pool import OneModelPool
from deployments.llama_server.settings import api_keys, cors, defaults, model_settings
from deployments.models import ModelEntry
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
    keys = api_keys(options)
    entry = ModelEntry(names[0], int(time.time()), aliases=tuple(names), tags=tuple(sorted(options.tags)))
    parts = OurParts(GatewaySettings(), {entry.id: settings}, options.hosts[0], options.port)
    async with local.running_backends(parts) as backends:
        models = local.LocalPool(backends, {entry.id: settings.max_queued_requests})
        pool = OneModelPool(models, entry, defaults(options), show_slots=options.show_slots)
        app = Cors(ApiKeys(build_app(pool, parts.gateway, echo_request_id=True), keys), cors(options))
        await local.listen(app, options.hosts, options.port, lambda: logger.info("%s is ready", entry.id))


if __name__ == "__main__":
    main()
