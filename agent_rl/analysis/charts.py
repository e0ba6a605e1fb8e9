"""The charts of a report and of the dashboard, as plotly figures in plain JSON. Reads files only.

The page gives them its colours and fonts, so that they follow its light or dark theme.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from agent_rl.analysis.metric_lines import series
from agent_rl.analysis.recorded import RecordedRun

Chart = dict[str, Any]

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Okabe and Ito's palette: told apart by colour-blind readers."""
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
_ORDINAL = "Cividis"
_MOST_POINTS = 600
"""Points of one curve; of a longer run every k-th step is drawn."""
_FEWEST_TOKENS = 20
"""A cell of the heat map with fewer tokens is left white: its mean is noise."""
_STEP = "optimizer step"


@dataclass(frozen=True)
class Curves:
    """A chart of figures of metrics.jsonl against the step: `figures` are (key, what the legend says)."""

    id: str
    section: str
    title: str
    unit: str
    figures: tuple[tuple[str, str], ...]
    note: str = ""
    log: bool = False
    ticks: str | None = None


_CURVES = (
    Curves(
        "reward",
        "Learning",
        "Reward and held-out accuracy",
        "mean reward, accuracy (0 to 1)",
        (("reward_mean", "training reward"), ("eval_avg", "held-out avg@k"), ("eval_pass", "held-out pass@k")),
        "The reward is that of the batch trained at the step; the evaluation is of the policy before the step.",
    ),
    Curves("entropy", "Learning", "Entropy of the policy", "nats a token", (("entropy", "entropy"),)),
    Curves("grad", "Learning", "Gradient norm", "norm before clipping", (("grad_norm", "gradient norm"),)),
    Curves(
        "lag",
        "Lag and mismatch",
        "Lag of the trained tokens",
        "policy versions",
        (("lag_mean", "mean"), ("lag_max", "largest")),
        "The version that is trained minus the version that sampled the token.",
    ),
    Curves(
        "q",
        "Clip and gate",
        "The 0.90 quantile q of |d|",
        "nats",
        (("q", "q in use"), ("q_supported", "supported"), ("q_stochastic", "stochastic"), ("q_all", "all tokens")),
        "Under each rule of which tokens count. Log scale.",
        log=True,
    ),
    Curves(
        "radii",
        "Clip and gate",
        "Trust-region radii",
        "radius of the ratio (1)",
        (("eps_low", "ε low"), ("eps_high", "ε high"), ("eps_eff_low", "ε_eff low"), ("eps_eff_high", "ε_eff high")),
        "Means over tokens; ε_eff is the radius with which PPO has the same gradient.",
    ),
    Curves(
        "gated",
        "Clip and gate",
        "Gated, clipped and dropped tokens",
        "share of tokens (0 to 1)",
        (
            ("gate_rate", "gated"),
            ("clip_fraction", "clipped"),
            ("newly_clipped_fraction", "clipped by SAT alone"),
            ("dropped_fraction", "dropped by a gate"),
        ),
    ),
    Curves(
        "time",
        "Rollouts and time",
        "Time by stage",
        "seconds a step",
        (("wall_s", "whole step"), ("generate_s", "sampling"), ("train_s", "training"), ("eval_s", "evaluation")),
        "With prefetch, sampling and training overlap: they do not add up to the step.",
    ),
    Curves(
        "speed",
        "Rollouts and time",
        "Throughput",
        "trained tokens a second",
        (("tokens_per_s", "tokens/s"),),
        ticks="~s",
    ),
)


def charts(runs: Sequence[RecordedRun]) -> list[Chart]:
    """The charts of one run, or of several drawn over each other; one of which nothing is recorded is left out.

    Each: id, section, title, note, `data` and `layout` for plotly; the `meta` of a trace is what the page's own
    legend says of it. With several runs a run has a colour and a figure a dash; with one, figures have both.
    """
    curves = {spec.id: _curves(spec, runs) for spec in _CURVES}
    k3 = _scopes(runs, "k3", "k3 of the step's batch", "nats", True)
    ess = _scopes(runs, "ess", "Effective sample size", "share of the tokens (0 to 1)", False)
    kept = _scopes(runs, "kept_size", "Kept-set size", "tokens kept by top-p or top-k", False)
    shares = [_shares(runs, "stop_reason", "Stop reasons"), _shares(runs, "num_turns", "Turns that episodes take")]
    order: list[Chart | list[Chart]] = [
        curves["reward"],
        curves["entropy"],
        curves["grad"],
        curves["lag"],
        _mismatch(runs),
    ]
    order += [k3, _heat_maps(runs), ess]
    order += [curves["q"], curves["radii"], curves["gated"], kept, *shares, curves["time"], curves["speed"]]
    return [chart for chart in _flat(order) if chart["data"]]


def _flat(found: list[Chart | list[Chart]]) -> list[Chart]:
    return [chart for one in found for chart in (one if isinstance(one, list) else [one])]


