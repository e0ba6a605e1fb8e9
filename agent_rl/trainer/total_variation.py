"""The exact distance between two models at the states that were sampled from."""

from typing import Any

import torch
from torch import Tensor

from agent_rl.objective.token_batch import TokenBatch
from agent_rl.trainer.token_logprobs import active_logits, kept_log_softmax


@torch.no_grad()
def total_variation(behavior: Any, model: Any, batch: TokenBatch) -> Tensor:
    """D(behavior, model), float32 [A], at each token of `batch` that was sampled, A of them.

    The sum over tokens of (mu - pi)+, both at the sampling temperature and normalised over the recorded kept set: the
    sampled token's (1 - pi / mu)+ is an unbiased estimate of it.
    """
    active = batch.loss_mask.nonzero().squeeze(1)
    mu, pi = (active_logits(each, batch, active) for each in (behavior, model))
    full = (mu.softmax(-1) - pi.softmax(-1)).clamp(min=0).sum(-1)
    if batch.kept_offsets is None:
        return full
    rows, log_mu, _, _ = kept_log_softmax(mu, batch)
    log_pi = kept_log_softmax(pi, batch)[1]
    kept = torch.zeros_like(full).index_add(0, rows, (log_mu.exp() - log_pi.exp()).clamp(min=0))
    return torch.where(batch.kept_offsets.diff() > 0, kept, full)
