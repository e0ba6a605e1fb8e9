"""DRPO: SPO's penalty, weighted by the probability that the token was sampled with."""

from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from agent_rl.objective.clips.base import Radii
from agent_rl.objective.ratio import Ratios
from agent_rl.objective.surrogates.base import Surrogate
from agent_rl.registry import PartConfig

if TYPE_CHECKING:
    from agent_rl.objective.config import ObjectiveConfig


class DRPO(Surrogate):
    """S = r A - |A| mu (r - 1)^2 / (2 delta), mu the behaviour probability of the token.

    mu (r - 1)^2 is the token's share of a chi-square divergence, so rare tokens may move further than under SPO.
    The rule is as the SAT paper (arXiv 2607.18722) states it.
    """

    class Config(PartConfig):
        """Keys of `surrogate: drpo`."""

        type: Literal["drpo"] = "drpo"
        delta: float = Field(0.15, gt=0)
        """How far probability may move: the penalty is divided by twice this."""

    reads_radii = False

    def __init__(self, config: Config) -> None:
        self.config = config

    @classmethod
    def conflict(cls, config: Any, objective: "ObjectiveConfig") -> str | None:
        if objective.ratio.level != "token":
            return "surrogate drpo weighs a ratio by its token's own probability; set objective.ratio.level to token"
        return super().conflict(config, objective)

    def objective(self, ratios: Ratios, radii: Radii) -> tuple[Tensor, Tensor]:
        ratio, tokens = ratios.clip.exp(), ratios.tokens
        divergence = tokens.behavior_logprobs.exp() * (ratio - 1) ** 2 / (2 * self.config.delta)
        return ratio * tokens.advantages - tokens.advantages.abs() * divergence, torch.zeros_like(
            ratio, dtype=torch.bool
        )
