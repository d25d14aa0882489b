"""API keys: the file they stand in, and whose key a request brings.

- id: alice                     # what logs and metrics show; the key itself is nowhere
  sha256: 5e88…                 # of the key, as `tokenyard key new` prints it; a list while one replaces another
  models: [smollm2-135m]        # all of them, if this is left out; so with every limit
  requests_per_minute: 60
  tokens_per_minute: 20000
  concurrent_requests: 4
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from deployments.settings import ConfigError

logger = logging.getLogger(__name__)

PREFIX = "ty-"
"""Begins every key that is made here, so that scanners for leaked secrets can know one."""

_LOOK_EVERY_S = 1.0
_TAG_BYTES = 8


def digest(key: bytes) -> bytes:
    """What is stored of a key.

    A slow hash protects what people think up. These keys are 256 random bits, which nobody guesses at any speed, and
    every request would pay for it: one fast hash is right.
    """
    return hashlib.sha256(key).digest()


def _one_or_more(value: object) -> object:
    return (value,) if isinstance(value, str) else value


_Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class ApiKey(BaseModel):
    """One entry of the file. None is no limit."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$", description="Owns what is stored with the key.")
    sha256: Annotated[tuple[_Sha256, ...], BeforeValidator(_one_or_more), Field(min_length=1)]
    models: tuple[str, ...] | None = Field(None, description="The models it may use, and sees. Default: all.")
    requests_per_minute: int | None = Field(None, gt=0, description="Of any kind, at one gateway.")
    tokens_per_minute: int | None = Field(
        None, gt=0, description="Of prompts and answers together, at one gateway; estimated first, settled afterwards."
    )
    concurrent_requests: int | None = Field(None, gt=0, description="Requests at a time, at one gateway.")
    admin: bool = Field(
        False, description="May see and change what all share: slots, their files, the scales of LoRA adapters."
    )

    def may_use(self, model: str) -> bool:
        return self.models is None or model in self.models


class _File(BaseModel):
    """Its root is a list, so that an entry can be appended to it."""

    keys: tuple[ApiKey, ...]

    @model_validator(mode="after")
    def _unique(self) -> Self:
        for what, values in (
            ("id", [key.id for key in self.keys]),
            ("sha256", [hash for key in self.keys for hash in key.sha256]),
        ):
            twice = next((value for value in values if values.count(value) > 1), None)
            if twice is not None:
                raise ValueError(f"two keys have the {what} {twice}")
        return self


def new_key(id: str, **fields: Any) -> tuple[str, str]:
    """A new key, and its entry for the file. Raises `ConfigError`."""
    key = PREFIX + secrets.token_urlsafe(32)
    entry = {"id": id, "sha256": digest(key.encode()).hex()}
    entry |= {name: value for name, value in fields.items() if value is not None}
    _checked([entry])
    return key, yaml.safe_dump([entry], sort_keys=False)


def _checked(raw: object) -> tuple[ApiKey, ...]:
    try:
        return TypeAdapter(_File).validate_python({"keys": raw}).keys
    except ValidationError as error:
        # Without the values: what stands where a hash belongs may be a key.
        faults = [
            "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in fault["loc"]).removeprefix(".")
            + f": {fault['msg']}"
            for fault in error.errors(include_url=False, include_input=False)
        ]
        raise ConfigError("\n".join(faults)) from None


def read(path: Path) -> tuple[ApiKey, ...]:
    """The keys of a file. Raises `ConfigError`, which shows nothing of what is in it."""
    try:
        raw = yaml.safe_load(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark is not None else 1
        raise ConfigError(f"{path}: line {line}: not YAML: {error.problem}") from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise ConfigError(f"{path}: not YAML") from None
    try:
        return _checked([] if raw is None else raw)
    except ConfigError as error:
        raise ConfigError("\n".join(f"{path}: {line}" for line in str(error).splitlines())) from None


class KeyRing:
    """The keys that count now."""

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        self._by_tag: dict[bytes, list[tuple[bytes, ApiKey]]] = {}
        for key in keys:
            for hash in map(bytes.fromhex, key.sha256):
                self._by_tag.setdefault(hash[:_TAG_BYTES], []).append((hash, key))

    def find(self, presented: bytes) -> ApiKey | None:
        """Whose key that is. The time it takes says nothing about other keys.

        What is looked up is a hash, whose bits nobody who guesses can choose; the rest of it is compared in constant
        time.
        """
        wanted = digest(presented)
        for hash, key in self._by_tag.get(wanted[:_TAG_BYTES], ()):
            if hmac.compare_digest(hash, wanted):
                return key
        return None


class KeyFile:
    """A file of keys that may change at any time: a change counts within about a second.

    Kubernetes swaps a link when a secret changes, so what is watched is the file behind it. A file that is broken, or
    gone, is reported once, and the keys that were read last go on to count: a slip must not lock everybody out.
    """

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        """Raises `ConfigError`: at the start a file that cannot be read must not mean that there are no keys."""
        self._path = path
        self._clock = clock
        self._version = self._seen()
        self._ring = KeyRing(read(path))
        self._looked_at = clock()
        self._looking: asyncio.Task[None] | None = None

    async def ring(self) -> KeyRing:
        if self._looking is None and self._clock() - self._looked_at >= _LOOK_EVERY_S:
            self._looking = asyncio.get_running_loop().create_task(self._look())
        if self._looking is not None:
            await asyncio.shield(self._looking)  # whoever waits may leave; the others wait on
        return self._ring

    async def _look(self) -> None:
        try:
            await asyncio.to_thread(self._reload)
        finally:
            self._looked_at = self._clock()
            self._looking = None

    def _reload(self) -> None:
        version = self._seen()
        if version == self._version:
            return
        self._version = version
        try:
            keys = read(self._path)
        except ConfigError as error:
            logger.error("the API keys stay as they were: %s", error)
            return
        self._ring = KeyRing(keys)
        logger.info("API keys: %s", _names(keys))

    def _seen(self) -> tuple[int, int, int] | None:
        """What tells one version of the file from another; None where there is none."""
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size


def _names(keys: Sequence[ApiKey]) -> str:
    return ", ".join(key.id for key in keys) or "none: nobody is let in"
