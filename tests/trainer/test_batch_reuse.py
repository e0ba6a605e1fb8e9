"""A batch used for several updates: the same as those updates one by one, each at its own lag."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agent_rl.config import model_directory
from agent_rl.objective.config import ObjectiveConfig
from agent_rl.objective.methods import method
from agent_rl.records import Trajectory
from agent_rl.settings import check
from agent_rl.trainer.batch_reuse import Update, batch_metrics, minibatches
from agent_rl.trainer.engines.torch import TorchEngine
from tests.configs import quickstart
from tests.trajectories import random_trajectory

MODEL = str(model_directory("builtin:tiny-qwen3"))


def engine(objective: ObjectiveConfig | None = None, **keys: Any) -> TorchEngine:
    return TorchEngine(TorchEngine.Config(learning_rate=1e-3, **keys), MODEL, objective or ObjectiveConfig())


def episodes(version: int = 0) -> list[Trajectory]:
    rng = np.random.default_rng(0)
    return [random_trajectory(rng, i, turns=1 + i % 3, version=version) for i in range(12)]


@given(groups=st.lists(st.integers(0, 9), min_size=1, max_size=40), parts=st.integers(1, 6), epochs=st.integers(1, 3))
def test_minibatches_are_whole_groups_once_an_epoch(groups: list[int], parts: int, epochs: int) -> None:
    found = minibatches(groups, parts, epochs)
    assert len(found) == parts * epochs
    assert found == found[:parts] * epochs
    assert sorted(index for part in found[:parts] for index in part) == list(range(len(groups)))
    owners = [{groups[index] for index in part} for part in found[:parts]]
    assert sum(map(len, owners)) == len(set(groups))
    sizes = [len(owner) for owner in owners]
    assert max(sizes) - min(sizes) <= 1
    assert found[0] == sorted(found[0])


def test_several_updates_are_the_single_ones_in_a_row() -> None:
    batch = episodes()
    reused, single = engine(num_minibatches=2, num_epochs=2), engine()
    result = reused.train(batch, 4)
    parts = [batch[:6], batch[6:]]
    steps = [single.train(part, 4 + h) for h, part in enumerate(parts * 2)]
    for a, b in zip(reused.model.parameters(), single.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert result.metrics["num_updates"] == 4
    assert result.metrics["num_microbatches"] == 4
    assert result.metrics["loss"] == pytest.approx(np.mean([s.metrics["loss"] for s in steps]))
    assert result.metrics["min_factor"] == min(s.metrics["min_factor"] for s in steps)
    for own, want in zip(result.logprobs, steps[0].logprobs + steps[1].logprobs, strict=True):
        np.testing.assert_array_equal(own, want)
    assert result.trained_at == [[4, 6]] * 6 + [[5, 7]] * 6


def test_the_lag_of_every_update_is_recorded_and_grows_inside_the_batch() -> None:
    result = engine(num_minibatches=2, num_epochs=2).train(episodes(version=3), 4)
    lags = {(row["update"], row["lag"]) for row in result.mismatch if row["scope"] == "lag"}
    assert lags == {(0, 1), (1, 2), (2, 3), (3, 4)}
    sampled = sum(int(t.loss_mask.sum()) for t in episodes())
    assert sum(row["n"] for row in result.mismatch if row["scope"] == "all") == 2 * sampled


def test_the_mismatch_grows_as_the_policy_moves_away_from_its_rollouts() -> None:
    trainer = engine(num_epochs=3)
    batch = episodes()
    on_policy = [replace(t, behavior_logprobs=lp) for t, lp in zip(batch, trainer.logprobs(batch), strict=True)]
    rows = [row for row in trainer.train(on_policy, 0).mismatch if row["scope"] == "all"]
    distances = [row["mean_abs_d"] for row in rows]
    assert distances[0] < 1e-6 < distances[1] < distances[2]


def test_proximal_and_reference_logprobs_are_those_of_the_batch() -> None:
    """Both are fixed while a batch is reused: at the version that sampled it, and at the initial policy."""
    objective = check(ObjectiveConfig, method("icepop").model_dump() | {"kl": {"coefficient": 0.01}})
    trainer = engine(objective, num_epochs=3)
    before = trainer.logprobs(episodes())
    result = trainer.train(episodes(), 0)
    assert result.proximal_logprobs is not None
    assert result.ref_logprobs is not None
    for found in (result.proximal_logprobs, result.ref_logprobs):
        for own, want in zip(found, before, strict=True):
            np.testing.assert_allclose(own, want, atol=1e-6)
    lag = [row for row in result.mismatch if (row["part"], row["scope"]) == ("policy_lag", "all")]
    assert [row["update"] for row in lag] == [0, 1, 2]
    assert lag[0]["mean_abs_d"] < 1e-6 < min(lag[1]["mean_abs_d"], lag[2]["mean_abs_d"])


def test_a_batch_that_lost_groups_still_counts_its_versions() -> None:
    result = engine(num_minibatches=3).train(episodes()[:4], 9)  # two groups for three updates
    assert result.metrics["num_updates"] == 3
    assert result.metrics["skipped_empty"] == 1
    assert result.trained_at == [[9], [9], [10], [10]]


def test_a_figure_that_one_update_lacks_is_the_mean_of_the_others() -> None:
    figures = [{"cosine": math.nan, "loss": 1.0}, {"cosine": 0.5, "loss": math.inf}, {"cosine": 0.7, "none": math.nan}]
    found = batch_metrics([Update([], k, [], [], row, []) for k, row in enumerate(figures)])
    assert found["cosine"] == pytest.approx(0.6)
    assert found["loss"] == math.inf
    assert math.isnan(found["none"])


def test_more_minibatches_than_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="num_minibatches is 5, but a batch has the groups of 4 prompts"):
        quickstart("batch.num_prompts=4", "trainer.num_minibatches=5")
    assert quickstart("trainer.num_minibatches=2", "trainer.num_epochs=3").updates_per_batch == 6
