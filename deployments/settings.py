"""Settings of the two applications, and the only reader (and writer) of the process environment.

`args` of a Serve config are parsed once, here, into frozen values. Unknown keys are errors that name the nearest key.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, Self, TypeVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from backends import BackendSettings

MODEL_DEPLOYMENT = "Model"
"""The deployment that makes an application a model's."""


class ConfigError(ValueError):
    """A config that cannot be used. Each line of the message names one path and says what would be right."""


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SqliteStoreSettings(_Settings):
    """Responses are kept in a file, which the gateways of one machine share."""

    kind: Literal["sqlite"] = "sqlite"
    path: str | None = Field(None, description="The file. Default: in a folder of this user's under the temporary one.")
    ttl_s: float = Field(30 * 86_400.0, gt=0, description="How long a response is kept after its last use.")
    max_bytes: int = Field(2**30, gt=0, description="Past it the responses that were not used longest go first.")


class RedisStoreSettings(_Settings):
    """Responses are kept in a Redis (6.2 or later), which the gateways of all machines share."""

    kind: Literal["redis"] = "redis"
    url: str = Field(description="redis://[user:password@]host:port/database, or rediss:// with TLS.")
    password_file: str | None = Field(
        None,
        min_length=1,
        description="A file with the password, for a url without one: configs are shown by Serve, and secrets are not "
        "to be in them. It is read for each connection, so that a changed password needs no restart.",
    )
    prefix: str = Field("tokenyard", min_length=1, description="Begins every key.")
    ttl_s: float = Field(30 * 86_400.0, gt=0, description="How long a response is kept after its last use.")
    max_responses: int = Field(100_000, gt=0, description="Past it the responses that were not used longest go first.")

    @model_validator(mode="after")
    def _one_password(self) -> Self:
        if self.password_file is not None and urlsplit(self.url).password is not None:
            raise ValueError("the password is in url and in password_file: one of them is enough")
        return self


ResponseStoreSettings = Annotated[SqliteStoreSettings | RedisStoreSettings, Field(discriminator="kind")]


def _origin(value: str) -> str:
    value = value.lower().rstrip("/")
    # "null" is what every sandboxed frame and local file calls itself: whoever allows it allows anybody.
    if value != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s?#]+", value):
        raise ValueError("an origin is scheme://host or scheme://host:port, or * for all")
    return value


CorsPolicy = Literal["off", "loopback"] | tuple[Annotated[str, AfterValidator(_origin)], ...]


def _whole_path(value: str | None) -> str | None:
    if value is not None and not os.path.isabs(value):
        raise ValueError("give the whole path: a gateway may run in any folder")
    return value


