"""Small random models of several shapes, and embedded engines on them."""

import asyncio
from pathlib import Path

import numpy as np
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from agent_rl.records import Completion, IntArray, SamplingParams
from agent_rl.rollout.engines.embedded import EmbeddedEngine
from tests.rollout.engine_conformance import Subject

CONTEXT = 160
SHAPE = {"vocab_size": 61, "hidden_size": 48, "num_hidden_layers": 2, "head_dim": 16, "initializer_range": 0.25}
GROUPED = {**SHAPE, "num_attention_heads": 4, "num_key_value_heads": 2}
ONE_KV_HEAD = {**SHAPE, "num_attention_heads": 3, "num_key_value_heads": 1}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**ONE_KV_HEAD, intermediate_size=64, tie_word_embeddings=True)),
    "qwen3_grouped": lambda: Qwen3ForCausalLM(Qwen3Config(**GROUPED, intermediate_size=64)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**GROUPED, intermediate_size=64)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**GROUPED, **EXPERTS, norm_topk_prob=True)),
    "qwen3_moe_mixed": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**GROUPED, **EXPERTS, norm_topk_prob=False, mlp_only_layers=[0], intermediate_size=64)
    ),
    "qwen3_moe_biased": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**GROUPED, **EXPERTS, attention_bias=True)),
}


def make_engine(path: str, slots: int = 8, **keys: int) -> EmbeddedEngine:
    config = EmbeddedEngine.Config(max_concurrent_sequences=slots, max_sequence_tokens=CONTEXT, **keys)
    return EmbeddedEngine(config, path)


def subject_of(path: str, **keys: int) -> Subject:
    other = str(Path(path) / "other.safetensors")
    return Subject(lambda: make_engine(path, **keys), path, other, CONTEXT, tolerance=2e-5)


def generate_all(engine: EmbeddedEngine, prompts: list[IntArray], params: list[SamplingParams]) -> list[Completion]:
    async def main() -> list[Completion]:
        calls = (engine.generate(i, p, s) for i, (p, s) in enumerate(zip(prompts, params, strict=True)))
        return await asyncio.gather(*calls)

    return asyncio.run(main())


def ids(*lengths: int, seed: int = 0) -> list[IntArray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 61, n).astype(np.int32) for n in lengths]
