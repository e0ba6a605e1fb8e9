"""Pictures of what runs recorded. Reads files only."""

from pathlib import Path
from typing import Any

import matplotlib as mpl
import polars as pl
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from agent_rl.analysis.metric_lines import series
from agent_rl.analysis.recorded import RecordedRun
from agent_rl.analysis.tables import mean_by_step

_FEWEST_TOKENS = 100
"""A mean over fewer tokens of a step is noise that hides the others."""


def run_picture(run: RecordedRun, target: Path) -> None:
    """Draw one run into the PNG file `target`: reward and evaluation, mismatch by turn, number of turns."""
    figure = Figure(figsize=(13, 3.6), layout="constrained")
    axes = figure.subplots(1, 3)
    _learning(axes[0], run.metrics())
    _mismatch(axes[1], run)
    _turns(axes[2], run)
    for axis in axes:
        axis.set_xlabel("step")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(target, dpi=110)


def _column(rows: list[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    points = series(rows, key)
    return [step for step, _ in points], [value for _, value in points]


def _learning(axis: Any, rows: list[dict[str, Any]]) -> None:
    axis.plot(*_column(rows, "reward_mean"), color="#9ab", label="reward of the training batch")
    axis.plot(*_column(rows, "eval_avg"), "o-", color="#1a6", label="held-out accuracy")
    axis.set_title("Reward and held-out accuracy")
    axis.set_ylim(0, 1)
    axis.legend(frameon=False, loc="lower right")


def _mismatch(axis: Any, run: RecordedRun) -> None:
    rows = run.mismatch().filter(pl.col("part") == "total", pl.col("scope") == "turn")
    table = mean_by_step(rows, "mean_abs_d", "turn").filter(pl.col("n") >= _FEWEST_TOKENS)
    turns = sorted(table["turn"].unique().to_list())
    for position, turn in enumerate(turns):
        part = table.filter(pl.col("turn") == turn)
        axis.plot(part["step"], part["mean_abs_d"], color=_colour(position, len(turns)), label=f"turn {turn}", lw=1)
    axis.set_yscale("log")
    axis.set_title("Train-inference mismatch by turn: mean |d|")
    axis.legend(frameon=False, ncols=2, fontsize=8)


def _turns(axis: Any, run: RecordedRun) -> None:
    """Share of each batch's episodes by how many turns they took."""
    if run.rollouts().is_empty():
        return
    counts = run.rollouts().group_by("batch", "num_turns").len()
    table = counts.pivot("num_turns", index="batch", values="len").sort("batch").fill_null(0)
    turns = sorted(int(name) for name in table.columns if name != "batch")
    total = table.select(pl.sum_horizontal(str(turn) for turn in turns)).to_series()
    shares = [(table[str(turn)] / total).to_list() for turn in turns]
    colours = [_colour(position, len(turns)) for position in range(len(turns))]
    axis.stackplot(table["batch"], shares, labels=[f"{turn} turns" for turn in turns], colors=colours, alpha=0.85)
    axis.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
    axis.set_ylim(0, 1)
    axis.set_title("Turns that episodes take")


def _colour(position: int, count: int) -> Any:
    return mpl.colormaps["viridis"](position / max(count - 1, 1))
