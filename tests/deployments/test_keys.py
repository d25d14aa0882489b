"""The file of API keys: what is in it, what is refused, and how a change comes to count."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import yaml

from deployments import keys
from deployments.keys import PREFIX, KeyFile, KeyRing, new_key
from deployments.settings import ConfigError
from tests.deployments.key_support import ALICE, BOB, Clock, entry, write_keys


def test_a_new_key_is_found_by_its_entry_and_is_not_in_it(tmp_path: Path) -> None:
    key, text = new_key("alice", models=["a"], tokens_per_minute=5, requests_per_minute=None)
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    (read,) = keys.read(path)
    assert (read.id, read.models, read.tokens_per_minute, read.requests_per_minute) == ("alice", ("a",), 5, None)
    assert KeyRing([read]).find(key.encode()) == read
    assert key.startswith(PREFIX)
    assert len(key) > 40
    assert key not in text
    assert new_key("alice")[0] != key


def test_entries_can_be_appended_to_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    with path.open("a") as file:
        file.writelines(new_key(name)[1] for name in ("a", "b"))
    assert [key.id for key in keys.read(path)] == ["a", "b"]


def test_two_hashes_are_one_key_while_one_replaces_the_other(tmp_path: Path) -> None:
    both = [keys.digest(ALICE).hex(), keys.digest(BOB).hex()]
    ring = KeyRing(keys.read(write_keys(tmp_path / "k", [{"id": "alice", "sha256": both}])))
    assert {found.id for key in (ALICE, BOB) if (found := ring.find(key))} == {"alice"}
    assert ring.find(b"") is None
    assert ring.find(ALICE + b"x") is None


def test_hashes_that_begin_alike_are_told_apart() -> None:
    right = keys.digest(ALICE)
    other = right[:-1] + bytes([right[-1] ^ 1])
    ring = KeyRing([keys.ApiKey(id="other", sha256=(other.hex(),)), keys.ApiKey(id="right", sha256=(right.hex(),))])
    found = ring.find(ALICE)
    assert found is not None
    assert found.id == "right"
    assert KeyRing([keys.ApiKey(id="other", sha256=(other.hex(),))]).find(ALICE) is None


SECRET = "ty-this-is-a-key-and-no-hash"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"- id: a\n  sha256: {SECRET}\n", r"keys\[0\].sha256\[0\]: String should match"),
        (f"- id: a\n  sha256: 'x{SECRET}\n", "line "),
        (f"- id: a\n  key: {SECRET}\n", r"keys\[0\].key: Extra inputs are not permitted"),
        (f"keys: {SECRET}\n", "keys: Input should be a valid tuple"),
        (yaml.safe_dump([entry("a", ALICE), entry("a", BOB)]), "two keys have the id a"),
        (yaml.safe_dump([entry("a", ALICE), entry("b", ALICE)]), "two keys have the sha256"),
        (yaml.safe_dump([entry("a b", ALICE)]), r"keys\[0\].id"),
        (yaml.safe_dump([entry("a", ALICE, requests_per_minute=0)]), "greater than 0"),
        (yaml.safe_dump([{"id": "a", "sha256": []}]), r"keys\[0\].sha256"),
        (b"\xff\xfe\xfd", "not YAML"),
    ],
)
def test_a_file_that_is_wrong_is_told_without_what_may_be_secret(tmp_path: Path, text: str | bytes, told: str) -> None:
    path = tmp_path / "keys.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=told) as caught:
        keys.read(path)
    assert SECRET not in str(caught.value)
    assert all(line.startswith(str(path)) for line in str(caught.value).splitlines())


def test_a_file_that_is_not_there_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        KeyFile(tmp_path / "none", Clock())


def test_an_empty_file_lets_nobody_in(tmp_path: Path) -> None:
    (tmp_path / "k").write_text("")
    assert keys.read(tmp_path / "k") == ()


# --- a file that changes ----------------------------------------------------------------------------------------------


async def found(file: KeyFile, key: bytes) -> str | None:
    known = (await file.ring()).find(key)
    return None if known is None else known.id


async def test_a_changed_file_counts_within_a_second(tmp_path: Path) -> None:
    clock = Clock()
    file = KeyFile(write_keys(tmp_path / "k", [entry("alice", ALICE)]), clock)
    write_keys(tmp_path / "k", [entry("bobby", BOB)])
    assert (await found(file, ALICE), await found(file, BOB)) == ("alice", None)
    clock.now = 1.0
    assert (await found(file, ALICE), await found(file, BOB)) == (None, "bobby")


async def test_a_link_that_is_swapped_is_a_change(tmp_path: Path) -> None:
    """As Kubernetes does it: the file is a link through a folder that is a link, which is replaced."""
    clock = Clock()
    for number, (id, key) in enumerate((("alice", ALICE), ("bobby", BOB))):
        (tmp_path / f"..{number}").mkdir()
        os.utime(write_keys(tmp_path / f"..{number}" / "keys", [entry(id, key)]), (0, 0))
    (tmp_path / "..data").symlink_to("..0")
    (tmp_path / "keys").symlink_to("..data/keys")
    file = KeyFile(tmp_path / "keys", clock)
    assert await found(file, ALICE) == "alice"
    (tmp_path / "..new").symlink_to("..1")
    (tmp_path / "..new").rename(tmp_path / "..data")
    clock.now = 1.0
    assert (await found(file, ALICE), await found(file, BOB)) == (None, "bobby")


async def test_a_file_that_breaks_is_reported_once_and_the_keys_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    path = write_keys(tmp_path / "k", [entry("alice", ALICE)])
    file = KeyFile(path, clock)
    for spoil in (lambda: path.write_text("- id: [\n"), path.unlink):
        caplog.clear()
        spoil()
        for _ in range(3):
            clock.now += 1.0
            assert await found(file, ALICE) == "alice"
        assert [record.levelno for record in caplog.records] == [logging.ERROR]
        assert "the API keys stay as they were" in caplog.text
    write_keys(path, [entry("bobby", BOB)])
    clock.now += 1.0
    assert (await found(file, ALICE), await found(file, BOB)) == (None, "bobby")
