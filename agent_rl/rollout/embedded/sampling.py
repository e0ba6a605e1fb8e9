"""Sampling of one token per row: temperature, top-k, top-p, and the log-prob of what was really sampled from."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agent_rl.records import FloatArray, IntArray, LongArray, SamplingParams

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Sampled:
    """R sampled tokens. `restricted` lists the rows that did not choose among all ids, `kept` their ascending ids."""

    token_ids: LongArray
    logprobs: FloatArray
    restricted: LongArray
    kept: list[IntArray]


class SamplingTable:
    """The sampling parameters of every slot as arrays, so that a step samples all rows at once."""

    def __init__(self, num_slots: int) -> None:
        self.temperature = np.ones(num_slots, np.float32)
        self.top_p = np.ones(num_slots, np.float32)
        self.top_k = np.zeros(num_slots, np.int64)
        self.stream = np.zeros(num_slots, np.uint64)
        self.restricted = np.zeros(num_slots, np.bool_)

    def set(self, slot: int, params: SamplingParams, vocab_size: int) -> None:
        """Store a slot's parameters: greedy as top-k 1, a top-p of 1 as infinity, so that rounding cuts nothing."""
        greedy = params.temperature == 0
        self.temperature[slot] = 1.0 if greedy else params.temperature
        self.top_p[slot] = np.inf if params.top_p == 1 else params.top_p
        self.top_k[slot] = 1 if greedy else (vocab_size if params.top_k == -1 else params.top_k)
        self.stream[slot] = _mix(np.array([params.seed & (2**64 - 1)], np.uint64))[0]
        self.restricted[slot] = params.cuts_support

    def sample(self, slots: LongArray, index: LongArray, logits: Tensor) -> Sampled:
        """Sample token number `index` [R] of the requests in `slots` [R] from `logits` [R, V].

        Raises `ValueError` if the model's logits are not finite.
        """
        scaled = logits.float() / torch.from_numpy(self.temperature[slots])[:, None]
        rows, kept = np.flatnonzero(self.restricted[slots]), []
        if len(rows):
            own = slots[rows]
            keep = kept_mask(scaled[rows], torch.from_numpy(self.top_p[own]), torch.from_numpy(self.top_k[own]))
            scaled[rows] = scaled[rows].masked_fill(~keep, float("-inf"))
            kept = _split_rows(keep)
        token_ids, logprobs = inverse_cdf(scaled, uniform(self.stream[slots], index))
        return Sampled(token_ids.numpy(), logprobs.numpy(), rows, kept)


def kept_mask(scaled: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """Which ids of `scaled` [R, V] (logits after temperature) may be sampled, bool [R, V].

    By descending probability, ties by ascending id, an id is kept while its rank is below `top_k` and the
    probability before it is at most `top_p`, both over the untruncated softmax: the rule of SGLang's
    sampler. The most probable id is always kept.
    """
    probs, order = torch.softmax(scaled, -1).sort(stable=True, dim=-1, descending=True)
    before = probs.cumsum(-1) - probs
    keep = (torch.arange(scaled.shape[-1]) < top_k[:, None]) & (before <= top_p[:, None])
    return torch.zeros_like(keep).scatter_(-1, order, keep)


def _split_rows(keep: Tensor) -> list[IntArray]:
    flat = keep.nonzero()[:, 1].numpy().astype(np.int32)
    return np.split(flat, np.cumsum(keep.sum(-1).numpy())[:-1])


def inverse_cdf(scaled: Tensor, draws: npt.NDArray[np.float64]) -> tuple[Tensor, Tensor]:
    """The id whose stretch of the cumulative distribution covers the draw, and its float32 log-prob."""
    logprobs = torch.log_softmax(scaled, -1)
    cdf = logprobs.exp().cumsum(-1, dtype=torch.float64)
    total = cdf[:, -1:]
    if not np.isfinite(total.numpy()).all():
        raise ValueError(
            "the model's logits are not finite: training has diverged; start again from a checkpoint, with a lower "
            "trainer.learning_rate or a trust region"
        )
    token_ids = torch.searchsorted(cdf, torch.from_numpy(draws)[:, None] * total, right=True)
    return token_ids[:, 0], logprobs.gather(-1, token_ids)[:, 0]


def uniform(stream: npt.NDArray[np.uint64], index: LongArray) -> npt.NDArray[np.float64]:
    """Draw number `index` of each stream, in [0, 1): a function of the two alone (splitmix64).

    52 bits, so that a draw times any total stays strictly below the total.
    """
    state = stream + (index.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    return np.asarray((_mix(state) >> np.uint64(12)) * 2.0**-52, np.float64)


def _mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014)."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
