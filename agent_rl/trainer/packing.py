"""Trajectories to packed micro-batches under a token limit."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from agent_rl.objective.token_batch import TokenBatch
from agent_rl.records import SamplingMask, Trajectory


def split(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices of items by micro-batch: first fit, longest first, so the order of equal lengths is kept.

    Deterministic in `lengths`. Every item must fit by itself: `check_lengths` says which does not.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        for position, left in enumerate(room):
            if lengths[index] <= left:
                bins[position].append(index)
                room[position] -= lengths[index]
                break
        else:
            bins.append([index])
            room.append(max_tokens - lengths[index])
    return bins


def plan_microbatches(lengths: Sequence[int], max_tokens: int, num_ranks: int) -> list[list[list[int]]]:
    """Indices of items as [num_microbatches][num_ranks]; an empty list is a rank that has nothing there.

    Items are dealt to the ranks longest first, and each rank's are split. Deterministic in `lengths`.
    """
    longest_first = sorted(range(len(lengths)), key=lambda i: -lengths[i]) if num_ranks > 1 else range(len(lengths))
    shares = [sorted(longest_first[rank::num_ranks]) for rank in range(num_ranks)]
    split_shares = [
        [[share[i] for i in part] for part in split([lengths[i] for i in share], max_tokens)] for share in shares
    ]
    rounds = max(map(len, split_shares), default=0)
    return [[parts[i] if i < len(parts) else [] for parts in split_shares] for i in range(rounds)]


def dummy() -> TokenBatch:
    """A micro-batch of one token that is not trained on, for a rank that has to take part in one but has nothing."""
    whole, real, zeros = torch.zeros(1, dtype=torch.int64), torch.zeros(1), torch.zeros(1, dtype=torch.bool)
    return TokenBatch(
        token_ids=whole,
        position_ids=whole,
        segment_ids=whole,
        trajectory_ids=whole - 1,
        loss_mask=zeros,
        turn_ids=whole - 1,
        policy_versions=whole - 1,
        behavior_logprobs=real,
        advantages=real,
        temperature=real + 1,
        cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
    )


def check_lengths(trajectories: Sequence[Trajectory], max_tokens: int) -> None:
    """Raise `ValueError` naming the first trajectory that no micro-batch can hold."""
    for trajectory in trajectories:
        if len(trajectory) > max_tokens:
            raise ValueError(
                f"episode {trajectory.episode_id} has {len(trajectory)} tokens, but a micro-batch holds {max_tokens}; "
                "raise trainer.max_tokens_per_microbatch or lower rollout.max_episode_tokens"
            )


def pack(trajectories: Sequence[Trajectory], advantages: Sequence[float]) -> TokenBatch:
    """One micro-batch: the trajectories one after the other, a segment each, nothing padded."""
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


def unpack(values: Tensor, batch: TokenBatch) -> list[np.ndarray[tuple[int], np.dtype[np.float32]]]:
    """Per-token values [T] as one float32 array a segment, NaN on tokens that the policy did not sample."""
    masked = torch.where(batch.loss_mask, values.detach().float(), torch.nan).numpy()
    return np.split(masked, batch.cu_seqlens[1:-1].numpy())


def _join(arrays: Sequence[np.ndarray], dtype: type) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays).astype(dtype, copy=True))


def _spread(values: np.ndarray, lengths: np.ndarray) -> Tensor:
    return torch.from_numpy(np.repeat(values, lengths))
