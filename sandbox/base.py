"""The interface of sandboxes: sessions run untrusted Python and keep their variables between calls.

A command that fails is a result with a reason; a sandbox that fails is an exception:

    SandboxError
    ├── Unsupported     isolation cannot be had on this machine; says what is missing and how to get it
    ├── Unavailable     the sandbox or its server cannot be reached, or has no room for another session
    ├── SessionLost     the session is unknown: closed, expired, ended by its own code, or of an earlier server
    └── FileRefused     a file that cannot be put or got: its name, its size, or the session's own reason

Nothing that a session writes is trusted: grading happens outside of it.
"""

import enum
from abc import ABC, abstractmethod

from pydantic import BaseModel, ConfigDict, Field


class SandboxError(Exception):
    """A sandbox that failed, as opposed to code that failed inside of one."""


class Unsupported(SandboxError):  # noqa: N818
    """Isolation cannot be had on this machine."""


class Unavailable(SandboxError):  # noqa: N818
    """The sandbox cannot be reached or has no room; the same request may succeed later."""


class SessionLost(SandboxError):  # noqa: N818
    """The session is gone, and its variables with it; open another one."""


class FileRefused(SandboxError):  # noqa: N818
    """The file cannot be put or got; the session itself goes on."""


class Reason(enum.StrEnum):
    """How an exec ended."""

    OK = "ok"
    EXCEPTION = "exception"
    TIMEOUT = "timeout"
    MEMORY = "memory"
    OUTPUT = "output"
    EXIT = "exit"


class ExecResult(BaseModel):
    """What one exec did.

    `value` is the repr of the last line if that is an expression whose value is not None. `error` is a
    short traceback of the user's own lines (each indented, "  line 3, in f"), then the exception, or a
    sentence where there is no exception. `truncated` says that stdout, stderr or value were cut.
    `alive` is False if the session ended with this call, so that its variables are lost.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    stdout: str = ""
    stderr: str = ""
    value: str | None = None
    error: str | None = None
    reason: Reason = Reason.OK
    truncated: bool = False
    alive: bool = True
    duration_s: float = 0.0


class SandboxLimits(BaseModel):
    """What one session may use."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    memory_mb: int = Field(default=256, ge=32)
    """Memory of all its processes together, without /tmp, in MiB."""
    cpu_s: int = Field(default=60, ge=1)
    """CPU seconds of each of its processes over the life of the session."""
    wall_s: float = Field(default=10.0, gt=0)
    """Longest wall time of one exec in seconds, and the default where a call names none."""
    max_processes: int = Field(default=16, ge=1)
    """Processes and threads at one time. Where no cgroup is writable, a session has one."""
    tmp_mb: int = Field(default=16, ge=1)
    """Size of its /tmp, and again of its /dev/shm, in MiB."""
    max_output_bytes: int = Field(default=16384, ge=64)
    """Longest stdout, stderr and value, each; of more, head and tail are kept. 64 times as much ends the call."""
    idle_s: float = Field(default=600.0, gt=0)
    """A session is closed when its client has been silent for this long; a client that runs keeps its own open."""


class Sandbox(ABC):
    """Runs untrusted code in sessions that cannot see the host or each other."""

    @abstractmethod
    async def open(self) -> str:
        """A new session's id. Raises `Unavailable` if there is no room."""

    @abstractmethod
    async def exec(
        self, session_id: str, code: str, wall_s: float | None = None, max_output_bytes: int | None = None
    ) -> ExecResult:
        """Run `code` in the session; variables persist. Raises `SessionLost` if the session is unknown.

        `wall_s` (seconds) and `max_output_bytes` lower the session's own limits for this call, never raise them.
        """

    @abstractmethod
    async def put_file(self, session_id: str, name: str, content: bytes) -> None:
        """Write a file into the session's working directory; `name` is a relative path in it.

        Raises `FileRefused` if the name leaves that directory or the session has no room, `SessionLost` if the
        session is unknown.
        """

    @abstractmethod
    async def get_file(self, session_id: str, name: str) -> bytes:
        """The content of a file in the session's working directory: untrusted, at most the size of its /tmp.

        Raises `FileRefused` if there is no such regular file, `SessionLost` if the session is unknown.
        """

    @abstractmethod
    async def close_session(self, session_id: str) -> None:
        """End the session and everything in it. Raises `SessionLost` if it is unknown."""
