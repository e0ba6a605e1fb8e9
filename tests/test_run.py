"""Whole runs on a real Ray, tool server, engine and trainer: lag, learning, reproducibility, evaluation."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest

from agent_rl import registry
from agent_rl.analysis.plots import run_picture
from agent_rl.analysis.recorded import RecordedRun
from agent_rl.config import RunConfig, model_directory
from agent_rl.pipeline.batches import BatchController
from agent_rl.pipeline.controller import Stages
from agent_rl.pipeline.run_directory import METRIC_KEYS, RunDirectory, lock, read_metrics
from agent_rl.pipeline.schedule import Schedule
from agent_rl.run import build_prompts, local_ray, newest_checkpoint, serve_initial_weights, start_stages, train
from agent_rl.tool_server import ToolServer
from tests.configs import quickstart
from tests.whole_runs import SMALL, ignore, per_turn, recorded_lags, rollout_facts

TINY = model_directory("builtin:tiny-qwen3")


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """One Ray for all runs of this file."""
    with local_ray(4):
        yield


def control(config: RunConfig, schedule: Schedule, stages: Stages, path: Path) -> RunDirectory:
    """Run all steps of `config` with given stages, from version 0."""
    serve_initial_weights(stages, None, 0, served=0)
    directory = RunDirectory(path, config)
    BatchController(config, schedule, stages, directory, ignore).run()
    directory.close()
    return directory


@pytest.fixture(scope="module")
def stages() -> Iterator[Stages]:
    config = quickstart(*SMALL)
    with ToolServer(config.sandbox) as server:
        made = start_stages(config, build_prompts(config), server, waves=False)
        yield made
        made.close()


@pytest.mark.parametrize("k", range(9))
def test_exact_lag_holds_on_the_recorded_versions(stages: Stages, tmp_path: Path, k: int) -> None:
    config = quickstart(*SMALL, f"pipeline.exact_lag={k}", f"num_steps={k + 2}")
    schedule = registry.build("pipeline", config.pipeline).plan(16, 60)
    directory = control(config, schedule, stages, tmp_path)
    assert recorded_lags(tmp_path) == [(step, min(step, k), min(step, k)) for step in range(k + 2)]
    assert directory.ledger.counts()["in_flight"] == 0
    assert directory.ledger.counts()["trained"] == 2 * (k + 2)


def test_a_broadcast_interval_cycles(stages: Stages, tmp_path: Path) -> None:
    config = quickstart(*SMALL, "pipeline.exact_lag=null", "pipeline.broadcast_interval=3", "num_steps=8")
    control(config, registry.build("pipeline", config.pipeline).plan(16, 60), stages, tmp_path)
    assert [low for _, low, _ in recorded_lags(tmp_path)] == [0, 1, 2, 3, 1, 2, 3, 1]
    assert [high for _, _, high in recorded_lags(tmp_path)] == [0, 1, 2, 3, 1, 2, 3, 1]


def test_the_pools_watch_over_a_run_as_it_does_itself(stages: Stages, monkeypatch: pytest.MonkeyPatch) -> None:
    """While weights are pushed, the tool server and the watchdog are asked, which is set after the pools are made."""
    checked: list[str] = []
    monkeypatch.setattr(stages.tool_server, "check", lambda: checked.append("tool server"))
    monkeypatch.setattr(stages, "watchdog", SimpleNamespace(check=lambda: checked.append("watchdog")))
    for pool in stages.pools:
        pool.check()
    assert checked == ["tool server", "watchdog"]


def test_a_run_directory_is_one_process_s(tmp_path: Path) -> None:
    with lock(tmp_path), pytest.raises(ValueError, match="in use by another process"):
        train(quickstart(*SMALL), tmp_path, False, ignore)


def test_what_cannot_start_leaves_no_directory(tmp_path: Path) -> None:
    for url in ("http://127.0.0.1:9", "http://localhost:abc"):
        config = quickstart(*SMALL, f"sandbox.url={url}")
        with pytest.raises(ValueError, match=f"no tool server answers at {url}"):
            train(config, tmp_path / "run", False, ignore)
        assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="there is no run at"):
        newest_checkpoint(tmp_path / "run")


def test_a_short_run_learns_and_records_what_it_did(tmp_path: Path) -> None:
    config = quickstart("num_steps=10", "eval.num_prompts=64", "eval.every=10")
    rows: list[dict[str, Any]] = []
    train(config, tmp_path, False, rows.append)
    assert [row["step"] for row in read_metrics(tmp_path)] == list(range(11))
    assert all(set(METRIC_KEYS) <= row.keys() for row in read_metrics(tmp_path))
    assert all(row["publish_s"] > 0 and row["update_weights_s"] > 0 for row in rows[:-1])
    assert rows[-1]["eval_avg"] > rows[0]["eval_avg"] + 0.15
    assert rows[0]["mismatch_mean_abs"] < 1e-5 < rows[5]["mismatch_mean_abs"]
    table = per_turn(tmp_path)
    assert table["turn"].to_list()[0] == "0"
    assert table["turn"].to_list()[-1] == "all"
    sampled = rollout_facts(tmp_path)["num_sampled"].sum()
    assert table.filter(pl.col("turn") == "all")["n"].item() == sampled
    run_picture(RecordedRun(tmp_path), tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def test_sat_fires_at_top_p_below_1_and_the_mismatch_splits(tmp_path: Path) -> None:
    """Tokens that were the only one kept have d = 0 by construction; counting them would set q to 0."""
    sat = ("objective.clip.tokens=supported", "rollout.sampling.top_p=0.9")
    config = quickstart("num_steps=3", "eval.every=0", "trainer.proximal.every=1", *sat)
    rows: list[dict[str, Any]] = []
    train(config, tmp_path, False, rows.append)
    for row in rows[1:]:
        assert row["gate_rate"] > 0.01
        assert row["q_supported"] > row["q_all"]
        assert row["q_zero"] == 0
    table = per_turn(tmp_path, first_step=1).filter(pl.col("turn") == "all")
    assert table["implementation"].item() < 1e-5 < table["policy_lag"].item()
    assert 1 <= table["kept_size"].item() < 20
