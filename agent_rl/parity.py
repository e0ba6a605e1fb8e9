"""Whether engine and trainer, on the same weights, agree on log-probs; if not, which mistake explains it.

At lag 0 the two differ by rounding alone. Each alternative is a mistake that is made in practice: the engine's
log-probs are compared with what the trainer gives if it makes the same mistake.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from agent_rl.records import FloatArray, SamplingMask, SamplingParams, Trajectory

LogprobsOf = Callable[[Sequence[Trajectory]], list[FloatArray]]
"""The trainer's `logprobs`: float32 [L] a trajectory, NaN where nothing was sampled."""


@dataclass(frozen=True)
class Parity:
    """|trainer - engine| of sampled tokens. `rows`: one for all tokens (turn None), then one a turn, each with n, mean,
    p99 and max. `alternatives`: the mean if the trainer made that mistake too; those that change nothing are left out.
    """

    rows: list[dict[str, Any]]
    alternatives: dict[str, float]

    @property
    def mean(self) -> float:
        return float(self.rows[0]["mean"])

    @property
    def max(self) -> float:
        return float(self.rows[0]["max"])

    @property
    def better_fit(self) -> str | None:
        """The alternative that fits best, if one fits better than the right reading."""
        best = min(self.alternatives, key=lambda name: self.alternatives[name], default=None)
        return best if best is not None and self.alternatives[best] < self.mean else None


def measure(trajectories: Sequence[Trajectory], logprobs_of: LogprobsOf) -> Parity:
    """The parity of trajectories with the trainer that has the weights they were sampled with.

    Raises `ValueError` if no token was sampled.
    """
    logprobs = logprobs_of(trajectories)
    turns = np.concatenate([t.turn_ids[t.loss_mask] for t in trajectories])
    if not len(turns):
        raise ValueError("no token was sampled, so there is nothing to compare; sample more episodes")
    differences = _differences(trajectories, logprobs)
    rows = [_row(None, differences), *(_row(int(k), differences[turns == k]) for k in np.unique(turns))]
    return Parity(rows, _alternatives(trajectories, logprobs, logprobs_of))


def _alternatives(
    trajectories: Sequence[Trajectory], logprobs: list[FloatArray], logprobs_of: LogprobsOf
) -> dict[str, float]:
    means = {}
    for name, shift in (("shifted by +1", 1), ("shifted by -1", -1)):
        means[name] = float(_differences(trajectories, [_moved(v, shift) for v in logprobs]).mean())
    params = [t.sampling_params for t in trajectories]
    if any(p.temperature != 1 for p in params):
        unscaled = [replace(t, sampling_params=replace(t.sampling_params, temperature=1.0)) for t in trajectories]
        means["without temperature"] = float(_differences(trajectories, logprobs_of(unscaled)).mean())
    if any(p.cuts_support for p in params):
        whole = [_with_full_support(t) for t in trajectories]
        means["over the whole vocabulary"] = float(_differences(trajectories, logprobs_of(whole)).mean())
    if any(t.routed_experts is not None for t in trajectories):
        own = [replace(t, routed_experts=None) for t in trajectories]
        means["without routing replay"] = float(_differences(trajectories, logprobs_of(own)).mean())
    return means


def _with_full_support(trajectory: Trajectory) -> Trajectory:
    count = int(trajectory.loss_mask.sum())
    params = SamplingParams(trajectory.sampling_params.temperature)
    return replace(trajectory, sampling_mask=SamplingMask.full(count), sampling_params=params)


def _moved(values: FloatArray, shift: int) -> FloatArray:
    """Each log-prob of a trajectory as that of the sampled token `shift` places on."""
    moved, sampled = values.copy(), np.isfinite(values)
    moved[sampled] = np.roll(values[sampled], shift)
    return moved


def _differences(trajectories: Sequence[Trajectory], logprobs: list[FloatArray]) -> FloatArray:
    """|trainer - engine| of all sampled tokens, in order."""
    pairs = zip(trajectories, logprobs, strict=True)
    differences: FloatArray = np.concatenate([np.abs(v - t.behavior_logprobs)[t.loss_mask] for t, v in pairs])
    return differences


def _row(turn: int | None, differences: FloatArray) -> dict[str, Any]:
    return {
        "turn": turn,
        "n": len(differences),
        "mean": float(differences.mean()),
        "p99": float(np.quantile(differences, 0.99)),
        "max": float(differences.max()),
    }
