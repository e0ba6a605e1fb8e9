"""Proximal log-probs: when they are computed, and how they get to the micro-batches and the active tokens."""

from dataclasses import replace

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from agent_rl.objective.token_batch import TokenBatch
from agent_rl.records import FloatArray, Trajectory
from agent_rl.settings import Settings


class ProximalConfig(Settings):
    """Proximal log-probs: the trainer's own, at the weights that a token was sampled with.

    They split the mismatch into policy lag and implementation. An objective that needs them gets them at
    every step for every token; these keys say when they are computed for the tables alone.
    """

    every: int = Field(0, ge=0)
    """Optimizer steps between computations; 0 is never, unless the objective needs them."""
    fraction: float = Field(1.0, gt=0, le=1)
    """Share of the trajectories of such a step, chosen evenly by episode id."""
    max_snapshots: int = Field(16, ge=1)
    """Policy versions whose weights are kept; must exceed the lag."""


def is_chosen(trajectory: Trajectory, fraction: float) -> bool:
    """Whether a trajectory is in an even choice of this share of all, by its episode id."""
    return int((trajectory.episode_id + 1) * fraction) > int(trajectory.episode_id * fraction)


def with_proximal(batch: TokenBatch, part: list[int], proximal: list[FloatArray | None] | None) -> TokenBatch:
    """The micro-batch of the trajectories `part` with their proximal log-probs, which are there for all."""
    assert proximal is not None
    if not part:
        return replace(batch, proximal_logprobs=torch.zeros(len(batch)))
    values = [p for i in part if (p := proximal[i]) is not None]
    return replace(batch, proximal_logprobs=torch.from_numpy(np.concatenate(values)))


def active_values(
    plan: list[list[int]], batches: list[TokenBatch], values: list[FloatArray | None] | None
) -> Tensor | None:
    """Per-trajectory values at the active tokens of the step, in micro-batch order; NaN where there is none."""
    if values is None:
        return None
    found = [torch.empty(0)]
    for part, batch in zip(plan, batches, strict=True):
        if not part:
            continue
        lengths = batch.cu_seqlens.diff().tolist()
        rows = [values[i] for i in part]
        whole = [np.full(n, np.nan, np.float32) if r is None else r for r, n in zip(rows, lengths, strict=True)]
        found.append(torch.from_numpy(np.concatenate(whole))[batch.active.index])
    return torch.cat(found)
