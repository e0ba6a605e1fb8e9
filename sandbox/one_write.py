"""HTTP requests that leave in one piece: head and body in two would wake the server twice."""

import ssl
from collections.abc import Iterable
from typing import Any

import httpcore


class OneWriteStream(httpcore.AsyncNetworkStream):
    """A stream that holds what is written until an answer is waited for."""

    def __init__(self, stream: httpcore.AsyncNetworkStream) -> None:
        self._stream, self._held = stream, bytearray()

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        if self._held:
            held, self._held = bytes(self._held), bytearray()
            await self._stream.write(held, timeout)
        return await self._stream.read(max_bytes, timeout)

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._held += buffer

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.AsyncNetworkStream:
        return OneWriteStream(await self._stream.start_tls(ssl_context, server_hostname, timeout))

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


class OneWriteBackend(httpcore.AnyIOBackend):
    """Connects as httpcore does by default."""

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        return OneWriteStream(await super().connect_tcp(host, port, timeout, local_address, socket_options))
