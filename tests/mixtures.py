"""Small random mixtures of experts with the quickstart's tokenizer."""

from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from agent_rl.config import model_directory

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
