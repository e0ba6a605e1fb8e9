"""The mismatch quantile by turn: what |d| of a token is compared with when mismatch grows over the turns.

The paper leaves this open; the rules are ours. Every mode is relative to the batch: a uniform rescaling of d
rescales every reference, and gates the same tokens.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from agent_rl.objective.quantile import Reduce, quantiles
from agent_rl.settings import Settings


class TurnConfig(Settings):
    """How the quantile depends on the turn. Bucket k holds turn k, the last bucket all later turns too."""

    mode: Literal["local", "min", "anchor"]
    """`min`: the smaller of the bucket's and the pooled quantile, never looser than pooled SAT. `anchor`: turns
    from 1 on are held to the smaller of turn 0's and the pooled quantile, turn 0 to the pooled one. `local`: the
    bucket's own quantile, which loosens the turns whose mismatch is larger."""
    num_buckets: int = Field(8, ge=1)
    """K: turns K - 1 and later share a bucket."""
    min_tokens: int = Field(256, ge=1)
    """A bucket with fewer counted tokens falls back to the pooled quantile."""
    min_responses: int = Field(8, ge=1)
    """A bucket with tokens of fewer responses falls back to the pooled quantile."""
    shrinkage: float = Field(1024.0, ge=0)
    """A bucket of n tokens weighs n / (n + shrinkage) against the pooled quantile. At 0, a bucket whose own
    quantile is 0 gates nothing, in `min` mode too."""


@dataclass(frozen=True, eq=False)
class TurnReference:
    """The references of one step. q_pool is 0-dim; the rest is [K]: q, what bucket k is compared with; q_bucket,
    the raw quantile (NaN if empty); q_hat, shrunk towards q_pool; num_tokens; num_responses; fallback, bool."""

    q_pool: Tensor
    q: Tensor
    q_bucket: Tensor
    q_hat: Tensor
    num_tokens: Tensor
    num_responses: Tensor
    fallback: Tensor

    def at(self, turn_ids: Tensor) -> Tensor:
        """The reference of each token, [A], from its turn."""
        return self.q.to(turn_ids.device)[turn_ids.clamp(max=len(self.q) - 1)]

    def rows(self) -> list[dict[str, float | int | bool]]:
        """One row a bucket that has tokens: bucket, n, num_responses, q_bucket, q_hat, q, fallback."""
        names = ("q_bucket", "q_hat", "q", "fallback", "num_responses")
        columns = {"n": self.num_tokens.tolist()} | {name: getattr(self, name).tolist() for name in names}
        full = [k for k, n in enumerate(columns["n"]) if n]
        return [{"bucket": k} | {name: values[k] for name, values in columns.items()} for k in full]


def turn_reference(
    magnitudes: Tensor,
    turn_ids: Tensor,
    responses: Tensor,
    config: TurnConfig,
    alpha: float,
    reduce: Reduce | None = None,
) -> TurnReference:
    """The references from the n counted tokens of the step: |d|, turn and response (distinct ids >= 0), each [n].

    q_hat_k = w q_k + (1 - w) q_pool, w = n_k / (n_k + shrinkage), or q_pool where bucket k is too small. All
    references are 0, which gates nothing, where no token counts.
    """
    buckets = turn_ids.clamp(max=config.num_buckets - 1)
    pairs = torch.unique(responses * config.num_buckets + buckets) % config.num_buckets
    counts = torch.stack([torch.bincount(x, minlength=config.num_buckets) for x in (buckets, pairs)])
    num_tokens, num_responses = counts if reduce is None else reduce(counts)
    samples = [magnitudes, *(magnitudes[buckets == k] for k in range(config.num_buckets))]
    q_pool, *each = quantiles(samples, alpha, reduce)
    q_pool, q_bucket = q_pool.nan_to_num(nan=0.0), torch.stack(each)
    fallback = (num_tokens < config.min_tokens) | (num_responses < config.min_responses)
    n = num_tokens.to(q_pool)
    weight = n / (n + config.shrinkage)
    shrunk = weight * q_bucket + (1 - weight) * q_pool
    q_hat = torch.where(fallback, q_pool, shrunk)
    q = _by_mode(config.mode, q_hat, q_pool)
    return TurnReference(q_pool, q, q_bucket, q_hat, num_tokens, num_responses, fallback)


def _by_mode(mode: Literal["local", "min", "anchor"], q_hat: Tensor, q_pool: Tensor) -> Tensor:
    if mode == "local":
        return q_hat
    if mode == "min":
        return torch.minimum(q_hat, q_pool)
    anchored = torch.minimum(q_hat[0], q_pool).expand_as(q_hat).clone()
    anchored[0] = q_pool
    return anchored
