"""A real server for the sandbox tests, and blocking calls to it."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox.base import ExecResult, SandboxError, Unsupported
from sandbox.client import SandboxClient
from sandbox.docker import DockerConfig, connect, find_image

BACKENDS = ("zygote", "docker")
"""The backends of the conformance suite. SANDBOX_BACKENDS, a list with commas, names those that must not be skipped."""
REQUIRED = os.environ.get("SANDBOX_BACKENDS", "zygote").split(",")
LIMITS = {"memory_mb": 64, "tmp_mb": 4, "wall_s": 20.0, "max_processes": 8, "max_output_bytes": 2000}
CONFIG = {"max_sessions": 40, "warm_sessions": 2, "preload": ["math"], "limits": LIMITS}


class Server:
    """A server process. Its address is on the one line that it prints."""

    prefix: tuple[str, ...] = ()
    """A command that runs the server's command line; empty runs it directly."""

    def __init__(self, path: Path, config: dict[str, Any], *flags: str, **environment: str) -> None:
        path.write_text(json.dumps(config))
        command = [*self.prefix, sys.executable, "-m", "sandbox.server", "--port", "0", "--config", str(path), *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment})
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()
        self.url = self.line.removeprefix("sandbox: listening on ").strip()

    def descendants(self) -> list[int]:
        """Every living process below the server, sessions included."""
        parents = {}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit():
                    state, parent, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
                    parents[int(entry.name)] = int(parent) if state != "Z" else 0
        found, frontier = [], [self.process.pid]
        while frontier:
            frontier = [child for child, parent in parents.items() if parent in frontier]
            found += frontier
        return found

    def stop(self) -> int:
        self.process.terminate()
        code = self.process.wait(60)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


class Box:
    """Blocking calls to one server, on an event loop of its own."""

    def __init__(self, url: str, token: str | None = None, open_wait_s: float = 60.0) -> None:
        self.runner = asyncio.Runner()
        self.client = SandboxClient(url, token, open_wait_s)

    def wait(self, call: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(call)

    def open(self) -> str:
        return str(self.wait(self.client.open()))

    def exec(
        self, session_id: str, code: str, wall_s: float | None = None, max_output_bytes: int | None = None
    ) -> ExecResult:
        result = self.wait(self.client.exec(session_id, code, wall_s, max_output_bytes))
        assert isinstance(result, ExecResult)
        return result

    def put(self, session_id: str, name: str, content: bytes) -> None:
        self.wait(self.client.put_file(session_id, name, content))

    def get(self, session_id: str, name: str) -> bytes:
        content = self.wait(self.client.get_file(session_id, name))
        assert isinstance(content, bytes)
        return content

    def end(self, session_id: str) -> None:
        self.wait(self.client.close_session(session_id))

    def run(self, code: str, wall_s: float | None = None) -> ExecResult:
        """Run `code` in a session of its own."""
        session_id = self.open()
        result = self.exec(session_id, code, wall_s)
        try:
            self.end(session_id)
        except SandboxError:
            assert not result.alive
        return result

    def close(self) -> None:
        self.wait(self.client.aclose())
        self.runner.close()


@contextlib.contextmanager
def running(started: Server) -> Iterator[Server]:
    """A server that ends well when it is stopped."""
    yield started
    assert started.stop() == 0


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(Server(tmp_path_factory.mktemp("server") / "config.json", CONFIG)) as started:
        yield started


@pytest.fixture(scope="session")
def box(server: Server) -> Iterator[Box]:
    with contextlib.closing(Box(server.url)) as made:
        yield made


def require(backend: str) -> None:
    """Skip the test, with the reason, if `backend` cannot run here; fail it if SANDBOX_BACKENDS names it."""
    if backend != "docker":
        return
    try:
        client = connect()
        find_image(client, DockerConfig().image)
        client.close()
    except Unsupported as error:
        (pytest.fail if "docker" in REQUIRED else pytest.skip)(str(error))


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., tuple[Server, Box]]]:
    """Start a server of a test's own: `serve(config, *flags, **environment)`."""
    started: list[tuple[Server, Box]] = []

    def start(config: dict[str, Any], *flags: str, **environment: str) -> tuple[Server, Box]:
        one = Server(tmp_path / f"config{len(started)}.json", config, *flags, **environment)
        started.append((one, Box(one.url, environment.get("SANDBOX_TOKEN"), open_wait_s=0.0)))
        return started[-1]

    yield start
    for one, own_box in started:
        own_box.close()
        one.stop()


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    require(request.param)
    return str(request.param)


@pytest.fixture(scope="module")
def backend_server(backend: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(Server(tmp_path_factory.mktemp("server") / "config.json", {"type": backend, **CONFIG})) as started:
        yield started


@pytest.fixture(scope="module")
def backend_box(backend_server: Server) -> Iterator[Box]:
    with contextlib.closing(Box(backend_server.url)) as made:
        yield made
