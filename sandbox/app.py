"""Sandbox sessions over HTTP; `sandbox.server` serves this, with its description at /docs and /openapi.json.

    POST   /sessions                    -> 201 Opened             503 if there is no room: ask again later
    POST   /sessions/keep               -> 200 Kept
    POST   /sessions/{id}/exec          -> 200 ExecResult         404 if the session is lost
    PUT    /sessions/{id}/files/{name}  -> 204                    404, 409 if the file is refused
    GET    /sessions/{id}/files/{name}  -> 200 the content        404, 409
    DELETE /sessions/{id}               -> 204                    404
    GET    /health                      -> 200 Health

An exec carries a `request_id`. Sent again, the same id gets the first one's result and runs nothing, so
that a client may repeat a request whose answer it did not receive.
"""

import asyncio
import hmac
import importlib.metadata
from typing import Any

from fastapi import APIRouter, FastAPI, HTTPException, Request, Response, Security
from fastapi.responses import JSONResponse
from fastapi.security import HTTPBearer
from pydantic import BaseModel, ConfigDict, Field
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sandbox.base import ExecResult, FileRefused, SandboxError, SessionLost
from sandbox.pool import SessionPool

_MAX_CODE_CHARS = 1_000_000
_MAX_BODY_BYTES = 8 * _MAX_CODE_CHARS
_STATUS = {SessionLost: 404, FileRefused: 409}
_VERSION = importlib.metadata.version("agent-rl")  # once: looking it up costs more than all else in a health check


class Failure(BaseModel):
    """Body of an answer that reports a failure."""

    detail: str
    """One sentence."""


class Opened(BaseModel):
    """Answer to `POST /sessions`."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    session_id: str
    idle_s: float
    """Seconds after which the session is closed unless a call or a `POST /sessions/keep` names it."""


class KeepRequest(BaseModel):
    """Body of `POST /sessions/keep`: what a client that runs sends well within every `idle_s`."""

    model_config = ConfigDict(extra="forbid")

    session_ids: list[str]


class Kept(BaseModel):
    """Answer to `POST /sessions/keep`: the sessions of those named that are not there, or no longer."""

    lost: list[str]


class ExecRequest(BaseModel):
    """Body of an exec. A limit that is left out is the server's own, which is also the most that a call can ask."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    code: str = Field(max_length=_MAX_CODE_CHARS)
    """Python; the value of a last line that is an expression is returned."""
    request_id: str = Field(min_length=1, max_length=64)
    """Chosen by the client; the same id again in a row gets the same result, and nothing runs twice."""
    wall_s: float | None = Field(default=None, gt=0)
    """Time limit of this call in seconds."""
    max_output_bytes: int | None = Field(default=None, ge=64)
    """Longest stdout, stderr and value of this call, each."""


