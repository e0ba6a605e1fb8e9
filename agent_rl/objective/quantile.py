"""The empirical quantile of SAT: an order statistic, never an interpolation, exact over ranks.

q = inf{x >= 0 : F_n(x) >= alpha} ("Stale but Stable", arXiv 2607.18722, eq. 3.2): the k-th smallest value with
the smallest k such that k / n >= alpha.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from agent_rl.objective.errors import ObjectiveError

ALPHA = 0.90
"""The paper's level: about a tenth of the tokens lie above q."""

Reduce = Callable[[Tensor], Tensor]
"""Sums a tensor over ranks. Every rank calls it the same number of times, also a rank without tokens."""

_BITS = {torch.float32: (torch.int32, 0x7F7FFFFF), torch.float64: (torch.int64, 0x7FEFFFFFFFFFFFFF)}


def rank_of(alpha: float, n: int) -> int:
    """The smallest k with k / n >= alpha. Raises `ObjectiveError` (bad_alpha) unless 0 < alpha <= 1."""
    if not 0 < alpha <= 1:
        raise ObjectiveError("bad_alpha", f"the quantile level must lie in (0, 1], got {alpha}")
    k = max(1, math.floor(alpha * n) - 1)
    while k / n < alpha:
        k += 1
    return k


def quantile(values: Tensor, alpha: float = ALPHA, reduce: Reduce | None = None) -> Tensor:
    """The quantile of `values` [n] >= 0, a 0-dim tensor of their dtype, of the union over ranks with `reduce`.

    Raises `ObjectiveError`: empty_active_set, nonfinite, bad_alpha.
    """
    (q,) = quantiles([values], alpha, reduce)
    if bool(torch.isnan(q)):
        raise ObjectiveError("empty_active_set", "there is no active token to take a quantile of; skip the step")
    return q


def quantiles(samples: Sequence[Tensor], alpha: float = ALPHA, reduce: Reduce | None = None) -> list[Tensor]:
    """The quantile of each sample, NaN for one that is empty on all ranks. All share the same collectives."""
    samples = [s.detach() for s in samples]
    counts = torch.tensor([*(len(s) for s in samples), sum(int((~s.isfinite()).sum()) for s in samples)])
    if reduce is not None:
        counts = reduce(counts.to(samples[0].device)).cpu()
    if counts[-1] > 0:
        raise ObjectiveError("nonfinite", "a quantile needs finite values; look for the first non-finite log-prob")
    ranks = [rank_of(alpha, int(n)) if n else 0 for n in counts[:-1]]
    if reduce is None:
        return [s.kthvalue(k).values if k else s.new_tensor(math.nan) for s, k in zip(samples, ranks, strict=True)]
    return kth_smallest(samples, ranks, reduce)


def kth_smallest(samples: Sequence[Tensor], ranks: Sequence[int], reduce: Reduce) -> list[Tensor]:
    """The `ranks[i]`-th smallest (1-based; 0 gives NaN) of sample i over all ranks, by bisection on bit patterns.

    Floats >= 0 are ordered as the integers of their bits, so 31 counts (63 in float64) settle each value exactly;
    one all-reduce of [len(samples)] a count, and the same bits on every rank.
    """
    integer, largest = _BITS[samples[0].dtype]
    patterns = [s.abs().contiguous().view(integer) for s in samples]
    wanted = torch.tensor(ranks, device=samples[0].device)
    low, high = torch.zeros_like(wanted), torch.full_like(wanted, largest)
    for _ in range(largest.bit_length()):
        middle = low + (high - low) // 2
        below = torch.stack([(p <= m).sum() for p, m in zip(patterns, middle.to(integer), strict=True)])
        enough = reduce(below) >= wanted
        low, high = torch.where(enough, low, middle + 1), torch.where(enough, middle, high)
    found = high.to(integer).view(samples[0].dtype)
    return list(torch.where(wanted > 0, found, torch.full_like(found, math.nan)))
