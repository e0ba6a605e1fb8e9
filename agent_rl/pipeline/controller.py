"""What every training loop shares: waiting, evaluating, broadcasting weights, recording, checkpoints."""

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
from agent_rl.pipeline.figures import metrics_row, seconds_figures, training_rows
from agent_rl.pipeline.run_directory import RunDirectory
from agent_rl.pipeline.state import EVALUATED_WEIGHTS, SERVED_WEIGHTS, RunState
from agent_rl.pipeline.workers import Call, WorkerPool
from agent_rl.records import Trajectory
from agent_rl.rollout.episode import EpisodeTask
from agent_rl.rollout.worker import RolloutResult
from agent_rl.weights.base import WeightChannel

OnRow = Callable[[dict[str, Any]], None]


class TrainerDiedError(Exception):
    """The trainer's process is gone, and with it the optimizer's state since the last checkpoint."""


@dataclass
class Stages:
    """The parts that a run is made of, built by run.py. `trainer` is a Ray actor handle."""

    prompts: PromptSource
    eval_prompts: PromptSource
    workers: WorkerPool
    trainer: Any
    channel: WeightChannel
    check_tool_server: Callable[[], None]
    """Called while the loop waits: restarts a tool server that the run owns and that has died."""
    eval_workers: WorkerPool | None = None
    """Workers of `eval.workers`, for evaluation alone."""

    @property
    def pools(self) -> list[WorkerPool]:
        return [self.workers, *([self.eval_workers] if self.eval_workers else [])]

    @property
    def worker_handles(self) -> list[Any]:
        """Ray handles of all workers, as they are now."""
        return [handle for pool in self.pools for handle in pool.handles]

    def serve(self, version: int, updates: int) -> None:
        """Let all engines serve a version that the channel keeps; `updates`: policy versions a version."""
        self.workers.serve(lambda: self.channel.for_all(version), version * updates, self.channel.together)

    def close(self) -> None:
        for pool in self.pools:
            pool.close()
        self.channel.close()
        ray.kill(self.trainer)


