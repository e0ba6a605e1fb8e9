"""The interface of gates: a gate puts a weight on each token's term, most often 0 or 1."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import Tensor

from agent_rl import registry
from agent_rl.objective.part import ObjectivePart
from agent_rl.objective.ratio import Ratios

if TYPE_CHECKING:
    from agent_rl.objective.config import ObjectiveConfig

Policy = Literal["proximal", "current"]


class Gate(ObjectivePart, ABC):
    """A part of kind `gate`. Its weight is a constant of the gradient: the ratios always come detached."""

    corrects: ClassVar[bool] = False
    """Whether the weight is itself an importance ratio, which must not be applied twice."""

    @abstractmethod
    def weight(self, ratios: Ratios) -> Tensor:
        """The weight of each active token, float [A] >= 0; a token of weight 0 gives no gradient at all."""

    @classmethod
    def conflict(cls, config: Any, objective: "ObjectiveConfig") -> str | None:
        correcting = [gate.type for gate in objective.gates if registry.find("gate", gate.type).corrects]
        if cls.corrects and len(correcting) > 1:
            return f"gates {' and '.join(correcting)} each weigh by an importance ratio; keep one of them"
        return None


def weighs_by_ratio(objective: "ObjectiveConfig") -> bool:
    """Whether the surrogate multiplies the advantage by the ratio."""
    surrogate = registry.find("surrogate", objective.surrogate.type)
    return bool(surrogate.weighs_by_ratio(objective.surrogate))


def check_band(low: float, high: float) -> None:
    """Raises `ValueError` if no ratio can lie in [low, high]."""
    if low > high:
        raise ValueError(f"low is {low} and high {high}: nothing would be kept; swap them")


def policy_logprobs(ratios: Ratios, policy: Policy) -> Tensor:
    """Log-probs [A] of the policy that is compared with the behaviour policy."""
    if policy == "current":
        return ratios.logprobs
    assert ratios.tokens.proximal_logprobs is not None
    return ratios.tokens.proximal_logprobs


def needs_of(policy: Policy) -> frozenset[str]:
    """The batch fields that `policy_logprobs` reads."""
    return frozenset({"proximal_logprobs"}) if policy == "proximal" else frozenset()


def correction_conflict(name: str, policy: Policy, objective: "ObjectiveConfig") -> str | None:
    """Why a weight `policy` / behaviour would correct what the ratio corrects already, or None."""
    if not weighs_by_ratio(objective):
        return None
    if policy == "current":
        return (
            f"gate {name} weighs by current / behavior, which the ratio of surrogate {objective.surrogate.type} does "
            "too; set objective.surrogate to policy_gradient without a cap, or the gate's policy to proximal"
        )
    if objective.ratio.denominator == "behavior":
        return (
            f"gate {name} weighs by proximal / behavior, but the ratio is current / behavior and corrects that "
            "already; set objective.ratio.denominator to proximal"
        )
    return None
