"""The interface of surrogates: a surrogate makes each token's term from ratio, trust region and advantage."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from agent_rl.objective.clips.base import Radii
from agent_rl.objective.part import ObjectivePart
from agent_rl.objective.ratio import Ratios

if TYPE_CHECKING:
    from agent_rl.objective.config import ObjectiveConfig


class Surrogate(ObjectivePart, ABC):
    """A part of kind `surrogate`."""

    reads_radii: ClassVar[bool] = True
    """Whether the trust region of `objective.clip` acts here."""
    keeps_equivalent_radius: ClassVar[bool] = False
    """Whether a clip that gates on the clipped ratio has the gradient of a constant radius here."""

    @classmethod
    def weighs_by_ratio(cls, config: Any) -> bool:
        """Whether the objective multiplies the advantage by the ratio; the plain policy gradient does not."""
        return True

    @abstractmethod
    def objective(self, ratios: Ratios, radii: Radii) -> tuple[Tensor, Tensor]:
        """S of each active token [A], to be maximised, and where a bound binds, bool [A]."""

    @classmethod
    def conflict(cls, config: Any, objective: "ObjectiveConfig") -> str | None:
        if cls.reads_radii or objective.clip.type == "none":
            return None
        return (
            f"surrogate {config.type} has no clip for {objective.clip.type!r} to act on; "
            "set objective.clip to none, or objective.surrogate to clip"
        )