class GatewaySettings(_Settings):
    """`args` of `deployments.app:gateway`."""

    max_body_bytes: int = Field(32 * 2**20, gt=0, description="Largest request body accepted, in bytes.")
    max_header_bytes: int = Field(
        32 * 2**10, gt=0, description="Largest headers of a request accepted, names and values together, in bytes."
    )
    body_within_s: float = Field(
        60.0, gt=0, description="How long a client may take to send a request's body before it gets 408."
    )
    max_messages: int = Field(
        4096, gt=0, description="Messages of one conversation; more of them are refused with 400, whatever their size."
    )
    max_tools: int = Field(1024, gt=0, description="Tools of one request; more of them are refused with 400.")
    keys: Annotated[str | None, AfterValidator(_whole_path)] = Field(
        None,
        description="The file of API keys (`tokenyard key new` makes entries for it), with its whole path on the "
        "gateway's node. It is read again when it changes. Limits in it hold at each gateway: several of them share "
        "nothing, and let through as many times as much. Default: no keys; whoever reaches the gateway is served.",
    )
    cors: CorsPolicy = Field(
        "off",
        description="Web pages that may use the gateway from a browser: off, none; loopback, those that came from this "
        "machine; or a list of their origins, such as https://chat.example.com, or * for all.",
    )
    headers_after_s: float = Field(
        2.0, ge=0, description="A stream's 200 is sent at the first frame, or after this long with keep-alives."
    )
    keepalive_s: float = Field(10.0, gt=0, description="Silence on a stream after which a keep-alive is sent.")
    first_frame_timeout_s: float = Field(
        600.0, gt=0, description="How long a request may wait for a replica and its prefill before it fails with 504."
    )
    request_timeout_s: float | None = Field(
        None,
        gt=0,
        description="How long a request may take in all before it ends with an error. A request can ask for less with "
        "the header x-request-timeout-s.",
    )
    retries: int = Field(
        8,
        ge=0,
        description="How many times a request goes on at another replica when its own was lost. One whose replicas "
        "died twice while they ran it is refused, as it may be the cause.",
    )
    max_queued_requests: int = Field(
        256,
        ge=0,
        description="Requests of one key (of all, without keys) that may wait for a place at one model's replicas; "
        "past it clients get 429.",
    )
    handover_after_s: float = Field(
        120.0,
        ge=0,
        description="How long the streams of a replica that is to stop may go on there. What has not ended by then "
        "continues on another replica, which its client does not notice.",
    )
    stalled_client_s: float = Field(
        60.0, gt=0, description="How long a client may leave a write of its stream untaken before it is cut off."
    )
    stream_buffer_frames: int = Field(
        4096, gt=0, description="Engine steps kept for a client that does not read; past it the stream is cut off."
    )
    catalog_poll_s: float = Field(1.0, gt=0, description="How often the gateway asks Serve which models there are.")
    anthropic_strict: bool = Field(
        False,
        description="True refuses with 400 what Anthropic's API version 2026-10-21 refuses, where a request names that "
        "version: temperature, top_p, top_k, documents in assistant messages, citations in a user's text.",
    )
    response_store: ResponseStoreSettings = Field(
        SqliteStoreSettings(), description="Where the Responses API keeps what it stores."
    )
    request_log: bool = Field(
        True,
        description="One line of JSON for each request: ids, tokens, times and outcome, never what was said. "
        "`serve --local` writes it to standard error, Serve to the logs of the gateway.",
    )
    trace_endpoint: str | None = Field(
        None,
        pattern="^https?://",
        description="Where OpenTelemetry's spans go, one for each request, as the log has it: a URL of OTLP over HTTP, "
        "such as http://collector:4318/v1/traces. Needs the extra `otel`. Default: nowhere.",
    )
    step_channel: bool = Field(
        True, description="False sends requests and tokens by Serve's handle calls only: slower, same result."
    )
    max_channel_connections: int = Field(
        256,
        ge=1,
        description="Replicas that one gateway keeps a connection to; with more of them, those it uses most. The "
        "others are reached by Serve's handle calls, and are not asked what they hold.",
    )
    asks: bool = Field(
        True,
        description="Before it routes a request, a gateway asks a few replicas which of its prefixes they hold and how "
        "long their queue is. False: it goes by what it has sent them itself.",
    )
    affinity_weight: float | None = Field(
        None,
        gt=0,
        description="What a second of computing a prompt counts against a second of waiting for a replica that holds "
        "it. Default: 2, or 3 where most prompt tokens are found cached: what is computed evicts what others need.",
    )


class ReasoningDefaults(_Settings):
    enabled: bool | None = Field(None, description="Whether the model thinks before it answers.")
    effort: str | None = Field(None, min_length=1, description="A word the model's template knows, such as `low`.")
    budget_tokens: int | None = Field(None, ge=0, description="Tokens after which the thinking ends.")


class RequestDefaults(_Settings):
    """What applies to requests that do not say it themselves."""

    max_tokens: int | None = Field(None, ge=1, description="Most tokens of an answer.")
    temperature: float | None = Field(None, ge=0)
    top_k: int | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    repeat_penalty: float | None = Field(None, gt=0)
    repeat_last_n: int | None = Field(None, ge=-1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    reasoning: ReasoningDefaults = ReasoningDefaults()


class HotSettings(_Settings):
    """What of a model's `args` can be changed while it runs, as its `Model` deployment's `user_config`.

    Serve restarts a model whose `args` change. A changed `user_config` restarts nothing, and what it sets counts in
    place of what `args` say.
    """

    aliases: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (), description="Other ids the model answers to, for clients that insist on theirs, e.g. `gpt-4o`."
    )
    defaults: RequestDefaults = Field(
        RequestDefaults(), description="Sampling, `max_tokens` and reasoning for requests that do not set them."
    )
    stall_timeout_s: float = Field(
        300.0,
        gt=0,
        description="A replica whose engine has work and does not move for this long ends, and is replaced. Longer "
        "than the longest step: for a large model on a CPU that is a batch of prompt tokens.",
    )


