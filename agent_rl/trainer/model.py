"""The causal LM that is trained: loading it, and its weights under Hugging Face names."""

from typing import Any

import torch
from torch import Tensor

from agent_rl.trainer import packed_attention
from agent_rl.trainer.routing_replay import RoutingReplay


def load_model(model_path: str) -> Any:
    """The causal LM of a directory in float32, without dropout, on packed attention, ready for routing replay."""
    from transformers import AutoModelForCausalLM  # heavy
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    packed_attention.register()
    model = AutoModelForCausalLM.from_pretrained(
        model_path, dtype=torch.float32, attn_implementation=packed_attention.NAME
    )
    model.routing_replay = RoutingReplay(model)
    return model.eval()  # no dropout: at lag 0 the ratio must be 1


def weights_of(model: Any) -> dict[str, Tensor]:
    """The state dict without the second names of tied weights, which safetensors refuses."""
    seen: set[int] = set()
    state = {}
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            state[name] = tensor.contiguous()
    return state


@torch.no_grad()
def copy_weights(weights: dict[str, Tensor], model: Any) -> None:
    """Copy what `weights_of` gave into a model of the same shape, in place."""
    for name, tensor in weights_of(model).items():
        tensor.copy_(weights[name])
