"""Trajectories to packed micro-batches under a token limit."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from agent_rl.objective.token_batch import TokenBatch
from agent_rl.records import FloatArray, SamplingMask, Trajectory


def check_lengths(trajectories: Sequence[Trajectory], max_tokens: int) -> None:
    """Raise `ValueError` naming the first trajectory that no micro-batch can hold."""
    for trajectory in trajectories:
        if len(trajectory) > max_tokens:
            raise ValueError(
                f"episode {trajectory.episode_id} has {len(trajectory)} tokens, but a micro-batch holds {max_tokens}; "
                "raise trainer.max_tokens_per_microbatch or lower rollout.max_episode_tokens"
            )


def pack(trajectories: Sequence[Trajectory], advantages: Sequence[float]) -> TokenBatch:
    """One micro-batch: the trajectories one after the other, a segment each, nothing padded.

    None at all give a dummy, for a rank that must join a pass and has nothing left: one token of no trajectory (its
    `trajectory_ids` is -1) that no loss counts.
    """
    if not trajectories:
        return _dummy()
    lengths = np.array([len(t) for t in trajectories], np.int64)
    replay = any(t.sampling_params.cuts_support for t in trajectories)
    mask = SamplingMask.concat([t.sampling_mask for t in trajectories]) if replay else None
    return TokenBatch(
        token_ids=_join([t.token_ids for t in trajectories], np.int64),
        position_ids=_join([np.arange(n) for n in lengths], np.int64),
        segment_ids=_spread(np.arange(len(lengths)), lengths),
        trajectory_ids=_spread(np.array([t.episode_id for t in trajectories], np.int64), lengths),
        loss_mask=_join([t.loss_mask for t in trajectories], np.bool_),
        turn_ids=_join([t.turn_ids for t in trajectories], np.int64),
        policy_versions=_join([t.policy_versions for t in trajectories], np.int64),
        behavior_logprobs=_join([t.behavior_logprobs for t in trajectories], np.float32),
        advantages=_spread(np.asarray(advantages, np.float32), lengths),
        temperature=_spread(np.array([t.sampling_params.temperature for t in trajectories], np.float32), lengths),
        cu_seqlens=torch.tensor(np.concatenate([[0], np.cumsum(lengths)]), dtype=torch.int32),
        kept_ids=torch.tensor(mask.token_ids, dtype=torch.int64) if mask is not None else None,
        kept_offsets=torch.tensor(mask.offsets, dtype=torch.int64) if mask is not None else None,
        routed_experts=_routing(trajectories),
    )


def _dummy() -> TokenBatch:
    zero, minus = torch.zeros(1, dtype=torch.int64), torch.full((1,), -1)
    return TokenBatch(
        token_ids=zero,
        position_ids=zero,
        segment_ids=zero,
        trajectory_ids=minus,
        loss_mask=torch.zeros(1, dtype=torch.bool),
        turn_ids=minus,
        policy_versions=minus,
        behavior_logprobs=torch.full((1,), torch.nan),
        advantages=torch.zeros(1),
        temperature=torch.ones(1),
        proximal_logprobs=torch.zeros(1),
        ref_logprobs=torch.zeros(1),
        cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
    )


def is_dummy(batch: TokenBatch) -> bool:
    """Whether `pack` made it of no trajectory."""
    return int(batch.trajectory_ids[0]) < 0


def _routing(trajectories: Sequence[Trajectory]) -> Tensor | None:
    """Recorded experts, int16 [T, layers, k], or None without any.

    Raises `ValueError` naming a trajectory that sampled tokens without recording, while others recorded.
    """
    shapes = {t.routed_experts.shape[1:] for t in trajectories if t.routed_experts is not None}
    if not shapes:
        return None
    missing = [t.episode_id for t in trajectories if t.routed_experts is None and t.loss_mask.any()]
    if missing or len(shapes) > 1:
        what = f"episode {missing[0]} has no recorded routing" if missing else f"routing of shapes {sorted(shapes)}"
        raise ValueError(f"{what} in one batch with episodes that have another; record all with one model and engine")
    nothing = next(iter(shapes))
    parts = [np.full((len(t), *nothing), -1) if t.routed_experts is None else t.routed_experts for t in trajectories]
    return _join(parts, np.int16)


def unpack(values: Tensor, batch: TokenBatch) -> list[FloatArray]:
    """Per-token values [T] as one float32 array a trajectory, NaN on tokens that the policy did not sample."""
    if is_dummy(batch):
        return []
    masked = torch.where(batch.loss_mask, values.detach().float(), torch.nan).numpy()
    return np.split(masked, batch.cu_seqlens[1:-1].numpy())


def with_column(batch: TokenBatch, part: Sequence[int], name: str, values: Sequence[FloatArray]) -> TokenBatch:
    """The micro-batch of the trajectories `part` with a field of their own `values`, float32 [L] a trajectory."""
    if not part:
        return batch
    return replace(batch, **{name: torch.from_numpy(np.concatenate([values[i] for i in part]))})


def by_index(
    plan: Sequence[Sequence[int]], batches: Sequence[TokenBatch], values: Sequence[Tensor]
) -> dict[int, FloatArray]:
    """Per-token values of the micro-batches of a rank as one array a trajectory, by the index that `plan` has."""
    found: dict[int, FloatArray] = {}
    for part, batch, tensor in zip(plan, batches, values, strict=True):
        found |= dict(zip(part, unpack(tensor, batch), strict=True))
    return found


def _join(arrays: Sequence[np.ndarray], dtype: type) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays).astype(dtype, copy=True))


def _spread(values: np.ndarray, lengths: np.ndarray) -> Tensor:
    return torch.from_numpy(np.repeat(values, lengths))
