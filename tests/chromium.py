"""A page in headless Chromium, driven through the DevTools protocol over a pipe: no dependency, no port."""

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

EXECUTABLE = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_WAIT_S = 300.0
_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
)


class Page:
    """One page. `errors` collects what its console complains of and every exception that it does not catch.

    `requests`: the addresses that it asked for.
    """

    def __init__(self, profile: Path, width: int = 1280, height: int = 900) -> None:
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._number, self._buffer, self._session = 0, b"", ""
        command_read, self._command = os.pipe()
        self._events, events_write = os.pipe()
        # Chromium reads commands on descriptor 3 and writes to 4.
        wiring = f'exec "$@" 3<&{command_read} 4>&{events_write}'
        flags = [*_FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}", "--remote-debugging-pipe"]
        self._process = subprocess.Popen(
            ["bash", "-c", wiring, "bash", str(EXECUTABLE), *flags, "about:blank"],
            pass_fds=(command_read, events_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(command_read)
        os.close(events_write)

    def __enter__(self) -> Self:
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._command)  # Chromium ends when its pipe does
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._events)

    def open(self, url: str, until: str) -> float:
        """Go to `url` and wait until the expression `until` is true; seconds that took."""
        started = time.monotonic()
        self.call("Page.navigate", url=url)
        self.wait_for(until)
        return time.monotonic() - started

    def wait_for(self, expression: str) -> None:
        deadline = time.monotonic() + _WAIT_S
        while not self.evaluate(f"Boolean({expression})"):
            assert time.monotonic() < deadline, f"{expression} stayed false; the page says {self.errors}"
            time.sleep(0.05)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; None while the page has none, as between two pages."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        return result.get("result", {}).get("value")

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def size(self, width: int, height: int, dark: bool = False) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)

    def call(self, method: str, **parameters: Any) -> Any:
        """The result of a DevTools command; events that come before it are noted."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._command, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self._note(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            chunk = os.read(self._events, 1 << 16)
            assert chunk, "Chromium ended"
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))

    def _note(self, event: dict[str, Any]) -> None:
        method, parameters = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(str(parameters["exceptionDetails"].get("exception", parameters)))
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.errors.append(str(parameters["args"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.errors.append(str(parameters["entry"]["text"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
