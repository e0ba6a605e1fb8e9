"""The feed-forward half of a Qwen3 layer, dense or a mixture of experts, from the weights of its module."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

FeedForward = Callable[[Tensor, Tensor], Tensor]
"""(residual [N, H], its normed form [N, H]) → residual + output."""


def feed_forward(mlp: Any) -> FeedForward:
    return _Experts(mlp) if hasattr(mlp, "experts") else _Dense(mlp)


class _Dense:
    def __init__(self, mlp: Any) -> None:
        self._gate_up = fuse_rows(mlp.gate_proj, mlp.up_proj)
        self._down = mlp.down_proj.weight.detach()

    def __call__(self, hidden: Tensor, normed: Tensor) -> Tensor:
        return torch.addmm(hidden, _activate(normed, self._gate_up), self._down.T)


class _Experts:
    """A layer's experts. The router is the model's own module, so that hooks on it see what it chose."""

    def __init__(self, mlp: Any) -> None:
        self._router = mlp.gate
        self._gate_up, self._down = (p.detach().unbind() for p in (mlp.experts.gate_up_proj, mlp.experts.down_proj))

    def __call__(self, hidden: Tensor, normed: Tensor) -> Tensor:
        """Tokens are sorted by expert, so that each expert that was chosen is two matrix products."""
        _, weights, experts = self._router(normed)
        flat = experts.flatten()
        order = flat.argsort(stable=True)
        rows = order // experts.shape[1]
        parts = torch.split(normed[rows], torch.bincount(flat, minlength=len(self._down)).tolist())
        work = zip(parts, self._gate_up, self._down, strict=True)
        outputs = torch.cat([F.linear(_activate(part, up), down) for part, up, down in work if len(part)])
        return hidden.index_add(0, rows, outputs * weights.flatten()[order, None])


def _activate(x: Tensor, gate_up: Tensor) -> Tensor:
    gate, up = F.linear(x, gate_up).chunk(2, -1)
    return F.silu(gate).mul_(up)


def fuse_rows(*projections: Any) -> Tensor:
    """One weight of several linear layers; their own become views of it."""
    fused = torch.cat([p.weight.detach() for p in projections])
    start = 0
    for projection in projections:
        stop = start + len(projection.weight)
        projection.weight.data, start = fused[start:stop], stop
    return fused
