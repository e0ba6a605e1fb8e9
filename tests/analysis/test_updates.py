"""Runs with several updates a step: every curve and cell has one point a step, the mean weighted by tokens."""

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from matplotlib.figure import Figure

from agent_rl import facts
from agent_rl.analysis import plots, report
from agent_rl.analysis.clip_states import _agrees
from agent_rl.analysis.recorded import RecordedRun, open_runs
from agent_rl.analysis.tables import mean_by_step
from agent_rl.analysis.views import view
from agent_rl.config import dump
from tests.configs import quickstart

TOKENS = (300, 100)
"""Of the two updates of a step; the values of the first are 1, those of the second 5: a mean of 2."""


def rows_of(step: int, update: int) -> list[dict[str, Any]]:
    value = (1.0, 5.0)[update] * (step + 1)
    own = {"step": step, "update": update, "n": TOKENS[update], "lag": -1, "num_turns": -1}
    figures = dict.fromkeys(("mean_abs_d", "k1", "k3", "ess", "kept_size", "gate_rate", "clip_fraction"), value)
    places = [("total", "all", -1), ("total", "first", -1), ("total", "later", -1), ("policy_lag", "all", -1)]
    places += [("total", "turn", 0), ("total", "turn", 1)]
    return [{**own, **figures, "part": part, "scope": scope, "turn": turn} for part, scope, turn in places]


@pytest.fixture
def updates(tmp_path: Path) -> Path:
    """A run of two steps with two updates each."""
    run = tmp_path / "updates"
    run.mkdir()
    (run / "config.yaml").write_text(dump(quickstart("trainer.num_minibatches=2")))
    for step in range(2):
        rows = [row for update in range(2) for row in rows_of(step, update)]
        facts.write_part(run / "mismatch.parquet", step, rows, facts.MISMATCH)
    return run


def test_the_report_has_a_point_a_step(updates: Path, tmp_path: Path) -> None:
    report.write_report(open_runs([updates]), tmp_path / "report.html")
    charts = {chart["id"]: chart for chart in view(open_runs([updates]))["charts"]}
    curves = [curve for name in ("mismatch", "k3", "ess", "kept_size") for curve in charts[name]["data"]]
    assert len(curves) == 2 + 3 * 3
    assert all((curve["x"], curve["y"]) == ([0, 1], [2, 4]) for curve in curves)
    (cells,) = charts["turns-0"]["data"]
    assert (cells["x"], cells["y"]) == ([0, 1], [0, 1])
    assert cells["z"] == [pytest.approx([np.log10(2), np.log10(4)], abs=1e-3)] * 2
    assert cells["text"][1][0] == "mean |d| 2 nats<br>400 tokens"


def test_the_picture_has_a_point_a_step(updates: Path) -> None:
    axis = Figure().subplots()
    plots._mismatch(axis, RecordedRun(updates))
    assert [line.get_xydata().tolist() for line in axis.get_lines()] == [[[0, 2], [1, 4]]] * 2


def test_an_update_without_a_value_is_left_out() -> None:
    values = {"step": [0, 0, 0, 1], "n": [1, 3, 4, 5], "k3": [1.0, 5.0, float("nan"), None]}
    assert mean_by_step(pl.DataFrame(values), "k3").rows() == [(0, 4.0, 4)]


def test_clip_states_are_given_of_a_single_update_only(updates: Path) -> None:
    ones = np.ones(4)
    assert not _agrees(RecordedRun(updates), 0, ones, ones)
    facts.write_part(updates / "mismatch.parquet", 0, rows_of(0, 0), facts.MISMATCH)
    assert _agrees(RecordedRun(updates), 0, ones, ones)
