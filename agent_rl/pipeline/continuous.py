"""The training loop of the fully asynchronous regime: engines never pause, and load new weights while they sample."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from agent_rl import facts
from agent_rl.config import RunConfig
from agent_rl.pipeline.controller import Controller, Stages, trainer_results
from agent_rl.pipeline.figures import OnRow, dropped_rows, rollout_figures
from agent_rl.pipeline.pacing import Pacing
from agent_rl.pipeline.run_directory import RunDirectory
from agent_rl.pipeline.selection import NO_SPREAD, Selection, select_groups, sorted_episodes
from agent_rl.pipeline.state import RunState
from agent_rl.pipeline.workers import Call
from agent_rl.records import Trajectory
from agent_rl.rollout.worker import RolloutResult

OVERDUE = "overdue"
QUEUE_FILE = "queue.parquet"
_FRUITLESS_BATCHES = 4
"""How many batches of groups in a row may give nothing to train on."""


@dataclass(frozen=True)
class Group:
    """A sampled group that is not trained yet. `rows`: of rollout facts."""

    trajectories: list[Trajectory]
    rows: list[dict[str, Any]]


class ContinuousController(Controller):
    """Issues groups and trains on whole groups as they arrive, as `pacing` allows."""

    def __init__(
        self, config: RunConfig, pacing: Pacing, stages: Stages, directory: RunDirectory, on_row: OnRow
    ) -> None:
        super().__init__(config, pacing, stages, directory, on_row)
        self.pacing = pacing
        self.issue_steps: dict[int, int] = {}
        """For every group in flight or queued, the step whose weights were served at its issue."""
        self.calls: dict[int, Call] = {}
        """Groups in flight."""
        self.queue: dict[int, Group] = {}
        """Groups that have arrived, in the order of arrival."""
        self.training: list[int] = []
        """Groups that are being trained on."""
        self.results: list[RolloutResult] = []
        """Results that arrived since the last step."""
        self.rows: list[dict[str, Any]] = []
        """Rollout facts of the step's groups and of groups dropped since the last step."""
        self.replacements = 0
        """Groups without spread that the step may still replace."""
        self.failures = 0
        """Groups in a row that could not be sampled whole."""
        self.fruitless = 0
        """Groups in a row that gave nothing to train on: not sampled whole, or masked."""

    def run(self) -> None:
        """Sample and train until `num_steps`, or until a stop is requested.

        Step i waits for the groups that it must train on and for enough others, trains on them while more groups are
        issued and arrive, and then broadcasts the new weights; engines continue their episodes with them. An evaluation
        that is due runs meanwhile. The broadcast waits for it, unless it has workers of its own.
        """
        self._restore()
        while self.step < self.config.num_steps and not self.stop_requested:
            started = time.monotonic()
            row = self._evaluate_if_due() if self.beside else {}
            evaluation = None if self.beside else self._start_evaluation()
            batch = self._take_batch()
            if batch is None:
                break
            waited_s = time.monotonic() - started
            result = self._train(batch)
            row |= self._collect_evaluation(evaluation)
            row |= self._broadcast(self.step + 1)
            self._record(row | self._figures(waited_s), batch, result, started)
            self.step += 1
            self._checkpoint_if_due()
        self._commit_checkpoint()
        if self.step == self.config.num_steps:
            self._finish()

    def in_flight(self) -> set[int]:
        return self.issue_steps.keys() | set(self.training)

    def _take_batch(self) -> list[Trajectory] | None:
        """Issue and collect groups until those of the step have arrived; drop overdue ones. Returns it by group id.

        Returns None if a stop is requested and the newest checkpoint is of this step. Otherwise the step is still made
        and saved, since a run can only be resumed between steps.
        """
        self.replacements = self.config.batch.max_replacements
        while (chosen := self.pacing.choose(self.step, self.issue_steps, list(self.queue))) is None:
            if self.stop_requested and (self.saving or self.step == self.directory.state.step):
                return None
            self._pump([])
        late = self.pacing.overdue(self.step, self.issue_steps, chosen)
        self._abort(late)
        groups = [self.queue.pop(group_id) for group_id in chosen]
        for group_id in chosen:
            del self.issue_steps[group_id]
        self.training = chosen
        self.rows += [row | {"batch": self.step} for group in groups for row in group.rows]
        batch = [trajectory for group in groups for trajectory in group.trajectories]
        self._check_lag(batch)
        return batch

    def _train(self, batch: list[Trajectory]) -> Any:
        """Train on a batch while groups are issued and arrive."""
        training = self._start_training(batch)
        while not self._pump([training]):
            pass
        return trainer_results([training])[0]

    def _pump(self, others: list[Any]) -> bool:
        """Issue groups, then collect those that arrive within a second. Returns whether all of `others` have ended."""
        self._admit()
        ended = self.stages.workers.ended(list(self.calls.values()), others)
        for group_id in [group_id for group_id, call in self.calls.items() if call in ended]:
            if (result := self.stages.workers.result(self.calls[group_id])) is not None:
                self._arrive(group_id, result)
        self._check_ledger()
        self.stages.check()
        return self.stages.workers.have_ended(others)

    def _admit(self) -> None:
        """Issue as many groups as `pacing` allows, each to the worker with the fewest groups."""
        ledger = self.directory.ledger
        num_issued = len(ledger.issued) - len(ledger.dropped)
        if room := self.pacing.room(self.served, num_issued, len(self.issue_steps)):
            for group_id in self._issue_groups(room):
                self._start(group_id, self.served)

    def _start(self, group_id: int, issue_step: int) -> None:
        busy = [call.place for call in self.calls.values()]
        place = min(range(self.stages.workers.size), key=busy.count)
        self.issue_steps[group_id] = issue_step
        self.calls[group_id] = self.stages.workers.submit(self._group_tasks(group_id), place)

    def _arrive(self, group_id: int, result: RolloutResult) -> None:
        """Queue a group that has arrived, or drop it if it cannot be trained on."""
        del self.calls[group_id]
        selection = self._select(result)
        episodes = sorted_episodes([result])
        self._count_reissued([result])
        self._drop(selection.dropped)
        reasons = {group: reason for group, (reason, _) in selection.dropped.items()}
        self.dropped += dropped_rows(self.step, [episode.trajectory for episode in episodes], reasons)
        self.results.append(result)
        rows = [facts.rollout_row(self.step, episode) for episode in episodes]
        if selection.dropped:
            del self.issue_steps[group_id]
            self.rows += rows
        else:
            self.queue[group_id] = Group([episode.trajectory for episode in selection.kept], rows)

    def _select(self, result: RolloutResult) -> Selection:
        """What to train on of a group. One without spread is dropped while the step has replacements left."""
        selection = select_groups([result], drop_without_spread=self.replacements > 0)
        self.replacements -= _lacks_spread(selection)
        self._count_fruitless(selection)
        return selection

    def _count_fruitless(self, selection: Selection) -> None:
        """Raises `ValueError` if too many groups in a row gave nothing to train on: replacing them would never end.

        The limit is one batch of groups that could not be sampled, and a few batches of any. If a stop is requested, it
        is one batch of any.
        """
        self.failures = 0 if selection.num_whole else self.failures + 1
        self.fruitless = 0 if selection.kept or _lacks_spread(selection) else self.fruitless + 1
        batch = max(self.config.batch.num_prompts, 2)
        if self.failures < batch and self.fruitless < batch * (1 if self.stop_requested else _FRUITLESS_BATCHES):
            return
        reason, message = next(iter(selection.dropped.values()))
        if self.failures >= batch:
            raise ValueError(f"the last {self.failures} groups could not be sampled: {message}")
        raise ValueError(
            f"the last {self.fruitless} groups gave nothing to train on; the newest is dropped as {reason}: {message}; "
            "give episodes room to end (rollout.max_episode_tokens, rollout.deadline_s), or score what is masked "
            "(rollout.truncated.policy, reward.unverifiable)"
        )

    def _abort(self, late: list[int]) -> None:
        """Drop groups that would be too old at the next step."""
        for group_id in late:
            if call := self.calls.pop(group_id, None):
                self.stages.workers.cancel(call)
            if group := self.queue.pop(group_id, None):
                self.rows += group.rows
                self.dropped += dropped_rows(self.step, group.trajectories, {group_id: OVERDUE})
            issued = self.issue_steps.pop(group_id)
            self._drop({group_id: (OVERDUE, f"issued at step {issued}, not trained by step {self.step}")})

    def _check_lag(self, batch: list[Trajectory]) -> None:
        """Assert that no sampled token exceeds `max_lag`, by the policy version that it carries."""
        bound = self.pacing.max_lag * self.stages.updates_per_batch
        for trajectory in batch:
            lag = self.stages.policy_version(self.step) - trajectory.policy_versions[trajectory.loss_mask]
            assert ((lag >= 0) & (lag <= bound)).all(), (
                f"step {self.step}: episode {trajectory.episode_id} has tokens of lag {np.unique(lag).tolist()}, "
                f"the bound is {bound}"
            )

    def _record(self, row: dict[str, Any], batch: list[Trajectory], result: Any, started: float) -> None:
        self.directory.write_rollout_rows(self.step, sorted(self.rows, key=lambda row: row["episode_id"]))
        self.rows, self.training = [], []
        super()._record(row, batch, result, started)

    def _figures(self, waited_s: float) -> dict[str, Any]:
        """`wait_s`: seconds that the trainer waited for groups. The rest is over what arrived since the last step."""
        results, self.results = self.results, []
        episodes = sorted_episodes(results)
        sampled = rollout_figures(episodes, [results]) if episodes else {}
        return {**sampled, "wait_s": waited_s, "num_queued": len(self.queue), "num_sampling": len(self.calls)}

    def save_state(self, checkpoint: Path) -> RunState:
        rows = [row for group in self.queue.values() for row in group.rows]
        facts.write_rows(checkpoint / QUEUE_FILE, rows, facts.ROLLOUT_FACTS)
        return RunState(
            step=self.step,
            updates_per_batch=self.stages.updates_per_batch,
            versions=self.issue_steps,
            arrived=list(self.queue),
        )

    def _restore(self) -> None:
        """Read the checkpoint's groups that had arrived; issue its other groups again."""
        state = self.directory.state
        if not state.versions:
            return
        rows = facts.read_rows(self.directory.checkpoint(state.step) / QUEUE_FILE)
        for group_id in state.arrived:
            own = [row for row in rows if row["group_id"] == group_id]
            self.queue[group_id] = Group(facts.unmasked_trajectories(own), own)
        self.issue_steps = {group_id: state.versions[group_id] for group_id in state.arrived}
        again = [group_id for group_id in state.versions if group_id not in self.queue]
        for group_id in again:
            self._start(group_id, state.versions[group_id])
        if again:
            count = len(again) * self.config.batch.group_size
            self.directory.ledger.record("reissued", self.step, [], count=count)
        self._check_ledger()


def _lacks_spread(selection: Selection) -> bool:
    return any(reason == NO_SPREAD for reason, _ in selection.dropped.values())
