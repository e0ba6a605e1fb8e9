"""Files into and out of a session, piece by piece over its channel: the host's side.

The session's own process reads and writes them (`inside_files.py`), so a path can reach only what the session
itself can reach, and what comes out is as untrusted as any reply.
"""

import base64
import binascii
import secrets
from pathlib import PurePosixPath

from sandbox.base import FileRefused
from sandbox.channel import BrokenChannel, Channel

_PUT_BYTES = 1 << 18
_NAME_BYTES = 255


def check_name(name: str) -> None:
    """Raises `FileRefused` unless `name` is a relative path that stays in the session's working directory."""
    path = PurePosixPath(name)
    legal = name.isprintable() and len(name.encode("utf-8", "replace")) <= _NAME_BYTES
    if not legal or not path.parts or path.is_absolute() or ".." in path.parts:
        raise FileRefused(
            f"{name[:_NAME_BYTES]!r} is no name of a session's file; give a relative path without `..`, "
            f"of at most {_NAME_BYTES} printable bytes"
        )


async def put(channel: Channel, name: str, content: bytes) -> None:
    """Write a whole file. Raises `FileRefused` with the session's reason, or `BrokenChannel`."""
    for offset in range(0, len(content) or 1, _PUT_BYTES):
        piece = base64.b64encode(content[offset : offset + _PUT_BYTES]).decode()
        await _ask(channel, name, {"put": name, "offset": offset, "content": piece})


async def get(channel: Channel, name: str, max_output_bytes: int, max_bytes: int) -> bytes:
    """Read a whole file in pieces that fit a reply. Raises as `put` does, and if it has over `max_bytes`."""
    content = bytearray()
    size = max_output_bytes // 4 * 3
    while len(content) <= max_bytes:
        piece = await _ask(channel, name, {"get": name, "offset": len(content), "size": size})
        if not piece:
            return bytes(content)
        content += piece
    raise FileRefused(f"{name!r} has more than {max_bytes} bytes; a session has no room for such a file")


async def _ask(channel: Channel, name: str, request: dict[str, object]) -> bytes:
    reply = await channel.request(secrets.token_hex(8), dict(request))
    if reply.error is not None:
        raise FileRefused(f"{name!r}: {reply.error}")
    try:
        return base64.b64decode(reply.value or "", validate=True)
    except binascii.Error as error:
        raise BrokenChannel("its reply is malformed") from error
