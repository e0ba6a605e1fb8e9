"""Tracks what a worker's episodes do now, and where the worker's seconds went."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agent_rl.records import ToolCall

if TYPE_CHECKING:
    from agent_rl.rollout.episode import EpisodeTask

PUSH, GENERATE, TOOL, SCORE, QUEUE, IDLE = "push", "generate", "tool", "score", "queue", "idle"
STATES = (PUSH, GENERATE, TOOL, SCORE, QUEUE, IDLE)
"""A worker is in the first of these that holds: it loads weights; some episode is being sampled; none is, and some
waits for a tool; for its reward; for a slot or the rest of its wave; it has no episode."""
_MOST_CHANGES = 100_000


@dataclass
class EpisodeStatus:
    """Where an episode stands: `doing` one of `STATES` in turn `turn_id` (-1: before the first) since `changed`."""

    task: "EpisodeTask"
    started: float
    changed: float
    doing: str
    turn_id: int = -1
    calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class WorkerStatus:
    """The state of a worker. `num_changes` grows with every change of an episode; `doing` counts episodes by state."""

    num_changes: int
    doing: dict[str, int]
    oldest: EpisodeStatus | None


@dataclass
class Activity:
    """Records what a worker's episodes do, in one event loop. `clock` must be comparable between processes."""

    clock: Callable[[], float] = time.time
    num_changes: int = 0
    _episodes: dict[int, EpisodeStatus] = field(default_factory=dict)
    _changes: list[tuple[float, str]] = field(default_factory=list)
    _counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._changes.append((self.clock(), IDLE))

    def at(self, task: "EpisodeTask", doing: str, turn_id: int = -1, calls: tuple[ToolCall, ...] = ()) -> None:
        """Record that an episode now does `doing`, one of `STATES`."""
        now, before = self.clock(), self._episodes.get(task.sequence_id)
        started = before.started if before else now
        if before:
            self._counts[before.doing] -= 1
        self._episodes[task.sequence_id] = EpisodeStatus(task, started, now, doing, turn_id, calls)
        self._count(doing, 1)

    def leave(self, task: "EpisodeTask") -> None:
        """Record that an episode is over."""
        self._count(self._episodes.pop(task.sequence_id).doing, -1)

    @contextmanager
    def pushing(self) -> Iterator[None]:
        """Record, while the block runs, that the worker loads weights."""
        self._count(PUSH, 1)
        try:
            yield
        finally:
            self._count(PUSH, -1)

    def _count(self, doing: str, change: int) -> None:
        self._counts[doing] += change
        self.num_changes += 1
        state = next((state for state in STATES if self._counts[state] > 0), IDLE)
        if state != self._changes[-1][1]:
            self._changes.append((self.clock(), state))
            del self._changes[:-_MOST_CHANGES]

    def seconds(self, begin: float, end: float) -> dict[str, float]:
        """Seconds in each state from `begin` to `end` of the clock; they sum to `end - begin`. Earlier ones are
        forgotten, so ask in order."""
        found = dict.fromkeys(STATES, 0.0)
        spans = zip(self._changes, [*self._changes[1:], (max(end, self._changes[-1][0]), IDLE)], strict=True)
        for (start, state), (stop, _) in spans:
            found[state] += max(min(stop, end) - max(start, begin), 0.0)
        found[IDLE] += max(min(self._changes[0][0], end) - begin, 0.0)  # before the worker was there
        ended = sum(time <= end for time, _ in self._changes)
        del self._changes[: max(ended - 1, 0)]
        return found

    def status(self) -> WorkerStatus:
        oldest = min(self._episodes.values(), key=lambda status: status.started, default=None)
        return WorkerStatus(self.num_changes, {name: n for name, n in self._counts.items() if n > 0}, oldest)
