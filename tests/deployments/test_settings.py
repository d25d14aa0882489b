"""Settings: a typo is an error that names the path and the key that was meant; what the user has set stays."""

from __future__ import annotations

import os

import pytest
from pydantic import ValidationError

from backends.fake import FakeSettings
from backends.llamacpp.settings import LlamaCppSettings
from deployments.settings import (
    ConfigError,
    Front,
    GatewaySettings,
    ModelSettings,
    export_local_ray_environment,
    export_ray_environment,
    model_settings,
    parse,
    ray_collects_metrics,
)

FAKE = {"kind": "fake", "slots": 3}


def fault(cls: type[GatewaySettings] | type[ModelSettings], args: dict[str, object]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(cls, args)
    return str(caught.value)


def test_the_gateway_needs_no_args() -> None:
    assert parse(GatewaySettings, {}) == GatewaySettings()


def test_values_are_taken_over() -> None:
    settings = parse(ModelSettings, {"backend": FAKE, "queue_slots": 1, "max_queued_requests": 0})
    assert settings == ModelSettings(backend=FakeSettings(slots=3), queue_slots=1, max_queued_requests=0)


def test_an_unknown_key_names_its_path_and_the_nearest_key() -> None:
    assert fault(GatewaySettings, {"keepalives": 3}) == "args.keepalives: unknown key, did you mean 'keepalive_s'?"


def test_an_unknown_key_that_resembles_none_lists_what_is_known() -> None:
    message = fault(GatewaySettings, {"zzz": 1})
    assert message.startswith("args.zzz: unknown key; known: ")
    assert message.count(",") == len(GatewaySettings.model_fields) - 1
    assert "stream_buffer_frames" in message


def test_an_unknown_key_of_a_backend_has_the_path_it_has_in_the_file() -> None:
    message = fault(ModelSettings, {"backend": {"kind": "fake", "slotz": 3}})
    assert message == "args.backend.slotz: unknown key, did you mean 'slots'?"


def test_a_key_on_the_wrong_level_is_not_proposed_as_its_own_cure() -> None:
    message = fault(ModelSettings, {"backend": FAKE, "slots": 3})
    assert message.startswith("args.slots: unknown key")
    assert "did you mean 'slots'" not in message
    assert "'max_queued_requests'" not in fault(ModelSettings, {"backend": {**FAKE, "max_queued_requests": 3}})


def test_a_key_of_another_backend_is_not_proposed() -> None:
    message = fault(ModelSettings, {"backend": {"kind": "fake", "batch_siz": 64}})
    assert message.startswith("args.backend.batch_siz: unknown key")
    assert "batch_size" not in message


def test_every_fault_has_a_line() -> None:
    lines = fault(GatewaySettings, {"retries": -1, "keepalives": 3, "max_body_bytes": "many"}).splitlines()
    assert sorted(line.split(":")[0] for line in lines) == ["args.keepalives", "args.max_body_bytes", "args.retries"]


@pytest.mark.parametrize(
    ("args", "path"),
    [
        ({"keepalive_s": "soon"}, "args.keepalive_s"),
        ({"keepalive_s": 0}, "args.keepalive_s"),
        ({"retries": 1.5}, "args.retries"),
        ({"step_channel": "perhaps"}, "args.step_channel"),
    ],
)
def test_a_wrong_value_names_its_path_and_itself(args: dict[str, object], path: str) -> None:
    message = fault(GatewaySettings, args)
    assert message.startswith(f"{path}: ")
    assert message.endswith(f"not {next(iter(args.values()))!r}")


def test_a_wrong_value_of_a_backend_has_the_path_it_has_in_the_file() -> None:
    message = fault(ModelSettings, {"backend": {"kind": "fake", "fail_at": {"after_tokens": -1}}})
    assert message.startswith("args.backend.fail_at.after_tokens: ")


def test_a_missing_key_is_said_to_be_missing() -> None:
    assert fault(ModelSettings, {"queue_slots": 5}) == "args.backend: Field required"


def test_the_place_of_the_args_is_part_of_the_path() -> None:
    with pytest.raises(ConfigError, match=r"^applications\[3\]\.args\.retrys: unknown key, did you mean 'retries'\?$"):
        parse(GatewaySettings, {"retrys": 1}, "applications[3].args")


@pytest.mark.parametrize("settings", [GatewaySettings(), ModelSettings(backend=FakeSettings()), FakeSettings()])
def test_settings_are_frozen(settings: GatewaySettings | ModelSettings | FakeSettings) -> None:
    name = next(iter(type(settings).model_fields))
    with pytest.raises(ValidationError, match="frozen"):
        setattr(settings, name, getattr(settings, name))


def test_the_kind_decides_which_backend_settings_apply() -> None:
    assert isinstance(parse(ModelSettings, {"backend": FAKE}).backend, FakeSettings)
    llamacpp = parse(ModelSettings, {"backend": {"kind": "llamacpp", "model": "a.gguf", "batch_size": 64}}).backend
    assert isinstance(llamacpp, LlamaCppSettings)
    assert llamacpp.batch_size == 64


def test_an_unknown_kind_names_the_known_ones() -> None:
    message = fault(ModelSettings, {"backend": {"kind": "llamacp"}})
    assert message.startswith("args.backend: ")
    assert "'fake', 'llamacpp'" in message


def test_a_backend_without_a_kind_is_refused() -> None:
    assert fault(ModelSettings, {"backend": {"slots": 3}}).startswith("args.backend: ")


# --- the environment Ray reads at import ------------------------------------------------------------------------------


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The process environment as a dict that nobody else sees, without Ray's variables."""
    private = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    monkeypatch.setattr(os, "environ", private)
    return private


def test_what_ray_reads_at_import_is_set(environment: dict[str, str]) -> None:
    export_ray_environment("python")
    assert environment["RAY_SERVE_PROXY_USE_GRPC"] == "1"
    assert int(environment["RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH"]) > 4 * 2**20
    assert "RAY_SERVE_ENABLE_HA_PROXY" not in environment


@pytest.mark.parametrize(("wish", "collects"), [(None, False), ("1", True), ("true", True), ("0", False)])
def test_ray_collects_metrics_in_a_cluster_of_ours_for_whoever_wants_them(
    environment: dict[str, str], wish: str | None, collects: bool
) -> None:
    assert ray_collects_metrics(), "elsewhere it does, if nobody says otherwise"
    if wish is not None:
        environment["RAY_enable_metrics_collection"] = wish
    export_local_ray_environment()
    assert ray_collects_metrics() == collects
    assert environment.get("RAY_SERVE_HAPROXY_METRICS_ENABLED") == (None if collects else "0")


def test_haproxy_may_finish_streams_after_a_reload(environment: dict[str, str]) -> None:
    export_ray_environment("haproxy")
    assert environment["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    assert int(environment["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"]) >= 600
    assert "RAY_SERVE_PROXY_USE_GRPC" not in environment


@pytest.mark.parametrize("front", ["python", "haproxy"])
def test_what_the_user_set_is_kept(environment: dict[str, str], front: Front) -> None:
    export_ray_environment(front)
    ours = {name for name in environment if name.startswith("RAY_")}
    for name in ours:
        environment[name] = "the user's"
    export_ray_environment(front)
    assert {environment[name] for name in ours} == {"the user's"}


# --- user_config --------------------------------------------------------------

ARGS = {"backend": {"kind": "fake"}, "aliases": ["a"], "defaults": {"max_tokens": 5}, "stall_timeout_s": 9.0}


def with_user_config(user_config: object, deployment: str = "Model") -> dict[str, object]:
    return {"args": ARGS, "deployments": [{"name": "Entry"}, {"name": deployment, "user_config": user_config}]}


def test_a_user_config_counts_in_place_of_the_args() -> None:
    assert model_settings({"args": ARGS}) == parse(ModelSettings, ARGS)
    assert model_settings(with_user_config(None)) == parse(ModelSettings, ARGS)
    changed = model_settings(with_user_config({"aliases": [], "defaults": {"temperature": 1}}))
    expected = ARGS | {"aliases": [], "defaults": {"temperature": 1}}
    assert changed == parse(ModelSettings, expected), "a value is replaced whole, and the others stay"
    assert model_settings(with_user_config({"aliases": []}, "Other")) == parse(ModelSettings, ARGS)


@pytest.mark.parametrize(
    ("user_config", "says"),
    [
        ({"alias": []}, "app.deployments[1].user_config.alias: unknown key, did you mean 'aliases'?"),
        ({"backend": {"kind": "fake"}}, "app.deployments[1].user_config.backend: unknown key; known: "),
        (["aliases"], "app.deployments[1].user_config: expected a mapping, not ['aliases']"),
    ],
)
def test_a_wrong_user_config_is_named_by_its_path(user_config: object, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        model_settings(with_user_config(user_config), "app.")
    assert str(caught.value).startswith(says)


def test_faults_of_args_and_user_config_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        model_settings(with_user_config({"alias": []}) | {"args": {"queue": 1}})
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == [
        "args.backend",
        "args.queue",
        "deployments[1].user_config.alias",
    ]
