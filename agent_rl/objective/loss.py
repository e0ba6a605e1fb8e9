"""The only composer: log-ratio, clip, KL and aggregation, on packed micro-batches of one optimizer step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agent_rl import registry
from agent_rl.objective.clips.base import Clip, Radii
from agent_rl.objective.config import Aggregate, ObjectiveConfig
from agent_rl.objective.errors import ObjectiveError
from agent_rl.objective.kl import low_var_kl
from agent_rl.objective.quantile import Reduce
from agent_rl.objective.ratio import level_log_ratio
from agent_rl.objective.token_batch import ActiveTokens, TokenBatch


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
        """No active token anywhere: there is no loss; skip the step and count it."""
        return self.num_tokens == 0


@dataclass(frozen=True, eq=False)
class LossOutput:
    """The loss of one micro-batch and, detached, what it was made of; [T] tensors are 0 or False where inactive.

    loss: 0-dim, the only tensor with a gradient; the step's loss is the sum over micro-batches. log_ratio: d =
    lp - mu per token, whatever the ratio level. clip_log_ratio: the log of `ratio`, the scalar that is gated and
    clipped. objective: S, before the KL. gate: the clip tightened here; clipped: the clip binds, so the token has
    no policy gradient; newly_clipped: it does only because of the tightening. factor: min(c_low, c_high).
    q: what |clip_log_ratio| was compared with, None for a clip without a quantile. base_radii: (low, high) of the
    clip before tightening.
    """

    loss: Tensor
    log_ratio: Tensor
    clip_log_ratio: Tensor
    ratio: Tensor
    objective: Tensor
    eps_low: Tensor
    eps_high: Tensor
    factor: Tensor
    gate: Tensor
    clipped: Tensor
    newly_clipped: Tensor
    kl: Tensor
    q: Tensor | None
    base_radii: tuple[float, float]


class Objective:
    """An objective ready to run. `begin_step` once an optimizer step, then `loss` for each of its micro-batches."""

    def __init__(self, config: ObjectiveConfig) -> None:
        self.config = config
        self.clip: Clip = registry.build("clip", config.clip)
        self.needs: frozenset[str] = self.clip.needs | ({"ref_logprobs"} if config.kl.coefficient else set())
        """Optional fields of `TokenBatch` that must be there."""
        self.needs_step_pass = self.clip.needs_step_pass
        """Whether `begin_step` needs the log-probs of all micro-batches."""
        self.needs_turns = self.clip.needs_turns or config.ratio.level == "turn"
        """Whether every active token must have a turn id."""

    def begin_step(
        self, batches: Sequence[TokenBatch], logprobs: Sequence[Tensor] | None, reduce: Reduce | None = None
    ) -> StepContext:
        """Count the step's denominators and take its statistic.

        `batches` are all micro-batches of this rank; `logprobs` their log-probs [T], read without gradient and
        only if `needs_step_pass`. With one micro-batch in the step those of its gradient pass serve, and no
        second forward is needed. `reduce` sums a tensor over ranks. Raises `ObjectiveError` on unusable log-probs, on a
        trajectory that lies in two segments, and on every rank if another rank has such input.
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
        if not tokens or not self.needs_step_pass:
            return StepContext(tokens, sequences)
        assert logprobs is not None, "needs_step_pass: begin_step takes the log-probs of every micro-batch"
        log_ratios = [self._log_ratios(lp.detach(), a)[1] for lp, a in zip(logprobs, active, strict=True)]
        return StepContext(tokens, sequences, self.clip.reference(log_ratios, active, reduce))

    def loss(self, logprobs: Tensor, batch: TokenBatch, step: StepContext) -> LossOutput:
        """The loss of one micro-batch, `logprobs` [T] being the policy's current ones, with gradient.

        S = min(r A, clip(r, 1 - eps_low, 1 + eps_high) A), loss = -S plus the KL, averaged with the step's
        denominators. Raises `ObjectiveError` on unusable log-probs and on an empty step.
        """
        if step.empty:
            raise ObjectiveError("empty_active_set", "no active token in the whole step; skip it (StepContext.empty)")
        if (problem := self._problem([batch], [logprobs])) is not None:
            raise problem
        tokens = batch.active
        log_ratio, clip_log_ratio = self._log_ratios(logprobs, tokens)
        radii = self.clip.radii(clip_log_ratio.detach(), tokens, step.reference)
        objective, clipped = clipped_objective(clip_log_ratio, tokens.advantages, radii)
        loss = -(objective * token_weights(tokens, step, self.config.aggregate)).sum()
        kl = torch.zeros_like(objective)
        if self.config.kl.coefficient:
            assert tokens.ref_logprobs is not None
            kl = low_var_kl(logprobs[tokens.index], tokens.ref_logprobs)
            weights = token_weights(tokens, step, self.config.kl.aggregate)
            loss = loss + self.config.kl.coefficient * (kl * weights).sum()
        return _output(loss, log_ratio, clip_log_ratio, objective, clipped, kl, radii, batch)

    def _log_ratios(self, logprobs: Tensor, tokens: ActiveTokens) -> tuple[Tensor, Tensor]:
        """d [A], and the log-ratio that is clipped [A]."""
        log_ratio = logprobs[tokens.index] - tokens.behavior_logprobs
        return log_ratio, level_log_ratio(log_ratio, tokens, self.config.ratio.level)

    def _problem(self, batches: Sequence[TokenBatch], logprobs: Sequence[Tensor] | None) -> ObjectiveError | None:
        """Why this rank's input cannot be used; kept back so that all ranks can raise together."""
        try:
            _check_whole(batches)
            for batch, values in zip(batches, logprobs or [], strict=logprobs is not None):
                batch.check_logprobs("logprobs", values)
            for batch in batches if self.needs_turns else []:
                batch.check_turns()
            if "ref_logprobs" in self.needs and any(b.ref_logprobs is None for b in batches):
                message = "the KL loss needs ref_logprobs; compute them or set objective.kl.coefficient to 0"
                raise ObjectiveError("missing_ref", message)
        except ObjectiveError as error:
            return error
        return None


