"""The command line: what goes wrong is said in one place, in words, with an exit code."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from ray import serve as ray_serve

from deployments import cli, cluster, config, keys, ray_compat, settings
from deployments.autoscaling import POLICY
from deployments.cli import main
from deployments.cluster import ClusterError, failure_reason, port_holder, require_free
from deployments.settings import ConfigError

GOOD: dict[str, Any] = {
    "http_options": {"host": "127.0.0.1"},
    "applications": [
        {"name": "gateway", "route_prefix": "/", "import_path": config.GATEWAY_IMPORT},
        {"name": "b", "route_prefix": None, "import_path": config.MODEL_IMPORT, "args": {"backend": {"kind": "fake"}}},
        {"name": "a", "route_prefix": None, "import_path": config.MODEL_IMPORT, "args": {"backend": {"kind": "fake"}}},
    ],
}


def run(*args: str | Path, **kwargs: Any) -> Result:
    """Fails on anything but an orderly end: an operator never sees a traceback."""
    result = CliRunner().invoke(main, [str(arg) for arg in args], **kwargs)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    return result


def write(folder: Path, raw: object) -> Path:
    path = folder / "config.yaml"
    path.write_text(raw if isinstance(raw, str) else yaml.safe_dump(raw))
    return path


@pytest.fixture
def taken() -> Iterator[int]:
    """A port somebody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


# --- check ------------------------------------------------------------------------------------------------------------


def test_a_good_config_is_ok_and_its_models_are_named(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    result = run("check", path)
    assert (result.exit_code, result.stdout, result.stderr) == (0, f"{path}: ok. Models: a, b.\n", "")


def test_scaling_bounds_without_the_policy_are_pointed_out(tmp_path: Path) -> None:
    """Serve takes a config's `autoscaling_config` in place of the code's, whole."""
    model = GOOD["applications"][1]
    bounds: dict[str, Any] = {"name": "Model", "autoscaling_config": {"max_replicas": 2}}
    result = run("check", write(tmp_path, {"applications": [model | {"deployments": [bounds]}]}))
    assert result.exit_code == 0
    assert result.stderr.startswith("note: applications[0].deployments[0].autoscaling_config: without `policy: ")
    named = {"name": "Model", "autoscaling_config": {"max_replicas": 2, "policy": {"policy_function": POLICY}}}
    assert run("check", write(tmp_path, {"applications": [model | {"deployments": [named]}]})).stderr == ""


def test_a_config_without_models_is_ok(tmp_path: Path) -> None:
    assert "Models: none." in run("check", write(tmp_path, {"applications": []})).stdout


def test_an_unknown_key_is_named_with_its_path_and_the_nearest_key(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD | {"http_options": {"prt": 1}})
    result = run("check", path)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr == f"{path} cannot be used:\nhttp_options.prt: unknown key, did you mean 'port'?\n"


def test_faults_in_our_part_and_in_serves_are_reported_at_once(tmp_path: Path) -> None:
    raw = GOOD | {"applications": [*GOOD["applications"], {**GOOD["applications"][1], "name": "c", "args": {}}]}
    raw |= {"prxy_location": "HeadOnly"}
    result = run("check", write(tmp_path, raw))
    assert result.exit_code == 2
    assert result.stderr.splitlines()[1:] == [
        "applications[3].args.backend: Field required",
        "prxy_location: unknown key, did you mean 'proxy_location'?",
    ]


def test_a_fault_both_parts_see_is_reported_once(tmp_path: Path) -> None:
    result = run("check", write(tmp_path, GOOD | {"http_options": {"port": "high"}}))
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()[1:]
    assert line.startswith("http_options.port: ")


@pytest.mark.parametrize("command", [["check"], ["serve"], ["serve", "--local"]])
@pytest.mark.parametrize("text", ["applications: [", "- a\n", "applications: 5\n", ""])
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, command: list[str], text: str) -> None:
    result = run(*command, write(tmp_path, text))
    assert result.exit_code == 2
    assert "config.yaml" in result.stderr


@pytest.mark.parametrize("command", [["check"], ["serve"], ["serve", "--local"]])
def test_a_file_there_is_not_is_named(tmp_path: Path, command: list[str]) -> None:
    result = run(*command, tmp_path / "none.yaml")
    assert result.exit_code == 2
    assert "none.yaml: No such file or directory" in result.stderr


# --- serve ------------------------------------------------------------------------------------------------------------


