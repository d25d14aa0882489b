"""Engines behind one interface. `create` imports an engine only when a model asks for it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Annotated, cast

from pydantic import Field

from backends.fake import FakeSettings
from backends.llamacpp.settings import LlamaCppSettings
from backends.vllm.settings import VllmSettings

if TYPE_CHECKING:
    from backends.base import Backend

BackendSettings = Annotated[FakeSettings | LlamaCppSettings | VllmSettings, Field(discriminator="kind")]

_FACTORIES = {
    "fake": ("backends.fake", "FakeBackend"),
    "llamacpp": ("backends.llamacpp.backend", "LlamaCppBackend"),
    "vllm": ("backends.vllm.backend", "VllmBackend"),
}
"""kind -> (module, class). The module is imported on first use: a gateway has no engine installed."""


def create(settings: FakeSettings | LlamaCppSettings | VllmSettings) -> Backend:
    module, name = _FACTORIES[settings.kind]
    return cast("Backend", getattr(import_module(module), name)(settings))
