"""The picture of a replay: methods against each other on one batch."""

from pathlib import Path
from typing import Any

import polars as pl
from matplotlib.figure import Figure


def replay_picture(overall: pl.DataFrame, gate_by_turn: pl.DataFrame, target: Path) -> None:
    """Bars of the cosine to GRPO's gradient and of the clip fraction, and gate rate overall and by turn as a heat map.

    `overall`: columns method, cosine and clip_fraction; `gate_by_turn`: method, all and one column a turn, same rows.
    """
    height = 1.6 + 0.24 * overall.height
    figure = Figure(figsize=(13, height), layout="constrained")
    cosine, clipped, gate = figure.subplots(1, 3, sharey=True)
    _bars(cosine, overall, "cosine", "#1a6", "Cosine of the gradient to GRPO's")
    _bars(clipped, overall, "clip_fraction", "#c63", "Clip fraction")
    cosine.axvline(1, color="#999", lw=0.8, ls=":")
    _heat(figure, gate, gate_by_turn)
    cosine.set_yticks(range(overall.height), overall["method"].to_list())
    figure.savefig(target, dpi=110)


def _bars(axis: Any, table: pl.DataFrame, column: str, colour: str, title: str) -> None:
    axis.barh(range(table.height), table[column].to_list(), color=colour)
    axis.set_title(title)
    axis.spines[["top", "right"]].set_visible(False)


def _heat(figure: Figure, axis: Any, table: pl.DataFrame) -> None:
    turns = [name for name in table.columns if name != "method"]
    axis.set_title("Gate rate, overall and by turn")
    axis.set_xlabel("turn")
    # imshow puts the first row on top, of the bars too: they share the axis.
    image = axis.imshow(table.select(turns).to_numpy(), aspect="auto", cmap="viridis", vmin=0)
    axis.set_xticks(range(len(turns)), turns)
    figure.colorbar(image, ax=axis)
