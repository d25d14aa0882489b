"""Which of llama.cpp's server tests fail here, and why."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple, Self

import msgspec

FILES = (
    "test_completion.py",
    "test_chat_completion.py",
    "test_compat_anthropic.py",
    "test_embedding.py",
    "test_template.py",
    "test_security.py",
    "test_slot_save.py",
    "test_speculative.py",
    "test_rerank.py",
    "test_basic.py",
    "test_metrics.py",
    "test_infill.py",
    "test_tool_call.py",
    "test_ctx_shift.py",
    "test_sleep.py",
    "test_compat_oai_responses.py",
    "test_compat_gcp.py",
    "test_tokenize.py",
    "test_lora.py",
    "test_ignore_eos.py",
)
"""The longest first. Left out are those about what is not built here: tools on the server, reading of images, decision
models, llama.cpp's own router, and the wording of its log."""


class Outcome(NamedTuple):
    """`message` is the first line of why a test failed or was skipped."""

    result: Literal["passed", "failed", "skipped"]
    message: str = ""


class Expectations(msgspec.Struct, frozen=True):
    """`reasons`: by `file::test[case]`, or `file::test` for all its cases."""

    reasons: Mapping[str, str]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Lines of `file::test[case] - reason`. Empty ones and comments (`#`) are for the reader."""
        reasons = {}
        for line in path.read_text().splitlines():
            if line and not line.startswith("#"):
                test, dash, reason = line.partition(" - ")
                if not dash or not reason.strip() or test in reasons:
                    raise ValueError(f"{path.name}: expected one line of `file::test[case] - reason`, not {line!r}")
                reasons[test] = reason.strip()
        return cls(reasons)

    def reason(self, file: str, case: str) -> str | None:
        """None: it is to pass."""
        test = f"{file}::{case}"
        return self.reasons.get(test) or self.reasons.get(test.partition("[")[0])

    def faults(self, file: str, outcomes: Mapping[str, Outcome]) -> list[str]:
        """What is not as expected, a line each: of the tests of `file`, by `test[case]`."""
        faults = []
        for case, outcome in outcomes.items():
            expected = self.reason(file, case)
            if outcome.result == "failed" and expected is None:
                faults.append(f"{file}::{case} failed: {outcome.message}")
            if outcome.result == "passed" and expected is not None:
                faults.append(f"{file}::{case} passed, and is expected to fail: {expected}")
        known = {name for case in outcomes for name in (case, case.partition("[")[0])}
        listed = (test.partition("::")[2] for test in self.reasons if test.startswith(f"{file}::"))
        return faults + [
            f"{file}::{test} is expected to fail, and is not there" for test in listed if test not in known
        ]