def test_a_bad_config_is_refused_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    monkeypatch.setattr(cluster, "running_cluster", lambda *args: started.append(args))
    raw = GOOD | {"http_option": {}}
    assert run("serve", write(tmp_path, raw)).exit_code == 2
    assert started == []


def test_a_busy_port_is_one_clear_line(tmp_path: Path, taken: int) -> None:
    raw = GOOD | {"http_options": {"host": "127.0.0.1", "port": taken}}
    result = run("serve", "--local", write(tmp_path, raw))
    assert result.exit_code == 1
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"Port {taken} on 127.0.0.1 is taken by ")
    assert f"(pid {os.getpid()})" in line
    assert line.endswith("Free it, or set http_options.port.")


def test_a_host_that_is_not_here_is_one_clear_line(tmp_path: Path) -> None:
    raw = GOOD | {"http_options": {"host": "192.0.2.1", "port": 8000}}  # an address for documentation: nobody has it
    result = run("serve", "--local", "--insecure", write(tmp_path, raw))
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert "192.0.2.1" in line
    assert "taken" not in line


def test_a_model_that_cannot_be_loaded_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from backends.base import BackendStartError
    from deployments import local

    class Broken:
        def __init__(self, _: object) -> None:
            pass

        async def start(self) -> None:
            raise BackendStartError("a.gguf: no such file")

    monkeypatch.setattr(local, "create", Broken)
    monkeypatch.setattr(cluster, "require_free", lambda host, port: None)
    result = run("serve", "--local", write(tmp_path, GOOD))
    assert (result.exit_code, result.stderr) == (1, "a.gguf: no such file\n")


