"""What a composite reward needs from a shaping term."""

from abc import ABC, abstractmethod

from agent_rl.registry import PartBase, PartConfig
from agent_rl.rewards.base import FinishedEpisode


class ShapingConfig(PartConfig):
    """What every shaping term's `Config` derives from."""

    weight: float
    """What the term's value is multiplied by."""


class Shaping(PartBase, ABC):
    """A term that is added to the outcome; built as `cls(config)`."""

    @abstractmethod
    def value(self, episode: FinishedEpisode) -> float:
        """The term before its weight. Never raises on what a policy wrote."""
