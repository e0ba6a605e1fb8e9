"""The host's handle of the zygote process: start it, ask it for sessions, end it."""

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import Any

from sandbox import seccomp
from sandbox.base import Unavailable, Unsupported

_START_S = 60.0
_STOP_S = 5.0


class Nursery:
    """A zygote in bubblewrap. `fork` gives the pidfd of a new session that owns the other end of a socket."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket) -> None:
        self._process, self._control = process, control
        self._waiting: deque[asyncio.Future[int]] = deque()
        self._connected = True
        asyncio.get_running_loop().add_reader(control, self._on_reply)

    @classmethod
    async def start(cls, config: dict[str, Any]) -> "Nursery":
        """Start the zygote. Raises `Unsupported`, with what bubblewrap or the kernel said, if it cannot isolate."""
        if not sys.platform.startswith("linux") or os.uname().machine not in seccomp.SUPPORTED:
            known = ", ".join(seccomp.SUPPORTED)
            raise Unsupported(f"the sandbox needs Linux on {known}; here it is {sys.platform} on {os.uname().machine}")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "sandbox.launch", str(theirs.fileno()), json.dumps(config)]
        here = str(Path(__file__).resolve().parent.parent)
        # a process of uid 65534 must not have the token in its environment
        environment = {name: value for name, value in os.environ.items() if name != "SANDBOX_TOKEN"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
        # bubblewrap dies with the thread that starts it, so it is started from this one
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=(theirs.fileno(),),
            env=environment,
        )
        theirs.close()
        ours.setblocking(False)
        await cls._first_word(process, ours)
        return cls(process, ours)

    @staticmethod
    async def _first_word(process: subprocess.Popen[bytes], ours: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            word = await asyncio.wait_for(loop.sock_recv(ours, 16), _START_S)
        except (TimeoutError, OSError):
            word = b""
        if word != b"ready":
            process.kill()
            _, errors = process.communicate()
            ours.close()
            raise Unsupported(_explain(errors.decode(errors="replace")))

    @property
    def alive(self) -> bool:
        """Whether the zygote lives; asks the process too, whose end may be seen before that of the socket."""
        return self._connected and self._process.poll() is None

    async def fork(self, channel: socket.socket) -> int:
        """Give `channel` to a new session; its pidfd. Raises `Unavailable` if the zygote or the kernel has none."""
        if not self.alive:
            raise Unavailable("the sandbox's zygote has died")
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        try:
            socket.send_fds(self._control, [b"fork"], [channel.fileno()])
        except OSError as error:
            raise Unavailable(f"the sandbox's zygote cannot be asked: {error.strerror}") from error
        self._waiting.append(future)
        return await future

    async def stop(self) -> None:
        """End the zygote, and with it every session."""
        self._die()
        deadline = asyncio.get_running_loop().time() + _STOP_S
        while self._process.poll() is None:
            if asyncio.get_running_loop().time() > deadline:
                self._process.kill()
            await asyncio.sleep(0.01)
        assert self._process.stderr is not None
        self._process.stderr.close()

    def _on_reply(self) -> None:
        try:
            message, fds, _, _ = socket.recv_fds(self._control, 16, 1)
        except BlockingIOError:
            return
        except OSError:
            message, fds = b"", []
        if not message:
            self._die()
            return
        future = self._waiting.popleft()
        if future.cancelled():
            for fd in fds:
                os.close(fd)
        elif fds:
            future.set_result(fds[0])
        else:
            why = os.strerror(int(message)) if message.isdigit() else "it died"
            future.set_exception(Unavailable(f"a session could not be made: {why}"))

    def _die(self) -> None:
        if not self._connected:
            return
        self._connected = False
        asyncio.get_running_loop().remove_reader(self._control)
        self._control.close()
        for future in self._waiting:
            if not future.done():
                future.set_exception(Unavailable("the sandbox's zygote has died"))
        self._waiting.clear()


def host_pid(pidfd: int) -> int:
    """The pid, in this process's own namespace, behind a pidfd; -1 once it has ended."""
    found = re.search(r"^Pid:\t(-?\d+)", Path(f"/proc/self/fdinfo/{pidfd}").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


def _explain(errors: str) -> str:
    """One sentence on why no zygote came up, from the last line of what was said on stderr."""
    lines = [line for line in errors.strip().splitlines() if line.strip()] or ["it ended without a word"]
    hint = ""
    if lines[-1].startswith("bwrap:"):
        hint = (
            "; bubblewrap needs unprivileged user namespaces and a /proc that is not masked: see the sysctls"
            " user.max_user_namespaces and kernel.apparmor_restrict_unprivileged_userns, and in a container run it"
            " with the rights to make namespaces (Docker: --security-opt seccomp=unconfined,systempaths=unconfined)"
        )
    return f"no sandbox can be started: {lines[-1]}{hint}"
