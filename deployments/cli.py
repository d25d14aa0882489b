"""The `tokenyard` command."""

from __future__ import annotations

import asyncio
import http.client
import json
import signal
import sys
import time
from http import HTTPStatus
from pathlib import Path
from typing import Any, NoReturn

import click
import uvloop

from deployments import config, settings
from deployments.bench.command import bench
from deployments.cors import is_loopback_host
from protocols.sse import SseParser

READY_TIMEOUT_S = 120.0


class Progress:
    """One line that keeps changing on a terminal; a line per change elsewhere."""

    def __init__(self) -> None:
        self._tty = sys.stderr.isatty()
        self._shown = ""
        self._printed_at = 0.0

    def __call__(self, text: str) -> None:
        if self._tty:
            click.echo(f"\r\x1b[2K{text}", nl=False, err=True)
        elif text and (text.split("(")[0] != self._shown or time.monotonic() - self._printed_at > 15):
            click.echo(text, err=True)
            self._shown, self._printed_at = text.split("(")[0], time.monotonic()


def fail(message: str, code: int = 1) -> NoReturn:
    click.echo(message, err=True)
    sys.exit(code)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="tokenyard")
def main() -> None:
    """Serves many open models to every LLM client from one Ray cluster."""


@main.command()
@click.argument("path", metavar="CONFIG", type=click.Path(path_type=Path))
def check(path: Path) -> None:
    """Validate CONFIG, Serve's part and ours, without a cluster."""
    parts = _checked(path, with_serve=True)
    for note in config.notes(config.read(path)):
        click.echo(f"note: {note}", err=True)
    click.echo(f"{path}: ok. Models: {', '.join(sorted(parts.models)) or 'none'}.")


@main.command()
@click.argument("path", metavar="CONFIG", type=click.Path(path_type=Path))
@click.option("--local", "local_mode", is_flag=True, help="One process, no Ray.")
@click.option(
    "--front",
    type=click.Choice(["python", "haproxy"]),
    default="python",
    show_default=True,
    help="What listens on the port when Ray is started here: Serve's Python proxy, or HAProxy.",
)
@click.option(
    "--ray",
    "ray_address",
    default="auto",
    show_default=True,
    metavar="ADDRESS",
    help="auto: this machine's Ray cluster, or a new one; local: a new one; or host:port.",
)
@click.option("--insecure", is_flag=True, help="No warning where others reach the server and it has no API keys.")
def serve(path: Path, local_mode: bool, front: settings.Front, ray_address: str, insecure: bool) -> None:
    """Run CONFIG here: on the Ray cluster of this machine, or on one that is started for it. Ctrl-C stops it.

    With a cluster on which Serve runs already, CONFIG is deployed there and the command ends: what does not change in
    it is not restarted.
    """
    if local_mode:
        settings.export_vllm_environment()
    else:
        settings.export_ray_environment(front)  # before the check, which imports Ray
    parts = _checked(path, with_serve=not local_mode)
    if not insecure:
        _warn_if_open(parts)
    _stop_on_signals()
    try:
        if local_mode:
            _serve_local(parts)
        else:
            _serve_on_ray(path, parts, front, ray_address)
    except KeyboardInterrupt:
        click.echo("stopped", err=True)


def _warn_if_open(parts: config.OurParts) -> None:
    if parts.gateway.keys is not None or is_loopback_host(parts.host):
        return
    click.secho(
        f"""
WARNING: anybody who reaches {parts.host}:{parts.port} can use the models, see every stored response, and change what
all requests share: there are no API keys, and that address is not only this machine's.

  Make a key:            tokenyard key new NAME >> keys.yaml
  Have them asked for:   `keys: /path/to/keys.yaml`, in the args of the gateway's application
  Or stay on this host:  `host: 127.0.0.1`, in http_options

Behind a network that keeps others out, --insecure silences this.
""",
        fg="red",
        bold=True,
        err=True,
    )


def _serve_local(parts: config.OurParts) -> None:
    from backends.base import BackendStartError
    from deployments import local
    from deployments.cluster import ClusterError, require_free

    try:
        require_free(parts.host, parts.port)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(local.serve(parts, parts.host, parts.port, lambda: _banner(parts)))
    except (ClusterError, BackendStartError, settings.ConfigError) as error:
        fail(str(error))


