"""Attention for packed sequences: each segment attends to itself alone, exactly, at a cost of sum of squares."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

NAME = "packed_segments"


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    cu_seq_lens_q: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention within segments. query [1, H, T, d], key and value [1, H_kv, T, d] → [1, T, H, d]."""
    assert cu_seq_lens_q is not None, "packed attention needs cu_seq_lens_q"
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    lengths = cu_seq_lens_q.diff().tolist()
    segments = zip(*(torch.split(x, lengths, dim=2) for x in (query, key, value)), strict=True)
    outputs = [scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling) for q, k, v in segments]
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def register() -> None:
    """Make the attention known to transformers; the mask interface returns None so that no [T, T] mask is built."""
    from transformers import AttentionInterface  # heavy
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
