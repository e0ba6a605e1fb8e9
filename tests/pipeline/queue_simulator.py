"""A discrete-event simulator of continuous rollouts, a queue of groups and a trainer: what the formulas abstract."""

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from agent_rl.pipeline.staleness import Full, MeanLag


@dataclass
class Group:
    """`started`: the policy version at the start of each of its responses; `arrived`: at its end."""

    missing: int
    started: list[int]
    arrived: int = 0


def simulate(
    rho: float,
    concurrency: int,
    batch: int,
    queue: int,
    length: Callable[[random.Random], float],
    group_size: int = 1,
    full: Full = "drop",
    num_steps: int = 800,
    seed: int = 0,
    in_step: bool = False,
) -> MeanLag:
    """Mean lag over the last nine tenths of the steps. `length` has mean 1; a slot samples one unit of it a second.

    Each of the slots takes the next response of the stream as it gets free. With `full` "wait" a finished group that
    finds the queue full stays in its slots. `in_step` starts all slots at once; otherwise the first responses are cut
    at random, as if sampling had gone on for long.
    """
    simulator = _Simulator(rho, concurrency, batch, queue, length, group_size, full, random.Random(seed))
    return simulator.run(num_steps, in_step)


class _Simulator:
    def __init__(
        self,
        rho: float,
        concurrency: int,
        batch: int,
        queue: int,
        length: Callable[[random.Random], float],
        group_size: int,
        full: Full,
        rng: random.Random,
    ) -> None:
        self.concurrency, self.group_size, self.full, self.rng, self.length = concurrency, group_size, full, rng, length
        self.pull, self.capacity = batch // group_size, queue // group_size
        self.train_s = rho * batch / concurrency
        self.events: list[tuple[float, int, Group | None]] = []
        self.count = 0
        self.now, self.version, self.training = 0.0, 0, False
        self.open: Group | None = None
        self.queue: deque[Group] = deque()
        self.blocked: deque[Group] = deque()
        self.lags: list[tuple[int, float, float]] = []

    def run(self, num_steps: int, in_step: bool) -> MeanLag:
        for _ in range(self.concurrency):
            self._start(1.0 if in_step else self.rng.random())
        while self.version < num_steps:
            self.now, _, group = heapq.heappop(self.events)
            if group is None:
                self.version, self.training = self.version + 1, False
            else:
                self._finish(group)
            self._train()
        kept = [lag for lag in self.lags if lag[0] > num_steps // 10]
        return MeanLag(sum(lag[1] for lag in kept) / len(kept), sum(lag[2] for lag in kept) / len(kept))

    def _push(self, delay: float, group: Group | None) -> None:
        self.count += 1
        heapq.heappush(self.events, (self.now + delay, self.count, group))

    def _start(self, fraction: float = 1.0) -> None:
        if self.open is None or len(self.open.started) == self.group_size:
            self.open = Group(self.group_size, [])
        self.open.started.append(self.version)
        self._push(fraction * self.length(self.rng), self.open)

    def _finish(self, group: Group) -> None:
        group.missing -= 1
        if group.missing:
            self._start()  # its slot goes on with the next response
        elif self.full == "wait" and len(self.queue) == self.capacity:
            self.blocked.append(group)
        else:
            self._arrive(group)

    def _arrive(self, group: Group) -> None:
        group.arrived = self.version
        self.queue.append(group)
        if len(self.queue) > self.capacity:
            self.queue.popleft()
        self._start()

    def _train(self) -> None:
        if self.training or len(self.queue) < self.pull:
            return
        for group in [self.queue.popleft() for _ in range(self.pull)]:
            pre = group.arrived - sum(group.started) / len(group.started)
            self.lags.append((self.version, pre, self.version - group.arrived))
        while self.blocked and len(self.queue) < self.capacity:
            self._arrive(self.blocked.popleft())
        self.training = True
        self._push(self.train_s, None)
