"""The charts of a report and of the dashboard, as plotly figures in plain JSON. Reads files only.

The page gives them its colours and fonts, so that they follow its light or dark theme.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from agent_rl.analysis.drawing import COLOURS, MOST_POINTS, Chart, framed, thin
from agent_rl.analysis.metric_lines import series
from agent_rl.analysis.recorded import RecordedRun
from agent_rl.analysis.stacked import budgets, shares
from agent_rl.analysis.tables import mean_by_step

_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
_ORDINAL = "Cividis"
_FEWEST_TOKENS = 20
"""A cell of the heat map with fewer tokens is left white: its mean is noise."""


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
        "Quantile q of |d|",
        "nats",
        (("q", "q in use"), ("q_supported", "supported"), ("q_stochastic", "stochastic"), ("q_all", "all tokens")),
        "q in use: at the clip's alpha, over the tokens that the clip counts. The others: at 0.90, over the tokens of "
        "each rule. Log scale.",
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
    episodes = [shares(runs, "stop_reason", "Stop reasons"), shares(runs, "num_turns", "Turns that episodes take")]
    order: list[Chart | list[Chart]] = [
        curves["reward"],
        curves["entropy"],
        curves["grad"],
        curves["lag"],
        _mismatch(runs),
    ]
    order += [k3, _heat_maps(runs), ess, budgets(runs)]
    order += [curves["q"], curves["radii"], curves["gated"], kept, *episodes, curves["time"], curves["speed"]]
    return [chart for chart in _flat(order) if chart["data"]]


def _flat(order: list[Chart | list[Chart]]) -> list[Chart]:
    return [chart for one in order for chart in (one if isinstance(one, list) else [one])]


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
            x, y = thin([p for p in points if not spec.log or p[1] > 0])
            of_interest = figure == 0 or any(y)  # a lag of 0 is said; that no gate dropped a token is not
            if y and of_interest and not (key == "eval_pass" and _same_as_average(rows)):
                data.append(_line(position, figure, runs, label, x, y))
    scale = {"type": "log"} if spec.log else {"rangemode": "tozero"}
    return framed(
        spec.id, spec.section, spec.title, _thinned(spec.note, runs), spec.unit, data, tickformat=spec.ticks, **scale
    )


def _same_as_average(rows: list[dict[str, Any]]) -> bool:
    """pass@1 is avg@1."""
    return all(row.get("eval_pass") == row.get("eval_avg") for row in rows)


def _thinned(note: str, runs: Sequence[RecordedRun]) -> str:
    stride = math.ceil(max(len(run.metrics()) for run in runs) / MOST_POINTS)
    return f"{note} Every {stride}th step is drawn.".strip() if stride > 1 else note


def _mismatch(runs: Sequence[RecordedRun]) -> Chart:
    """mean |d| in whole and in parts."""
    labels = {"total": "all", "policy_lag": "policy lag", "implementation": "implementation"}
    data = []
    for position, run in enumerate(runs):
        every = mean_by_step(run.mismatch().filter(pl.col("scope") == "all"), "mean_abs_d", "part")
        for figure, (part, label) in enumerate(labels.items()):
            rows = every.filter(pl.col("part") == part, pl.col("mean_abs_d") > 0)
            if rows.height:
                x, y = thin(list(rows.select("step", "mean_abs_d").iter_rows()))
                data.append(_line(position, figure, runs, label, x, y))
    note = "d = trainer log-prob − behaviour log-prob. Its parts where proximal log-probs were computed. Log scale."
    return framed("mismatch", "Lag and mismatch", "Mismatch: mean |d|", note, "nats", data, type="log")


def _scopes(runs: Sequence[RecordedRun], column: str, title: str, unit: str, log: bool) -> Chart:
    """A column of the mismatch table over all tokens, over first turns and over later ones."""
    data = []
    for position, run in enumerate(runs):
        table = run.mismatch().filter(pl.col("part") == "total")
        if column not in table.columns:
            continue
        table = mean_by_step(table, column, "scope")
        table = table.filter(pl.col(column) > 0, pl.col(column) >= _LEAST.get(column, 0.0))
        for figure, (scope, label) in enumerate(_SCOPES.items()):
            rows = table.filter(pl.col("scope") == scope)
            if rows.height:
                x, y = thin(list(rows.select("step", column).iter_rows()))
                data.append(_line(position, figure, runs, label, x, y))
    section = "Clip and gate" if column == "kept_size" else "Lag and mismatch"
    scale = {"type": "log"} if log else {}
    return framed(column, section, title, _NOTES[column], unit, data, **scale)


_LEAST = {"k3": 1e-10}
"""Less is rounding, as at lag 0, and would stretch the scale."""
_SCOPES = {"all": "all tokens", "first": "first turn", "later": "later turns"}
_NOTES = {
    "k3": "mean of r − 1 − d, an estimate of KL(behaviour ‖ trainer). Log scale.",
    "ess": "(Σ r)² / (n Σ r²) of the token ratios r = exp d of each step; of its updates, the mean.",
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
    """Columns step, turn, mean_abs_d, n. A log scale has no zero."""
    table = run.mismatch().filter(pl.col("part") == "total", pl.col("scope") == "turn")
    return mean_by_step(table, "mean_abs_d", "turn").filter(pl.col("mean_abs_d") > 0, pl.col("n") >= _FEWEST_TOKENS)


def _heat_map(position: int, runs: Sequence[RecordedRun], table: pl.DataFrame, low: float, high: float) -> Chart:
    steps = thin([(step, 0) for step in sorted(set(table["step"].to_list()))])[0]
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
    return framed(f"turns-{position}", "Lag and mismatch", title, note, "turn", [map_] if turns else [], **axis)