def _chart(id: str, section: str, title: str, note: str, unit: str, data: list[Any], **y: Any) -> Chart:
    layout = {"xaxis": {"title": {"text": _STEP}}, "yaxis": {"title": {"text": unit}, **y}}
    return {"id": id, "section": section, "title": title, "note": note, "data": data, "layout": layout}


def _line(run: int, figure: int, runs: Sequence[RecordedRun], label: str, x: list[Any], y: list[Any]) -> Any:
    """A curve; few points, such as evaluations, get markers."""
    several = len(runs) > 1
    colour = COLOURS[(run if several else figure) % len(COLOURS)]
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(x) <= 30 else "lines",
        "name": f"{runs[run].name} · {label}" if several else label,
        "meta": label,
        "x": x,
        "y": y,
        "line": {"color": colour, "dash": _DASHES[figure % len(_DASHES)], "width": 1.8},
        "marker": {"size": 5},
    }


def _curves(spec: Curves, runs: Sequence[RecordedRun]) -> Chart:
    data = []
    for position, run in enumerate(runs):
        rows = run.metrics()
        for figure, (key, label) in enumerate(spec.figures):
            points = [p for p in series(rows, key) if isinstance(p[1], (int, float))]
            x, y = _thin([p for p in points if not spec.log or p[1] > 0])
            of_interest = figure == 0 or any(y)  # a lag of 0 is said; that no gate dropped a token is not
            if y and of_interest and not (key == "eval_pass" and _same_as_average(rows)):
                data.append(_line(position, figure, runs, label, x, y))
    scale = {"type": "log"} if spec.log else {"rangemode": "tozero"}
    return _chart(
        spec.id, spec.section, spec.title, _thinned(spec.note, runs), spec.unit, data, tickformat=spec.ticks, **scale
    )


def _same_as_average(rows: list[dict[str, Any]]) -> bool:
    """pass@1 is avg@1."""
    return all(row.get("eval_pass") == row.get("eval_avg") for row in rows)


def _thin(points: list[tuple[Any, Any]]) -> tuple[list[Any], list[Any]]:
    """At most `_MOST_POINTS` of them, evenly, the last one included; values to six digits."""
    stride = math.ceil(len(points) / _MOST_POINTS)
    kept = [*points[: -1 : max(stride, 1)], *points[-1:]]
    return [x for x, _ in kept], [float(f"{y:.6g}") for _, y in kept]


def _thinned(note: str, runs: Sequence[RecordedRun]) -> str:
    stride = math.ceil(max(len(run.metrics()) for run in runs) / _MOST_POINTS)
    return f"{note} Every {stride}th step is drawn.".strip() if stride > 1 else note


def _mismatch(runs: Sequence[RecordedRun]) -> Chart:
    """mean |d| in whole and in parts."""
    labels = {"total": "all", "policy_lag": "policy lag", "implementation": "implementation"}
    data = []
    for position, run in enumerate(runs):
        every = run.mismatch().filter(pl.col("scope") == "all", _drawable("mean_abs_d"))
        for figure, (part, label) in enumerate(labels.items()):
            rows = every.filter(pl.col("part") == part).sort("step")
            if rows.height:
                x, y = _thin(list(rows.select("step", "mean_abs_d").iter_rows()))
                data.append(_line(position, figure, runs, label, x, y))
    note = "d = trainer log-prob − behaviour log-prob. Its parts where proximal log-probs were computed. Log scale."
    return _chart("mismatch", "Lag and mismatch", "Mismatch: mean |d|", note, "nats", data, type="log")


def _scopes(runs: Sequence[RecordedRun], column: str, title: str, unit: str, log: bool) -> Chart:
    """A column of the mismatch table over all tokens, over first turns and over later ones."""
    data = []
    for position, run in enumerate(runs):
        table = run.mismatch().filter(pl.col("part") == "total")
        if column not in table.columns:
            continue
        table = table.filter(_drawable(column), pl.col(column) >= _LEAST.get(column, 0.0))
        for figure, (scope, label) in enumerate(_SCOPES.items()):
            rows = table.filter(pl.col("scope") == scope).sort("step")
            if rows.height:
                x, y = _thin(list(rows.select("step", column).iter_rows()))
                data.append(_line(position, figure, runs, label, x, y))
    section = "Clip and gate" if column == "kept_size" else "Lag and mismatch"
    scale = {"type": "log"} if log else {}
    return _chart(column, section, title, _NOTES[column], unit, data, **scale)


_LEAST = {"k3": 1e-10}
"""Less is rounding, as at lag 0, and would stretch the scale."""
_SCOPES = {"all": "all tokens", "first": "first turn", "later": "later turns"}
_NOTES = {
    "k3": "mean of r − 1 − d, an estimate of KL(behaviour ‖ trainer). Log scale.",
    "ess": "(Σ r)² / (n Σ r²) of the token ratios r = exp d of each step.",
    "kept_size": "Mean over tokens; the log-probs of both sides are over the kept set.",
}


