"""Held-out evaluation through the same workers, episodes and scorer as training."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from agent_rl.config import RunConfig
from agent_rl.data.sources.base import PromptSource
from agent_rl.objective.diagnostics import avg_at_k, pass_at_k
from agent_rl.rollout.episode import EpisodeTask
from agent_rl.rollout.worker import RolloutResult, split_tasks

Wait = Callable[[list[Any]], list[Any]]


def evaluate(config: RunConfig, prompts: PromptSource, workers: list[Any], wait: Wait) -> dict[str, float]:
    """avg@k and pass@k on the outcome over `eval.num_prompts` prompts, k = `eval.num_samples`.

    The seeds are the same at every evaluation of a run, so two versions differ by their weights alone.
    Prompts with an episode that the infrastructure broke are left out; such episodes are counted in `eval_failed`.
    """
    samples = config.eval.num_samples
    tasks = [
        EpisodeTask(prompts.prompt(index), index, index * samples + sample, config.seed, purpose="eval")
        for index in range(config.eval.num_prompts)
        for sample in range(samples)
    ]
    results: list[RolloutResult] = wait(split_tasks(workers, tasks))
    episodes = [episode for result in results for episode in result.episodes]
    outcomes: dict[int, list[float]] = defaultdict(list)
    for episode in episodes:
        outcomes[episode.trajectory.group_id].append(episode.trajectory.reward_parts["outcome"])
    complete = [scores for scores in outcomes.values() if len(scores) == samples]
    if not complete:
        raise ValueError("no evaluation prompt could be run: the tool server failed under all of them")
    correct = torch.tensor(complete)
    return {
        "eval_avg": avg_at_k(correct) / 100,
        "eval_pass": pass_at_k(correct, samples) / 100,
        "eval_turns": sum(len(episode.turns) for episode in episodes) / len(episodes),
        "eval_failed": float(sum(len(result.failed) for result in results)),
    }
