"""What the rollout needs from a reward: a number for a finished episode."""

from abc import ABC, abstractmethod

from agent_rl.records import Prompt, StopReason
from agent_rl.registry import PartBase


class Reward(PartBase, ABC):
    """Scores an episode; built as `cls(config)`."""

    @abstractmethod
    def score(self, prompt: Prompt, final_text: str | None, stop_reason: StopReason) -> tuple[float, dict[str, float]]:
        """(reward, its named parts). `final_text` is what the policy wrote in its last turn, None if nothing.

        Parts include "outcome", 1.0 for a right answer and 0.0 otherwise. Never raises on what a policy wrote.
        """
