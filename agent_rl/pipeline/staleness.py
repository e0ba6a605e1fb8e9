"""Mean lag of continuous rollouts, predicted from a few figures, and the concurrency and queue for a wanted lag.

Symbols, with responses as the unit of all three counts:

- rho: responses that rollouts could finish per second, over those that the trainer could train on per second
- C: responses sampled at once; B: responses that the trainer takes a step; Q: responses that the queue holds
- M: mean length of a group's longest response over the mean length of a response, at least 1

Source of the formulas: "Predicting and Controlling Staleness in Fully Asynchronous RL Training", Applied Compute, 2026.
They are steady-state means that need even arrivals (many more responses than a group at once, out of step with each
other) and a first-in, first-out queue. For rho > 1 they describe a queue that drops its oldest responses when it is
full. A queue that makes rollouts wait instead, as this project's do, keeps old responses: `full="wait"`.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

from agent_rl.config import RunConfig

Side = Literal["left", "right"]
Full = Literal["drop", "wait"]


@dataclass(frozen=True)
class Load:
    """The figures that mean lag follows from; the module says what they are. Raises `ValueError` out of range."""

    rho: float
    concurrency: float
    batch: float
    queue: float
    tail: float = 1.0
    full: Full = "drop"

    def __post_init__(self) -> None:
        for name, least in (("rho", 0.0), ("batch", 0.0), ("concurrency", None), ("queue", None)):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0 or value == least:
                above = "above 0" if least is not None else "at least 0"
                raise ValueError(f"{name} must be {above}, got {value}")
        if not self.tail >= 1:
            raise ValueError(f"tail is the longest of a group over the mean, so at least 1; got {self.tail}")


@dataclass(frozen=True)
class MeanLag:
    """Policy versions that pass from a response's first token to its group's end, and from there to its training."""

    pre_queue: float
    in_queue: float

    @property
    def total(self) -> float:
        return self.pre_queue + self.in_queue


def mean_lag(load: Load, side: Side | None = None) -> MeanLag:
    """The steady-state mean. At rho = 1 the limits from the two sides differ, so `side` must say which is meant.

    rho < 1: pre-queue C M / B, in-queue rho. rho > 1: pre-queue C M / (rho B), in-queue (2 Q/B + rho - 1) / (2 rho).
    A full queue that makes rollouts wait takes the factor 1/rho away: C M / B and Q/B (ours, by Little's law).
    """
    if load.rho == 1 and side is None:
        raise ValueError(
            "at rho = 1 mean lag jumps unless the queue holds one batch; say from which side: left or right"
        )
    in_flight = load.concurrency * load.tail / load.batch
    if load.rho < 1 or (load.rho == 1 and side == "left"):
        return MeanLag(in_flight, load.rho)
    batches = load.queue / load.batch
    if load.full == "wait":
        return MeanLag(in_flight, batches)
    return MeanLag(in_flight / load.rho, (2 * batches + load.rho - 1) / (2 * load.rho))


@dataclass(frozen=True)
class Recommendation:
    """Responses sampled at once, the queue's capacity in responses, and what they lead to."""

    concurrency: int
    queue: int
    rho: float
    lag: MeanLag


def recommend(target: float, load: Load) -> Recommendation:
    """The most concurrency, then the largest queue, whose mean lag stays within `target` policy versions.

    Rollout speed is taken to grow with concurrency from the measured point, so rho C'/C: true below the engine's
    saturation. More than balances the trainer (rho = 1) would add lag and nothing else. The queue holds one batch at
    least. Raises `ValueError` where even one response at a time is too many.
    """
    per_response = load.tail / load.batch + load.rho / load.concurrency
    balanced = load.concurrency / load.rho
    concurrency = math.floor(min(target / per_response, balanced) + 1e-9)
    if concurrency < 1:
        raise ValueError(
            f"continuous rollouts at batches of {load.batch:g} cannot have a mean lag of {target:g}: one response at a "
            f"time is {per_response:.3g} already; raise the target or use pipeline.type sync"
        )
    rho = load.rho * concurrency / load.concurrency
    lag = mean_lag(replace(load, rho=rho, concurrency=concurrency), "left")
    spare = target - concurrency * load.tail / load.batch
    queue = max(math.floor(spare * load.batch + 1e-9), math.ceil(load.batch))
    return Recommendation(concurrency, queue, rho, lag)


def configured(config: RunConfig, tail: float = 1.0) -> tuple[float, float, float]:
    """Concurrency, batch and queue that a run's config comes to, in responses.

    `fully_async` bounds what is sampled and queued together, by `max_groups` and by the lag: a queue is what is left
    of that beside the responses in flight, which hold `tail` places each. Other regimes are taken as if they sampled
    one batch at once without a pause, with one batch queued.
    """
    pipeline, batch = config.pipeline, config.batch.num_prompts * config.batch.group_size
    slots = config.rollout.num_workers * config.rollout.max_concurrent_episodes
    if (max_lag := getattr(pipeline, "max_lag", None)) is None:
        return min(slots, batch), batch, batch
    held = max_lag * batch
    if pipeline.max_groups is not None:
        held = min(held, pipeline.max_groups * config.batch.group_size)
    concurrency = min(slots, held / tail)
    return concurrency, batch, held - concurrency * tail
