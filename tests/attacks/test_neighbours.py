"""Code that reaches for other sessions: reads, signals, starves them, or talks with an accomplice among them."""

import asyncio
import os
from ast import literal_eval
from pathlib import Path
from typing import Any

import pytest

from sandbox.base import ExecResult, Reason
from tests.attacks.conftest import LIMITED

MANY = """
import os, resource, signal, socket, time
def everywhere(act, fresh=False):
    # in as many processes as there may be, each in a group of its own if `fresh`
    try:
        while os.fork():
            pass
        if fresh:
            os.setsid()
    except OSError:
        pass
    act()
def spin():
    while True:
        pass
def until_refused(act):
    kept = []
    try:
        while True:
            kept.append(act())
    except (OSError, MemoryError):
        pass
    return kept
"""
STARVE = {
    "processes": "while True:\n  try: os.fork()\n  except OSError: pass",
    "processes that detach": "while True:\n  try: os.fork(), os.setsid()\n  except OSError: pass",
    "zombies": "while True:\n  try:\n    if os.fork() == 0: os._exit(0)\n  except OSError: pass",
    "threads": "import threading\nuntil_refused(lambda: threading.Thread(target=time.sleep, args=(9,)).start())",
    "cpu": "everywhere(spin)",
    "cpu in groups of its own": "everywhere(spin, fresh=True)",
    "memory": "everywhere(lambda: ([bytearray(b'x' * 1_000_000) for _ in range(200)], time.sleep(9)))",
    "disk": "open('/tmp/x', 'wb').write(b'x' * 4_000_000)\n"
    "until_refused(lambda: open(os.urandom(8).hex(), 'wb').write(b'x' * 4_000_000))\ntime.sleep(9)",
    "shared memory": "os.chdir('/dev/shm')\n"
    "until_refused(lambda: open(os.urandom(8).hex(), 'wb').write(b'x' * 4_000_000))\ntime.sleep(9)",
    "inodes": "until_refused(lambda: open(os.urandom(8).hex(), 'w').close())\ntime.sleep(9)",
    "folders in folders": "def deeper():\n  os.mkdir('d'); os.chdir('d')\nuntil_refused(deeper)\ntime.sleep(9)",
    "descriptors": "everywhere(lambda: (until_refused(lambda: os.dup(0)), time.sleep(9)))",
    "pipes": "import fcntl\ndef full():\n  r, w = os.pipe()\n  os.set_blocking(w, False)\n"
    "  until_refused(lambda: os.write(w, b'x' * 65536))\neverywhere(lambda: (until_refused(full), time.sleep(9)))",
    "socket buffers": "def full():\n  a, b = socket.socketpair()\n  a.setblocking(False)\n"
    "  until_refused(lambda: a.send(b'x' * 65536))\n  return a, b\n"
    "everywhere(lambda: (until_refused(full), time.sleep(9)))",
    "pending signals": "signals = range(signal.SIGRTMIN, signal.SIGRTMAX)\nsignal.pthread_sigmask(0, signals)\n"
    "while True:\n  for number in signals: os.kill(os.getpid(), number)",
    "wakeups": "import select\nall_of_it = until_refused(select.epoll)\nr, w = os.pipe()\n"
    "for one in all_of_it[2:]: one.register(r)\nwhile True: os.write(w, b'x'); os.read(r, 1)",
    "system calls": "everywhere(lambda: [os.getppid() for _ in iter(int, 1)])",
    "writes to all that is open": "while True:\n  for fd in (0, 1, 2): os.write(fd, b'x' * 1_000_000)",
    "reads of the library": "root = os.path.dirname(os.__file__)\n"
    "while True:\n  for at, _, names in os.walk(root):\n"
    "    for name in names: open(os.path.join(at, name), 'rb').read()",
}
HONEST = """
import os
with open('/tmp/work', 'wb') as file: written = file.write(b'x' * 1_000_000)
reading, writing = os.pipe()
os.write(writing, b'through a pipe')
piped = os.read(reading, 100)
os.close(reading); os.close(writing)
try:
    child = os.fork()
    if child == 0: os._exit(3)
    code = os.waitpid(child, 0)[1] >> 8
except PermissionError:
    code = 3
(len(bytearray(20_000_000)), written, piped, code, sum(range(1000)))
"""


