"""Which step a figure in the lines of metrics.jsonl is of."""

from collections.abc import Sequence
from typing import Any


def step_of(row: dict[str, Any], key: str) -> int:
    """The step that the figure `key` of a line is of.

    That is the line's, but what an evaluation on workers of its own found arrives in a later one.
    """
    found_by_evaluation = key.startswith("eval_") and key != "eval_s"
    return int(row.get("eval_step", row["step"]) if found_by_evaluation else row["step"])


def series(rows: Sequence[dict[str, Any]], key: str) -> list[tuple[int, Any]]:
    """(step, value) of every line that has a value for `key`, in order."""
    return [(step_of(row, key), row[key]) for row in rows if row.get(key) is not None]


def evaluations(rows: Sequence[dict[str, Any]]) -> list[tuple[int, float]]:
    """(step, avg@k) of every evaluation among lines of metrics, in order."""
    return series(rows, "eval_avg")
