"""The base of the training loops: waiting, evaluating, broadcasting weights, recording, checkpoints."""

import os
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError

from agent_rl.config import RunConfig
from agent_rl.data.sources.base import PromptSource
from agent_rl.pipeline.evaluation import EvaluationBeside, collect_evaluation, start_evaluation
from agent_rl.pipeline.figures import OnRow, metrics_row, seconds_figures, training_rows
from agent_rl.pipeline.pacing import Pacing
from agent_rl.pipeline.run_directory import RunDirectory
from agent_rl.pipeline.schedule import Schedule
from agent_rl.pipeline.state import EVALUATED_WEIGHTS, SERVED_WEIGHTS, RunState, policy_version_at
from agent_rl.pipeline.watchdog import Watchdog
from agent_rl.pipeline.workers import Call, WorkerPool
from agent_rl.records import Trajectory
from agent_rl.rollout.episode import EpisodeTask
from agent_rl.rollout.worker import RolloutResult
from agent_rl.tool_server import ToolServer
from agent_rl.weights.base import WeightChannel


class TrainerDiedError(Exception):
    """The trainer's process died. The optimizer's state since the last checkpoint is lost."""


@dataclass
class Stages:
    """The parts of a run, built by run.py. `trainer` is a Ray actor handle."""

    prompts: PromptSource
    eval_prompts: PromptSource
    workers: WorkerPool
    trainer: Any
    channel: WeightChannel
    tool_server: ToolServer
    updates_per_batch: int
    """Optimizer steps on each rollout batch."""
    eval_workers: WorkerPool | None = None
    """Workers that only evaluate, if `eval.workers` asks for some."""
    watchdog: Watchdog | None = None
    """Set while a watchdog looks at the run."""

    @property
    def pools(self) -> list[WorkerPool]:
        """The workers of training, then those of evaluation."""
        return [self.workers, *([self.eval_workers] if self.eval_workers else [])]

    @property
    def worker_handles(self) -> list[Any]:
        """The current Ray handles of all workers."""
        return [handle for pool in self.pools for handle in pool.handles]

    def check(self) -> None:
        """Restart the tool server if it has died. Raises `StalledError` if the watchdog wants to stop the run.

        Called every second while the run waits for workers or for the trainer.
        """
        self.tool_server.check()
        if self.watchdog is not None:
            self.watchdog.check()

    def policy_version(self, step: int) -> int:
        """The policy version of the weights of `step`."""
        return policy_version_at(step, self.updates_per_batch)

    def serve(self, step: int) -> None:
        """Let the engines of training load the weights of `step`, which the channel keeps."""
        self.workers.serve(lambda: self.channel.for_all(step), self.policy_version(step), self.channel.together)

    def close(self) -> None:
        for pool in self.pools:
            pool.close()
        self.channel.close()
        ray.kill(self.trainer)


