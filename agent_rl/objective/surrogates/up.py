"""UP: unbounded on what was better than expected, PPO's clip on what was worse."""

from typing import Literal

import torch
from torch import Tensor

from agent_rl.objective.clips.base import Radii
from agent_rl.objective.ratio import Ratios
from agent_rl.objective.surrogates.base import Surrogate
from agent_rl.objective.surrogates.clip import clipped_objective
from agent_rl.registry import PartConfig


class UnboundedPositive(Surrogate):
    """A > 0: S = A r / sg(r), of value A and gradient A grad log r, with no bound above. A < 0: PPO's clip.

    The rule is as the SAT paper (arXiv 2607.18722) states it. Only the low radius of `objective.clip` acts.
    """

    class Config(PartConfig):
        """`surrogate: up` has no keys: the low radius is `objective.clip`'s."""

        type: Literal["up"] = "up"

    def __init__(self, config: Config) -> None:
        self.config = config

    def objective(self, ratios: Ratios, radii: Radii) -> tuple[Tensor, Tensor]:
        advantages, positive = ratios.tokens.advantages, ratios.tokens.advantages > 0
        own = torch.where(positive, ratios.clip.detach(), torch.zeros_like(ratios.clip))
        return clipped_objective(ratios.clip - own, advantages, radii)
