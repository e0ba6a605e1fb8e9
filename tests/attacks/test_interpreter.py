"""Code that turns on the interpreter it shares with the sandbox's own code, or on the channel to the host."""

import time
from typing import Any

import pytest

from sandbox.base import Reason, SessionLost

FORGE = """
import json, os, struct, sys
def write(message, length=None):
    body = json.dumps(message).encode()
    os.write(3, struct.pack('!I', len(body) if length is None else length) + body)
reply = {'id': 'x', 'stdout': 'forged', 'stderr': '', 'value': None, 'error': None, 'reason': 'ok', 'truncated': False}
def asked():
    frame = sys._getframe()
    while 'request' not in frame.f_locals: frame = frame.f_back
    return frame.f_locals['request']['id']
"""
LIES = {
    "the cell's class": "import sandbox.cell as c; c.Cell.run = lambda *a: {**REPLY, 'stdout': 'lie'}",
    "json": "import json; old = json.dumps; json.dumps = lambda m, **k: old({**m, 'stdout': 'lie'})",
    "a trace function": "import sys; sys.settrace(lambda *a: None); sys.setprofile(lambda *a: None)",
    "the streams": "import sys; sys.stdout.close(); sys.stdout = sys.stderr = sys.__stdout__ = None",
    "the collector": "import gc; gc.unfreeze()\n"
    "[o.clear() for o in gc.get_objects() if type(o) is dict and 'Cell' in o]",
    "the exit": "import atexit, os; atexit.register(os.fork); os._exit = lambda code: None; os.getpid = lambda: 1",
    "the alarm": "import signal; signal.signal = signal.setitimer = signal.alarm = lambda *a: None",
    "the imports": "import sys; sys.modules.clear(); sys.meta_path.clear(); sys.path.clear()",
    "the builtins": "import builtins; [setattr(builtins, n, None) for n in dir(builtins) if n != 'setattr']",
    "the limits of frames": "import sys; sys.setrecursionlimit(30)",
}


@pytest.mark.parametrize("attack", LIES)
def test_an_interpreter_turned_over_lies_in_its_own_session_only(attacked: Any, bystander: str, attack: str) -> None:
    session = attacked.open()
    reply = "REPLY = {'stdout': '', 'stderr': '', 'value': None, 'error': None, 'reason': 'ok', 'truncated': False}\n"
    attacked.exec(session, reply + LIES[attack], 0.5)
    try:
        result = attacked.exec(session, "print('truth')", 0.5)
        assert result.reason in set(Reason)
    except SessionLost:
        pass
    attacked.drop(session)
    assert attacked.run("print('truth')").stdout == "truth\n"


@pytest.mark.parametrize(
    "attack",
    [
        "write(reply)",
        "write(reply, 2 ** 32 - 1)",
        "write({'ready': True})",
        "write({**reply, 'id': asked(), 'alive': True})",
        "write({**reply, 'id': asked(), 'reason': 'granted'})",
        "write({**reply, 'id': asked(), 'stdout': 'forged' * 1000})",
        "os.write(3, b'\\0' * 100_000)",
        "os.write(3, struct.pack('!I', 200) + b'[' * 200)",
        "os.write(3, struct.pack('!I', 50_000) + b'[' * 50_000)",
        "os.closerange(0, 64)",
    ],
)
def test_a_forged_reply_or_a_closed_pipe_ends_that_session_only(zygote: Any, attack: str) -> None:
    other = zygote.open()
    result = zygote.run(FORGE + attack)
    assert (result.reason, result.alive) == (Reason.EXIT, False)
    assert "forged" not in result.stdout
    assert result.error.startswith("the session ended")
    assert zygote.exec(other, "1 + 1").value == "2"
    zygote.end(other)


def test_an_answer_given_twice_ends_the_session(zygote: Any) -> None:
    session = zygote.open()
    result = zygote.exec(session, FORGE + "write({**reply, 'id': asked()})")
    assert result.stdout in ("forged", "")  # its own answer may be a lie; the true one then comes unasked
    if result.alive:
        assert not zygote.exec(session, "1").alive
    with pytest.raises(SessionLost):
        zygote.exec(session, "1")


def test_a_reply_written_between_calls_ends_that_session_only(zygote: Any) -> None:
    session, other = zygote.open(), zygote.open()
    code = (
        "import sys, threading, time\nmain = threading.main_thread().ident\ndef later():\n"
        "  while sys._current_frames()[main].f_code.co_name != '_read': time.sleep(0.01)\n"
        "  write(reply)\nthreading.Thread(target=later).start()"
    )
    started = zygote.exec(session, FORGE + code)
    zygote.exec(other, "import time; time.sleep(0.6)")
    if started.reason is Reason.EXCEPTION:  # without cgroups there are no threads
        assert "can't start new thread" in started.error
    else:
        result = zygote.exec(session, "1")
        assert (result.reason, result.alive) == (Reason.EXIT, False)
    assert zygote.exec(other, "1 + 1").value == "2"
    for one in (session, other):
        zygote.drop(one)


def test_a_fork_does_not_shift_later_replies(attacked: Any) -> None:
    session = attacked.open()
    attacked.exec(session, "import os, time\ntry:\n  if os.fork(): time.sleep(0.3)\nexcept OSError: pass")
    time.sleep(0.5)  # were the child to answer too, one of the two replies would come now
    assert [attacked.exec(session, f"{n} * 2").value for n in range(5)] == ["0", "2", "4", "6", "8"]
    attacked.end(session)


def test_sockets_found_in_memory_are_dead(zygote: Any) -> None:
    code = (
        "import gc, os, socket, stat\ngc.unfreeze()\nalive = set()\n"
        "for one in gc.get_objects():\n  if isinstance(one, socket.socket):\n"
        "    try: alive.add(one.fileno()) if stat.S_ISSOCK(os.fstat(one.fileno()).st_mode) else None\n"
        "    except OSError: pass\n"
        "(alive - {3}, [fd for fd in range(4, 1024) if os.path.exists(f'/proc/self/fd/{fd}')])"
    )
    assert zygote.run(code).value == "(set(), [])"