@pytest.mark.parametrize(("front", "name"), [("python", "PROXY_USE_GRPC"), ("haproxy", "ENABLE_HA_PROXY")])
def test_the_environment_is_set_before_ray_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, front: str, name: str
) -> None:
    """The check of Serve's part is the first to import Ray, which reads the environment once, then."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    monkeypatch.setattr(os, "environ", environment)
    seen = []

    def serve_part(_: object) -> None:
        seen.append(environment.get(f"RAY_SERVE_{name}"))
        raise ConfigError("that is all we wanted to know")

    monkeypatch.setattr(config, "serve_part", serve_part)
    assert run("serve", "--front", front, write(tmp_path, GOOD)).exit_code == 2
    assert seen == ["1"]


def test_a_ray_cluster_that_does_not_answer_is_one_clear_line(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{probe.getsockname()[1]}"
    for address in (nobody, "nonsense"):
        result = run("serve", "--ray", address, write(tmp_path, GOOD))
        assert (result.exit_code, result.stderr) == (1, f"No Ray cluster answers at {address}.\n")


def test_talking_to_nobody_is_one_clear_line() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    result = run("chat", "m", "--url", url, input="Hi\n")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"cannot reach {url}: ")


# --- keys -------------------------------------------------------------------------------------------------------------


def test_a_new_key_is_shown_once_and_its_entry_is_for_the_file(tmp_path: Path) -> None:
    result = run("key", "new", "alice", "--model", "a", "--model", "b", "--tokens-per-minute", "9", "--admin")
    assert result.exit_code == 0
    (made,) = re.findall(r"ty-\S+", result.stderr)
    assert made not in result.stdout
    path = tmp_path / "keys.yaml"
    path.write_text(result.stdout)
    (key,) = keys.read(path)
    assert (key.id, key.models, key.tokens_per_minute, key.admin) == ("alice", ("a", "b"), 9, True)
    found = keys.KeyRing([key]).find(made.encode())
    assert found == key


def test_a_name_that_is_none_is_refused_and_makes_no_key() -> None:
    result = run("key", "new", "a b")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "ty-" not in result.stderr


def test_a_file_of_keys_that_cannot_be_read_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "require_free", lambda host, port: None)
    raw = GOOD | {"applications": [{**GOOD["applications"][0], "args": {"keys": str(tmp_path / "none")}}]}
    result = run("serve", "--local", write(tmp_path, raw))
    assert (result.exit_code, result.stderr) == (1, f"{tmp_path / 'none'}: No such file or directory\n")


@pytest.mark.parametrize("mode", ["--local", "--ray=local"])
@pytest.mark.parametrize(
    ("host", "with_keys", "flags", "warned"),
    [
        ("0.0.0.0", False, [], True),
        ("::", False, [], True),
        ("192.0.2.1", False, [], True),
        (None, False, [], True),  # Serve's own default is every interface
        ("0.0.0.0", False, ["--insecure"], False),
        ("0.0.0.0", True, [], False),
        ("127.0.0.1", False, [], False),
        ("::1", False, [], False),
        ("localhost", False, [], False),
    ],
)
def test_a_server_open_to_all_warns_loudly(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    host: str | None,
    with_keys: bool,
    flags: list[str],
    warned: bool,
) -> None:
    started: list[object] = []
    monkeypatch.setattr(cli, "_serve_local", started.append)
    monkeypatch.setattr(cli, "_serve_on_ray", lambda *args: started.append(args))
    monkeypatch.setattr(cli, "_stop_on_signals", lambda: None)
    monkeypatch.setattr(settings, "export_ray_environment", lambda front: None)
    gateway = {**GOOD["applications"][0], "args": {"keys": "/keys.yaml"} if with_keys else {}}
    raw = GOOD | {"applications": [gateway, *GOOD["applications"][1:]]}
    raw["http_options"] = {} if host is None else {"host": host}
    result = run("serve", mode, *flags, write(tmp_path, raw))
    assert result.exit_code == 0
    assert len(started) == 1
    assert ("WARNING: anybody who reaches" in result.stderr) is warned
    assert ("--insecure" in result.stderr) is warned


@pytest.mark.parametrize("with_keys", [False, True])
def test_what_is_printed_to_paste_has_a_place_for_the_key(with_keys: bool, capsys: pytest.CaptureFixture[str]) -> None:
    gateway = settings.GatewaySettings(keys="/keys.yaml" if with_keys else None)
    cli._banner(config.OurParts(gateway, {}, "127.0.0.1", 8000))
    shown = capsys.readouterr().out
    assert ("Bearer YOUR-KEY" in shown) is with_keys
    assert f'api_key="{"YOUR-KEY" if with_keys else "none"}"' in shown


# --- help -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_lists_the_commands(flag: str) -> None:
    result = run(flag)
    assert result.exit_code == 0
    commands = re.findall(r"^  (\w+) ", result.stdout.split("Commands:")[1], flags=re.M)
    assert commands == sorted(main.commands) == ["bench", "chat", "check", "deploy", "key", "serve", "status"]


@pytest.mark.parametrize("command", sorted(main.commands))
def test_every_command_and_option_has_a_help_text(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert len(result.stdout.split("Usage:")[1].splitlines()[2].split()) > 2
    described = main.commands[command]
    for param in described.params:
        if param.param_type_name == "option" and param.name not in ("max_tokens",):
            assert getattr(param, "help", None), f"{command} --{param.name} has no help text"


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["serve", "--locl", "x.yaml"], "--local"),
        (["serve", "--front", "nginx", "x.yaml"], "haproxy"),
        (["serve"], "CONFIG"),
        (["chekc"], "chekc"),
        (["chat", "m", "--max-tokens", "many"], "many"),
    ],
)
def test_a_wrong_command_line_is_refused_with_a_hint(args: list[str], word: str) -> None:
    result = run(*args)
    assert result.exit_code == 2
    assert word in result.stderr


# --- ports ------------------------------------------------------------------------------------------------------------


def test_a_free_port_has_no_holder() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert port_holder("127.0.0.1", port) is None
    require_free("127.0.0.1", port)


def test_a_taken_port_is_seen_on_every_address(taken: int) -> None:
    for host in ("127.0.0.1", "0.0.0.0", "localhost"):
        holder = port_holder(host, taken)
        assert holder is not None and holder.endswith(f"(pid {os.getpid()})")


def test_a_haproxy_that_was_left_behind_is_pointed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "port_holder", lambda host, port: "haproxy (pid 7)")
    with pytest.raises(ClusterError, match=r"haproxy \(pid 7\)\. It was left behind .* end it by that id\."):
        require_free("127.0.0.1", 8000)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("", ""),
        ("Waiting for\n  resources.", "Waiting for resources."),
        ("Traceback (most recent call last):\n  File x\nbackends.base.BackendStartError: a.gguf: none", "a.gguf: none"),
        ("Traceback:\n  File x\nValueError: 5 is too many\n", "5 is too many"),
    ],
)
def test_the_reason_of_a_failed_deployment_is_one_line(message: str, reason: str) -> None:
    assert failure_reason(message) == reason


# --- status -----------------------------------------------------------------------------------------------------------


def test_status_says_of_each_model_how_it_is_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def application(status: str, deployment: str, message: str = "", **replicas: int) -> SimpleNamespace:
        model = SimpleNamespace(status=SimpleNamespace(value=deployment), message=message, replica_states=replicas)
        return SimpleNamespace(status=SimpleNamespace(value=status), message="", deployments={"Model": model})

    retrying = (
        "A replica failed to start with exception. Retrying 2 more time(s). Error:\nray::ServeReplica\n"
        "backends.base.BackendStartError: model 'm.gguf': it is empty"
    )
    applications = {
        "asleep": application("RUNNING", "HEALTHY"),
        "broken": application("DEPLOYING", "UPDATING", retrying, STARTING=1),
        "up": application("RUNNING", "HEALTHY", RUNNING=2),
    }
    monkeypatch.setattr(cluster, "connect", lambda: True)
    monkeypatch.setattr(ray_compat, "serve_is_running", lambda: True)
    monkeypatch.setattr(ray_serve, "status", lambda: SimpleNamespace(applications=applications))
    assert run("status").stdout.splitlines() == [
        "asleep  RUNNING    asleep until a request comes",
        "broken  DEPLOYING  1 starting                    model 'm.gguf': it is empty",
        "up      RUNNING    2 running",
    ]


# --- deploy -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A cluster on which GOOD's gateway and model `a` run, and another. What is deployed on it is in the list."""
    gateway, _, a = GOOD["applications"]
    found = {"gateway": gateway, "a": a, "old": a | {"name": "old"}}
    deployed: list[Any] = []
    monkeypatch.setattr(cluster, "connect", lambda address: True)
    monkeypatch.setattr(ray_compat, "serve_is_running", lambda: True)
    monkeypatch.setattr(ray_compat, "application_configs", lambda: found)
    monkeypatch.setattr(ray_compat, "deploy", deployed.append)
    monkeypatch.setattr(cluster, "wait_until_deployed", lambda names, say: [])
    return deployed


