"""Asks the tool server for sessions. One client serves all episodes of one event loop.

A client keeps the sessions that it has opened from expiring until it is closed. An exec carries a request id
that the server remembers, so repeating a request whose answer got lost is safe: it runs at most once. Errors
are those of `sandbox.base`: `Unavailable` if the server is gone, has no room for `open_wait_s`, or refuses the
token; `SessionLost` if it no longer knows the session; `FileRefused`.
"""

import asyncio
import contextlib
import json
import secrets
import time
import urllib.parse
from typing import Any

import httpcore
from pydantic import TypeAdapter, ValidationError

from sandbox.base import ExecResult, FileRefused, Sandbox, SandboxError, SessionLost, Unavailable
from sandbox.connections import Connections

_CONNECT_S = 5.0
_MARGIN_S = 30.0
_EXEC_S = 600.0
_ATTEMPTS = 2
_FULL_POLL_S = 0.05
_RESULT = TypeAdapter(ExecResult)


class SandboxClient(Sandbox):
    """An async client of `python -m sandbox.server` at `url`."""

    def __init__(self, url: str, token: str | None = None, open_wait_s: float = 30.0) -> None:
        headers = [(b"authorization", b"Bearer " + token.encode())] if token else []
        self._connections = Connections(url, "a tool server", "http://127.0.0.1:8765", headers)
        self._url = self._connections.url
        self._open_wait_s = open_wait_s
        self._open_sessions: set[str] = set()
        self._idle_s = 0.0
        self._keeping: asyncio.Task[None] | None = None
        self._closing_late: set[asyncio.Task[None]] = set()

    async def open(self) -> str:
        """A new session's id. Waits for room; raises `Unavailable` after `open_wait_s` seconds."""
        deadline, pause = time.monotonic() + self._open_wait_s, _FULL_POLL_S
        while True:
            response = await self._ask_for_session()
            if response.status != 503 or time.monotonic() > deadline:
                return self._opened(self._checked(response))
            await asyncio.sleep(pause)
            pause = min(2 * pause, 1.0)

    async def exec(
        self, session_id: str, code: str, wall_s: float | None = None, max_output_bytes: int | None = None
    ) -> ExecResult:
        """Run `code` in the session, at most once. A limit (seconds, bytes) that is None is the server's own."""
        body = {
            "code": code,
            "wall_s": wall_s,
            "max_output_bytes": max_output_bytes,
            "request_id": secrets.token_hex(8),
        }
        content = json.dumps(body).encode()
        response = await self._send("POST", f"/sessions/{session_id}/exec", content, (wall_s or _EXEC_S) + _MARGIN_S)
        try:
            return _RESULT.validate_python(self._checked(response))
        except ValidationError as error:
            raise Unavailable(f"{self._url} does not answer like a tool server: {error}") from error

    async def put_file(self, session_id: str, name: str, content: bytes) -> None:
        """Write a file into the session's working directory. Raises as `Sandbox.put_file` does."""
        self._checked(await self._send("PUT", _file_path(session_id, name), content, _EXEC_S + _MARGIN_S))

    async def get_file(self, session_id: str, name: str) -> bytes:
        """The content of a file of the session, which is untrusted. Raises as `Sandbox.get_file` does."""
        response = await self._send("GET", _file_path(session_id, name), b"", _EXEC_S + _MARGIN_S)
        if response.status >= 300:
            self._checked(response)
        return response.content

    async def close_session(self, session_id: str) -> None:
        """End the session. Raises `SessionLost` if it is unknown."""
        self._open_sessions.discard(session_id)
        self._checked(await self._send("DELETE", f"/sessions/{session_id}", b"", _MARGIN_S))

    async def health(self) -> dict[str, Any]:
        """The server's `Health`."""
        return self._checked(await self._send("GET", "/health", b"", _CONNECT_S))

    async def aclose(self) -> None:
        """Close the connections; sessions that are still open expire."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        await asyncio.gather(*self._closing_late)
        await self._connections.aclose()

    async def _ask_for_session(self) -> httpcore.Response:
        """One `POST /sessions`; if the caller is cancelled meanwhile, the session is closed once it is there."""
        asking = asyncio.create_task(self._send("POST", "/sessions", b"", _MARGIN_S))
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            if not asking.cancelling():  # else the event loop itself is ending
                closing = asyncio.create_task(self._close_late(asking))
                self._closing_late.add(closing)
                closing.add_done_callback(self._closing_late.discard)
            raise

    async def _close_late(self, asking: asyncio.Task[httpcore.Response]) -> None:
        with contextlib.suppress(SandboxError):
            await self.close_session(str(self._checked(await asking)["session_id"]))

    def _opened(self, body: dict[str, Any]) -> str:
        """The new session's id; from now on it is kept."""
        try:
            session_id, self._idle_s = str(body["session_id"]), float(body["idle_s"])
        except KeyError as missing:
            raise Unavailable(f"the tool server at {self._url} says no {missing}; run it from this version") from None
        self._open_sessions.add(session_id)
        if self._keeping is None or self._keeping.done():
            self._keeping = asyncio.create_task(self._keep_sessions())
        return session_id

    async def _keep_sessions(self) -> None:
        """Name the open sessions to the server three times every `idle_s`; what it does not know is lost."""
        while self._open_sessions:
            await asyncio.sleep(self._idle_s / 3)
            content = json.dumps({"session_ids": list(self._open_sessions)}).encode()
            with contextlib.suppress(SandboxError):  # whoever uses a session hears of a server that is gone
                response = await self._send("POST", "/sessions/keep", content, _MARGIN_S)
                self._open_sessions -= set(self._checked(response)["lost"])

    def _checked(self, response: httpcore.Response) -> dict[str, Any]:
        """The answer's body, or the error that its status stands for."""
        try:
            body = json.loads(response.content or b"{}")
        except ValueError:
            body = None
        if not isinstance(body, dict):
            raise Unavailable(f"{self._url} does not answer like a tool server (HTTP {response.status})")
        if response.status < 300:
            return body
        detail = body.get("detail")
        if response.status == 404:
            raise SessionLost(str(detail))
        if response.status in (409, 413):
            raise FileRefused(str(detail))
        if response.status in (401, 500, 503):
            raise Unavailable(f"the tool server at {self._url}: {detail}")
        raise ValueError(f"the tool server refused the request ({response.status}): {detail}")

    async def _send(self, method: str, path: str, content: bytes, timeout_s: float) -> httpcore.Response:
        """One request, repeated once on a new connection if the old one broke."""
        for attempt in range(1, _ATTEMPTS + 1):
            connection = await self._connections.take() if attempt == 1 else self._connections.new()
            try:
                response = await self._connections.request(connection, method, path, content, _CONNECT_S, timeout_s)
            except httpcore.TimeoutException as error:
                await connection.aclose()
                raise Unavailable(f"the tool server at {self._url} did not answer within {timeout_s:g} s") from error
            except (httpcore.NetworkError, httpcore.ProtocolError) as error:
                await connection.aclose()
                if attempt == _ATTEMPTS:
                    raise Unavailable(f"the tool server at {self._url} cannot be reached: {error}") from error
            except BaseException:
                await connection.aclose()
                raise
            else:
                await self._connections.keep(connection)
                return response
        raise AssertionError("unreachable")


def _file_path(session_id: str, name: str) -> str:
    return f"/sessions/{session_id}/files/{urllib.parse.quote(name, safe='/')}"
