"""The tool server of a run: started and kept alive by it, or one that is already there."""

import os
import subprocess
import sys
import tempfile
import threading
from types import TracebackType
from typing import IO, Self

import httpx
import yaml

from agent_rl.config import SandboxConfig

TOKEN_VARIABLE = "SANDBOX_TOKEN"
_READY = "sandbox: listening on "
_MAX_RESTARTS = 5


class ToolServer:
    """Context manager around `python -m sandbox.server`; `url` is where tools find it.

    Raises `ValueError` if a configured server does not answer, or if none can be started, with the reason.
    """

    def __init__(self, config: SandboxConfig) -> None:
        self.config = config
        self.url = config.url or ""
        self.num_restarts = 0
        self.process: subprocess.Popen[str] | None = None
        # The run's own server is on loopback and needs none; one that was there before may.
        self.token = os.environ.get(TOKEN_VARIABLE) if config.url else None

    def __enter__(self) -> Self:
        if self.config.url is None:
            self.url = self._start(port=0)
        else:
            self._check_foreign()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self.process.kill()

    def check(self) -> None:
        """Start the run's own server again, on the same port, if it has died. Raises after too many times."""
        if self.process is None or self.process.poll() is None:
            return
        if self.num_restarts == _MAX_RESTARTS:
            raise ValueError(f"the tool server died {_MAX_RESTARTS + 1} times; see its messages above")
        self.num_restarts += 1
        print("the tool server died; starting it again, its episodes are issued again", file=sys.stderr)
        self._start(port=int(self.url.rpartition(":")[2]))

    def _start(self, port: int) -> str:
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            yaml.safe_dump(self.config.server.model_dump(mode="json"), file)
            file.flush()
            return self._launch(["--port", str(port), "--config", file.name, "--die-with-parent"])

    def _launch(self, options: list[str]) -> str:
        """Start the server process; returns its address once it listens, having read its config."""
        command = [sys.executable, "-m", "sandbox.server", *options]
        environment = {name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE}
        # A session of its own: Ctrl-C in the terminal is for the run, which ends the server when it is done.
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, start_new_session=True, env=environment
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line.startswith(_READY):
            raise ValueError(f"the tool server did not start (exit code {self.process.wait()}); its reason is above")
        threading.Thread(target=_drain, args=(self.process.stdout,), daemon=True).start()
        return line.removeprefix(_READY).strip()

    def _check_foreign(self) -> None:
        try:
            headers = {"authorization": f"Bearer {self.token}"} if self.token else {}
            httpx.get(f"{self.url}/health", timeout=5, headers=headers).raise_for_status()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ValueError(
                f"no tool server answers at {self.url} ({error}); start one with `python -m sandbox.server` "
                f"or set sandbox.url to null; if it asks for a token, set {TOKEN_VARIABLE}"
            ) from None


def _drain(pipe: IO[str]) -> None:
    """Keep a pipe empty until its other end closes."""
    with pipe:
        for _ in pipe:
            pass
