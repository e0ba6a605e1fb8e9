"""Evaluation on workers of its own, on a real Ray, engine, tool server and trainer: training does not wait for it."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import ray
import torch
from safetensors.torch import load_file

from agent_rl.analysis.metric_lines import evaluations
from agent_rl.config import RunConfig
from agent_rl.pipeline.batches import BatchController
from agent_rl.pipeline.run_directory import RunDirectory, read_metrics
from agent_rl.pipeline.schedule import Schedule
from agent_rl.pipeline.state import RunState
from agent_rl.run import build_prompts, local_ray, newest_checkpoint, serve_initial_weights, start_stages, train
from agent_rl.tool_server import ToolServer
from tests.configs import quickstart

SMALL = (
    "batch.num_prompts=2",
    "batch.group_size=2",
    "checkpoint.every=0",
    "eval.num_prompts=12",
    "prompts.max_steps=1",
)
ONE_AT_A_TIME = "rollout.max_concurrent_episodes=1"  # no batch of sequences: the engine's bits do not depend on time


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with local_ray(4):
        yield


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """No evaluation ends while this file is not there."""
    return tmp_path / "gate"


def config_of(gate: Path, *overrides: str) -> RunConfig:
    reward = f"reward={{type: tests.parts.GatedMath, gate: {gate}}}"
    return quickstart(*SMALL, ONE_AT_A_TIME, reward, *overrides)


def opens(gate: Path, at_step: int) -> Callable[[dict[str, Any]], None]:
    def on_row(row: dict[str, Any]) -> None:
        if row["step"] == at_step:
            gate.touch()

    return on_row


def evaluated(path: Path) -> pl.DataFrame:
    rows = pl.read_parquet(path / "evaluations.parquet" / "*.parquet")
    assert rows["failure"].null_count() == rows.height
    return rows.sort("policy_version", "problem").select("policy_version", "problem", "final_text", "num_sampled")


def counts(path: Path) -> list[tuple[int, int]]:
    """(policy version, episodes) of each evaluation on disk."""
    return evaluated(path).group_by("policy_version").len().sort("policy_version").rows()


def test_training_goes_on_through_it_and_ends_with_the_same_bits(gate: Path, tmp_path: Path) -> None:
    base = ("pipeline.exact_lag=1", "num_steps=5", "eval.every=3")
    waiting, beside = tmp_path / "waiting", tmp_path / "beside"
    train(config_of(gate, *base, "eval.workers=1"), beside, False, opens(gate, 1))
    train(config_of(gate, *base), waiting, False, lambda row: None)
    weights = [load_file(newest_checkpoint(path) / "model.safetensors") for path in (waiting, beside)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert evaluated(beside).equals(evaluated(waiting)), "what is evaluated is the version that it is said to be"
    assert counts(beside) == [(0, 12), (3, 12), (5, 12)]
    rows = read_metrics(beside)
    found = [row for row in rows if row["eval_avg"] is not None]
    assert found[0]["step"] >= 2, "steps 0 and 1 ended while version 0 was being evaluated"
    assert [(row["eval_step"], row["eval_policy_version"]) for row in found] == [(0, 0), (3, 3), (5, 5)]
    assert evaluations(rows) == evaluations(read_metrics(waiting)), "scores stand at the steps that they are of"
    assert [row["step"] for row in rows if row["wall_s"] is not None] == list(range(5))


@pytest.mark.parametrize("pipeline", ["fully_async", "sync"])
def test_one_that_was_under_way_is_run_again_on_resuming(gate: Path, tmp_path: Path, pipeline: str) -> None:
    config = config_of(gate, f"pipeline.type={pipeline}", "num_steps=4", "eval.every=3", "eval.workers=1")
    assert train(config, tmp_path / "run", False, lambda row: signal.raise_signal(signal.SIGINT)).step == 1
    checkpoint = newest_checkpoint(tmp_path / "run")
    assert RunState.load(checkpoint).evaluating == 0
    assert not (tmp_path / "run" / "evaluations.parquet").exists()
    without = config.model_copy(update={"eval": config.eval.model_copy(update={"workers": 0})})
    with pytest.raises(ValueError, match="was evaluating version 0 beside training"):
        train(without, tmp_path / "run", True, lambda row: None)
    assert train(config, tmp_path / "run", True, opens(gate, 1)).complete
    assert counts(tmp_path / "run") == [(0, 12), (3, 12), (4, 12)]
    rows = read_metrics(tmp_path / "run")
    assert [row["eval_policy_version"] for row in rows if row["eval_avg"] is not None] == [0, 3, 4]
    assert [row["step"] for row in rows if row["wall_s"] is not None] == list(range(4))


def test_its_worker_may_die_and_finds_the_version_again(gate: Path, tmp_path: Path) -> None:
    config = config_of(gate, "num_steps=3", "eval.every=3", "eval.workers=1")
    with ToolServer(config.sandbox) as server:
        stages = start_stages(config, build_prompts(config), server, waves=False)
        assert stages.eval_workers is not None
        handles, first = stages.eval_workers.handles, stages.channel.weights(0).path

        def kill_then_open(row: dict[str, Any]) -> None:
            if row["step"] == 1:
                assert first.exists()
                ray.kill(handles[0])
                gate.touch()

        serve_initial_weights(stages, None, 0, served=0)
        directory = RunDirectory(tmp_path / "run", config)
        BatchController(config, Schedule(1, 1), stages, directory, kill_then_open).run()
        assert stages.eval_workers.num_restarts == 1
        assert not first.exists()
        stages.close()
    assert counts(tmp_path / "run") == [(0, 12), (3, 12)]
