"""API keys on a cluster: who is let in, what each sees, and a file that changes while requests run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.conftest import Deployed, app, deployed, fake_app, wait_for
from tests.deployments.key_support import ALICE, BOB, ROOT, bearer, entry, write_keys

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    entries = [entry("alice", ALICE, models=["mine"]), entry("bob", BOB, requests_per_minute=3), entry("root", ROOT)]
    return write_keys(tmp_path_factory.mktemp("keys") / "keys.yaml", entries)


@pytest.fixture(scope="module")
def system(keys: Path) -> Iterator[Deployed]:
    gateway = app("gateway", "gateway", {"catalog_poll_s": 0.2, "keys": str(keys)})
    with deployed([gateway, fake_app("mine", tokens=5), fake_app("others", tokens=5)]) as running:
        wait_for(lambda: len(models(running, ROOT)) == 2, "the gateway sees the models")
        yield running


def models(system: Deployed, key: bytes) -> list[str]:
    listed = httpx.get(f"{system.url}/v1/models", headers=bearer(key), timeout=30).json()
    return [model["id"] for model in listed.get("data", ())]


def asked(system: Deployed, key: bytes, model: str, **fields: Any) -> int:
    body = {"model": model, "messages": [{"role": "user", "content": "hello"}], **fields}
    return httpx.post(f"{system.url}/v1/chat/completions", json=body, headers=bearer(key), timeout=60).status_code


def test_keys_count_and_their_file_is_read_again_without_a_restart(system: Deployed, keys: Path) -> None:
    assert models(system, ALICE) == ["mine"]
    assert [asked(system, ALICE, model) for model in ("mine", "others")] == [200, 404]
    assert asked(system, b"ty-wrong", "mine") == 401
    assert [asked(system, BOB, "others") for _ in range(4)] == [200, 200, 200, 429]
    up_s = status(system)["up_s"]

    write_keys(keys, [entry("alice", b"ty-new", models=["mine", "others"]), entry("root", ROOT)])
    wait_for(lambda: asked(system, b"ty-new", "others") == 200, "the new key counts", 15)
    assert (asked(system, ALICE, "mine"), asked(system, BOB, "mine")) == (401, 401)
    assert status(system)["up_s"] > up_s, "the same gateway, which has not started anew"


def status(system: Deployed) -> dict[str, Any]:
    shown: dict[str, Any] = httpx.get(f"{system.url}/api/status", headers=bearer(ROOT), timeout=30).json()
    return shown
