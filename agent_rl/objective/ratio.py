"""The log-ratios that everything else is built from, and the levels they are read at."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from agent_rl.objective.config import Level, RatioConfig
from agent_rl.objective.token_batch import ActiveTokens


@dataclass(frozen=True, eq=False)
class Ratios:
    """Log-ratios of the A active tokens of a micro-batch, each float [A].

    logprobs: lp, log pi of the sampled token. token: d = lp - mu per token, whatever level is clipped. behavior: d
    at the configured level. clip: the log of the ratio that is clipped, at the configured level and denominator;
    it is `behavior` unless the denominator is proximal.
    """

    tokens: ActiveTokens
    logprobs: Tensor
    token: Tensor
    behavior: Tensor
    clip: Tensor

    @staticmethod
    def of(logprobs: Tensor, tokens: ActiveTokens, config: RatioConfig) -> "Ratios":
        """The ratios from the policy's log-probs [T] of the batch that `tokens` belongs to; the gradient is kept."""
        current = logprobs[tokens.index]
        token = current - tokens.behavior_logprobs
        behavior = clip = level_log_ratio(token, tokens, config.level, config.length)
        if config.denominator == "proximal":
            assert tokens.proximal_logprobs is not None
            clip = level_log_ratio(current - tokens.proximal_logprobs, tokens, config.level, config.length)
        return Ratios(tokens, current, token, behavior, clip)

    def detach(self) -> "Ratios":
        """The same values as constants."""
        return Ratios(
            self.tokens, self.logprobs.detach(), self.token.detach(), self.behavior.detach(), self.clip.detach()
        )

    def only(self, kept: Tensor) -> "Ratios":
        """The ratios, but 1 without gradient where `kept`, bool [A], is False: a term of weight 0 must not overflow."""
        zeros = torch.zeros_like(self.clip)
        logprobs, clip = torch.where(kept, self.logprobs, zeros), torch.where(kept, self.clip, zeros)
        return replace(self, logprobs=logprobs, clip=clip)


def level_log_ratio(log_ratio: Tensor, tokens: ActiveTokens, level: Level, length: float | None = None) -> Tensor:
    """The token log-ratios d [A] at a level, [A].

    token: d itself. sequence: the mean of d over the active tokens of the response, on each of them (GSPO, arXiv
    2507.18071, eq. 7), or with `length` the sum of d over that constant (ours). turn: the mean within each turn of
    the response (ours).
    """
    if level == "token":
        return log_ratio
    groups = tokens.sequence
    if length is not None:
        return _group_mean(log_ratio, groups) * (tokens.sequence_lengths.to(log_ratio) / length)
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
