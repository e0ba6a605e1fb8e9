"""PPO's clip: one radius below and one above for every token."""

from typing import Literal

from pydantic import Field
from torch import Tensor

from agent_rl.objective.clips.base import Clip, Radii
from agent_rl.objective.token_batch import ActiveTokens
from agent_rl.registry import PartConfig


class PPO(Clip):
    """1 - eps_low <= ratio <= 1 + eps_high (PPO, arXiv 1707.06347, eq. 7)."""

    class Config(PartConfig):
        """Keys of `clip: ppo`."""

        type: Literal["ppo"] = "ppo"
        eps_low: float = Field(0.2, gt=0, le=1)
        """How far below 1 the ratio may pull when the advantage is negative."""
        eps_high: float = Field(0.2, gt=0)
        """How far above 1 the ratio may push when the advantage is positive."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def radii(self, log_ratio: Tensor, tokens: ActiveTokens, reference: None) -> Radii:
        return Radii.fixed(log_ratio, self.config.eps_low, self.config.eps_high)
