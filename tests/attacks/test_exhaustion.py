"""Code that takes all it can get of its own session: it ends in a result with a reason, in time."""

from typing import Any

import pytest

from sandbox.base import Reason
from tests.attacks.conftest import LIMITED

IGNORES_THE_ALARM = {
    "a signal handler of its own": "import signal\nsignal.signal(signal.SIGALRM, signal.SIG_IGN)\nwhile True: pass",
    "all signals blocked": "import signal\nsignal.pthread_sigmask(0, range(1, 65))\nwhile True: pass",
    "the timer set to zero": "import signal\nsignal.setitimer(signal.ITIMER_REAL, 0)\nwhile True: pass",
    "C code that never looks": "sum(range(10 ** 12))",
    "a message that takes forever": "class E(Exception):\n  def __str__(self):\n    while True: pass\nraise E",
    "a stopped process": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\n"
    "signal.pthread_sigmask(0, range(1, 65))\nsignal.pause()",
}
RUNS_OUT_OF_TIME = {
    "code that catches it": "while True:\n  try:\n    while True: pass\n  except BaseException: pass",
    "a loop": "while True: pass",
    "sleep": "import time; time.sleep(60)",
    "a power": "10 ** 10 ** 9",
    "a regular expression": "import re; re.match('(a+)+$', 'a' * 50 + 'b')",
    "a repr": "class R:\n  def __repr__(self):\n    while True: pass\nR()",
    "a read of a pipe": "import os; os.read(os.pipe()[0], 1)",
    "a lock": "import threading; lock = threading.Lock(); lock.acquire(); lock.acquire()",
}
CRASHES = {
    "a null pointer": "import ctypes; ctypes.string_at(0)",
    "abort": "import os; os.abort()",
    "an exit": "import os; os._exit(0)",
    "a signal": "import os, signal, ctypes; signal.signal(11, signal.SIG_DFL); ctypes.memmove(1, 2, 3)",
    "another program": "import os, sys; os.execv(sys.executable, [sys.executable, '-c', 'print(1)'])",
    "all descriptors closed": "import os; os.closerange(0, 256)",
    "a channel that is cut": "import os, socket, stat\n"
    "for fd in range(3, 20):\n"
    "  try:\n"
    "    mode = os.fstat(fd).st_mode\n"
    "    if stat.S_ISSOCK(mode): socket.socket(fileno=os.dup(fd)).shutdown(socket.SHUT_WR)\n"
    "    if stat.S_ISFIFO(mode): os.close(fd)\n"
    "  except OSError: pass",
}
TOO_DEEP = {
    "a recursion": "def f(): f()\nf()",
    "a recursion without a limit": "import sys; sys.setrecursionlimit(10 ** 9)\ndef f(): f()\nf()",
    "a recursion in C": "import sys; sys.setrecursionlimit(10 ** 9)\nx = []\nfor _ in range(10 ** 6): x = [x]\nrepr(x)",
    "parentheses": "eval('(' * 10 ** 5 + ')' * 10 ** 5)",
    "unary minus": "eval('-' * 10 ** 6 + '1')",
    "a syntax tree": "import ast\nt = ast.Constant(1)\nfor _ in range(10 ** 5): t = ast.UnaryOp(ast.USub(), t)\n"
    "compile(ast.fix_missing_locations(ast.Expression(t)), '', 'eval')",
    "a pickle": "import pickle\npickle.loads(b'(' * 10 ** 6 + b'l' * 10 ** 6 + b'.')",
    "json": "import json; json.loads('[' * 10 ** 6)",
    "equal hashes": "class H:\n  def __hash__(self): return 1\n{H(): 0 for _ in range(10 ** 6)}",
}


def test_code_that_ignores_the_timeout_is_killed(attacked: Any, bystander: str) -> None:
    results = attacked.run_all(IGNORES_THE_ALARM, 1.0)
    expected = dict.fromkeys(IGNORES_THE_ALARM, (Reason.TIMEOUT, False))
    assert {name: (one.reason, one.alive) for name, one in results.items()} == expected


def test_a_timeout_is_a_result(attacked: Any, bystander: str) -> None:
    results = attacked.run_all(RUNS_OUT_OF_TIME, 0.5)
    assert {name: one.reason for name, one in results.items()} == dict.fromkeys(RUNS_OUT_OF_TIME, Reason.TIMEOUT)


@pytest.mark.parametrize("attack", CRASHES)
def test_a_crash_ends_that_session_only(attacked: Any, bystander: str, attack: str) -> None:
    result = attacked.run(CRASHES[attack], 4.0)
    assert (result.alive, result.value) == (False, None)
    assert result.reason in (Reason.EXIT, Reason.TIMEOUT)


@pytest.mark.parametrize("attack", TOO_DEEP)
def test_depth_and_collisions_end_in_a_result(attacked: Any, bystander: str, attack: str) -> None:
    result = attacked.run(TOO_DEEP[attack], 0.5)
    assert result.value is None
    assert result.reason in (Reason.EXCEPTION, Reason.MEMORY, Reason.TIMEOUT, Reason.EXIT)


@pytest.mark.parametrize("attacked", LIMITED, indirect=True)
def test_a_memory_bomb_is_a_result(attacked: Any, bystander: str) -> None:
    session = attacked.open()
    result = attacked.exec(session, "x = bytearray(10 ** 9)")
    assert result.reason is Reason.MEMORY
    if result.alive:
        assert attacked.exec(session, "1 + 1").value == "2"
    attacked.drop(session)


