"""The causal LM that is trained: loading it, and its weights under Hugging Face names."""

import os
from functools import partial
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from agent_rl.settings import Settings
from agent_rl.trainer import packed_attention
from agent_rl.trainer.parallel import parallelize
from agent_rl.trainer.ranks import Ranks
from agent_rl.trainer.routing_replay import RoutingReplay
from agent_rl.trainer.shards import local
from agent_rl.trainer.token_head import TokenHead


class ComputeConfig(Settings):
    """Precision, memory and device of the model's passes."""

    precision: Literal["float32", "bfloat16"] = "float32"
    """Precision of matrix products and attention. The weights, their gradients and the optimizer stay in float32, and
    so does everything from the last hidden state to the log-prob."""
    activation_checkpointing: bool = False
    """Keep only the input of each decoder layer and compute the rest again in the backward pass: less memory, about
    a third more work."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model and its optimizer are; the objective, a few numbers a token, is always on the CPU. `auto` is a
    GPU where the process sees one. A run's trainer sees those of `ray.trainer_gpus`."""
    head_budget_mb: int = Field(512, ge=1)
    """Memory for temporaries of the output layer, in MiB. Without top-p or top-k the layer computes the whole
    vocabulary for as many tokens at a time as fit into this. If all fit at once, the backward pass is cheaper."""


def device_of(compute: ComputeConfig) -> torch.device:
    """The device of this process: with several GPUs, that of its local rank. Raises `ValueError` if there is none."""
    if compute.device == "cpu" or not (num_gpus := torch.cuda.device_count()):
        if compute.device == "cuda":
            raise ValueError(
                "trainer.compute.device is cuda, but the trainer sees no GPU; set ray.trainer_gpus, or device to auto"
            )
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % num_gpus)


def load_model(model_path: str, compute: ComputeConfig | None = None, ranks: Ranks | None = None) -> Any:
    """The causal LM of a directory in float32, without dropout, on packed attention, ready for `token_logprobs`.

    With `ranks` of more than one process it is sharded over them.
    Raises `ValueError` if its log-probs cannot be had from hidden states and the output layer.
    """
    from transformers import AutoModelForCausalLM  # heavy
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    packed_attention.register()
    model = AutoModelForCausalLM.from_pretrained(
        model_path, dtype=torch.float32, attn_implementation=packed_attention.NAME
    )
    model.eval()  # no dropout: at lag 0 the ratio must be 1
    model.compute = compute or ComputeConfig()
    model.to(device_of(model.compute))
    model.token_head = TokenHead(model, model.compute.head_budget_mb << 20)
    model.routing_replay = RoutingReplay(model)
    if model.compute.activation_checkpointing:
        for layer in model.base_model.layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    if ranks is not None and ranks.mesh is not None:
        parallelize(model, ranks.mesh, split_experts=ranks.layout.ep > 1)
    return model


def weights_of(model: Any) -> dict[str, Tensor]:
    """The parameters by name, those that are tied once; of a sharded one, the shard of this rank as a DTensor."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@torch.no_grad()
def copy_weights(weights: dict[str, Tensor], model: Any) -> None:
    """Copy what `weights_of` gave into a model of the same shape and layout, in place."""
    for name, tensor in weights_of(model).items():
        local(tensor).copy_(local(weights[name]))
