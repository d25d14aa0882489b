"""`tokenyard bench` against a server of its own: ours with a fake engine, and some that are no good."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from click.testing import CliRunner, Result

from deployments.bench.dialects import Dialect
from deployments.cli import main
from tests.deployments.local_server import LocalServer, free_port

FAKE: dict[str, Any] = {"kind": "fake", "slots": 4, "inter_token_s": 0.003}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    failing = {**FAKE, "fail_at": {"after_tokens": 2, "kind": "overloaded"}}
    refusing = {**FAKE, "fail_at": {"kind": "overloaded"}}
    hanging = {**FAKE, "fail_at": {"after_tokens": 2, "action": "hang"}}
    models = {"good": FAKE, "failing": failing, "refusing": refusing, "hanging": hanging}
    running = LocalServer(tmp_path_factory.mktemp("server"), models)
    yield running
    running.stop()


def run(*args: object, exit_code: int = 0) -> Result:
    result = CliRunner().invoke(main, ["bench", *map(str, args)])
    assert result.exit_code == exit_code, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    return result


def report(server: LocalServer, *args: object, exit_code: int = 0) -> dict[str, Any]:
    url = f"http://127.0.0.1:{server.port}"
    result = run(url, "--requests", 6, "--max-tokens", 5, "--json", "-", *args, exit_code=exit_code)
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.mark.parametrize("dialect", get_args(Dialect))
def test_every_dialect_is_asked_and_read(server: LocalServer, dialect: str) -> None:
    found = report(server, "--model", "good", "--dialect", dialect, "--prompt-words", 10)["summary"]
    assert (found["requests"], found["answered"], found["tokens"]) == (6, 6, 30)
    assert found["prompt_tokens"] >= 60
    assert 0 < found["first_output"]["p50"] <= found["whole_answer"]["p50"]
    assert found["per_token"]["p50"] > 0


def test_a_rate_sends_by_the_clock(server: LocalServer) -> None:
    found = report(server, "--model", "good", "--rate", 50, "--seed", 2)
    due = sorted(request["due"] for request in found["requests"])
    assert due[0] == 0.0 and len(set(due)) == 6
    assert all(request["sent"] > request["due"] - 0.05 for request in found["requests"])  # timers are no sharper


def test_a_duration_ends_the_sending(server: LocalServer) -> None:
    url = f"http://127.0.0.1:{server.port}"
    result = run(url, "--model", "good", "--duration", 0.3, "--rate", 30, "--max-tokens", 2)
    assert " 0 failed" in result.stdout and "tokens/s" in result.stdout


def test_a_dataset_is_asked_over_and_over(server: LocalServer, tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"prompt": "a b c"}\n{"prompt": "a b c", "max_tokens": 2}\n')
    found = report(server, "--model", "good", "--dataset", path, "--dialect", "completions", "--warm-up", 0)["summary"]
    assert (found["tokens"], found["prompt_tokens"]) == (3 * 5 + 3 * 2, 6 * 3)


def test_a_plot_is_written(server: LocalServer, tmp_path: Path) -> None:
    report(server, "--model", "good", "--plot", tmp_path / "p.svg")
    assert (tmp_path / "p.svg").read_text().startswith("<svg")


@pytest.mark.parametrize("dialect", get_args(Dialect))
@pytest.mark.parametrize(("model", "begins"), [("failing", "stream error "), ("refusing", "HTTP ")])
def test_errors_are_counted_by_their_kind(server: LocalServer, dialect: str, model: str, begins: str) -> None:
    found = report(server, "--model", model, "--dialect", dialect, exit_code=1)["summary"]
    (failure,) = found["failures"]
    assert failure["count"] == 6 and failure["kind"].startswith(begins)
    assert found["answered"] == found["tokens"] == 0


def test_an_answer_that_does_not_end_times_out(server: LocalServer) -> None:
    found = report(server, "--model", "hanging", "--timeout", 0.3, "--requests", 2, "--warm-up", 0, exit_code=1)
    assert [(failure["kind"], failure["count"]) for failure in found["summary"]["failures"]] == [("timed out", 2)]
    assert all(request["outputs"] == 2 for request in found["requests"])


def test_a_model_must_be_named_where_there_are_several(server: LocalServer) -> None:
    result = run(f"http://127.0.0.1:{server.port}/v1", exit_code=1)
    assert "--model: failing, good, hanging, refusing" in result.stderr


def test_nobody_at_home() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    assert "cannot list the models" in run(url, exit_code=1).stderr
    assert "2  cannot connect" in run(url, "--model", "m", "--requests", 2, exit_code=1).stdout


def test_a_rate_and_a_concurrency_contradict() -> None:
    assert "exclude each other" in run("http://h", "--rate", 1, "--concurrency", 1, exit_code=2).stderr


def test_extra_fields_are_an_object() -> None:
    assert "not a JSON object" in run("http://h", "--extra", "[1]", exit_code=2).stderr


class Elsewhere(http.server.BaseHTTPRequestHandler):
    """A server of another make, with one model: its first answer is cut off, then it streams no more."""

    def do_GET(self) -> None:
        self._send("application/json", b'{"data": [{"id": "other/model"}]}')

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        chunk = b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'
        kinds = {b"0": ("text/event-stream", chunk), b"1": ("text/event-stream", b"data: {\n\n")}
        self._send(*kinds.get(b"%d" % len(self.asked), ("text/html", b"<html>")))
        self.asked.append(self.path)

    asked: list[str] = []

    def _send(self, kind: str, data: bytes) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_what_is_no_whole_stream_is_a_failure_of_its_kind() -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere) as other:
        threading.Thread(target=other.serve_forever).start()
        try:
            url = f"http://127.0.0.1:{other.server_port}"
            result = run(url, "--requests", 3, "--concurrency", 1, "--warm-up", 0, exit_code=1)
        finally:
            other.shutdown()
    assert Elsewhere.asked == ["/v1/chat/completions"] * 3
    for kind in ("cut off", "malformed event", "no stream: the answer is text/html"):
        assert f"     1  {kind}" in result.stdout
