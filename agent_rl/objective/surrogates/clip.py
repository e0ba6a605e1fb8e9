"""The clipped surrogate of PPO: min(r A, clip(r) A)."""

from typing import Literal

import torch
from torch import Tensor

from agent_rl.objective.clips.base import Radii
from agent_rl.objective.ratio import Ratios
from agent_rl.objective.surrogates.base import Surrogate
from agent_rl.registry import PartConfig


class ClippedRatio(Surrogate):
    """S = min(r A, clip(r, 1 - eps_low, 1 + eps_high) A) (PPO, arXiv 1707.06347, eq. 7)."""

    class Config(PartConfig):
        """`surrogate: clip` has no keys: the radii are `objective.clip`."""

        type: Literal["clip"] = "clip"

    keeps_equivalent_radius = True

    def __init__(self, config: Config) -> None:
        self.config = config

    def objective(self, ratios: Ratios, radii: Radii) -> tuple[Tensor, Tensor]:
        return clipped_objective(ratios.clip, ratios.tokens.advantages, radii)


def clipped_objective(log_ratio: Tensor, advantages: Tensor, radii: Radii) -> tuple[Tensor, Tensor]:
    """min(r A, clip(r) A) [A], and where the clip binds, bool [A].

    Written as a choice: a bound that binds is a constant, so e^d of a clipped token cannot overflow its gradient.
    """
    high, low = 1 + radii.high, 1 - radii.low
    ratio = log_ratio.detach().exp()
    over, under = (advantages > 0) & (ratio > high), (advantages < 0) & (ratio < low)
    clipped = over | under
    free = torch.where(clipped, torch.zeros_like(log_ratio), log_ratio).exp()
    return torch.where(over, high, torch.where(under, low, free)) * advantages, clipped
