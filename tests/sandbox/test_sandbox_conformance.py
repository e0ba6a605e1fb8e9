"""What every backend must do alike: what a session does for code that means no harm, and for its end."""

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from sandbox.base import ExecResult, Reason, SessionLost
from sandbox.client import SandboxClient
from tests.sandbox.conftest import Box, Server, running

MANY = {"zygote": 64, "docker": 5}
NETWORK = {
    "socket": "import socket\nsocket.socket()",
    "url": "import urllib.request\nurllib.request.urlopen('http://example.com')",
    "name": "import socket\nsocket.getaddrinfo('example.com', 80)",
}


@pytest.fixture(scope="module")
def server(backend_server: Server) -> Server:
    return backend_server


@pytest.fixture(scope="module")
def box(backend_box: Box) -> Box:
    return backend_box


@pytest.fixture(scope="module")
def hasty(backend: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    """A server whose sessions have little time."""
    path: Path = tmp_path_factory.mktemp("hasty") / "config.json"
    limits = {"wall_s": 1.0, "idle_s": 3.0}
    config = {"type": backend, "max_sessions": 2, "warm_sessions": 0, "limits": limits}
    with running(Server(path, config)) as started, contextlib.closing(Box(started.url, open_wait_s=0.0)) as made:
        yield made


def test_variables_persist_within_a_session_and_only_there(box: Box) -> None:
    one, other = box.open(), box.open()
    assert box.exec(one, "x = 41").value is None
    assert box.exec(one, "x + 1").value == "42"
    assert box.exec(other, "x").error.endswith("NameError: name 'x' is not defined")
    box.end(one)
    box.end(other)


def test_stdout_stderr_and_value_are_apart(box: Box) -> None:
    result = box.run("import sys\nprint('out')\nprint('err', file=sys.stderr)\n'value'")
    assert (result.stdout, result.stderr, result.value) == ("out\n", "err\n", "'value'")
    assert (result.reason, result.error, result.truncated, result.alive) == (Reason.OK, None, False, True)
    assert 0 < result.duration_s < 20


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("1 / 0", "  line 1\nZeroDivisionError: division by zero"),
        ("def f():\n  return y\n\nf()", "  line 4\n  line 2, in f\nNameError: name 'y' is not defined"),
        ("x = 1\nx = = 2", "  line 2\nSyntaxError: invalid syntax"),
        ("import json\njson.loads('[')", "  line 2\nJSONDecodeError: Expecting value: line 1 column 2 (char 1)"),
        ("raise ValueError", "  line 1\nValueError"),
        ("input('x? ')", "  line 1\nEOFError: nobody can answer input() here: write the values into the code"),
        (
            "import sys\nfor line in sys.stdin: pass",
            "  line 2\nEOFError: nobody can answer input() here: write the values into the code",
        ),
        ("raise ValueError(chr(0xd800))", "  line 1\nValueError: \\ud800"),
        ("raise KeyboardInterrupt", "  line 1\nKeyboardInterrupt"),
    ],
)
def test_an_exception_is_a_result_that_names_the_users_lines(box: Box, code: str, error: str) -> None:
    result = box.run(code)
    assert (result.reason, result.error, result.alive) == (Reason.EXCEPTION, error, True)


def test_what_was_printed_before_an_error_is_kept(box: Box) -> None:
    result = box.run("print('before')\n1 / 0")
    assert result.stdout == "before\n"
    assert result.reason is Reason.EXCEPTION


@pytest.mark.parametrize("code", ["while True: pass", "import time; time.sleep(60)", "10 ** 10 ** 9"])
def test_a_timeout_ends_the_call_and_keeps_the_session(box: Box, code: str) -> None:
    session = box.open()
    box.exec(session, "x = 7")
    result = box.exec(session, code, 0.3)
    assert (result.reason, result.error, result.alive) == (Reason.TIMEOUT, "stopped after 0.3 s", True)
    assert box.exec(session, "x").value == "7"
    box.end(session)