def _serve_on_ray(path: Path, parts: config.OurParts, front: settings.Front, ray_address: str) -> None:
    from deployments import cluster, ray_compat

    schema = config.serve_part(config.read(path))
    say = Progress()
    try:
        with cluster.running_cluster(schema, say, ray_address) as started_here:
            _stop_on_signals()  # again: Ray installs a handler of its own, which ends the process and leaves the front
            ray_compat.deploy(schema)
            failed = cluster.wait_until_deployed({app.name for app in schema.applications}, say)
            for app in failed:
                click.echo(f"{app.name} failed to start: {app.message}", err=True)
            running = sorted(parts.models.keys() - {app.name for app in failed})
            for name in running:
                _wait_until_it_answers(parts, name, say)
            if running:
                _banner(parts, running)
            if front == "haproxy" and started_here:
                click.echo("HAProxy's statistics (8404) and metrics (9101) listen on every interface: fence them.\n")
            if not started_here:
                click.echo("Deployed to the Serve that was already running; it goes on after this command.")
                sys.exit(1 if failed else 0)
            if failed and not running:
                sys.exit(1)
            click.echo("Ctrl-C stops it.")
            while ray_compat.serve_is_running():
                time.sleep(2)
            fail("Serve has stopped.")
    except cluster.ClusterError as error:
        fail(str(error))


@main.command()
@click.argument("path", metavar="CONFIG", type=click.Path(path_type=Path))
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--ray", "ray_address", default="auto", show_default=True, metavar="ADDRESS", help="auto, or host:port.")
def deploy(path: Path, yes: bool, ray_address: str) -> None:
    """Make CONFIG what runs on a Ray cluster, after showing what that starts, changes, restarts and stops."""
    settings.export_ray_environment("python")
    _checked(path, with_serve=True)
    from deployments import cluster, ray_compat
    from deployments.plan import avoidable, plan

    schema = config.serve_part(config.read(path))
    if not cluster.connect(ray_address):
        fail("No Ray cluster runs here; `tokenyard serve` starts one.")
    serves = ray_compat.serve_is_running()
    wanted = {app.name: app.model_dump(exclude_unset=True) for app in schema.applications}
    steps = plan(ray_compat.application_configs() if serves else {}, wanted, ray_compat.code_version)
    for step in steps:
        click.echo(f"{step.action:8} {step.application}" + (f"  ({', '.join(step.because)})" if step.because else ""))
        if avoidable(step):
            click.echo(f"{'':8} In the `user_config` of its deployment `Model` this would restart nothing.")
    if all(step.action == "keep" for step in steps):
        click.echo("Nothing changes.")
        return
    if not yes:
        click.confirm("Do this?", abort=True)
    if not serves:
        ray_compat.start_serve(schema)
    ray_compat.deploy(schema)
    failed = cluster.wait_until_deployed(set(wanted), Progress())
    for app in failed:
        click.echo(f"{app.name} failed to start: {app.message}", err=True)
    sys.exit(1 if failed else 0)


def _stop_on_signals() -> None:
    """A service manager's SIGTERM stops the same things as Ctrl-C, and so does SIGINT where a shell had it ignored."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)


def _wait_until_it_answers(parts: config.OurParts, model: str, say: Progress) -> None:
    """One token from the model, through the front door: a replica that runs is not yet a client that is served.

    Where API keys are asked for there is none here; that they are asked for says that the front is there.
    """
    done = HTTPStatus.OK if parts.gateway.keys is None else HTTPStatus.UNAUTHORIZED
    started = time.monotonic()
    while time.monotonic() - started < READY_TIMEOUT_S:
        say(f"waiting for {model} to answer ({time.monotonic() - started:.0f} s)")
        body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
        try:
            with _post(_reachable(parts.host), parts.port, body, timeout=READY_TIMEOUT_S) as response:
                if response.status == done:
                    say("")
                    return
        except (OSError, http.client.HTTPException):
            pass
        time.sleep(0.3)
    fail(f"{model} runs but does not answer on port {parts.port} after {READY_TIMEOUT_S:.0f} s.")


def _banner(parts: config.OurParts, models: list[str] | None = None) -> None:
    ids = models if models is not None else sorted(parts.models)
    base = f"http://{_reachable(parts.host)}:{parts.port}"
    model = ids[0] if ids else "MODEL"
    with_key = parts.gateway.keys is not None
    header, key = (" -H 'authorization: Bearer YOUR-KEY'", "YOUR-KEY") if with_key else ("", "none")
    click.echo(
        f"""
Tokenyard is ready.

  OpenAI base URL   {base}/v1
  models            {", ".join(ids)}

  curl {base}/v1/chat/completions -H 'content-type: application/json'{header} \\
    -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "Say hello."}}], "max_tokens": 64}}'

  from openai import OpenAI

  client = OpenAI(base_url="{base}/v1", api_key="{key}")
  for chunk in client.chat.completions.create(
      model="{model}", messages=[{{"role": "user", "content": "Why is the sky blue?"}}], max_tokens=128, stream=True
  ):
      print(chunk.choices[0].delta.content or "", end="", flush=True)
