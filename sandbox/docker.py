"""Sessions in Docker containers, one each, for hosts where a Docker engine is what may isolate.

A container is slow to start (about a second), so some are kept ready. A session speaks the zygote's protocol
over the container's standard input and output, to which this process stays attached; `contained.py` is the
other end. All calls to the daemon block, and so run in threads.
"""

import asyncio
import contextlib
import functools
import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

from pydantic import Field

from sandbox import contained
from sandbox.base import SessionLost, Unavailable, Unsupported
from sandbox.channel import Channel
from sandbox.inside_files import WORKING_DIRECTORY
from sandbox.owners import LABEL, Owner
from sandbox.pool import PoolConfig, Session, SessionPool

_DEFAULT_HOST = "unix:///var/run/docker.sock"
_NOBODY = "65534:65534"
_STARTS_AT_ONCE = 4
_CALLS_AT_ONCE = 8
_INTERPRETER_MB = 16
_HEADER = 8
_WAIT_S = 10
_ENVIRONMENT = {
    "PYTHONHASHSEED": "0",  # sets print in the same order in every session
    "PYTHONDONTWRITEBYTECODE": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}
_MAKE_IT = "make it with `python -m sandbox.image`, or from sandbox/Dockerfile"

P = ParamSpec("P")
R = TypeVar("R")


class DockerConfig(PoolConfig):
    """Sessions in containers of a Docker engine: about a second for a new one that is not kept ready."""

    type: Literal["docker"] = "docker"
    image: str = "agent-rl-sandbox:latest"
    """The image of the containers; `python -m sandbox.image` makes it."""
    cpus: float = Field(default=1.0, gt=0)
    """CPUs that one session may use at a time."""
    max_sessions: int = Field(default=128, ge=1)
    """Open sessions at one time; a further `open` raises `Unavailable`."""
    warm_sessions: int = Field(default=8, ge=0)
    """Containers kept ready, so that `open` need not wait until one has started."""


@dataclass(eq=False, kw_only=True)
class DockerSession(Session):
    """A container by its id."""

    container_id: str


class DockerChannel(Channel):
    """A channel through the daemon, which puts a header of 8 bytes before each piece of a container's output.

    The header (https://docs.docker.com/reference/api/engine: attach) is the stream, three zeros, and the
    length of the piece; only standard output is attached.
    """

    def __init__(self, max_output_bytes: int, on_broken: Callable[[], None]) -> None:
        super().__init__(max_output_bytes, on_broken)
        self._header = bytearray()
        self._left = 0

    def data_received(self, data: bytes) -> None:
        while data:
            if self._left:
                piece, data = data[: self._left], data[self._left :]
                self._left -= len(piece)
                super().data_received(piece)
                continue
            missing = _HEADER - len(self._header)
            self._header += data[:missing]
            data = data[missing:]
            if len(self._header) == _HEADER:
                (self._left,) = struct.unpack_from("!I", self._header, 4)
                self._header.clear()


def connect() -> Any:
    """A client of the daemon that DOCKER_HOST names. Raises `Unsupported` with what is missing."""
    try:
        import docker
        from docker.errors import DockerException
    except ImportError as error:
        raise Unsupported("the docker backend needs Docker's Python SDK: pip install docker") from error
    where = os.environ.get("DOCKER_HOST") or _DEFAULT_HOST
    if not where.startswith(("unix:", "tcp:")) or os.environ.get("DOCKER_TLS_VERIFY"):
        raise Unsupported(f"the docker backend attaches over a unix or plain tcp socket only, not over {where}")
    try:
        if where.startswith("unix:"):
            with socket.socket(socket.AF_UNIX) as probe:  # the SDK leaks its socket where this fails
                probe.connect(where.removeprefix("unix://"))
        client = docker.from_env(max_pool_size=_CALLS_AT_ONCE)
        client.ping()
    except (DockerException, OSError) as error:
        raise Unsupported(
            f"no Docker daemon answers at {where}: start one, let this user reach it, or set DOCKER_HOST"
        ) from error
    return client


def find_image(client: Any, name: str) -> None:
    """Check that the daemon has the image. Raises `Unsupported`, with the command that makes it, if not."""
    from docker.errors import ImageNotFound

    try:
        client.images.get(name)
    except ImageNotFound as error:
        raise Unsupported(f"the Docker daemon has no image {name}: {_MAKE_IT}") from error


def container_options(config: DockerConfig, owner: str) -> dict[str, Any]:
    """Everything that a container is told, the hardening above all; keywords of the SDK's `containers.create`."""
    from docker.types import LogConfig, Ulimit

    limits = config.limits
    memory = f"{limits.memory_mb + limits.tmp_mb + _INTERPRETER_MB}m"
    inside = {"preload": config.preload, "allow_fork": True} | limits.model_dump()
    return {
        "image": config.image,
        "command": [json.dumps(inside)],
        "stdin_open": True,
        "labels": {LABEL: owner},
        "hostname": "sandbox",
        "environment": _ENVIRONMENT,
        "user": _NOBODY,
        "working_dir": WORKING_DIRECTORY,
        "network_mode": "none",
        "dns": ["127.0.0.1"],  # instead of the host's own, which the container could read
        "ipc_mode": "none",
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges"],
        "pids_limit": limits.max_processes,
        "mem_limit": memory,
        "memswap_limit": memory,
        "nano_cpus": int(config.cpus * 1e9),
        "oom_score_adj": 500,
        "tmpfs": dict.fromkeys(
            ("/tmp", "/dev/shm"), f"rw,noexec,nosuid,nodev,size={limits.tmp_mb}m,nr_inodes=4096,mode=1777"
        ),
        "ulimits": [Ulimit(name="nofile", soft=256, hard=256), Ulimit(name="core", soft=1, hard=1)],
        # 1 byte: at 0 the kernel would still start a core handler of the host, see core(5)
        # what a session writes goes to this process alone, and never to the host's disk
        "log_config": LogConfig(type="none"),
    }


