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


def test_routing_is_a_table_of_layers_by_turn_weighted_by_tokens(tmp_path: Path) -> None:
    write(tmp_path)
    assert tables.routing(tmp_path).is_empty()
    cells = {(0, -1): (10, 0.1), (0, 0): (30, 0.0), (10, -1): (10, 0.3), (10, 0): (30, 0.2), (10, 1): (20, 0.5)}

    def routing_row(step: int, layer: int, turn: int, n: int, differed: float) -> dict[str, object]:
        return {"step": step, "part": "routing", "layer": layer, "turn": turn, "n": n, "routing_differed": differed}

    rows = [routing_row(0, layer, turn, *cell) for (layer, turn), cell in cells.items()]
    facts.write_part(tmp_path / "mismatch.parquet", 0, rows, facts.MISMATCH)
    facts.write_part(tmp_path / "mismatch.parquet", 1, [routing_row(1, 0, 0, 10, 0.4)], facts.MISMATCH)
    table = tables.routing(tmp_path)
    assert table.columns == ["layer", "prompt", "0", "1", "all"]
    assert table["layer"].to_list() == ["0", "10", "all"]
    assert table["0"].to_list() == pytest.approx([4 / 40, 0.2, 10 / 70])
    assert table["1"].to_list() == [None, 0.5, 0.5]
    assert table["all"].to_list() == pytest.approx([5 / 50, 19 / 60, 24 / 110])
    assert tables.routing(tmp_path, first_step=1)["0"].to_list() == pytest.approx([0.4, 0.4])
