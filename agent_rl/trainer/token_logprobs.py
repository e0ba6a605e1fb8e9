"""Log-probs and entropies of sampled tokens, replayed as they were sampled. The shift by one is here."""

from typing import Any

import torch
from torch import Tensor

from agent_rl.objective.token_batch import TokenBatch
from agent_rl.trainer.routing_replay import replay_routing


def token_logprobs(model: Any, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """(log-probs, entropies), float32 [T] each, 0 on tokens that the policy did not sample.

    Column t describes token t: its distribution is the output at t - 1. Logits are divided by the
    temperature that the token was sampled at and normalised over its recorded kept set. Experts are the recorded
    ones, where there are any.
    """
    replay_routing(model, batch.routed_experts)
    active = batch.loss_mask.nonzero().squeeze(1)
    output = model(
        input_ids=batch.token_ids[None],
        position_ids=batch.position_ids[None],
        cu_seq_lens_q=batch.cu_seqlens,
        logits_to_keep=active - 1,
        use_cache=False,
    )
    logits = output.logits[0].float() / batch.temperature[active, None]
    logprobs, entropies = _full_support(logits, batch.token_ids[active])
    if batch.kept_ids is not None:
        logprobs, entropies = _kept_support(logits, batch, active, logprobs, entropies)
    zeros = torch.zeros(len(batch), dtype=logprobs.dtype)
    return zeros.index_put((active,), logprobs), zeros.index_put((active,), entropies.detach())


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
    assert batch.kept_ids is not None
    assert batch.kept_offsets is not None
    sizes = batch.kept_offsets.diff()
    rows = torch.arange(len(sizes)).repeat_interleave(sizes)
    kept = logits[rows, batch.kept_ids]
    peak = torch.full((len(sizes),), -torch.inf).scatter_reduce(0, rows, kept.detach(), "amax")
    shifted = kept - peak[rows]
    mass = torch.zeros(len(sizes)).index_add(0, rows, shifted.exp())
    has_set = sizes > 0
    log_mass = torch.where(has_set, mass, 1.0).log()
    sampled = logits.gather(1, batch.token_ids[active][:, None]).squeeze(1)
    logprobs = torch.where(has_set, sampled - torch.where(has_set, peak, 0.0) - log_mass, full_logprobs)
    with torch.no_grad():
        log_kept = shifted - log_mass[rows]
        entropies = torch.zeros(len(sizes)).index_add(0, rows, -(log_kept.exp() * log_kept))
    return logprobs, torch.where(has_set, entropies, full_entropies)
