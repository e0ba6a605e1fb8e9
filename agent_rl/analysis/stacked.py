"""Charts of stacked bars over the steps of a run: what its episodes were, and what each turn costs of the bound."""

from collections.abc import Sequence
from typing import Any

import polars as pl

from agent_rl.analysis.bound import bound_over_time
from agent_rl.analysis.drawing import COLOURS, Chart, framed, thin
from agent_rl.analysis.recorded import RecordedRun


def shares(runs: Sequence[RecordedRun], column: str, title: str) -> list[Chart]:
    """The share of each rollout batch's episodes that has each value of `column`, one chart a run."""
    charts = []
    for position, run in enumerate(runs):
        facts = run.rollouts()
        data = _counted(facts, column) if facts.height else []
        note = "Of the episodes of each rollout batch; a batch is trained at the step of its number."
        titled = title + _whose(run, runs)
        chart = _stacked(f"{column}-{position}", "Rollouts and time", titled, note, "share of episodes (0 to 1)", data)
        chart["layout"]["xaxis"]["title"]["text"] = "rollout batch"
        chart["layout"]["yaxis"]["range"] = [0, 1]
        charts.append(chart)
    return charts


def budgets(runs: Sequence[RecordedRun]) -> list[Chart]:
    """The improvement bound's budget by turn and step, one chart a run."""
    note = (
        "Total variation from the rollouts' policy, summed over a turn's tokens: the share of 2ξ that the turn uses. "
        "Past 1 in all the bound says nothing: compare turns, not heights. With top-p or top-k, steps between "
        "computations of the mass off the kept sets are left out, and with several epochs all but the first."
    )
    return [
        _stacked(
            f"budget-{position}",
            "Lag and mismatch",
            "Budget of the improvement bound by turn" + _whose(run, runs),
            note,
            "share of 2ξ (1)",
            _by_turn(bound_over_time(run)),
        )
        for position, run in enumerate(runs)
    ]


def _whose(run: RecordedRun, runs: Sequence[RecordedRun]) -> str:
    return f": {run.name}" if len(runs) > 1 else ""


def _stacked(id: str, section: str, title: str, note: str, unit: str, data: list[Any]) -> Chart:
    chart = framed(id, section, title, note, unit, data)
    chart["layout"] |= {"barmode": "stack", "bargap": 0}
    return chart


def _by_turn(table: pl.DataFrame) -> list[Any]:
    steps = _drawn(table["step"])
    turns = sorted(table["turn"].unique().to_list())
    return [
        _bars(f"turn {turn}", steps, dict(table.filter(turn=turn).select("step", "budget").rows()), 6)
        | {"marker": {"color": _ordinal(position, len(turns)), "line": {"width": 0}}}
        for position, turn in enumerate(turns)
    ]


def _counted(facts: pl.DataFrame, column: str) -> list[Any]:
    counts = facts.group_by("batch", column).len().with_columns(pl.col("len") / pl.col("len").sum().over("batch"))
    drawn = _drawn(counts["batch"])
    values = sorted(counts[column].unique().drop_nulls().to_list())
    bars = []
    for position, value in enumerate(values):
        known = dict(counts.filter(pl.col(column) == value).select("batch", "len").iter_rows())
        label = f"{value} turn{'' if value == 1 else 's'}" if column == "num_turns" else str(value).replace("_", " ")
        colour = _ordinal(position, len(values)) if column == "num_turns" else COLOURS[position % len(COLOURS)]
        bars.append(_bars(label, drawn, known, 4) | {"marker": {"color": colour, "line": {"width": 0}}})
    return bars


def _drawn(steps: pl.Series) -> list[int]:
    return thin([(step, 0) for step in sorted(set(steps.to_list()))])[0]


def _bars(label: str, steps: list[int], known: dict[int, float], digits: int) -> dict[str, Any]:
    """Bars at `steps`; 0 where nothing is known."""
    heights = [round(known.get(step, 0.0), digits) for step in steps]
    return {"type": "bar", "name": label, "meta": label, "x": steps, "y": heights}


_CIVIDIS = ((0, 34, 78), (53, 69, 108), (102, 105, 112), (148, 142, 119), (200, 182, 102), (254, 232, 56))


def _ordinal(position: int, count: int) -> str:
    """A colour between cividis' ends, for values that have an order."""
    place = position / max(count - 1, 1) * (len(_CIVIDIS) - 1)
    low = min(int(place), len(_CIVIDIS) - 2)
    mixed = [round(a + (b - a) * (place - low)) for a, b in zip(_CIVIDIS[low], _CIVIDIS[low + 1], strict=True)]
    return "rgb({},{},{})".format(*mixed)
