"""The figures of a step: rows for metrics.jsonl and for the training facts."""

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from agent_rl.records import Episode, Trajectory
from agent_rl.rollout.worker import RolloutResult
from agent_rl.trainer.base import TrainResult

OnRow = Callable[[dict[str, Any]], None]
"""Called with each row that is added to metrics.jsonl."""


def rollout_figures(episodes: list[Episode], rounds: list[list[RolloutResult]]) -> dict[str, Any]:
    """Figures of a rollout batch for metrics.jsonl, over all sampled episodes, also those that are not trained on.

    `rounds`: the results of each sampling round. The difference of `sampled_reward_mean` and `reward_mean` shows what
    dynamic sampling leaves out.
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
        **reward_figures([episode.trajectory for episode in episodes]),
    }


def reward_figures(trajectories: list[Trajectory]) -> dict[str, float]:
    """`reward/<part>`: mean of a reward part over the episodes that have it. `masked/<reason>`: number of episodes."""
    parts: dict[str, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        for name, value in trajectory.reward_parts.items():
            parts[name].append(value)
    masked = Counter(t.mask_reason for t in trajectories if t.mask_reason is not None)
    return {
        **{f"reward/{name}": float(np.mean(values)) for name, values in parts.items()},
        **{f"masked/{reason}": float(number) for reason, number in masked.items()},
    }


def training_rows(step: int, batch: list[Trajectory], result: TrainResult) -> list[dict[str, Any]]:
    """Rows of training facts for trained trajectories, in training order."""
    return [
        {
            "step": step,
            "episode_id": trajectory.episode_id,
            "group_id": trajectory.group_id,
            "order": order,
            "fate": "trained",
            "reason": None,
            "advantage": float(result.advantages[order]),
            "trained_at": result.trained_at[order],
            "logprobs": result.logprobs[order],
            "entropy": result.entropy[order],
            "ref_logprobs": result.ref_logprobs[order] if result.ref_logprobs else None,
            "proximal_logprobs": result.proximal_logprobs[order] if result.proximal_logprobs else None,
        }
        for order, trajectory in enumerate(batch)
    ]


def dropped_rows(step: int, trajectories: list[Trajectory], reasons: dict[int, str]) -> list[dict[str, Any]]:
    """Rows of training facts for finished episodes that are not trained on: in a dropped group, or masked."""
    return [
        {
            "step": step,
            "episode_id": trajectory.episode_id,
            "group_id": trajectory.group_id,
            "fate": "dropped" if trajectory.group_id in reasons else "masked",
            "reason": reasons.get(trajectory.group_id, trajectory.mask_reason),
        }
        for trajectory in trajectories
        if trajectory.group_id in reasons or trajectory.mask_reason is not None
    ]


def seconds_figures(row: dict[str, Any], wall_s: float, workers: list[dict[str, float] | None]) -> dict[str, float]:
    """`seconds/<worker>/<state>` and `seconds/trainer/<state>`: how `wall_s`, the seconds of a step, were spent.

    `row` has `train_s`, `publish_s` and `wait_s`, the seconds that the step waited for rollouts. The trainer's `queue`
    is the part of `wait_s` in which it neither trained nor published. `workers`: seconds by state of each worker; None
    for one that did not answer.
    """
    train, push = row.get("train_s", 0.0), row.get("publish_s", 0.0)
    queue = min(row.get("wait_s", 0.0), max(wall_s - train - push, 0.0))
    trainer = {"train": train, "push": push, "queue": queue, "idle": wall_s - train - push - queue}
    found = {f"worker_{place}": seconds for place, seconds in enumerate(workers) if seconds is not None}
    return {
        f"seconds/{who}/{state}": value
        for who, states in {**found, "trainer": trainer}.items()
        for state, value in states.items()
    }


def metrics_row(
    step: int, policy_version: int, row: dict[str, Any], batch: list[Trajectory], result: TrainResult, wall_s: float
) -> dict[str, Any]:
    """One line of metrics.jsonl. The lag of a token is the policy version of the update minus that of the token.

    `policy_version`: at the first update of the step. `trained_tokens` counts a token once for each update that used
    it. `tokens_per_s`: trained tokens per second of the step, without the seconds that it waited for an evaluation.
    """
    uses = zip(batch, result.trained_at, strict=True)
    lags = np.concatenate(
        [np.empty(0, np.int64), *(at - t.policy_versions[t.loss_mask] for t, ats in uses for at in ats)]
    )
    return {
        "step": step,
        "policy_version": policy_version,
        "reward_mean": float(np.mean([t.reward for t in batch])) if batch else None,
        "lag_mean": float(lags.mean()) if len(lags) else None,
        "lag_max": int(lags.max()) if len(lags) else None,
        "trained_tokens": len(lags),
        "tokens_per_s": len(lags) / (wall_s - row.get("eval_s", 0.0)),
        "wall_s": wall_s,
        **row,
        **result.metrics,
    }
