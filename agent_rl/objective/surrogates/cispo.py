"""CISPO: the importance weight is clipped, the gradient is not."""

from typing import Literal

from torch import Tensor

from agent_rl.objective.clips.base import Radii
from agent_rl.objective.ratio import Ratios
from agent_rl.objective.surrogates.base import Surrogate
from agent_rl.registry import PartConfig


class CISPO(Surrogate):
    """S = sg[clip(r, 1 - eps_low, 1 + eps_high)] A lp (MiniMax-M1, arXiv 2506.13585, eqs. 4-5).

    Every token keeps a gradient; the clip bounds its weight, on both sides whatever the sign of A.
    """

    class Config(PartConfig):
        """`surrogate: cispo` has no keys: the radii are `objective.clip`; eps_low 1 leaves the low side open."""

        type: Literal["cispo"] = "cispo"

    def __init__(self, config: Config) -> None:
        self.config = config

    def objective(self, ratios: Ratios, radii: Radii) -> tuple[Tensor, Tensor]:
        ratio, low, high = ratios.clip.detach().exp(), 1 - radii.low, 1 + radii.high
        weight = ratio.clamp(min=low, max=high)
        return weight * ratios.tokens.advantages * ratios.logprobs, (ratio < low) | (ratio > high)
