"""Chains: a start value and k operations, each of which needs the value before it, so one tool turn a step.

`s37 *4 +19 %50` starts at 37 and means ((37 * 4) + 19) % 50 = 17.
"""

import random
from dataclasses import dataclass

from pydantic import Field, model_validator

from agent_rl.data.sources.base import GeneratedConfig, GeneratedSource, Problem

Step = tuple[str, int]


@dataclass(frozen=True)
class Chain:
    """A start value and the steps that are applied to it in order."""

    start: int
    steps: tuple[Step, ...]

    @property
    def text(self) -> str:
        return " ".join([f"s{self.start}", *(f"{op}{n}" for op, n in self.steps)])

    @property
    def values(self) -> list[int]:
        """The start value and the value after each step: k + 1 integers, the last one is the answer."""
        values = [self.start]
        for step in self.steps:
            values.append(apply(values[-1], step))
        return values


def apply(value: int, step: Step) -> int:
    """`value` after one step."""
    op, n = step
    match op:
        case "+":
            return value + n
        case "-":
            return value - n
        case "*":
            return value * n
        case "%":
            return value % n
    raise AssertionError(f"unknown operator {op!r}")


def draw_chain(rng: random.Random, k: int) -> Chain:
    """A chain of k steps with a start in 10..99. No value is negative and no step leaves the value as it was."""
    start = value = rng.randint(10, 99)
    steps: list[Step] = []
    while len(steps) < k:
        step = _draw_step(rng)
        if _allowed(value, step, steps):
            steps.append(step)
            value = apply(value, step)
    return Chain(start, tuple(steps))


def _draw_step(rng: random.Random) -> Step:
    op = rng.choice("+-*%")
    return op, rng.randint(2, 9) if op == "*" else rng.randint(11, 97)


def _allowed(value: int, step: Step, steps: list[Step]) -> bool:
    """Whether `step` may follow `steps`, which led to `value`: values stay small and every step matters."""
    op, n = step
    if value > 2000 and op not in "%-":
        return False
    if (op == "-" and value < 100) or (op == "%" and value < 30):
        return False
    used = op != "*" and any(other == n for other_op, other in steps if other_op != "*")
    # A step without effect can be skipped unnoticed: the policy would be paid for doing so.
    return not used and apply(value, step) != value


class ChainSource(GeneratedSource):
    """Draws the number of steps k uniformly, then the chain; tags `{"k": k}`."""

    class Config(GeneratedConfig):
        min_steps: int = Field(default=1, ge=1)
        """Fewest steps of a chain."""
        max_steps: int = Field(default=5, le=20)
        """Most steps of a chain."""

        @model_validator(mode="after")
        def _ordered(self) -> "ChainSource.Config":
            if self.min_steps > self.max_steps:
                raise ValueError(f"min_steps {self.min_steps} exceeds max_steps {self.max_steps}; swap or raise them")
            return self

    def __init__(self, config: Config, seed: int) -> None:
        super().__init__(config, seed)
        self.min_steps, self.max_steps = config.min_steps, config.max_steps

    def draw(self, rng: random.Random) -> Problem:
        k = rng.randint(self.min_steps, self.max_steps)
        chain = draw_chain(rng, k)
        return Problem(chain.text, str(chain.values[-1]), {"k": k})
