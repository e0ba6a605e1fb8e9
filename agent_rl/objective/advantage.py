"""From rewards to advantages: group-relative, as in GRPO."""

import torch
from torch import Tensor

from agent_rl.objective.config import AdvantageConfig
from agent_rl.objective.errors import ObjectiveError

_EPSILON = 1e-6


def group_advantages(rewards: Tensor, group_ids: Tensor, config: AdvantageConfig) -> Tensor:
    """(R - mean) / (std + 1e-6) within each group (GRPO, arXiv 2402.03300), float [E] from rewards [E].

    std has ddof 1 and is at least `config.std_floor`; a group of equal rewards gets exactly 0. Computed in
    float64. Raises `ObjectiveError` (group_of_one) on a group of one, which carries no signal.
    """
    groups, sizes = torch.unique(group_ids, return_counts=True)
    if bool((sizes < 2).any()):
        lone = int(groups[sizes < 2][0])
        message = f"group {lone} has one episode, and group advantages compare episodes; set group_size to at least 2"
        raise ObjectiveError("group_of_one", message)
    advantages = torch.zeros_like(rewards, dtype=torch.float64)
    for group in groups:
        members = group_ids == group
        advantages[members] = grpo_advantage(rewards[members].double(), config.std_floor)
    return advantages.to(rewards.dtype)


def grpo_advantage(rewards: Tensor, std_floor: float = 0.0) -> Tensor:
    """The advantages of one group [G]; exactly 0 where all rewards are equal, a lone reward included."""
    if bool((rewards == rewards[0]).all()):
        return torch.zeros_like(rewards)
    return (rewards - rewards.mean()) / (rewards.std().clamp(min=std_floor) + _EPSILON)