def test_the_servers_time_limit_caps_what_a_call_asks_for(hasty: Box) -> None:
    assert hasty.run("while True: pass", 3600.0).error == "stopped after 1 s"
    assert hasty.run("while True: pass").error == "stopped after 1 s"


def test_a_session_lasts_as_long_as_its_client_and_then_expires(hasty: Box) -> None:
    async def outlive() -> None:
        before = (await hasty.client.health())["expired"]
        kept = await hasty.client.open()
        dead = SandboxClient(hasty.client._url)
        left = await dead.open()
        await dead.aclose()
        while (health := await hasty.client.health())["expired"] == before:
            await asyncio.sleep(0.1)
        assert health["open_sessions"] == 1  # although it has been without a call for longer
        with pytest.raises(SessionLost):
            await hasty.client.exec(left, "1")
        await hasty.client.close_session(kept)

    hasty.wait(asyncio.wait_for(outlive(), 60))


def test_a_session_whose_opener_is_cancelled_is_closed(box: Box) -> None:
    async def cancel_openers() -> int:
        before = await box.client.health()
        openers = [asyncio.create_task(box.client.open()) for _ in range(4)]
        await asyncio.sleep(0)  # each has asked the server now, or is about to
        await asyncio.sleep(0)
        for opener in openers:
            opener.cancel()
        await asyncio.gather(*openers, return_exceptions=True)
        while True:
            now = await box.client.health()
            if now["opened"] == before["opened"] + 4 and now["open_sessions"] == before["open_sessions"]:
                break
            await asyncio.sleep(0.05)
        return sum(opener.cancelled() for opener in openers)

    assert box.wait(asyncio.wait_for(cancel_openers(), 60)) == 4


def test_code_that_cannot_be_interrupted_is_killed(box: Box) -> None:
    session = box.open()
    result = box.exec(session, "import signal\nsignal.signal(signal.SIGALRM, signal.SIG_IGN)\nwhile True: pass", 0.2)
    assert (result.reason, result.error, result.alive) == (Reason.TIMEOUT, "killed after 0.2 s", False)
    with pytest.raises(SessionLost):
        box.exec(session, "1")


def test_too_much_memory_is_a_result(box: Box) -> None:
    session = box.open()
    box.exec(session, "x = 7")
    result = box.exec(session, "y = bytearray(10 ** 9)")
    assert (result.reason, result.alive) == (Reason.MEMORY, True)
    assert box.exec(session, "x").value == "7"
    box.end(session)


def test_killed_for_memory_says_so(box: Box) -> None:
    """Several processes, each within its own limit: the kernel ends the largest, which is the session itself."""
    if box.wait(box.client.health())["limited_by"] == "rlimits":
        pytest.skip("without a cgroup a session has one process, whose own limit holds")
    code = """
import os, time
x = bytearray(b"1") * 48_000_000
for _ in range(2):
  if os.fork() == 0:
    del x
    y = bytearray(b"1") * 28_000_000
    time.sleep(4)
time.sleep(4)"""
    result = box.run(code)
    assert (result.reason, result.error, result.alive) == (Reason.MEMORY, "killed: over 64 MB of memory", False)


def test_output_without_end_ends_the_call(box: Box) -> None:
    result = box.run("while True: print('x' * 1000)")
    assert (result.reason, result.truncated, result.alive) == (Reason.OUTPUT, True, True)


@pytest.mark.parametrize("attempt", NETWORK)
def test_no_network_and_the_error_says_so(box: Box, attempt: str) -> None:
    result = box.run(NETWORK[attempt])
    assert result.reason is Reason.EXCEPTION
    assert result.error is not None
    assert result.error.startswith("  line 2\n")
    assert result.error.endswith("(there is no network here: nothing can be downloaded or reached)")


def test_other_errors_do_not_blame_the_network(box: Box) -> None:
    assert (
        box.run("open('/no/such')").error
        == "  line 1\nFileNotFoundError: [Errno 2] No such file or directory: '/no/such'"
    )