def clipped_objective(log_ratio: Tensor, advantages: Tensor, radii: Radii) -> tuple[Tensor, Tensor]:
    """S = min(r A, clip(r) A) [A], and where the clip binds, bool [A].

    Written as a choice: a bound that binds is a constant, so e^d of a clipped token cannot overflow its gradient.
    """
    high, low = 1 + radii.high, 1 - radii.low
    ratio = log_ratio.detach().exp()
    over, under = (advantages > 0) & (ratio > high), (advantages < 0) & (ratio < low)
    clipped = over | under
    free = torch.where(clipped, torch.zeros_like(log_ratio), log_ratio).exp()
    return torch.where(over, high, torch.where(under, low, free)) * advantages, clipped


def token_weights(tokens: ActiveTokens, step: StepContext, aggregate: Aggregate) -> Tensor:
    """The weight of each active token in the step's average, [A]; over the whole step they sum to 1."""
    if aggregate == "token_mean":
        return torch.full_like(tokens.advantages, 1 / step.num_tokens)
    return 1 / (step.num_sequences * tokens.sequence_lengths.to(tokens.advantages))


def _check_whole(batches: Sequence[TokenBatch]) -> None:
    """An average over a response needs all of it in one segment."""
    ids = [i for batch in batches for i in batch.active.sequences.tolist()]
    if len(set(ids)) < len(ids):
        split = next(i for i in ids if ids.count(i) > 1)
        message = f"trajectory {split} lies in two segments of one optimizer step; pack each trajectory whole, once"
        raise ObjectiveError("split_trajectory", message)


def _output(
    loss: Tensor,
    log_ratio: Tensor,
    clip_log_ratio: Tensor,
    objective: Tensor,
    clipped: Tensor,
    kl: Tensor,
    radii: Radii,
    batch: TokenBatch,
) -> LossOutput:
    def spread(values: Tensor) -> Tensor:
        full = torch.zeros(len(batch), dtype=values.dtype, device=values.device)
        full[batch.active.index] = values.detach()
        return full

    advantages, ratio = batch.active.advantages, clip_log_ratio.detach().exp()
    inside_base = torch.where(advantages > 0, ratio < 1 + radii.base_high, ratio > 1 - radii.base_low)
    return LossOutput(
        loss=loss,
        log_ratio=spread(log_ratio),
        clip_log_ratio=spread(clip_log_ratio),
        ratio=spread(ratio),
        objective=spread(objective),
        eps_low=spread(radii.low),
        eps_high=spread(radii.high),
        factor=spread(torch.minimum(radii.factor_low, radii.factor_high)),
        gate=spread(radii.gate),
        clipped=spread(clipped),
        newly_clipped=spread(clipped & inside_base),
        kl=spread(kl),
        q=None if radii.q is None else spread(radii.q),
        base_radii=(radii.base_low, radii.base_high),
    )
