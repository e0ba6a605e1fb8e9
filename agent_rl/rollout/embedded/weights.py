"""Loading a new policy version into a model in place."""

from math import prod
from typing import Any

import torch
from torch import Tensor

from agent_rl.weights.base import Weights
from agent_rl.weights.transfer.group import GroupMembership
from agent_rl.weights.transfer.names import expert_names


def check_weights(model: Any, weights: Weights) -> None:
    """Raises `ValueError` if the names or shapes are not the model's. A tied weight may have either of its names."""
    places, found = _places(model), weights.shapes()
    unknown = sorted(set(found) - set(places))
    missing = _missing(model, places, set(found))
    if missing or unknown:
        raise ValueError(f"{weights} is of another model: missing {missing[:3]}, unknown {unknown[:3]}")
    wrong = [name for name, shape in found.items() if shape != tuple(places[name].shape)]
    if wrong:
        expected = tuple(places[wrong[0]].shape)
        raise ValueError(f"{weights} has {wrong[0]} as {found[wrong[0]]}, the model has {expected}")


async def load_weights(model: Any, weights: Weights, membership: GroupMembership) -> None:
    """Copy weights that were checked into the model, some at a time."""
    places = _places(model)
    async for tensors in weights.tensors(membership):
        with torch.no_grad():
            for name, tensor in tensors.items():
                places[name].copy_(tensor)


def _places(model: Any) -> dict[str, Tensor]:
    """Where in the model a tensor goes, by the names that it may have: the model's, or those of Hugging Face's files,
    in which experts are not fused."""
    own: dict[str, Tensor] = model.state_dict()
    return own | {part: place for name, tensor in own.items() for part, place in experts(name, tensor).items()}


def _missing(model: Any, places: dict[str, Tensor], found: set[str]) -> list[str]:
    covered, missing = {places[name].data_ptr() for name in found if name in places}, []
    for name, tensor in model.state_dict().items():
        if name in found:
            continue
        if parts := experts(name, tensor):
            missing += [part for part in parts if part not in found]
        elif tensor.data_ptr() not in covered:
            missing.append(name)
    return sorted(missing)


def experts(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """The matrices of each expert in a fused tensor, as views; none in any other."""
    parts = expert_names(name, tuple(tensor.shape))
    pieces = torch.split(tensor.view(-1), [prod(shape) for _, shape in parts]) if parts else []
    return {part: piece.view(shape) for (part, shape), piece in zip(parts, pieces, strict=True)}
