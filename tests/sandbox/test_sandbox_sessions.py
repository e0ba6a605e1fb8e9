"""What a session does for code that means no harm."""

import asyncio
from typing import Any

import httpx
import pytest

from sandbox.base import ExecResult, Reason, SessionLost


def test_variables_persist_within_a_session_and_only_there(box: Any) -> None:
    one, other = box.open(), box.open()
    assert box.exec(one, "x = 41").value is None
    assert box.exec(one, "x + 1").value == "42"
    assert box.exec(other, "x").error.endswith("NameError: name 'x' is not defined")
    box.end(one)
    box.end(other)


def test_stdout_stderr_and_value_are_apart(box: Any) -> None:
    result = box.run("import sys\nprint('out')\nprint('err', file=sys.stderr)\n'value'")
    assert (result.stdout, result.stderr, result.value) == ("out\n", "err\n", "'value'")
    assert (result.reason, result.error, result.truncated, result.alive) == (Reason.OK, None, False, True)
    assert 0 < result.duration_s < 5


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("1 / 0", "  line 1\nZeroDivisionError: division by zero"),
        ("def f():\n  return y\n\nf()", "  line 4\n  line 2, in f\nNameError: name 'y' is not defined"),
        ("x = 1\nx = = 2", "  line 2\nSyntaxError: invalid syntax"),
        ("import json\njson.loads('[')", "  line 2\nJSONDecodeError: Expecting value: line 1 column 2 (char 1)"),
        ("raise ValueError", "  line 1\nValueError"),
        ("input()", "  line 1\nEOFError: EOF when reading a line"),
        ("raise ValueError(chr(0xd800))", "  line 1\nValueError: \\ud800"),
        ("raise KeyboardInterrupt", "  line 1\nKeyboardInterrupt"),
    ],
)
def test_an_exception_is_a_result_that_names_the_users_lines(box: Any, code: str, error: str) -> None:
    result = box.run(code)
    assert (result.reason, result.error, result.alive) == (Reason.EXCEPTION, error, True)


def test_what_was_printed_before_an_error_is_kept(box: Any) -> None:
    result = box.run("print('before')\n1 / 0")
    assert result.stdout == "before\n"
    assert result.reason is Reason.EXCEPTION


@pytest.mark.parametrize("code", ["while True: pass", "import time; time.sleep(60)", "10 ** 10 ** 9"])
def test_a_timeout_ends_the_call_and_keeps_the_session(box: Any, code: str) -> None:
    session = box.open()
    box.exec(session, "x = 7")
    result = box.exec(session, code, 0.3)
    assert (result.reason, result.error, result.alive) == (Reason.TIMEOUT, "stopped after 0.3 s", True)
    assert result.duration_s < 2.5
    assert box.exec(session, "x").value == "7"
    box.end(session)


def test_the_servers_time_limit_caps_what_a_call_asks_for(serve: Any) -> None:
    _, box = serve({"warm_sessions": 0, "limits": {"wall_s": 0.3}})
    assert box.run("while True: pass", 3600.0).error == "stopped after 0.3 s"
    assert box.run("while True: pass").error == "stopped after 0.3 s"


def test_long_output_keeps_head_and_tail(box: Any) -> None:
    result = box.run("print('a' * 1000 + 'b' * 3000 + 'c' * 999)")
    assert result.stdout == "a" * 1000 + "\n... [3000 bytes left out] ...\n" + "c" * 999 + "\n"
    assert (result.reason, result.truncated) == (Reason.OK, True)
    value = box.run("'a' * 5000")
    assert value.truncated
    assert value.value.startswith("'aaa")
    assert value.value.endswith("aaa'")
    assert not box.run("print('a' * 1999)").truncated


def test_leaving_python_is_a_result(box: Any) -> None:
    session = box.open()
    result = box.exec(session, "import sys; x = 3; sys.exit(4)")
    assert (result.reason, result.error, result.alive) == (Reason.EXIT, "SystemExit: 4", True)
    assert box.exec(session, "x").value == "3"
    box.end(session)


def test_classes_and_packages_work_as_in_a_program(box: Any) -> None:
    code = "from dataclasses import dataclass\n@dataclass\nclass P:\n  x: int\n\n"
    assert box.run(code + "import pickle\npickle.loads(pickle.dumps(P(2)))").value == "P(x=2)"
    assert box.run("import sympy\nsympy.factorint(360)").value == "{2: 3, 3: 2, 5: 1}"


def test_the_same_code_gives_the_same_output_in_every_session(box: Any) -> None:
    code = "import random; print({'ab', 'cd', 'ef', 'gh'}, random.random())"
    assert box.run(code).stdout == box.run(code).stdout


def test_many_sessions_at_once_keep_apart(box: Any) -> None:
    async def episode(number: int) -> str | None:
        session = await box.client.open()
        await box.client.exec(session, f"x = {number}")
        result: ExecResult = await box.client.exec(session, "x * x")
        await box.client.close_session(session)
        return result.value

    async def all_of_them() -> list[str | None]:
        return await asyncio.gather(*(episode(number) for number in range(64)))

    assert box.wait(all_of_them()) == [str(number * number) for number in range(64)]


def test_a_repeated_request_runs_once(box: Any, server: Any) -> None:
    session = box.open()
    box.exec(session, "count = 0")
    body = {"code": "count += 1; print(count)", "request_id": "same"}
    url = f"{server.url}/sessions/{session}/exec"
    with httpx.Client(trust_env=False) as client:
        answers = [client.post(url, json=body).json() for _ in range(3)]
    assert [answer["stdout"] for answer in answers] == ["1\n"] * 3
    assert box.exec(session, "count").value == "1"
    box.end(session)


def test_a_closed_or_unknown_session_is_lost(box: Any) -> None:
    session = box.open()
    box.end(session)
    with pytest.raises(SessionLost):
        box.exec(session, "1")
    with pytest.raises(SessionLost):
        box.end(session)
    with pytest.raises(SessionLost):
        box.exec("no-such-session", "1")
