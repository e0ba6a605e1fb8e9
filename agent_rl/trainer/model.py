"""The causal LM that is trained: loading it, and its weights under Hugging Face names."""

from typing import Any

import torch
from torch import Tensor

from agent_rl.trainer import packed_attention
from agent_rl.trainer.parallel import parallelize
from agent_rl.trainer.ranks import Ranks
from agent_rl.trainer.routing_replay import RoutingReplay
from agent_rl.trainer.shards import local


def load_model(model_path: str, ranks: Ranks | None = None) -> Any:
    """The causal LM of a directory in float32, without dropout, on packed attention, ready for routing replay.

    With `ranks` of more than one process it is sharded over them.
    """
    from transformers import AutoModelForCausalLM  # heavy
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    packed_attention.register()
    model = AutoModelForCausalLM.from_pretrained(
        model_path, dtype=torch.float32, attn_implementation=packed_attention.NAME
    )
    model.routing_replay = RoutingReplay(model)
    if ranks is not None and ranks.mesh is not None:
        parallelize(model, ranks.mesh, split_experts=ranks.layout.ep > 1)
    return model.eval()  # no dropout: at lag 0 the ratio must be 1


def weights_of(model: Any) -> dict[str, Tensor]:
    """The parameters by name, those that are tied once; of a sharded one, the shard of this rank as a DTensor."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@torch.no_grad()
def copy_weights(weights: dict[str, Tensor], model: Any) -> None:
    """Copy what `weights_of` gave into a model of the same shape and layout, in place."""
    for name, tensor in weights_of(model).items():
        local(tensor).copy_(local(weights[name]))