class ModelSettings(HotSettings):
    """`args` of `deployments.app:model`. The application's name is the model id."""

    backend: BackendSettings
    queue_slots: int | None = Field(
        None,
        ge=0,
        description="Requests a replica accepts beyond its slots, so that a freed slot is refilled at once. "
        "Default: a quarter of the slots, at least 2.",
    )
    max_queued_requests: int = Field(
        256, ge=0, description="Requests one gateway keeps waiting for this model; past it clients get 429."
    )

    def changed(self, hot: HotSettings) -> ModelSettings:
        """These settings with what `hot` sets."""
        return self.model_copy(update={name: getattr(hot, name) for name in hot.model_fields_set})

    @property
    def max_ongoing_requests(self) -> int:
        """What a replica accepts."""
        slots = self.backend.slots
        return slots + (queue_slots(slots) if self.queue_slots is None else self.queue_slots)


def queue_slots(slots: int) -> int:
    """The default of the setting of that name."""
    return max(2, slots // 4)


def model_settings(application: Mapping[str, Any], where: str = "") -> ModelSettings:
    """What a config's application says of its model: `args`, and its `Model` deployment's `user_config`.

    Raises `ConfigError` with the faults of both. `where` is the application's own path, with a dot behind it.
    """
    faults = []
    settings, hot = None, HotSettings()
    try:
        settings = parse(ModelSettings, application.get("args") or {}, f"{where}args")
    except ConfigError as error:
        faults.append(str(error))
    deployments = application.get("deployments")
    for index, deployment in enumerate(deployments if isinstance(deployments, list) else ()):
        given = deployment.get("user_config") if isinstance(deployment, Mapping) else None
        if given is None or deployment.get("name") != MODEL_DEPLOYMENT:
            continue
        try:
            hot = parse(HotSettings, given, f"{where}deployments[{index}].user_config")
        except ConfigError as error:
            faults.append(str(error))
    if settings is None or faults:
        raise ConfigError("\n".join(faults))
    return settings.changed(hot)


SettingsT = TypeVar("SettingsT", bound=BaseModel)


def parse(cls: type[SettingsT], args: Mapping[str, Any], where: str = "args") -> SettingsT:
    """`args` as `cls`, or a `ConfigError` with one line per fault: path, what is wrong, the nearest right key."""
    if not isinstance(args, Mapping):
        raise ConfigError(f"{where}: expected a mapping, not {args!r}")
    try:
        return cls.model_validate(dict(args))
    except ValidationError as error:
        raise ConfigError("\n".join(fault_lines(cls, error, where))) from None


def fault_lines(cls: type[BaseModel], error: ValidationError, where: str) -> list[str]:
    """A pydantic error as `path: fault` lines an operator can act on."""
    lines = []
    for fault in error.errors():
        path, owner = _place(cls, fault["loc"])
        path = (where + path).removeprefix(".")
        match fault["type"]:
            case "extra_forbidden":
                lines.append(f"{path}: unknown key{nearest(str(fault['loc'][-1]), sorted(owner.model_fields))}")
            case "missing":
                lines.append(f"{path}: {fault['msg']}")
            case _:
                lines.append(f"{path}: {fault['msg']}" + (f", not {fault['input']!r}" if fault["loc"] else ""))
    return lines


def nearest(key: str, known: list[str]) -> str:
    """`, did you mean …?` or the list of what is known."""
    match = difflib.get_close_matches(key, known, n=1)
    return f", did you mean {match[0]!r}?" if match else f"; known: {', '.join(known)}"


def _place(cls: type[BaseModel], loc: Iterable[int | str]) -> tuple[str, type[BaseModel]]:
    """A fault's path as the file has it, and the model its last key was looked up in."""
    path, owner, here = "", cls, cls
    parts = iter(loc)
    for part in parts:
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
        owner = here
        field = here.model_fields.get(str(part))
        if field is None:
            continue
        members = list(_models_in(field.annotation))
        if field.discriminator is not None:
            # The next part is the union's tag: it says which member is meant, and is no key of the file.
            tag = next(parts, None)
            members = [m for m in members if m.model_fields[str(field.discriminator)].default == tag]
        if len(members) == 1:
            here = members[0]
    return path, owner


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in getattr(annotation, "__args__", ()):
        yield from _models_in(inner)


Front = Literal["python", "haproxy"]

CONTROL_LOOP_S = 0.5
"""How long Serve's controller rests between two turns."""

_RAY_DEFAULTS = {
    # Prompts and images pass the handle as one message; gRPC's own cap is 4 MiB.
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(128 * 2**20),
    # A flush per request and a copy on stderr are the larger part of the request path's logging cost.
    "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1000",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    # Serve ends a proxy that is not ready after this long, 5 s if nobody says otherwise: a busy machine takes more.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "30",
    # Serve's controller looks over everything this often; with its 0.1 s it is the busiest process of an idle machine.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": str(CONTROL_LOOP_S),
    # What Serve's processes count reaches their gauges this often; with its 0.1 s it is a third of what they do idly.
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "1000",
    # Nothing leaves the machine unless its owner says so.
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}

_FRONT: dict[Front, dict[str, str]] = {
    # The Python proxy reaches the gateway over gRPC: no object store in between.
    "python": {"RAY_SERVE_PROXY_USE_GRPC": "1"},
    "haproxy": {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        # A changed replica set reloads HAProxy and its old process is stopped after this long: longer than any stream.
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3600",
        # How long a stopping gateway waits for load balancers to notice: the one here is told, and Ctrl-C waits it out.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "3",
    },
}


def export_ray_environment(front: Front) -> None:
    """Set what Ray reads at import, for this process and the cluster it starts. Values the user has set are kept."""
    for name, value in (_RAY_DEFAULTS | VLLM_ENV | _FRONT[front]).items():
        os.environ.setdefault(name, value)
    if front == "haproxy":
        # Serve's 4 threads, on a small machine, wake each other up instead of working.
        os.environ.setdefault("RAY_SERVE_HAPROXY_NBTHREAD", str(min(max((os.cpu_count() or 1) // 2, 1), 4)))


_LOCAL_DEFAULTS = {
    # Both are for Ray's dashboard, which a cluster that is started here has not: what each actor call did, and what
    # the machine and its processes take.
    "RAY_task_events_report_interval_ms": "0",
    "REPORTER_UPDATE_INTERVAL_MS": "15000",
    # A gateway's `/metrics` has what we count. That Ray collects it too takes a fourteenth of the CPU of 128 streams.
    "RAY_enable_metrics_collection": "0",
}


def export_local_ray_environment() -> None:
    """The same, behind `export_ray_environment`, for a cluster that this process starts for itself."""
    for name, value in _LOCAL_DEFAULTS.items():
        os.environ.setdefault(name, value)
    if not ray_collects_metrics():
        os.environ.setdefault("RAY_SERVE_HAPROXY_METRICS_ENABLED", "0")  # they go to Ray


def ray_collects_metrics() -> bool:
    """Whether the cluster that this process belongs to does: Ray reads it everywhere from the environment."""
    return os.environ.get("RAY_enable_metrics_collection", "1").lower() in ("1", "true")


VLLM_ENV = {
    # Nothing leaves the machine unless its owner says so.
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
"""Environment of a replica that runs vLLM."""


def export_vllm_environment() -> None:
    """The same for this process, which runs the models itself. Values the user has set are kept."""
    for name, value in VLLM_ENV.items():
        os.environ.setdefault(name, value)


GATEWAY_ENV = {
    # Gateway code never blocks, so it and its routers share the replica's loop: two thread hops per token less.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
}
"""Environment of a gateway replica, given to Serve as its runtime environment."""


def client_api_key() -> str | None:
    """The key of this user at a server, for the commands that are its clients."""
    return os.environ.get("TOKENYARD_API_KEY")
