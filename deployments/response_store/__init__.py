"""Where responses are kept between requests: one interface, in a file of one machine or in Redis for several."""

from __future__ import annotations

from importlib import import_module
from typing import assert_never

from deployments.response_store.base import ResponseStore, StoreError
from deployments.settings import ConfigError, RedisStoreSettings, SqliteStoreSettings

__all__ = ["ResponseStore", "StoreError", "create"]


def create(settings: SqliteStoreSettings | RedisStoreSettings) -> ResponseStore:
    """Nothing is opened before the first use. `redis` need not be installed where it is not used."""
    store: ResponseStore
    match settings.kind:
        case "sqlite":
            store = import_module("deployments.response_store.sqlite").SqliteStore(settings)
        case "redis":
            try:
                store = import_module("deployments.response_store.redis").RedisStore(settings)
            except ModuleNotFoundError as error:
                raise ConfigError(f"response_store: kind 'redis' needs a package that is not here: {error}") from None
        case _:
            assert_never(settings.kind)
    return store
