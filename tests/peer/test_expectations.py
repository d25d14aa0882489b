"""The list of expected failures, and what is made of it. The tests it is about run with `make test-peer`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.peer.expectations import FILES, Expectations, Outcome

LIST = Path(__file__).with_name("expected_failures.txt")
EXPECTED = Expectations({"a.py::test_x": "no x here", "a.py::test_y[1]": "no 1 here"})
FAILED, PASSED, SKIPPED = Outcome("failed", "assert 1 == 2"), Outcome("passed"), Outcome("skipped")


def test_every_line_names_a_test_of_a_file_that_is_run_and_a_reason() -> None:
    reasons = Expectations.read(LIST).reasons
    assert {test.partition("::")[0] for test in reasons} <= set(FILES)
    assert all(reason and "::test_" in test for test, reason in reasons.items())


@pytest.mark.parametrize("line", ["a.py::test_x", "a.py::test_x - ", "a.py::test_x - y\na.py::test_x - z"])
def test_a_line_without_a_reason_or_twice_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "list.txt"
    path.write_text(f"# a comment\n\n{line}\n")
    with pytest.raises(ValueError, match="expected one line"):
        Expectations.read(path)


def test_a_test_stands_for_all_its_cases() -> None:
    assert EXPECTED.reason("a.py", "test_x[2]") == "no x here"
    assert EXPECTED.reason("a.py", "test_y[2]") is None
    assert EXPECTED.reason("b.py", "test_x") is None


@pytest.mark.parametrize(
    ("outcomes", "faults"),
    [
        ({"test_x[1]": FAILED, "test_y[1]": FAILED, "test_y[2]": PASSED}, []),
        ({"test_x": SKIPPED, "test_y[1]": SKIPPED, "test_z": SKIPPED}, []),
        ({"test_x": FAILED, "test_y[1]": FAILED, "test_z": FAILED}, ["a.py::test_z failed: assert 1 == 2"]),
        (
            {"test_x": PASSED, "test_y[1]": FAILED},
            ["a.py::test_x passed, and is expected to fail: no x here"],
        ),
        ({"test_x": FAILED}, ["a.py::test_y[1] is expected to fail, and is not there"]),
    ],
)
def test_what_is_not_as_expected(outcomes: dict[str, Outcome], faults: list[str]) -> None:
    assert EXPECTED.faults("a.py", outcomes) == faults
