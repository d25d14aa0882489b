"""A headless Chromium, driven over its DevTools protocol: as much of it as the tests of the page need."""

from __future__ import annotations

import base64
import itertools
import json
import shutil
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from websockets.sync.client import connect

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
"""None where there is none."""

WITHIN_S = 60.0


class Chromium:
    """One tab. `errors` are what the page logged as an error, or threw."""

    def __init__(self, profile: Path) -> None:
        assert PROGRAM is not None
        self.errors: list[str] = []
        self._ids = itertools.count(1)
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        self._process = subprocess.Popen(
            [PROGRAM, *options, "--window-size=1000,900", "--remote-debugging-port=0", f"--user-data-dir={profile}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._closing = ExitStack()
        try:
            self._socket = self._closing.enter_context(connect(self._address(profile), max_size=None, proxy=None))
            target = self._call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log"):
                self._call(f"{domain}.enable")
        except BaseException:
            self.close()
            raise

    _session: str | None = None

    def _address(self, profile: Path) -> str:
        port_file, ends = profile / "DevToolsActivePort", time.monotonic() + WITHIN_S
        while not (port_file.exists() and len(port_file.read_text().splitlines()) == 2):
            assert time.monotonic() < ends and self._process.poll() is None, "Chromium does not start"
            time.sleep(0.05)
        port, path = port_file.read_text().splitlines()
        return f"ws://127.0.0.1:{port}{path}"

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        id_ = next(self._ids)
        message: dict[str, Any] = {"id": id_, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._socket.send(json.dumps(message))
        while True:
            answer = json.loads(self._socket.recv(timeout=WITHIN_S))
            if answer.get("id") == id_:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _note(self, event: dict[str, Any]) -> None:
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(str(event["params"]["exceptionDetails"]))
            case "Log.entryAdded" if event["params"]["entry"]["level"] == "error":
                self.errors.append(event["params"]["entry"]["text"])

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, script: str) -> Any:
        """Until the expression is true; its value."""
        ends = time.monotonic() + WITHIN_S
        while not (value := self.run(script)):
            assert time.monotonic() < ends, f"never true: {script}\n{self.run('document.body.innerText')}"
            time.sleep(0.05)
        return value

    def type(self, text: str) -> None:
        self._call("Input.insertText", text=text)

    def press_enter(self) -> None:
        key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13}
        self._call("Input.dispatchKeyEvent", type="keyDown", text="\r", **key)
        self._call("Input.dispatchKeyEvent", type="keyUp", **key)

    def screenshot(self, file: Path) -> bytes:
        """The tab as PNG, kept in `file` for a person to look at."""
        image = base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"])
        file.write_bytes(image)
        return image

    def close(self) -> None:
        self._closing.close()
        self._process.kill()
        self._process.wait()
