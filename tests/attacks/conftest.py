"""Servers to attack, one a backend, and the session of someone else that must come to no harm.

SANDBOX_BACKENDS, a list with commas, names the backends; by default it is what runs without a daemon.
"""

import asyncio
import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pytest

from sandbox.base import ExecResult, SessionLost
from tests.sandbox.conftest import CONFIG, Box, Server

ALIVE = "sum(range(10))"


class WithoutCgroups(Server):
    """A server that finds no cgroup file system, so that it has to do with limits a process."""

    prefix = ("unshare", "--mount", "sh", "-c", 'umount --lazy --recursive /sys/fs/cgroup && exec "$@"', "sh")


BACKENDS: dict[str, tuple[type[Server], dict[str, Any]]] = {
    "zygote": (Server, CONFIG),
    "zygote-rlimits": (WithoutCgroups, CONFIG),
    "docker": (Server, {**CONFIG, "type": "docker"}),
}
CHOSEN = os.environ.get("SANDBOX_BACKENDS", "zygote").split(",")
# for limits that are kept by other means without a cgroup: parametrize("attacked", LIMITED, indirect=True)
LIMITED = [*CHOSEN, *(["zygote-rlimits"] if "zygote" in CHOSEN else [])]


class Attacked(Box):
    """Blocking calls to a server under attack, and the server itself."""

    def __init__(self, server: Server) -> None:
        super().__init__(server.url)
        self.server = server

    def drop(self, session: str) -> None:
        """End a session that its code may have ended already."""
        with contextlib.suppress(SessionLost):
            self.end(session)

    def run_all(self, codes: dict[str, str], wall_s: float) -> dict[str, ExecResult]:
        """Run each of `codes` in a session of its own, all at the same time."""

        async def run(code: str) -> ExecResult:
            session = await self.client.open()
            result = await self.client.exec(session, code, wall_s)
            with contextlib.suppress(SessionLost):
                await self.client.close_session(session)
            return result

        async def all_of_them() -> list[ExecResult]:
            return await asyncio.gather(*map(run, codes.values()))

        return dict(zip(codes, self.wait(all_of_them()), strict=True))


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Attacked]]:
    """Servers by the name of their backend, each started when a test first asks for it."""
    started: dict[str, Attacked] = {}
    yield started
    for attacked in started.values():
        attacked.close()
        assert attacked.server.stop() == 0


def _served(name: str, servers: dict[str, Attacked], folders: pytest.TempPathFactory) -> Attacked:
    if name not in servers:
        if name == "zygote-rlimits" and os.geteuid() != 0:
            pytest.skip("only root can hide the cgroups from a server")
        kind, config = BACKENDS[name]
        servers[name] = Attacked(kind(folders.mktemp(name) / "config.json", config))
    return servers[name]


def _survives(attacked: Attacked) -> Iterator[Attacked]:
    """Lend a server to a test; afterwards it must answer, in a new session too, and hold no session of the test."""
    before = attacked.wait(attacked.client.health())
    yield attacked
    assert attacked.server.process.poll() is None
    assert attacked.run(ALIVE).value == "45"
    after = attacked.wait(attacked.client.health())
    assert (after["status"], after["open_sessions"]) == ("ok", before["open_sessions"])


@pytest.fixture(params=CHOSEN)
def attacked(
    request: pytest.FixtureRequest, servers: dict[str, Attacked], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Attacked]:
    """A server of each backend."""
    yield from _survives(_served(request.param, servers, tmp_path_factory))


@pytest.fixture
def zygote(servers: dict[str, Attacked], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    """A server of the zygote backend, for attacks on its own means."""
    if "zygote" not in CHOSEN:
        pytest.skip("SANDBOX_BACKENDS leaves the zygote out")
    yield from _survives(_served("zygote", servers, tmp_path_factory))


@pytest.fixture
def bystander(attacked: Attacked) -> Iterator[str]:
    """A session of someone else, with a variable and files; unharmed at the end."""
    session = attacked.open()
    made = "secret = 'mine'\nfor folder in ('/tmp', '/dev/shm'): _ = open(folder + '/secret', 'w').write(secret)"
    assert attacked.exec(session, made).error is None
    yield session
    kept = attacked.exec(session, "[secret] + [open(f + '/secret').read() for f in ('/tmp', '/dev/shm')]")
    assert kept.value == "['mine', 'mine', 'mine']"
    attacked.end(session)
