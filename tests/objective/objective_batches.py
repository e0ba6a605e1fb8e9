"""Random trajectories for the objective's tests, packed into token batches; and ranks that are threads."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from agent_rl.objective.token_batch import TokenBatch

GARBAGE = [np.nan, np.inf, -np.inf, 1e30, 0.5, -3.0]


@dataclass
class Row:
    """One trajectory of the tests, numpy [L] each; the loss mask may be all False."""

    trajectory_id: int
    mask: np.ndarray
    turns: np.ndarray
    lp: np.ndarray
    mu: np.ndarray
    ref: np.ndarray
    advantage: float
    sizes: np.ndarray
    prox: np.ndarray | None = None
    """Proximal log-probs; None stands for the behaviour ones."""


def random_rows(seed: int, count: int, spread: float = 0.3) -> list[Row]:
    """Rows of 0 to 12 tokens, some without an active token; |d| is heavy-tailed; garbage outside the mask."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(count):
        length = int(rng.integers(0, 13))
        mask = (rng.random(length) < 0.7) & (rng.random() < 0.85)
        mu = -rng.exponential(1.0, length)
        lp = np.minimum(mu + spread * rng.standard_t(3, length), -1e-6)
        ref = np.minimum(mu + rng.normal(0, 0.2, length), 0)
        prox = np.minimum(mu + rng.normal(0, 0.1, length), 0)
        for values in (lp, mu, ref, prox):
            values[~mask] = rng.choice(GARBAGE, int((~mask).sum()))
        sizes = rng.choice([0, 1, 2, 5], length)
        rows.append(Row(100 + i, mask, np.arange(length) // 4, lp, mu, ref, float(rng.normal()), sizes, prox))
    return rows


def pack(rows: Sequence[Row], dtype: torch.dtype = torch.float64, **changes: Any) -> tuple[TokenBatch, torch.Tensor]:
    """The batch of `rows`, and its log-probs [T]. Every token is 0, kept ids are 0 and up."""

    def joined(values: list[Any], kind: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(np.concatenate([np.zeros(0), *values]), dtype=kind)

    lengths = [len(r.mask) for r in rows]
    mask = joined([r.mask for r in rows], torch.bool)
    sizes = joined([r.sizes for r in rows], torch.int64)[mask]
    fields = {
        "token_ids": torch.zeros(len(mask), dtype=torch.int64),
        "position_ids": joined([np.arange(n) for n in lengths], torch.int64),
        "segment_ids": torch.arange(len(rows)).repeat_interleave(torch.tensor(lengths, dtype=torch.int64)),
        "trajectory_ids": joined([np.full(len(r.mask), r.trajectory_id) for r in rows], torch.int64),
        "loss_mask": mask,
        "turn_ids": joined([r.turns for r in rows], torch.int64),
        "policy_versions": joined([np.where(r.mask, 3, -1) for r in rows], torch.int64),
        "behavior_logprobs": joined([r.mu for r in rows], dtype),
        "advantages": joined([np.where(r.mask, r.advantage, np.nan) for r in rows], dtype),
        "temperature": torch.ones(len(mask), dtype=dtype),
        "cu_seqlens": torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
        "proximal_logprobs": joined([r.mu if r.prox is None else r.prox for r in rows], dtype),
        "ref_logprobs": joined([r.ref for r in rows], dtype),
        "kept_ids": torch.cat([torch.zeros(0, dtype=torch.int64), *(torch.arange(n) for n in sizes.tolist())]),
        "kept_offsets": torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)]),
    }
    return TokenBatch(**{**fields, **changes}), joined([r.lp for r in rows], dtype)


def on_ranks(count: int, work: Callable[[int, Callable[[torch.Tensor], torch.Tensor]], Any]) -> list[Any]:
    """Run `work(rank, reduce)` on `count` threads whose `reduce` sums over them; results or exceptions by rank."""
    barrier, contributions = threading.Barrier(count, timeout=120), [torch.empty(0)] * count
    results: list[Any] = [None] * count

    def run(rank: int) -> None:
        def reduce(tensor: torch.Tensor) -> torch.Tensor:
            contributions[rank] = tensor
            barrier.wait()
            total = torch.stack(contributions).sum(0)
            barrier.wait()
            return total

        try:
            results[rank] = work(rank, reduce)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
