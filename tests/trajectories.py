"""Hand-made trajectories for tests of what comes after the rollout."""

from dataclasses import replace

import numpy as np

from agent_rl.records import (
    Completion,
    FinishReason,
    SamplingMask,
    SamplingParams,
    StopReason,
    Trajectory,
    TrajectoryBuilder,
)

VOCABULARY = 105


def random_trajectory(
    rng: np.random.Generator,
    episode_id: int,
    group_size: int = 2,
    turns: int = 2,
    turn_tokens: int = 6,
    top_p: float = 1.0,
    version: int = 0,
    version_step: int = 0,
    experts: tuple[int, int, int] | None = None,
) -> Trajectory:
    """A prompt, `turns` sampled turns of up to `turn_tokens` tokens with forced ones between; 0 turns samples none.

    Turn k is sampled at policy version `version` + k * `version_step`. `experts`: (number, layers, k) of a random
    recorded routing; none is recorded without.
    """
    builder = TrajectoryBuilder()
    builder.append(rng.integers(0, VOCABULARY, int(rng.integers(1, 8))), -1)
    for turn in range(turns):
        ids = rng.integers(0, VOCABULARY, int(rng.integers(1, turn_tokens + 1))).astype(np.int32)
        sampled = completion(rng, ids, top_p < 1, version + turn * version_step)
        if experts:
            new_inputs = len(builder.token_ids) + len(ids) - 1 - builder.num_routed
            sampled = replace(sampled, routed_experts=random_routing(rng, new_inputs, experts))
        builder.append(ids, turn, sampled)
        builder.append(rng.integers(0, VOCABULARY, int(rng.integers(0, 4))), turn)
    return builder.build(
        group_id=episode_id // group_size,
        episode_id=episode_id,
        attempt=0,
        sampling_params=SamplingParams(temperature=0.7, top_p=top_p),
        reward=float(rng.integers(0, 2)),
        reward_parts={"outcome": 0.0},
        stop_reason=StopReason.ANSWER,
    )


def random_routing(rng: np.random.Generator, rows: int, experts: tuple[int, int, int]) -> np.ndarray:
    """Distinct experts, int16 [rows, layers, k], of `experts` = (number, layers, k)."""
    number, layers, k = experts
    return rng.random((rows, layers, number)).argsort(-1)[..., :k].astype(np.int16)


def completion(rng: np.random.Generator, ids: np.ndarray, cut: bool, version: int) -> Completion:
    """Log-probs near those of an uncertain model, and kept sets that hold the sampled token."""
    sets = [np.unique(np.append(rng.integers(0, VOCABULARY, 5), token)).astype(np.int32) for token in ids]
    return Completion(
        token_ids=ids,
        behavior_logprobs=(-rng.random(len(ids)) * 4 - 0.5).astype(np.float32),
        sampling_mask=SamplingMask.from_rows(sets) if cut else SamplingMask.full(len(ids)),
        policy_versions=np.full(len(ids), version, np.int32),
        finish_reason=FinishReason.STOP,
    )
