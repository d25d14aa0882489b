"""Where responses are kept between requests: one interface, in a file of one machine or in Redis for several."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, assert_never

from deployments.response_store.base import ResponseStore, StoreError

if TYPE_CHECKING:
    from deployments.settings import RedisStoreSettings, SqliteStoreSettings

__all__ = ["ResponseStore", "StoreError", "create"]


def create(settings: SqliteStoreSettings | RedisStoreSettings) -> ResponseStore:
    """Nothing is opened before the first use. The module is imported here: `redis` is needed by those who use it."""
    store: ResponseStore
    match settings.kind:
        case "sqlite":
            store = import_module("deployments.response_store.sqlite").SqliteStore(settings)
        case "redis":
            store = import_module("deployments.response_store.redis").RedisStore(settings)
        case _:
            assert_never(settings.kind)
    return store
