"""Code that means harm: it must learn nothing, change nothing outside its session, and end only itself."""

import os
import socket
import time
from ast import literal_eval
from pathlib import Path
from typing import Any

import pytest

from sandbox.base import Reason

FORBIDDEN = {
    "ip socket": ("import socket; socket.socket()", "Network is unreachable"),
    "unix socket": ("import socket; socket.socket(socket.AF_UNIX)", "Network is unreachable"),
    "write to the root": ("open('/x', 'w')", "Read-only file system"),
    "write to the library": ("open('/python/lib/x', 'w')", "Read-only file system"),
    "write to /dev": ("open('/dev/x', 'w')", "Read-only file system"),
    "host accounts": ("open('/etc/passwd')", "No such file"),
    "other processes' environment": ("open('/proc/2/environ')", "No such file"),
    "kernel settings": ("open('/proc/sys/kernel/hostname', 'w')", "No such file"),
    "become root": ("import os; os.setuid(0)", "Operation not permitted"),
    "set groups": ("import os; os.setgroups([0])", "Operation not permitted"),
    "chroot": ("import os; os.chroot('/tmp')", "Operation not permitted"),
    "memory outside of limits": ("import os; os.memfd_create('x')", "Operation not permitted"),
    "a process that is not its own": ("import os; os.kill(2, 9)", "No such process"),
    "fd passing": ("import socket; socket.socketpair()[0].sendmsg([b'x'])", "Operation not permitted"),
    "a higher limit": (
        "import resource as r; r.setrlimit(r.RLIMIT_AS, (r.RLIM_INFINITY, r.RLIM_INFINITY))",
        "not allowed to raise maximum limit",
    ),
    "a full disk": ("open('/tmp/x', 'w').write('a' * 9_000_000)", "File too large"),
    "many full files": ("for i in range(9): open(f'/tmp/{i}', 'w').write('a' * 1_000_000)", "No space left"),
}
RAW_CALLS = {
    "mount": (165, ("b'none'", "b'/tmp'", "b'tmpfs'", "0", "0")),
    "unshare": (272, ("0x10000000",)),
    "setns": (308, ("0", "0")),
    "clone into new namespaces": (56, ("0x10000011", "0", "0", "0", "0")),
    "clone3": (435, ("0", "0")),
    "ptrace": (101, ("0", "0", "0", "0")),
    "io_uring_setup": (425, ("1", "0")),
    "keyctl": (250, ("0", "-3", "0")),
    "bpf": (321, ("0", "0", "0")),
    "userfaultfd": (323, ("0",)),
    "shmget": (29, ("0", "4096", "0o1600")),
    "x32 getpid": (0x40000000 | 39, ()),
}
ALIVE = "sum(range(10))"


@pytest.fixture
def bystander(box: Any) -> Any:
    """A session of someone else, with a variable and a file; unharmed at the end."""
    session = box.open()
    box.exec(
        session, "secret = 'mine'; open('/tmp/secret', 'w').write(secret); open('/dev/shm/secret', 'w').write(secret)"
    )
    yield session
    assert (
        box.exec(session, "secret + open('/tmp/secret').read() + open('/dev/shm/secret').read()").value
        == "'mineminemine'"
    )
    box.end(session)


@pytest.mark.parametrize("attack", FORBIDDEN)
def test_what_is_forbidden_raises(box: Any, attack: str) -> None:
    code, error = FORBIDDEN[attack]
    result = box.run(code)
    assert (result.reason, result.alive) == (Reason.EXCEPTION, True)
    assert error in result.error


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers are those of x86_64")
@pytest.mark.parametrize("name", RAW_CALLS)
def test_system_calls_off_the_list_fail(box: Any, name: str) -> None:
    number, arguments = RAW_CALLS[name]
    call = ", ".join([str(number), *arguments])
    code = f"import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n(libc.syscall({call}), ctypes.get_errno())"
    assert box.run(code).value in ("(-1, 1)", "(-1, 38)")


