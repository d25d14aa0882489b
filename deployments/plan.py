"""What deploying a config will do to what runs, by Serve's own rules; worked out before it is done.

Serve restarts all of an application when its code version changes, which covers its import path, runtime environment,
args, and the classes its deployments name; it restarts one deployment when that is placed in another way. Everything
else it changes where it runs. What the new config does not name it stops.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import msgspec

from deployments.settings import HotSettings

Application = Mapping[str, Any]
"""An entry of a Serve config's `applications`, with what was set only."""

Action = Literal["start", "restart", "change", "keep", "stop"]

_RESTARTS_A_DEPLOYMENT = (
    "ray_actor_options",
    "placement_group_bundles",
    "placement_group_strategy",
    "placement_group_bundle_label_selector",
    "placement_group_fallback_strategy",
    "max_replicas_per_node",
    "gang_scheduling_config",
)


class Step(msgspec.Struct, frozen=True):
    """What happens to one application. `because` are the paths in its config that say so; never values, which may be
    secret.
    """

    application: str
    action: Action
    because: tuple[str, ...] = ()


def plan(
    running: Mapping[str, Application],
    wanted: Mapping[str, Application],
    code_version: Callable[[Application], str],
) -> list[Step]:
    """One step for each application of either, in the order of `wanted`. `code_version` is Serve's."""
    steps = []
    for name, application in wanted.items():
        before = running.get(name)
        if before is None:
            steps.append(Step(name, "start"))
            continue
        changed = tuple(dict.fromkeys(differences(before, application)))
        if code_version(before) != code_version(application) or any(map(_restarts, changed)):
            steps.append(Step(name, "restart", changed))
        else:
            steps.append(Step(name, "change" if changed else "keep", changed))
    return steps + [Step(name, "stop") for name in running if name not in wanted]


def _restarts(path: str) -> bool:
    part, _, option = path.partition(".")
    return part.startswith("deployments[") and option.split(".")[0].split("[")[0] in _RESTARTS_A_DEPLOYMENT


def avoidable(step: Step) -> bool:
    """Whether all that makes it a restart could be set in `user_config` in place of `args`, which restarts nothing."""
    return step.action == "restart" and bool(step.because) and all(map(_is_hot, step.because))


def _is_hot(path: str) -> bool:
    part, _, setting = path.partition(".")
    return part == "args" and re.split(r"[.\[]", setting)[0] in HotSettings.model_fields


def differences(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """Where two configs differ, as the deepest paths that do. Deployments are compared by their names."""
    match before, after:
        case Mapping(), Mapping():
            for key in [*before, *(key for key in after if key not in before)]:
                inner = f"{path}.{key}" if path else str(key)
                if path == "" and key == "deployments":
                    yield from _deployments(before.get(key) or [], after.get(key) or [])
                else:
                    yield from differences(before.get(key), after.get(key), inner)
        case list() | tuple(), list() | tuple() if len(before) == len(after):
            for index, (old, new) in enumerate(zip(before, after, strict=True)):
                yield from differences(old, new, f"{path}[{index}]")
        case _:
            if before != after:
                yield path


def _deployments(before: list[Any], after: list[Any]) -> Iterator[str]:
    old, new = ({item["name"]: item for item in items} for items in (before, after))
    for name in [*old, *(name for name in new if name not in old)]:
        yield from differences(old.get(name, {"name": name}), new.get(name, {"name": name}), f"deployments[{name}]")
