"""The audit of the improvement bound: what a policy's distance from its rollouts costs, turn by turn.

docs/bound.md states and proves the bound. With r = pi / mu of a sampled token, the penalty is 2 xi times the sum over
turns of what is measured here; since no two policies are further apart than 2 xi, it says nothing once that sum
reaches 1. Read it relatively: which turn uses the budget, and how that changes.
"""

import math

import torch
from torch import Tensor

Row = dict[str, float | int]


def bound_table(
    log_ratio: Tensor, turn_ids: Tensor, episodes: Tensor, num_episodes: int, off_support: Tensor | None = None
) -> list[Row]:
    """One row a turn from 0 to the last, then one for all with `turn` -1.

    Over n sampled tokens: log_ratio, float [n], lp - mu; turn_ids and episodes, int64 [n], the latter below
    `num_episodes`, which counts episodes without a token too; off_support, float [n], the policy's mass off the kept
    set, in which case lp must be normalised over it.

    Every figure is a mean over all episodes of a sum over the tokens of the turn, 0 where the turn was not reached.
    tv: (1 - r)+, an unbiased estimate of the total variation D(mu, pi) on any support, in [0, 1] a token.
    off_support, where given. ratio_drift: r - 1, which is 0 in the mean if the log-probs are those that were sampled
    from. gspo_gap: n (1 - exp(mean of log_ratio)), over the turn, or over the response in the last row: what GSPO's
    surrogate with its length restored gives away. penalty_var: the variance over episodes (ddof 1, NaN for one) of
    tv + off_support. state_shift: tv + off_support of all turns before this one, a bound on how far the states that
    the turn begins in have moved. Also num_episodes.
    """
    num_turns = int(turn_ids.max()) + 1 if len(turn_ids) else 0
    cell = episodes * num_turns + turn_ids
    d = log_ratio.double()
    columns = [torch.ones_like(d), d, (-torch.expm1(d)).clamp(min=0), torch.expm1(d)]
    columns += [] if off_support is None else [off_support.double()]
    sums = torch.zeros(len(columns), num_episodes * num_turns, dtype=torch.float64, device=d.device)
    turns = sums.index_add(1, cell, torch.stack(columns)).view(len(columns), num_episodes, num_turns)
    rows: list[Row] = []
    shift = 0.0
    for turn in range(num_turns):
        rows.append({"turn": turn, **_figures(turns[:, :, turn]), "state_shift": shift})
        shift += rows[-1]["tv"] + rows[-1].get("off_support", 0.0)
    return [*rows, {"turn": -1, **_figures(turns.sum(2)), "state_shift": 0.0}]


def _figures(sums: Tensor) -> Row:
    """The figures of a turn from the sums of each column over its tokens, [columns, episodes]."""
    count, d, tv, drift, *off_support = sums
    penalty = torch.stack([tv, *off_support]).sum(0)
    gap = -count * torch.expm1(d / count.clamp(min=1))
    row: Row = {"num_episodes": len(count), "tv": float(tv.mean())}
    if off_support:
        row["off_support"] = float(off_support[0].mean())
    return row | {
        "penalty_var": float(penalty.var()) if len(count) > 1 else math.nan,
        "ratio_drift": float(drift.mean()),
        "gspo_gap": float(gap.mean()),
    }
