"""KPop: tokens on which trainer and engine disagree, by a Bernoulli KL either way, are left out."""

from typing import Literal

from pydantic import Field
from torch import Tensor

from agent_rl.objective.bernoulli import bernoulli_kl, representable
from agent_rl.objective.gates.base import Gate, Policy, needs_of, policy_logprobs
from agent_rl.objective.ratio import Ratios
from agent_rl.registry import PartConfig


class KPop(Gate):
    """Keep a token where KL_B(p_t || p_r) <= phi and KL_B(p_r || p_t) <= phi.

    p_t is the trainer's probability of the sampled token, p_r the engine's; KL_B is the KL of the Bernoullis. The
    rule is as the SAT paper (arXiv 2607.18722) states it.
    """

    class Config(PartConfig):
        """Keys of gate `kpop`."""

        type: Literal["kpop"] = "kpop"
        phi: float = Field(0.75, ge=0)
        """The largest divergence in nats, in both directions, that is kept."""
        policy: Policy = "proximal"
        """Whose probability p_t is: the trainer's at the weights that the token was sampled with, or now."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.needs = needs_of(config.policy)

    def weight(self, ratios: Ratios) -> Tensor:
        trainer = representable(policy_logprobs(ratios, self.config.policy))
        engine = representable(ratios.tokens.behavior_logprobs)
        forward, reverse = bernoulli_kl(trainer, engine), bernoulli_kl(engine, trainer)
        return ((forward <= self.config.phi) & (reverse <= self.config.phi)).to(trainer.dtype)
