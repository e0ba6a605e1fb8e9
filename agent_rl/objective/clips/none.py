"""No trust region: the plain importance-weighted objective r A."""

import math
from typing import Literal

from torch import Tensor

from agent_rl.objective.clips.base import Clip, Radii
from agent_rl.objective.token_batch import ActiveTokens
from agent_rl.registry import PartConfig


class Unclipped(Clip):
    """Radii without end. The ratio is free, so a stale batch can move the policy arbitrarily far."""

    class Config(PartConfig):
        """`clip: none` has no keys."""

        type: Literal["none"] = "none"

    def __init__(self, config: Config) -> None:
        self.config = config

    def radii(self, log_ratio: Tensor, tokens: ActiveTokens, reference: None) -> Radii:
        return Radii.fixed(log_ratio, math.inf, math.inf)
