"""JSON over HTTP to one SGLang server."""

import asyncio
import json
from typing import Any

import httpcore

from agent_rl.rollout.engines.base import EngineError

_CONNECT_S = 5.0
_REFUSALS = (400, 404, 422)


class UnreachableError(EngineError):
    """The server does not answer, or ended while it should have."""


class RefusedError(ValueError):
    """The server understood a request and will not serve it."""


class Client:
    """Keeps connections one by one: a shared pool looks at every connection for every request."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        parsed = httpcore.URL(self.url)
        if parsed.scheme not in (b"http", b"https") or not parsed.host:
            raise ValueError(f"{url!r} is no address of an SGLang server; give one like http://127.0.0.1:30000")
        self._origin = parsed.origin
        host = parsed.host if parsed.port is None else b"%b:%d" % (parsed.host, parsed.port)
        self._headers = [(b"host", host), (b"content-type", b"application/json")]
        self._idle: list[httpcore.AsyncHTTPConnection] = []
        self._closed = False

    async def get(self, path: str, timeout_s: float) -> dict[str, Any]:
        return await self._call("GET", path, b"", timeout_s)

    async def post(self, path: str, body: dict[str, Any], timeout_s: float | None = None) -> dict[str, Any]:
        """The answer. Raises `UnreachableError` if the server is gone or takes longer than `timeout_s` (None waits for
        ever), `EngineError` if it fails, `RefusedError` with its reason if it refuses."""
        return await self._call("POST", path, json.dumps(body).encode(), timeout_s)

    async def healthy(self, within_s: float) -> bool:
        """Whether the server's scheduler answers in time."""
        try:
            await self.get("/health", within_s)
        except (EngineError, RefusedError):
            return False
        return True

    async def _call(self, method: str, path: str, content: bytes, timeout_s: float | None) -> dict[str, Any]:
        """One request; again on a new connection if the server had closed the old one, as it does with idle ones."""
        headers = [*self._headers, (b"content-length", b"%d" % len(content))]
        times = {"connect": _CONNECT_S, "write": timeout_s, "read": timeout_s}
        connection = await self._take()
        while True:
            used_before = connection.is_idle()
            try:
                async with asyncio.timeout(timeout_s):
                    response = await connection.request(
                        method, self.url + path, headers=headers, content=content, extensions={"timeout": times}
                    )
            except (httpcore.NetworkError, httpcore.ProtocolError) as error:
                await connection.aclose()
                if not used_before:
                    raise UnreachableError(f"the SGLang server at {self.url} cannot be reached: {error}") from error
                connection = httpcore.AsyncHTTPConnection(self._origin)
            except (TimeoutError, httpcore.TimeoutException) as error:
                await connection.aclose()
                raise UnreachableError(f"the SGLang server at {self.url} did not answer {path} in time") from error
            except BaseException:
                await connection.aclose()
                raise
            else:
                if self._closed:
                    await connection.aclose()
                else:
                    self._idle.append(connection)
                return self._checked(response, path)

    async def _take(self) -> httpcore.AsyncHTTPConnection:
        """The connection used last that the server has not closed, or a new one."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_available() and not connection.has_expired():
                return connection
            await connection.aclose()
        return httpcore.AsyncHTTPConnection(self._origin)

    def _checked(self, response: httpcore.Response, path: str) -> dict[str, Any]:
        try:
            body = json.loads(response.content or b"{}")
        except ValueError:
            body = {}
        if response.status < 300:
            return body if isinstance(body, dict) else {}
        reason = (body.get("error") or {}).get("message") or body.get("message") or response.content.decode()[:300]
        if response.status in _REFUSALS:
            raise RefusedError(f"the SGLang server at {self.url} refused {path}: {reason}")
        raise EngineError(f"the SGLang server at {self.url} failed at {path} (HTTP {response.status}): {reason}")

    async def close(self) -> None:
        """Close what is idle now, and what still runs when it has ended."""
        self._closed = True
        idle, self._idle = self._idle, []
        for connection in idle:
            await connection.aclose()
