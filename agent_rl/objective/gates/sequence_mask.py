"""Masked importance sampling: whole responses are left out when their ratio, or one token's, is extreme."""

from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from agent_rl.objective.gates.base import Gate, Policy, check_band, needs_of, policy_logprobs
from agent_rl.objective.ratio import Ratios, level_log_ratio
from agent_rl.registry import PartConfig


class SequenceMask(Gate):
    """Keep a response where low <= ratio <= high and no token's ratio is below `veto`.

    "When speed kills stability" (Liu et al. 2025) masks responses by their ratio; the veto is verl's. The ratio is
    `policy` / behavior. The band's default is ours.
    """

    class Config(PartConfig):
        """Keys of gate `sequence_mask`."""

        type: Literal["sequence_mask"] = "sequence_mask"
        form: Literal["geometric", "product"] = "geometric"
        """The response's ratio: the geometric mean of its tokens' ratios, or their product, which long responses
        drive to the edges."""
        low: float = Field(0.5, ge=0)
        """The smallest ratio of a response that is kept."""
        high: float = Field(2.0, gt=0)
        """The largest ratio of a response that is kept."""
        veto: float = Field(1e-4, ge=0)
        """A token with a ratio below this removes its response; 0 switches the veto off."""
        policy: Policy = "current"
        """Numerator of the ratio: the policy now, or the trainer's at the weights that the token was sampled with."""

        @model_validator(mode="after")
        def _band(self) -> Self:
            check_band(self.low, self.high)
            return self

    def __init__(self, config: Config) -> None:
        self.config = config
        self.needs = needs_of(config.policy)

    def weight(self, ratios: Ratios) -> Tensor:
        tokens = ratios.tokens
        token = policy_logprobs(ratios, self.config.policy) - tokens.behavior_logprobs
        response = level_log_ratio(token, tokens, "sequence")
        if self.config.form == "product":
            response = response * tokens.sequence_lengths
        ratio = response.exp()
        kept = (ratio >= self.config.low) & (ratio <= self.config.high)
        vetoed = torch.bincount(
            tokens.sequence[token.exp() < self.config.veto], minlength=_num_segments(tokens.sequence)
        )
        return (kept & (vetoed[tokens.sequence] == 0)).to(token.dtype)


def _num_segments(sequence: Tensor) -> int:
    return int(sequence.max()) + 1 if len(sequence) else 0
