"""A file that the gateways of one machine share. SQLite is driven on a thread of its own."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from deployments.response_store.base import StoreError
from deployments.settings import SqliteStoreSettings

T = TypeVar("T")

BUSY_TIMEOUT_S = 10.0
"""How long one gateway waits for another's write. A write takes milliseconds."""

# Triggers keep the sum: adding up all sizes at every write would cost more than the write.
_SCHEMA = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, record BLOB NOT NULL, size INTEGER NOT NULL, expires REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS by_expiry ON responses (expires, size);
CREATE TABLE IF NOT EXISTS total (bytes INTEGER NOT NULL);
INSERT INTO total SELECT 0 WHERE NOT EXISTS (SELECT 1 FROM total);
CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON responses BEGIN UPDATE total SET bytes = bytes + NEW.size; END;
CREATE TRIGGER IF NOT EXISTS removed AFTER DELETE ON responses BEGIN UPDATE total SET bytes = bytes - OLD.size; END;
"""


class SqliteStore:
    def __init__(self, settings: SqliteStoreSettings, clock: Callable[[], float] = time.time) -> None:
        self._settings = settings
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="response-store")
        self._opened: sqlite3.Connection | None = None

    async def put(self, id: str, record: bytes) -> None:
        await self._run(lambda: self._put(id, record))

    async def get(self, ids: Sequence[str]) -> Mapping[str, bytes]:
        return await self._run(lambda: self._get(ids))

    async def delete(self, id: str) -> bool:
        return await self._run(lambda: self._delete(id))

    async def aclose(self) -> None:
        await self._run(self._close)
        self._thread.shutdown(wait=False)

    async def _run(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except (sqlite3.Error, OSError) as error:
            raise StoreError(f"{type(error).__name__}: {error}") from error

    # --- on the thread ---

    def _put(self, id: str, record: bytes) -> None:
        if len(record) > self._settings.max_bytes:
            raise StoreError(f"a record of {len(record)} bytes, and the limit of all is {self._settings.max_bytes}")
        now = self._clock()
        with self._transaction() as db:
            db.execute("DELETE FROM responses WHERE id = ? OR expires <= ?", (id, now))
            row = (id, record, len(record), now + self._settings.ttl_s)
            db.execute("INSERT INTO responses VALUES (?, ?, ?, ?)", row)
            while db.execute("SELECT bytes FROM total").fetchone()[0] > self._settings.max_bytes:
                db.execute(
                    "DELETE FROM responses WHERE id = (SELECT id FROM responses ORDER BY expires, rowid LIMIT 1)"
                )

    def _get(self, ids: Sequence[str]) -> dict[str, bytes]:
        now = self._clock()
        found: dict[str, bytes] = {}
        with self._transaction() as db:
            for id in ids:
                query = "UPDATE responses SET expires = ? WHERE id = ? AND expires > ? RETURNING record"
                for (record,) in db.execute(query, (now + self._settings.ttl_s, id, now)).fetchall():
                    found[id] = record
        return found

    def _delete(self, id: str) -> bool:
        with self._transaction() as db:
            return db.execute("DELETE FROM responses WHERE id = ? AND expires > ?", (id, self._clock())).rowcount > 0

    def _close(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        if self._opened is None:
            self._opened = _open(self._settings.path)
        db = self._opened
        db.execute("BEGIN IMMEDIATE")
        with db:  # commits, or rolls back
            yield db


def _open(path: str | None) -> sqlite3.Connection:
    file = _default_path() if path is None else Path(path).expanduser()
    file.parent.mkdir(parents=True, exist_ok=True)
    # It holds what people said: for its owner's eyes only. SQLite gives its side files the same mode.
    os.close(os.open(file, os.O_CREAT | os.O_RDWR, 0o600))
    db = sqlite3.connect(file, timeout=BUSY_TIMEOUT_S, isolation_level=None)
    db.executescript(_SCHEMA)
    return db


def _default_path() -> Path:
    folder = Path(tempfile.gettempdir()) / f"tokenyard-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    state = folder.lstat()
    if state.st_uid != os.getuid() or state.st_mode & 0o077:
        raise OSError(f"{folder} must belong to this user alone")
    return folder / "responses.sqlite"
