"""Estimate against truth on a recorded batch: each token at the weights that it was sampled with."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from typer.testing import CliRunner

from agent_rl.bound_audit import audit_bound
from agent_rl.cli import app
from agent_rl.config import RunConfig, model_directory
from agent_rl.pipeline.figures import training_rows
from agent_rl.pipeline.run_directory import RunDirectory
from agent_rl.pipeline.state import RunState
from agent_rl.records import Episode, Prompt, Trajectory
from agent_rl.trainer.engines.torch import TorchEngine
from agent_rl.trainer.packing import pack
from agent_rl.trainer.total_variation import total_variation
from tests.configs import quickstart
from tests.trajectories import random_trajectory

MIXTURE = ("model.path=builtin:tiny-qwen3-moe", "routing_replay=true")
EXPERTS = (4, 3, 2)
"""(experts, layers, experts a token) of that model."""
PACKED_APART = ("rollout.max_episode_tokens=48", "trainer.max_tokens_per_microbatch=48")


def initial(config: RunConfig) -> TorchEngine:
    return TorchEngine(config.trainer, str(model_directory(config.model.path)), config.objective)


def make_run(
    path: Path,
    *overrides: str,
    top_p: float = 1.0,
    experts: tuple[int, int, int] | None = None,
    every_checkpoint: bool = False,
) -> tuple[list[Trajectory], TorchEngine]:
    """A run that stands at step 2; turn k of its batch was sampled at version k, with log-probs near the model's."""
    config = quickstart(*overrides)
    engine = initial(config)
    directory, prompt = RunDirectory(path, config), Prompt(0, ({"role": "user", "content": "1"},), "1")

    def save(step: int) -> None:
        engine.save(directory.checkpoint(step))
        RunState(step=step).save(directory.checkpoint(step))

    def sampled(version: int, step: int) -> list[Trajectory]:
        rng = np.random.default_rng(0)
        keys = {"top_p": top_p, "version": version, "version_step": step}
        found = [random_trajectory(rng, i, turns=1 + i % 3, experts=experts, **keys) for i in range(8)]
        return [replace(t, reward=float(t.episode_id % 2)) for t in found]

    batch = sampled(0, 1)
    for version in range(2):
        if every_checkpoint:
            save(version)
        engine.train(sampled(version, 0), version)
    directory.write_rollouts(2, [Episode(prompt, (), trajectory) for trajectory in batch])
    save(2)
    reader = initial(config)
    reader.load(directory.checkpoint(2))
    directory.write_training(2, training_rows(2, batch, reader.train(batch, 2)), [])
    directory.close()
    return batch, engine


@pytest.mark.parametrize("overrides", [(), PACKED_APART])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_each_token_at_its_own_version(tmp_path: Path, overrides: tuple[str, ...], top_p: float) -> None:
    batch, engine = make_run(tmp_path, *overrides, "trainer.proximal.every=1", top_p=top_p)
    table = audit_bound(tmp_path, 2)
    packed = pack(batch, [0.0] * len(batch))
    from_initial = total_variation(initial(quickstart(*overrides)).model, engine.model, packed)
    first = packed.active.turn_ids == 0
    row = table.row(by_predicate=pl.col("turn") == "0", named=True)
    assert row["exact"] == pytest.approx(float(from_initial[first].sum()) / 8, rel=1e-4)
    assert row["n"] == int(first.sum())
    newest = table.row(by_predicate=pl.col("turn") == "2", named=True)
    assert 0 <= newest["exact"] < 1e-5 < row["exact"]
    d = torch.from_numpy(np.concatenate([lp[t.loss_mask] for lp, t in zip(engine.logprobs(batch), batch, strict=True)]))
    z = (1 - (d - packed.active.behavior_logprobs).double().exp()).clamp(min=0)
    assert row["sampled"] == pytest.approx(float(z[first].sum()) / 8, rel=1e-4)
    assert table["exact"][:-1].sum() == pytest.approx(table["exact"][-1])
    assert table["off_support"].is_nan().all() == (top_p == 1)


def test_weights_of_a_mixture_are_read_from_the_checkpoints_of_their_steps(tmp_path: Path) -> None:
    batch, engine = make_run(tmp_path, *MIXTURE, experts=EXPERTS, every_checkpoint=True)
    assert not list(tmp_path.rglob("snapshots/*"))
    table = audit_bound(tmp_path, 2)
    packed = pack(batch, [0.0] * len(batch))
    from_initial = total_variation(initial(quickstart(*MIXTURE)).model, engine.model, packed)
    row = table.row(by_predicate=pl.col("turn") == "0", named=True)
    assert row["exact"] == pytest.approx(float(from_initial[packed.active.turn_ids == 0].sum()) / 8, rel=1e-4)
    newest = table.row(by_predicate=pl.col("turn") == "2", named=True)
    assert 0 <= newest["exact"] < 1e-5 < row["exact"]


def test_the_behaviour_is_computed_as_the_trainer_computes(tmp_path: Path) -> None:
    """In float32 it would be as far from a policy in bfloat16 as rounding is, on the same weights too."""
    make_run(tmp_path, "trainer.compute.precision=bfloat16", "trainer.proximal.every=1")
    assert audit_bound(tmp_path, 2).row(by_predicate=pl.col("turn") == "2", named=True)["exact"] < 1e-5


def test_weights_that_are_gone_are_named(tmp_path: Path) -> None:
    make_run(tmp_path)
    wrong = CliRunner().invoke(app, ["audit-bound", str(tmp_path), "--step", "2"])
    assert wrong.exit_code == 2
    assert "the weights of policy version 0 are in no snapshot and no checkpoint" in wrong.output
