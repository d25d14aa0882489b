"""What a deploy will do, before it does it: Serve's own rule of what restarts, on configs as it keeps them."""

from __future__ import annotations

from typing import Any

import pytest

from deployments import ray_compat
from deployments.autoscaling import POLICY
from deployments.config import MODEL_IMPORT
from deployments.plan import Step, avoidable, plan

MODEL: dict[str, Any] = {
    "name": "m",
    "route_prefix": None,
    "import_path": MODEL_IMPORT,
    "args": {"backend": {"kind": "fake", "slots": 4}, "aliases": ["a", "b"]},
    "deployments": [{"name": "Model", "max_ongoing_requests": 8, "autoscaling_config": {"max_replicas": 2}}],
}


def changed(**fields: Any) -> dict[str, Any]:
    return MODEL | fields


def model(**options: Any) -> dict[str, Any]:
    return changed(deployments=[MODEL["deployments"][0] | options])


def steps(running: dict[str, Any], wanted: dict[str, Any]) -> list[Step]:
    return plan(running, wanted, ray_compat.code_version)


@pytest.mark.parametrize(
    ("after", "step"),
    [
        (MODEL, Step("m", "keep")),
        (
            changed(args=MODEL["args"] | {"backend": {"kind": "fake", "slots": 8}}),
            Step("m", "restart", ("args.backend.slots",)),
        ),
        (changed(args=MODEL["args"] | {"aliases": ["a", "c"]}), Step("m", "restart", ("args.aliases[1]",))),
        (changed(args=MODEL["args"] | {"aliases": []}), Step("m", "restart", ("args.aliases",))),
        (changed(import_path="other:model"), Step("m", "restart", ("import_path",))),
        (
            changed(runtime_env={"env_vars": {"A": "1"}}),
            Step("m", "restart", ("runtime_env",)),
        ),
        (model(max_ongoing_requests=9), Step("m", "change", ("deployments[Model].max_ongoing_requests",))),
        (
            model(autoscaling_config={"max_replicas": 3}),
            Step("m", "change", ("deployments[Model].autoscaling_config.max_replicas",)),
        ),
        (
            model(autoscaling_config={"max_replicas": 2, "policy": {"policy_function": POLICY}}),
            Step("m", "restart", ("deployments[Model].autoscaling_config.policy",)),
        ),
        (
            model(ray_actor_options={"num_cpus": 2}),
            Step("m", "restart", ("deployments[Model].ray_actor_options",)),
        ),
        (
            changed(deployments=[]),
            Step(
                "m",
                "restart",  # the scaling policies of all deployments are in the code version, also where there is none
                ("deployments[Model].max_ongoing_requests", "deployments[Model].autoscaling_config"),
            ),
        ),
    ],
)
def test_what_happens_to_an_application(after: dict[str, Any], step: Step) -> None:
    assert steps({"m": MODEL}, {"m": after}) == [step]


@pytest.mark.parametrize(
    ("before", "after", "because"),
    [
        (None, {"aliases": ["c"]}, "deployments[Model].user_config"),
        ({"aliases": ["c"]}, {"aliases": ["d"]}, "deployments[Model].user_config.aliases[0]"),
        ({"stall_timeout_s": 60}, {}, "deployments[Model].user_config.stall_timeout_s"),
    ],
)
def test_a_user_config_restarts_nothing(before: object, after: object, because: str) -> None:
    running = MODEL if before is None else model(user_config=before)
    assert steps({"m": running}, {"m": model(user_config=after)}) == [Step("m", "change", (because,))]


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({"aliases": ["a", "c"]}, True),
        ({"defaults": {"temperature": 1.0}, "stall_timeout_s": 60}, True),
        ({"queue_slots": 3}, False),
        ({"aliases": [], "queue_slots": 3}, False),
        ({}, False),
    ],
)
def test_a_restart_that_a_user_config_would_spare(args: dict[str, object], expected: bool) -> None:
    (step,) = steps({"m": MODEL}, {"m": changed(args=MODEL["args"] | args)})
    assert avoidable(step) is expected


def test_applications_come_and_go() -> None:
    new = changed(name="n")
    assert steps({"m": MODEL}, {"n": new}) == [Step("n", "start"), Step("m", "stop")]
    assert steps({}, {"m": MODEL}) == [Step("m", "start")]


def test_the_order_of_deployments_and_keys_says_nothing() -> None:
    entry = {"name": "Entry", "num_replicas": 1}
    one = changed(deployments=[*MODEL["deployments"], entry])
    other = dict(reversed(changed(deployments=[entry, *MODEL["deployments"]]).items()))
    assert [step.because for step in steps({"m": one}, {"m": other})] == [()]


def test_values_are_not_shown() -> None:
    secret = changed(args={"response_store": {"kind": "redis", "url": "redis://:secret@host"}})
    assert "secret" not in str(steps({"m": MODEL}, {"m": secret}))