@pytest.mark.parametrize("attacked", LIMITED, indirect=True)
@pytest.mark.parametrize(
    "grow", ["x = []\nwhile True: x.append(bytearray(b'x' * 10 ** 6))", "x = 'a'\nwhile True: x += x"]
)
def test_a_growing_session_ends_in_a_result(attacked: Any, bystander: str, grow: str) -> None:
    assert attacked.run(grow).reason is Reason.MEMORY


@pytest.mark.parametrize("attacked", LIMITED, indirect=True)
def test_a_memory_bomb_of_many_processes_is_bounded(attacked: Any, bystander: str) -> None:
    code = (
        "import os, time\nstarting, holding = [], []\ndef ended(pid): return os.waitpid(pid, os.WNOHANG)[0] != 0\n"
        "for _ in range(6):\n  try: pid = os.fork()\n  except OSError: break\n  if pid == 0:\n"
        "    x = bytearray(b'x' * 30_000_000); open(f'/tmp/{os.getpid()}', 'w').close(); time.sleep(60); os._exit(0)\n"
        "  starting.append(pid)\nx = bytearray(b'x' * 30_000_000)\nwhile starting:\n"
        "  holding += [pid for pid in starting if os.path.exists(f'/tmp/{pid}')]\n"
        "  starting = [pid for pid in starting if pid not in holding and not ended(pid)]\n  time.sleep(0.01)\n"
        "time.sleep(0.3)\nsum(not ended(pid) for pid in holding)"
    )
    result = attacked.run(code)
    assert result.reason is Reason.MEMORY or int(result.value) <= 1  # 3 times 30 MB do not fit into 68 MB


@pytest.mark.parametrize("attacked", LIMITED, indirect=True)
def test_files_are_bounded(attacked: Any, bystander: str) -> None:
    for folder in ("/tmp", "/dev/shm"):
        code = (
            "import os\ntotal = 0\ntry:\n  for n in range(50):\n"
            f"    with open(f'{folder}/{{n}}', 'wb', 0) as file: total += file.write(b'x' * 1_000_000)\n"
            "except OSError: pass\ntotal"
        )
        assert int(attacked.run(code).value or 0) <= 4 << 20


@pytest.mark.parametrize("attacked", LIMITED, indirect=True)
def test_inodes_are_bounded(attacked: Any, bystander: str) -> None:
    code = "n = 0\ntry:\n  while n < 50_000: open(f'/tmp/{n}', 'w').close(); n += 1\nexcept OSError: pass\nn"
    assert int(attacked.run(code, 4.0).value or 0) < 50_000


@pytest.mark.parametrize("attacked", LIMITED, indirect=True)
@pytest.mark.parametrize(
    "bomb", ["while True: os.fork()", "while True:\n  try: os.fork(), os.setsid()\n  except OSError: pass"]
)
def test_a_fork_bomb_is_a_result(attacked: Any, bystander: str, bomb: str) -> None:
    assert attacked.run(f"import os\n{bomb}", 0.5).reason in (Reason.EXCEPTION, Reason.TIMEOUT)


@pytest.mark.parametrize(
    "write", ["print('x' * 1000)", "sys.stdout.write('x')", "sys.stderr.buffer.write(b'\\xff' * 999)"]
)
def test_an_output_flood_ends_the_call(attacked: Any, bystander: str, write: str) -> None:
    result = attacked.run(f"import sys\nwhile True: {write}")
    assert (result.reason, result.truncated, result.alive) == (Reason.OUTPUT, True, True)
    assert max(len(result.stdout), len(result.stderr)) < 2100


def test_output_past_the_capture_goes_nowhere(attacked: Any, bystander: str) -> None:
    result = attacked.run(
        "import os\nfor _ in range(1000): os.write(1, b'x' * 10 ** 6), os.write(2, b'y' * 10 ** 6)", 4.0
    )
    assert len(result.stdout) + len(result.stderr) < 4200


def test_a_long_value_and_a_long_error_are_cut(attacked: Any) -> None:
    assert len(attacked.run("'x' * 10 ** 7").value) < 2100
    assert len(attacked.run("raise ValueError('x' * 10 ** 7)").error) < 2100


def test_binary_output_is_readable(attacked: Any) -> None:
    assert attacked.run("import sys; _ = sys.stdout.buffer.write(b'\\xff\\x00a')").stdout == "\ufffd\x00a"


@pytest.mark.parametrize("attacked", LIMITED, indirect=True)
@pytest.mark.parametrize(
    "detach", ["os.setsid()", "os.setsid(); os.fork() and os._exit(0)", "signal.pthread_sigmask(0, range(1, 65))"]
)
def test_what_a_call_started_ends_with_it(attacked: Any, detach: str) -> None:
    session = attacked.open()
    code = (
        "import os, signal, time\ntry:\n  if os.fork() == 0:\n"
        f"    {detach}\n    while True: open('/tmp/beat', 'w').write(str(time.time())); time.sleep(0.01)\n"
        "except OSError: pass\ntime.sleep(0.2)"
    )
    attacked.exec(session, code)
    still = "import os, time\nold = os.path.exists('/tmp/beat') and open('/tmp/beat').read()\ntime.sleep(0.2)\n"
    assert (
        attacked.exec(session, still + "old == (os.path.exists('/tmp/beat') and open('/tmp/beat').read())").value
        == "True"
    )
    attacked.end(session)
