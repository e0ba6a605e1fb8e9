"""report.html of a sweep: the comparison as a table, and every variant's mean over seeds by step. Reads files only."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl

from agent_rl.analysis.comparison import FinishedRun, values_by_step
from agent_rl.analysis.drawing import COLOURS, Chart, framed, thin
from agent_rl.analysis.report import write_page
from agent_rl.analysis.views import finite

_CURVES = (
    ("eval_avg", "Learning", "Held-out accuracy", "accuracy (0 to 1)", False),
    ("reward_mean", "Learning", "Training reward", "mean reward", False),
    ("mismatch_mean_abs", "Lag and mismatch", "Mismatch: mean |d|", "nats", True),
    ("clip_fraction", "Clip and gate", "Tokens that the clip cut", "fraction of tokens", False),
    ("gate_rate", "Clip and gate", "Tokens that the gate tightened", "fraction of tokens", False),
    ("bound_budget", "Lag and mismatch", "Share of the bound's budget", "1 is vacuous", False),
    ("entropy", "Learning", "Entropy of the policy", "nats a token", False),
)
_LEAST = 1e-5
"""Less on a log scale is rounding, as at a step without lag, and would stretch it."""
_DASHES = ("solid", "dash", "dot")


def write_sweep_report(
    runs: Sequence[FinishedRun], compared: pl.DataFrame, name: str, baseline: str | None, target: Path
) -> None:
    """Write the page of the finished `runs`, with the rows of `comparison.summary` as its table."""
    variants: dict[str, list[FinishedRun]] = {}
    for run in runs:
        variants.setdefault(run.variant, []).append(run)
    facts = {
        "Runs": str(len(runs)),
        "Variants": str(len(variants)),
        "Seeds": ", ".join(map(str, sorted({run.seed for run in runs}))),
        "Baseline": baseline or "none",
    }
    data = {
        "runs": [{"name": name, "status": "finished", "summary": list(facts.items())}],
        "charts": [_ends(variants), *(chart for curve in _CURVES if (chart := _curve(variants, *curve))["data"])],
        "tables": [_table(compared, baseline)],
        "colours": COLOURS,
        "samples": [],
    }
    write_page(name, finite(data), target)


def _style(position: int) -> tuple[str, str]:
    """Colour and dash of a variant: the palette, again with another dash once it is used up."""
    return COLOURS[position % len(COLOURS)], _DASHES[position // len(COLOURS) % len(_DASHES)]


def _ends(variants: dict[str, list[FinishedRun]]) -> Chart:
    """Where every seed ended."""
    data = []
    for position, (name, runs) in enumerate(variants.items()):
        last = [run.evals[-1][1] for run in runs if run.evals]
        marker = {"color": _style(position)[0]}
        data.append({"type": "box", "name": name, "y": last, "boxpoints": "all", "pointpos": 0, "marker": marker})
    chart = framed("ends", "Learning", "Last evaluation of each seed", "Box: quartiles.", "accuracy (0 to 1)", data)
    chart["layout"] |= {"xaxis": {"title": {"text": "variant"}}, "showlegend": False}
    return chart


def _curve(variants: dict[str, list[FinishedRun]], key: str, section: str, title: str, unit: str, log: bool) -> Chart:
    """The mean over seeds of a figure, by step."""
    data = []
    for position, (name, runs) in enumerate(variants.items()):
        points = [(step, sum(values) / len(values)) for step, values in values_by_step(runs, key).items()]
        points = [(step, value) for step, value in points if value > _LEAST or not log]
        if points:
            x, y = thin(points)
            colour, dash = _style(position)
            line = {"color": colour, "dash": dash, "width": 1.8}
            data.append({"type": "scatter", "mode": "lines", "name": name, "meta": name, "x": x, "y": y, "line": line})
    return framed(key, section, title, "Mean over seeds.", unit, data, **({"type": "log"} if log else {}))


def _table(compared: pl.DataFrame, baseline: str | None) -> dict[str, Any]:
    against = f" Differences to {baseline} are taken seed by seed." if baseline else ""
    return {
        "id": "comparison",
        "title": "Comparison",
        "note": f"Held-out accuracy: means over seeds, se: standard errors.{against}",
        "columns": [name.replace("_", " ") for name in compared.columns],
        "rows": [list(row) for row in compared.iter_rows()],
    }
