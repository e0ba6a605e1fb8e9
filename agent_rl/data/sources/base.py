"""The interface of prompt sources: a pure function from an index to a problem.

Random access makes the stream resumable: its whole state is the next index. Nothing here depends on the
process (no `hash()`), so every worker and every restart sees the same problems.
"""

import hashlib
import random
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Literal

from agent_rl.records import Prompt
from agent_rl.registry import PartBase, PartConfig

Split = Literal["train", "heldout"]

_NUM_BUCKETS = 10


class PromptSource(PartBase, ABC):
    """An endless stream of prompts; built as `cls(config, seed)`. A finite source also has `__len__` and wraps."""

    @abstractmethod
    def prompt(self, index: int) -> Prompt:
        """The prompt at place `index` >= 0: a pure function of (config, seed, index)."""


@dataclass(frozen=True)
class Problem:
    """A generated problem before it has a place in the stream."""

    text: str
    answer: str
    tags: dict[str, Any] = field(default_factory=dict)


class GeneratedConfig(PartConfig):
    """Keys of every generated source."""

    split: Split = "train"
    """Which problems to draw. A problem's own text decides its split, so the two never share one."""


class GeneratedSource(PromptSource):
    """Draws problems with a generator of its own for each index, until one belongs to the split."""

    def __init__(self, config: GeneratedConfig, seed: int) -> None:
        self.split = config.split
        self.seed = seed

    @abstractmethod
    def draw(self, rng: random.Random) -> Problem:
        """One problem of either split."""

    def prompt(self, index: int) -> Prompt:
        assert index >= 0
        rng = random.Random(f"{self.seed}/{index}")
        problem = self.draw(rng)
        while split_of(problem.text) != self.split:
            problem = self.draw(rng)
        return Prompt(index, ({"role": "user", "content": problem.text},), problem.answer, problem.tags)


def split_of(text: str) -> Split:
    """The split that a problem's text belongs to: a tenth of all texts, by a stable hash, is held out."""
    bucket = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % _NUM_BUCKETS
    return "heldout" if bucket == 0 else "train"
