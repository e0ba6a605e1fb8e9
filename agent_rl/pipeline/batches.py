"""The training loop of the regimes that sample each rollout batch with one policy version, known beforehand."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_rl.config import RunConfig
from agent_rl.pipeline.controller import Controller, Stages
from agent_rl.pipeline.figures import OnRow, dropped_rows, rollout_figures
from agent_rl.pipeline.run_directory import RunDirectory
from agent_rl.pipeline.schedule import Schedule
from agent_rl.pipeline.selection import Selection, keep_without_spread, select_groups, sorted_episodes
from agent_rl.pipeline.state import RunState
from agent_rl.pipeline.workers import Call
from agent_rl.records import Trajectory
from agent_rl.rollout.worker import RolloutResult


@dataclass
class Generation:
    """A rollout batch that is being sampled."""

    batch: int
    calls: list[Call]


class BatchController(Controller):
    """Samples and trains as `schedule` says. Step i trains on batch i."""

    def __init__(
        self, config: RunConfig, schedule: Schedule, stages: Stages, directory: RunDirectory, on_row: OnRow
    ) -> None:
        super().__init__(config, schedule, stages, directory, on_row)
        self.schedule = schedule
        self.ready: dict[int, list[Trajectory]] = {}
        """The batches that are sampled and not trained."""

    def in_flight(self) -> set[int]:
        return {t.group_id for trajectories in self.ready.values() for t in trajectories}

    def save_state(self, checkpoint: Path) -> RunState:
        queue = {batch: sorted({t.group_id for t in waiting}) for batch, waiting in self.ready.items()}
        updates = self.stages.updates_per_batch
        return RunState(step=self.step, updates_per_batch=updates, queue=queue, ramps=self.schedule.ramps)

    def run(self) -> None:
        """Sample and train until `num_steps`, or until a stop is requested.

        Step i starts to sample batch i + prefetch with the weights now served, trains on batch i meanwhile, waits for
        both and broadcasts the new weights. With prefetch 0 it trains after it has sampled. If the engines serve the
        weights of step i, an evaluation that is due runs during the step; with workers of its own it may go on through
        later steps. Between steps no group is in flight but those of `ready`.
        """
        self._fill()
        while self.step < self.config.num_steps and not self.stop_requested:
            started = time.monotonic()
            evaluate_while_training = self.beside is None and self.schedule.prefetch > 0 and self.served == self.step
            row = {} if evaluate_while_training else self._evaluate_if_due()
            ahead = self._generate(self.step + self.schedule.prefetch)
            evaluation = self._start_evaluation() if evaluate_while_training else None
            if self.schedule.prefetch == 0:
                row |= self._collect(ahead)
            batch = self.ready.pop(self.step)
            self._check_lag(batch)
            training = self._start_training(batch)
            if self.schedule.prefetch > 0:
                row |= self._collect(ahead)
            result = self._wait_for_trainer([training])[0]
            row |= self._collect_evaluation(evaluation)
            row |= self._broadcast(self.step + 1)
            self._record(row, batch, result, started)
            self.step += 1
            self._checkpoint_if_due()
        self._commit_checkpoint()
        if self.step == self.config.num_steps:
            self._finish()

    def _fill(self) -> None:
        """Make the first batches ready: read those of the checkpoint's queue, sample the others."""
        for batch in range(self.step, min(self.step + self.schedule.prefetch, self.config.num_steps)):
            if batch in self.directory.state.queue:
                self.ready[batch] = self.directory.read_queued(batch)
            elif not self.stop_requested:
                self._collect(self._generate(batch))

    def _generate(self, batch: int) -> Generation | None:
        """Start to sample a batch on all workers; None after the last batch."""
        if batch >= self.config.num_steps:
            return None
        return Generation(batch, self._issue(self.config.batch.num_prompts))

    def _issue(self, num_prompts: int) -> list[Call]:
        """Start to sample the groups of the next prompts of the stream."""
        tasks = [task for group_id in self._issue_groups(num_prompts) for task in self._group_tasks(group_id)]
        return self.stages.workers.deal(tasks)

    def _collect(self, generation: Generation | None) -> dict[str, Any]:
        """Wait for a batch, write its facts, drop groups that cannot be trained on, and put the others into `ready`."""
        if generation is None:
            return {}
        started = time.monotonic()
        rounds, selection = self._sample(generation)
        waited_s = time.monotonic() - started
        results = [result for results in rounds for result in results]
        episodes = sorted_episodes(results)
        self.directory.write_rollouts(generation.batch, episodes)
        self._count_reissued(results)
        self._drop(selection.dropped)
        if not selection.num_whole:
            _, message = next(iter(selection.dropped.values()))
            raise ValueError(f"no group of batch {generation.batch} could be sampled: {message}")
        reasons = {group_id: reason for group_id, (reason, _) in selection.dropped.items()}
        self.dropped += dropped_rows(self.step, [episode.trajectory for episode in episodes], reasons)
        self.ready[generation.batch] = [episode.trajectory for episode in selection.kept]
        return {**rollout_figures(episodes, rounds), "wait_s": waited_s}

    def _sample(self, generation: Generation) -> tuple[list[list[RolloutResult]], Selection]:
        """Wait for the groups of a batch; with dynamic sampling, also for replacements of groups without spread.

        The served weights do not change meanwhile, so a replacement has the lag of the group that it replaces. If no
        group has spread, the step trains on those of the first round: it then has no gradient.
        """
        left = self.config.batch.max_replacements
        dynamic = left > 0
        rounds: list[list[RolloutResult]] = [self._results(generation.calls)]
        selection = select_groups(rounds[0], dynamic)
        while (missing := min(self.config.batch.num_prompts - selection.num_kept_groups, left)) > 0:
            left -= missing
            rounds.append(self._results(self._issue(missing)))
            selection = select_groups([result for results in rounds for result in results], dynamic)
        return rounds, selection if selection.kept else keep_without_spread(selection, rounds[0])

    def _check_lag(self, batch: list[Trajectory]) -> None:
        """Assert that every sampled token has the policy version that the schedule promised."""
        promised = self.stages.policy_version(self.schedule.sampling_step(self.step))
        for trajectory in batch:
            versions = trajectory.policy_versions[trajectory.loss_mask]
            assert (versions == promised).all(), (
                f"step {self.step}: episode {trajectory.episode_id} was sampled at versions "
                f"{sorted(set(versions.tolist()))}, the schedule promised {promised}"
            )
