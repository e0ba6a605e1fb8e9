"""Attention for packed sequences: each segment attends to itself alone, exactly, at a cost of sum of squares."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
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
    """Causal attention within segments. query [1, H, T, d], key and value [1, H_kv, T, d] → [1, T, H, d].

    In half precision on a GPU one call of torch's variable-length FlashAttention; otherwise a fused call a segment.
    """
    assert cu_seq_lens_q is not None, "packed attention needs cu_seq_lens_q"
    if torch.is_autocast_enabled(query.device.type):  # norms of queries and keys leave autocast's precision
        query, key, value = (x.to(torch.get_autocast_dtype(query.device.type)) for x in (query, key, value))
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        longest = int(cu_seq_lens_q.diff().max())
        return variable_length_attention(query, key, value, cu_seq_lens_q, longest, scaling), None
    return segment_attention(query, key, value, cu_seq_lens_q, scaling), None


def segment_attention(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, scale: float | None) -> Tensor:
    """`packed_attention` with one call of `scaled_dot_product_attention` for each segment."""
    grouped = query.shape[1] != key.shape[1]
    if grouped and query.is_cuda:  # its memory-efficient kernel, the only one for float32, wants a key a head
        repeats = query.shape[1] // key.shape[1]
        key, value, grouped = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1), False
    segments = zip(*(torch.split(x, cu_seqlens.diff().tolist(), dim=2) for x in (query, key, value)), strict=True)
    outputs = [
        scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped) for q, k, v in segments
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2)


def variable_length_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, longest: int, scale: float | None
) -> Tensor:
    """`packed_attention` with one kernel for all segments, the longest of `longest`; CUDA, bfloat16 or float16."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    grouped = query.shape[1] != key.shape[1]
    causal = (-1, 0)
    found = varlen_attn(
        q, k, v, cu_seqlens, cu_seqlens, longest, longest, scale=scale, window_size=causal, enable_gqa=grouped
    )
    assert isinstance(found, Tensor)
    return found[None]


def register() -> None:
    """Make the attention known to transformers; the mask interface returns None so that no [T, T] mask is built."""
    from transformers import AttentionInterface  # heavy
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
