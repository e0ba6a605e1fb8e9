"""Log-probs and entropies of sampled tokens, replayed as they were sampled. The shift by one is here."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from agent_rl.objective.token_batch import TokenBatch
from agent_rl.trainer.routing_replay import replay_routing


class TokenLogprobs(NamedTuple):
    """float32 [T] each, 0 on tokens that the policy did not sample; only `logprobs` has a gradient.

    off_support: the probability that the model gives to tokens outside the recorded kept set; None where no kept
    set is recorded, since there it is 0.
    """

    logprobs: Tensor
    entropies: Tensor
    off_support: Tensor | None


def token_logprobs(model: Any, batch: TokenBatch) -> TokenLogprobs:
    """Log-probs, entropies and mass off the kept set of a packed batch.

    Column t describes token t: its distribution is the output at t - 1. Logits are divided by the
    temperature that the token was sampled at and normalised over its recorded kept set.
    """
    active = batch.loss_mask.nonzero().squeeze(1)
    logits = active_logits(model, batch, active)
    full, entropies = _full_support(logits, batch.token_ids[active])
    logprobs = full
    off_support = None
    if batch.kept_ids is not None:
        logprobs, entropies = _kept_support(logits, batch, active, full, entropies)
        off_support = -torch.expm1((full - logprobs).detach()).clamp(max=0)  # log pi(y) - log pi(y | K) = log pi(K)
    zeros = torch.zeros(len(batch), dtype=logprobs.dtype)
    return TokenLogprobs(
        zeros.index_put((active,), logprobs),
        zeros.index_put((active,), entropies.detach()),
        None if off_support is None else zeros.index_put((active,), off_support),
    )


def active_logits(model: Any, batch: TokenBatch, active: Tensor) -> Tensor:
    """The logits, float32 [A, V], that the tokens at `active` [A] were sampled from, over their temperature.

    Experts are the recorded ones, where there are any.
    """
    replay_routing(model, batch.routed_experts)
    output = model(
        input_ids=batch.token_ids[None],
        position_ids=batch.position_ids[None],
        cu_seq_lens_q=batch.cu_seqlens,
        logits_to_keep=active - 1,
        use_cache=False,
    )
    logits: Tensor = output.logits[0].float() / batch.temperature[active, None]
    return logits


def _full_support(logits: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Over the whole vocabulary: logits [A, V], token_ids [A] → [A], [A]."""
    log_softmax = logits.log_softmax(dim=-1)
    with torch.no_grad():
        entropies = -(log_softmax.exp() * log_softmax).sum(dim=-1)
    return log_softmax.gather(1, token_ids[:, None]).squeeze(1), entropies


def _kept_support(
    logits: Tensor, batch: TokenBatch, active: Tensor, full_logprobs: Tensor, full_entropies: Tensor
) -> tuple[Tensor, Tensor]:
    """Over the recorded kept sets, gathered and never as a dense mask; rows without one stay as they are.

    A kept set of one gives exactly 0: its logit minus itself.
    """
    rows, log_kept, peak, log_mass = kept_log_softmax(logits, batch)
    has_set = peak > -torch.inf
    sampled = logits.gather(1, batch.token_ids[active][:, None]).squeeze(1)
    logprobs = torch.where(has_set, sampled - torch.where(has_set, peak, 0.0) - log_mass, full_logprobs)
    with torch.no_grad():
        entropies = torch.zeros(len(peak)).index_add(0, rows, -(log_kept.exp() * log_kept))
    return logprobs, torch.where(has_set, entropies, full_entropies)


def kept_log_softmax(logits: Tensor, batch: TokenBatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The recorded kept sets' log-probs: (row of each kept id [K], log-prob of each [K], peak [A], log mass [A]).

    A row's largest kept logit, -inf without a set, and the log of its mass relative to that.
    """
    assert batch.kept_ids is not None
    assert batch.kept_offsets is not None
    sizes = batch.kept_offsets.diff()
    rows = torch.arange(len(sizes)).repeat_interleave(sizes)
    kept = logits[rows, batch.kept_ids]
    peak = torch.full((len(sizes),), -torch.inf).scatter_reduce(0, rows, kept.detach(), "amax")
    shifted = kept - peak[rows]
    mass = torch.zeros(len(sizes)).index_add(0, rows, shifted.exp())
    log_mass = torch.where(sizes > 0, mass, 1.0).log()
    return rows, shifted - log_mass[rows], peak, log_mass
