"""Keep-alive connections to one HTTP server; each request leaves in one piece, since two would wake it twice."""

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


class Connections:
    """Connections one by one: a shared pool looks at every connection for every request, which at 128 concurrent
    requests costs three times the request itself."""

    def __init__(self, url: str, server: str, example: str, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        """`headers` go with every request. Raises `ValueError` if `url` is no address; `server` says of what."""
        self.url = url.rstrip("/")
        try:
            parsed = httpcore.URL(self.url)
        except ValueError:  # a port that is no number
            parsed = httpcore.URL("")
        if parsed.scheme not in (b"http", b"https") or not parsed.host:
            raise ValueError(f"{url!r} is no address of {server}; give one like {example}")
        self._origin = parsed.origin
        host = parsed.host if parsed.port is None else b"%b:%d" % (parsed.host, parsed.port)
        self._headers = [(b"host", host), (b"content-type", b"application/json"), *headers]
        self._idle: list[httpcore.AsyncHTTPConnection] = []
        self._closed = False

    async def take(self) -> httpcore.AsyncHTTPConnection:
        """The connection used last that the server has not closed, or a new one."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_available() and not connection.has_expired():
                return connection
            await connection.aclose()
        return self.new()

    def new(self) -> httpcore.AsyncHTTPConnection:
        return httpcore.AsyncHTTPConnection(self._origin, network_backend=OneWriteBackend())

    async def request(
        self,
        connection: httpcore.AsyncHTTPConnection,
        method: str,
        path: str,
        content: bytes,
        connect_s: float,
        timeout_s: float | None,
    ) -> httpcore.Response:
        """One request; times in seconds, None waits for ever. Raises what httpcore raises."""
        headers = [*self._headers, (b"content-length", b"%d" % len(content))]
        times = {"connect": connect_s, "write": timeout_s, "read": timeout_s}
        return await connection.request(
            method, self.url + path, headers=headers, content=content, extensions={"timeout": times}
        )

    async def keep(self, connection: httpcore.AsyncHTTPConnection) -> None:
        """Take a connection back for the next request."""
        if self._closed:
            await connection.aclose()
        else:
            self._idle.append(connection)

    async def aclose(self) -> None:
        """Close idle connections now, and busy ones when they are given back."""
        self._closed = True
        idle, self._idle = self._idle, []
        for connection in idle:
            await connection.aclose()
