"""Sessions by id, whatever makes them: a warm stock, one call at a time, idle expiry, and the end.

A backend derives from `SessionPool` and says how one session is made, killed, and why it may have died.
"""

import asyncio
import contextlib
import secrets
import time
from abc import abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from sandbox import files
from sandbox.base import (
    ExecResult,
    FileRefused,
    Reason,
    Sandbox,
    SandboxLimits,
    SessionLost,
    Unavailable,
    Unsupported,
)
from sandbox.channel import BrokenChannel, Channel

_GRACE_S = 1.5
_READY_S = 30.0
_MIB = 1 << 20
_SELF_CHECK = """
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
need = {"CapEff": "0" * 16, "CapBnd": "0" * 16, "NoNewPrivs": "1", "Seccomp": "2", "Pid": "1"}
[f"{name} is {status[name].strip()}" for name in need if status[name].strip() != need[name]]
"""


LIGHT = ("math", "fractions", "itertools", "random", "collections", "re")
"""Modules that cost next to nothing to preload."""


class PoolConfig(BaseModel):
    """Keys of every backend."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    type: str
    """Which backend."""
    packages: tuple[str, ...] = ("sympy", "mpmath", "numpy")
    """Installed packages that sessions can import, beside the standard library."""
    preload: tuple[str, ...] = LIGHT
    """Modules that every session finds imported."""
    max_sessions: int = Field(default=512, ge=1)
    """Open sessions at one time; a further `open` raises `Unavailable`."""
    warm_sessions: int = Field(default=8, ge=0)
    """Sessions kept ready, so that `open` need not wait until one is made."""
    limits: SandboxLimits = SandboxLimits()
    """What one session may use."""


@dataclass(eq=False, kw_only=True)
class Session:
    """One process tree, and what the host holds of it."""

    channel: Channel
    used_at: float = field(default_factory=time.monotonic)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    ended: bool = False


AnySession = TypeVar("AnySession", bound=Session)


class SessionPool(Sandbox, Generic[AnySession]):
    """The sandbox of this machine; `start` before use, `stop` at the end."""

    def __init__(self, config: PoolConfig) -> None:
        self.config = config
        self.sessions: dict[str, AnySession] = {}
        self.opened = self.execs = self.expired = 0
        self._opening = 0
        self._warm: deque[AnySession] = deque()
        self._stopping = False
        self._refilling: asyncio.Task[None] | None = None
        self._reaping: asyncio.Task[None] | None = None

    @property
    @abstractmethod
    def limited_by(self) -> str:
        """What bounds a session's memory and processes."""

    @abstractmethod
    async def _set_up(self) -> None:
        """Make ready what sessions are made from. Raises `Unsupported` with what is missing."""

    @abstractmethod
    async def _make(self) -> AnySession:
        """A new session, isolated and ready. Raises `Unavailable` or `Unsupported`, and then leaves nothing."""

    @abstractmethod
    def _kill(self, session: AnySession) -> None:
        """Begin to end everything in a session; called once, and must not wait."""

    @abstractmethod
    async def _died_of_memory(self, session: AnySession) -> bool:
        """Whether the kernel ended the session for memory. Raises `SessionLost` if the backend itself is gone."""

    @abstractmethod
    async def _tear_down(self) -> None:
        """Wait for the end of what `_kill` began, and leave nothing behind. May be called again."""

    @property
    def num_warm(self) -> int:
        return len(self._warm)

    async def start(self) -> None:
        """Make ready for sessions. Raises `Unsupported` if the machine cannot isolate them."""
        try:
            await self._set_up()
            await self._prove()
            await self._refill()
        except BaseException:
            await self.stop()
            raise
        self._reaping = asyncio.create_task(self._reap_idle())

    async def stop(self) -> None:
        """End every session, and leave nothing behind. May be called again."""
        self._stopping = True
        for task in (self._reaping, self._refilling):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        for session in [*self.sessions.values(), *self._warm]:
            self._end(session)
        self.sessions.clear()
        self._warm.clear()
        await self._tear_down()

    async def open(self) -> str:
        if self._stopping:
            raise Unavailable("the sandbox is stopping")
        if len(self.sessions) + self._opening >= self.config.max_sessions:
            raise Unavailable(f"all {self.config.max_sessions} sessions are open; close one or raise `max_sessions`")
        self._opening += 1
        try:
            session = self._take_warm() or await self._make()
        finally:
            self._opening -= 1
        session_id = secrets.token_hex(16)
        session.used_at = time.monotonic()
        self.sessions[session_id] = session
        self.opened += 1
        if self._reaping is not None and (self._refilling is None or self._refilling.done()):
            self._refilling = asyncio.create_task(self._refill())
        return session_id

    async def exec(
        self, session_id: str, code: str, wall_s: float | None = None, max_output_bytes: int | None = None
    ) -> ExecResult:
        limits = self.config.limits
        request = {
            "code": code,
            "wall_s": min(wall_s or limits.wall_s, limits.wall_s),
            "max_output_bytes": min(max_output_bytes or limits.max_output_bytes, limits.max_output_bytes),
        }
        async with self._using(session_id) as session:
            self.execs += 1
            return await self._exec(session, request)

    async def put_file(self, session_id: str, name: str, content: bytes) -> None:
        files.check_name(name)
        if len(content) > (room := self.config.limits.tmp_mb * _MIB):
            raise FileRefused(f"{name!r} has {len(content)} bytes; a session has room for {room}")
        async with self._using(session_id) as session, self._transfer(session):
            await files.put(session.channel, name, content)

    async def get_file(self, session_id: str, name: str) -> bytes:
        files.check_name(name)
        limits = self.config.limits
        async with self._using(session_id) as session, self._transfer(session):
            return await files.get(session.channel, name, limits.max_output_bytes, limits.tmp_mb * _MIB)

    def keep(self, session_ids: Iterable[str]) -> list[str]:
        """Count these sessions as used now, so that they do not expire; returns those that are unknown."""
        now, lost = time.monotonic(), list[str]()
        for session_id in session_ids:
            if (session := self.sessions.get(session_id)) and session.channel.whole:
                session.used_at = now
            else:
                lost.append(session_id)
        return lost

    async def close_session(self, session_id: str) -> None:
        self._end(self._find(session_id))
        self.sessions.pop(session_id, None)

    def _find(self, session_id: str) -> AnySession:
        session = self.sessions.get(session_id)
        if session is None:
            raise SessionLost(f"session {session_id} is unknown: closed, expired, ended, or of an earlier server")
        return session

    @contextlib.asynccontextmanager
    async def _using(self, session_id: str) -> AsyncIterator[AnySession]:
        """Lend the session to one caller at a time; afterwards forget it if its process has ended."""
        session = self._find(session_id)
        async with session.lock:
            if session.ended:
                raise SessionLost(f"session {session_id} has ended")
            try:
                yield session
            finally:
                session.used_at = time.monotonic()
                closed_meanwhile = session.ended
                if not session.channel.whole:
                    self._end(session)
                    self.sessions.pop(session_id, None)
            if closed_meanwhile:
                raise SessionLost(f"session {session_id} was closed while it ran")

    async def _exec(self, session: AnySession, request: dict[str, Any]) -> ExecResult:
        started = time.monotonic()
        fields: dict[str, Any]
        try:
            async with asyncio.timeout(request["wall_s"] + _GRACE_S):
                reply = await session.channel.request(secrets.token_hex(8), request)
            fields = reply.model_dump(exclude={"id"})
        except TimeoutError:
            session.channel.close()
            fields = {"reason": Reason.TIMEOUT, "error": f"killed after {request['wall_s']:g} s", "alive": False}
        except BrokenChannel as broken:
            fields = {"reason": Reason.EXIT, "error": f"the session ended: {broken}", "alive": False}
            if not session.ended and await self._died_of_memory(session):
                fields["reason"] = Reason.MEMORY
                fields["error"] = f"killed: over {self.config.limits.memory_mb} MB of memory"
        return ExecResult(**fields, duration_s=time.monotonic() - started)

    @contextlib.asynccontextmanager
    async def _transfer(self, session: AnySession) -> AsyncIterator[None]:
        """Bound a file transfer by the time of one call; a session that breaks it is lost."""
        try:
            async with asyncio.timeout(self.config.limits.wall_s + _GRACE_S):
                yield
        except (BrokenChannel, TimeoutError) as error:
            session.channel.close()
            why = str(error) or "it took longer than a call may"
            raise SessionLost(f"the session ended during a file transfer: {why}") from error

    def _take_warm(self) -> AnySession | None:
        while self._warm:
            session = self._warm.popleft()
            if session.channel.whole:
                return session
            self._end(session)
        return None

    async def _await_ready(self, channel: Channel) -> None:
        """Wait until a session has isolated itself; only then may it run code."""
        try:
            async with asyncio.timeout(_READY_S):
                ready = await channel.ready()
        except (BrokenChannel, TimeoutError) as error:
            raise Unavailable(f"a session could not be made: {str(error) or 'it was not ready in time'}") from error
        if not ready.ready:
            raise Unavailable(f"a session could not be isolated: {ready.error}")

    async def _prove(self) -> None:
        """Run a first session, so that a sandbox that is not isolated refuses to start."""
        try:
            session_id = await self.open()
        except Unavailable as error:
            raise Unsupported(str(error)) from error
        result = await self.exec(session_id, _SELF_CHECK)
        if result.value != "[]":
            raise Unsupported(f"a session started, but it is not isolated: {result.error or result.value}")
        await self._check_first(session_id)
        await self.close_session(session_id)

    async def _check_first(self, session_id: str) -> None:
        """Check what else a backend requires of a first session. Raises `Unsupported`."""

    async def _refill(self) -> None:
        with contextlib.suppress(Unavailable, Unsupported):
            while len(self._warm) < self.config.warm_sessions:
                self._warm.append(await self._make())

    async def _reap_idle(self) -> None:
        idle_s = self.config.limits.idle_s
        while True:
            await asyncio.sleep(min(1.0, idle_s / 4))
            now = time.monotonic()
            for session_id, session in list(self.sessions.items()):
                if not session.lock.locked() and now - session.used_at > idle_s:
                    self._end(session)
                    del self.sessions[session_id]
                    self.expired += 1

    def _end(self, session: AnySession) -> None:
        if session.ended:
            return
        session.ended = True
        session.channel.close()
        self._kill(session)
