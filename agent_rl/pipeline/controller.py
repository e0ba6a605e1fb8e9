"""The training loop: rollout batches at known versions, optimizer steps, weight broadcasts."""

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from agent_rl.config import RunConfig
from agent_rl.data.sources.base import PromptSource
from agent_rl.pipeline.evaluation import collect_evaluation, start_evaluation
from agent_rl.pipeline.figures import dropped_rows, metrics_row, rollout_figures, training_rows
from agent_rl.pipeline.run_directory import RunDirectory
from agent_rl.pipeline.schedule import Schedule
from agent_rl.pipeline.selection import Selection, keep_without_spread, select_groups, sorted_episodes
from agent_rl.pipeline.state import RunState
from agent_rl.records import Trajectory
from agent_rl.rollout.episode import EpisodeTask
from agent_rl.rollout.worker import RolloutResult, split_tasks
from agent_rl.weights.base import WeightChannel

OnRow = Callable[[dict[str, Any]], None]


@dataclass
class Stages:
    """The parts that a run is made of, built by run.py. `workers` and `trainer` are Ray actor handles."""

    prompts: PromptSource
    eval_prompts: PromptSource
    workers: list[Any]
    trainer: Any
    channel: WeightChannel
    check_tool_server: Callable[[], None]
    """Called while the loop waits: restarts a tool server that the run owns and that has died."""


@dataclass
class Generation:
    """A rollout batch that workers are busy with."""

    batch: int
    refs: list[Any]