class Controller(ABC):
    """A training loop from the state of `directory` to `num_steps`. Engines must serve what `plan` says for its step.

    A step trains on one rollout batch. The weights of a step are those that it begins with; the channel keeps them
    under the step's number. The policy version that records carry counts optimizer steps: see `Stages.policy_version`.
    """

    def __init__(
        self, config: RunConfig, plan: Schedule | Pacing, stages: Stages, directory: RunDirectory, on_row: OnRow
    ) -> None:
        self.config, self.plan, self.stages = config, plan, stages
        self.directory, self.on_row = directory, on_row
        self.dropped: list[dict[str, Any]] = []
        self.step = directory.state.step
        self.served = plan.served(self.step)
        """The step whose weights the engines serve."""
        self.kept = {self.served, self.step}
        """The steps whose weights the channel keeps."""
        self.next_prompt = max(directory.ledger.issued, default=-1) + 1
        self.stop_requested = False
        self.saving: tuple[Path, int] | None = None
        pool = stages.eval_workers
        self.beside = EvaluationBeside(config, stages.eval_prompts, pool) if pool else None

    @abstractmethod
    def run(self) -> None:
        """Consume prompts and produce policy versions until `num_steps`, or until a stop is requested."""

    @abstractmethod
    def in_flight(self) -> set[int]:
        """The issued groups that this loop holds, neither trained nor dropped."""

    @abstractmethod
    def save_state(self, checkpoint: Path) -> RunState:
        """The state of the run. Writes sampled groups that only this loop holds into the folder `checkpoint`."""

    def _group_tasks(self, group_id: int) -> list[EpisodeTask]:
        size = self.config.batch.group_size
        prompt = self.stages.prompts.prompt(group_id)
        return [EpisodeTask(prompt, group_id, group_id * size + sample, self.config.seed) for sample in range(size)]

    def _issue_groups(self, number: int) -> list[int]:
        """Take the next `number` prompts of the stream; returns their group ids."""
        first, self.next_prompt = self.next_prompt, self.next_prompt + number
        groups = list(range(first, self.next_prompt))
        self.directory.ledger.record("issued", self.step, groups)
        return groups

    def _drop(self, groups: dict[int, tuple[str, str]]) -> None:
        """Record groups as dropped. `groups`: (reason, message) of each."""
        for group_id, (reason, message) in groups.items():
            self.directory.ledger.record("dropped", self.step, [group_id], reason=reason, message=message)

    def _count_reissued(self, results: list[RolloutResult]) -> None:
        if reissued := sum(result.num_reissued for result in results):
            self.directory.ledger.record("reissued", self.step, [], count=reissued)

    def _check_ledger(self) -> None:
        """Assert that this loop holds the groups that are in flight in the ledger: none is lost silently."""
        lost = self.directory.ledger.in_flight ^ self.in_flight()
        assert not lost, f"groups {sorted(lost)} are lost or counted twice"

    def _start_training(self, batch: list[Trajectory]) -> Any:
        return self.stages.trainer.train.remote(batch, self.stages.policy_version(self.step))

    def _broadcast(self, step: int) -> dict[str, float]:
        """Publish the trainer's weights as those of `step`; if `plan` says so, engines load them. Returns seconds."""
        started = time.monotonic()
        self._wait_for_trainer(self.stages.channel.publish(step))
        self.kept.add(step)
        times = {"publish_s": time.monotonic() - started}
        if self.plan.served(step) == step:
            started = time.monotonic()
            self.stages.serve(step)
            self.served = step
            times["update_weights_s"] = time.monotonic() - started
        self._retire_unneeded()
        return times

    def _retire_unneeded(self) -> None:
        """Let the channel delete all weights but the newest, the served ones and those that are being evaluated."""
        needed = {max(self.kept), self.served, self.beside.step if self.beside else None}
        for step in self.kept - needed:
            self.stages.channel.retire(step)
        self.kept &= needed

    def _evaluation_is_due(self) -> bool:
        every = self.config.eval.every
        return bool(every) and (self.step % every == 0 or self.step == self.config.num_steps)

    def _evaluate_if_due(self) -> dict[str, Any]:
        """Evaluate the newest weights, even if engines serve older ones to training; returns figures.

        Workers that only evaluate just start here. The figures are then those of the evaluation before, if it was still
        under way. Without such workers the run waits for the evaluation.
        """
        if not self._evaluation_is_due():
            return {}
        if self.beside:
            figures = self._evaluated_beside(wait=True)
            self.beside.start(self.step, self.stages.channel.weights(self.step))
            return figures
        started = time.monotonic()
        if self.served != self.step:
            self.stages.serve(self.step)
        figures = self._collect_evaluation(self._start_evaluation())
        if self.served != self.step:
            self.stages.serve(self.served)
        return {**figures, "eval_s": time.monotonic() - started}

    def _evaluated_beside(self, wait: bool) -> dict[str, Any]:
        """Figures of the evaluation beside training; none if it is still under way and `wait` is false."""
        if self.beside is None or self.beside.step is None:
            return {}
        started = time.monotonic()
        while not self.beside.has_ended(timeout=1.0 if wait else 0.0):
            if not wait:
                return {}
            self.stages.check()
        step, results = self.beside.take()
        self._retire_unneeded()
        return {**self._write_evaluation(step, results), "eval_s": time.monotonic() - started}

    def resume_evaluation(self, checkpoint: Path) -> None:
        """Start the evaluation again that was under way beside training when `checkpoint` was written."""
        if (step := self.directory.state.evaluating) is None:
            return
        assert self.beside is not None, "run.py refuses to resume without workers for it"
        if step not in self.kept:
            self._wait_for_trainer(self.stages.channel.restore(step, checkpoint / EVALUATED_WEIGHTS))
            self.kept.add(step)
        self.beside.start(step, self.stages.channel.weights(step))

    def _start_evaluation(self) -> list[Call] | None:
        """Start the evaluation on the workers of training, if one is due."""
        if not self._evaluation_is_due():
            return None
        return start_evaluation(self.config, self.stages.eval_prompts, self.stages.workers)

    def _collect_evaluation(self, calls: list[Call] | None) -> dict[str, Any]:
        """Wait for the evaluation of this step's weights; write its rows. `eval_s`: seconds that the step waited."""
        if calls is None:
            return {}
        started = time.monotonic()
        figures = self._write_evaluation(self.step, self._results(calls))
        return {**figures, "eval_s": time.monotonic() - started}

    def _write_evaluation(self, step: int, results: list[RolloutResult]) -> dict[str, Any]:
        """Write the rows of an evaluation of the weights of `step`; returns its figures."""
        version = self.stages.policy_version(step)
        trajectories = [episode.trajectory for result in results for episode in result.episodes]
        sampled_at = {int(v) for t in trajectories for v in t.policy_versions[t.loss_mask]}
        assert sampled_at <= {version}, f"the evaluation of version {version} was sampled at {sorted(sampled_at)}"
        evaluation = collect_evaluation(self.config, version, results)
        self.directory.write_evaluation(step, evaluation.rows)
        return {"eval_step": step, **evaluation.figures}

    def _record(self, row: dict[str, Any], batch: list[Trajectory], result: Any, started: float) -> None:
        ledger = self.directory.ledger
        ledger.record("trained", self.step, sorted({trajectory.group_id for trajectory in batch}))
        self._check_ledger()
        if "eval_step" not in row:  # a line holds one evaluation; the next line takes the other
            row |= self._evaluated_beside(wait=False)
        rows, self.dropped = [*training_rows(self.step, batch, result), *self.dropped], []
        self.directory.write_training(self.step, rows, result.mismatch)
        wall_s = time.monotonic() - started
        row |= seconds_figures(row | result.metrics, wall_s, self.stages.workers.seconds(wall_s))
        row = metrics_row(self.step, self.stages.policy_version(self.step), row, batch, result, wall_s) | {
            f"groups/{fate}": count for fate, count in ledger.counts().items()
        }
        self.directory.write_metrics(row)
        self.on_row(row)

    def _checkpoint_if_due(self) -> None:
        self._commit_checkpoint()
        every, done = self.config.checkpoint.every, self.step == self.config.num_steps
        if done or self.stop_requested or (every and self.step % every == 0):
            self.save()

    def save(self) -> None:
        """Start a checkpoint of the newest weights, with the weights that are being served or evaluated.

        It is written while the next step runs. It counts only after `_commit_checkpoint` has given it its name.
        """
        self._check_ledger()
        temporary = self.directory.checkpoint(self.step).with_suffix(".tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        self._wait_for_trainer([self.stages.trainer.begin_save.remote(str(temporary))])
        self._wait_for_trainer(self.stages.channel.save(self.served, temporary / SERVED_WEIGHTS))
        evaluating = self.beside.step if self.beside else None
        if evaluating is not None:
            self._wait_for_trainer(self.stages.channel.save(evaluating, temporary / EVALUATED_WEIGHTS))
        self.save_state(temporary).model_copy(update={"evaluating": evaluating}).save(temporary)
        self.directory.ledger.sync()
        self.saving = temporary, self.step

    def _commit_checkpoint(self) -> None:
        """Wait for the checkpoint that is being written, if there is one, and give it its name.

        All of it is on the disk by then, so a checkpoint with its name can be resumed.
        """
        if self.saving is None:
            return
        (temporary, step), self.saving = self.saving, None
        self._wait_for_trainer([self.stages.trainer.finish_save.remote(str(temporary))])
        for path in temporary.rglob("*"):
            if path.is_file():
                _sync(path)
        keep = self.config.checkpoint
        evaluating = self.beside.step if self.beside else None
        self.directory.commit_checkpoint(temporary, step, keep.keep, keep.keep_best, evaluating)

    def _finish(self) -> None:
        """Write the last lines of metrics: of an evaluation that is still under way, and of the final weights."""
        for figures in (self._evaluate_if_due(), self._evaluated_beside(wait=True)):
            if figures:
                row = {"step": self.step, "policy_version": self.stages.policy_version(self.step), **figures}
                self.directory.write_metrics(row)
                self.on_row(row)

    def _wait_for_trainer(self, refs: list[Any]) -> list[Any]:
        """Wait for calls to the trainer; returns their results. Raises `TrainerDiedError` if it has died."""
        while refs and len(ray.wait(refs, num_returns=len(refs), timeout=1.0)[1]):
            self.stages.check()
        return trainer_results(refs)

    def _results(self, calls: list[Call]) -> list[RolloutResult]:
        return results_of(self.stages.workers, calls, self.stages.check)


def trainer_results(refs: list[Any]) -> list[Any]:
    """The results of calls to the trainer. Raises `TrainerDiedError` if it has died.

    If its constructor failed, Ray's error is raised instead: a new trainer would fail in the same way.
    """
    try:
        return list(ray.get(refs))
    except RayActorError as death:
        if getattr(getattr(death, "cause", death), "actor_init_failed", False):
            raise
        raise TrainerDiedError(str(death).strip().splitlines()[0]) from death


def results_of(workers: WorkerPool, calls: list[Call], check: Callable[[], None]) -> list[RolloutResult]:
    """The results of calls, in order. `check` is called every second meanwhile.

    Raises what a call raised at once, without waiting for the other calls.
    """
    results: dict[Call, RolloutResult] = {}
    while len(results) < len(calls):
        for call in workers.ended([call for call in calls if call not in results]):
            if (result := workers.result(call)) is not None:
                results[call] = result
        check()
    return [results[call] for call in calls]


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