class Controller(ABC):
    """A training loop from where `directory` stands to `num_steps`; `served` is the version that engines have.

    Versions are counted in steps here: one a batch. Policy versions, as records carry them, count optimizer steps,
    `updates` a batch; they are made where they leave the controller.
    """

    def __init__(self, config: RunConfig, stages: Stages, directory: RunDirectory, on_row: OnRow, served: int) -> None:
        self.config, self.stages = config, stages
        self.updates = config.updates_per_batch
        self.directory, self.on_row = directory, on_row
        self.dropped: list[dict[str, Any]] = []
        self.step = directory.state.step
        self.served = served
        self.next_prompt = max(directory.ledger.issued, default=-1) + 1
        self.stop_requested = False
        self.saving: tuple[Path, int] | None = None
        pool = stages.eval_workers
        self.beside = EvaluationBeside(config, stages.eval_prompts, pool) if pool else None
        self.unretired: int | None = None
        """A version that nothing needs any more but the evaluation of it that is under way."""

    @abstractmethod
    def run(self) -> None:
        """Consume prompts and produce policy versions until `num_steps`, or until a stop is requested."""

    @abstractmethod
    def in_flight(self) -> set[int]:
        """The groups that are issued and neither trained nor dropped, as this loop holds them."""

    @abstractmethod
    def state(self, checkpoint: Path) -> RunState:
        """Where the run stands; what `checkpoint` must hold besides is written into it."""

    def _group_tasks(self, group_id: int) -> list[EpisodeTask]:
        size = self.config.batch.group_size
        prompt = self.stages.prompts.prompt(group_id)
        return [EpisodeTask(prompt, group_id, group_id * size + sample, self.config.seed) for sample in range(size)]

    def _issue_groups(self, number: int) -> list[int]:
        """Take the next prompts of the stream."""
        first, self.next_prompt = self.next_prompt, self.next_prompt + number
        groups = list(range(first, self.next_prompt))
        self.directory.ledger.record("issued", self.step, groups)
        return groups

    def _drop(self, groups: dict[int, tuple[str, str]]) -> None:
        """Record groups as dropped; of each its reason and a message."""
        for group_id, (reason, message) in groups.items():
            self.directory.ledger.record("dropped", self.step, [group_id], reason=reason, message=message)

    def _count_reissued(self, results: list[RolloutResult]) -> None:
        if reissued := sum(result.num_reissued for result in results):
            self.directory.ledger.record("reissued", self.step, [], count=reissued)

    def _check_ledger(self) -> None:
        """Nothing is lost silently: what the ledger has in flight is what this loop holds."""
        lost = self.directory.ledger.in_flight ^ self.in_flight()
        assert not lost, f"groups {sorted(lost)} are lost or counted twice"

    def _start_training(self, batch: list[Trajectory]) -> Any:
        return self.stages.trainer.train.remote(batch, self.step * self.updates)

    def _broadcast(self, policy_version: int) -> dict[str, float]:
        """The channel keeps the new version; when it is due, engines load it. Returns seconds of each."""
        channel, started = self.stages.channel, time.monotonic()
        self._trained(channel.publish(policy_version))
        times = {"publish_s": time.monotonic() - started}
        if self._is_served(policy_version):
            started = time.monotonic()
            self._serve(policy_version)
            times["update_weights_s"] = time.monotonic() - started
            self._retire(self.served)
            self.served = policy_version
        if policy_version - 1 != self.served:
            self._retire(policy_version - 1)
        return times

    def _retire(self, policy_version: int) -> None:
        """Forget a version; while the version is being evaluated, once that has ended."""
        if self.beside and self.beside.step == policy_version:
            self.unretired = policy_version
        else:
            self.stages.channel.retire(policy_version)

    def _is_served(self, policy_version: int) -> bool:
        """Whether engines get this version."""
        return True

    def _serve(self, policy_version: int) -> None:
        self.stages.serve(policy_version, self.updates)

    def _evaluation_is_due(self) -> bool:
        every = self.config.eval.every
        return bool(every) and (self.step % every == 0 or self.step == self.config.num_steps)

    def _evaluate_if_due(self) -> dict[str, Any]:
        """Evaluate the newest version, whatever version is being served for rollouts.

        On workers of its own that only begins here, and the figures are those of the evaluation before, if it was
        still under way. Otherwise nothing else goes on meanwhile.
        """
        if not self._evaluation_is_due():
            return {}
        if self.beside:
            figures = self._evaluated_beside(wait=True)
            self.beside.start(self.step, self.stages.channel.weights(self.step))
            return figures
        started = time.monotonic()
        if self.served != self.step:
            self._serve(self.step)
        figures = self._collect_evaluation(self._start_evaluation())
        if self.served != self.step:
            self._serve(self.served)
        return {**figures, "eval_s": time.monotonic() - started}

    def _evaluated_beside(self, wait: bool) -> dict[str, Any]:
        """Figures of the evaluation on workers of its own; none if it goes on and is not waited for."""
        if self.beside is None or self.beside.step is None:
            return {}
        started = time.monotonic()
        while not self.beside.has_ended(timeout=1.0 if wait else 0.0):
            if not wait:
                return {}
            self.stages.check_tool_server()
        step, results = self.beside.take()
        if self.unretired is not None:
            self.stages.channel.retire(self.unretired)
            self.unretired = None
        return {**self._write_evaluation(step, results), "eval_s": time.monotonic() - started}

    def resume_evaluation(self, checkpoint: Path) -> None:
        """Begin the evaluation again that was under way on workers of its own when `checkpoint` was written."""
        if (step := self.directory.state.evaluating) is None:
            return
        assert self.beside is not None, "whoever resumes has seen that there are workers for it"
        if step != self.served:
            self._trained(self.stages.channel.restore(step, checkpoint / EVALUATED_WEIGHTS))
            self.unretired = step
        self.beside.start(step, self.stages.channel.weights(step))

    def _start_evaluation(self) -> list[Call] | None:
        """Start an evaluation that is due on the workers that sample for training."""
        if not self._evaluation_is_due():
            return None
        return start_evaluation(self.config, self.stages.eval_prompts, self.stages.workers)

    def _collect_evaluation(self, calls: list[Call] | None) -> dict[str, Any]:
        """Wait for an evaluation of version `step`; write its rows. `eval_s`: seconds that the step waited for it."""
        if calls is None:
            return {}
        started = time.monotonic()
        figures = self._write_evaluation(self.step, self._results(calls))
        return {**figures, "eval_s": time.monotonic() - started}

    def _write_evaluation(self, step: int, results: list[RolloutResult]) -> dict[str, Any]:
        """Write the rows of an evaluation of the version of `step`; returns its figures."""
        version = step * self.updates
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
        if "eval_step" not in row:  # else this line has one already, and the next has room
            row |= self._evaluated_beside(wait=False)
        rows, self.dropped = [*training_rows(self.step, batch, result), *self.dropped], []
        self.directory.write_training(self.step, rows, result.mismatch)
        wall_s = time.monotonic() - started
        row |= seconds_figures(row | result.metrics, wall_s, self.stages.workers.seconds(wall_s))
        row = metrics_row(self.step, self.step * self.updates, row, batch, result, wall_s) | {
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
        """Begin a checkpoint of the version just made, with older weights that are still being served or evaluated.

        It is written while the next step goes on, and counts once `_commit_checkpoint` has given it its name.
        """
        self._check_ledger()
        temporary = self.directory.checkpoint(self.step).with_suffix(".tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        self._trained([self.stages.trainer.begin_save.remote(str(temporary))])
        self._trained(self.stages.channel.save(self.served, temporary / SERVED_WEIGHTS))
        evaluating = self.beside.step if self.beside else None
        if evaluating is not None:
            self._trained(self.stages.channel.save(evaluating, temporary / EVALUATED_WEIGHTS))
        self.state(temporary).model_copy(update={"evaluating": evaluating}).save(temporary)
        self.directory.ledger.sync()
        self.saving = temporary, self.step

    def _commit_checkpoint(self) -> None:
        """Wait for the checkpoint that is being written, if there is one, and make it the newest.

        The disk has all of it before it gets its name: what has the name can be resumed.
        """
        if self.saving is None:
            return
        (temporary, step), self.saving = self.saving, None
        self._trained([self.stages.trainer.finish_save.remote(str(temporary))])
        for path in temporary.rglob("*"):
            if path.is_file():
                _sync(path)
        keep = self.config.checkpoint
        evaluating = self.beside.step if self.beside else None
        self.directory.commit_checkpoint(temporary, step, keep.keep, keep.keep_best, evaluating)

    def _finish(self) -> None:
        """Last lines of metrics: what an evaluation says that was still under way, and what the final policy scores."""
        for figures in (self._evaluate_if_due(), self._evaluated_beside(wait=True)):
            if figures:
                row = {"step": self.step, "policy_version": self.step * self.updates, **figures}
                self.directory.write_metrics(row)
                self.on_row(row)

    def _trained(self, refs: list[Any]) -> list[Any]:
        """Results of calls to the trainer. Raises `TrainerDiedError` if it has."""
        while refs and len(ray.wait(refs, num_returns=len(refs), timeout=1.0)[1]):
            self.stages.check_tool_server()
        return trainer_results(refs)

    def _results(self, calls: list[Call]) -> list[RolloutResult]:
        return results_of(self.stages.workers, calls, self.stages.check_tool_server)


def trainer_results(refs: list[Any]) -> list[Any]:
    """What calls to the trainer return. Raises `TrainerDiedError` if it has died.

    One that could not even be made is not that: another would fail the same way, and Ray's error says why.
    """
    try:
        return list(ray.get(refs))
    except RayActorError as death:
        if getattr(getattr(death, "cause", death), "actor_init_failed", False):
            raise
        raise TrainerDiedError(str(death).strip().splitlines()[0]) from death


def results_of(workers: WorkerPool, calls: list[Call], check_tool_server: Callable[[], None]) -> list[RolloutResult]:
    """Results of calls, in order, while keeping an eye on the tool server.

    Raises what a call raised, and at once: not after the slowest worker.
    """
    results: dict[Call, RolloutResult] = {}
    while len(results) < len(calls):
        for call in workers.ended([call for call in calls if call not in results]):
            if (result := workers.result(call)) is not None:
                results[call] = result
        check_tool_server()
    return [results[call] for call in calls]


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
