"""Pictures of what runs recorded. Reads files only."""

from pathlib import Path
from typing import Any

from agent_rl.analysis.tables import read_mismatch


def run_picture(run: Path, rows: list[dict[str, Any]], target: Path) -> None:
    """Draw one run from its metrics rows: reward and evaluation, mismatch by turn, lag, turns and stop reasons."""
    import matplotlib as mpl  # heavy

    mpl.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
    _learning(axes[0], rows)
    _mismatch(axes[1], run)
    _stops(axes[2], rows)
    for axis in axes:
        axis.set_xlabel("optimizer step")
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(target, dpi=110)
    plt.close(figure)


def _column(rows: list[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
    return [step for step, _ in points], [value for _, value in points]


def _learning(axis: Any, rows: list[dict[str, Any]]) -> None:
    axis.plot(*_column(rows, "reward_mean"), color="#9ab", label="reward of the training batch")
    axis.plot(*_column(rows, "eval_avg"), "o-", color="#1a6", label="held-out accuracy")
    axis.set_title("It learns")
    axis.set_ylim(0, 1)
    axis.legend(frameon=False, loc="lower right")


def _mismatch(axis: Any, run: Path) -> None:
    table = read_mismatch(run)
    turns = sorted(turn for turn in table["turn"].unique().to_list() if turn >= 0)
    colours = __import__("matplotlib").colormaps["viridis"]
    for position, turn in enumerate(turns):
        part = table.filter(table["scope"] == "turn", table["turn"] == turn).sort("step")
        colour = colours(position / max(len(turns) - 1, 1))
        axis.plot(part["step"], part["mean_abs_d"], color=colour, label=f"turn {turn}", linewidth=1)
    axis.set_yscale("log")
    axis.set_title("Train-inference mismatch by turn, mean |d|")
    axis.legend(frameon=False, ncols=2, fontsize=8)


def _stops(axis: Any, rows: list[dict[str, Any]]) -> None:
    reasons = sorted({key for row in rows for key in row if key.startswith("stop/")})
    steps = [row["step"] for row in rows if row.get("reward_mean") is not None]
    shares = [[row.get(reason) or 0.0 for row in rows if row.get("reward_mean") is not None] for reason in reasons]
    if steps:
        axis.stackplot(steps, shares, labels=[reason.removeprefix("stop/") for reason in reasons], alpha=0.8)
        axis.legend(frameon=False, loc="lower right", fontsize=8)
    axis.set_ylim(0, 1)
    axis.set_title("Why episodes ended")
