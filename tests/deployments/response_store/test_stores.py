"""What every store must do, of each kind; and what is particular to one.

Redis is tested on a server of its own, where `redis-server` is on the path.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deployments.response_store import ResponseStore, StoreError, create
from deployments.response_store.redis import RedisStore
from deployments.response_store.sqlite import SqliteStore
from deployments.settings import ConfigError, RedisStoreSettings, SqliteStoreSettings


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("redis")
    with redis_server(folder) as url:
        yield url


@contextmanager
def redis_server(folder: Path, *options: str) -> Iterator[str]:
    """The url of one that is starting."""
    binary = shutil.which("redis-server")
    if binary is None:
        pytest.skip("there is no redis-server on the path")
    socket = folder / "socket"
    command = [binary, "--port", "0", "--unixsocket", str(socket), "--save", "", "--appendonly", "no"]
    server = subprocess.Popen([*command, "--dir", str(folder), *options], stdout=subprocess.DEVNULL)
    try:
        yield f"unix://{socket}"
    finally:
        server.terminate()
        server.wait(10)


@pytest.fixture(params=["sqlite", "redis"])
async def store(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> AsyncIterator[ResponseStore]:
    made: ResponseStore
    if request.param == "sqlite":
        made = SqliteStore(SqliteStoreSettings(path=str(tmp_path / "r.sqlite"), ttl_s=100, max_bytes=50), clock)
    else:
        settings = RedisStoreSettings(
            url=request.getfixturevalue("redis_url"), prefix=tmp_path.name, ttl_s=100, max_responses=5
        )
        made = RedisStore(settings, clock)
        await until_ready(made)
    yield made
    await made.aclose()


async def until_ready(store: RedisStore) -> None:
    for _ in range(200):
        try:
            await store.get(["x"])
            return
        except StoreError:
            await asyncio.sleep(0.05)
    raise AssertionError("redis-server does not answer")


async def until_socket(path: Path) -> None:
    for _ in range(200):
        if path.exists():
            return
        await asyncio.sleep(0.05)
    raise AssertionError("redis-server does not listen")


# --- every store ------------------------------------------------------------


async def test_what_is_put_is_there(store: ResponseStore) -> None:
    await store.put("a", b"\x00\xff one")
    await store.put("b", b"two")
    assert await store.get(["a", "none", "b"]) == {"a": b"\x00\xff one", "b": b"two"}
    assert await store.get([]) == {}


async def test_a_record_is_replaced_by_its_namesake(store: ResponseStore) -> None:
    for record in (b"one", b"two"):
        await store.put("a", record)
    assert await store.get(["a"]) == {"a": b"two"}


async def test_what_is_deleted_is_gone(store: ResponseStore) -> None:
    await store.put("a", b"one")
    assert await store.delete("a") is True
    assert await store.delete("a") is False
    assert await store.get(["a"]) == {}


async def test_past_the_limit_what_was_not_used_longest_goes_first(store: ResponseStore, clock: Clock) -> None:
    for name in "abcde":
        clock.now += 1
        await store.put(name, b"0123456789")
    clock.now += 1
    await store.get(["a"])
    clock.now += 1
    await store.put("f", b"0123456789")
    assert set(await store.get(list("abcdef"))) == set("acdef")


async def test_many_at_once(store: ResponseStore) -> None:
    await asyncio.gather(*(store.put(f"{i}", b"%d" % i) for i in range(5)))
    found = await asyncio.gather(*(store.get([f"{i}"]) for i in range(5)))
    assert found == [{f"{i}": b"%d" % i} for i in range(5)]


# --- SQLite ------------------------------------------------------------


def sqlite(path: Path, clock: Clock, **settings: float) -> SqliteStore:
    return SqliteStore(SqliteStoreSettings.model_validate({"path": str(path), **settings}), clock)


async def test_a_record_is_kept_for_a_time_after_its_last_use(tmp_path: Path, clock: Clock) -> None:
    store = sqlite(tmp_path / "r", clock, ttl_s=100)
    await store.put("a", b"one")
    clock.now += 99
    assert await store.get(["a"]) == {"a": b"one"}
    clock.now += 99
    assert await store.get(["a"]) == {"a": b"one"}
    clock.now += 100
    assert await store.get(["a"]) == {}
    assert await store.delete("a") is False
    await store.aclose()


async def test_B34_gateways_of_one_machine_share_the_file(tmp_path: Path, clock: Clock) -> None:
    stores = [sqlite(tmp_path / "new" / "r", clock) for _ in range(4)]
    await asyncio.gather(*(store.put(f"{i}-{j}", b"x") for i, store in enumerate(stores) for j in range(20)))
    for store in stores:
        assert len(await store.get([f"{i}-{j}" for i in range(4) for j in range(20)])) == 80
        await store.aclose()


async def test_it_is_there_after_a_restart(tmp_path: Path, clock: Clock) -> None:
    for record in ({}, {"a": b"one"}):
        store = sqlite(tmp_path / "r", clock)
        assert await store.get(["a"]) == record
        await store.put("a", b"one")
        await store.aclose()


async def test_only_its_owner_can_read_it(tmp_path: Path, clock: Clock) -> None:
    store = sqlite(tmp_path / "r", clock)
    await store.put("a", b"one")
    assert {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()} == {0o600}
    await store.aclose()


async def test_the_sum_of_sizes_follows_every_change(tmp_path: Path, clock: Clock) -> None:
    store = sqlite(tmp_path / "r", clock, max_bytes=20, ttl_s=10)
    for _ in range(5):
        await store.put("a", b"0123456789")  # replaced
        await store.put("b", b"0123456789")
        assert await store.delete("b")
    clock.now += 10  # expired
    for name in "cd":
        await store.put(name, b"0123456789")
    assert set(await store.get(list("abcd"))) == {"c", "d"}
    await store.aclose()


async def test_a_record_that_never_fits_is_refused_and_costs_no_other(tmp_path: Path, clock: Clock) -> None:
    store = sqlite(tmp_path / "r", clock, max_bytes=20)
    await store.put("a", b"one")
    with pytest.raises(StoreError, match="21 bytes"):
        await store.put("b", b"x" * 21)
    assert await store.get(["a", "b"]) == {"a": b"one"}
    await store.aclose()


async def test_a_file_that_cannot_be_used_is_a_store_error(tmp_path: Path, clock: Clock) -> None:
    (tmp_path / "r").write_bytes(b"no database" * 100)
    store = sqlite(tmp_path / "r", clock)
    for use in (store.put("a", b"one"), store.get(["a"]), store.delete("a")):
        with pytest.raises(StoreError, match="DatabaseError"):
            await use
    await store.aclose()


async def test_the_default_file_is_in_a_folder_of_this_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    store = SqliteStore(SqliteStoreSettings(), clock)
    await store.put("a", b"one")
    await store.aclose()
    folder = tmp_path / f"tokenyard-{os.getuid()}"
    assert (folder / "responses.sqlite").exists()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o755)
    store = SqliteStore(SqliteStoreSettings(), clock)
    with pytest.raises(StoreError, match="this user alone"):
        await store.get(["a"])
    await store.aclose()


def test_the_event_loop_goes_on_while_a_file_is_locked(tmp_path: Path, clock: Clock) -> None:
    """Another process holds the file: the store waits on its own thread."""

    async def run() -> None:
        store, other = sqlite(tmp_path / "r", clock), sqlite(tmp_path / "r", clock)
        await store.put("a", b"one")
        with other._transaction():
            waiting = asyncio.ensure_future(store.put("b", b"two"))
            turns = 0
            while turns < 100:
                turns += 1
                await asyncio.sleep(0)
            assert not waiting.done()
        await waiting
        other._close()
        await asyncio.gather(store.aclose(), other.aclose())

    asyncio.run(run())


# --- Redis ------------------------------------------------------------


async def test_keys_expire_by_themselves_and_a_use_puts_that_off(redis_url: str, tmp_path: Path, clock: Clock) -> None:
    store = RedisStore(RedisStoreSettings(url=redis_url, prefix=tmp_path.name, ttl_s=100), clock)
    await until_ready(store)
    await store.put("a", b"one")
    key = f"{{{tmp_path.name}}}:a"
    assert 90 <= await store._redis.ttl(key) <= 100
    await store._redis.expire(key, 5)
    await store.get(["a"])
    assert 90 <= await store._redis.ttl(key) <= 100
    await store.aclose()


async def test_the_password_is_read_from_a_file_for_each_connection(tmp_path: Path) -> None:
    password = tmp_path / "password"
    with redis_server(tmp_path, "--requirepass", "a secret") as url:
        store = RedisStore(RedisStoreSettings(url=url, password_file=str(password)))
        with pytest.raises(StoreError, match="password_file .*: No such file"):
            await until_socket(tmp_path / "socket")
            await store.get(["a"])
        password.write_text("of before\n")
        with pytest.raises(StoreError, match="invalid username-password pair"):
            await store.get(["a"])
        password.write_text("a secret\n")
        await store.put("a", b"one")
        assert await store.get(["a"]) == {"a": b"one"}
        await store.aclose()


def test_two_passwords_are_one_too_many() -> None:
    with pytest.raises(ValueError, match="one of them is enough"):
        RedisStoreSettings(url="redis://:word@host:6379/0", password_file="/password")


def test_without_its_package_the_operator_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis.asyncio", None)
    monkeypatch.delitem(sys.modules, "deployments.response_store.redis")
    with pytest.raises(ConfigError, match="response_store: kind 'redis' needs a package"):
        create(RedisStoreSettings(url="redis://x"))


async def test_a_server_that_is_not_there_is_a_store_error(tmp_path: Path) -> None:
    store = create(RedisStoreSettings(url=f"unix://{tmp_path}/none"))
    assert isinstance(store, RedisStore)
    for use in (store.put("a", b"one"), store.get(["a"]), store.delete("a")):
        with pytest.raises(StoreError):
            await use
    await store.aclose()
