"""The policy gradient A grad lp, with an importance weight that is truncated or none at all."""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from agent_rl.objective.clips.base import Radii
from agent_rl.objective.ratio import Ratios
from agent_rl.objective.surrogates.base import Surrogate
from agent_rl.registry import PartConfig


class PolicyGradient(Surrogate):
    """S = sg[min(r, cap)] A lp, truncated importance sampling as the SAT paper writes it; A lp without a cap."""

    class Config(PartConfig):
        """Keys of `surrogate: policy_gradient`."""

        type: Literal["policy_gradient"] = "policy_gradient"
        cap: float | None = Field(None, gt=0)
        """C: the ratio weighs a token up to this, 2 to 5 in practice. Null: no weight, as if on-policy; a weight
        may then come from a gate."""

    reads_radii = False

    def __init__(self, config: Config) -> None:
        self.config = config

    @classmethod
    def weighs_by_ratio(cls, config: Config) -> bool:
        return config.cap is not None

    def objective(self, ratios: Ratios, radii: Radii) -> tuple[Tensor, Tensor]:
        plain = ratios.tokens.advantages * ratios.logprobs
        if self.config.cap is None:
            return plain, torch.zeros_like(plain, dtype=torch.bool)
        ratio = ratios.clip.detach().exp()
        return ratio.clamp(max=self.config.cap) * plain, ratio > self.config.cap
