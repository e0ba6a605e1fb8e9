"""TIS, truncated importance sampling in its public form."""

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field
from torch import Tensor

from agent_rl.objective.gates.base import Gate, correction_conflict
from agent_rl.objective.ratio import Ratios
from agent_rl.registry import PartConfig

if TYPE_CHECKING:
    from agent_rl.objective.config import ObjectiveConfig


class TIS(Gate):
    """Weight min(proximal / behavior, cap) per token, on a term whose ratio is current / proximal.

    It corrects the engine's mismatch and leaves the policy lag to the clip ("Your efficient RL framework secretly
    brings you off-policy RL training", Yao et al. 2025). The weight is a token's whatever the ratio level.
    """

    class Config(PartConfig):
        """Keys of gate `tis`."""

        type: Literal["tis"] = "tis"
        cap: float = Field(2.0, gt=0)
        """C: no token weighs more."""

    corrects = True
    needs = frozenset({"proximal_logprobs"})

    def __init__(self, config: Config) -> None:
        self.config = config

    @classmethod
    def conflict(cls, config: Any, objective: "ObjectiveConfig") -> str | None:
        return super().conflict(config, objective) or correction_conflict("tis", "proximal", objective)

    def weight(self, ratios: Ratios) -> Tensor:
        assert ratios.tokens.proximal_logprobs is not None
        correction = (ratios.tokens.proximal_logprobs - ratios.tokens.behavior_logprobs).exp()
        return correction.clamp(max=self.config.cap)
