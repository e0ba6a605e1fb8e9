"""Groups are filtered on the outcome, not on what shaping adds."""

from dataclasses import replace

import pytest
import torch

from agent_rl.objective.advantage import group_advantages
from agent_rl.objective.config import AdvantageConfig, Estimator
from tests.trainer.test_torch_engine import engine, trajectories

# Group 0 has right and wrong answers; in group 1 all are wrong and shaping alone makes a difference.
REWARDS = torch.tensor([1.1, 0.0, 0.1, 0.0, 0.1, 0.2])
OUTCOMES = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 0.0])
GROUPS = torch.tensor([0, 0, 0, 1, 1, 1])


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "reinforce_pp_baseline"])
def test_a_group_without_spread_in_its_outcomes_has_no_advantage(estimator: Estimator) -> None:
    by_outcome = group_advantages(REWARDS, GROUPS, AdvantageConfig(estimator=estimator), OUTCOMES)
    assert by_outcome[3:].tolist() == [0.0, 0.0, 0.0]
    assert by_outcome[:3].abs().min() > 0
    by_reward = group_advantages(REWARDS, GROUPS, AdvantageConfig(estimator=estimator, filter_on="reward"), OUTCOMES)
    assert by_reward[3].item() < 0 < by_reward[5].item()


def test_within_a_group_that_is_kept_shaping_counts() -> None:
    found = group_advantages(REWARDS, GROUPS, AdvantageConfig(estimator="dr_grpo"), OUTCOMES)
    assert found[:3].tolist() == pytest.approx([0.7, -0.4, -0.3])


def test_the_trainer_reads_the_outcome_part() -> None:
    batch = trajectories(4)
    batch = [
        replace(t, reward=reward, reward_parts={"outcome": outcome})
        for t, reward, outcome in zip(batch, [1.1, 0.0, 0.0, 0.1], [1.0, 0.0, 0.0, 0.0], strict=True)
    ]
    assert engine().train(batch, 0).advantages.tolist() == pytest.approx([2**-0.5, -(2**-0.5), 0.0, 0.0], abs=1e-5)
