"""A Redis (6.2 or later) that the gateways of all machines share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from redis.credentials import CredentialProvider
from redis.exceptions import AuthenticationError, RedisError

from deployments.response_store.base import StoreError
from deployments.settings import RedisStoreSettings


class _PasswordFile(CredentialProvider):
    """Asked for each connection."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def get_credentials_async(self) -> tuple[str]:
        try:
            return ((await asyncio.to_thread(self._path.read_text)).strip(),)
        except OSError as error:  # as one of its own, it would be taken for the server's socket that is not there
            raise AuthenticationError(f"password_file {self._path}: {error.strerror}") from error


class RedisStore:
    """A record is a key that expires by itself. A sorted set of ids by their last use finds those to drop first.

    The braces of the prefix keep all keys in one slot of a Redis cluster.
    """

    def __init__(self, settings: RedisStoreSettings, clock: Callable[[], float] = time.time) -> None:
        self._settings = settings
        self._clock = clock
        self._ttl = max(1, round(settings.ttl_s))
        self._index = self._key("index")
        password = None if settings.password_file is None else _PasswordFile(Path(settings.password_file))
        self._redis: Redis = Redis.from_url(
            settings.url, socket_connect_timeout=5, socket_timeout=30, credential_provider=password
        )

    async def put(self, id: str, record: bytes) -> None:
        now = self._clock()
        with _as_store_errors():
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.set(self._key(id), record, ex=self._ttl)
                pipe.zadd(self._index, {id: now})
                pipe.zremrangebyscore(self._index, "-inf", now - self._ttl)
                pipe.zcard(self._index)
                *_, held = await pipe.execute()
            excess = held - self._settings.max_responses
            if excess > 0:
                oldest: Any = await self._redis.zpopmin(self._index, excess)
                await self._redis.delete(*(self._key(member.decode()) for member, _ in oldest))

    async def get(self, ids: Sequence[str]) -> Mapping[str, bytes]:
        if not ids:
            return {}
        with _as_store_errors():
            async with self._redis.pipeline(transaction=False) as pipe:
                for id in ids:
                    pipe.getex(self._key(id), ex=self._ttl)
                pipe.zadd(self._index, dict.fromkeys(ids, self._clock()), xx=True)
                *records, _ = await pipe.execute()
        return {id: record for id, record in zip(ids, records, strict=True) if record is not None}

    async def delete(self, id: str) -> bool:
        with _as_store_errors():
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.delete(self._key(id))
                pipe.zrem(self._index, id)
                deleted, _ = await pipe.execute()
        return bool(deleted)

    async def aclose(self) -> None:
        await self._redis.aclose()

    def _key(self, id: str) -> str:
        return f"{{{self._settings.prefix}}}:{id}"


@contextmanager
def _as_store_errors() -> Iterator[None]:
    try:
        yield
    except (RedisError, OSError) as error:
        raise StoreError(f"{type(error).__name__}: {error}") from error
