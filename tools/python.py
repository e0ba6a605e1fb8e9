"""The Python tool: code that the model writes, run in one sandbox session an episode."""

from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from sandbox.base import ExecResult, Reason, Sandbox, SandboxError
from tools.base import Tool, ToolResult

NO_OUTPUT = "(no output; use print)"
"""The answer to code that prints nothing and has no value."""
_MAX_CODE_CHARS = 100_000
_RESTARTED = "(session ended; variables are lost)"


class PythonConfig(BaseModel):
    """Keys of the tool `python`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["python"] = "python"
    wall_s: float = Field(default=5.0, gt=0)
    """Time limit of one call in seconds; the server's own limit applies if it is lower."""


class PythonTool(Tool):
    """Runs Python for the model. The session opens with the first call and is closed with the episode."""

    Config = PythonConfig
    name: ClassVar[str] = "python"

    def __init__(self, config: PythonConfig, sandbox: Sandbox) -> None:
        self._config, self._sandbox = config, sandbox
        self._session_id: str | None = None

    async def call(self, code: str) -> ToolResult:
        """Run Python code and return what it prints, or the value of its last line. Variables are kept."""
        if (problem := _unreadable(code)) is not None:
            return ToolResult(f"Error: {problem}", ok=False)
        if self._session_id is None:
            self._session_id = await self._sandbox.open()
        result = await self._sandbox.exec(self._session_id, code, self._config.wall_s)
        if not result.alive:
            self._session_id = None  # the code's own doing: the next call gets a new one
        return ToolResult(render(result), result.reason is Reason.OK)

    async def close(self) -> None:
        """Close the session. A server that is gone or has forgotten it has closed it already."""
        session_id, self._session_id = self._session_id, None
        if session_id is None:
            return
        try:
            await self._sandbox.close_session(session_id)
        except SandboxError:
            return


def _unreadable(code: str) -> str | None:
    """Why no server could take this code, or None: the model's own doing, so it is told."""
    if len(code) > _MAX_CODE_CHARS:
        return f"the code has {len(code)} characters; at most {_MAX_CODE_CHARS} can be run"
    try:
        code.encode()
    except UnicodeEncodeError:
        return "the code is not valid Unicode"
    return None


def render(result: ExecResult) -> str:
    """What the model reads: stdout, then the value or a short error; never empty."""
    parts = [result.stdout.rstrip("\n")]
    if result.value is not None:
        parts.append(result.value)
    if result.reason is not Reason.OK:
        parts.append(_short_error(result))
    if not result.alive:
        parts.append(_RESTARTED)
    return "\n".join(part for part in parts if part) or NO_OUTPUT


def _short_error(result: ExecResult) -> str:
    """The exception, with the last of the user's lines that led to it where the code has several."""
    lines = (result.error or result.reason).splitlines()
    places = [line.strip() for line in lines if line.startswith("  line ")]
    message = "\n".join(line for line in lines if not line.startswith("  line "))
    place = places[-1].split(",")[0] if places else "line 1"
    return message if place == "line 1" else f"{message} ({place})"
