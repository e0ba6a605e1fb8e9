"""The host's end of one session's socket. What arrives is untrusted: one bounded reply a request, or the end."""

import asyncio
import json
import socket
import struct
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sandbox.base import Reason

_HEADER = 4


class BrokenChannel(Exception):  # noqa: N818
    """The session closed its socket, or wrote something that is no answer to what it was asked."""


class Ready(BaseModel):
    """A session's first frame."""

    model_config = ConfigDict(extra="forbid", strict=True)
    ready: bool
    error: str = Field(default="", max_length=2000)


class Reply(BaseModel):
    """The answer to one request; `id` must be the request's."""

    model_config = ConfigDict(extra="forbid")
    id: str = Field(max_length=64)
    stdout: str
    stderr: str
    value: str | None
    error: str | None = Field(max_length=2000)
    reason: Reason
    truncated: bool


class Channel(asyncio.Protocol):
    """Frames of a 4-byte length and JSON. A byte that nobody asked for breaks the channel."""

    def __init__(self, max_output_bytes: int, on_broken: Callable[[], None]) -> None:
        # three texts with a marker each, every byte as long as JSON can make it, and the error
        self._max_bytes = 6 * 3 * (max_output_bytes + 64) + 16384
        self._max_text = max_output_bytes + 64
        self._on_broken = on_broken
        self._received = bytearray()
        self._waiting: asyncio.Future[bytes] | None = None
        self._broken: str | None = None
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def connect(cls, end: socket.socket, max_output_bytes: int, on_broken: Callable[[], None]) -> "Channel":
        """Take over the host's end. The session's first frame is waited for with `ready`."""
        loop = asyncio.get_running_loop()
        channel = cls(max_output_bytes, on_broken)
        channel._waiting = loop.create_future()
        await loop.create_connection(lambda: channel, sock=end)
        return channel

    async def ready(self) -> Ready:
        try:
            return Ready.model_validate_json(await self._answer())
        except ValidationError as error:
            raise self._refused("its first frame is malformed") from error

    async def request(self, request_id: str, message: dict[str, Any]) -> Reply:
        """Send a request and wait for its reply. Raises `BrokenChannel`; the caller sets the time limit."""
        if self._broken:
            raise BrokenChannel(self._broken)
        assert self._transport is not None
        self._waiting = asyncio.get_running_loop().create_future()
        body = json.dumps({"id": request_id, **message}).encode()
        self._transport.write(struct.pack("!I", len(body)) + body)
        try:
            reply = Reply.model_validate_json(await self._answer())
        except ValidationError as error:
            raise self._refused("its reply is malformed") from error
        if reply.id != request_id:
            raise self._refused("it answered a request that was not asked")
        if any(len(text or "") > self._max_text for text in (reply.stdout, reply.stderr, reply.value)):
            raise self._refused("its reply is too long")
        return reply

    @property
    def whole(self) -> bool:
        return self._broken is None

    def close(self) -> None:
        """Drop the connection; a request in flight raises `BrokenChannel`."""
        self._break("it was closed")
        if self._transport is not None:
            self._transport.abort()

    async def _answer(self) -> bytes:
        assert self._waiting is not None
        if self._broken:
            raise BrokenChannel(self._broken)
        try:
            return await self._waiting
        finally:
            self._waiting = None

    def _break(self, why: str) -> None:
        if self._broken is None:
            self._broken = why
            self._on_broken()
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(BrokenChannel(self._broken))
            self._waiting.exception()  # nobody may be waiting yet

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._break("its process ended")

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._waiting is None or self._waiting.done():
            self._refuse("it wrote without being asked")
            return
        if len(self._received) < _HEADER:
            return
        (length,) = struct.unpack_from("!I", self._received)
        if length > self._max_bytes or len(self._received) > _HEADER + length:
            self._refuse("it wrote more than one bounded reply")
        elif len(self._received) == _HEADER + length:
            self._waiting.set_result(bytes(self._received[_HEADER:]))
            self._received.clear()

    def _refuse(self, why: str) -> None:
        self._received.clear()
        self._break(why)
        if self._transport is not None:
            self._transport.abort()

    def _refused(self, why: str) -> BrokenChannel:
        self._refuse(why)
        return BrokenChannel(why)
