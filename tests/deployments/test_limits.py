"""What a key may do in a minute and at a time; every time in it is the test's."""

from __future__ import annotations

from typing import Any

import pytest

from deployments.keys import ApiKey
from deployments.limits import Account, Accounts, Bucket
from protocols.errors import RateLimited
from tests.deployments.key_support import Clock

HASH = "0" * 64


def key(**limits: Any) -> ApiKey:
    return ApiKey(id="alice", sha256=(HASH,), **limits)


def test_a_bucket_grows_to_one_minutes_worth_and_no_further() -> None:
    clock = Clock()
    bucket = Bucket(60, clock)
    bucket.take(60)
    assert bucket.wait_s(1) == pytest.approx(1)
    clock.now = 30
    assert bucket.wait_s(30) == 0
    assert bucket.wait_s(31) == pytest.approx(1)
    clock.now = 10_000
    bucket.take(60)
    assert bucket.wait_s(1) == pytest.approx(1)


def test_what_is_larger_than_a_minute_waits_for_a_full_one_and_is_paid_for_afterwards() -> None:
    clock = Clock()
    bucket = Bucket(60, clock)
    assert bucket.wait_s(150) == 0
    bucket.take(150)
    assert bucket.wait_s(1) == pytest.approx(91)
    assert bucket.wait_s(150) == pytest.approx(150)


def test_what_is_given_back_does_not_grow_beyond_a_minute() -> None:
    bucket = Bucket(60, Clock())
    bucket.take(-1000)
    bucket.take(60)
    assert bucket.wait_s(1) > 0


def test_requests_of_a_minute_are_counted_and_come_back() -> None:
    clock = Clock()
    account = Account(key(requests_per_minute=2), clock)
    for _ in range(2):
        account.enter()
    with pytest.raises(RateLimited, match="2 requests per minute") as caught:
        account.enter()
    assert caught.value.retry_after_s == pytest.approx(30)
    assert account.running == 2
    clock.now = 30
    account.enter()


def test_requests_at_a_time_are_counted_and_a_refused_one_uses_nothing_up() -> None:
    account = Account(key(concurrent_requests=1, requests_per_minute=2), Clock())
    account.enter()
    for _ in range(5):
        with pytest.raises(RateLimited, match="1 requests at a time"):
            account.enter()
    account.leave()
    account.enter()


def test_tokens_are_charged_and_settled() -> None:
    account = Account(key(tokens_per_minute=100), Clock())
    account.charge(90)
    with pytest.raises(RateLimited, match="100 tokens per minute"):
        account.charge(20)
    account.settle(90, used=30)
    account.charge(70)
    account.settle(70, used=170)
    with pytest.raises(RateLimited) as caught:
        account.charge(1)
    assert caught.value.retry_after_s == pytest.approx(101 * 60 / 100)


def test_a_key_without_limits_has_none() -> None:
    account = Account(key(), Clock())
    for _ in range(10_000):
        account.enter()
    account.charge(10**9)
    account.settle(10**9, 0)
    assert not account.counts_tokens


def test_a_change_of_the_file_forgives_nothing() -> None:
    accounts = Accounts(Clock())
    old = key(requests_per_minute=10, concurrent_requests=9)
    for _ in range(6):
        accounts.of(old).enter()
    changed = key(requests_per_minute=8, concurrent_requests=9)
    for _ in range(2):
        accounts.of(changed).enter()
    with pytest.raises(RateLimited):
        accounts.of(changed).enter()
    with pytest.raises(RateLimited, match="7 requests at a time"):
        accounts.of(key(concurrent_requests=7)).enter()
    accounts.of(key()).enter()
