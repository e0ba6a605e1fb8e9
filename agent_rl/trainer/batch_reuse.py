"""Several updates from one rollout batch: which trajectories each is on, and what they come to together."""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from agent_rl.objective.advantage import group_advantages
from agent_rl.objective.config import AdvantageConfig
from agent_rl.records import FloatArray, Trajectory

_SUMS = ("num_microbatches", "skipped_empty", "skipped_nonfinite")
_REPLACED = {"min_factor": min}


@dataclass(frozen=True)
class RolloutBatch:
    """Trajectories with what is computed once for all their updates: advantages [n], and float32 [L] a trajectory
    proximal (None where left out) and reference log-probs."""

    trajectories: Sequence[Trajectory]
    advantages: FloatArray
    proximal: list[FloatArray | None] | None
    reference: list[FloatArray] | None

    def select(self, part: Sequence[int]) -> "RolloutBatch":
        """The trajectories at the indices `part`."""
        return RolloutBatch(
            [self.trajectories[i] for i in part],
            self.advantages[list(part)],
            None if self.proximal is None else [self.proximal[i] for i in part],
            None if self.reference is None else [self.reference[i] for i in part],
        )

    def columns(self, needs: Collection[str]) -> dict[str, list[FloatArray]]:
        """The fields of `TokenBatch` that an objective needs, which are there for all."""
        found = {"ref_logprobs": self.reference, "proximal_logprobs": self.proximal}
        return {name: [v for v in values or [] if v is not None] for name, values in found.items() if name in needs}


@dataclass(frozen=True)
class Update:
    """One optimizer step: on which trajectories of the batch, at which version, and its figures, as `TrainResult`."""

    indices: list[int]
    policy_version: int
    logprobs: list[FloatArray]
    entropy: list[FloatArray]
    metrics: dict[str, float]
    mismatch: list[dict[str, Any]]


def advantages_of(trajectories: Sequence[Trajectory], config: AdvantageConfig) -> FloatArray:
    """The group advantage of each trajectory, float32 [n]; groups must be whole."""
    rewards = torch.tensor([t.reward for t in trajectories], dtype=torch.float32)
    outcomes = torch.tensor([t.outcome for t in trajectories], dtype=torch.float32)
    groups = torch.tensor([t.group_id for t in trajectories])
    found: FloatArray = group_advantages(rewards, groups, config, outcomes).numpy()
    return found


def minibatches(group_ids: Sequence[int], num_minibatches: int, num_epochs: int) -> list[list[int]]:
    """Indices of the trajectories of each update: whole groups, in the batch's order, the same in every epoch.

    Always num_minibatches * num_epochs lists, so that policy versions can be told beforehand; a batch that lost
    groups may leave some of them empty.
    """
    groups = list(dict.fromkeys(group_ids))
    owner = {group: part for part, own in enumerate(np.array_split(groups, num_minibatches)) for group in own.tolist()}
    parts: list[list[int]] = [[] for _ in range(num_minibatches)]
    for index, group in enumerate(group_ids):
        parts[owner[group]].append(index)
    return parts * num_epochs


def first_use(updates: Iterable[Update], column: str) -> list[FloatArray]:
    """`logprobs` or `entropy` of each trajectory at the update that used it first, in the batch's order."""
    found: dict[int, FloatArray] = {}
    for update in updates:
        found = dict(zip(update.indices, getattr(update, column), strict=True)) | found
    return [found[i] for i in sorted(found)]


def trained_at(updates: Iterable[Update]) -> list[list[int]]:
    """The policy versions at which each trajectory was used, in order."""
    found: dict[int, list[int]] = {}
    for update in updates:
        for index in update.indices:
            found.setdefault(index, []).append(update.policy_version)
    return [found[i] for i in sorted(found)]


def batch_metrics(updates: Sequence[Update]) -> dict[str, float]:
    """Means over the updates that have a figure, one that is not NaN; counts are added up. `num_updates`: how many
    there were."""
    names = dict.fromkeys(name for update in updates for name in update.metrics)
    found: dict[str, float] = {"num_updates": float(len(updates))}
    for name in names:
        all_values = [update.metrics[name] for update in updates if name in update.metrics]
        values = [value for value in all_values if not math.isnan(value)] or all_values
        combine = sum if name in _SUMS else _REPLACED.get(name, lambda v: sum(v) / len(v))
        found[name] = float(combine(values))
    return found


def mismatch_by_update(updates: Sequence[Update]) -> list[dict[str, Any]]:
    """The rows of all updates; `update` is h, the number of updates that the batch had seen before."""
    return [{**row, "update": h} for h, update in enumerate(updates) for row in update.mismatch]
