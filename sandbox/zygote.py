"""Sessions forked from one warm Python inside bubblewrap. This is the host's side; `inside.py` is the other.

A session costs a fork: its own pid, mount, ipc and uts namespaces, /tmp, /dev/shm and /proc, no network,
a read-only root, no capabilities, a seccomp filter, resource limits, and a cgroup where one is writable.
Where none is, a session keeps to one process, since limits a process are then limits a session.
"""

import asyncio
import contextlib
import functools
import os
import secrets
import signal
import socket
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from sandbox.base import ExecResult, Reason, Sandbox, SandboxLimits, SessionLost, Unavailable, Unsupported
from sandbox.cgroups import Cgroups, Slot
from sandbox.channel import BrokenChannel, Channel
from sandbox.nursery import Nursery, host_pid

_GRACE_S = 1.5
_READY_S = 30.0
_FORKS_AT_ONCE = 16
_SELF_CHECK = """
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
need = {"CapEff": "0" * 16, "CapBnd": "0" * 16, "NoNewPrivs": "1", "Seccomp": "2", "Pid": "1"}
[f"{name} is {status[name].strip()}" for name in need if status[name].strip() != need[name]]
"""


class ZygoteConfig(BaseModel):
    """How sessions are made."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    preload: tuple[str, ...] = ("math", "fractions", "itertools", "random", "collections", "re")
    """Modules that every session finds imported. sympy makes each session about 2.7 CPU-ms dearer."""
    packages: tuple[str, ...] = ("sympy", "mpmath", "numpy")
    """Installed packages that sessions can import, beside the standard library."""
    max_sessions: int = Field(default=512, ge=1)
    """Open sessions at one time; a further `open` raises `Unavailable`."""
    warm_sessions: int = Field(default=8, ge=0)
    """Sessions kept ready, so that `open` need not wait for a fork."""
    limits: SandboxLimits = SandboxLimits()
    """What one session may use."""


@dataclass(eq=False)
class Session:
    """One process tree, and what the host holds of it."""

    pidfd: int
    channel: Channel
    slot: Slot | None
    used_at: float = field(default_factory=time.monotonic)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    ended: bool = False


class ZygoteSandbox(Sandbox):
    """The sandbox of this machine; `start` before use, `stop` at the end."""

    def __init__(self, config: ZygoteConfig) -> None:
        self.config = config
        self.sessions: dict[str, Session] = {}
        self.opened = self.execs = 0
        self._opening = 0
        self._cgroups: Cgroups | None = None
        self._nursery: Nursery | None = None
        self._nursery_lock = asyncio.Lock()
        self._forking = asyncio.Semaphore(_FORKS_AT_ONCE)
        self._warm: deque[Session] = deque()
        self._ending: set[Session] = set()
        self._stopping = False
        self._refilling: asyncio.Task[None] | None = None
        self._reaping: asyncio.Task[None] | None = None

    @property
    def limited_by(self) -> str:
        """What bounds a session's memory and processes: `cgroup-v1`, `cgroup-v2` or `rlimits`."""
        return f"cgroup-v{self._cgroups.version}" if self._cgroups else "rlimits"

    async def start(self) -> None:
        """Raises `Unsupported` if isolation cannot be had."""
        limits = self.config.limits
        with contextlib.suppress(OSError):
            self._cgroups = Cgroups(limits.memory_mb + limits.tmp_mb, limits.max_processes)
        try:
            await self._prove()
            await self._refill()
        except BaseException:
            await self.stop()
            raise
        self._reaping = asyncio.create_task(self._reap_idle())

    async def stop(self) -> None:
        """End every session and the zygote, and leave nothing behind. May be called again."""
        self._stopping = True
        for task in (self._reaping, self._refilling):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        for session in [*self.sessions.values(), *self._warm]:
            self._end(session)
        self.sessions.clear()
        self._warm.clear()
        if self._nursery is not None:
            await self._nursery.stop()
            self._nursery = None
        for _ in range(200):
            if not self._ending:
                break
            await asyncio.sleep(0.01)
        if self._cgroups is not None:
            self._cgroups.remove()

    async def open(self) -> str:
        if len(self.sessions) + self._opening >= self.config.max_sessions:
            raise Unavailable(f"all {self.config.max_sessions} sessions are open; close one or raise `max_sessions`")
        self._opening += 1
        try:
            session = self._take_warm() or await self._new_session()
        finally:
            self._opening -= 1
        session_id = secrets.token_hex(16)
        session.used_at = time.monotonic()
        self.sessions[session_id] = session
        self.opened += 1
        if self._reaping is not None and (self._refilling is None or self._refilling.done()):
            self._refilling = asyncio.create_task(self._refill())
        return session_id

    async def exec(self, session_id: str, code: str, wall_s: float | None = None) -> ExecResult:
        session = self._find(session_id)
        limit = self.config.limits.wall_s
        async with session.lock:
            if session.ended:
                raise SessionLost(f"session {session_id} has ended")
            self.execs += 1
            result = await self._exec(session, code, min(wall_s or limit, limit))
            session.used_at = time.monotonic()
        if session.ended:
            raise SessionLost(f"session {session_id} was closed while it ran")
        if not result.alive:
            self._end(session)
            self.sessions.pop(session_id, None)
        return result

    async def close_session(self, session_id: str) -> None:
        self._end(self._find(session_id))
        self.sessions.pop(session_id, None)

    def _find(self, session_id: str) -> Session:
        session = self.sessions.get(session_id)
        if session is None:
            raise SessionLost(f"session {session_id} is unknown: closed, expired, ended, or of an earlier server")
        return session

    async def _exec(self, session: Session, code: str, wall_s: float) -> ExecResult:
        started = time.monotonic()
        fields: dict[str, Any]
        try:
            async with asyncio.timeout(wall_s + _GRACE_S):
                reply = await session.channel.request(secrets.token_hex(8), {"code": code, "wall_s": wall_s})
            fields = reply.model_dump(exclude={"id"})
        except TimeoutError:
            fields = {"reason": Reason.TIMEOUT, "error": f"killed after {wall_s:g} s", "alive": False}
        except BrokenChannel as broken:
            if self._nursery is None or not self._nursery.alive:
                raise SessionLost("the sandbox's zygote has died, and all sessions with it") from broken
            fields = {"reason": Reason.EXIT, "error": f"the session ended: {broken}", "alive": False}
            if session.slot is not None and session.slot.out_of_memory():
                fields |= {
                    "reason": Reason.MEMORY,
                    "error": f"killed: over {self.config.limits.memory_mb} MB of memory",
                }
        return ExecResult(**fields, duration_s=time.monotonic() - started)

    def _take_warm(self) -> Session | None:
        while self._warm:
            session = self._warm.popleft()
            if session.channel.whole:
                return session
            self._end(session)
        return None

    async def _new_session(self) -> Session:
        nursery = await self._living_nursery()
        ours, theirs = socket.socketpair()
        try:
            async with self._forking:
                pidfd = await nursery.fork(theirs)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        kill = functools.partial(_kill, pidfd)
        channel = await Channel.connect(ours, self.config.limits.max_output_bytes, kill)
        session = Session(pidfd, channel, self._cgroups.take() if self._cgroups else None)
        try:
            await self._settle(session)
        except BaseException:
            self._end(session)
            raise
        return session

    async def _settle(self, session: Session) -> None:
        """Put a session into its cgroup and wait until it has isolated itself; only then may it run code."""
        try:
            if session.slot is not None:
                # in a thread: the kernel can take tens of milliseconds over it
                await asyncio.to_thread(session.slot.add, host_pid(session.pidfd))
            async with asyncio.timeout(_READY_S):
                ready = await session.channel.ready()
        except (BrokenChannel, OSError) as error:
            raise Unavailable(f"a session could not be made: {error}") from error
        if not ready.ready:
            raise Unavailable(f"a session could not be isolated: {ready.error}")

    async def _living_nursery(self) -> Nursery:
        async with self._nursery_lock:
            if self._stopping:
                raise Unavailable("the sandbox is stopping")
            if self._nursery is not None and not self._nursery.alive:
                await self._nursery.stop()
                self._nursery = None
            if self._nursery is None:
                inside = {"packages": self.config.packages, "preload": self.config.preload}
                fork = {"allow_fork": self._cgroups is not None}
                self._nursery = await Nursery.start(inside | fork | self.config.limits.model_dump())
            return self._nursery

    async def _prove(self) -> None:
        """Run a first session, so that a sandbox that is not isolated refuses to start."""
        try:
            session_id = await self.open()
        except Unavailable as error:
            raise Unsupported(str(error)) from error
        result = await self.exec(session_id, _SELF_CHECK)
        await self.close_session(session_id)
        if result.value != "[]":
            raise Unsupported(f"a session started, but it is not isolated: {result.error or result.value}")

    async def _refill(self) -> None:
        with contextlib.suppress(Unavailable, Unsupported):
            while len(self._warm) < self.config.warm_sessions:
                self._warm.append(await self._new_session())

    async def _reap_idle(self) -> None:
        idle_s = self.config.limits.idle_s
        while True:
            await asyncio.sleep(min(1.0, idle_s / 4))
            now = time.monotonic()
            for session_id, session in list(self.sessions.items()):
                if not session.lock.locked() and now - session.used_at > idle_s:
                    self._end(session)
                    del self.sessions[session_id]

    def _end(self, session: Session) -> None:
        """Kill a session. Its cgroup is free again once its last process is gone, which its pidfd tells."""
        if session.ended:
            return
        session.ended = True
        session.channel.close()
        _kill(session.pidfd)
        self._ending.add(session)
        asyncio.get_running_loop().add_reader(session.pidfd, self._ended, session)

    def _ended(self, session: Session) -> None:
        asyncio.get_running_loop().remove_reader(session.pidfd)
        os.close(session.pidfd)
        self._ending.discard(session)
        if session.slot is not None and self._cgroups is not None:
            self._cgroups.give_back(session.slot)


def _kill(pidfd: int) -> None:
    """Kill a session's pid 1, and so everything in it. The pidfd is closed only after its end was seen."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
