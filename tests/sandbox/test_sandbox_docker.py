"""What is Docker's own: what the daemon was told, whose containers are removed when, and what is refused."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox import contained
from sandbox.base import Reason, SessionLost, Unavailable
from sandbox.docker import DockerChannel, DockerConfig, connect, container_options
from sandbox.image import write_tar
from sandbox.owners import LABEL, Owner
from tests.sandbox.conftest import require
from tests.sandbox.test_sandbox_server import eventually, refusal

SMALL = {"type": "docker", "max_sessions": 3, "warm_sessions": 0}


@pytest.fixture(scope="module")
def daemon() -> Iterator[Any]:
    require("docker")
    client = connect()
    yield client
    client.close()


def owned_by(daemon: Any, pid: int) -> list[str]:
    """Containers, running or not, of the server `pid`."""
    found = daemon.api.containers(all=True, filters={"label": LABEL})
    return [one["Id"] for one in found if Owner.parse(one["Labels"][LABEL]).pid == pid]  # type: ignore[union-attr]


def refused(tmp_path: Path, config: str, **environment: str) -> str:
    path = tmp_path / "docker.yaml"
    path.write_text(config)
    return refusal("--config", str(path), **environment)


def test_no_daemon_no_server(tmp_path: Path) -> None:
    said = refused(tmp_path, "type: docker", DOCKER_HOST="unix:///nonexistent/docker.sock")
    assert "no Docker daemon answers at unix:///nonexistent/docker.sock" in said
    assert "set DOCKER_HOST" in said


def test_a_daemon_that_cannot_be_attached_to_is_refused(tmp_path: Path) -> None:
    assert "unix or plain tcp socket only" in refused(tmp_path, "type: docker", DOCKER_HOST="ssh://somewhere")


def test_no_sdk_no_server(tmp_path: Path) -> None:
    (tmp_path / "docker").mkdir()
    (tmp_path / "docker" / "__init__.py").write_text("raise ImportError('as if it were not installed')")
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    assert "pip install docker" in refused(tmp_path, "type: docker", PYTHONPATH=path)


def test_an_unknown_backend_is_one_sentence(tmp_path: Path) -> None:
    assert "`type` is zygote (the default) or docker" in refused(tmp_path, "type: podman")
    assert "`limits.memory`" in refused(tmp_path, "{type: docker, limits: {memory: 3}}")


def test_no_image_no_server(daemon: Any, tmp_path: Path) -> None:
    said = refused(tmp_path, "{type: docker, image: no-such-image}")
    assert "no image no-such-image" in said
    assert "python -m sandbox.image" in said


def test_an_image_of_another_version_is_refused(daemon: Any, tmp_path: Path) -> None:
    image = DockerConfig().image
    container = daemon.api.create_container(image, ["{}"])
    try:
        daemon.api.commit(container, "agent-rl-test-old", changes=["ENV PYTHONPATH=/packages"])
        said = refused(tmp_path, "{type: docker, image: agent-rl-test-old, warm_sessions: 0}")
        assert "python -m sandbox.image" in said
    finally:
        daemon.api.remove_container(container)
        daemon.api.remove_image("agent-rl-test-old")
    lacking = refused(tmp_path, "{type: docker, packages: [sympy, torch], warm_sessions: 0}")
    assert "lacks one of sympy, torch" in lacking


def test_the_daemon_holds_the_hardening_that_was_asked_for(daemon: Any, serve: Any) -> None:
    server, box = serve({**SMALL, "limits": {"memory_mb": 64, "tmp_mb": 4, "max_processes": 8}})
    box.open()
    (container_id,) = owned_by(daemon, server.process.pid)
    known = daemon.api.inspect_container(container_id)
    host = known["HostConfig"]
    assert known["Config"]["User"] == "65534:65534"
    assert (host["NetworkMode"], host["IpcMode"], host["ReadonlyRootfs"]) == ("none", "none", True)
    assert (host["CapDrop"], host["CapAdd"], host["SecurityOpt"]) == (["ALL"], None, ["no-new-privileges"])
    assert (host["Privileged"], host["Binds"], known["Mounts"]) == (False, None, [])
    assert host["Memory"] == host["MemorySwap"] == (64 + 4 + 16) << 20
    assert (host["PidsLimit"], host["NanoCpus"], host["LogConfig"]["Type"]) == (8, 10**9, "none")
    assert {one["Name"]: one["Hard"] for one in host["Ulimits"]} == {"nofile": 256, "core": 1}
    assert set(host["Tmpfs"]) == {"/tmp", "/dev/shm"}
    assert all("noexec,nosuid,nodev,size=4m" in options for options in host["Tmpfs"].values())


def test_the_container_holds_nothing_of_the_host(daemon: Any, serve: Any) -> None:
    _, box = serve(SMALL)
    session = box.open()
    assert (
        box.exec(
            session, "import os; print('accounts:', 'no' if not os.path.exists('/etc/passwd') else 'yes')"
        ).stdout.strip()
        == "accounts: no"
    )
    assert box.exec(session, "open('/etc/resolv.conf').read()").value == "'nameserver 127.0.0.1\\n'"
    assert box.exec(session, "[n for n in os.environ if 'DOCKER' in n or 'TOKEN' in n]").value == "[]"
    assert box.exec(session, "os.access('/bin/sh', os.X_OK)").value == "False"


def test_terminated_it_leaves_no_container(daemon: Any, serve: Any) -> None:
    server, box = serve({**SMALL, "warm_sessions": 2})
    box.open()
    assert len(owned_by(daemon, server.process.pid)) >= 2
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(20) == 0
    assert owned_by(daemon, server.process.pid) == []
    with pytest.raises(Unavailable, match="cannot be reached"):
        box.open()


def test_killed_it_leaves_no_container_and_a_new_one_has_lost_the_sessions(daemon: Any, serve: Any) -> None:
    server, box = serve(SMALL)
    _, other_box = serve(SMALL)
    session, others = box.open(), other_box.open()
    other_box.exec(others, "x = 'unharmed'")
    box.exec(session, "import signal; _ = signal.signal(signal.SIGALRM, signal.SIG_IGN)")
    server.process.kill()
    server.process.wait(10)
    assert eventually(lambda: owned_by(daemon, server.process.pid) == [], 20.0)
    again, _ = serve(SMALL, "--port", server.url.rpartition(":")[2])
    assert again.url == server.url
    with pytest.raises(SessionLost):
        box.exec(session, "1")
    assert box.run("1 + 1").value == "2"
    assert other_box.exec(others, "x").value == "'unharmed'"


def test_what_a_killed_server_and_its_reaper_left_is_removed_by_the_next(daemon: Any, serve: Any) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    dead = Owner.this_process()._replace(pid=ended.pid, started=1)
    alive = Owner.this_process()
    foreign = dead._replace(boot="another-machine")
    made = {}
    for owner in (dead, alive, foreign):
        made[owner] = daemon.containers.create(**container_options(DockerConfig(), str(owner))).id
    try:
        serve(SMALL)
        left = {one["Id"] for one in daemon.api.containers(all=True, filters={"label": LABEL})}
        assert made[dead] not in left
        assert {made[alive], made[foreign]} <= left
    finally:
        for owner in (alive, foreign):
            daemon.api.remove_container(made[owner], force=True)


def test_a_container_that_is_killed_from_outside_loses_that_session_only(daemon: Any, serve: Any) -> None:
    server, box = serve(SMALL)
    first = box.open()
    (container_id,) = owned_by(daemon, server.process.pid)
    second = box.open()
    daemon.api.kill(container_id)
    time.sleep(0.5)
    result = box.exec(first, "1")
    assert (result.reason, result.alive) == (Reason.EXIT, False)
    assert box.exec(second, "6 * 7").value == "42"
    assert eventually(lambda: container_id not in owned_by(daemon, server.process.pid))


def test_the_dockerfile_copies_what_a_session_runs() -> None:
    text = Path(contained.__file__).with_name("Dockerfile").read_text()
    assert set(re.findall(r"sandbox/(\w+)\.py", text)) == set(contained.SOURCES)


def test_the_image_holds_python_and_packages_and_nothing_else(tmp_path: Path) -> None:
    with (tmp_path / "root.tar").open("w+b") as file:
        write_tar(file, ("mpmath",))
        file.seek(0)
        with tarfile.open(fileobj=file) as tar:
            entries = {entry.name: entry for entry in tar.getmembers()}
    assert entries["tmp"].mode == 0o1777
    assert {entry.uid for entry in entries.values()} == {0}
    assert not any(entry.mode & 0o6022 for name, entry in entries.items() if name != "tmp")
    assert {"python/bin/python3", "packages/mpmath/__init__.py", "own/sandbox/cell.py"} <= set(entries)
    assert any(name.startswith("python/libraries/libc.so") for name in entries)
    outside = ("python/", "packages/mpmath/", "own/sandbox/", "lib")
    files = [name for name, entry in entries.items() if entry.isreg()]
    assert [name for name in files if not name.startswith(outside) or "/site-packages/" in name] == []


def test_pieces_of_the_stream_may_be_cut_anywhere() -> None:
    body = b'{"ready": true}'
    frame = len(body).to_bytes(4, "big") + body
    wrapped = b"".join(b"\1\0\0\0" + len(piece).to_bytes(4, "big") + piece for piece in (frame[:3], frame[3:]))

    async def received(step: int) -> bool:
        ours, theirs = socket.socketpair()
        with theirs:
            channel = await DockerChannel.connect(ours, 64, lambda: None)
            for start in range(0, len(wrapped), step):
                theirs.send(wrapped[start : start + step])
                await asyncio.sleep(0)
            ready = (await channel.ready()).ready
            channel.close()
            return ready

    for step in range(1, len(wrapped) + 1):
        assert asyncio.run(received(step))


def test_an_owner_reads_back_and_is_alive_while_its_process_is() -> None:
    here = Owner.this_process()
    assert Owner.parse(str(here)) == here
    assert Owner.parse("something else") is None
    assert not here.sees_dead(here)
    assert here.sees_dead(here._replace(started=here.started + 1))  # its pid is another process's now
    assert not here.sees_dead(here._replace(started=1, namespace="1"))
