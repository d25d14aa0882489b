"""What headers say of the caller."""

from __future__ import annotations

import pytest

from deployments import caller
from protocols.errors import InvalidRequest


def asked(value: str) -> float | None:
    return caller.timeout_s({"headers": [(caller.TIMEOUT_HEADER, value.encode())]})


def test_how_long_the_caller_waits() -> None:
    assert caller.timeout_s({"headers": []}) is None
    assert asked("2.5") == 2.5


@pytest.mark.parametrize("value", ["soon", "0", "-1", "nan", "inf", "1e9", "1,2"])
def test_what_is_no_time_is_refused(value: str) -> None:
    with pytest.raises(InvalidRequest, match="x-request-timeout-s") as caught:
        asked(value)
    assert caught.value.param == "x-request-timeout-s"
