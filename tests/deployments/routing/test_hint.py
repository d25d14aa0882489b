"""What travels with a call: it survives the way, and another version's is no reason to fail."""

from __future__ import annotations

import pickle

import msgspec
import pytest

from deployments.routing.hint import UNKNOWN, RoutingHint, read_hint
from deployments.routing.key import prefix_key
from protocols.request import TextPrompt
from tests.deployments.support import request

HINT = RoutingHint(prefix_key(request(text="word " * 2000)), 7, ("a", "b"))


def test_a_hint_survives_the_handle_call() -> None:
    assert len(HINT.key.rungs) > 5
    assert pickle.loads(pickle.dumps(HINT)) == HINT


def test_it_is_small() -> None:
    assert len(pickle.dumps(HINT)) < 600


@pytest.mark.parametrize("data", [b"", b"\xc1", msgspec.msgpack.encode([5]), msgspec.msgpack.encode([["x"], 1])])
def test_another_versions_hint_is_none(data: bytes) -> None:
    assert read_hint(data) == UNKNOWN


def test_a_later_versions_additions_are_passed_over() -> None:
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(HINT))
    assert read_hint(msgspec.msgpack.encode([*plain, "more"])) == HINT


def test_an_unknown_prompt_shares_nothing() -> None:
    assert UNKNOWN.key.rungs == ()
    assert prefix_key(msgspec.structs.replace(request(), prompt=TextPrompt("x"))).rungs
