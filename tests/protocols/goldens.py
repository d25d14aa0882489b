"""The goldens that every dialect has: its answers to the named scripts, and its words for three errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from protocols.codec import Codec
from protocols.errors import ContextOverflow, InternalError, ModelNotFound
from protocols.events import Event
from tests.protocols.scripts import COMPLETE, SCRIPTS

Render = Callable[[tuple[Event, ...]], bytes]


def answers(stream: Render, body: Render) -> dict[str, bytes]:
    streams = {f"{name}.sse": stream(script) for name, script in SCRIPTS.items()}
    return streams | {f"{name}.json": body(SCRIPTS[name]) for name in COMPLETE}


def error_bodies(codec: Codec[Any]) -> dict[str, bytes]:
    errors = (ContextOverflow.of(9000, 8192), ModelNotFound("No model 'x'", param="model"), InternalError("secret"))
    return {f"error.{error.kind}.json": codec.error(error) for error in errors}