"""
    )


@main.command()
def status() -> None:
    """Show the applications on this machine's Ray cluster."""
    settings.export_ray_environment("python")
    from deployments import cluster, ray_compat

    if not cluster.connect():
        fail("No Ray cluster runs here.")
    if not ray_compat.serve_is_running():
        fail("Ray runs here, but Serve does not.")
    rows = [(app.name, app.status, _replica_words(app.status, app.replicas), app.message) for app in cluster.statuses()]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    for row in rows:
        click.echo("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]).rstrip())


def _replica_words(status: str, replicas: dict[str, int]) -> str:
    if status == "RUNNING" and not replicas:
        return "asleep until a request comes"
    return ", ".join(f"{count} {state.lower()}" for state, count in sorted(replicas.items())) or "no replicas"


@main.group()
def key() -> None:
    """Make API keys for the gateway."""


@key.command()
@click.argument("id")
@click.option("--model", "models", multiple=True, help="A model it may use; repeat it for more. Default: all.")
@click.option("--requests-per-minute", type=click.IntRange(min=1), help="Default: no limit; so with the others.")
@click.option("--tokens-per-minute", type=click.IntRange(min=1), help="Of prompts and answers together.")
@click.option("--concurrent-requests", type=click.IntRange(min=1), help="Requests at a time.")
@click.option("--admin", is_flag=True, help="It may see and change what all share, such as slots.")
def new(id: str, models: tuple[str, ...], admin: bool, **limits: int | None) -> None:
    """Make a key with the name ID: `tokenyard key new alice >> keys.yaml`.

    The key is shown once, on the terminal. What goes to the file is its hash, and its limits.
    """
    from deployments import keys

    try:
        made, entry = keys.new_key(id, models=list(models) or None, admin=admin or None, **limits)
    except settings.ConfigError as error:
        fail(str(error), code=2)
    click.echo(entry, nl=False)
    click.echo(f"The key of {id}, which is shown only now:\n\n  {made}\n", err=True)


@main.command()
@click.argument("model")
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="Where the gateway listens.")
@click.option("--max-tokens", default=512, show_default=True)
@click.option("--api-key", envvar="TOKENYARD_API_KEY", show_envvar=True, help="Where the gateway asks for one.")
def chat(model: str, url: str, max_tokens: int, api_key: str | None) -> None:
    """Talk to MODEL. Ctrl-C ends an answer, Ctrl-D the conversation."""
    host, _, port = url.removeprefix("http://").rstrip("/").removesuffix("/v1").partition(":")
    messages: list[dict[str, str]] = []
    while True:
        try:
            text = click.prompt(click.style("you", bold=True), prompt_suffix="> ")
        except click.Abort:
            click.echo()
            return
        messages.append({"role": "user", "content": text})
        body = {"model": model, "messages": messages, "max_tokens": max_tokens, "stream": True}
        try:
            answer = _print_answer(host, int(port or 80), body, api_key)
        except OSError as error:
            fail(f"cannot reach {url}: {error}")
        messages.append({"role": "assistant", "content": answer})


def _print_answer(host: str, port: int, body: dict[str, Any], api_key: str | None) -> str:
    """Streams the answer to the terminal and returns it, or what there is of it."""
    response = _post(host, port, body, timeout=None, api_key=api_key)
    if response.status != 200:
        fail(_error_message(response.read()))
    parser, pieces = SseParser(), []
    try:
        while chunk := response.read1(65536):
            for event in parser.feed(chunk):
                if event.data == "[DONE]":
                    continue
                data = json.loads(event.data)
                if "error" in data:
                    click.echo(click.style(data["error"]["message"], fg="red"))
                for choice in data.get("choices", []):
                    piece = choice["delta"].get("content") or ""
                    pieces.append(piece)
                    click.echo(piece, nl=False)
    except KeyboardInterrupt:
        pass
    finally:
        response.close()
    click.echo()
    return "".join(pieces)


def _post(
    host: str, port: int, body: dict[str, Any], timeout: float | None, api_key: str | None = None
) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(host, port, timeout=timeout)
    # Closing: the response owns the connection, and ends it.
    headers = {"content-type": "application/json", "connection": "close"}
    if api_key is not None:
        headers["authorization"] = f"Bearer {api_key}"
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    return connection.getresponse()


def _error_message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")


def _reachable(host: str) -> str:
    """An address a client on this machine can use for a server that listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)


def _checked(path: Path, with_serve: bool) -> config.OurParts:
    try:
        raw = config.read(path)
        faults: list[str] = []
        parts = None
        for step in (config.our_parts, config.serve_part) if with_serve else (config.our_parts,):
            try:
                result = step(raw)
            except settings.ConfigError as error:
                faults.extend(str(error).splitlines())
            else:
                parts = result if isinstance(result, config.OurParts) else parts
        if faults or parts is None:
            raise settings.ConfigError("\n".join(dict.fromkeys(faults)))  # once each: both read the address
        return parts
    except settings.ConfigError as error:
        fail(f"{path} cannot be used:\n{error}", code=2)


main.add_command(bench)


if __name__ == "__main__":
    main()