@pytest.mark.parametrize("attacked", LIMITED, indirect=True)
@pytest.mark.parametrize("attack", STARVE)
def test_a_greedy_session_leaves_others_theirs(attacked: Any, bystander: str, attack: str) -> None:
    greedy = attacked.open()

    async def both() -> tuple[ExecResult, list[ExecResult], str]:
        attack_ = asyncio.create_task(attacked.client.exec(greedy, MANY + STARVE[attack], 0.7))
        await asyncio.sleep(0.2)
        honest = [await attacked.client.exec(bystander, HONEST) for _ in range(3)]
        newcomer = await attacked.client.open()
        honest.append(await attacked.client.exec(newcomer, HONEST))
        return await attack_, honest, newcomer

    result, honest, newcomer = attacked.wait(both())
    values = {one.value or one.error for one in honest}
    assert values == {"(20000000, 1000000, b'through a pipe', 3, 499500)"}
    assert result.reason in set(Reason)
    attacked.end(newcomer)
    attacked.drop(greedy)


@pytest.mark.parametrize("attacked", LIMITED, indirect=True)
def test_a_session_gets_no_more_than_its_share_of_cpu(attacked: Any, bystander: str) -> None:
    code = (
        "import os, time\nstarted = time.monotonic()\nfor _ in range(6):\n  try:\n    if os.fork() == 0:\n"
        "      os.setsid()\n      while time.monotonic() < started + 1.5: pass\n      os._exit(0)\n"
        "  except OSError: pass\ntry:\n  while True: os.wait()\nexcept OSError: pass\n"
        "used = os.times()\n(used.children_user + used.children_system) / (time.monotonic() - started)"
    )
    assert float(attacked.run(code).value) < 1.3  # of one CPU; a period's quota may be exceeded by a tick a core


def test_each_session_has_a_cpu_group_of_its_own(zygote: Any) -> None:
    sessions = [zygote.open(), zygote.open()]
    quotas = {}
    for pid in zygote.server.descendants()[2:]:  # bubblewrap and the zygote come first
        groups = [line.split(":") for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()]
        for _, controllers, path in groups:
            at = Path("/sys/fs/cgroup", "cpu" if "cpu" in controllers.split(",") else "", path.lstrip("/"))
            for file in ("cpu.cfs_quota_us", "cpu.max"):
                if "agent-sandbox-" in path and (at / file).exists():
                    quotas[at] = (at / file).read_text().split()[0]
    for session in sessions:
        zygote.end(session)
    if not quotas:
        pytest.skip("no CPU controller can be used here")
    assert len(quotas) >= len(sessions)
    assert set(quotas.values()) == {"100000"}  # of a period of as much


def test_sessions_do_not_see_each_other(attacked: Any, bystander: str) -> None:
    code = (
        "import os, glob\nseen = [os.listdir('/tmp'), os.listdir('/dev/shm'), []]\n"
        "for path in glob.glob('/proc/[0-9]*'):\n  for file in ('environ', 'cmdline'):\n"
        "    try: seen[2].append(b'secret' in open(f'{path}/{file}', 'rb').read())\n    except OSError: pass\n"
        "seen"
    )
    tmp, shared, found = literal_eval(attacked.run(code).value)
    assert (tmp, shared) == ([], [])
    assert True not in found


def test_the_memory_of_another_is_out_of_reach(attacked: Any) -> None:
    other = attacked.open()
    marker = os.urandom(12).hex()
    attacked.exec(other, f"marker = bytes.fromhex({marker!r}); everything = marker * 200_000")
    code = (
        "import glob\nneedle = bytes(b ^ 255 for b in hidden)\nfound = 0\n"
        "for path in glob.glob('/proc/[0-9]*'):\n  try: maps = open(f'{path}/maps').read().splitlines()\n"
        "  except OSError: continue\n  with open(f'{path}/mem', 'rb', 0) as memory:\n    for line in maps:\n"
        "      low, high = (int(n, 16) for n in line.split()[0].split('-'))\n"
        "      if 'r' not in line.split()[1] or high - low > 1 << 26: continue\n"
        "      try: memory.seek(low); found += memory.read(high - low).count(needle * 3)\n"
        "      except (OSError, ValueError, OverflowError): pass\nfound"
    )
    hidden = bytes(byte ^ 255 for byte in bytes.fromhex(marker))
    result = attacked.run(f"hidden = {hidden!r}\n{code}")
    assert result.value == "0" or "Error" in result.error
    attacked.end(other)


