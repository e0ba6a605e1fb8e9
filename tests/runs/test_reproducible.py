"""The same seed gives the same bits, stopped or not; and an evaluation is that of a named version."""

from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from agent_rl.cli import app
from agent_rl.config import model_directory
from agent_rl.pipeline.run_directory import read_metrics
from agent_rl.run import local_ray, newest_checkpoint, train
from tests.configs import quickstart
from tests.whole_runs import SMALL, ignore, recorded_lags, rollout_facts

TINY = model_directory("builtin:tiny-qwen3")


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """One Ray for all runs of this file."""
    with local_ray(4):
        yield


def final_weights(path: Path) -> dict[str, torch.Tensor]:
    return load_file(newest_checkpoint(path) / "model.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_sync_is_reproducible_and_resuming_changes_nothing(tmp_path: Path) -> None:
    overrides = ("pipeline.type=sync", "batch.num_prompts=4", "batch.group_size=4", "eval.every=0", "num_steps=3")
    waves = "rollout.max_concurrent_episodes=6"  # sixteen episodes: two full waves and a smaller one
    config = quickstart(*overrides, waves, "checkpoint.every=1", "checkpoint.keep=3")
    first, again, stopped = tmp_path / "first", tmp_path / "again", tmp_path / "stopped"
    for path in (first, again):
        assert train(config, path, False, ignore).complete
    facts = [rollout_facts(path).sort("episode_id").drop("turns") for path in (first, again)]
    assert facts[0].equals(facts[1])
    assert facts[0]["reward"].sum() > 0
    assert same(final_weights(first), final_weights(again))
    train(config.model_copy(update={"num_steps": 1}), stopped, False, ignore)
    train(config, stopped, True, ignore)
    assert same(final_weights(first), final_weights(stopped))
    assert rollout_facts(stopped).sort("episode_id").drop("turns").equals(facts[0])


def test_evaluation_beside_training_is_of_a_named_version_and_compares(tmp_path: Path) -> None:
    run = tmp_path / "run"
    held_out = ("eval.every=1", "eval.num_prompts=6", "eval.num_samples=2", "eval.sampling.temperature=0.5")
    config = quickstart(*SMALL, *held_out, "pipeline.exact_lag=1", "num_steps=2")
    train(config, run, False, ignore)
    assert recorded_lags(run) == [(0, 0, 0), (1, 1, 1)]
    rows = pl.read_parquet(run / "evaluations.parquet" / "*.parquet")
    assert rows.group_by("policy_version").len().sort("policy_version").rows() == [(0, 12), (1, 12), (2, 12)]
    assert [row["eval_policy_version"] for row in read_metrics(run)] == [0, 1, 2]
    again = CliRunner().invoke(app, ["eval", str(run)])
    assert again.exit_code == 0, again.output
    last = rows.filter(pl.col("policy_version") == 2)
    found = pl.read_parquet(run / "evaluations" / "step-000002" / "results.parquet")
    assert found["outcome"].to_list() == last["outcome"].to_list(), "the same weights, seeds and sampler"
    model = ["eval", str(TINY), "--config", str(run / "config.yaml"), "--output", str(tmp_path / "first")]
    assert CliRunner().invoke(app, model).exit_code == 0
    compared = CliRunner().invoke(app, ["compare", str(tmp_path / "first"), str(run / "evaluations" / "step-000002")])
    assert compared.exit_code == 0, compared.output
    assert "pass@2" in compared.output
