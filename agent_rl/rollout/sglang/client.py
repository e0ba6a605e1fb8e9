"""JSON over HTTP to one SGLang server."""

import asyncio
import json
from typing import Any

import httpcore

from agent_rl.rollout.engines.base import EngineError
from sandbox.connections import Connections

_CONNECT_S = 5.0
_REFUSALS = (400, 404, 422)


class UnreachableError(EngineError):
    """The server does not answer, or ended while it should have."""


class RefusedError(ValueError):
    """The server understood a request and will not serve it."""


class Client:
    """Calls of one SGLang server."""

    def __init__(self, url: str) -> None:
        self._connections = Connections(url, "an SGLang server", "http://127.0.0.1:30000")
        self.url = self._connections.url

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
        connection = await self._connections.take()
        while True:
            used_before = connection.is_idle()
            try:
                async with asyncio.timeout(timeout_s):
                    response = await self._connections.request(connection, method, path, content, _CONNECT_S, timeout_s)
            except (httpcore.NetworkError, httpcore.ProtocolError) as error:
                await connection.aclose()
                if not used_before:
                    raise UnreachableError(f"the SGLang server at {self.url} cannot be reached: {error}") from error
                connection = self._connections.new()
            except (TimeoutError, httpcore.TimeoutException) as error:
                await connection.aclose()
                raise UnreachableError(f"the SGLang server at {self.url} did not answer {path} in time") from error
            except BaseException:
                await connection.aclose()
                raise
            else:
                await self._connections.keep(connection)
                return self._checked(response, path)

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
        """Close idle connections now, and busy ones when their request has ended."""
        await self._connections.aclose()