@pytest.mark.parametrize(
    "signals",
    [
        "for pid in range(2, 5000):\n  try: os.kill(pid, 9)\n  except OSError: pass",
        "for pid in range(2, 5000):\n  try: os.killpg(pid, 9)\n  except OSError: pass",
        "try: os.kill(-1, 9)\nexcept OSError: pass",
        "try: os.kill(0, 0)\nexcept OSError: pass",
    ],
)
def test_signals_stay_inside(attacked: Any, bystander: str, signals: str) -> None:
    below = set(attacked.server.descendants())
    session = attacked.open()
    attacked.exec(session, f"import os\n{signals}")
    assert below <= set(attacked.server.descendants()) | {_ for _ in below if not Path(f"/proc/{_}").exists()}
    assert attacked.exec(bystander, "1 + 1").value == "2"
    attacked.end(session)


def test_accomplices_cannot_send_each_other_messages(attacked: Any) -> None:
    # a socket that lost its peer and asked for credentials gets an address of its own, without a call to bind
    listen = (
        "import socket\nmine, peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\naddress = None\ntry:\n"
        "  mine.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)\n  mine.send(b'x')\n  peer.close()\n"
        "  try: mine.send(b'x')\n  except ConnectionRefusedError: pass\n  address = mine.getsockname()\n"
        "except OSError: pass\nmine.setblocking(False)\naddress"
    )
    send = "import socket\none, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\none.sendto(b'hello', address)"
    first, second = attacked.open(), attacked.open()
    address = attacked.exec(first, listen).value or "b'\\x0000001'"
    result = attacked.exec(second, f"address = {address}\n{send}")
    assert result.reason is Reason.EXCEPTION
    assert attacked.exec(first, "try: mine.recv(100)\nexcept OSError: pass").value is None
    for session in (first, second):
        attacked.end(session)


def test_accomplices_share_no_locks_and_no_ipc(attacked: Any) -> None:
    lock = "import fcntl, os\nfile = open(os.__file__)\ntry: fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
    lock += "except BlockingIOError: held = True\nexcept OSError: held = False\nelse: held = False\n"
    shared = "import ctypes, os\nlibc = ctypes.CDLL(None)\n(libc.shmget(4711, 4096, {0}), libc.msgget(4711, {0}))"
    first, second = attacked.open(), attacked.open()
    attacked.exec(first, lock)
    attacked.exec(first, shared.format("0o1666"))  # makes them, where it may
    attacked.exec(first, "for folder in ('/tmp', '/dev/shm'): _ = open(folder + '/left', 'w').write('x')")
    assert attacked.exec(second, lock + "held").value == "False"
    assert attacked.exec(second, shared.format("0o666")).value == "(-1, -1)"
    assert (
        attacked.exec(second, "[os.path.exists(p) for p in ('/tmp/left', '/dev/shm/left')]").value == "[False, False]"
    )
    for session in (first, second):
        attacked.end(session)


def test_the_next_session_finds_nothing_of_the_last(attacked: Any) -> None:
    session = attacked.open()
    spoil = (
        "import os, builtins, sys\nbuiltins.print = builtins.len = sum\nos.environ['SPOILT'] = '1'\n"
        "sys.modules['json'] = None\nopen('/tmp/left', 'w').write('x')\nsys.path.insert(0, '/tmp')"
    )
    attacked.exec(session, spoil, 0.5)
    attacked.drop(session)
    code = "import os, sys, json; (len([1, 2]), 'SPOILT' in os.environ, '/tmp' in sys.path, os.listdir('/tmp'))"
    assert {attacked.run(code).value for _ in range(4)} == {"(2, False, False, [])"}


def test_links_lead_nowhere(attacked: Any, bystander: str) -> None:
    code = (
        "import os\nos.symlink('/proc/1/root/etc/passwd', '/tmp/a')\n"
        "os.symlink('/tmp/../../../etc/hostname', '/tmp/b')\n"
        "read = []\nfor path in ('/tmp/a', '/tmp/b', '/tmp/../etc/passwd', '/proc/self/root/../etc/hostname'):\n"
        "  try: read.append(open(path).read())\n  except OSError: pass\n"
        "try: os.link(os.__file__, '/tmp/hard'); read.append('hard link')\nexcept OSError: pass\nread"
    )
    read = literal_eval(attacked.run(code).value)
    host = {path.read_text() for path in (Path("/etc/passwd"), Path("/etc/hostname")) if path.exists()}
    assert host.isdisjoint(read)
    assert "hard link" not in read