class Health(BaseModel):
    """The server's state: sessions now, and counts since it started."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    status: str
    version: str
    backend: str
    """`zygote` or `docker`."""
    limited_by: str
    """What bounds memory and processes of a session: `cgroup-v1`, `cgroup-v2`, `rlimits` or `docker`."""
    open_sessions: int
    max_sessions: int
    warm_sessions: int
    """Sessions that are ready, and not open yet."""
    opened: int
    expired: int
    """Sessions closed because their client was silent for `idle_s`."""
    execs: int


class _Once:
    """The last exec of each session, so that the same request never runs twice."""

    def __init__(self, sandbox: SessionPool[Any]) -> None:
        self._sandbox = sandbox
        self._last: dict[str, tuple[str, asyncio.Task[ExecResult]]] = {}

    async def exec(self, session_id: str, body: ExecRequest) -> ExecResult:
        last_id, task = self._last.get(session_id, ("", None))
        if task is None or last_id != body.request_id:
            call = self._sandbox.exec(session_id, body.code, body.wall_s, body.max_output_bytes)
            task = asyncio.create_task(call)
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


class _Gate:
    """Checks the token and bounds the body before a request is read."""

    def __init__(self, app: ASGIApp, token: str | None, max_body_bytes: int) -> None:
        self._app, self._max_body_bytes = app, max_body_bytes
        self._wanted = f"Bearer {token}".encode() if token else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._wanted is not None:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._wanted):
                detail = "a bearer token is required: start the client with the server's SANDBOX_TOKEN"
                await JSONResponse({"detail": detail}, 401)(scope, receive, send)
                return
        received = 0

        async def bounded() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_body_bytes:
                raise HTTPException(413, f"the request has more than {self._max_body_bytes} bytes")
            return message

        await self._app(scope, bounded, send)


def _json(body: BaseModel, status: int = 200) -> Response:
    return Response(body.model_dump_json(), status, media_type="application/json")


def _session_router(sandbox: SessionPool[Any]) -> APIRouter:
    router, once = APIRouter(), _Once(sandbox)
    lost: dict[int | str, dict[str, Any]] = {404: {"model": Failure, "description": "the session is lost"}}
    full: dict[int | str, dict[str, Any]] = {503: {"model": Failure, "description": "no room: ask again later"}}

    @router.post("/sessions", status_code=201, response_model=Opened, responses=full)
    async def open_session() -> Response:
        return _json(Opened(session_id=await sandbox.open(), idle_s=sandbox.config.limits.idle_s), 201)

    @router.post("/sessions/keep", response_model=Kept)
    async def keep_sessions(body: KeepRequest) -> Response:
        return _json(Kept(lost=sandbox.keep(body.session_ids)))

    @router.post("/sessions/{session_id}/exec", response_model=ExecResult, responses=lost)
    async def exec_code(session_id: str, body: ExecRequest) -> Response:
        return _json(await once.exec(session_id, body))

    @router.delete("/sessions/{session_id}", status_code=204, responses=lost)
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
                backend=sandbox.config.type,
                limited_by=sandbox.limited_by,
                open_sessions=len(sandbox.sessions),
                max_sessions=sandbox.config.max_sessions,
                warm_sessions=sandbox.num_warm,
                opened=sandbox.opened,
                expired=sandbox.expired,
                execs=sandbox.execs,
            )
        )

    return router


def _file_router(sandbox: SessionPool[Any]) -> APIRouter:
    refused: dict[int | str, dict[str, Any]] = {
        404: {"model": Failure, "description": "the session is lost"},
        409: {"model": Failure, "description": "the file is refused: its name, its size, or the session's reason"},
    }
    binary: dict[str, Any] = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    router = APIRouter(prefix="/sessions/{session_id}/files", responses=refused)

    @router.put("/{name:path}", status_code=204, openapi_extra={"requestBody": {"content": binary, "required": True}})
    async def put_file(session_id: str, name: str, request: Request) -> Response:
        await sandbox.put_file(session_id, name, await request.body())
        return Response(status_code=204)

    @router.get("/{name:path}", response_class=Response, responses={200: {"content": binary}})
    async def get_file(session_id: str, name: str) -> Response:
        return Response(await sandbox.get_file(session_id, name), media_type="application/octet-stream")

    return router


def make_app(sandbox: SessionPool[Any], token: str | None) -> FastAPI:
    """The app over a started sandbox. With a token, every request needs `Authorization: Bearer TOKEN`."""

    async def on_failure(_: Request, error: Any) -> Response:
        return JSONResponse({"detail": str(error)}, _STATUS.get(type(error), 503))

    app = FastAPI(title="Sandbox", version=_VERSION)
    documented = [Security(HTTPBearer(auto_error=False))] if token else []
    for router in (_session_router(sandbox), _file_router(sandbox)):
        app.include_router(router, dependencies=documented)
    app.add_exception_handler(SandboxError, on_failure)
    app.add_middleware(_Gate, token=token, max_body_bytes=max(_MAX_BODY_BYTES, sandbox.config.limits.tmp_mb << 20))
    return app
