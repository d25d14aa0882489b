"""Who may talk to whom, by the network policies of a rendered overlay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.k8s.cluster import Bundle, Pod, selects


def network(bundle: Bundle) -> Iterator[str]:
    policies = bundle.of_kind("NetworkPolicy")
    if not any(
        p["spec"]["podSelector"] == {} and set(p["spec"]["policyTypes"]) == {"Ingress", "Egress"} and
        not p["spec"].get("ingress") and not p["spec"].get("egress")
        for p in policies
    ):  # fmt: skip
        yield "nothing is denied by default"
    pods = bundle.ray_pods
    for direction, peer in (("ingress", "from"), ("egress", "to")):
        for one in pods:
            for other in pods:
                if not _allowed(policies, one, direction, peer, other, None):
                    yield f"{one.name}, {other.name}: not every port is open between them ({direction})"
    operator = {"kubernetes.io/metadata.name": "kuberay-system"}
    if not _allowed_namespace(policies, pods[0], operator, 8265):
        yield "the operator does not reach the dashboard"
    for pod in pods:
        for port in (8265, 6379, 10001):
            if _allowed_namespace(policies, pod, {"tokenyard.io/clients": "true"}, port):
                yield f"{pod.name}: clients reach port {port}"
    for pod in pods[1:]:
        if not _allowed_namespace(policies, pod, {"tokenyard.io/clients": "true"}, 8000):
            yield f"{pod.name}: clients do not reach it"
    for monitor in bundle.of_kind("PodMonitor"):
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            owners = [
                (pod, port["containerPort"])
                for pod in pods
                for port in pod.containers[0].get("ports", [])
                if port["name"] == endpoint["port"]
            ]
            if not owners:
                yield f"PodMonitor: no pod has a port {endpoint['port']}"
            for pod, number in owners:
                if not _allowed_namespace(policies, pod, {"kubernetes.io/metadata.name": "monitoring"}, number):
                    yield f"{pod.name}: Prometheus does not reach port {number}"
    redis = [pod for pod in bundle.pods if pod.labels.get("app.kubernetes.io/name") == "tokenyard-redis"]
    for server in redis:
        for pod in pods:
            for one, direction, peer, other in ((pod, "egress", "to", server), (server, "ingress", "from", pod)):
                if not _allowed(policies, one, direction, peer, other, 6379):
                    yield f"{pod.name}: does not reach Redis ({direction})"


def _rules(policies: list[dict[str, Any]], pod: Pod, direction: str) -> Iterator[dict[str, Any]]:
    for policy in policies:
        if selects(pod.labels, policy["spec"]["podSelector"]) and direction.title() in policy["spec"]["policyTypes"]:
            yield from policy["spec"].get(direction, [])


def _opens(rule: dict[str, Any], port: int | None) -> bool:
    """`None` is every port."""
    ports = rule.get("ports")
    return not ports or port in [entry.get("port") for entry in ports if entry.get("protocol", "TCP") == "TCP"]


def _allowed(policies: list[dict[str, Any]], pod: Pod, direction: str, peer: str, other: Pod, port: int | None) -> bool:
    return any(
        _opens(rule, port) and any("podSelector" in p and selects(other.labels, p["podSelector"]) for p in rule[peer])
        for rule in _rules(policies, pod, direction)
        if peer in rule
    )


def _allowed_namespace(policies: list[dict[str, Any]], pod: Pod, namespace: dict[str, str], port: int) -> bool:
    return any(
        _opens(rule, port)
        and any("namespaceSelector" in p and selects(namespace, p["namespaceSelector"]) for p in rule.get("from", []))
        for rule in _rules(policies, pod, "ingress")
    )
