"""SAT, the staleness-adaptive trust region ("Stale but Stable", arXiv 2607.18722, eqs. 3.1-3.6)."""

import math
from collections.abc import Sequence
from typing import Any, Literal, Self, get_args

import torch
from pydantic import Field, model_validator
from torch import Tensor

from agent_rl.objective.clips.base import Clip, Radii
from agent_rl.objective.ema_cap import EMACap
from agent_rl.objective.quantile import ALPHA, Reduce, quantiles
from agent_rl.objective.token_batch import ActiveTokens
from agent_rl.objective.turn_reference import TurnConfig, TurnReference, turn_reference
from agent_rl.registry import PartConfig

Reference = Tensor | TurnReference
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
        eps_low: float = Field(0.2, gt=0, le=1)
        """Radius below 1 before tightening."""
        eps_high: float = Field(0.2, gt=0)
        """Radius above 1 before tightening."""
        alpha: float = Field(ALPHA, gt=0, le=1)
        """Level of the quantile q. 1 makes q the largest |d|, and the gate never fires."""
        scope: Literal["step", "previous_step", "microbatch"] = "step"
        """`step`: one q an optimizer step, over all micro-batches and ranks. `previous_step`: that of the step
        before, which saves the pass without gradients; the first step gates nothing. `microbatch`: one q each,
        which then depends on how trajectories are packed."""
        tokens: Rule = "supported"
        """Which tokens q counts. `supported`: all but those whose kept set has one element, where d is 0 by
        construction. `all`: every active token. `stochastic`: supported, and behaviour probability at most 0.99."""
        turns: TurnConfig | None = None
        """Compare each token with a quantile of its turn; null pools all turns, as in the paper."""
        gate_on: Literal["clip", "behavior"] = "clip"
        """Which log-ratio d is: that of the ratio that is clipped, or always the one to the behaviour policy. They
        differ under `ratio.denominator: proximal`, and no constant radius is then equivalent."""
        cap: Literal["none", "ema"] = "none"
        """`ema`: q is held to its moving average over the first 50 steps, frozen after them. Without it every
        reference is relative: a uniform rescaling of d changes nothing."""

        @model_validator(mode="after")
        def _one_reference(self) -> Self:
            if self.cap == "ema" and self.scope == "microbatch":
                raise ValueError("cap ema averages one q a step, and scope microbatch has several; set scope to step")
            return self

    def __init__(self, config: Config) -> None:
        self.config = config
        self.needs_step_pass = config.scope == "step"
        self.needs_turns = config.turns is not None
        self.learns = config.scope == "previous_step" or config.cap == "ema"
        self.gates_on_behavior = config.gate_on == "behavior"
        self.cap = EMACap() if config.cap == "ema" else None
        self.previous: Reference | None = None

    def reference(
        self, step: int, log_ratios: Sequence[Tensor] | None, tokens: Sequence[ActiveTokens], reduce: Reduce | None
    ) -> Reference | None:
        """q, a 0-dim tensor, or q by turn; 0, which gates nothing, where no active token counts."""
        if self.config.scope == "microbatch":
            return None
        if self.config.scope == "step":
            assert log_ratios is not None
            found: Reference = self._measure(log_ratios, tokens, reduce)
        else:
            found = torch.zeros(()) if self.previous is None else self.previous
        return found if self.cap is None else self.cap.apply(found)

    def _measure(
        self, log_ratios: Sequence[Tensor], tokens: Sequence[ActiveTokens], reduce: Reduce | None
    ) -> Reference:
        chosen = [counted(t, self.config.tokens) for t in tokens]
        magnitudes = torch.cat([d.abs()[c] for d, c in zip(log_ratios, chosen, strict=True)])
        if self.config.turns is None:
            (q,) = quantiles([magnitudes], self.config.alpha, reduce)
            return q.nan_to_num(nan=0.0)
        turns = torch.cat([t.turn_ids[c] for t, c in zip(tokens, chosen, strict=True)])
        ids = torch.cat([t.trajectory_ids[c] for t, c in zip(tokens, chosen, strict=True)])
        return turn_reference(magnitudes, turns, ids, self.config.turns, self.config.alpha, reduce)

    def radii(self, log_ratio: Tensor, tokens: ActiveTokens, reference: Reference | None) -> Radii:
        reference = self._measure([log_ratio], [tokens], None) if reference is None else reference
        q = reference.at(tokens.turn_ids) if isinstance(reference, TurnReference) else reference
        q = q.to(log_ratio).expand_as(log_ratio)
        low, high, gate = sat_factors(log_ratio, q)
        return Radii(self.config.eps_low, self.config.eps_high, low, high, gate, q)

    def end_step(
        self,
        reference: Reference | None,
        log_ratios: Sequence[Tensor],
        tokens: Sequence[ActiveTokens],
        reduce: Reduce | None,
    ) -> None:
        """Keep q for the next step under `previous_step`, and let the cap learn from it."""
        if self.config.scope == "previous_step":
            reference = self.previous = self._measure(log_ratios, tokens, reduce)
        if self.cap is not None:
            assert reference is not None
            self.cap.observe(reference)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        if self.previous is not None:
            by_turn = isinstance(self.previous, TurnReference)
            state["previous"] = dict(vars(self.previous)) if by_turn else self.previous
        return state if self.cap is None else state | {"cap": self.cap.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        previous = state.get("previous")
        self.previous = TurnReference(**previous) if isinstance(previous, dict) else previous
        if self.cap is not None and "cap" in state:
            self.cap.load_state_dict(state["cap"])


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
