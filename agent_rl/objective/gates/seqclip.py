"""SeqClip: responses whose mean mismatch is outside a narrow band are left out."""

from typing import Literal, Self

from pydantic import Field, model_validator
from torch import Tensor

from agent_rl.objective.gates.base import Gate, check_band
from agent_rl.objective.ratio import Ratios, level_log_ratio
from agent_rl.registry import PartConfig


class SeqClip(Gate):
    """Keep a response where low <= rho <= high, rho = exp of its mean log-ratio to the behaviour policy.

    On GSPO's term, as the SAT paper (arXiv 2607.18722) states it.
    """

    class Config(PartConfig):
        """Keys of gate `seqclip`."""

        type: Literal["seqclip"] = "seqclip"
        low: float = Field(0.995, ge=0)
        """The smallest rho that is kept."""
        high: float = Field(1.005, gt=0)
        """The largest rho that is kept."""

        @model_validator(mode="after")
        def _band(self) -> Self:
            check_band(self.low, self.high)
            return self

    def __init__(self, config: Config) -> None:
        self.config = config

    def weight(self, ratios: Ratios) -> Tensor:
        rho = level_log_ratio(ratios.token, ratios.tokens, "sequence").exp()
        return ((rho >= self.config.low) & (rho <= self.config.high)).to(rho.dtype)
