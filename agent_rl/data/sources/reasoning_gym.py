"""Procedural problems of reasoning-gym, by task name and weight. The reward of the same name scores them."""

import random
import re
from typing import Any

from pydantic import Field

from agent_rl.data.reasoning_gym_tasks import dataset, entry
from agent_rl.data.sources.base import GeneratedConfig, GeneratedSource, Problem
from agent_rl.settings import Settings


class Task(Settings):
    """One generator of reasoning-gym."""

    name: str
    """Its name there, such as `chain_sum`."""
    weight: float = Field(default=1.0, gt=0)
    """Its share of the prompts, relative to the other weights."""
    params: dict[str, Any] = {}  # noqa: RUF012
    """Keys of the task's own config, such as `{min_terms: 2, max_digits: 1}`."""
    as_chain: bool = False
    """Write the entry's arithmetic expression alone, as the built-in chains are written (`s37 +19 -5`): for the tiny
    model, which reads nothing else. Of sums or of products only: a chain is worked from left to right."""


class ReasoningGymSource(GeneratedSource):
    """Draws a task by weight, then one of its entries; tags `{"task", "entry", "params"}` name the entry again.

    Entries are drawn by number from one generator a task, and a problem's own text decides its split, so training
    and held-out prompts share none whatever their seeds.
    """

    class Config(GeneratedConfig):
        tasks: list[Task] = Field(min_length=1)
        """The tasks to draw from."""
        instruction: str = r"Put your final answer within \boxed{}."
        """Appended to the problem after an empty line; the empty text appends nothing."""

    def __init__(self, config: Config, seed: int) -> None:
        super().__init__(config, seed)
        self.config = config
        for task in config.tasks:
            dataset(task.name, task.params)  # a wrong name or parameter is said before a run starts

    def draw(self, rng: random.Random) -> Problem:
        task = rng.choices(self.config.tasks, [task.weight for task in self.config.tasks])[0]
        number = rng.getrandbits(31)
        problem = entry(task.name, task.params, number)
        question = _chain(problem) if task.as_chain else problem["question"]
        text = f"{question}\n\n{self.config.instruction}" if self.config.instruction else question
        return Problem(text, str(problem["answer"]), {"task": task.name, "entry": number, "params": task.params})


def _chain(problem: dict[str, Any]) -> str:
    """`37 + 19 - 5` as `s37 +19 -5`. Raises `ValueError` for an entry that is no such expression."""
    expression = str(problem["metadata"].get("expression", ""))
    if not re.fullmatch(r"\d+(( [+-] \d+)*|( \* \d+)*)", expression):
        raise ValueError(f"as_chain needs sums or products of whole numbers, got {problem['question']!r}")
    return "s" + re.sub(r" ([*+-]) ", r" \1", expression)
