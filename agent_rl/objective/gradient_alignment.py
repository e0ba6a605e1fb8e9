"""GAC, gradient alignment: how much an optimizer step's gradient repeats the last one, and a limit on that.

It acts on the gradient of the step, not on the loss, and costs a copy of the gradient. The SAT paper (arXiv
2607.18722) names the method; its constants were not to be had, and this form of the limit is ours.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from agent_rl.objective.quantile import Reduce


class GradientAlignment:
    """Measures cos(g_t, g_{t-1}) of raw gradients and, with `max_cosine`, turns g_t until it is that at most."""

    def __init__(self, max_cosine: float | None = None) -> None:
        """`max_cosine` in (0, 1), or None to measure only. Raises `ValueError` otherwise."""
        if max_cosine is not None and not 0 < max_cosine < 1:
            raise ValueError(f"max_cosine must lie in (0, 1), got {max_cosine}; null measures without a limit")
        self.max_cosine = max_cosine
        self.previous: list[Tensor] | None = None

    def apply(
        self, gradients: Sequence[Tensor], reduce: Reduce | None = None, copies: Sequence[int] | None = None
    ) -> float:
        """The cosine to the last step's gradient; NaN in the first step and for a gradient that is 0 or not finite,
        after which the one before it is still the last.

        `gradients` are those of all parameters, before clipping, changed in place where the cosine exceeds the
        limit. `reduce` sums a tensor over the ranks that hold shards of them; `copies` says for each gradient how many
        of these ranks hold the same shard, 1 if it is left out.
        """
        (square,) = _sums([(gradients, gradients)], reduce, copies)
        if square == 0 or not math.isfinite(square):
            return math.nan
        last, self.previous = self.previous, [g.detach().clone() for g in gradients]
        if last is None:
            return math.nan
        cosine, projection = alignment(gradients, last, reduce, copies)
        if self.max_cosine is not None and cosine > self.max_cosine:
            limit_alignment(gradients, last, projection, self.max_cosine, reduce, copies)
        return cosine

    def state_dict(self) -> dict[str, Any]:
        """The last gradient."""
        return {"previous": self.previous}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.previous = state["previous"]


def alignment(
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    reduce: Reduce | None = None,
    copies: Sequence[int] | None = None,
) -> tuple[float, float]:
    """cos(first, second), NaN if either is 0, and the factor of `second` that is the projection of `first` on it."""
    dot, own, other = _sums([(first, second), (first, first), (second, second)], reduce, copies)
    if own == 0 or other == 0:
        return math.nan, math.nan
    return dot / math.sqrt(own * other), dot / other


def limit_alignment(
    gradients: Sequence[Tensor],
    last: Sequence[Tensor],
    projection: float,
    cosine: float,
    reduce: Reduce | None = None,
    copies: Sequence[int] | None = None,
) -> None:
    """Change g in place to g_perp + cosine / sqrt(1 - cosine^2) |g_perp| l / |l|, whose cosine to l is `cosine`.

    l is `last`, and g_perp = g - projection l the part of g orthogonal to it. A gradient parallel to the last one
    becomes 0.
    """
    for gradient, old in zip(gradients, last, strict=True):
        gradient.sub_(old, alpha=projection)
    rest, other = _sums([(gradients, gradients), (last, last)], reduce, copies)
    scale = cosine / math.sqrt(1 - cosine**2) * math.sqrt(rest / other)
    for gradient, old in zip(gradients, last, strict=True):
        gradient.add_(old, alpha=scale)


def _sums(
    pairs: Sequence[tuple[Sequence[Tensor], Sequence[Tensor]]], reduce: Reduce | None, copies: Sequence[int] | None
) -> list[float]:
    """The inner product of each pair of tensor lists, over all ranks, in float64; copies of a shard count once."""
    held = copies or [1] * len(pairs[0][0])
    local = [
        sum(float((a.double() * b.double()).sum()) / n for a, b, n in zip(x, y, held, strict=True)) for x, y in pairs
    ]
    if reduce is None:
        return local
    device = pairs[0][0][0].device if pairs[0][0] else None
    total: list[float] = reduce(torch.tensor(local, dtype=torch.float64, device=device)).tolist()
    return total
