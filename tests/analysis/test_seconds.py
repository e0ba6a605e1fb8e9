"""Where the seconds of a step went: they sum to its wall time, on worked figures and on a real run."""

from pathlib import Path

import pytest

from agent_rl.analysis import tables
from agent_rl.analysis.recorded import open_runs
from agent_rl.pipeline.figures import seconds_figures
from agent_rl.rollout.activity import STATES


def test_the_trainer_waits_only_while_it_has_nothing_to_do() -> None:
    apart = {"train_s": 2.0, "publish_s": 0.5, "wait_s": 3.0}
    found = seconds_figures(apart, 6.0, [{"generate": 4.0, "idle": 2.0}, None])
    assert found["seconds/trainer/queue"] == 3.0
    assert found["seconds/trainer/idle"] == 0.5
    assert found["seconds/worker_0/generate"] == 4.0
    assert not any("worker_1" in key for key in found)
    overlapped = seconds_figures(apart, 4.0, [])
    assert (overlapped["seconds/trainer/queue"], overlapped["seconds/trainer/idle"]) == (1.5, 0.0)


def test_a_real_run_accounts_for_every_second(recorded: Path) -> None:
    run = open_runs([recorded])[0]
    steps = [row for row in run.metrics() if row.get("wall_s") is not None]
    for row in steps:
        for who in ("worker_0", "trainer"):
            seconds = [value for key, value in row.items() if key.startswith(f"seconds/{who}/")]
            assert sum(seconds) == pytest.approx(row["wall_s"], abs=1e-3)
            assert min(seconds) >= -1e-9
        assert row["seconds/trainer/train"] == row["train_s"]
    assert {key for key in steps[0] if key.startswith("seconds/worker_0/")} == {f"seconds/worker_0/{s}" for s in STATES}
    assert steps[0]["seconds/worker_0/generate"] > 0
    table = tables.tables([run], ["seconds"])["seconds"]
    assert table["who"].to_list() == ["worker_0", "trainer"]
    mean_wall = sum(row["wall_s"] for row in steps) / len(steps)
    assert table["step"].to_list() == pytest.approx([mean_wall, mean_wall], abs=1e-3)
