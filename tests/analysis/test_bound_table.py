"""The bound's table of a run: means over episodes of all steps, and runs that were recorded before it."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from typer.testing import CliRunner

from agent_rl import facts
from agent_rl.analysis.bound import bound_by_turn, bound_over_time
from agent_rl.analysis.charts import charts
from agent_rl.analysis.recorded import RecordedRun
from agent_rl.cli import app
from agent_rl.config import dump
from agent_rl.objective.intervals import bernstein_margin, visited_interval
from tests.configs import quickstart

EPISODES = {0: np.array([[0.5, 0.1], [0.3, 0.0]]), 1: np.array([[0.2, 0.0], [0.0, 0.0], [0.1, 0.0], [0.1, 0.0]])}
"""Penalty by step, [episodes, turns]; in step 1 no episode reaches turn 1."""


def audit_row(step: int, turn: int, penalties: np.ndarray, **changes: float) -> dict[str, object]:
    scope = "all" if turn == -1 else "turn"
    audit = {
        "num_episodes": len(penalties),
        "tv": penalties.mean(),
        "penalty_var": penalties.var(ddof=1),
        "ratio_drift": 0.0,
        "gspo_gap": 0.25,
    }
    return {"step": step, "part": "total", "scope": scope, "turn": turn, "n": 10, "mean_abs_d": 0.1} | audit | changes


def write(run: Path) -> None:
    (run / "config.yaml").write_text(dump(quickstart()))
    for step, penalties in EPISODES.items():
        turns = [(k, penalties[:, k]) for k in range(2) if penalties[:, k].any()]
        rows = [audit_row(step, k, values) for k, values in [*turns, (-1, penalties.sum(1))]]
        facts.write_part(run / "mismatch.parquet", step, rows, facts.MISMATCH)


def test_turns_are_averaged_over_the_episodes_of_all_steps(tmp_path: Path) -> None:
    write(tmp_path)
    table = bound_by_turn(RecordedRun(tmp_path))
    every = np.concatenate(list(EPISODES.values()))
    assert table["turn"].to_list() == ["0", "1", "all"]
    assert table["budget"].to_list() == pytest.approx([*every.mean(0), every.sum(1).mean()])
    assert table["share"].to_list() == pytest.approx([1.2 / 1.3, 0.1 / 1.3, 1])
    assert table["state_shift"].to_list() == pytest.approx([0, every[:, 0].mean(), 0])
    assert table["off_support"].is_nan().all()
    assert table["high"].to_list()[0] == pytest.approx(visited_interval(1.2)[1] / 6)
    margins = [bernstein_margin(values.var(ddof=1), 6, span) for values, span in ((every[:, 0], 48), (every[:, 1], 48))]
    assert table["mean_high"].to_list()[:2] == pytest.approx(list(every.mean(0) + margins))
    assert table["gspo_gap"].to_list() == pytest.approx([0.25, 0.25 * 2 / 6, 0.25])
    assert bound_by_turn(RecordedRun(tmp_path), first_step=1)["budget"].to_list() == pytest.approx([0.1, 0.1])
    over_time = bound_over_time(RecordedRun(tmp_path))
    assert over_time.select("step", "turn").rows() == [(0, 0), (0, 1), (1, 0)]
    assert over_time["budget"].to_list() == pytest.approx([0.4, 0.05, 0.1])


def test_of_several_epochs_only_the_first_counts(tmp_path: Path) -> None:
    """Two mini-batches of two episodes, twice: turn 1 is reached in the first one only, and counts 0 in the second."""
    (tmp_path / "config.yaml").write_text(dump(quickstart("trainer.num_minibatches=2", "trainer.num_epochs=2")))
    first, second, again = np.array([[0.4, 0.2], [0.2, 0.2]]), np.array([[0.1, 0.0], [0.1, 0.0]]), np.ones((2, 2))
    rows: list[dict[str, object]] = []
    for update, penalties in enumerate((first, second, again, again)):
        turns = [(k, penalties[:, k]) for k in range(2) if penalties[:, k].any()]
        rows += [audit_row(0, k, values, update=update) for k, values in [*turns, (-1, penalties.sum(1))]]
    facts.write_part(tmp_path / "mismatch.parquet", 0, rows, facts.MISMATCH)
    table = bound_by_turn(RecordedRun(tmp_path))
    assert table["budget"].to_list() == pytest.approx([0.2, 0.1, 0.3])
    low, _ = visited_interval(0.8)
    assert table["low"].to_list()[0] == pytest.approx(low / 4)
    assert bound_over_time(RecordedRun(tmp_path)).rows() == [(0, 0, pytest.approx(0.2)), (0, 1, pytest.approx(0.1))]
    (tmp_path / "config.yaml").unlink()
    without = [(0, 0, pytest.approx(0.3)), (0, 1, pytest.approx(0.2))]
    assert bound_over_time(RecordedRun(tmp_path)).rows() == without, "without its config a run is taken for one update"


def test_mass_off_the_kept_set_counts(tmp_path: Path) -> None:
    write(tmp_path)
    rows = [audit_row(2, k, np.array([0.1, 0.2]), off_support=0.05) for k in (0, -1)]
    facts.write_part(tmp_path / "mismatch.parquet", 2, rows, facts.MISMATCH)
    table = bound_by_turn(RecordedRun(tmp_path), first_step=2)
    assert table["budget"].to_list() == pytest.approx([0.2, 0.2])
    low, high = visited_interval(0.3)
    assert table.select("low", "high").row(0) == pytest.approx((low / 2 + 0.05, high / 2 + 0.05))
    assert bound_over_time(RecordedRun(tmp_path)).filter(step=2)["budget"].to_list() == pytest.approx([0.2])


def test_steps_whose_mass_off_the_kept_set_is_unknown_are_left_out(tmp_path: Path) -> None:
    """With `trainer.off_support_every` above 1, steps 0 and 1 of these have no such mass, and steps 2 and 3 do."""
    write(tmp_path)
    for step, penalties in ((2, [0.1, 0.2]), (3, [0.3, 0.3, 0.3, 0.5])):
        rows = [audit_row(step, k, np.array(penalties), off_support=0.05 * step) for k in (0, -1)]
        facts.write_part(tmp_path / "mismatch.parquet", step, rows, facts.MISMATCH)
    table = bound_by_turn(RecordedRun(tmp_path))
    assert table["turn"].to_list() == ["0", "all"]
    assert table["n"].to_list() == [20, 20]
    assert table["tv"].to_list() == pytest.approx([1.7 / 6] * 2)
    assert table["off_support"].to_list() == pytest.approx([(0.1 * 2 + 0.15 * 4) / 6] * 2)
    assert table["budget"].to_list() == pytest.approx([2.5 / 6] * 2)
    assert bound_over_time(RecordedRun(tmp_path)).rows() == [
        (2, 0, pytest.approx(0.25)),
        (3, 0, pytest.approx(0.5)),
    ]


def test_runs_from_before_the_audit_stay_readable(tmp_path: Path) -> None:
    write(tmp_path)
    old = pl.read_parquet(tmp_path / "mismatch.parquet" / "part-000000.parquet")
    audit = ("num_episodes", "tv", "off_support", "penalty_var", "ratio_drift", "state_shift", "gspo_gap")
    old.drop(audit).write_parquet(tmp_path / "mismatch.parquet" / "part-000000.parquet")
    assert RecordedRun(tmp_path).mismatch().height == old.height + 2
    assert bound_by_turn(RecordedRun(tmp_path))["budget"].to_list() == pytest.approx([0.1, 0.1])
    (tmp_path / "mismatch.parquet" / "part-000001.parquet").unlink()
    with pytest.raises(ValueError, match="recorded before the bound was audited"):
        bound_by_turn(RecordedRun(tmp_path))


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(ValueError, match="no audited step from step 9 on"):
        bound_by_turn(RecordedRun(tmp_path), first_step=9)
    wrong = CliRunner().invoke(app, ["audit-bound", str(tmp_path / "absent"), "--step", "1"])
    assert wrong.exit_code == 2
    assert "no run at" in wrong.output


def test_the_report_stacks_each_steps_budget_by_turn(recorded: Path) -> None:
    run = RecordedRun(recorded)
    (chart,) = [chart for chart in charts([run]) if chart["id"] == "budget-0"]
    steps = chart["data"][0]["x"]
    heights = [sum(bar["y"][i] for bar in chart["data"]) for i in range(len(steps))]
    budgets = {row["step"]: row["bound_budget"] for row in run.metrics() if row.get("bound_budget") is not None}
    assert dict(zip(steps, heights, strict=True)) == pytest.approx(budgets, abs=1e-5)
    assert [bar["name"] for bar in chart["data"]] == [f"turn {k}" for k in range(len(chart["data"]))]
