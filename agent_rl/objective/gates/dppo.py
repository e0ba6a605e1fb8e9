"""DPPO: a trust region on the divergence of policies, not on their ratio."""

from typing import Literal

from pydantic import Field
from torch import Tensor

from agent_rl.objective.bernoulli import bernoulli_kl, bernoulli_tv, representable
from agent_rl.objective.gates.base import Gate
from agent_rl.objective.ratio import Ratios
from agent_rl.registry import PartConfig


class DPPO(Gate):
    """Leave out a token that moves away from the behaviour policy and is further than delta from it already.

    A token is kept where A (r - 1) <= 0 or D <= delta, r = pi / mu per token. D is taken on the sampled token
    alone, as in DPPO's binary approximation. With `clip: none` this is DPPO's own form, the mask; with
    `clip: ppo` the form of the SAT paper's grid, mask times clip.
    """

    class Config(PartConfig):
        """Keys of gate `dppo`."""

        type: Literal["dppo"] = "dppo"
        divergence: Literal["tv", "kl"] = "tv"
        """`tv`: |pi - mu|. `kl`: KL of the Bernoullis, mu against pi."""
        delta: float = Field(0.15, ge=0)
        """The largest divergence that is kept."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def weight(self, ratios: Ratios) -> Tensor:
        measure = bernoulli_tv if self.config.divergence == "tv" else bernoulli_kl
        divergence = measure(representable(ratios.tokens.behavior_logprobs), representable(ratios.logprobs))
        returning = ratios.tokens.advantages * ratios.token <= 0
        return (returning | (divergence <= self.config.delta)).to(divergence.dtype)
