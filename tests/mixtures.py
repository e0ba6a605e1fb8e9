"""Small random mixtures of experts with the quickstart's tokenizer, and routing replay written down another way."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from agent_rl.config import model_directory
from agent_rl.routers import routers

EXPERTS = (6, 2, 3)
"""(experts, layers, experts a token) of `save_mixture`."""


def save_mixture(directory: Path, normalised: bool = True, seed: int = 0) -> str:
    """Write a random Qwen3-MoE whose routing is far from uniform; returns the directory."""
    tokenizer = AutoTokenizer.from_pretrained(model_directory("builtin:tiny-qwen3"))
    number, layers, k = EXPERTS
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=number,
        num_experts_per_tok=k,
        moe_intermediate_size=16,
        norm_topk_prob=normalised,
        max_position_embeddings=512,
        initializer_range=0.2,
        eos_token_id=tokenizer.eos_token_id,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


@contextmanager
def masked_routers(model: Any, membership: Tensor) -> Iterator[None]:
    """The formula of R3 over all experts, written down another way: membership bool [T, layers, E]."""
    before = {layer: router.forward for layer, router in routers(model).items()}

    def forward(layer: int) -> Any:
        def routed(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            router = routers(model)[layer]
            logits = hidden.reshape(-1, router.hidden_dim) @ router.weight.T
            mass = membership[:, layer] * (logits - logits.max(-1, keepdim=True).values).exp()
            gates = mass / mass.sum(-1, keepdim=True)
            return (
                logits,
                gates[membership[:, layer]].view(len(logits), -1),
                membership[:, layer].nonzero()[:, 1].view(len(logits), -1),
            )

        return routed

    for layer, router in routers(model).items():
        router.forward = forward(layer)
    yield
    for layer, router in routers(model).items():
        router.forward = before[layer]
