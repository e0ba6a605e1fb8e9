"""The one log-ratio that everything else is built from, and the levels it is read at."""

import torch
from torch import Tensor

from agent_rl.objective.config import Level
from agent_rl.objective.token_batch import ActiveTokens


def level_log_ratio(log_ratio: Tensor, tokens: ActiveTokens, level: Level) -> Tensor:
    """The log of the ratio that is gated and clipped, [A], from the token log-ratios d [A].

    token: d itself. sequence: the mean of d over the active tokens of the response, on each of them (GSPO, arXiv
    2507.18071, eq. 7). turn: the same within each turn of the response (ours).
    """
    if level == "token":
        return log_ratio
    groups = tokens.sequence
    if level == "turn":
        num_turns = int(tokens.turn_ids.max()) + 1 if len(tokens) else 1
        groups = groups * num_turns + tokens.turn_ids
    return _group_mean(log_ratio, groups)


def _group_mean(values: Tensor, groups: Tensor) -> Tensor:
    """The mean of `values` [A] over the tokens of the same group, on each of them."""
    distinct, group, sizes = torch.unique(groups, return_inverse=True, return_counts=True)
    zeros = torch.zeros(len(distinct), dtype=values.dtype, device=values.device)
    means: Tensor = zeros.index_add(0, group, values) / sizes
    return means[group]
