"""Several sources as one stream, each with its share."""

import random
from typing import Annotated, Any

from pydantic import Field

from agent_rl import registry
from agent_rl.data.sources.base import PromptSource
from agent_rl.records import Prompt
from agent_rl.registry import PartConfig, PartKind
from agent_rl.settings import Settings

_BLOCK = 1000


class Share(Settings):
    """One source of a mixture."""

    weight: float = Field(default=1.0, gt=0)
    """Its share of the prompts, relative to the other weights."""
    prompts: Annotated[Any, PartKind("prompts")]
    """The source: a file of `agent_rl/data/sources/`."""
    name: str | None = None
    """Value of the tag `source` on its prompts; null takes the source's type."""


class MixtureSource(PromptSource):
    """Each source in its own order, drawn from by weight; every thousand prompts have the shares exactly.

    Endless. Which source place i draws from, and how often it was drawn from before, follow from i alone: a
    thousand places are dealt out by weight, rounded to whole prompts, and shuffled with a seed of (run, i // 1000).
    """

    class Config(PartConfig):
        sources: list[Share] = Field(min_length=1)
        """The sources to mix."""

    def __init__(self, config: Config, seed: int) -> None:
        self.seed = seed
        self.names = [share.name or share.prompts.type for share in config.sources]
        self.counts = _whole_shares([share.weight for share in config.sources], self.names)
        self.sources: list[PromptSource] = [registry.build("prompts", s.prompts, seed) for s in config.sources]
        self._block = -1
        self._dealt: list[tuple[int, int]] = []

    def prompt(self, index: int) -> Prompt:
        assert index >= 0
        block, place = divmod(index, _BLOCK)
        source, rank = self._deal(block)[place]
        drawn = self.sources[source].prompt(block * self.counts[source] + rank)
        return Prompt(index, drawn.messages, drawn.answer, {**drawn.tags, "source": self.names[source]})

    def _deal(self, block: int) -> list[tuple[int, int]]:
        """(source, how many of its prompts came before in this block) for each place of a block."""
        if block != self._block:
            order = [source for source, count in enumerate(self.counts) for _ in range(count)]
            random.Random(f"{self.seed}/mixture/{block}").shuffle(order)
            seen = [0] * len(self.counts)
            self._dealt = []
            for source in order:
                self._dealt.append((source, seen[source]))
                seen[source] += 1
            self._block = block
        return self._dealt


def _whole_shares(weights: list[float], names: list[str]) -> list[int]:
    """Prompts a block for each weight, by largest remainder. Raises `ValueError` for a share below one prompt."""
    exact = [_BLOCK * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (counts[i] - exact[i], i))
    for i in by_remainder[: _BLOCK - sum(counts)]:
        counts[i] += 1
    if 0 in counts:
        name = names[counts.index(0)]
        raise ValueError(f"the weight of source {name!r} is less than a thousandth of the mixture; raise it")
    return counts
