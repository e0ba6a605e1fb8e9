"""Files into and out of a session: the session's side. Standard library only: it runs inside the sandbox."""

import binascii
import contextlib
import os
import stat
from typing import Any

WORKING_DIRECTORY = "/tmp"


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """The reply fields for one piece of a file: its content as base64 in `value`, or a reason in `error`."""
    value, error = None, None
    try:
        if "put" in request:
            _put(request)
        else:
            value = _get(request)
    except OSError as failed:
        error = failed.strerror or "it cannot be read or written"
    except MemoryError:
        error = "the session has no memory left"
    reason = "ok" if error is None else "exception"
    return {"stdout": "", "stderr": "", "value": value, "error": error, "reason": reason, "truncated": False}


def _put(request: dict[str, Any]) -> None:
    path = f"{WORKING_DIRECTORY}/{request['put']}"
    first = request["offset"] == 0
    os.makedirs(os.path.dirname(path), exist_ok=True)
    file = _open(path, os.O_WRONLY | (os.O_CREAT | os.O_TRUNC if first else 0))
    try:
        content = memoryview(binascii.a2b_base64(request["content"]))
        offset = request["offset"]
        while content:
            written = os.pwrite(file, content, offset)
            content, offset = content[written:], offset + written
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(path)  # half a file would look like a whole one
        raise
    finally:
        os.close(file)


def _get(request: dict[str, Any]) -> str:
    file = _open(f"{WORKING_DIRECTORY}/{request['get']}", os.O_RDONLY)
    try:
        return binascii.b2a_base64(os.pread(file, request["size"], request["offset"]), newline=False).decode()
    finally:
        os.close(file)


def _open(path: str, flags: int) -> int:
    file = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(0, "it is no regular file")
    return file
