"""Runs one piece of code and says what it did. Standard library only: it runs inside the sandbox.

The code shares this interpreter and can rewrite everything in here: what comes out is untrusted.
"""

import ast
import errno
import io
import signal
import sys
from types import FrameType, ModuleType, TracebackType
from typing import Any

FLOOD_FACTOR = 64
_FRAMES_SHOWN = 5
_ERROR_CHARS = 2000
_NO_INPUT = "nobody can answer input() here: write the values into the code"
_NO_NETWORK = "(there is no network here: nothing can be downloaded or reached)"


class Timeout(BaseException):
    """Raised into the code when its time is up; not an Exception, so that `except Exception` lets it pass."""


class Flood(BaseException):
    """Raised into code that writes many times what is kept."""


class Capture(io.RawIOBase):
    """A stream that keeps the first and last `limit`/2 bytes of what is written to it."""

    def __init__(self, limit: int) -> None:
        self.limit, self.total = limit, 0
        self.head, self.tail = bytearray(), bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.total += len(view)
        half = self.limit // 2
        room = max(0, half - len(self.head))
        self.head += view[:room]
        self.tail += view[room:][-half:]
        if len(self.tail) > 2 * half:
            del self.tail[:-half]
        if self.total > FLOOD_FACTOR * self.limit:
            raise Flood
        return len(view)

    def text(self) -> tuple[str, bool]:
        """The kept text, with a marker where bytes were left out, and whether any were."""
        half = self.limit // 2
        head, tail = self.head.decode("utf-8", "replace"), self.tail[-half:].decode("utf-8", "replace")
        left_out = self.total - len(self.head) - min(len(self.tail), half)
        return (f"{head}\n... [{left_out} bytes left out] ...\n{tail}", True) if left_out else (head + tail, False)


class NoInput(io.TextIOBase):
    """The standard input of code that nobody types for: whoever reads it is told at once."""

    def readable(self) -> bool:
        return True

    def readline(self, size: int = -1, /) -> str:  # type: ignore[override]
        raise EOFError(_NO_INPUT)

    def read(self, size: int | None = -1, /) -> str:
        raise EOFError(_NO_INPUT)


def _text_stream(capture: Any) -> io.TextIOWrapper:
    return io.TextIOWrapper(capture, "utf-8", "backslashreplace", write_through=True)


class Cell:
    """The interpreter of one session: a namespace that persists, and one `run` a call."""

    def __init__(self) -> None:
        self.running = False
        self.calls = 0
        module = ModuleType("__main__")
        sys.modules["__main__"] = module
        self.namespace = module.__dict__
        signal.signal(signal.SIGALRM, self._on_alarm)
        signal.signal(signal.SIGXCPU, self._on_alarm)

    def run(self, code: str, wall_s: float, limit: int) -> dict[str, Any]:
        """The reply fields for `code`: stdout, stderr, value, error, reason, truncated."""
        streams = (Capture(limit), Capture(limit))
        sys.stdout, sys.stderr = (_text_stream(stream) for stream in streams)
        sys.stdin = NoInput()
        value, error, reason = self._guarded(code, wall_s)
        stdout, stderr = (stream.text() for stream in streams)
        shown = Capture(limit)
        shown.total = -sys.maxsize  # a long repr is cut, but is no flood
        encoded = b"" if value is None else value.encode("utf-8", "backslashreplace")
        shown.write(encoded)
        shown.total = len(encoded)
        text, cut = shown.text()
        return {
            "stdout": stdout[0],
            "stderr": stderr[0],
            "value": None if value is None else text,
            "error": None if error is None else error.encode("utf-8", "backslashreplace").decode()[:_ERROR_CHARS],
            "reason": reason,
            "truncated": stdout[1] or stderr[1] or cut,
        }

    def _guarded(self, code: str, wall_s: float) -> tuple[str | None, str | None, str]:
        """(value, error, reason); the alarm repeats, so that code which swallows it once meets it again."""
        self.running = True
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, wall_s, 0.1)
                return self._evaluate(code), None, "ok"
            finally:
                self.running = False
                signal.setitimer(signal.ITIMER_REAL, 0)
        except Timeout as timeout:
            return None, str(timeout) or f"stopped after {wall_s:g} s", "timeout"
        except Flood:
            return None, "stopped: too much output", "output"
        except SystemExit as error:
            return None, f"SystemExit: {error.code}", "exit"
        except BaseException as error:
            return None, describe(error), "memory" if isinstance(error, MemoryError) else "exception"

    def _evaluate(self, code: str) -> str | None:
        self.calls += 1
        name = f"<call {self.calls}>"
        tree = ast.parse(code, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec", dont_inherit=True), self.namespace)
        if not isinstance(last, ast.Expr):
            return None
        value = eval(compile(ast.Expression(last.value), name, "eval", dont_inherit=True), self.namespace)
        return None if value is None else repr(value)

    def _on_alarm(self, number: int, frame: FrameType | None) -> None:
        if self.running:
            raise Timeout("stopped: its CPU seconds are used up" if number == signal.SIGXCPU else "")


def describe(error: BaseException) -> str:
    """A short traceback: the user's own last lines, then the exception."""
    if isinstance(error, SyntaxError) and (error.filename or "").startswith("<call "):
        return f"  line {error.lineno}\n{type(error).__name__}: {error.msg}"
    frames = _own_frames(error.__traceback__)[-_FRAMES_SHOWN:]
    try:
        message = str(error)
    except Exception as broken:
        message = f"(its message failed: {type(broken).__name__})"
    said = f"{type(error).__name__}: {message}" if message else type(error).__name__
    return "\n".join([*frames, f"{said} {_NO_NETWORK}" if _wanted_network(error) else said])


def _wanted_network(error: object) -> bool:
    """Whether an error is, or wraps, that of a refused socket or of a name that nobody could look up."""
    for _ in range(_FRAMES_SHOWN):
        if isinstance(error, OSError) and (error.errno == errno.ENETUNREACH or type(error).__name__ == "gaierror"):
            return True
        inner = getattr(error, "reason", None) or getattr(error, "__cause__", None)
        error = inner or getattr(error, "__context__", None)
    return False


def _own_frames(traceback: TracebackType | None) -> list[str]:
    frames = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if code.co_filename.startswith("<call "):
            where = "" if code.co_name == "<module>" else f", in {code.co_name}"
            frames.append(f"  line {traceback.tb_lineno}{where}")
        traceback = traceback.tb_next
    return frames
