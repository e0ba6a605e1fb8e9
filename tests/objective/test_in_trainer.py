"""The torch trainer hands the objective its step number and keeps its state in checkpoints."""

import json

import numpy as np
import pytest

from agent_rl.config import model_directory
from agent_rl.objective.config import ObjectiveConfig
from agent_rl.settings import check
from agent_rl.trainer.engines.torch import TorchEngine
from tests.trajectories import random_trajectory

MODEL = str(model_directory("builtin:tiny-qwen3"))


def engine(**objective):
    config = TorchEngine.Config(learning_rate=1e-3, max_tokens_per_microbatch=120)
    return TorchEngine(config, MODEL, check(ObjectiveConfig, objective))


def episodes():
    rng = np.random.default_rng(0)
    return [random_trajectory(rng, i, turns=1 + i % 3) for i in range(12)]


def test_the_previous_quantile_survives_a_checkpoint(tmp_path):
    batch, clip = episodes(), {"type": "sat", "scope": "previous_step"}
    trainer, resumed = engine(clip=clip), engine(clip=clip)
    first, second = (trainer.train(batch, step).metrics for step in range(2))
    assert (first["q"], first["q_zero"]) == (0.0, 1.0)
    assert second["q"] == pytest.approx(first["q_supported"], rel=1e-6)
    trainer.save(tmp_path)
    resumed.load(tmp_path)
    assert resumed.train(batch, 2).metrics["q"] == pytest.approx(second["q_supported"], rel=1e-6)


def test_a_schedule_is_read_at_the_policy_version(tmp_path):
    rows = [{"step": step, "eps_eff_low": 0.1 + 0.01 * step, "eps_eff_high": 0.2} for step in range(3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    trainer = engine(clip={"type": "matched", "schedule": str(tmp_path)})
    for step in (0, 2):
        assert trainer.train(episodes(), step).metrics["eps_low"] == pytest.approx(0.1 + 0.01 * step)


def test_radii_by_turn_are_logged():
    metrics = engine(clip={"type": "sat", "turns": {"mode": "min", "min_tokens": 1}}).train(episodes(), 0).metrics
    assert {f"eps_eff_low_turn_{k}" for k in range(3)} <= metrics.keys()
