"""A rendered overlay, read: its node groups, their pods, and the Serve config inside it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

import yaml

from tests.k8s.render import Document, only

INSTANCE = {"app.kubernetes.io/instance": "tokenyard"}


class Pod(NamedTuple):
    """A pod template and the labels its pods will have; `name` says where it is."""

    name: str
    labels: dict[str, str]
    spec: dict[str, Any]

    @property
    def containers(self) -> list[dict[str, Any]]:
        containers: list[dict[str, Any]] = self.spec["containers"]
        return containers


def environment(container: dict[str, Any]) -> dict[str, str]:
    return {variable["name"]: variable.get("value", "") for variable in container.get("env", [])}


def quantity(text: str) -> float:
    """A Kubernetes quantity, in cores or bytes."""
    units = {"m": 1e-3, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
    for unit, factor in units.items():
        if text.endswith(unit):
            return float(text.removesuffix(unit)) * factor
    return float(text)


def selects(labels: dict[str, str], selector: dict[str, Any]) -> bool:
    """A label selector, of equalities and `In`; the empty one selects everything."""
    wanted = selector.get("matchLabels", {}).items()
    expressions = selector.get("matchExpressions", [])
    return all(labels.get(key) == value for key, value in wanted) and all(
        labels.get(e["key"]) in e["values"] for e in expressions if e["operator"] == "In"
    )


def memory(group: dict[str, Any]) -> float:
    """Bytes that Ray takes a node of the group to have."""
    return quantity(group["template"]["spec"]["containers"][0]["resources"]["limits"]["memory"])


def most_replicas(deployment: dict[str, Any]) -> int:
    """That a deployment of a Serve config may come to have."""
    most: int = deployment.get("autoscaling_config", {}).get("max_replicas", deployment.get("num_replicas", 1))
    return most


class Bundle:
    def __init__(self, documents: list[Document]) -> None:
        self.documents = documents
        self.service = only(documents, "RayService")
        self.spec: dict[str, Any] = self.service["spec"]
        self.cluster: dict[str, Any] = self.spec["rayClusterConfig"]
        self.head: dict[str, Any] = self.cluster["headGroupSpec"]
        self.groups: list[dict[str, Any]] = self.cluster["workerGroupSpecs"]

    @cached_property
    def serve(self) -> dict[str, Any]:
        config = yaml.safe_load(self.spec["serveConfigV2"])
        assert isinstance(config, dict)
        return config

    def of_kind(self, kind: str) -> list[Document]:
        return [document for document in self.documents if document["kind"] == kind]

    @property
    def ray_pods(self) -> list[Pod]:
        """The head first, then one for each group."""
        named = [("head", "headgroup", self.head)] + [("worker", g["groupName"], g) for g in self.groups]
        return [
            Pod(
                f"group {name}",
                {
                    **group["template"].get("metadata", {}).get("labels", {}),
                    **group.get("labels", {}),
                    "ray.io/node-type": node,
                    "ray.io/group": name,
                },
                group["template"]["spec"],
            )
            for node, name, group in named
        ]

    @property
    def pods(self) -> list[Pod]:
        """All pods that this bundle makes."""
        others = [
            Pod(
                f"{document['kind']} {document['metadata']['name']}",
                document["spec"]["template"]["metadata"]["labels"],
                document["spec"]["template"]["spec"],
            )
            for kind in ("Job", "StatefulSet", "Deployment")
            for document in self.of_kind(kind)
        ]
        return [*self.ray_pods, *others]

    def deployments(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Each Serve application, with each of its deployments that the config has options for."""
        for app in self.serve["applications"]:
            for deployment in app.get("deployments", []):
                yield app, deployment

    def hosts(self, deployment: dict[str, Any]) -> list[dict[str, Any]]:
        """The groups whose nodes can take a replica: labels, cores, GPUs, memory."""
        options = deployment.get("ray_actor_options", {})
        return [
            group
            for group in self.groups
            if options.get("label_selector", {}).items() <= group.get("labels", {}).items()
            and options.get("num_cpus", 1) <= float(group["resources"].get("CPU", 0))
            and options.get("num_gpus", 0) <= float(group["resources"].get("GPU", 0))
            and options.get("memory", 0) <= memory(group)
        ]