PLAN = ["keep     gateway", "start    b", "keep     a", "stop     old"]


def test_deploy_shows_what_it_will_do_and_asks(tmp_path: Path, running: list[Any]) -> None:
    refused = run("deploy", write(tmp_path, GOOD), input="n\n")
    assert (refused.exit_code, refused.stdout.splitlines()[:4], running) == (1, PLAN, [])
    taken = run("deploy", write(tmp_path, GOOD), input="y\n")
    assert taken.exit_code == 0
    assert [app.name for app in running[0].applications] == ["gateway", "b", "a"]


def test_deploy_does_not_ask_with_yes_or_for_nothing(tmp_path: Path, running: list[Any]) -> None:
    assert run("deploy", write(tmp_path, GOOD), "--yes").stdout.splitlines() == PLAN
    assert len(running) == 1
    same = {"applications": [app | {"name": name} for name, app in ray_compat.application_configs().items()]}
    assert run("deploy", write(tmp_path, same)).stdout.splitlines()[-1] == "Nothing changes."
    assert len(running) == 1


def test_deploy_says_which_restart_can_be_spared(tmp_path: Path, running: list[Any]) -> None:
    renamed = GOOD["applications"][2]
    renamed = renamed | {"args": renamed["args"] | {"aliases": ["other"]}}
    lines = run("deploy", write(tmp_path, {"applications": [renamed]}), "--yes").stdout.splitlines()
    assert lines[0].startswith("restart  a  (args.aliases")
    assert lines[1] == "         In the `user_config` of its deployment `Model` this would restart nothing."


def test_deploy_ends_with_an_error_where_a_model_does_not_start(
    tmp_path: Path, running: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = cluster.AppStatus("b", "DEPLOY_FAILED", "there is no file m.gguf", {})
    monkeypatch.setattr(cluster, "wait_until_deployed", lambda names, say: [broken])
    result = run("deploy", write(tmp_path, GOOD), "--yes")
    assert (result.exit_code, result.stderr) == (1, "b failed to start: there is no file m.gguf\n")


def test_deploy_needs_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "connect", lambda address: False)
    result = run("deploy", write(tmp_path, GOOD))
    assert (result.exit_code, result.stderr) == (1, "No Ray cluster runs here; `tokenyard serve` starts one.\n")