def test_a_session_has_no_privileges(box: Any) -> None:
    code = "dict(line.split(':\\t') for line in open('/proc/self/status').read().splitlines())"
    status = literal_eval(box.run(code).value)
    assert {status[f"Cap{kind}"] for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {"0" * 16}
    assert (status["NoNewPrivs"], status["Seccomp"], status["Pid"]) == ("1", "2", "1")
    assert set(status["Uid"].split()) == {"65534"}


def test_no_session_runs_as_the_hosts_root(box: Any, server: Any) -> None:
    session = box.open()
    children = server.descendants()
    uids = {Path(f"/proc/{pid}").stat().st_uid for pid in children}
    assert len(children) >= 3  # bubblewrap, the zygote, sessions
    assert 0 not in uids
    box.end(session)


def test_nothing_of_the_host_is_inherited(box: Any) -> None:
    paths = "[p for p in map('/proc/self/fd/{}'.format, os.listdir('/proc/self/fd')) if os.path.lexists(p)]"
    links = literal_eval(box.run(f"import os; [(p, os.readlink(p)) for p in {paths}]").value)
    files = {path.rpartition("/")[2]: target for path, target in links}
    assert {files[fd] for fd in "012"} == {"/dev/null"}
    assert files["3"].startswith("socket:")
    assert set(files) == {"0", "1", "2", "3"}
    names = literal_eval(box.run("import os; sorted(os.environ)").value)
    assert {"SANDBOX_TOKEN", "USER", "LOGNAME"}.isdisjoint(names)
    assert literal_eval(box.run("import os; os.listdir('/proc')").value).count("1") == 1


def test_sessions_do_not_see_each_other(box: Any, bystander: str) -> None:
    code = "import os; (os.listdir('/tmp'), os.listdir('/dev/shm'), [n for n in os.listdir('/proc') if n.isdigit()])"
    assert box.run(code).value == "([], [], ['1'])"
    assert sorted(literal_eval(box.run("import os; os.listdir('/dev')").value)) == [
        "null",
        "random",
        "shm",
        "urandom",
        "zero",
    ]


@pytest.mark.parametrize(
    "bomb", ["while True: os.fork()", "while True:\n  try: os.fork(), os.setsid()\n  except OSError: pass"]
)
def test_a_fork_bomb_leaves_others_their_processes(box: Any, bystander: str, bomb: str) -> None:
    result = box.run(f"import os\n{bomb}", 0.5)
    assert result.reason in (Reason.EXCEPTION, Reason.TIMEOUT)
    forked = box.exec(bystander, "import os\npid = os.fork()\nif pid == 0: os._exit(3)\nos.waitpid(pid, 0)[1] >> 8")
    assert forked.value == "3" or "not permitted" in forked.error  # without cgroups nobody may fork


def test_a_memory_bomb_is_a_result(box: Any, bystander: str) -> None:
    session = box.open()
    result = box.exec(session, "x = bytearray(10 ** 9)")
    assert (result.reason, result.alive) == (Reason.MEMORY, True)
    assert box.exec(session, ALIVE).value == "45"
    box.end(session)


def test_a_memory_bomb_of_many_processes_is_bounded(box: Any, bystander: str) -> None:
    code = (
        "import os\nfor _ in range(6):\n  try:\n    if os.fork() == 0: break\n  except OSError: pass\n"
        "x = bytearray(50_000_000)\nfor i in range(0, len(x), 4096): x[i] = 1\nimport time; time.sleep(2)"
    )
    result = box.run(code, 4.0)
    assert result.reason in (Reason.OK, Reason.MEMORY)


def test_code_that_swallows_the_timeout_is_killed(box: Any, bystander: str) -> None:
    stubborn = "import signal\nsignal.signal(signal.SIGALRM, signal.SIG_IGN)\nwhile True: pass"
    result = box.run(stubborn, 0.2)
    assert (result.reason, result.alive) == (Reason.TIMEOUT, False)
    assert result.duration_s < 4


def test_an_output_flood_ends_the_call(box: Any, bystander: str) -> None:
    for code in ("while True: print('x' * 1000)", "import sys\nwhile True: sys.stdout.write('x' * 1000)"):
        result = box.run(code)
        assert (result.reason, result.truncated, result.alive) == (Reason.OUTPUT, True, True)
        assert len(result.stdout) < 2100


def test_binary_output_is_readable(box: Any) -> None:
    assert box.run("import sys; _ = sys.stdout.buffer.write(b'\\xff\\x00a')").stdout == "\ufffd\x00a"


FORGE = """
import json, os, struct
def write(message, length=None):
    body = json.dumps(message).encode()
    os.write(3, struct.pack('!I', len(body) if length is None else length) + body)
reply = {'id': 'x', 'stdout': 'forged', 'stderr': '', 'value': None, 'error': None, 'reason': 'ok', 'truncated': False}
"""


@pytest.mark.parametrize(
    "attack",
    [
        "write(reply)",
        "write(reply, 2 ** 32 - 1)",
        "write({'ready': True})",
        "os.write(3, b'\\0' * 100_000)",
        "os.write(3, struct.pack('!I', 200) + b'[' * 200)",
        "os.closerange(0, 64)",
        "os._exit(0)",
        "os.abort()",
    ],
)
def test_a_forged_reply_or_a_closed_pipe_ends_that_session_only(box: Any, bystander: str, attack: str) -> None:
    result = box.run(FORGE + attack, 1.0)
    assert (result.reason, result.alive) == (Reason.EXIT, False)
    assert "forged" not in result.stdout
    assert result.error.startswith("the session ended")


def test_a_reply_written_between_calls_ends_that_session_only(box: Any, bystander: str) -> None:
    session = box.open()
    late = "import threading\nthreading.Timer(0.2, write, [reply]).start()"
    started = box.exec(session, FORGE + late)
    if started.reason is Reason.EXCEPTION:
        pytest.skip("no threads without cgroups")
    box.exec(bystander, "import time; time.sleep(0.6)")
    result = box.exec(session, "1")
    assert (result.reason, result.alive) == (Reason.EXIT, False)


def test_a_fork_does_not_shift_later_replies(box: Any) -> None:
    session = box.open()
    box.exec(session, "import os, time\ntry:\n  if os.fork(): time.sleep(0.3)\nexcept OSError: pass")
    time.sleep(0.5)  # were the child to answer too, one of the two replies would come now
    assert [box.exec(session, f"{n} * 2").value for n in range(5)] == ["0", "2", "4", "6", "8"]
    box.end(session)


def test_what_a_call_started_ends_with_it(box: Any) -> None:
    session = box.open()
    detach = "  if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(60)\n    os._exit(0)\n"
    code = f"import os, time\ntry:\n{detach}except OSError: pass"
    box.exec(session, code)
    assert box.exec(session, "[n for n in os.listdir('/proc') if n.isdigit()]").value == "['1']"
    box.end(session)


def test_the_hosts_own_sockets_are_out_of_reach(box: Any) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0agent-rl-test")
        listener.listen()
        result = box.run("import socket\ns, _ = socket.socketpair()\ns.connect('\\0agent-rl-test')")
    assert "not permitted" in result.error
