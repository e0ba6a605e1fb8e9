"""Notices that a run makes no progress, says where it is stuck, dumps stacks, and warns or stops the run."""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from agent_rl.pipeline.config import WatchdogConfig
from agent_rl.pipeline.workers import answer_of
from agent_rl.rollout.activity import QUEUE, TOOL, EpisodeStatus, WorkerStatus
from agent_rl.stacks import DUMP_SIGNAL, dump_on_signal

_ANSWER_S = 5.0
_MOST_CODE = 120


class StalledError(TimeoutError):
    """The run made no progress for `watchdog.after_s`. The message says where it is stuck."""


@dataclass
class Watched:
    """What a watchdog looks at. `workers` returns the current Ray handles by place; `trainer` is one."""

    workers: Callable[[], list[Any]]
    trainer: Any
    step: Callable[[], int]
    num_in_flight: Callable[[], int]
    """Returns the number of groups that are issued and neither trained nor dropped."""


class Watchdog:
    """Context manager with a thread that looks at a run. The run calls `check` wherever it may be stopped."""

    def __init__(self, config: WatchdogConfig, watched: Watched, stacks: Path) -> None:
        self.config, self.watched, self.stacks = config, watched, stacks
        self._processes: dict[str, tuple[Any, str, int]] = {}
        self._stalled: str | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        if self.config.after_s is not None:
            self._register()  # before a process can be stuck
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(3 * _ANSWER_S)

    def check(self) -> None:
        """Raises `StalledError` if the run has stalled and `watchdog.policy` is `stop`."""
        if self._stalled is not None and self.config.policy == "stop":
            raise StalledError(self._stalled)

    def _look(self) -> None:
        """Ask the workers again and again; act once each time the run makes no progress for `after_s`."""
        assert self.config.after_s is not None
        seen: tuple[int, ...] = ()
        since, acted = time.monotonic(), False
        while not self._ended.wait(min(self.config.after_s / 4, 10.0)):
            self._register()
            statuses = self._ask()
            now = (self.watched.step(), *(status.num_changes if status else -1 for status in statuses))
            if now != seen:
                seen, since, acted = now, time.monotonic(), False
            elif not acted and time.monotonic() - since >= self.config.after_s:
                acted = True
                self._act(statuses, time.monotonic() - since)

    def _act(self, statuses: list[WorkerStatus | None], seconds: float) -> None:
        sentence = (
            f"no progress for {seconds:.0f} s at step {self.watched.step()}: {standstill(statuses, time.time())}; "
            f"{self.watched.num_in_flight()} groups are in flight; {self._trainer()}; {self._dump()}"
        )
        if self.config.policy == "warn":
            print(f"warning: {sentence}", file=sys.stderr)
        self._stalled = sentence

    def _register(self) -> None:
        """Let each new process write its stacks on a signal. A process that does not answer is asked again later."""
        actors = {f"worker-{place}": worker for place, worker in enumerate(self.watched.workers())}
        for name, actor in (actors | {"trainer": self.watched.trainer}).items():
            if name not in self._processes or self._processes[name][0] is not actor:
                path = str((self.stacks / f"{name}.txt").absolute())
                found = answer_of(actor.dump_stacks_to.remote(path), 2.0)
                if found is not None:
                    self._processes[name] = (actor, *found)

    def _ask(self) -> list[WorkerStatus | None]:
        return [answer_of(ref, _ANSWER_S) for ref in [worker.status.remote() for worker in self.watched.workers()]]

    def _trainer(self) -> str:
        idle = answer_of(self.watched.trainer.ping.remote(), 1.0)
        return "the trainer has nothing to do" if idle else "the trainer is at work, or hangs"

    def _dump(self) -> str:
        """Write the stacks of this process and of the run's other processes on this machine."""
        dump_on_signal(str(self.stacks / "driver.txt"))
        here = [pid for _, host, pid in self._processes.values() if host == socket.gethostname()]
        for pid in [os.getpid(), *here]:
            try:
                os.kill(pid, DUMP_SIGNAL)
            except ProcessLookupError:
                continue
        return f"stacks of {len(here) + 1} processes: {self.stacks}"


def standstill(statuses: list[WorkerStatus | None], now: float) -> str:
    """In words, where the workers are stuck. `None`: a worker that did not answer. `now`: seconds, of `time.time`."""
    silent = [place for place, status in enumerate(statuses) if status is None]
    oldest = [(status.oldest, place) for place, status in enumerate(statuses) if status and status.oldest]
    found = [f"worker {place} does not answer" for place in silent]
    if oldest:
        episode, place = min(oldest, key=lambda pair: pair[0].started)
        found.append(f"{describe(episode, now)}, on worker {place} ({_counts(statuses[place])})")
    return "; ".join(found) or "no worker has an episode"


def describe(episode: EpisodeStatus, now: float) -> str:
    """The oldest episode in words: its group, its turn, what it does and for how long. `now`: of `time.time`."""
    task, since = episode.task, now - episode.changed
    name = f"the oldest episode is {task.episode_id} of group {task.group_id}, {task.purpose}, attempt {task.attempt}"
    turn = f"in turn {episode.turn_id}" if episode.turn_id >= 0 else "before its first turn"
    doing = episode.doing
    if doing == TOOL:
        doing = "tool call " + ", ".join(f"{call.name}({_short(str(call.arguments))})" for call in episode.calls)
    elif doing == QUEUE:
        doing = "waiting for a slot" if episode.turn_id < 0 else "waiting for the rest of its wave"
    return f"{name}, {now - episode.started:.0f} s old, {turn}, for {since:.0f} s in: {doing}"


def _short(text: str) -> str:
    return text if len(text) <= _MOST_CODE else text[: _MOST_CODE - 1] + "…"


def _counts(status: WorkerStatus | None) -> str:
    assert status is not None
    return ", ".join(f"{number} in {state}" for state, number in sorted(status.doing.items()))
