"""IcePop: importance weights inside a band, nothing outside it."""

from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from agent_rl.objective.gates.base import Gate, Policy, check_band, correction_conflict, needs_of, policy_logprobs
from agent_rl.objective.ratio import Ratios
from agent_rl.registry import PartConfig

if TYPE_CHECKING:
    from agent_rl.objective.config import ObjectiveConfig


class IcePop(Gate):
    """Weight k where low <= k <= high, else 0; k = proximal / behavior per token (Ling team, 2025)."""

    class Config(PartConfig):
        """Keys of gate `icepop`."""

        type: Literal["icepop"] = "icepop"
        low: float = Field(0.5, ge=0)
        """The smallest k that is kept."""
        high: float = Field(5.0, gt=0)
        """The largest k that is kept."""
        policy: Policy = "proximal"
        """Numerator of k. `current` is the SAT paper's reading: it needs no proximal log-probs, and the plain
        `policy_gradient` as surrogate."""

        @model_validator(mode="after")
        def _band(self) -> Self:
            check_band(self.low, self.high)
            return self

    corrects = True

    def __init__(self, config: Config) -> None:
        self.config = config
        self.needs = needs_of(config.policy)

    @classmethod
    def conflict(cls, config: Any, objective: "ObjectiveConfig") -> str | None:
        return super().conflict(config, objective) or correction_conflict("icepop", config.policy, objective)

    def weight(self, ratios: Ratios) -> Tensor:
        k = (policy_logprobs(ratios, self.config.policy) - ratios.tokens.behavior_logprobs).exp()
        return torch.where((k >= self.config.low) & (k <= self.config.high), k, torch.zeros_like(k))
