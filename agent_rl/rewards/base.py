"""The interface of rewards: a score for a finished episode."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from agent_rl.records import Prompt, StopReason, Turn
from agent_rl.registry import PartBase
from agent_rl.verifier.extraction import extract_answer


@dataclass(frozen=True)
class FinishedEpisode:
    """What a reward sees. `texts`: what the policy wrote, one text a turn; tool output is in `turns` alone."""

    group_id: int
    episode_id: int
    attempt: int
    prompt: Prompt
    turns: tuple[Turn, ...]
    texts: tuple[str, ...]
    stop_reason: StopReason

    @property
    def final_text(self) -> str | None:
        """The last turn if it was an answer; None if the episode ended in any other way."""
        return self.texts[-1] if self.stop_reason is StopReason.ANSWER else None

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy wrote, over all turns."""
        return sum(len(turn.completion.token_ids) for turn in self.turns)


@dataclass(frozen=True)
class Score:
    """A reward, its named parts, and, if the episode must not be trained on, why.

    parts["outcome"] is 1.0 for a right answer and 0.0 for any other: groups are filtered and evaluations scored by
    it. A masked episode takes no part in the loss or in the baseline of its group.
    """

    reward: float
    parts: dict[str, float]
    mask_reason: str | None = None


class Reward(PartBase, ABC):
    """Scores episodes; built as `cls(config)`, one for each rollout worker."""

    @abstractmethod
    async def score(self, episode: FinishedEpisode) -> Score:
        """Never raises on what a policy wrote. An exception is a failure of the reward: see `rollout.reward_errors`."""

    def answer(self, final_text: str) -> str | None:
        """The answer that `score` judges in `final_text`, for majority votes; None if it finds none.

        The default follows `verifier.extraction`; a reward that reads answers in another way overrides it.
        """
        return extract_answer(final_text)

    async def close(self) -> None:
        """Free what the reward holds, such as processes."""
        return


class RewardError(Exception):
    """A reward that failed, with the episode that it failed on."""
