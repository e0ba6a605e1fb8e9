"""Which trajectory goes into which micro-batch of which rank: under a token limit, and balanced in cost."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Plan = list[list[list[int]]]
"""[num_microbatches][num_ranks] lists of indices; an empty list is a rank that has nothing and packs a dummy."""

_EXTRA, _GAIN = 3, 1.02
"""More micro-batches than are needed are tried, up to so many, and taken where they save more than 2 %."""


def plan_microbatches(lengths: Sequence[int], max_tokens: int, num_ranks: int = 1, quadratic: float = 0.0) -> Plan:
    """Indices of `lengths` as [num_microbatches][num_ranks], each at most `max_tokens` long and each index once.

    A sequence of L tokens costs L + quadratic * L^2. Ranks wait for each other at every micro-batch, so what is kept
    low is the sum over micro-batches of the costliest rank's cost. Costliest sequences first, so that memory runs
    out at once or not at all. Deterministic. Every length must fit by itself: `check_lengths` names one that does not.
    """
    assert max(lengths, default=0) <= max_tokens, "a sequence fits in no micro-batch"
    if not lengths:
        return []
    sizes = np.asarray(lengths, np.int64)
    costs = sizes + quadratic * sizes.astype(np.float64) ** 2
    least = -(-int(sizes.sum()) // (max_tokens * num_ranks))
    plans: list[Plan] = []
    for num_microbatches in range(least, least + len(lengths) + 1):
        plan = _fill_rounds(sizes, costs, max_tokens, num_microbatches, num_ranks)
        plans += [] if plan is None else [plan]
        if plans and num_microbatches >= least + _EXTRA:
            break
    lowest = min(step_cost(plan, costs) for plan in plans)
    return next(plan for plan in plans if step_cost(plan, costs) <= _GAIN * lowest)


def step_cost(plan: Plan, costs: NDArray[np.float64]) -> float:
    """The sum over micro-batches of the costliest rank's cost: `costs` [n] of the indices in `plan`."""
    return sum(max(float(costs[part].sum()) for part in parts) for parts in plan)


def attention_share(model: Any) -> float:
    """The `quadratic` of a causal LM: work on attention scores per token of length, over that on parameters.

    In multiply-adds a layer: causal scores and values of L tokens take L^2 * heads * head_dim, the parameters take
    their number a token, experts those that a token is sent to.
    """
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    parameters = 0.0
    for name, parameter in model.named_parameters():
        routed = ".experts." in name
        share = config.num_experts_per_tok / config.num_experts if routed and hasattr(config, "num_experts") else 1.0
        parameters += share * parameter.numel()
    return float(config.num_hidden_layers * config.num_attention_heads * head_dim / parameters)


def _fill_rounds(
    sizes: NDArray[np.int64], costs: NDArray[np.float64], max_tokens: int, num_rounds: int, num_ranks: int
) -> Plan | None:
    """Micro-batch after micro-batch, each with the costliest sequences that are left; None if some find no room.

    A micro-batch takes at least as long as its costliest sequence, so up to that cost the other ranks are filled too.
    """
    left = np.argsort(-costs, kind="stable").tolist()
    plan: Plan = []
    for rounds_left in range(num_rounds, 0, -1):
        if not left:
            break
        level = max(float(costs[left].sum()) / (rounds_left * num_ranks), float(costs[left[0]]))
        if rounds_left == 1:
            level = np.inf
        bins: list[list[int]] = [[] for _ in range(num_ranks)]
        spent, room, passed = np.zeros(num_ranks), np.full(num_ranks, max_tokens), []
        for index in left:
            fits = (room >= sizes[index]) & (spent + costs[index] <= level * (1 + 1e-9))
            chosen = int(np.where(fits, spent, np.inf).argmin())
            if not fits[chosen]:
                passed.append(index)
                continue
            bins[chosen].append(index)
            spent[chosen] += costs[index]
            room[chosen] -= sizes[index]
        plan.append([sorted(part) for part in bins])
        left = passed
    return None if left else plan
