"""A Hugging Face Qwen3 over a mesh of ranks: FSDP2 over dp, tensor and expert parallelism over tp.

No two axes of the mesh shard one dimension of a parameter: what tp splits by rows, FSDP splits by columns. Shards are
then plain rectangles, which files and checkpoints of another layout can be read into.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import linear

from agent_rl.trainer.kept_head import Reduce, VocabularyShard
from agent_rl.trainer.shards import slices

EXPERTS = "expert_parallel"
"""The name of our experts' forward pass in transformers."""


def parallelize(model: Any, mesh: DeviceMesh, split_experts: bool) -> None:
    """Shard `model` in place over `mesh`, whose axes are dp and tp; its parameters become DTensors.

    Gradients are summed over dp, since the loss already has the denominators of the whole step.
    """
    if mesh["tp"].size() > 1:
        _split_over_tp(model, mesh["tp"], split_experts)
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh["dp"], reshard_after_forward=True, shard_placement_fn=_fsdp_placement)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no reduction that also divides


def _fsdp_placement(parameter: torch.nn.Parameter) -> Shard | None:
    taken = isinstance(parameter, DTensor) and parameter.placements == (Shard(0),)
    return Shard(1) if taken else None


def _split_over_tp(model: Any, mesh: DeviceMesh, split_experts: bool) -> None:
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    embedding = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    parallelize_module(model, mesh, {"model.embed_tokens": embedding})
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    else:
        _shard_rows(model.lm_head, "weight", mesh)
    model.token_head.shard = _vocabulary_shard(model.lm_head.weight, mesh)
    for layer in model.model.layers:
        parallelize_module(layer, mesh, _attention_plan())
        if not hasattr(layer.mlp, "experts"):
            parallelize_module(layer, mesh, _mlp_plan())
        elif split_experts:
            _split_experts(layer.mlp.experts, mesh)
    if split_experts:
        _register_experts()
        model.config._experts_implementation = EXPERTS


def _attention_plan() -> dict[str, ParallelStyle]:
    """Heads over tp. q_norm and k_norm see the heads of their rank alone, so their gradient is a sum over ranks:
    SequenceParallel, along the dimension of heads, says so."""
    columns, heads = ColwiseParallel(), SequenceParallel(sequence_dim=2, use_local_output=True)
    return {
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Replicate()},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        ),
        "self_attn.q_proj": columns,
        "self_attn.k_proj": columns,
        "self_attn.v_proj": columns,
        "self_attn.q_norm": heads,
        "self_attn.k_norm": heads,
        "self_attn.o_proj": RowwiseParallel(),
    }


def _mlp_plan() -> dict[str, ParallelStyle]:
    return {
        "mlp": PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),)),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(),
    }


def _split_experts(experts: Any, mesh: DeviceMesh) -> None:
    """Whole experts over the ranks of tp, which all have the same tokens: nothing is sent but the summed output."""
    experts.expert_mesh = mesh
    for name in ("gate_up_proj", "down_proj"):
        _shard_rows(experts, name, mesh)


def _shard_rows(module: torch.nn.Module, name: str, mesh: DeviceMesh) -> None:
    whole = getattr(module, name)
    sharded = distribute_tensor(whole.detach(), mesh, [Shard(0)])
    setattr(module, name, torch.nn.Parameter(sharded, requires_grad=whole.requires_grad))


def _vocabulary_shard(weight: Tensor, mesh: DeviceMesh) -> VocabularyShard:
    """The output layer's shard of the vocabulary, its rows; it gives log-probs, so no logits are ever gathered."""

    def reduced(operation: Any) -> Reduce:
        def reduce(tensor: Tensor) -> Tensor:
            total = tensor.detach().clone()
            dist.all_reduce(total, operation, group=mesh.get_group())
            return total

        return reduce

    return VocabularyShard(slices(weight)[0].start, reduced(dist.ReduceOp.SUM), reduced(dist.ReduceOp.MAX))


def _register_experts() -> None:
    from transformers.integrations.moe import ExpertsInterface  # heavy

    ExpertsInterface.register(EXPERTS, split_experts_forward)


def split_experts_forward(experts: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The experts of this rank on the tokens routed to them, summed over ranks.

    hidden [T, d], top_k_index and top_k_weights [T, k], the same on all ranks of tp → [T, d].
    """
    mesh: DeviceMesh = experts.expert_mesh
    hidden, top_k_weights = _shared(hidden, mesh), _shared(top_k_weights, mesh)
    gate_up, down = experts.gate_up_proj.to_local(), experts.down_proj.to_local()
    first = mesh.get_local_rank() * len(gate_up)
    output = torch.zeros_like(hidden)
    for expert in range(len(gate_up)):
        token, choice = torch.where(top_k_index == first + expert)
        gate, up = linear(hidden[token], gate_up[expert]).chunk(2, dim=-1)
        found = linear(experts.act_fn(gate) * up, down[expert]) * top_k_weights[token, choice, None]
        output = output.index_add(0, token, found)
    total: Tensor = DTensor.from_local(output, mesh, [Partial()], run_check=False).full_tensor()
    return total


def _shared(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """A tensor that all ranks share and each uses in part: unchanged forward, gradients summed backward."""
    whole = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    shared: Tensor = whole.to_local(grad_placements=[Partial()])
    return shared
