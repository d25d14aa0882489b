"""What the tests of API keys share: files of keys, a clock that stands still, and the app behind them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from deployments.keys import digest

ALICE, BOB, ROOT = b"ty-alice", b"ty-bob", b"ty-root"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def entry(id: str, key: bytes, **fields: Any) -> dict[str, Any]:
    return {"id": id, "sha256": digest(key).hex(), **fields}


def write_keys(path: Path, entries: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text(yaml.safe_dump([dict(one) for one in entries]))
    return path


def bearer(key: bytes) -> dict[str, str]:
    return {"authorization": f"Bearer {key.decode()}"}
