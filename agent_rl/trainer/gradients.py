"""The gradient of a step over all ranks: its alignment with the last one, its norm and its limit."""

from collections.abc import Sequence

import torch
from torch import Tensor

from agent_rl.objective.gradient_alignment import GradientAlignment
from agent_rl.trainer.ranks import Ranks
from agent_rl.trainer.shards import local


def align(parameters: Sequence[torch.nn.Parameter], alignment: GradientAlignment, ranks: Ranks) -> float:
    """The cosine of the gradient to the last step's, which it is turned away from if `alignment` has a limit."""
    copies = [ranks.copies(p) for p in parameters]
    return alignment.apply([gradient(p) for p in parameters], ranks.reduce_shards, copies)


@torch.no_grad()
def clip_gradients(parameters: Sequence[torch.nn.Parameter], max_norm: float, ranks: Ranks) -> float:
    """Scale the gradients down to the global norm `max_norm`, in place; returns the norm before, over all ranks."""
    if ranks.reduce_shards is None:
        return float(torch.nn.utils.clip_grad_norm_(parameters, max_norm))
    gradients = [gradient(p) for p in parameters]
    squares = [g.double().square().sum() / ranks.copies(p) for g, p in zip(gradients, parameters, strict=True)]
    norm = float(ranks.reduce_shards(torch.stack(squares).sum()).sqrt())
    scale = min(max_norm / (norm + 1e-6), 1.0)
    for each in gradients:
        each.mul_(scale)
    return norm


def gradient(parameter: torch.nn.Parameter) -> Tensor:
    """This rank's shard of a parameter's gradient, zeros where nothing reached the parameter."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return local(parameter.grad)


def by_mesh(parameters: Sequence[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
    """Parameters that one fused update can take together: those that lie on the same mesh."""
    found: dict[object, list[torch.nn.Parameter]] = {}
    for parameter in parameters:
        found.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return list(found.values())
