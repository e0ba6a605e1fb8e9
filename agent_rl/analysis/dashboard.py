"""The dashboard: the report's views, live, over HTTP. Reads files only, and only those of runs that it has found.

A run is asked for by a name out of the list that a scan of the runs directory made; no path is ever built from what
a browser sends.
"""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, HTTPException, Query, Request, Response
from fastapi.responses import JSONResponse
from starlette.middleware.trustedhost import TrustedHostMiddleware

from agent_rl.analysis import report
from agent_rl.analysis.recorded import RecordedRun, find_runs
from agent_rl.analysis.views import finite, view

MAX_COMPARED = 6
"""Runs in one view: as many as there are colours."""
_TYPES = {"css": "text/css", "js": "text/javascript", "html": "text/html"}
_POLICY = "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; frame-ancestors 'none'"
"""Plotly sets styles; nothing else may be inline, and nothing comes from elsewhere."""


class Runs:
    """The runs below a directory, with what was read of them before. Safe to use from several threads."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._runs: dict[str, RecordedRun] = {}
        self._samples: dict[str, tuple[str, dict[str, Any]]] = {}
        self._views, self._sampling = threading.Lock(), threading.Lock()

    def overview(self) -> list[dict[str, Any]]:
        """One row a run, by name: how far it is and what it earned last."""
        with self._views:
            self._scan()
            return [_row(run) for run in self._runs.values()]

    def view(self, names: Sequence[str], stamp: str) -> dict[str, Any]:
        """The view of the named runs; only its `stamp` where that is still `stamp`."""
        with self._views:
            runs = self._named(names)
            now = "|".join(f"{run.name} {run.stamp()}" for run in runs)
            if now == stamp:
                return {"stamp": now}
            for run in runs:
                if run.mismatch().is_empty():
                    raise ValueError(f"{run.name} has no recorded step yet; it appears here with its first one")
            return view(runs) | {"stamp": now}

    def episodes(self, name: str) -> dict[str, Any]:
        """The sample of episodes of a run, made anew once the run has moved on."""
        with self._views:
            path = self._named([name])[0].path
        with self._sampling:  # not the lock of the views: the first sample loads the tokenizer and the objective
            run = RecordedRun(path, name)
            stamp = run.stamp()
            if name not in self._samples or self._samples[name][0] != stamp:
                self._samples[name] = (stamp, report.episodes(run, report.MAX_EPISODES))
            return self._samples[name][1]

    def _named(self, names: Sequence[str]) -> list[RecordedRun]:
        if not names or len(names) > MAX_COMPARED:
            raise ValueError(f"choose 1 to {MAX_COMPARED} runs")
        if any(name not in self._runs for name in names):
            self._scan()
        unknown = [name for name in names if name not in self._runs]
        if unknown:
            raise LookupError(f"there is no run {unknown[0]!r} here")
        return [self._runs[name] for name in dict.fromkeys(names)]

    def _scan(self) -> None:
        found = find_runs(self.root)
        self._runs = {name: self._runs.get(name) or RecordedRun(path, name) for name, path in sorted(found.items())}


def _row(run: RecordedRun) -> dict[str, Any]:
    rows = run.metrics()
    last = {
        key: next((row[key] for row in reversed(rows) if row.get(key) is not None), None)
        for key in ("reward_mean", "eval_avg", "mismatch_mean_abs")
    }
    steps = [row["step"] for row in rows if row.get("wall_s") is not None]
    step = steps[-1] + 1 if steps else 0
    row = {"name": run.name, "status": run.status(), "step": step, "num_steps": run.num_steps, **last}
    return dict(finite(row))


def create_app(root: Path, allowed_hosts: Sequence[str] = ("127.0.0.1", "localhost")) -> FastAPI:
    """The dashboard of the runs below `root`. Other values of the Host header than `allowed_hosts` are refused.

    Raises `ValueError` if there is no such directory, or if it is itself a run.
    """
    find_runs(root)
    runs = Runs(root)
    app = FastAPI(title="agent-rl dashboard", openapi_url=None)
    # A page elsewhere must not reach a loopback server under a name of its own.
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(allowed_hosts))

    @app.middleware("http")
    async def headers(request: Request, call_next: Any) -> Response:
        response: Response = await call_next(request)
        response.headers["Content-Security-Policy"] = _POLICY
        response.headers["X-Content-Type-Options"] = "nosniff"
        return response

    @app.exception_handler(ValueError)
    async def refused(request: Request, error: ValueError) -> Response:
        return JSONResponse({"detail": str(error)}, status_code=422)

    @app.exception_handler(LookupError)
    async def unknown(request: Request, error: LookupError) -> Response:
        return JSONResponse({"detail": str(error.args[0])}, status_code=404)

    _add_pages(app)
    _add_data(app, runs)
    return app


def _add_pages(app: FastAPI) -> None:
    texts = {name: report.asset(name) for name in (*report.STYLES, *report.SCRIPTS, "dashboard.js")}

    @app.get("/")
    def page() -> Response:
        return Response(report.asset("dashboard.html"), media_type="text/html")

    @app.get("/assets/plotly.js")
    def plotly() -> Response:
        return Response(report.plotly(), media_type="text/javascript", headers={"Cache-Control": "max-age=3600"})

    @app.get("/assets/{name}")
    def asset(name: str) -> Response:
        if name not in texts:
            raise HTTPException(404, f"there is no {name!r}")
        return Response(texts[name], media_type=_TYPES[name.rpartition(".")[2]])


def _add_data(app: FastAPI, runs: Runs) -> None:
    @app.get("/api/runs")
    def listed() -> Response:
        return JSONResponse({"runs": runs.overview(), "most": MAX_COMPARED})

    @app.get("/api/view")
    def viewed(run: Annotated[list[str], Query()], stamp: str = "") -> Response:
        return JSONResponse(runs.view(run, stamp))

    @app.get("/api/episodes")
    def episodes(run: str) -> Response:
        return JSONResponse(runs.episodes(run))
