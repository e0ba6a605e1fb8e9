"""The only composer: ratio, clip, surrogate, gates, KL and aggregation, on packed micro-batches of one step."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from agent_rl import registry
from agent_rl.objective.aggregation import token_weights
from agent_rl.objective.clips.base import Clip, Radii
from agent_rl.objective.config import ObjectiveConfig
from agent_rl.objective.errors import ObjectiveError
from agent_rl.objective.gates.base import Gate
from agent_rl.objective.kl import low_var_kl
from agent_rl.objective.quantile import Reduce
from agent_rl.objective.ratio import Ratios
from agent_rl.objective.surrogates.base import Surrogate
from agent_rl.objective.token_batch import ActiveTokens, TokenBatch

_MISSING = {
    "ref_logprobs": (
        "missing_ref",
        "the KL loss needs ref_logprobs; compute them or set objective.kl.coefficient to 0",
    ),
    "proximal_logprobs": (
        "missing_mut",
        "this objective needs proximal_logprobs; compute them, or choose ratio.denominator: behavior and gates "
        "that do without",
    ),
}


@dataclass(frozen=True, eq=False)
class StepContext:
    """What all micro-batches of one optimizer step share, over all ranks.

    num_tokens: active tokens; num_sequences: trajectories with any; reference: the clip's own statistic of the
    step, None if it has none. SAT's is q, a 0-dim tensor, or a `TurnReference`.
    """

    num_tokens: int
    num_sequences: int
    reference: Any = None

    @property
    def empty(self) -> bool:
        """Whether no rank has an active token. Such a step has no loss: skip it and count it."""
        return self.num_tokens == 0


@dataclass(frozen=True, eq=False)
class LossOutput:
    """The loss of one micro-batch and, detached, what it was made of; [T] tensors are 0 or False where inactive.

    loss: 0-dim, the only tensor with a gradient; the step's loss is the sum over micro-batches. log_ratio: d =
    lp - mu per token, whatever the ratio level. clip_log_ratio: the log of `ratio`, the scalar that is clipped;
    gate_log_ratio: the one that the clip gates on, the same unless it asks for another. objective: S times
    `weight`, the product of the gates, before the KL. gate: the clip tightened here; clipped: a bound of the
    surrogate binds, so a clipped term has no gradient, and a capped weight is at its cap; newly_clipped: it binds
    only because of the tightening; both whatever the gates weigh. factor: min(c_low, c_high). q: what
    |gate_log_ratio| was compared with, None for a clip without a quantile. base_radii: (low, high) of the clip
    before tightening, where some constant radius is equivalent to q, else None.
    """

    loss: Tensor
    log_ratio: Tensor
    clip_log_ratio: Tensor
    gate_log_ratio: Tensor
    ratio: Tensor
    objective: Tensor
    weight: Tensor
    eps_low: Tensor
    eps_high: Tensor
    factor: Tensor
    gate: Tensor
    clipped: Tensor
    newly_clipped: Tensor
    kl: Tensor
    q: Tensor | None
    base_radii: tuple[float, float] | None


class Objective:
    """An objective ready to run. `begin_step` once an optimizer step, `loss` for each of its micro-batches, then
    `end_step`, from which parts with state learn; their `state_dict` belongs into the checkpoint."""

    def __init__(self, config: ObjectiveConfig) -> None:
        self.config = config
        self.clip: Clip = registry.build("clip", config.clip)
        self.surrogate: Surrogate = registry.build("surrogate", config.surrogate)
        self.gates: list[Gate] = [registry.build("gate", gate) for gate in config.gates]
        parts = (self.clip, self.surrogate, *self.gates)
        self.needs: frozenset[str] = frozenset().union(*(part.needs for part in parts), _own_needs(config))
        """Optional fields of `TokenBatch` that must be there."""
        self.needs_step_pass = self.clip.needs_step_pass
        """Whether `begin_step` needs the log-probs of all micro-batches."""
        self.needs_turns = config.ratio.level == "turn" or any(part.needs_turns for part in parts)
        """Whether every active token must have a turn id."""

    def begin_step(
        self,
        batches: Sequence[TokenBatch],
        logprobs: Sequence[Tensor] | None,
        reduce: Reduce | None = None,
        step: int = 0,
    ) -> StepContext:
        """Count the denominators of an optimizer step and take its statistic.

        `batches` are all micro-batches of this rank; `logprobs` their log-probs [T], read without gradient and
        only if `needs_step_pass`. With one micro-batch in the step those of its gradient pass serve, and no
        second forward is needed. `reduce` sums a tensor over ranks; `step` is the number of the rollout batch. Raises
        `ObjectiveError` on unusable log-probs, on a trajectory that lies in two segments, and on every rank if another
        rank has such input.
        """
        problem = self._problem(batches, logprobs if self.needs_step_pass else None)
        active = [batch.active for batch in batches]
        device = batches[0].loss_mask.device if batches else None
        local = [sum(len(a) for a in active), sum(a.num_sequences for a in active), int(problem is not None)]
        counts = torch.tensor(local, device=device)
        tokens, sequences, problems = (counts if reduce is None else reduce(counts)).tolist()
        if problem is not None:
            raise problem
        if problems:
            raise ObjectiveError("nonfinite", "another rank has unusable input for this step; see its error")
        if not tokens:
            return StepContext(tokens, sequences)
        log_ratios = self._gate_log_ratios(logprobs, active) if self.needs_step_pass else None
        return StepContext(tokens, sequences, self.clip.reference(step, log_ratios, active, reduce))

    def loss(self, logprobs: Tensor, batch: TokenBatch, step: StepContext) -> LossOutput:
        """The loss of one micro-batch, `logprobs` [T] being the policy's current ones, with gradient.

        S = the surrogate of ratio, radii and advantage, times the gates' weights; loss = -S plus the KL, averaged
        with the step's denominators. Raises `ObjectiveError` on unusable log-probs and on an empty step.
        """
        if step.empty:
            raise ObjectiveError("empty_active_set", "no active token in the whole step; skip it (StepContext.empty)")
        if (problem := self._problem([batch], [logprobs])) is not None:
            raise problem
        tokens = batch.active
        ratios = Ratios.of(logprobs, tokens, self.config.ratio)
        constant = ratios.detach()
        radii = self.clip.radii(self._gate_log_ratio(constant), tokens, step.reference)
        weight = torch.ones_like(constant.clip)
        for gate in self.gates:
            weight = weight * gate.weight(constant)
        term, clipped = self.surrogate.objective(ratios.only(weight > 0) if self.gates else ratios, radii)
        if self.gates:  # `clipped` marks binding bounds of every token, also where its term is dropped
            _, clipped = self.surrogate.objective(constant, radii)
        objective = weight * term
        average = partial(token_weights, tokens, step.num_tokens, step.num_sequences)
        loss = -(objective * average(self.config.aggregate, self.config.sequence_length)).sum()
        kl = torch.zeros_like(objective)
        if self.config.kl.coefficient:
            assert tokens.ref_logprobs is not None
            kl = low_var_kl(logprobs[tokens.index], tokens.ref_logprobs)
            loss = loss + self.config.kl.coefficient * (kl * average(self.config.kl.aggregate)).sum()
        return self._output(loss, constant, radii, batch, objective=objective, weight=weight, clipped=clipped, kl=kl)

    def end_step(
        self,
        batches: Sequence[TokenBatch],
        logprobs: Sequence[Tensor],
        step: StepContext,
        reduce: Reduce | None = None,
    ) -> None:
        """Let parts with state learn from a step that was trained on `logprobs` [T] of this rank's micro-batches.

        Every rank calls it, after its last `loss`; an empty step is ignored.
        """
        if step.empty or not self.clip.learns:
            return
        active = [batch.active for batch in batches]
        self.clip.end_step(step.reference, self._gate_log_ratios(logprobs, active), active, reduce)

    def state_dict(self) -> dict[str, Any]:
        """State of the parts, for a checkpoint; empty if none has any."""
        state = self.clip.state_dict()
        return {"clip": state} if state else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave; a part that had no state starts anew."""
        if "clip" in state:
            self.clip.load_state_dict(state["clip"])

    def _gate_log_ratio(self, ratios: Ratios) -> Tensor:
        """The log-ratio that the clip looks at, [A]."""
        return ratios.behavior if self.clip.gates_on_behavior else ratios.clip

    def _gate_log_ratios(self, logprobs: Sequence[Tensor] | None, active: Sequence[ActiveTokens]) -> list[Tensor]:
        assert logprobs is not None, "the log-probs of every micro-batch are needed"
        pairs = zip(logprobs, active, strict=True)
        return [self._gate_log_ratio(Ratios.of(lp.detach(), a, self.config.ratio)) for lp, a in pairs]

    def _problem(self, batches: Sequence[TokenBatch], logprobs: Sequence[Tensor] | None) -> ObjectiveError | None:
        """Why this rank's input cannot be used; kept back so that all ranks can raise together."""
        try:
            _check_whole(batches)
            for batch, values in zip(batches, logprobs or [], strict=logprobs is not None):
                batch.check_logprobs("logprobs", values)
            for batch in batches if self.needs_turns else []:
                batch.check_turns()
            for name in sorted(self.needs):
                if any(getattr(batch, name) is None for batch in batches):
                    code, message = _MISSING.get(name, ("missing_field", f"this objective needs {name}; compute it"))
                    raise ObjectiveError(code, message)
        except ObjectiveError as error:
            return error
        return None

    def _output(self, loss: Tensor, ratios: Ratios, radii: Radii, batch: TokenBatch, **columns: Tensor) -> LossOutput:
        def spread(values: Tensor) -> Tensor:
            full = torch.zeros(len(batch), dtype=values.dtype, device=values.device)
            full[batch.active.index] = values.detach()
            return full

        ratio = ratios.clip.exp()
        inside_base = (ratio < 1 + radii.base_high) & (ratio > 1 - radii.base_low)
        return LossOutput(
            loss=loss,
            log_ratio=spread(ratios.token),
            clip_log_ratio=spread(ratios.clip),
            gate_log_ratio=spread(self._gate_log_ratio(ratios)),
            ratio=spread(ratio),
            eps_low=spread(radii.low),
            eps_high=spread(radii.high),
            factor=spread(torch.minimum(radii.factor_low, radii.factor_high)),
            gate=spread(radii.gate),
            newly_clipped=spread(columns["clipped"] & inside_base & radii.gate),
            q=None if radii.q is None else spread(radii.q),
            base_radii=self._equivalent_base(radii),
            **{name: spread(values) for name, values in columns.items()},
        )

    def _equivalent_base(self, radii: Radii) -> tuple[float, float] | None:
        """The base radii, if some constant radius has the gradient of this clip on a batch."""
        low, high = radii.base_low, radii.base_high
        one_scalar = not self.clip.gates_on_behavior or self.config.ratio.denominator == "behavior"
        if not (one_scalar and self.surrogate.keeps_equivalent_radius):
            return None
        return None if isinstance(low, Tensor) or isinstance(high, Tensor) else (low, high)


def needs_proximal(config: ObjectiveConfig) -> bool:
    """Whether the objective reads proximal log-probs."""
    kinds = [("clip", config.clip), ("surrogate", config.surrogate)]
    parts = [registry.find(kind, part.type) for kind, part in kinds]  # not built: a clip may read a schedule
    parts += [registry.build("gate", gate) for gate in config.gates]  # built: what a gate needs hangs on its keys
    return "proximal_logprobs" in _own_needs(config).union(*(part.needs for part in parts))


def _own_needs(config: ObjectiveConfig) -> set[str]:
    """The optional fields that the composer itself reads."""
    needs = {"ref_logprobs"} if config.kl.coefficient else set()
    return needs | ({"proximal_logprobs"} if config.ratio.denominator == "proximal" else set())


def _check_whole(batches: Sequence[TokenBatch]) -> None:
    """An average over a response needs all of it in one segment."""
    ids = [i for batch in batches for i in batch.active.sequences.tolist()]
    if len(set(ids)) < len(ids):
        split = next(i for i in ids if ids.count(i) > 1)
        message = f"trajectory {split} lies in two segments of one optimizer step; pack each trajectory whole, once"
        raise ObjectiveError("split_trajectory", message)
