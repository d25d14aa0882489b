"""What of the cluster a model's replicas take, as Serve's options: it follows from the model's `args`.

A config may repeat it in its `deployments:` section, and may not say otherwise: Serve would place the replica where its
engine cannot start.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from backends import BackendSettings
from backends.vllm import fit
from backends.vllm.settings import VllmSettings
from deployments.settings import VLLM_ENV


def replica_options(backend: BackendSettings) -> dict[str, Any]:
    """Options of `serve.deployment`; none for engines that need nothing special."""
    if not isinstance(backend, VllmSettings):
        return {}
    needed = backend.resources()
    actor: dict[str, Any] = {"runtime_env": {"env_vars": VLLM_ENV}, "num_cpus": needed.cpus}
    if needed.bundles:
        return {
            "ray_actor_options": actor,
            "placement_group_bundles": [dict(bundle) for bundle in needed.bundles],
            "placement_group_strategy": needed.strategy,
        }
    if needed.gpus:
        actor["num_gpus"] = needed.gpus
    if needed.accelerator_type is not None:
        actor["accelerator_type"] = needed.accelerator_type
    return {"ray_actor_options": actor}


def unfit(backend: BackendSettings, where: str) -> Iterator[str]:
    """A line for each setting that the model's own files forbid, where they are at hand."""
    if isinstance(backend, VllmSettings):
        yield from (f"{where}.{setting}: {fault}" for setting, fault in fit.faults(backend))


def contradictions(backend: BackendSettings, deployment: Mapping[str, Any], where: str) -> Iterator[str]:
    """A line for each option of a config's `Model` deployment that the backend's settings forbid."""
    if not isinstance(backend, VllmSettings):
        return
    needed = backend.resources()
    actor = deployment.get("ray_actor_options")
    actor = actor if isinstance(actor, Mapping) else {}
    given = actor.get("num_gpus")
    if given is not None and given != needed.gpus:
        yield f"{where}.ray_actor_options.num_gpus: {given}, but {_reason(backend)} needs {needed.gpus:g}"
    elif given is None and actor and needed.gpus:
        yield (
            f"{where}.ray_actor_options: it replaces what follows from the args, and has no num_gpus: "
            f"{_reason(backend)} needs {needed.gpus:g}"
        )
    bundles = deployment.get("placement_group_bundles")
    if bundles is None:
        return
    if not needed.bundles:
        yield f"{where}.placement_group_bundles: only a model with across_nodes has a placement group"
        return
    gpus = [bundle.get("GPU", 0) for bundle in bundles if isinstance(bundle, Mapping)]
    if len(gpus) != len(needed.bundles) or any(count != 1 for count in gpus):
        yield (
            f"{where}.placement_group_bundles: {_reason(backend)} needs {len(needed.bundles)} bundles, "
            f"each with 1 GPU, and these have {', '.join(f'{count:g}' for count in gpus) or 'none'}"
        )


def _reason(backend: VllmSettings) -> str:
    if backend.device == "cpu":
        return "device cpu"
    return f"tensor_parallel {backend.tensor_parallel} by pipeline_parallel {backend.pipeline_parallel}" + (
        " across nodes" if backend.across_nodes else ""
    )
