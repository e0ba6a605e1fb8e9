"""Sandbox sessions over HTTP; `sandbox.server` serves this.

    POST   /sessions            -> 201 {"session_id"}     503 if there is no room: ask again later
    POST   /sessions/{id}/exec  -> 200 ExecResult         404 if the session is lost
    DELETE /sessions/{id}       -> 204                    404 if the session is lost
    GET    /health              -> 200 Health

An exec carries a `request_id`. Sent again, the same id gets the first one's result and runs nothing, so
that a client may repeat a request whose answer it did not receive.
"""

import asyncio
import hmac
import importlib.metadata
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from sandbox.base import ExecResult, SandboxError, SessionLost
from sandbox.zygote import ZygoteSandbox

_MAX_CODE_CHARS = 1_000_000
_VERSION = importlib.metadata.version("agent-rl")  # once: looking it up costs more than all else in a health check


class Opened(BaseModel):
    """Answer to `POST /sessions`."""

    session_id: str


class ExecRequest(BaseModel):
    """Body of an exec. `wall_s` is in seconds, at most the server's own limit, which is also the default."""

    model_config = ConfigDict(extra="forbid")

    code: str = Field(max_length=_MAX_CODE_CHARS)
    request_id: str = Field(min_length=1, max_length=64)
    wall_s: float | None = Field(default=None, gt=0)


class Health(BaseModel):
    """The server's state: sessions now, and counts since it started."""

    status: str
    version: str
    limited_by: str
    open_sessions: int
    opened: int
    execs: int


class _Once:
    """The last exec of each session, so that the same request never runs twice."""

    def __init__(self, sandbox: ZygoteSandbox) -> None:
        self._sandbox = sandbox
        self._last: dict[str, tuple[str, asyncio.Task[ExecResult]]] = {}

    async def exec(self, session_id: str, body: ExecRequest) -> ExecResult:
        last_id, task = self._last.get(session_id, ("", None))
        if task is None or last_id != body.request_id:
            task = asyncio.create_task(self._sandbox.exec(session_id, body.code, body.wall_s))
            self._last[session_id] = (body.request_id, task)
            if len(self._last) > 2 * self._sandbox.config.max_sessions:
                self._forget_lost()
        # a client that hangs up does not cancel what it started
        return await asyncio.shield(task)

    def forget(self, session_id: str) -> None:
        self._last.pop(session_id, None)

    def _forget_lost(self) -> None:
        for session_id in [s for s in self._last if s not in self._sandbox.sessions]:
            del self._last[session_id]


def _json(body: BaseModel, status: int = 200) -> Response:
    return Response(body.model_dump_json(), status, media_type="application/json")


def _router(sandbox: ZygoteSandbox) -> APIRouter:
    router, once = APIRouter(), _Once(sandbox)

    @router.post("/sessions", status_code=201, response_model=Opened)
    async def open_session() -> Response:
        return _json(Opened(session_id=await sandbox.open()), 201)

    @router.post("/sessions/{session_id}/exec", response_model=ExecResult)
    async def exec_code(session_id: str, body: ExecRequest) -> Response:
        return _json(await once.exec(session_id, body))

    @router.delete("/sessions/{session_id}", status_code=204)
    async def close_session(session_id: str) -> Response:
        once.forget(session_id)
        await sandbox.close_session(session_id)
        return Response(status_code=204)

    @router.get("/health", response_model=Health)
    async def health() -> Response:
        return _json(
            Health(
                status="ok",
                version=_VERSION,
                limited_by=sandbox.limited_by,
                open_sessions=len(sandbox.sessions),
                opened=sandbox.opened,
                execs=sandbox.execs,
            )
        )

    return router


def make_app(sandbox: ZygoteSandbox, token: str | None) -> FastAPI:
    """The app over a started sandbox. With a token, every request needs `Authorization: Bearer TOKEN`."""

    async def check_token(request: Request) -> None:
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            raise HTTPException(401, "a bearer token is required: start the client with the server's SANDBOX_TOKEN")

    async def on_failure(_: Request, error: Any) -> Response:
        return JSONResponse({"detail": str(error)}, 404 if isinstance(error, SessionLost) else 503)

    app = FastAPI(title="Sandbox", version=_VERSION)
    app.include_router(_router(sandbox), dependencies=[Depends(check_token)] if token else [])
    app.add_exception_handler(SandboxError, on_failure)
    return app
