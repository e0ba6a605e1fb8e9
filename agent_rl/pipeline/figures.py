"""The figures of a step: rows for metrics.jsonl and for the training facts."""

from typing import Any

import numpy as np

from agent_rl.records import Episode, Trajectory
from agent_rl.rollout.worker import RolloutResult
from agent_rl.trainer.base import TrainResult


def rollout_figures(episodes: list[Episode], rounds: list[list[RolloutResult]]) -> dict[str, Any]:
    """Figures of one rollout batch for metrics.jsonl, over all that was sampled for it, trained on or not.

    `sampled_reward_mean` beside `reward_mean` shows what dynamic sampling leaves out.
    """
    reasons = [episode.trajectory.stop_reason.value for episode in episodes]
    sampled = sum(int(episode.trajectory.loss_mask.sum()) for episode in episodes)
    generate_s = sum(max(result.wall_s for result in results) for results in rounds)
    return {
        "generate_s": generate_s,
        "generated_tokens": sampled,
        "sampling_rounds": len(rounds),
        "sampled_reward_mean": float(np.mean([episode.trajectory.reward for episode in episodes])),
        **{f"stop/{reason}": reasons.count(reason) / len(reasons) for reason in sorted(set(reasons))},
    }


def training_rows(step: int, batch: list[Trajectory], result: TrainResult) -> list[dict[str, Any]]:
    """Rows of training facts: what the trainer computed for each trajectory, in training order."""
    return [
        {
            "step": step,
            "episode_id": trajectory.episode_id,
            "group_id": trajectory.group_id,
            "order": order,
            "fate": "trained",
            "reason": None,
            "advantage": float(result.advantages[order]),
            "logprobs": result.logprobs[order],
            "entropy": result.entropy[order],
            "ref_logprobs": result.ref_logprobs[order] if result.ref_logprobs else None,
            "proximal_logprobs": result.proximal_logprobs[order] if result.proximal_logprobs else None,
        }
        for order, trajectory in enumerate(batch)
    ]


def dropped_rows(step: int, episodes: list[Episode], reasons: dict[int, str]) -> list[dict[str, Any]]:
    """Rows of training facts for the finished episodes of groups that were dropped."""
    lost = [e.trajectory for e in episodes if e.trajectory.group_id in reasons]
    return [
        {
            "step": step,
            "episode_id": trajectory.episode_id,
            "group_id": trajectory.group_id,
            "fate": "dropped",
            "reason": reasons[trajectory.group_id],
        }
        for trajectory in lost
    ]


def metrics_row(
    step: int, row: dict[str, Any], batch: list[Trajectory], result: TrainResult, wall_s: float
) -> dict[str, Any]:
    """One line of metrics.jsonl. `lag` is the step's policy version minus the version of each sampled token.

    `tokens_per_s`: trained tokens per second of the step, the time that it waited for an evaluation left out.
    """
    versions = np.concatenate([t.policy_versions[t.loss_mask] for t in batch]) if batch else np.empty(0, np.int32)
    lags = step - versions
    return {
        "step": step,
        "policy_version": step,
        "reward_mean": float(np.mean([t.reward for t in batch])) if batch else None,
        "lag_mean": float(lags.mean()) if len(lags) else None,
        "lag_max": int(lags.max()) if len(lags) else None,
        "trained_tokens": len(versions),
        "tokens_per_s": len(versions) / (wall_s - row.get("eval_s", 0.0)),
        "wall_s": wall_s,
        **row,
        **result.metrics,
    }