class Controller:
    """Trains batches from where `directory` stands to `num_steps`: batch i at step i, from policy version i times the
    updates that the trainer makes of a batch."""

    def __init__(
        self, config: RunConfig, schedule: Schedule, stages: Stages, directory: RunDirectory, on_row: OnRow
    ) -> None:
        self.config, self.schedule, self.stages = config, schedule, stages
        self.updates = config.updates_per_batch
        self.directory, self.on_row = directory, on_row
        self.ready: dict[int, list[Trajectory]] = {}
        self.dropped: list[dict[str, Any]] = []
        self.step = directory.state.step
        self.served = schedule.served(self.step)
        self.next_prompt = max(directory.ledger.issued, default=-1) + 1
        self.stop_requested = False
        self.saving: tuple[Path, int] | None = None

    def run(self) -> None:
        """Consume prompts and produce policy versions until `num_steps`, or until a stop is requested.

        At step i: start sampling batch i + prefetch with the weights now served, train on batch i
        meanwhile, wait for both, then hand the new version to the engines. With prefetch 0 the two
        follow each other. An evaluation that is due goes on beside them where the engines serve version i.
        Only whole steps happen, so between steps nothing is in flight but `ready`.
        """
        self._fill()
        while self.step < self.config.num_steps and not self.stop_requested:
            started = time.monotonic()
            beside = self.schedule.prefetch > 0 and self.served == self.step
            row = {} if beside else self._evaluate_if_due()
            ahead = self._generate(self.step + self.schedule.prefetch)
            evaluation = self._start_evaluation() if beside and self._evaluation_is_due() else None
            if self.schedule.prefetch == 0:
                row |= self._collect(ahead)
            batch = self.ready.pop(self.step)
            self._check_lag(batch)
            training = self.stages.trainer.train.remote(batch, self.step * self.updates)
            if self.schedule.prefetch > 0:
                row |= self._collect(ahead)
            result = self._wait([training])[0]
            row |= self._collect_evaluation(evaluation)
            row |= self._broadcast(self.step + 1)
            self._record(row, batch, result, started)
            self.step += 1
            self._checkpoint_if_due()
        self._commit_checkpoint()
        if self.step == self.config.num_steps:
            self._finish()

    def _fill(self) -> None:
        """Have the first batches ready: those of the checkpoint's queue are read, the others sampled now."""
        for batch in range(self.step, min(self.step + self.schedule.prefetch, self.config.num_steps)):
            if batch in self.directory.state.queue:
                self.ready[batch] = self.directory.read_queued(batch)
            elif not self.stop_requested:
                self._collect(self._generate(batch))

    def _generate(self, batch: int) -> Generation | None:
        """Start sampling a batch on all workers; None past the last step."""
        if batch >= self.config.num_steps:
            return None
        return Generation(batch, self._issue(self.config.batch.num_prompts))

    def _issue(self, num_prompts: int) -> list[Any]:
        """Start sampling the groups of the next prompts of the stream."""
        group_size = self.config.batch.group_size
        first, self.next_prompt = self.next_prompt, self.next_prompt + num_prompts
        prompts = [self.stages.prompts.prompt(index) for index in range(first, self.next_prompt)]
        self.directory.ledger.record("issued", self.step, [prompt.index for prompt in prompts])
        tasks = [
            EpisodeTask(prompt, prompt.index, prompt.index * group_size + sample, self.config.seed)
            for prompt in prompts
            for sample in range(group_size)
        ]
        return split_tasks(self.stages.workers, tasks)

    def _collect(self, generation: Generation | None) -> dict[str, Any]:
        """Wait for a batch; write its facts; drop groups that are not trained on; keep the rest ready."""
        if generation is None:
            return {}
        rounds, selection = self._sample(generation)
        results = [result for results in rounds for result in results]
        episodes = sorted_episodes(results)
        self.directory.write_rollouts(generation.batch, episodes)
        if reissued := sum(result.num_reissued for result in results):
            self.directory.ledger.record("reissued", self.step, [], count=reissued)
        for group_id, (reason, message) in selection.dropped.items():
            self.directory.ledger.record("dropped", self.step, [group_id], reason=reason, message=message)
        if not selection.num_whole:
            _, message = next(iter(selection.dropped.values()))
            raise ValueError(f"no group of batch {generation.batch} could be sampled: {message}")
        reasons = {group_id: reason for group_id, (reason, _) in selection.dropped.items()}
        self.dropped += dropped_rows(self.step, episodes, reasons)
        self.ready[generation.batch] = [episode.trajectory for episode in selection.kept]
        return rollout_figures(episodes, rounds)

    def _sample(self, generation: Generation) -> tuple[list[list[RolloutResult]], Selection]:
        """Wait for the groups of a batch and, with dynamic sampling, for those that replace groups without spread.

        The weights that are served do not change meanwhile, so a replacement has the lag of what it replaces. If no
        group at all has spread, the first ones are trained on as they are: the step then has no gradient.
        """
        left = self.config.batch.max_replacements
        dynamic = left > 0
        rounds: list[list[RolloutResult]] = [self._wait(generation.refs)]
        selection = select_groups(rounds[0], dynamic)
        while (missing := min(self.config.batch.num_prompts - selection.num_kept_groups, left)) > 0:
            left -= missing
            rounds.append(self._wait(self._issue(missing)))
            selection = select_groups([result for results in rounds for result in results], dynamic)
        return rounds, selection if selection.kept else keep_without_spread(selection, rounds[0])

    def _check_lag(self, batch: list[Trajectory]) -> None:
        """Lag is a promise: every sampled token carries the version that the schedule says."""
        promised = self.schedule.version(self.step) * self.updates
        for trajectory in batch:
            versions = trajectory.policy_versions[trajectory.loss_mask]
            assert (versions == promised).all(), (
                f"step {self.step}: episode {trajectory.episode_id} was sampled at versions "
                f"{sorted(set(versions.tolist()))}, the schedule promised {promised}"
            )

    def _broadcast(self, policy_version: int) -> dict[str, float]:
        """The trainer writes the new version, counted in batches; when the interval is over, engines load it.

        Returns the seconds of each.
        """
        channel, started = self.stages.channel, time.monotonic()
        self._wait([self.stages.trainer.publish.remote(str(channel.path(policy_version)))])
        times = {"publish_s": time.monotonic() - started}
        if self.schedule.served(policy_version) == policy_version:
            started = time.monotonic()
            self._serve(policy_version)
            times["update_weights_s"] = time.monotonic() - started
            channel.retire(self.served)
            self.served = policy_version
        if policy_version - 1 != self.served:
            channel.retire(policy_version - 1)
        return times

    def _serve(self, policy_version: int) -> None:
        path = str(self.stages.channel.path(policy_version))
        self._wait(
            [worker.update_weights.remote(path, policy_version * self.updates) for worker in self.stages.workers]
        )

    def _evaluation_is_due(self) -> bool:
        every = self.config.eval.every
        return bool(every) and (self.step % every == 0 or self.step == self.config.num_steps)

    def _evaluate_if_due(self) -> dict[str, Any]:
        """Evaluate the newest version while nothing else goes on, whatever version is being served for rollouts."""
        if not self._evaluation_is_due():
            return {}
        started = time.monotonic()
        if self.served != self.step:
            self._serve(self.step)
        figures = self._collect_evaluation(self._start_evaluation())
        if self.served != self.step:
            self._serve(self.served)
        return {**figures, "eval_s": time.monotonic() - started}

    def _start_evaluation(self) -> list[Any]:
        return start_evaluation(self.config, self.stages.eval_prompts, self.stages.workers)

    def _collect_evaluation(self, refs: list[Any] | None) -> dict[str, Any]:
        """Wait for an evaluation of version `step`; write its rows. `eval_s`: seconds that the step waited for it."""
        if refs is None:
            return {}
        started = time.monotonic()
        evaluation = collect_evaluation(self.config, self.step * self.updates, self._wait(refs))
        self.directory.write_evaluation(self.step, evaluation.rows)
        return {**evaluation.figures, "eval_s": time.monotonic() - started}

    def _record(self, row: dict[str, Any], batch: list[Trajectory], result: Any, started: float) -> None:
        ledger = self.directory.ledger
        trained = sorted({trajectory.group_id for trajectory in batch})
        ledger.record("trained", self.step, trained)
        waiting = {t.group_id for trajectories in self.ready.values() for t in trajectories}
        assert ledger.in_flight == waiting, f"groups {ledger.in_flight ^ waiting} are lost or counted twice"
        rows, self.dropped = [*training_rows(self.step, batch, result), *self.dropped], []
        self.directory.write_training(self.step, rows, result.mismatch)
        wall_s = time.monotonic() - started
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
        """Begin a checkpoint of the version just made, with the older weights that are still being served.

        It is written while the next step goes on, and counts once `_commit_checkpoint` has given it its name.
        """
        temporary = self.directory.checkpoint(self.step).with_suffix(".tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        self._wait([self.stages.trainer.begin_save.remote(str(temporary))])
        shutil.copyfile(self.stages.channel.path(self.served), temporary / "served.safetensors")
        queue = {batch: sorted({t.group_id for t in waiting}) for batch, waiting in self.ready.items()}
        state = RunState(step=self.step, updates_per_batch=self.updates, queue=queue, ramps=self.schedule.ramps)
        state.save(temporary)
        self.saving = temporary, self.step

    def _commit_checkpoint(self) -> None:
        """Wait for the checkpoint that is being written, if there is one, and make it the newest."""
        if self.saving is not None:
            (temporary, step), self.saving = self.saving, None
            self._wait([self.stages.trainer.finish_save.remote(str(temporary))])
            keep = self.config.checkpoint
            self.directory.commit_checkpoint(temporary, step, keep.keep, keep.keep_best)

    def _finish(self) -> None:
        """A last line of metrics: what the final policy scores."""
        if figures := self._evaluate_if_due():
            row = {"step": self.step, "policy_version": self.step * self.updates, **figures}
            self.directory.write_metrics(row)
            self.on_row(row)

    def _wait(self, refs: list[Any]) -> list[Any]:
        return wait_for(refs, self.stages.check_tool_server)


def wait_for(refs: list[Any], check_tool_server: Callable[[], None]) -> list[Any]:
    """Results of Ray calls, in order, while keeping an eye on the tool server.

    Raises what a call raised, and at once: not after the slowest worker.
    """
    results: dict[Any, Any] = {}
    pending = list(refs)
    while pending:
        done, pending = ray.wait(pending, num_returns=len(pending), timeout=1.0)
        results |= {ref: ray.get(ref) for ref in done}
        check_tool_server()
    return [results[ref] for ref in refs]
