"""Held-out evaluation, through the same kind of workers, episodes and reward as training."""

from collections.abc import Sized
from dataclasses import dataclass
from typing import Any

from agent_rl import facts
from agent_rl.analysis.scores import per_problem
from agent_rl.config import RunConfig
from agent_rl.data.sources.base import PromptSource
from agent_rl.pipeline.state import policy_version_at
from agent_rl.pipeline.workers import Call, WorkerPool
from agent_rl.rollout.episode import EpisodeTask
from agent_rl.rollout.worker import RolloutResult
from agent_rl.verifier.normal import normalise
from agent_rl.weights.base import Weights


@dataclass(frozen=True)
class Evaluation:
    """`rows`: of `facts.EVALUATION`. `figures`: for metrics.jsonl."""

    rows: list[dict[str, Any]]
    figures: dict[str, Any]


def start_evaluation(config: RunConfig, prompts: PromptSource, workers: WorkerPool) -> list[Call]:
    """Start `eval.num_samples` episodes of each of the first `eval.num_prompts` prompts, in one call to each worker.

    The seeds are the same in every evaluation of a run, so the weights are the only difference between two of them.
    """
    samples = config.eval.num_samples
    size = len(prompts) if isinstance(prompts, Sized) else config.eval.num_prompts
    tasks = [
        EpisodeTask(prompt, index, index * samples + sample, config.seed, "eval", sampling=config.eval.sampling)
        for index in range(min(size, config.eval.num_prompts))
        for prompt in [prompts.prompt(index)]
        for sample in range(samples)
    ]
    return workers.deal(tasks)


def collect_evaluation(config: RunConfig, policy_version: int, results: list[RolloutResult]) -> Evaluation:
    """Rows and figures of an evaluation. `policy_version`: of its weights. `results`: of the workers.

    The figures are over the problems of which no episode failed; `eval_failed` counts the failed episodes.
    """
    samples = config.eval.num_samples
    episodes = [episode for result in results for episode in result.episodes]
    failed = [failure for result in results for failure in result.failed]
    rows = [
        facts.evaluation_row(policy_version, episode.trajectory.episode_id % samples, episode) for episode in episodes
    ]
    rows += [
        facts.failed_evaluation_row(
            policy_version, f.task.episode_id % samples, f.task.prompt, f"{f.kind}: {f.message}"
        )
        for f in failed
    ]
    for row in rows:
        if row.get("final_answer") is not None:
            row["final_answer"] = normalise(row["final_answer"])
    rows.sort(key=lambda row: (row["problem"], row["sample"]))
    means = {name: float(values.mean()) for name, values in per_problem(facts.evaluation_frame(rows)).items()}
    figures: dict[str, Any] = {
        "eval_policy_version": policy_version,
        "eval_avg": means[f"avg@{samples}"],
        "eval_pass": means.get(f"pass@{samples}", means[f"avg@{samples}"]),
        "eval_maj": means.get(f"maj@{samples}", means[f"avg@{samples}"]),
        "eval_turns": sum(len(episode.turns) for episode in episodes) / len(episodes),
        "eval_failed": float(len(failed)),
    }
    return Evaluation(rows, figures)


class EvaluationBeside:
    """Evaluates beside training, on workers of its own; one evaluation at a time.

    The channel must keep the weights until the evaluation has ended, since a restarted worker loads them again.
    """

    def __init__(self, config: RunConfig, prompts: PromptSource, workers: WorkerPool) -> None:
        self.config, self.prompts, self.workers = config, prompts, workers
        self.step: int | None = None
        """The step whose weights are being evaluated; None if no evaluation is under way."""
        self._calls: list[Call] = []
        self._results: dict[Call, RolloutResult] = {}

    def start(self, step: int, weights: Weights) -> None:
        """Load the weights of `step` into the workers and start to evaluate them. The result before must be taken."""
        assert self.step is None, f"the evaluation of step {self.step} is still under way"
        self.workers.serve(lambda: weights, policy_version_at(step, self.config.updates_per_batch))
        self.step, self._results = step, {}
        self._calls = start_evaluation(self.config, self.prompts, self.workers)

    def has_ended(self, timeout: float) -> bool:
        """Whether all episodes have ended. Waits up to `timeout` seconds for one to end. Raises what a call raised."""
        left = [call for call in self._calls if call not in self._results]
        for call in self.workers.ended(left, timeout=timeout) if left else []:
            if (result := self.workers.result(call)) is not None:
                self._results[call] = result
        return len(self._results) == len(self._calls)

    def take(self) -> tuple[int, list[RolloutResult]]:
        """The step whose weights were evaluated, and the results of the workers. Only after `has_ended`."""
        assert self.step is not None
        step, self.step = self.step, None
        return step, [self._results[call] for call in self._calls]
