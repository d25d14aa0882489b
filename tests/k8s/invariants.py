"""What a cluster must be, beyond what a schema can say. A rule yields a line for each fault of a rendered overlay."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from deployments import config, ray_compat
from deployments.app import DRAIN_S
from deployments.settings import _FRONT, _RAY_DEFAULTS, GATEWAY_ENV, VLLM_ENV, GatewaySettings
from tests.k8s import render
from tests.k8s.cluster import INSTANCE, Bundle, Pod, environment, most_replicas, quantity, selects
from tests.k8s.network import network

Rule = Callable[[Bundle], Iterator[str]]
DRAIN = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
_LOOKS_SECRET = re.compile(
    r"\b(hf_[A-Za-z0-9]{20,}|(ty|sk)-[A-Za-z0-9_-]{20,}|gh[pousr]_\w{20,}|AKIA[0-9A-Z]{16})|PRIVATE KEY-----"
)


def images(bundle: Bundle) -> Iterator[str]:
    ray = ray_compat.PINNED_RAY_VERSION
    if bundle.cluster.get("rayVersion") != ray:
        yield f"rayVersion is {bundle.cluster.get('rayVersion')}, the product's Ray is {ray}"
    for pod in bundle.pods:
        for container in pod.containers:
            name, _, tag = container["image"].rpartition("/")[2].partition(":")
            if tag in ("", "latest"):
                yield f"{pod.name}: image {container['image']} is not pinned"
            if name.startswith("tokenyard-") and not tag.endswith(f"-ray{ray}"):
                yield f"{pod.name}: the tag {tag} does not say Ray {ray}"


def scaling(bundle: Bundle) -> Iterator[str]:
    if bundle.cluster.get("enableInTreeAutoscaling") is not True:
        yield "the autoscaler is off"
    if bundle.cluster.get("autoscalerOptions", {}).get("version") != "v2":
        yield "the autoscaler's version has to be written, as v2: the operator does not know Ray's default"
    for group in bundle.groups:
        name = group["groupName"]
        if "replicas" in group:
            yield f"group {name}: `replicas` in a file fights with the autoscaler"
        if not 0 <= group["minReplicas"] <= group["maxReplicas"]:
            yield f"group {name}: minReplicas and maxReplicas are out of order"
        types = [key for key in group.get("resources", {}) if key.startswith("accelerator_type:")]
        if "GPU" in group.get("resources", {}) and group["minReplicas"] == 0 and not types:
            yield f"group {name}: it can be empty, and does not say its GPU's type: it would never be scaled up for one"
    yield from config.notes(bundle.serve)


def head(bundle: Bundle) -> Iterator[str]:
    if bundle.head["rayStartParams"].get("num-cpus") != "0":
        yield "the head takes replicas: num-cpus has to be the text 0"
    if bundle.spec.get("excludeHeadPodFromServeSvc") is not True:
        yield "the head is in the service of the workers"
    ports = [port["name"] for port in bundle.ray_pods[0].containers[0].get("ports", [])]
    if ports and "serve" not in ports:
        yield "the head lists ports and none is named serve: no service for clients is made"
    if bundle.cluster.get("authOptions", {}).get("mode") != "token":
        yield "dashboard, jobs and GCS ask for no token"
    classes = {document["metadata"]["name"] for document in bundle.of_kind("PriorityClass")}
    for pod in (pod for pod in bundle.pods if pod.name == "group headgroup" or "tokenyard-redis" in pod.name):
        if pod.spec.get("priorityClassName") not in classes:
            yield f"{pod.name}: all wait for it, and it has no priority over them"


def stopping(bundle: Bundle) -> Iterator[str]:
    handover = max((app.get("args", {}).get("handover_after_s", 0) for app in bundle.serve["applications"]), default=0)
    handover = handover or GatewaySettings().handover_after_s
    for pod in bundle.ray_pods:
        drain = float(environment(pod.containers[0]).get(DRAIN, 30))
        if drain < handover + 30:
            yield f"{pod.name}: drains for {drain:.0f} s, and streams are handed over after {handover:.0f} s"
        if pod.spec.get("terminationGracePeriodSeconds", 30) < drain + 30:
            yield f"{pod.name}: killed before it has drained for {drain:.0f} s"
        for container in pod.containers:
            if "preStop" in container.get("lifecycle", {}):
                yield f"{pod.name}: a preStop hook ends replicas before they are drained"
    if bundle.spec.get("rayClusterDeletionDelaySeconds", 60) < DRAIN_S:
        yield f"an upgrade ends the old cluster's streams before the {DRAIN_S:.0f} s a replica has for them"


def disruption(bundle: Bundle) -> Iterator[str]:
    for budget in bundle.of_kind("PodDisruptionBudget"):
        name, spec = budget["metadata"]["name"], budget["spec"]
        least = spec.get("minAvailable")
        if not isinstance(least, int):
            yield f"PodDisruptionBudget {name}: only a number as minAvailable works for Ray's pods"
            continue
        chosen = [pod for pod in bundle.ray_pods if selects(pod.labels, spec["selector"])]
        if not chosen:
            yield f"PodDisruptionBudget {name}: selects no pod"
        if bundle.ray_pods[0] in chosen:
            yield f"PodDisruptionBudget {name}: selects the head, whose node could never be drained"
        steady = sum(g["minReplicas"] for g in bundle.groups if f"group {g['groupName']}" in {p.name for p in chosen})
        if least >= steady:
            yield f"PodDisruptionBudget {name}: needs {least} of {steady} pods: no node could be drained"
    budgets = [budget["spec"]["selector"] for budget in bundle.of_kind("PodDisruptionBudget")]
    for pod, group in zip(bundle.ray_pods[1:], bundle.groups, strict=True):
        if group["minReplicas"] > 1 and not any(selects(pod.labels, selector) for selector in budgets):
            yield f"{pod.name}: a drain may take all its pods at once"
        keys = [constraint["topologyKey"] for constraint in pod.spec.get("topologySpreadConstraints", [])]
        if group["maxReplicas"] > 1 and "kubernetes.io/hostname" not in keys:
            yield f"{pod.name}: one lost node may take all its pods"


def labels(bundle: Bundle) -> Iterator[str]:
    for pod in bundle.ray_pods:
        if not INSTANCE.items() <= pod.labels.items():
            yield f"{pod.name}: without the label that policies and budgets select by"


def data_plane(bundle: Bundle) -> Iterator[str]:
    """Ray reads it at import, so a pod without it is a node that behaves otherwise.

    A deployment's options in a config replace those of the code, so a gateway's own part has to be in both.
    """
    for app, deployment in bundle.deployments():
        set_here = deployment.get("ray_actor_options", {}).get("runtime_env", {}).get("env_vars", {})
        if deployment["name"] == "Gateway" and set_here != GATEWAY_ENV:
            yield f"{app['name']}/Gateway: its variables are {set_here}, not {GATEWAY_ENV}"
    expected = _RAY_DEFAULTS | VLLM_ENV | _FRONT["haproxy"]
    maps = {config["metadata"]["name"]: config["data"] for config in bundle.of_kind("ConfigMap")}
    for pod in bundle.ray_pods:
        container = pod.containers[0]
        found: dict[str, str] = {}
        for source in container.get("envFrom", []):
            found |= maps.get(source["configMapRef"]["name"], {})
        found |= environment(container)
        for name, value in expected.items():
            if found.get(name) != value:
                yield f"{pod.name}: {name} is {found.get(name)}, not {value}"
        for name in sorted(found.keys() - expected.keys()):
            if name.startswith("RAY_SERVE_"):
                yield f"{pod.name}: {name} is not set by deployments/settings.py"


def probes(bundle: Bundle) -> Iterator[str]:
    for pod in bundle.ray_pods[1:]:
        get = pod.containers[0].get("readinessProbe", {}).get("httpGet", {})
        if (get.get("path"), get.get("port")) != ("/-/healthz", 8000):
            yield f"{pod.name}: without a readiness probe by HTTP the operator puts one that needs wget"
        if "livenessProbe" in pod.containers[0]:
            yield f"{pod.name}: the operator's liveness probe is the right one"
    if bundle.serve.get("proxy_location") != "EveryNode":
        yield "without a proxy on every node no worker becomes ready"
    if bundle.serve.get("http_options", {}).get("host") != "0.0.0.0":
        yield "the proxy listens where neither probe nor service reaches it"


def security(bundle: Bundle) -> Iterator[str]:
    options = bundle.cluster.get("autoscalerOptions", {})
    for pod in bundle.pods:
        context = pod.spec.get("securityContext", {})
        if context.get("runAsNonRoot") is not True or not context.get("runAsUser"):
            yield f"{pod.name}: may run as root"
        if context.get("seccompProfile", {}).get("type") != "RuntimeDefault":
            yield f"{pod.name}: without a seccomp profile"
        for container in pod.containers:
            yield from _container_security(f"{pod.name}, container {container['name']}", container)
    yield from _container_security("the autoscaler", options)
    for pod in [*bundle.ray_pods, Pod("the autoscaler", {}, {"containers": [options]})]:
        mounted = {mount["mountPath"] for mount in pod.containers[0].get("volumeMounts", [])}
        if "/tmp" not in mounted:
            yield f"{pod.name}: Ray writes to /tmp, and the root is read-only"
    for pod in bundle.pods[1:]:  # the head's autoscaler asks the API server
        if pod.spec.get("automountServiceAccountToken") is not False:
            yield f"{pod.name}: has a token of the API server"


def _container_security(name: str, container: dict[str, Any]) -> Iterator[str]:
    context = container.get("securityContext", {})
    if context.get("allowPrivilegeEscalation") is not False:
        yield f"{name}: may gain privileges"
    if context.get("readOnlyRootFilesystem") is not True:
        yield f"{name}: can write to its image"
    if context.get("capabilities", {}).get("drop") != ["ALL"]:
        yield f"{name}: has capabilities"


def secrets(bundle: Bundle) -> Iterator[str]:
    if bundle.of_kind("Secret"):
        yield "a Secret is in the overlay"
    for pod in bundle.pods:
        for container in pod.containers:
            for variable in container.get("env", []):
                if re.search(r"TOKEN|PASSWORD|KEY|SECRET", variable["name"]) and variable.get("value"):
                    yield f"{pod.name}: {variable['name']} is written out"
    if re.search(r"://[^/\s]*:[^/\s]*@", bundle.spec["serveConfigV2"]):
        yield "the Serve config has a password in a url"
    password = bundle.cluster.get("gcsFaultToleranceOptions", {}).get("redisPassword", {})
    if "value" in password:
        yield "the Redis password is written out"
    for document in bundle.documents:
        if _LOOKS_SECRET.search(str(document)):
            yield f"{document['kind']} {document['metadata']['name']}: something in it looks like a secret"
    for app, deployment in bundle.deployments():
        if deployment["name"] == "Gateway":
            yield from _gateway_secrets(bundle, app, deployment)


def _gateway_secrets(bundle: Bundle, app: dict[str, Any], deployment: dict[str, Any]) -> Iterator[str]:
    """Files that a gateway reads secrets from: of a Secret that is documented, and that a change of it reaches."""
    args, name = app.get("args", {}), app["name"]
    if most_replicas(deployment) > 1 and not args.get("keys"):
        yield f"{name}: serves whoever a network policy lets through"
    known = render.example_secrets()
    for path in filter(None, (args.get("keys"), args.get("response_store", {}).get("password_file"))):
        folder, _, file = path.rpartition("/")
        for group in bundle.hosts(deployment):
            pod = group["template"]["spec"]
            volumes = {volume["name"]: volume for volume in pod["volumes"]}
            for mount in (m for m in pod["containers"][0]["volumeMounts"] if m["mountPath"] in (folder, path)):
                secret = volumes[mount["name"]].get("secret", {}).get("secretName")
                if file not in known.get(secret, ()):
                    yield f"{name}: {path} is not in a Secret that secret.example.yaml shows"
                if "subPath" in mount:
                    yield f"{name}: {path} stays as it was when the Secret changes"
                if mount.get("readOnly") is not True:
                    yield f"{name}: {path} could be written to"


def sizes(bundle: Bundle) -> Iterator[str]:
    for pod in bundle.pods:
        for container in pod.containers:
            resources = container.get("resources", {})
            requests, limits = resources.get("requests", {}), resources.get("limits", {})
            if "memory" not in limits or requests.get("memory") != limits["memory"]:
                yield f"{pod.name}: memory that is not requested may be taken back"
            for key in {*requests, *limits}:
                if key.endswith("/gpu") and requests.get(key) != limits.get(key):
                    yield f"{pod.name}: {key} has to be requested and limited alike"
    for pod, group in zip(bundle.ray_pods[1:], bundle.groups, strict=True):
        requests = pod.containers[0].get("resources", {}).get("requests", {})
        offered = group.get("resources", {})
        if float(offered.get("CPU", 0)) > quantity(requests.get("cpu", "0")):
            yield f"{pod.name}: offers Ray more cores than the pod requests"
        gpus = [key for key in requests if key.endswith("/gpu")]
        if float(offered.get("GPU", 0)) != sum(float(requests[key]) for key in gpus):
            yield f"{pod.name}: offers Ray other GPUs than the pod has"
        for key in gpus:
            if not any(toleration.get("key") == key for toleration in pod.spec.get("tolerations", [])):
                yield f"{pod.name}: is kept off nodes with GPUs, which are usually tainted with {key}"


def placement(bundle: Bundle) -> Iterator[str]:
    """Each replica has a node that can take it, the cores of its threads, and what it reads there."""
    for app, deployment in bundle.deployments():
        name, options = f"{app['name']}/{deployment['name']}", deployment.get("ray_actor_options", {})
        backend = app.get("args", {}).get("backend", {})
        if not options.get("label_selector"):
            yield f"{name}: may land on any node"
        hosts = bundle.hosts(deployment)
        if not hosts:
            yield f"{name}: no group can take it"
        if backend.get("kind") == "llamacpp" and backend.get("threads") != options.get("num_cpus"):
            yield f"{name}: computes with {backend.get('threads')} threads on {options.get('num_cpus')} cores"
        path = backend.get("model", "")
        if backend.get("kind") == "llamacpp" and path.startswith("/models/") and not options.get("memory"):
            yield f"{name}: takes memory that Ray knows nothing of"
        if backend.get("kind") == "vllm" and not options.get("num_gpus"):
            yield f"{name}: has no GPU"
        if deployment["name"] == "Gateway" and not options.get("num_cpus"):
            yield f"{name}: without a core of its own it may land on the head"
        for group in hosts:
            mounts = group["template"]["spec"]["containers"][0]["volumeMounts"]
            for path in _absolute_paths(app.get("args", {})):
                if not any(path.startswith(mount["mountPath"] + "/") for mount in mounts):
                    yield f"{name}: {path} is on no volume of group {group['groupName']}"
        store = app.get("args", {}).get("response_store", {}).get("kind", "sqlite")
        if deployment["name"] == "Gateway" and most_replicas(deployment) > 1 and store != "redis":
            yield f"{name}: gateways on several nodes keep responses each for itself"


def _absolute_paths(value: Any) -> Iterator[str]:
    match value:
        case str() if value.startswith("/"):
            yield value
        case dict():
            for inner in value.values():
                yield from _absolute_paths(inner)
        case list():
            for inner in value:
                yield from _absolute_paths(inner)


def storage(bundle: Bundle) -> Iterator[str]:
    shared = {
        claim["metadata"]["name"]
        for claim in bundle.of_kind("PersistentVolumeClaim")
        if "ReadWriteMany" in claim["spec"]["accessModes"]
    }
    for pod in bundle.ray_pods:
        for volume in pod.spec["volumes"]:
            claim = volume.get("persistentVolumeClaim", {}).get("claimName")
            if claim is not None and claim not in shared:
                yield f"{pod.name}: the claim {claim} is for one node only"
        for mount in pod.containers[0]["volumeMounts"]:
            if mount["mountPath"] == "/models" and mount.get("readOnly") is not True:
                yield f"{pod.name}: could change the models of all"
    for pod in bundle.ray_pods[1:]:
        if environment(pod.containers[0]).get("HF_HUB_OFFLINE") != "1":
            yield f"{pod.name}: would fetch models by itself, against the network policy"


RULES: tuple[Rule, ...] = (
    images, scaling, head, stopping, disruption, labels, data_plane, probes, security, secrets, sizes, placement,
    storage, network,
)  # fmt: skip


def faults(documents: list[dict[str, Any]]) -> list[str]:
    bundle = Bundle(documents)
    return [f"{rule.__name__}: {line}" for rule in RULES for line in rule(bundle)]
