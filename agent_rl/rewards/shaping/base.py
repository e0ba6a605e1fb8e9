"""The interface of shaping terms."""

from abc import ABC, abstractmethod

from agent_rl.registry import PartBase, PartConfig
from agent_rl.rewards.base import FinishedEpisode


class ShapingConfig(PartConfig):
    """The base of every shaping term's `Config`."""

    weight: float
    """Factor on the term's value."""


class Shaping(PartBase, ABC):
    """A term that is added to the outcome; built as `cls(config)`."""

    @abstractmethod
    def value(self, episode: FinishedEpisode) -> float:
        """The term before its weight. Never raises on what a policy wrote."""
