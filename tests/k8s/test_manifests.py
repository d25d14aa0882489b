"""Every overlay renders, is valid, and is what a cluster must be; and what is wrong on purpose is found.

make test-k8s
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.autoscaling import POLICY
from tests.k8s import invariants, render
from tests.k8s.cluster import Bundle, quantity
from tests.k8s.render import K8S, OVERLAYS, Document

EXTRA_COMPONENTS = ["gateway", "incremental-upgrade"]
"""In no overlay: they need a Gateway controller."""


@pytest.mark.parametrize("name", OVERLAYS)
def test_an_overlay_is_what_a_cluster_must_be(name: str) -> None:
    assert invariants.faults(render.overlay(name)) == []


@pytest.mark.parametrize("name", OVERLAYS)
def test_an_overlay_fits_the_schemas(name: str) -> None:
    assert render.schema_faults(render.overlay(name)) == []


@pytest.mark.parametrize("component", EXTRA_COMPONENTS)
@pytest.mark.parametrize("name", ["prod-cpu", "prod-mixed"])
def test_the_other_components_go_with_an_overlay(name: str, component: str, tmp_path: Path) -> None:
    documents = render.with_component(name, component, tmp_path)
    assert documents != render.overlay(name)
    assert invariants.faults(documents) == []
    assert render.schema_faults(documents) == []


def test_every_component_is_in_some_overlay_or_tried_above() -> None:
    used = {
        Path(path).name
        for name in OVERLAYS
        for path in yaml.safe_load((K8S / "overlays" / name / "kustomization.yaml").read_text()).get("components", [])
    }
    assert {path.name for path in (K8S / "components").iterdir()} == used | set(EXTRA_COMPONENTS)


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_serve_config_is_the_file_as_it_stands(name: str) -> None:
    bundle = Bundle(render.overlay(name))
    assert bundle.spec["serveConfigV2"] == (K8S / "overlays" / name / "serve.yaml").read_text()
    assert "serve-config" not in [config["metadata"]["name"] for config in bundle.of_kind("ConfigMap")]


SAME_MODELS = {"kind-cpu": "quickstart", "prod-gpu": "vllm-1gpu", "prod-mixed": "mixed-cpu-gpu"}
"""Overlays, and the files of configs/ that some of their models are in."""

OF_THE_POD = {"model", "threads"}
"""What of a backend depends on where it runs: where its files are, and how many cores it has."""


@pytest.mark.parametrize(("name", "original"), SAME_MODELS.items())
def test_a_model_is_set_up_as_in_configs(name: str, original: str) -> None:
    def backends(path: Path) -> dict[str, dict[str, Any]]:
        apps = [app for app in yaml.safe_load(path.read_text())["applications"] if "backend" in app["args"]]
        return {app["name"]: {k: v for k, v in app["args"]["backend"].items() if k not in OF_THE_POD} for app in apps}

    ours, theirs = backends(K8S / "overlays" / name / "serve.yaml"), backends(render.ROOT / f"configs/{original}.yaml")
    both = ours.keys() & theirs.keys()
    assert both and {model: ours[model] for model in both} == {model: theirs[model] for model in both}


def test_a_changed_environment_is_a_new_name_in_every_pod() -> None:
    bundle = Bundle(render.overlay("prod-mixed"))
    names = {
        pod.containers[0]["envFrom"][0]["configMapRef"]["name"]
        for pod in bundle.ray_pods
    }  # fmt: skip
    assert len(names) == 1 and names.pop().startswith("ray-environment-")


def test_the_models_of_a_config_are_in_its_list() -> None:
    for name in OVERLAYS:
        folder = K8S / "overlays" / name
        lines = [line.split() for line in (folder / "models.txt").read_text().splitlines() if line[0] != "#"] if (
            folder / "models.txt"
        ).exists() else []  # fmt: skip
        fetched = {f"/models/{folder}/{file}" for _, _, folder, *files in lines for file in files}
        fetched |= {f"/models/{folder}" for _, _, folder, *files in lines if not files}
        serve = yaml.safe_load((folder / "serve.yaml").read_text())
        models = {app["args"]["backend"]["model"] for app in serve["applications"] if "backend" in app["args"]}
        assert {model for model in models if model.startswith("/")} == fetched, name


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_capacity_table_is_what_the_pods_request(name: str) -> None:
    bundle = Bundle(render.overlay(name))
    running = [(pod.containers[0], 1) for pod in bundle.pods if not pod.name.startswith(("group", "Job"))]
    running += [(bundle.ray_pods[0].containers[0], 1), (bundle.cluster["autoscalerOptions"], 1)]
    running += [
        (pod.containers[0], group["minReplicas"]) for pod, group in zip(bundle.ray_pods[1:], bundle.groups, strict=True)
    ]
    total: dict[str, float] = {"cpu": 0, "memory": 0, "nvidia.com/gpu": 0}
    for container, times in running:
        for key, amount in container["resources"]["requests"].items():
            total[key] = total.get(key, 0) + quantity(amount) * times
    row = next(line for line in (K8S / "README.md").read_text().splitlines() if line.startswith(f"| {name} |"))
    gpus = f", {total['nvidia.com/gpu']:g} GPUs" if total["nvidia.com/gpu"] else ""
    assert row.endswith(f"| {total['cpu']:g} cores, {total['memory'] / 2**30:g} GiB{gpus} |")


# --- mistakes, each of which some rule finds --------------------------------------------------------------------------


def _ray(documents: list[Document]) -> Any:
    return render.only(documents, "RayService")["spec"]["rayClusterConfig"]


def _group(documents: list[Document], name: str) -> Any:
    return next(group for group in _ray(documents)["workerGroupSpecs"] if group["groupName"] == name)


def _pod(documents: list[Document], name: str) -> Any:
    return _group(documents, name)["template"]["spec"]


def _worker(documents: list[Document], name: str = "cpu") -> Any:
    return _pod(documents, name)["containers"][0]


def _head(documents: list[Document]) -> Any:
    return _ray(documents)["headGroupSpec"]


def _serve(documents: list[Document], old: str, new: str) -> None:
    spec = render.only(documents, "RayService")["spec"]
    assert old in spec["serveConfigV2"]
    spec["serveConfigV2"] = spec["serveConfigV2"].replace(old, new, 1)


def _policy(documents: list[Document], name: str) -> Any:
    return render.only(documents, "NetworkPolicy", name)["spec"]


def _set(owner: Any, key: Any, value: Any) -> None:
    owner[key] = value


def _budget(documents: list[Document], **spec: Any) -> None:
    budget = render.only(documents, "PodDisruptionBudget")["spec"]
    budget.pop("minAvailable")
    budget.update(spec)


def _environment(documents: list[Document]) -> Any:
    return next(d for d in documents if d["metadata"]["name"].startswith("ray-environment"))["data"]


def _mount(documents: list[Document], name: str) -> Any:
    return next(mount for mount in _worker(documents)["volumeMounts"] if mount["name"] == name)


POLICY_LINES = f"          policy:\n            policy_function: {POLICY}\n"
KEYS = "/etc/tokenyard/api-keys/keys.yaml"
RAY_SELECTOR = {"app.kubernetes.io/instance": "tokenyard"}

MISTAKES: dict[str, tuple[str, Callable[[list[Document]], Any]]] = {
    "another Ray": ("images", lambda d: _set(_ray(d), "rayVersion", "2.59.0")),
    "an image of another Ray": ("images", lambda d: _set(_worker(d), "image", "r/tokenyard-cpu:1-ray2.59.0")),
    "an image without a tag": ("images", lambda d: _set(_worker(d), "image", "r/tokenyard-cpu")),
    "replicas in the file": ("scaling", lambda d: _set(_group(d, "cpu"), "replicas", 3)),
    "no autoscaler version": ("scaling", lambda d: _ray(d)["autoscalerOptions"].pop("version")),
    "an empty GPU group without its type": (
        "scaling",
        lambda d: _group(d, "gpu")["resources"].pop("accelerator_type:L40S"),
    ),
    "a model scaled by its requests only": (
        "scaling",
        lambda d: _serve(d, POLICY_LINES, ""),
    ),
    "replicas on the head": ("head", lambda d: _head(d)["rayStartParams"].pop("num-cpus")),
    "no port for clients": (
        "head",
        lambda d: _set(_head(d)["template"]["spec"]["containers"][0], "ports", [{"name": "x", "containerPort": 8265}]),
    ),
    "an open dashboard": ("head", lambda d: _ray(d).pop("authOptions")),
    "a head like any pod": ("head", lambda d: _head(d)["template"]["spec"].pop("priorityClassName")),
    "a priority that nobody defines": ("head", lambda d: d.remove(render.only(d, "PriorityClass"))),
    "killed in mid-drain": ("stopping", lambda d: _pod(d, "cpu").pop("terminationGracePeriodSeconds")),
    "a drain shorter than the handover": ("stopping", lambda d: _set(_worker(d)["env"][0], "value", "30")),
    "a preStop hook": (
        "stopping",
        lambda d: _set(_worker(d), "lifecycle", {"preStop": {"exec": {"command": ["ray", "stop"]}}}),
    ),
    "an old cluster that goes at once": (
        "stopping",
        lambda d: _set(render.only(d, "RayService")["spec"], "rayClusterDeletionDelaySeconds", 60),
    ),
    "a budget in percent": ("disruption", lambda d: _budget(d, minAvailable="50%")),
    "a budget by maxUnavailable": ("disruption", lambda d: _budget(d, maxUnavailable=1)),
    "a budget that blocks every drain": ("disruption", lambda d: _budget(d, minAvailable=2)),
    "no budget": ("disruption", lambda d: d.remove(render.only(d, "PodDisruptionBudget"))),
    "a budget for the head": (
        "disruption",
        lambda d: _set(
            render.only(d, "PodDisruptionBudget")["spec"]["selector"], "matchLabels", {"ray.io/node-type": "head"}
        ),
    ),
    "a group on one node": ("disruption", lambda d: _pod(d, "gpu").pop("topologySpreadConstraints")),
    "a group without the label": ("labels", lambda d: _group(d, "gpu")["template"].pop("metadata")),
    "a pod without Ray's variables": ("data_plane", lambda d: _worker(d, "gpu").pop("envFrom")),
    "another value than settings.py": (
        "data_plane",
        lambda d: _set(_environment(d), "RAY_SERVE_LOG_TO_STDERR", "1"),
    ),
    "a vLLM that reports to its makers": ("data_plane", lambda d: _environment(d).pop("DO_NOT_TRACK")),
    "a variable that settings.py does not know": (
        "data_plane",
        lambda d: _set(_environment(d), "RAY_SERVE_THROUGHPUT_OPTIMIZED", "1"),
    ),
    "a gateway that lost its variables": (
        "data_plane",
        lambda d: _serve(d, 'RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP: "0"', ""),
    ),
    "the operator's wget probe": ("probes", lambda d: _worker(d).pop("readinessProbe")),
    "a proxy on the head only": (
        "probes",
        lambda d: _serve(d, "proxy_location: EveryNode", "proxy_location: HeadOnly"),
    ),
    "a pod as root": ("security", lambda d: _pod(d, "gpu").pop("securityContext")),
    "a container that may gain privileges": ("security", lambda d: _worker(d).pop("securityContext")),
    "an unguarded autoscaler": ("security", lambda d: _ray(d)["autoscalerOptions"].pop("securityContext")),
    "no place to write": ("security", lambda d: _worker(d)["volumeMounts"].pop(0)),
    "workers that can ask the API server": ("security", lambda d: _pod(d, "cpu").pop("automountServiceAccountToken")),
    "a password in a variable": (
        "secrets",
        lambda d: _worker(d)["env"].append({"name": "HF_TOKEN", "value": "hf_x"}),
    ),
    "a password in the Serve config": ("secrets", lambda d: _serve(d, "redis://", "redis://:password@")),
    "a password in the cluster": (
        "secrets",
        lambda d: _set(_ray(d)["gcsFaultToleranceOptions"], "redisPassword", {"value": "x"}),
    ),
    "a token in a list": ("secrets", lambda d: _environment(d).update(NOTE="hf_" + 30 * "a")),
    "gateways without keys": ("secrets", lambda d: _serve(d, f"keys: {KEYS}", "")),
    "a file of keys that nobody is told to make": ("secrets", lambda d: _serve(d, KEYS, KEYS.replace("keys.y", "x.y"))),
    "keys that stay as they were": (
        "secrets",
        lambda d: _mount(d, "api-keys").update(mountPath=KEYS, subPath="keys.yaml"),
    ),
    "keys in a ConfigMap": (
        "secrets",
        lambda d: _set(
            _pod(d, "cpu"),
            "volumes",
            [
                {"name": "api-keys", "configMap": {"name": "models"}} if volume["name"] == "api-keys" else volume
                for volume in _pod(d, "cpu")["volumes"]
            ],
        ),
    ),
    "keys on no volume": ("placement", lambda d: _worker(d)["volumeMounts"].remove(_mount(d, "api-keys"))),
    "GPU requested, not limited": (
        "sizes",
        lambda d: _worker(d, "gpu")["resources"]["limits"].pop("nvidia.com/gpu"),
    ),
    "no toleration of GPU nodes": ("sizes", lambda d: _pod(d, "gpu").pop("tolerations")),
    "memory over-committed": (
        "sizes",
        lambda d: _set(_worker(d)["resources"]["requests"], "memory", "1Gi"),
    ),
    "more cores offered than requested": ("sizes", lambda d: _set(_group(d, "cpu")["resources"], "CPU", "16")),
    "more threads than cores": ("placement", lambda d: _serve(d, "threads: 6", "threads: 16")),
    "a model larger than a node": ("placement", lambda d: _serve(d, "memory: 1", "memory: 9")),
    "a model of unknown size": ("placement", lambda d: _serve(d, "memory: 11811160064", "")),
    "a model for no group": ("placement", lambda d: _serve(d, "num_gpus: 1", "num_gpus: 8")),
    "a model on any node": ("placement", lambda d: _serve(d, "label_selector: {tokenyard.io/pool: gpu}", "")),
    "a model on no volume": ("placement", lambda d: _serve(d, "model: /models/", "model: /weights/")),
    "responses of each gateway for itself": (
        "placement",
        lambda d: _serve(
            d,
            "kind: redis\n        url: redis://tokenyard-redis:6379/1\n"
            "        password_file: /etc/tokenyard/redis/password",
            "kind: sqlite",
        ),
    ),
    "models on one node only": (
        "storage",
        lambda d: _set(
            render.only(d, "PersistentVolumeClaim", "model-cache")["spec"], "accessModes", ["ReadWriteOnce"]
        ),
    ),
    "workers that write models": ("storage", lambda d: _worker(d)["volumeMounts"][2].pop("readOnly")),
    "nothing denied": ("network", lambda d: d.remove(render.only(d, "NetworkPolicy", "default-deny"))),
    "only known ports between pods": (
        "network",
        lambda d: _set(_policy(d, "ray-cluster")["ingress"][0], "ports", [{"protocol": "TCP", "port": 6379}]),
    ),
    "an operator that is shut out": ("network", lambda d: d.remove(render.only(d, "NetworkPolicy", "operator"))),
    "a dashboard for clients": (
        "network",
        lambda d: _policy(d, "clients").update(
            podSelector={"matchLabels": RAY_SELECTOR}, ingress=[{"from": _policy(d, "clients")["ingress"][0]["from"]}]
        ),
    ),
    "Prometheus shut out": ("network", lambda d: _policy(d, "prometheus")["ingress"][0]["ports"].pop()),
    "Redis shut off": ("network", lambda d: d.remove(render.only(d, "NetworkPolicy", "ray-to-redis"))),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake: str) -> None:
    rule, make = MISTAKES[mistake]
    documents = render.overlay("prod-mixed")
    make(documents)
    found = invariants.faults(documents)
    assert any(fault.startswith(f"{rule}: ") for fault in found), found


def test_every_rule_has_its_mistake() -> None:
    assert {rule for rule, _ in MISTAKES.values()} == {rule.__name__ for rule in invariants.RULES}


TYPOS: dict[str, Callable[[list[Document]], Any]] = {
    "in the cluster": lambda d: _set(_ray(d), "enableInTreeAutoscalling", True),
    "in a group": lambda d: _set(_group(d, "cpu"), "minReplica", 1),
    "in a container": lambda d: _set(_worker(d), "readinesProbe", {}),
    "in a policy": lambda d: _set(_policy(d, "clients"), "ingres", []),
    "in a budget": lambda d: _set(render.only(d, "PodDisruptionBudget")["spec"], "minAvailble", 1),
    "in the Serve config": lambda d: _serve(d, "route_prefix: /", "rout_prefix: /"),
    "a number for a text": lambda d: _set(_head(d)["rayStartParams"], "num-cpus", 0),
    "a claim that nobody makes": lambda d: d.remove(render.only(d, "PersistentVolumeClaim", "model-cache")),
    "a port that no pod names": lambda d: _set(
        render.only(d, "PodMonitor")["spec"]["podMetricsEndpoints"][0], "portt", "x"
    ),
}


@pytest.mark.parametrize("typo", TYPOS)
def test_a_typing_error_is_found(typo: str) -> None:
    documents = render.overlay("prod-mixed")
    TYPOS[typo](documents)
    assert render.schema_faults(documents) != []
