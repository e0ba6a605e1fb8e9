"""Computes advantages from rewards."""

import torch
from torch import Tensor

from agent_rl.objective.config import AdvantageConfig
from agent_rl.objective.errors import ObjectiveError

_EPSILON = 1e-6


def group_advantages(
    rewards: Tensor, group_ids: Tensor, config: AdvantageConfig, outcomes: Tensor | None = None
) -> Tensor:
    """The advantage of each episode of a batch, float [E], from rewards [E], their groups int [E] and outcomes [E].

    grpo: GRPO, arXiv 2402.03300. dr_grpo: arXiv 2503.20783. rloo: arXiv 2402.14740, eq. 6. reinforce_pp and its
    baseline form: REINFORCE++, arXiv 2501.03262, over episodes, with the outcome as the only reward. Computed in
    float64. Raises `ObjectiveError` (group_of_one) on a group of one, which carries no signal, unless the
    estimator does not look at groups. Without `outcomes`, as without shaping, the rewards are the outcomes.
    """
    whole = rewards.double()
    if config.estimator == "reinforce_pp":
        return standardised(whole, config.std_floor).to(rewards.dtype)
    advantages = torch.zeros_like(whole)
    compared = rewards if outcomes is None or config.filter_on == "reward" else outcomes
    for members in _groups(group_ids):
        if not _equal(compared[members]):
            advantages[members] = _within_group(whole[members], config)
    if config.estimator == "reinforce_pp_baseline" and bool(advantages.any()):
        advantages = advantages / (advantages.std().clamp(min=config.std_floor) + _EPSILON)
    return advantages.to(rewards.dtype)


def _groups(group_ids: Tensor) -> list[Tensor]:
    """Membership of each group, bool [E]."""
    groups, sizes = torch.unique(group_ids, return_counts=True)
    if bool((sizes < 2).any()):
        lone = int(groups[sizes < 2][0])
        message = f"group {lone} has one episode, and group advantages compare episodes; set group_size to at least 2"
        raise ObjectiveError("group_of_one", message)
    return [group_ids == group for group in groups]


def _within_group(rewards: Tensor, config: AdvantageConfig) -> Tensor:
    if config.estimator == "grpo":
        return standardised(rewards, config.std_floor)
    scale = len(rewards) / (len(rewards) - 1) if config.estimator == "rloo" else 1.0
    return centred(rewards) * scale


def standardised(rewards: Tensor, std_floor: float = 0.0) -> Tensor:
    """(R - mean) / (std + 1e-6) of rewards [G], std with ddof 1 and at least `std_floor`; 0 where all are equal."""
    if _equal(rewards):
        return torch.zeros_like(rewards)
    return centred(rewards) / (rewards.std().clamp(min=std_floor) + _EPSILON)


def centred(rewards: Tensor) -> Tensor:
    """R - mean of rewards [G]; exactly 0 where all are equal, which the rounding of a mean would spoil."""
    return torch.zeros_like(rewards) if _equal(rewards) else rewards - rewards.mean()


def _equal(rewards: Tensor) -> bool:
    return bool((rewards == rewards[:1]).all())
