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

    def answer(self, final_text: str) -> str | None:
        r"""The answer that `score` judges in `final_text`, for majority votes; None if it finds none.

        As it stands the content of the last `\boxed{}`; a reward that reads its answers elsewhere overrides it.
        """
        from agent_rl.rewards.math import extract_answer  # itself a reward

        return extract_answer(final_text)
