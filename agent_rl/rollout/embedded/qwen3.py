"""Qwen3, dense or a mixture of experts, in float32 with few kernels.

Its Hugging Face modules spend half of a small step between their kernels.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from agent_rl.rollout.embedded.kv_cache import KVCache, Step
from agent_rl.rollout.embedded.mlp import FeedForward, feed_forward, fuse_rows


def supports(model: Any) -> bool:
    """Whether `model` is the plain form of Qwen3 that this file computes."""
    config = model.config
    plain = config.model_type in ("qwen3", "qwen3_moe") and config.hidden_act == "silu" and not config.attention_bias
    return plain and config.rope_parameters["rope_type"] == "default" and model.dtype == torch.float32


@dataclass(frozen=True)
class _Layer:
    attention_norm: Tensor
    qkv: Tensor
    qk_norm: Tensor
    output: Tensor
    mlp_norm: Tensor
    mlp: FeedForward


class Qwen3Forward:
    """Logits of a packed step, from the weights of a `Qwen3ForCausalLM` or `Qwen3MoeForCausalLM`.

    Fusing makes the model's own q, k, v, gate and up weights views of the fused ones, so there is one copy of
    them. Build a new one after the model's weights were changed.
    """

    def __init__(self, model: Any, cache: KVCache, max_tokens: int) -> None:
        config = model.config
        self._cache, self._eps = cache, config.rms_norm_eps
        self._heads, self._kv_heads, self._dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self._embedding, self._norm, self._head = (
            p.detach() for p in (model.model.embed_tokens.weight, model.model.norm.weight, model.lm_head.weight)
        )
        self._rotation = _rotation(model, max_tokens)
        self._layers = [self._fuse(layer) for layer in model.model.layers]

    def _fuse(self, layer: Any) -> _Layer:
        attention = layer.self_attn
        # The query norm's weight takes in the softmax scale.
        query_norm = attention.q_norm.weight.detach() * self._dim**-0.5
        key_norm = attention.k_norm.weight.detach()
        return _Layer(
            attention_norm=layer.input_layernorm.weight.detach(),
            qkv=fuse_rows(attention.q_proj, attention.k_proj, attention.v_proj),
            qk_norm=torch.cat([query_norm.expand(self._heads, -1), key_norm.expand(self._kv_heads, -1)]),
            output=attention.o_proj.weight.detach(),
            mlp_norm=layer.post_attention_layernorm.weight.detach(),
            mlp=feed_forward(layer.mlp),
        )

    def __call__(self, step: Step) -> Tensor:
        """Logits [R, V] at `step.keep`."""
        hidden = self._embedding[step.token_ids]
        rotation = self._rotation[step.positions]
        for index, layer in enumerate(self._layers):
            hidden = torch.addmm(hidden, self._attention(index, layer, step, hidden, rotation), layer.output.T)
            hidden = layer.mlp(hidden, self._rms(hidden) * layer.mlp_norm)
        return F.linear(self._rms(hidden[step.keep]) * self._norm, self._head)

    def _attention(self, index: int, layer: _Layer, step: Step, hidden: Tensor, rotation: Tensor) -> Tensor:
        heads, kv_heads, dim = self._heads, self._kv_heads, self._dim
        fused = F.linear(self._rms(hidden) * layer.attention_norm, layer.qkv).view(len(hidden), -1, dim)
        query_key = self._rotate(self._rms(fused[:, : heads + kv_heads]) * layer.qk_norm, rotation)
        query, key, value = query_key[:, :heads], query_key[:, heads:], fused[:, heads + kv_heads :]
        return self._cache.attend(index, step, query, key, value, 1.0).flatten(1)

    def _rms(self, x: Tensor) -> Tensor:
        norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # several times faster than a mean of squares
        return x * norm.square_().div_(x.shape[-1]).add_(self._eps).rsqrt_()

    @staticmethod
    def _rotate(x: Tensor, rotation: Tensor) -> Tensor:
        """Rotary embedding as a complex product. It interleaves the halves, in queries and keys alike."""
        first, second = x.chunk(2, -1)
        return torch.view_as_real(torch.complex(first, second) * rotation).flatten(-2)


def _rotation(model: Any, max_tokens: int) -> Tensor:
    """e^(i position frequency), complex64 [max_tokens, 1, dim / 2], by the model's own rotary module."""
    with torch.no_grad():
        cos, sin = model.model.rotary_emb(model.lm_head.weight, torch.arange(max_tokens)[None])
    half = cos.shape[-1] // 2
    return torch.complex(cos[0, :, None, :half].contiguous(), sin[0, :, None, :half].contiguous())
