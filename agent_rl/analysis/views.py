"""What a page shows of one run or several: summaries, charts and tables, in plain JSON. Reads files only."""

import math
from collections.abc import Sequence
from typing import Any

import polars as pl

from agent_rl.analysis import tables
from agent_rl.analysis.charts import charts
from agent_rl.analysis.drawing import COLOURS
from agent_rl.analysis.metric_lines import evaluations
from agent_rl.analysis.recorded import RecordedRun

_HIDDEN = {"table"}
_NOTE = "Means over all tokens of the steps; Pearson: mean over steps, weighted by tokens. "
_NOTES = {
    "turn": _NOTE + "policy lag: |trainer now − trainer at the sampling weights|; implementation: "
    "|trainer at the sampling weights − engine|; both where proximal log-probs were computed.",
    "first": _NOTE + "The first turn against all later ones.",
    "lag": _NOTE + "Lag in policy versions.",
    "kl": _NOTE + "Whole optimizer steps, put in bins by the k3 of their batch.",
    "turns": _NOTE + "Later turns exist only in longer episodes, so turns compare best within one length.",
    "clip": "Plain means over steps.",
    "reference": "The references of a turn-conditioned clip.",
    "seconds": "A worker is in the first of these that holds: push, generate, tool, score, queue "
    "(episodes wait for a slot or their wave), idle. The trainer's queue is its wait for rollouts.",
    "stop": "Share of the trajectories, with their mean reward and number of turns.",
}


def view(runs: Sequence[RecordedRun]) -> dict[str, Any]:
    """runs (name, status, summary), charts, tables and colours, without a NaN; none of them depends on a file left."""
    page = {
        "runs": [{"name": run.name, "status": run.status(), "summary": summary(run)} for run in runs],
        "charts": charts(runs),
        "tables": _tables(runs),
        "colours": COLOURS,
    }
    return finite(page)  # type: ignore[no-any-return]


def summary(run: RecordedRun) -> list[tuple[str, str]]:
    """(label, text) pairs: how far the run is, what it earned, and what it was."""
    rows = run.metrics()
    steps = [row for row in rows if row.get("reward_mean") is not None]
    evals = evaluations(rows)
    pairs = [("Steps", f"{len(steps)} of {run.num_steps or '?'}")]
    if steps:
        pairs.append(("Training reward", f"{steps[0]['reward_mean']:.3f} → {steps[-1]['reward_mean']:.3f}"))
    if evals:
        best_step, best = max(evals, key=lambda pair: pair[1])
        pairs.append(("Held-out accuracy", f"{evals[0][1]:.3f} → {evals[-1][1]:.3f}"))
        pairs.append(("Best evaluation", f"{best:.3f} at step {best_step}"))
    pairs += _totals(steps) + _settings(run.config)
    if unreadable := run.mismatch_parts.num_unreadable + run.rollout_parts.num_unreadable:
        pairs.append(("Unreadable parts", f"{unreadable}, left out"))
    return pairs


def _totals(steps: list[dict[str, Any]]) -> list[tuple[str, str]]:
    if not steps:
        return []
    last = steps[-1]
    pairs = []
    if isinstance(last.get("mismatch_mean_abs"), float):
        pairs.append(("Mean |d|, last step", f"{last['mismatch_mean_abs']:.2g} nats"))
    if isinstance(last.get("lag_mean"), (int, float)):
        pairs.append(("Lag, last step", f"{last['lag_mean']:.1f} versions"))
    pairs.append(("Trained tokens", f"{sum(row.get('trained_tokens') or 0 for row in steps):,}"))
    pairs.append(("Wall time", _duration(sum(row.get("wall_s") or 0 for row in steps))))
    dropped = {key.removeprefix("groups/dropped/"): last[key] for key in last if key.startswith("groups/dropped/")}
    named = ", ".join(f"{number} {reason.replace('_', ' ')}" for reason, number in dropped.items())
    issued, trained, flying = (last.get(f"groups/{fate}", "?") for fate in ("issued", "trained", "in_flight"))
    pairs.append(("Groups", f"{issued} issued = {trained} trained + {named or 0} dropped + {flying} in flight"))
    return pairs


def _settings(config: dict[str, Any]) -> list[tuple[str, str]]:
    """The choices that make runs differ most."""

    def at(*path: str) -> Any:
        node: Any = config
        for key in path:
            node = node.get(key) if isinstance(node, dict) else None
        return node

    sampling = at("rollout", "sampling") or {}
    top_p = sampling.get("top_p", 1.0)
    clip = at("objective", "clip", "type"), at("objective", "ratio", "level"), at("objective", "surrogate", "type")
    lag = {key: at("pipeline", key) for key in ("exact_lag", "broadcast_interval") if at("pipeline", key) is not None}
    regime = ", ".join([str(at("pipeline", "type")), *(f"{key} {value}" for key, value in lag.items())])
    settings = {
        "Objective": " · ".join(str(part) for part in clip if part),
        "Regime": regime.replace("_", " ") if at("pipeline", "type") else "",
        "Sampling": f"T {sampling['temperature']}, top-p {top_p}" if "temperature" in sampling else "",
        "Model": str(at("model", "path") or "").rstrip("/").rpartition("/")[2],
        "Seed": str(config.get("seed", "")),
    }
    return [(label, text) for label, text in settings.items() if text]


def _duration(seconds: float) -> str:
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {left} s" if minutes else f"{left} s"


def _tables(runs: Sequence[RecordedRun]) -> list[dict[str, Any]]:
    frames = tables.tables(runs, tables.TABLES)
    return [_table(name, frame, alone=len(runs) == 1) for name, frame in frames.items() if frame.height]


def _table(name: str, frame: pl.DataFrame, alone: bool) -> dict[str, Any]:
    title, keys, _ = tables.TABLES[name]
    first = [*keys, *([] if alone else ["run"])]
    rest = [key for key in frame.columns if key not in {*first, "run", *_HIDDEN}]
    rest.sort(key=lambda key: tables.MAIN.index(key) if key in tables.MAIN else -1 if key in ("steps", "n") else 99)
    filled = [key for key in rest if not frame[key].is_null().all()]
    columns = [key.replace("_step_mean", " (mean over steps)").replace("_", " ") for key in [*first, *filled]]
    rows = [list(row) for row in frame.select([*first, *filled]).iter_rows()]
    return {"id": name, "title": title.capitalize(), "note": _NOTES[name], "columns": columns, "rows": rows}


def finite(value: Any) -> Any:
    """`value` with None for each float that JSON has no word for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return value