class DockerSandbox(SessionPool[DockerSession]):
    """Sessions in containers of the daemon that DOCKER_HOST names."""

    config: DockerConfig

    def __init__(self, config: DockerConfig) -> None:
        super().__init__(config)
        self._client: Any = None
        self._owner = Owner.this_process()
        self._options: dict[str, Any] = {}
        self._threads = ThreadPoolExecutor(_CALLS_AT_ONCE, "docker")
        self._starting = asyncio.Semaphore(_STARTS_AT_ONCE)
        self._ending: dict[str, asyncio.Task[None]] = {}
        self._reaper: subprocess.Popen[bytes] | None = None

    @property
    def limited_by(self) -> str:
        return "docker"

    async def _set_up(self) -> None:
        self._client = await self._call(connect)
        await self._call(find_image, self._client, self.config.image)
        await self._call(self._owner.sweep_dead, self._client)
        self._options = container_options(self.config, str(self._owner))
        self._reaper = subprocess.Popen(
            [sys.executable, "-m", "sandbox.owners", str(self._owner)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            cwd=Path(__file__).resolve().parent.parent,
        )

    async def _prove(self) -> None:
        try:
            await super()._prove()
        except Unsupported as error:
            hint = "" if _MAKE_IT in str(error) else f"; if the image {self.config.image} is an old one, {_MAKE_IT}"
            raise Unsupported(f"{error}{hint}") from error

    async def _check_first(self, session_id: str) -> None:
        lacking = f"[p for p in {self.config.packages!r} if importlib.util.find_spec(p) is None]"
        code = f"import importlib.util\nfrom sandbox.contained import digest\n[digest(), *{lacking}]"
        if (await self.exec(session_id, code)).value != repr([contained.digest()]):
            raise Unsupported(
                f"the image {self.config.image} is of another version of this package, or lacks one of "
                f"{', '.join(self.config.packages)}: {_MAKE_IT}"
            )

    async def _make(self) -> DockerSession:
        from docker.errors import DockerException

        if self._stopping:
            raise Unavailable("the sandbox is stopping")
        try:
            async with self._starting:
                container, end = await self._call(self._create)
                broken = functools.partial(self._on_broken, container.id)
                channel = await DockerChannel.connect(end, self.config.limits.max_output_bytes, broken)
                session = DockerSession(channel=channel, container_id=container.id)
                try:
                    await self._call(container.start)
                    await self._await_ready(channel)
                except BaseException:
                    self._end(session)
                    raise
        except (DockerException, OSError) as error:
            raise Unavailable(f"the Docker daemon could not make a container: {_one_line(error)}") from error
        return session

    def _create(self) -> tuple[Any, socket.socket]:
        """A container that has not started, and a socket to its standard input and output."""
        container = self._client.containers.create(**self._options)
        try:
            attached = container.attach_socket(params={"stdin": 1, "stdout": 1, "stream": 1})
            with contextlib.closing(attached):
                return container, socket.socket(fileno=os.dup(attached.fileno()))
        except BaseException:
            container.remove(force=True)
            raise

    async def _died_of_memory(self, session: DockerSession) -> bool:
        from docker.errors import DockerException

        def inspect() -> bool:
            self._client.api.wait(session.container_id, timeout=_WAIT_S)
            return bool(self._client.api.inspect_container(session.container_id)["State"]["OOMKilled"])

        try:
            return await self._call(inspect)
        except (DockerException, OSError) as error:
            raise SessionLost("the Docker daemon no longer knows the session's container, or is gone") from error

    def _on_broken(self, container_id: str) -> None:
        """Kill a container that broke its channel, unless it is being removed, which also closes the channel."""
        loop = asyncio.get_running_loop()
        loop.call_soon(
            lambda: container_id in self._ending or loop.run_in_executor(self._threads, self._stop_one, container_id)
        )

    def _stop_one(self, container_id: str) -> None:
        from docker.errors import DockerException

        with contextlib.suppress(DockerException, OSError):
            self._client.api.kill(container_id)

    def _kill(self, session: DockerSession) -> None:
        task = asyncio.get_running_loop().create_task(self._remove(session.container_id))
        self._ending[session.container_id] = task
        task.add_done_callback(lambda _: self._ending.pop(session.container_id, None))

    async def _remove(self, container_id: str) -> None:
        from docker.errors import DockerException

        with contextlib.suppress(DockerException, OSError):  # gone already, or the daemon is
            await self._call(self._client.api.remove_container, container_id, force=True)

    async def _tear_down(self) -> None:
        await asyncio.gather(*self._ending.values())
        if self._client is not None:
            with contextlib.suppress(OSError):  # the daemon is gone
                # no list has a container whose creation was interrupted
                await self._call(self._owner.sweep_own, self._client)
            self._client.close()
            self._client = None
        if self._reaper is not None:
            self._reaper.kill()
            self._reaper.wait()
            self._reaper = None

    async def _call(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        call = functools.partial(function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)


def _one_line(error: Exception) -> str:
    return " ".join(str(getattr(error, "explanation", None) or error).split())
