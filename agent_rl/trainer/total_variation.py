"""The exact distance between two models at the states that were sampled from."""

from typing import Any

import torch
from torch import Tensor

from agent_rl.objective.token_batch import TokenBatch
from agent_rl.trainer.token_logprobs import active_logits


@torch.no_grad()
def total_variation(behavior: Any, model: Any, batch: TokenBatch) -> Tensor:
    """D(behavior, model), float32 [A], at each token of `batch` that was sampled, A of them.

    The sum over tokens of (mu - pi)+, both at the sampling temperature and normalised over the recorded kept set: the
    sampled token's (1 - pi / mu)+ is an unbiased estimate of it.
    """
    active = batch.loss_mask.nonzero().squeeze(1)
    mu, pi = (active_logits(each, batch, active) for each in (behavior, model))
    full = (mu.softmax(-1) - pi.softmax(-1)).clamp(min=0).sum(-1)
    if batch.kept_ids is None or batch.kept_offsets is None:
        return full
    sizes = batch.kept_offsets.diff()
    rows = torch.arange(len(sizes), device=sizes.device).repeat_interleave(sizes)
    p, q = (_kept_probabilities(logits[rows, batch.kept_ids], rows, len(sizes)) for logits in (mu, pi))
    kept = torch.zeros_like(full).index_add(0, rows, (p - q).clamp(min=0))
    return torch.where(sizes > 0, kept, full)


def _kept_probabilities(logits: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """Softmax within each row's kept set: logits and rows [K] → [K]."""
    peak = logits.new_full((num_rows,), -torch.inf).scatter_reduce(0, rows, logits, "amax")
    mass = (logits - peak[rows]).exp()
    return mass / logits.new_zeros(num_rows).index_add(0, rows, mass)[rows]
