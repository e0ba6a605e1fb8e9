"""The rollout workers of a run: calls to them, and the replacement of those that die."""

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, TaskCancelledError

from agent_rl.rollout.episode import EpisodeTask
from agent_rl.rollout.worker import RolloutResult
from agent_rl.weights.base import Weights

MAX_RESTARTS = 5
"""How often a pool replaces workers, or a run its trainer, before it gives up."""
_START_S = 300.0
"""Seconds in which a replacement must answer. Its engine may take longer to load weights, as its config says."""
_CANCEL_S = 30.0


def answer_of(ref: Any, seconds: float) -> Any:
    """The result of a Ray call; None if it takes longer than `seconds` or fails."""
    try:
        return ray.get(ref, timeout=seconds)
    except RayError:
        return None


@dataclass(eq=False)
class Call:
    """Tasks that run at the worker of `place`. If it dies they are issued again: `ref` and `worker` then change."""

    tasks: list[EpisodeTask]
    place: int
    worker: Any = None
    ref: Any = None


@dataclass
class WorkerPool:
    """The workers by place. A worker that dies is replaced. All serve the weights that `serve` was last called with."""

    start: Callable[[int], Any]
    """Starts the worker of a place and returns its handle."""
    size: int
    role: str = "rollout"
    """What the workers are for, in messages."""
    handles: list[Any] = field(init=False)
    served: tuple[Weights, int] | None = None
    """What a replacement loads: weights and their policy version."""
    num_restarts: int = 0
    check: Callable[[], None] = lambda: None
    """Called every second while the pool waits for workers. An exception from it ends the wait."""

    def __post_init__(self) -> None:
        self.handles = [self.start(place) for place in range(self.size)]

    def submit(self, tasks: list[EpisodeTask], place: int) -> Call:
        """Start `tasks` at the worker of `place`."""
        call = Call(tasks, place)
        self._send(call)
        return call

    def deal(self, tasks: list[EpisodeTask]) -> list[Call]:
        """Start `tasks` at all workers, split into consecutive parts of equal size: one call to each worker."""
        bounds = [round(i * len(tasks) / self.size) for i in range(self.size + 1)]
        return [self.submit(tasks[bounds[i] : bounds[i + 1]], i) for i in range(self.size)]

    def _send(self, call: Call) -> None:
        call.worker = self.handles[call.place]
        call.ref = call.worker.run.remote(call.tasks)

    def ended(self, calls: list[Call], others: list[Any] | None = None, timeout: float = 1.0) -> list[Call]:
        """The calls that have ended. Waits up to `timeout` seconds for a call or a Ray reference of `others` to end."""
        by_ref = {call.ref: call for call in calls}
        refs = [*by_ref, *(others or [])]
        done, _ = ray.wait(refs, num_returns=1, timeout=timeout)
        if done:  # others may have ended meanwhile
            done, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
        return [by_ref[ref] for ref in done if ref in by_ref]

    def have_ended(self, refs: list[Any]) -> bool:
        """Whether all Ray calls have ended. Does not wait."""
        return len(ray.wait(refs, num_returns=len(refs), timeout=0)[0]) == len(refs) if refs else True

    def result(self, call: Call) -> RolloutResult | None:
        """The result of a call that has ended. Raises what the call raised.

        None if its worker has died: the call then runs again, as the next attempt of its tasks.
        """
        try:
            found: RolloutResult = ray.get(call.ref)
        except RayActorError as death:
            self._replace(call.place, call.worker, death)
            call.tasks = [replace(task, attempt=task.attempt + 1) for task in call.tasks]
            self._send(call)
            return None
        return found

    def cancel(self, call: Call) -> None:
        """Abort a call and wait until its episodes have ended. Their tokens are lost."""
        ray.cancel(call.ref)
        try:
            ray.get(call.ref, timeout=_CANCEL_S)
        except (RayActorError, TaskCancelledError, GetTimeoutError):
            return

    def serve(self, weights: Callable[[], Weights], policy_version: int, together: bool = False) -> None:
        """Let every worker load the result of `weights`, and stamp `policy_version` on its tokens from then on.

        `together`: the call of `weights` starts a broadcast, so wait until all workers are ready for it.
        """
        if together:
            self._all("ready")
        given = weights()
        self.served = (given.again(), policy_version)
        self._all("update_weights", given, policy_version)

    def _all(self, method: str, *arguments: Any) -> None:
        """Call a method of every worker. A dead one is replaced; the replacement loads `served` instead."""
        sent = [(handle, getattr(handle, method).remote(*arguments)) for handle in self.handles]
        for place, (handle, ref) in enumerate(sent):
            try:
                self._wait(ref)
            except RayActorError as death:
                self._replace(place, handle, death)

    def _wait(self, ref: Any, seconds: float = math.inf) -> None:
        """Wait for a call to a worker, calling `check` every second. Raises what the call or `check` raised.

        Raises `GetTimeoutError` after `seconds`.
        """
        deadline = time.monotonic() + seconds
        while not ray.wait([ref], timeout=1.0)[0]:
            self.check()
            if time.monotonic() > deadline:
                raise GetTimeoutError(f"no answer in {seconds:.0f} s")
        ray.get(ref)

    def seconds(self, wall_s: float) -> list[dict[str, float] | None]:
        """How each worker spent the last `wall_s` seconds, by state; None for one that does not answer."""
        now = time.time()
        asked = [worker.seconds.remote(now - wall_s, now) for worker in self.handles]
        return [answer_of(ref, 5.0) for ref in asked]

    def _replace(self, place: int, dead: Any, death: Exception) -> None:
        """Replace a dead worker, unless that is done already, and let the replacement load the served weights."""
        if self.handles[place] is not dead:
            return
        if self.num_restarts == MAX_RESTARTS:
            raise death
        self.num_restarts += 1
        print(f"{self.role} worker {place} died; starting another, its episodes are issued again", file=sys.stderr)
        ray.kill(dead)
        self.handles[place] = self.start(place)
        new = self.handles[place]
        try:
            self._wait(new.status.remote(), _START_S)
            if self.served is not None:
                self._wait(new.update_weights.remote(*self.served))
        except RayActorError as again:  # as when its node goes down too
            self._replace(place, new, again)
        except GetTimeoutError:
            raise ValueError(
                f"no {self.role} worker could be started in {_START_S:.0f} s in the place of one that died; "
                "see that the cluster has a free CPU, then resume the run"
            ) from None

    def close(self) -> None:
        """Let workers close their sessions at the tool server, then kill them, also those that do not answer."""
        ray.wait([worker.close.remote() for worker in self.handles], num_returns=self.size, timeout=5.0)
        for worker in self.handles:
            ray.kill(worker)
