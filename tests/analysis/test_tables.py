"""The per-turn table: means over tokens, not over steps."""

from pathlib import Path

import polars as pl
import pytest

from agent_rl import facts
from agent_rl.analysis import tables

COLUMNS = ("mean_abs_d", "gate_rate", "clip_fraction", "entropy", "kept_size", "lag_mean")


def write(run: Path) -> None:
    """Two steps: turn 0 with 10 and then 30 tokens, turn 1 in the second step only."""

    def row(scope: str, turn: int, n: int, value: float) -> dict[str, object]:
        return {"part": "total", "scope": scope, "turn": turn, "n": n, **dict.fromkeys(COLUMNS, value)}

    steps = [
        [row("all", -1, 10, 1.0), row("first", -1, 10, 1.0), row("turn", 0, 10, 1.0)],
        [row("all", -1, 40, 4.0), row("turn", 0, 30, 5.0), row("turn", 1, 10, 1.0)],
    ]
    for step, rows in enumerate(steps):
        facts.write_part(run / "mismatch.parquet", step, [{"step": step, **r} for r in rows])


def test_means_are_weighted_by_tokens(tmp_path: Path) -> None:
    write(tmp_path)
    table = tables.per_turn(tmp_path)
    assert table["turn"].to_list() == ["0", "1", "all"]
    assert table["n"].to_list() == [40, 10, 50]
    for name in COLUMNS:
        assert table[name].to_list() == pytest.approx([(10 * 1 + 30 * 5) / 40, 1.0, (10 * 1 + 40 * 4) / 50])


def test_first_step_leaves_earlier_ones_out(tmp_path: Path) -> None:
    write(tmp_path)
    assert tables.per_turn(tmp_path, first_step=1).filter(pl.col("turn") == "0")["mean_abs_d"].item() == 5.0
    with pytest.raises(ValueError, match="no recorded step from step 7 on"):
        tables.per_turn(tmp_path, first_step=7)


def test_a_directory_that_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no mismatch.parquet in .*; name the directory of a run"):
        tables.per_turn(tmp_path)
