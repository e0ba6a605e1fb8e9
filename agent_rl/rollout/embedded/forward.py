"""The forward pass of one packed step through a Hugging Face causal LM."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agent_rl.rollout.embedded.kv_cache import KVCache, Step
from agent_rl.rollout.embedded.qwen3 import Qwen3Forward, supports

Forward = Callable[[Step], Tensor]
_ATTENTION = "agent_rl_slots"


def load_model(path: str, max_tokens: int) -> Any:
    """The causal LM in directory `path`, in float32 and eval mode. Raises `ValueError` if the engine cannot run it."""
    if not (Path(path) / "config.json").is_file():
        raise ValueError(f"{path!r} is not a model directory: it has no config.json; give a Hugging Face causal LM")
    from transformers import AttentionInterface, AutoModelForCausalLM  # heavy, and a config needs this file too
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    AttentionInterface.register(_ATTENTION, _slot_attention)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=_ATTENTION).eval()
    _check_context(model.config, max_tokens)
    return model


def _check_context(config: Any, max_tokens: int) -> None:
    positions = getattr(config, "max_position_embeddings", max_tokens)
    if max_tokens > positions:
        raise ValueError(f"max_sequence_tokens is {max_tokens}, but the model has {positions} positions; lower it")
    window = getattr(config, "sliding_window", None)
    if window is not None and max_tokens > window:
        raise ValueError(f"max_sequence_tokens must be at most the model's sliding window of {window}")
    unknown = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ValueError(f"the embedded engine has no cache for {', '.join(sorted(unknown))} layers; use SGLang")


def build_forward(model: Any, cache: KVCache, max_tokens: int) -> Forward:
    """The fastest forward pass there is for `model`; to be built anew when its weights changed."""
    return Qwen3Forward(model, cache, max_tokens) if supports(model) else module_forward(model, cache)


def module_forward(model: Any, cache: KVCache) -> Forward:
    """Any causal LM through its own modules: the packed step is one row, and attention finds its slots."""
    no_mask = torch.zeros(1, 1, 1, 1)  # a 4D mask is passed on as it is: nothing is built for it

    def forward(step: Step) -> Tensor:
        output = model(
            input_ids=step.token_ids[None],
            position_ids=step.positions[None],
            attention_mask=no_mask,
            use_cache=False,
            logits_to_keep=step.keep,
            slot_cache=cache,
            slot_step=step,
        )
        logits: Tensor = output.logits[0]
        return logits

    return forward


def _slot_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    slot_cache: KVCache | None = None,
    slot_step: Step | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention that the model's modules call: `query`, `key`, `value` are [1, heads, N, D]."""
    if softcap is not None or s_aux is not None:
        raise ValueError("the embedded engine has no attention with soft-capping or sinks; use SGLang")
    assert slot_cache is not None
    assert slot_step is not None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return slot_cache.attend(module.layer_idx, slot_step, q.contiguous(), k, v, scale)[None], None
