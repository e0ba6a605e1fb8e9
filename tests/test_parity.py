"""The parity measure names the mistake that an engine makes."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from agent_rl.config import model_directory
from agent_rl.objective.config import ObjectiveConfig
from agent_rl.parity import measure
from agent_rl.records import FloatArray, Trajectory
from agent_rl.trainer.engines.torch import TorchEngine
from tests.trajectories import random_trajectory


@pytest.fixture(scope="module")
def trainer() -> TorchEngine:
    return TorchEngine(TorchEngine.Config(), str(model_directory("builtin:tiny-qwen3")), ObjectiveConfig())


def as_if_sampled(trajectories: Sequence[Trajectory], logprobs: list[FloatArray]) -> list[Trajectory]:
    return [replace(t, behavior_logprobs=v) for t, v in zip(trajectories, logprobs, strict=True)]


def batch(top_p: float = 1.0) -> list[Trajectory]:
    rng = np.random.default_rng(0)
    return [random_trajectory(rng, i, turns=3, top_p=top_p) for i in range(6)]


def test_an_engine_that_is_right_is_found_right_in_every_turn(trainer: TorchEngine) -> None:
    right = as_if_sampled(batch(0.9), trainer.logprobs(batch(0.9)))
    found = measure(right, trainer.logprobs)
    assert [row["turn"] for row in found.rows] == [None, 0, 1, 2]
    assert found.rows[0]["n"] == sum(row["n"] for row in found.rows[1:]) == sum(int(t.loss_mask.sum()) for t in right)
    assert found.max < 1e-6
    assert found.better_fit is None
    assert min(found.alternatives.values()) > 1e-2


@pytest.mark.parametrize("mistake", ["without temperature", "over the whole vocabulary", "shifted by +1"])
def test_the_mistake_of_an_engine_is_named(trainer: TorchEngine, mistake: str) -> None:
    given = batch(0.9)
    values = trainer.logprobs(given)
    if mistake == "without temperature":
        wrong = [replace(t, sampling_params=replace(t.sampling_params, temperature=1.0)) for t in given]
        values = trainer.logprobs(wrong)
    elif mistake == "over the whole vocabulary":
        values = trainer.logprobs(batch(1.0))
    else:
        for v in values:
            v[np.isfinite(v)] = np.roll(v[np.isfinite(v)], 1)
    found = measure(as_if_sampled(given, values), trainer.logprobs)
    assert found.better_fit == mistake


def test_nothing_sampled_is_said(trainer: TorchEngine) -> None:
    with pytest.raises(ValueError, match="no token was sampled"):
        measure([random_trajectory(np.random.default_rng(0), 0, turns=0)], trainer.logprobs)
