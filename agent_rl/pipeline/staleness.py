"""Predicts the mean lag of continuous rollouts, and recommends concurrency and queue for a target lag.

Symbols, where the unit of C, B and Q is responses:

- rho: responses that rollouts can finish per second, divided by those that the trainer can train on per second
- C: responses sampled at once; B: responses that the trainer takes a step; Q: responses that the queue holds
- M: mean length of the longest response of a group, divided by the mean length of a response; at least 1

Source of the formulas: "Predicting and Controlling Staleness in Fully Asynchronous RL Training", Applied Compute, 2026.
They are steady-state means. They assume a first-in, first-out queue and even arrivals: many more responses than a
group at once, out of step with each other. For rho > 1 they describe a queue that drops its oldest responses when it is
full. The queues of this project make rollouts wait instead: `full="wait"`.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

from agent_rl.config import RunConfig

Side = Literal["left", "right"]
Full = Literal["drop", "wait"]


@dataclass(frozen=True)
class Load:
    """The symbols of the module, from which the mean lag follows. Raises `ValueError` if one is out of range."""

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
    """Policy versions from a response's first token to the end of its group, and from there to its training."""

    pre_queue: float
    in_queue: float

    @property
    def total(self) -> float:
        return self.pre_queue + self.in_queue


def mean_lag(load: Load, side: Side | None = None) -> MeanLag:
    """The steady-state mean lag. At rho = 1 the limits from the two sides differ; `side` chooses one.

    rho < 1: pre-queue C M / B, in-queue rho. rho > 1: pre-queue C M / (rho B), in-queue (2 Q/B + rho - 1) / (2 rho).
    For a full queue that makes rollouts wait they are C M / B and Q/B, by Little's law; this case is our own.
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
    """Responses sampled at once, the capacity of the queue in responses, and the rho and lag that follow."""

    concurrency: int
    queue: int
    rho: float
    lag: MeanLag


def recommend(target: float, load: Load) -> Recommendation:
    """The highest concurrency, then the largest queue, with a mean lag of at most `target` policy versions.

    Assumes that rollout speed is proportional to concurrency, as it is before the engine saturates. Concurrency that
    makes rho exceed 1 is not recommended, since it only adds lag. The queue holds at least one batch. Raises
    `ValueError` if even one response at a time has too much lag.
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
    """Concurrency, batch and queue of a run's config, in responses.

    `fully_async` bounds the responses in flight and queued, by `max_groups` and by `max_lag`. A response in flight
    takes `tail` of these places; the queue has the rest. The other regimes are treated as if they sampled one batch at
    once without a pause, with one batch queued.
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