def test_long_output_keeps_head_and_tail(box: Box) -> None:
    result = box.run("print('a' * 1000 + 'b' * 3000 + 'c' * 999)")
    assert result.stdout == "a" * 1000 + "\n... [3000 bytes left out] ...\n" + "c" * 999 + "\n"
    assert (result.reason, result.truncated) == (Reason.OK, True)
    value = box.run("'a' * 5000")
    assert value.truncated
    assert value.value.startswith("'aaa")
    assert value.value.endswith("aaa'")
    assert not box.run("print('a' * 1999)").truncated


def test_a_call_can_ask_for_less_output_and_not_for_more(box: Box) -> None:
    session = box.open()
    short = box.exec(session, "print('a' * 50 + 'b' * 50)", max_output_bytes=64)
    assert short.stdout == "a" * 32 + "\n... [37 bytes left out] ...\n" + "b" * 31 + "\n"
    assert box.exec(session, "print('a' * 9000)", max_output_bytes=100_000).truncated
    box.end(session)


def test_leaving_python_is_a_result(box: Box) -> None:
    session = box.open()
    result = box.exec(session, "import sys; x = 3; sys.exit(4)")
    assert (result.reason, result.error, result.alive) == (Reason.EXIT, "SystemExit: 4", True)
    assert box.exec(session, "x").value == "3"
    box.end(session)


def test_classes_and_packages_work_as_in_a_program(box: Box) -> None:
    code = "from dataclasses import dataclass\n@dataclass\nclass P:\n  x: int\n\n"
    assert box.run(code + "import pickle\npickle.loads(pickle.dumps(P(2)))").value == "P(x=2)"
    assert box.run("import sympy\nsympy.factorint(360)").value == "{2: 3, 3: 2, 5: 1}"


def test_the_same_code_gives_the_same_output_in_every_session(box: Box) -> None:
    code = "import random; print({'ab', 'cd', 'ef', 'gh'}, random.random())"
    assert box.run(code).stdout == box.run(code).stdout


def test_many_sessions_at_once_keep_apart(box: Box, backend: str) -> None:
    async def episode(number: int) -> str | None:
        session = await box.client.open()
        await box.client.exec(session, f"x = {number}")
        result: ExecResult = await box.client.exec(session, "x * x")
        await box.client.close_session(session)
        return result.value

    async def all_of_them() -> list[str | None]:
        return await asyncio.gather(*(episode(number) for number in range(MANY[backend])))

    assert box.wait(all_of_them()) == [str(number * number) for number in range(MANY[backend])]


def test_a_repeated_request_runs_once(box: Box, server: Server) -> None:
    session = box.open()
    box.exec(session, "count = 0")
    body = {"code": "count += 1; print(count)", "request_id": "same"}
    url = f"{server.url}/sessions/{session}/exec"
    with httpx.Client(trust_env=False) as client:
        answers = [client.post(url, json=body).json() for _ in range(3)]
    assert [answer["stdout"] for answer in answers] == ["1\n"] * 3
    assert box.exec(session, "count").value == "1"
    box.end(session)


def test_a_closed_or_unknown_session_is_lost(box: Box) -> None:
    session = box.open()
    box.end(session)
    with pytest.raises(SessionLost):
        box.exec(session, "1")
    with pytest.raises(SessionLost):
        box.end(session)
    with pytest.raises(SessionLost):
        box.exec("no-such-session", "1")


def test_closed_while_it_runs_it_is_lost(box: Box) -> None:
    session = box.open()

    async def close_amid() -> None:
        execs = (await box.client.health())["execs"]
        running = asyncio.create_task(box.client.exec(session, "import time; time.sleep(19)"))
        while (await box.client.health())["execs"] == execs:
            await asyncio.sleep(0.05)
        await box.client.close_session(session)
        with pytest.raises(SessionLost):
            await running

    box.wait(close_amid())
