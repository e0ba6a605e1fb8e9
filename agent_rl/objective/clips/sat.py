"""SAT, the staleness-adaptive trust region ("Stale but Stable", arXiv 2607.18722, eqs. 3.1-3.6)."""

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from pydantic import Field
from torch import Tensor

from agent_rl.objective.clips.base import Clip, Radii
from agent_rl.objective.quantile import ALPHA, Reduce, quantiles
from agent_rl.objective.token_batch import ActiveTokens
from agent_rl.objective.turn_reference import TurnConfig, TurnReference, turn_reference
from agent_rl.registry import PartConfig

Rule = Literal["supported", "all", "stochastic"]
RULES: tuple[Rule, ...] = get_args(Rule)
_SURE = math.log(0.99)


class SAT(Clip):
    """PPO's clip whose radius shrinks for tokens with |d| above q, the `alpha` quantile of |d|.

    Where |d| > q the side that d points to is multiplied by 1 / (1 + (d / q)^2). Elsewhere, and for every token
    when q is 0 or the gate never fires, the radii are PPO's to the bit.
    """

    class Config(PartConfig):
        """Keys of `clip: sat`."""

        type: Literal["sat"] = "sat"
        """This part."""
        eps_low: float = Field(0.2, gt=0, le=1)
        """Radius below 1 before tightening."""
        eps_high: float = Field(0.2, gt=0)
        """Radius above 1 before tightening."""
        alpha: float = Field(ALPHA, gt=0, le=1)
        """Level of the quantile q. 1 makes q the largest |d|, and the gate never fires."""
        scope: Literal["step", "microbatch"] = "step"
        """`step`: one q an optimizer step, over all micro-batches and ranks. `microbatch`: one q each, which then
        depends on how trajectories are packed."""
        tokens: Rule = "supported"
        """Which tokens q counts. `supported`: all but those whose kept set has one element, where d is 0 by
        construction. `all`: every active token. `stochastic`: supported, and behaviour probability at most 0.99."""
        turns: TurnConfig | None = None
        """Compare each token with a quantile of its turn; null pools all turns, as in the paper."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.needs_step_pass = config.scope == "step"
        self.needs_turns = config.turns is not None

    def reference(
        self, log_ratios: Sequence[Tensor], tokens: Sequence[ActiveTokens], reduce: Reduce | None
    ) -> Tensor | TurnReference:
        """q, a 0-dim tensor, or q by turn; 0, which gates nothing, where no active token counts."""
        chosen = [counted(t, self.config.tokens) for t in tokens]
        magnitudes = torch.cat([d.abs()[c] for d, c in zip(log_ratios, chosen, strict=True)])
        if self.config.turns is None:
            (q,) = quantiles([magnitudes], self.config.alpha, reduce)
            return q.nan_to_num(nan=0.0)
        turns = torch.cat([t.turn_ids[c] for t, c in zip(tokens, chosen, strict=True)])
        ids = torch.cat([t.trajectory_ids[c] for t, c in zip(tokens, chosen, strict=True)])
        return turn_reference(magnitudes, turns, ids, self.config.turns, self.config.alpha, reduce)

    def radii(self, log_ratio: Tensor, tokens: ActiveTokens, reference: Tensor | TurnReference | None) -> Radii:
        reference = self.reference([log_ratio], [tokens], None) if reference is None else reference
        q = reference.at(tokens.turn_ids) if isinstance(reference, TurnReference) else reference
        q = q.to(log_ratio).expand_as(log_ratio)
        low, high, gate = sat_factors(log_ratio, q)
        return Radii(self.config.eps_low, self.config.eps_high, low, high, gate, q)


def sat_factors(log_ratio: Tensor, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """c_low, c_high and the gate, each [A], for log-ratios d [A] and q [A] or 0-dim (eq. 3.4).

    gate = q > 0 and |d| > q, strictly; psi(u) = 1 / (1 + (u / q)^2) of u = max(-d, 0) or max(d, 0) where it
    fires, else exactly 1.
    """
    gate = (q > 0) & (log_ratio.abs() > q)
    one = torch.ones_like(log_ratio)
    low = torch.where(gate, 1 / (1 + ((-log_ratio).clamp(min=0) / q) ** 2), one)
    high = torch.where(gate, 1 / (1 + (log_ratio.clamp(min=0) / q) ** 2), one)
    return low, high, gate


def counted(tokens: ActiveTokens, rule: Rule) -> Tensor:
    """Which active tokens the quantile counts under `rule`, bool [A]."""
    if rule == "all":
        return torch.ones_like(tokens.kept_sizes, dtype=torch.bool)
    supported = tokens.kept_sizes != 1
    return supported & (tokens.behavior_logprobs <= _SURE) if rule == "stochastic" else supported
