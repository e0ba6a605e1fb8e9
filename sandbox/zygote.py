"""Sessions forked from one warm Python inside bubblewrap. This is the host's side; `inside.py` is the other.

A session costs a fork: its own pid, mount, ipc and uts namespaces, /tmp, /dev/shm and /proc, no network,
a read-only root, no capabilities, a seccomp filter, resource limits, and a cgroup where one is writable.
Where none is, a session keeps to one process, since limits a process are then limits a session.
"""

import asyncio
import contextlib
import functools
import os
import signal
import socket
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from sandbox.base import SessionLost, Unavailable
from sandbox.cgroups import Cgroups, Slot
from sandbox.channel import Channel
from sandbox.nursery import Nursery, host_pid
from sandbox.pool import LIGHT, PoolConfig, Session, SessionPool

_FORKS_AT_ONCE = 16


class ZygoteConfig(PoolConfig):
    """Sessions forked from one warm Python in bubblewrap: a new one within milliseconds. Linux only."""

    type: Literal["zygote"] = "zygote"
    preload: tuple[str, ...] = Field(default_factory=lambda known: (*LIGHT, *known.get("packages", ())))
    """Modules that every session finds imported; by default all of `packages` too. sympy and numpy cost a session about
    3 CPU-ms and 2 MB, and save the first call that imports them a second or more."""


@dataclass(eq=False, kw_only=True)
class ZygoteSession(Session):
    """A process tree, held by the pidfd of its first process."""

    nursery: Nursery
    pidfd: int
    slot: Slot | None = None


class ZygoteSandbox(SessionPool[ZygoteSession]):
    """Sessions on this machine without any daemon."""

    def __init__(self, config: ZygoteConfig) -> None:
        super().__init__(config)
        self._cgroups: Cgroups | None = None
        self._nursery: Nursery | None = None
        self._nursery_lock = asyncio.Lock()
        self._forking = asyncio.Semaphore(_FORKS_AT_ONCE)
        self._ending: set[ZygoteSession] = set()

    @property
    def limited_by(self) -> str:
        """What bounds a session's memory and processes: `cgroup-v1`, `cgroup-v2` or `rlimits`."""
        return f"cgroup-v{self._cgroups.version}" if self._cgroups else "rlimits"

    async def _set_up(self) -> None:
        limits = self.config.limits
        with contextlib.suppress(OSError):
            self._cgroups = Cgroups(limits.memory_mb + limits.tmp_mb, limits.max_processes)

    async def _tear_down(self) -> None:
        if self._nursery is not None:
            await self._nursery.stop()
            self._nursery = None
        for _ in range(200):
            if not self._ending:
                break
            await asyncio.sleep(0.01)
        if self._cgroups is not None:
            self._cgroups.remove()

    async def _make(self) -> ZygoteSession:
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
        session = ZygoteSession(channel=channel, nursery=nursery, pidfd=pidfd)
        try:
            await self._settle(session)
        except BaseException:
            self._end(session)
            raise
        return session

    async def _settle(self, session: ZygoteSession) -> None:
        """Put a session into its cgroup and wait until it has isolated itself; only then may it run code."""
        try:
            if self._cgroups is not None:
                session.slot = self._cgroups.take()
                # in a thread: the kernel can take tens of milliseconds over it
                await asyncio.to_thread(session.slot.add, host_pid(session.pidfd))
        except OSError as error:
            raise Unavailable(f"a session could not be made: {error}") from error
        await self._await_ready(session.channel)

    async def _died_of_memory(self, session: ZygoteSession) -> bool:
        # its own: another may have taken over already
        if not session.nursery.alive:
            raise SessionLost("the sandbox's zygote has died, and all sessions with it")
        return session.slot is not None and session.slot.out_of_memory()

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

    def _kill(self, session: ZygoteSession) -> None:
        """Kill a session; its cgroup is given back once its pidfd says that the last process is gone."""
        _kill(session.pidfd)
        self._ending.add(session)
        asyncio.get_running_loop().add_reader(session.pidfd, self._ended, session)

    def _ended(self, session: ZygoteSession) -> None:
        asyncio.get_running_loop().remove_reader(session.pidfd)
        os.close(session.pidfd)
        self._ending.discard(session)
        if session.slot is not None and self._cgroups is not None:
            self._cgroups.give_back(session.slot)


def _kill(pidfd: int) -> None:
    """Kill a session's pid 1, and so everything in it. The pidfd is closed only after its end was seen."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
