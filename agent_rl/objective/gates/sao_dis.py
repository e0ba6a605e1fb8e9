"""SAO-DIS: importance weights strictly inside a band, nothing outside it."""

from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from agent_rl.objective.gates.base import Gate, weighs_by_ratio
from agent_rl.objective.ratio import Ratios
from agent_rl.registry import PartConfig

if TYPE_CHECKING:
    from agent_rl.objective.config import ObjectiveConfig


class SaoDis(Gate):
    """Weight sg(r) where 1 - eps_low < r < 1 + eps_high, else 0, on the plain policy gradient A lp.

    r is the ratio at the configured level and denominator. The rule is as the SAT paper (arXiv 2607.18722) states it.
    """

    class Config(PartConfig):
        """Keys of gate `sao_dis`; the defaults are the ones for tool use."""

        type: Literal["sao_dis"] = "sao_dis"
        eps_low: float = Field(0.3, gt=0)
        """How far below 1 the ratio may be."""
        eps_high: float = Field(5.0, gt=0)
        """How far above 1 the ratio may be."""

    corrects = True

    def __init__(self, config: Config) -> None:
        self.config = config

    @classmethod
    def conflict(cls, config: Any, objective: "ObjectiveConfig") -> str | None:
        if weighs_by_ratio(objective):
            return (
                "gate sao_dis is itself the ratio that weighs a token; "
                "set objective.surrogate to policy_gradient without a cap"
            )
        return super().conflict(config, objective)

    def weight(self, ratios: Ratios) -> Tensor:
        ratio = ratios.clip.exp()
        inside = (ratio > 1 - self.config.eps_low) & (ratio < 1 + self.config.eps_high)
        return torch.where(inside, ratio, torch.zeros_like(ratio))
