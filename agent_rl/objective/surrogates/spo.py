"""SPO: a quadratic penalty on the ratio instead of a clip."""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from agent_rl.objective.clips.base import Radii
from agent_rl.objective.ratio import Ratios
from agent_rl.objective.surrogates.base import Surrogate
from agent_rl.registry import PartConfig


class SPO(Surrogate):
    """S = r A - |A| (r - 1)^2 / (2 eps) (Simple Policy Optimization, arXiv 2401.16025).

    The optimum of a token is at r = 1 +- eps, and beyond it the gradient points back.
    """

    class Config(PartConfig):
        """Keys of `surrogate: spo`."""

        type: Literal["spo"] = "spo"
        eps: float = Field(0.2, gt=0)
        """How far from 1 the ratio is drawn."""

    reads_radii = False

    def __init__(self, config: Config) -> None:
        self.config = config

    def objective(self, ratios: Ratios, radii: Radii) -> tuple[Tensor, Tensor]:
        ratio, advantages = ratios.clip.exp(), ratios.tokens.advantages
        penalty = advantages.abs() * (ratio - 1) ** 2 / (2 * self.config.eps)
        return ratio * advantages - penalty, torch.zeros_like(ratio, dtype=torch.bool)
