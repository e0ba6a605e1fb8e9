"""The rollout workers of a run: calls to them, and a new one in the place of one that has died."""

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
"""Deaths of workers, or of trainers, that one process of a run puts up with."""
_START_S = 300.0
"""How long a worker in the place of another may take to answer; its engine may take longer, as its config has it."""
_CANCEL_S = 30.0


def answer_of(ref: Any, seconds: float) -> Any:
    """What a Ray call returns, or None if it does not in time or its actor is gone."""
    try:
        return ray.get(ref, timeout=seconds)
    except RayError:
        return None


@dataclass(eq=False)
class Call:
    """A list of tasks at a worker. `ref` and `worker` change when the worker dies and the tasks are issued again."""

    tasks: list[EpisodeTask]
    place: int
    worker: Any = None
    ref: Any = None


@dataclass
class WorkerPool:
    """Ray actor handles by place. Every worker serves the version that `serve` was last called with."""

    start: Callable[[int], Any]
    """Starts the worker of a place and returns its handle."""
    size: int
    role: str = "rollout"
    """What they are for, in messages."""
    handles: list[Any] = field(init=False)
    served: tuple[Weights, int] | None = None
    """What a new worker is given, with its policy version."""
    num_restarts: int = 0
    check: Callable[[], None] = lambda: None
    """Called every second while the pool waits for workers. What it raises ends the wait."""

    def __post_init__(self) -> None:
        self.handles = [self.start(place) for place in range(self.size)]

    def submit(self, tasks: list[EpisodeTask], place: int) -> Call:
        """Start `tasks` at one worker."""
        call = Call(tasks, place)
        self._send(call)
        return call

    def deal(self, tasks: list[EpisodeTask]) -> list[Call]:
        """Deal tasks out in equal runs and start them: one call a worker."""
        bounds = [round(i * len(tasks) / self.size) for i in range(self.size + 1)]
        return [self.submit(tasks[bounds[i] : bounds[i + 1]], i) for i in range(self.size)]

    def _send(self, call: Call) -> None:
        call.worker = self.handles[call.place]
        call.ref = call.worker.run.remote(call.tasks)

    def ended(self, calls: list[Call], others: list[Any] | None = None, timeout: float = 1.0) -> list[Call]:
        """The calls that have ended, once one of them or of the references `others` has; at most `timeout` s later."""
        by_ref = {call.ref: call for call in calls}
        refs = [*by_ref, *(others or [])]
        done, _ = ray.wait(refs, num_returns=1, timeout=timeout)
        if done:  # what else is there by now
            done, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
        return [by_ref[ref] for ref in done if ref in by_ref]

    def have_ended(self, refs: list[Any]) -> bool:
        return len(ray.wait(refs, num_returns=len(refs), timeout=0)[0]) == len(refs) if refs else True

    def result(self, call: Call) -> RolloutResult | None:
        """What an ended call returned. None if its worker has died: the call then runs again, as a further attempt.

        Raises what the call raised.
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
        """Abort a call and wait until its episodes have ended; what they sampled is lost."""
        ray.cancel(call.ref)
        try:
            ray.get(call.ref, timeout=_CANCEL_S)
        except (RayActorError, TaskCancelledError, GetTimeoutError):
            return

    def serve(self, weights: Callable[[], Weights], policy_version: int, together: bool = False) -> None:
        """Let every worker load what `weights` gives as `policy_version`.

        `together`: that begins to be sent when `weights` is called, so all must be ready before.
        """
        if together:
            self._all("ready")
        given = weights()
        self.served = (given.again(), policy_version)
        self._all("update_weights", given, policy_version)

    def _all(self, method: str, *arguments: Any) -> None:
        """Call a method of every worker. One that has died is replaced, and serves what is served then."""
        sent = [(handle, getattr(handle, method).remote(*arguments)) for handle in self.handles]
        for place, (handle, ref) in enumerate(sent):
            try:
                self._wait(ref)
            except RayActorError as death:
                self._replace(place, handle, death)

    def _wait(self, ref: Any, seconds: float = math.inf) -> None:
        """Wait for a call to a worker while `check` keeps an eye on the rest of the run. Raises what the call raised.

        Raises `GetTimeoutError` once it has taken `seconds`.
        """
        deadline = time.monotonic() + seconds
        while not ray.wait([ref], timeout=1.0)[0]:
            self.check()
            if time.monotonic() > deadline:
                raise GetTimeoutError(f"no answer in {seconds:.0f} s")
        ray.get(ref)

    def seconds(self, wall_s: float) -> list[dict[str, float] | None]:
        """Where the last `wall_s` seconds went at each worker; None for one that does not answer."""
        now = time.time()
        asked = [worker.seconds.remote(now - wall_s, now) for worker in self.handles]
        return [answer_of(ref, 5.0) for ref in asked]

    def _replace(self, place: int, dead: Any, death: Exception) -> None:
        """Start a worker in the place of one that has died, unless that was done, and give it the served weights."""
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
        except RayActorError as again:  # it was started on a node that is going down too
            self._replace(place, new, again)
        except GetTimeoutError:
            raise ValueError(
                f"no {self.role} worker could be started in {_START_S:.0f} s in the place of one that died; "
                "see that the cluster has a free CPU, then resume the run"
            ) from None

    def close(self) -> None:
        """Let workers end what they hold at the tool server; one that does not answer is killed all the same."""
        ray.wait([worker.close.remote() for worker in self.handles], num_returns=self.size, timeout=5.0)
        for worker in self.handles:
            ray.kill(worker)