def _heat_maps(runs: Sequence[RecordedRun]) -> list[Chart]:
    """Mismatch by turn over time, one map a run, all on one colour scale."""
    tables = [_by_turn(run) for run in runs]
    decades = [math.log10(value) for table in tables for value in table["mean_abs_d"]]
    if not decades:
        return []
    low, high = float(np.quantile(decades, 0.05)), max(decades)  # a step at lag 0 would take half of the scale
    return [_heat_map(position, runs, tables[position], low, high) for position in range(len(runs))]


def _by_turn(run: RecordedRun) -> pl.DataFrame:
    enough = pl.col("n") >= _FEWEST_TOKENS
    return run.mismatch().filter(pl.col("part") == "total", pl.col("scope") == "turn", _drawable("mean_abs_d"), enough)


def _drawable(column: str) -> pl.Expr:
    """Log scales have no zero; and NaN sorts above every number."""
    return pl.col(column).is_finite() & (pl.col(column) > 0)


def _heat_map(position: int, runs: Sequence[RecordedRun], table: pl.DataFrame, low: float, high: float) -> Chart:
    steps = _thin([(step, 0) for step in sorted(set(table["step"].to_list()))])[0]
    turns = sorted(set(table["turn"].to_list()))
    rows = table.select("turn", "step", "mean_abs_d", "n").rows()
    cells = {(turn, step): (value, n) for turn, step, value, n in rows}

    def each(value: Callable[[float, int], Any]) -> list[list[Any]]:
        return [[value(*cells[turn, step]) if (turn, step) in cells else None for step in steps] for turn in turns]

    ticks = range(math.floor(low), math.ceil(high) + 1)
    map_ = {
        "type": "heatmap",
        "x": steps,
        "y": turns,
        "z": each(lambda value, n: round(math.log10(value), 3)),
        "text": each(lambda value, n: f"mean |d| {value:.3g} nats<br>{n} tokens"),
        "hovertemplate": "step %{x}, turn %{y}<br>%{text}<extra></extra>",
        "colorscale": _ORDINAL,
        "zmin": low,
        "zmax": high,
        "colorbar": {
            "title": {"text": "mean |d| (nats)", "side": "right"},
            "tickvals": list(ticks),
            "ticktext": [f"1e{tick}" for tick in ticks],
        },
    }
    name = f": {runs[position].name}" if len(runs) > 1 else ""
    note = f"Log colour scale; cells of fewer than {_FEWEST_TOKENS} tokens are left out."
    title = f"Mismatch by turn over time{name}"
    axis = {"dtick": 1} if len(turns) <= 12 else {}
    return _chart(f"turns-{position}", "Lag and mismatch", title, note, "turn", [map_] if turns else [], **axis)


def _shares(runs: Sequence[RecordedRun], column: str, title: str) -> list[Chart]:
    """Share of each rollout batch's episodes by a column, one chart a run."""
    found = []
    for position, run in enumerate(runs):
        facts = run.rollouts()
        name = f": {run.name}" if len(runs) > 1 else ""
        data = _stack(facts, column) if facts.height else []
        note = "Of the episodes of each rollout batch; a batch is trained at the step of its number."
        chart = _chart(
            f"{column}-{position}", "Rollouts and time", title + name, note, "share of episodes (0 to 1)", data
        )
        chart["layout"]["xaxis"]["title"]["text"] = "rollout batch"
        chart["layout"] |= {"barmode": "stack", "bargap": 0}
        chart["layout"]["yaxis"]["range"] = [0, 1]
        found.append(chart)
    return found


def _stack(facts: pl.DataFrame, column: str) -> list[Any]:
    counts = facts.group_by("batch", column).len().with_columns(pl.col("len") / pl.col("len").sum().over("batch"))
    drawn = _thin([(batch, 0) for batch in sorted(set(counts["batch"].to_list()))])[0]
    values = sorted(counts[column].unique().drop_nulls().to_list())
    bars = []
    for position, value in enumerate(values):
        known = dict(counts.filter(pl.col(column) == value).select("batch", "len").iter_rows())
        x, y = drawn, [round(known.get(batch, 0.0), 4) for batch in drawn]
        label = f"{value} turn{'' if value == 1 else 's'}" if column == "num_turns" else str(value).replace("_", " ")
        colour = _ordinal(position, len(values)) if column == "num_turns" else COLOURS[position % len(COLOURS)]
        marker = {"color": colour, "line": {"width": 0}}
        bars.append({"type": "bar", "name": label, "meta": label, "x": x, "y": y, "marker": marker})
    return bars


_CIVIDIS = ((0, 34, 78), (53, 69, 108), (102, 105, 112), (148, 142, 119), (200, 182, 102), (254, 232, 56))


def _ordinal(position: int, count: int) -> str:
    """A colour between cividis' ends, for values that have an order."""
    place = position / max(count - 1, 1) * (len(_CIVIDIS) - 1)
    low = min(int(place), len(_CIVIDIS) - 2)
    mixed = [round(a + (b - a) * (place - low)) for a, b in zip(_CIVIDIS[low], _CIVIDIS[low + 1], strict=True)]
    return "rgb({},{},{})".format(*mixed)
