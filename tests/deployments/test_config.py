"""Config files: everything that Serve or we would trip over, or silently ignore, is an error with a path."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from backends.fake import FakeSettings
from deployments import config
from deployments.settings import ConfigError, GatewaySettings

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))

GOOD: dict[str, Any] = {
    "proxy_location": "HeadOnly",
    "http_options": {"host": "127.0.0.1", "port": 8123},
    "logging_config": {"log_level": "INFO"},
    "applications": [
        {"name": "gateway", "route_prefix": "/", "import_path": config.GATEWAY_IMPORT, "args": {"retries": 1}},
        {
            "name": "fast",
            "route_prefix": None,
            "import_path": config.MODEL_IMPORT,
            "args": {"backend": {"kind": "fake", "slots": 3}},
            "deployments": [
                {
                    "name": "Model",
                    "autoscaling_config": {"min_replicas": 1, "max_replicas": 2},
                    "ray_actor_options": {"num_cpus": 0.5},
                }
            ],
        },
    ],
}


def good() -> dict[str, Any]:
    return deepcopy(GOOD)


def write(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text)
    return path


# --- the configs we ship ----------------------------------------------------------------------------------------------


def test_there_are_configs_to_check() -> None:
    assert len(CONFIGS) >= 3


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_our_configs_pass_our_check(path: Path) -> None:
    parts = config.our_parts(config.read(path))
    assert parts.models
    assert parts.host == "127.0.0.1"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_our_configs_pass_serves_check(path: Path) -> None:
    raw = config.read(path)
    schema = config.serve_part(raw)
    assert [app.name for app in schema.applications] == [app["name"] for app in raw["applications"]]
    assert schema.http_options.port == raw["http_options"]["port"]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_the_first_line_of_a_config_says_how_to_run_it(path: Path) -> None:
    first = path.read_text().splitlines()[0]
    assert first.startswith("# ")
    assert first.endswith(f"  tokenyard serve configs/{path.name}")


# --- reading ----------------------------------------------------------------------------------------------------------


def read_fault(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        config.read(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_file_is_read_as_it_stands(tmp_path: Path) -> None:
    assert config.read(write(tmp_path, yaml.safe_dump(GOOD))) == GOOD


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "none.yaml"
    assert read_fault(path) == f"{path}: No such file or directory"


def test_a_folder_is_no_config(tmp_path: Path) -> None:
    assert read_fault(tmp_path).startswith(f"{tmp_path}: ")


def test_a_yaml_fault_has_a_position(tmp_path: Path) -> None:
    message = read_fault(write(tmp_path, "applications:\n  - name: [a\n    b: 1\n"))
    assert "not YAML" in message
    assert "line 3" in message


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(b"applications: \xff\xfe\n")
    assert read_fault(path).startswith(f"{path}: not YAML")


@pytest.mark.parametrize("text", ["", "- a\n", "applications\n", "applications: {}\n", "app: []\n"])
def test_a_file_without_a_list_of_applications_is_refused(tmp_path: Path, text: str) -> None:
    assert "a list under `applications`" in read_fault(write(tmp_path, text))


# --- our part ---------------------------------------------------------------------------------------------------------


def our_fault(raw: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        config.our_parts(raw)
    return str(caught.value)


def test_our_part_is_the_args_of_our_applications_and_the_address() -> None:
    parts = config.our_parts(good())
    assert parts.gateway == GatewaySettings(retries=1)
    assert {name: model.backend for name, model in parts.models.items()} == {"fast": FakeSettings(slots=3)}
    assert (parts.host, parts.port) == ("127.0.0.1", 8123)


def test_without_http_options_the_address_is_serves_default() -> None:
    raw = good()
    del raw["http_options"]
    schema = config.serve_part(raw).http_options
    parts = config.our_parts(raw)
    assert (parts.host, parts.port) == (schema.host, schema.port) == ("0.0.0.0", 8000)


def test_an_application_without_a_name_has_serves_default_name() -> None:
    raw = good()
    del raw["applications"][1]["name"]
    assert list(config.our_parts(raw).models) == [config.serve_part(raw).applications[1].name]


def test_applications_of_others_are_left_alone() -> None:
    raw = good()
    raw["applications"].append({"name": "other", "import_path": "their.app:build", "args": {"anything": 1}})
    assert list(config.our_parts(raw).models) == ["fast"]


def test_a_config_without_a_gateway_gets_default_gateway_settings() -> None:
    raw = good()
    del raw["applications"][0]
    assert config.our_parts(raw).gateway == GatewaySettings()


@pytest.mark.parametrize("args", [None, {}])
def test_a_gateway_may_come_without_args(args: object) -> None:
    raw = good()
    raw["applications"][0]["args"] = args
    assert config.our_parts(raw).gateway == GatewaySettings()


def test_faults_of_all_applications_are_reported_at_once() -> None:
    raw = good()
    raw["applications"][0]["args"] = {"retrys": 1}
    raw["applications"][1]["args"]["backend"]["slotz"] = 1
    raw["applications"].append("fake")
    assert our_fault(raw).splitlines() == [
        "applications[0].args.retrys: unknown key, did you mean 'retries'?",
        "applications[1].args.backend.slotz: unknown key, did you mean 'slots'?",
        "applications[2]: expected a mapping, not 'fake'",
    ]


def test_args_that_are_no_mapping_are_refused() -> None:
    raw = good()
    raw["applications"][1]["args"] = ["backend"]
    assert our_fault(raw) == "applications[1].args: expected a mapping, not ['backend']"


@pytest.mark.parametrize(
    ("options", "path"),
    [(["host"], "http_options"), ("127.0.0.1", "http_options"), ({"port": "high"}, "http_options.port")],
)
def test_http_options_that_cannot_be_used_are_refused(options: object, path: str) -> None:
    """`--local` has no Serve to check them."""
    raw = good()
    raw["http_options"] = options
    assert our_fault(raw).startswith(f"{path}: ")


# --- Serve's part -----------------------------------------------------------------------------------------------------


def serve_fault(raw: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        config.serve_part(raw)
    return str(caught.value)


def test_serves_part_is_what_serve_deploys() -> None:
    schema = config.serve_part(good())
    (deployment,) = schema.applications[1].deployments
    assert deployment.name == "Model"
    assert deployment.ray_actor_options.num_cpus == 0.5


def at(raw: dict[str, Any], *path: str | int) -> Any:
    for part in path:
        raw = raw[part]  # type: ignore[index]
    return raw


@pytest.mark.parametrize(
    ("place", "key", "expected"),
    [
        ((), "http_option", "http_option: unknown key, did you mean 'http_options'?"),
        (("http_options",), "prt", "http_options.prt: unknown key, did you mean 'port'?"),
        (("logging_config",), "log_lvel", "logging_config.log_lvel: unknown key, did you mean 'log_level'?"),
        (("applications", 1), "arg", "applications[1].arg: unknown key, did you mean 'args'?"),
        (
            ("applications", 1, "deployments", 0),
            "max_ongoing_request",
            "applications[1].deployments[0].max_ongoing_request: unknown key, did you mean 'max_ongoing_requests'?",
        ),
        (
            ("applications", 1, "deployments", 0, "autoscaling_config"),
            "min_replica",
            "applications[1].deployments[0].autoscaling_config.min_replica: unknown key, did you mean 'min_replicas'?",
        ),
        (
            ("applications", 1, "deployments", 0, "ray_actor_options"),
            "num_cpu",
            "applications[1].deployments[0].ray_actor_options.num_cpu: unknown key, did you mean 'num_cpus'?",
        ),
    ],
    ids=lambda value: ".".join(map(str, value)) if isinstance(value, tuple) else None,
)
def test_a_key_serve_would_ignore_is_an_error(place: tuple[str | int, ...], key: str, expected: str) -> None:
    raw = good()
    at(raw, *place)[key] = 1
    assert expected in serve_fault(raw).splitlines()


def test_a_key_serve_refuses_itself_is_reported_once() -> None:
    raw = good()
    raw["logging_config"]["log_lvel"] = 1
    assert len(serve_fault(raw).splitlines()) == 1


def test_keys_below_a_free_mapping_are_nobodys_business() -> None:
    raw = good()
    raw["applications"][1]["runtime_env"] = {"env_vars": {"ANY": "1"}}
    raw["applications"][1]["deployments"][0]["user_config"] = {"any": {"depth": 1}}
    assert config.serve_part(raw).applications[1].runtime_env == {"env_vars": {"ANY": "1"}}


def test_autoscaling_that_cannot_work_is_refused_with_its_path() -> None:
    raw = good()
    raw["applications"][1]["deployments"][0]["autoscaling_config"] = {"min_replicas": 3, "max_replicas": 2}
    assert "applications[1].deployments[0].autoscaling_config" in serve_fault(raw)


def test_a_value_serve_refuses_is_an_error_with_its_path() -> None:
    raw = good()
    raw["applications"][1]["deployments"][0]["max_ongoing_requests"] = "many"
    assert serve_fault(raw).startswith("applications[1].deployments[0].max_ongoing_requests: ")


def test_two_applications_of_one_name_are_refused() -> None:
    raw = good()
    raw["applications"][1]["name"] = "gateway"
    assert "gateway" in serve_fault(raw)


@pytest.mark.parametrize("deployments", [["Model"], {"name": "Model"}, "Model"])
def test_deployments_of_the_wrong_shape_are_refused(deployments: object) -> None:
    raw = good()
    raw["applications"][1]["deployments"] = deployments
    assert "applications[1].deployments" in serve_fault(raw)


def test_an_application_that_is_no_mapping_is_refused() -> None:
    raw = good()
    raw["applications"].append("fake")
    assert "applications[2]" in serve_fault(raw)
