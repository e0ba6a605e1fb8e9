"""Scores prompts of the `reasoning_gym` source with the verifier of their own task."""

import re
from typing import Literal

from pydantic import Field

from agent_rl.data.reasoning_gym_tasks import dataset, entry
from agent_rl.records import Prompt
from agent_rl.registry import PartConfig
from agent_rl.rewards.base import FinishedEpisode, Reward, Score
from agent_rl.verifier.extraction import extract_answer


class ReasoningGymReward(Reward):
    """1 if the task's verifier gives the final answer at least `threshold`, else 0.

    Parts: "outcome", and "score", the verifier's own number in [0, 1]; several verifiers give a little for any
    answer, so only their full score is a right answer by default.
    """

    class Config(PartConfig):
        threshold: float = Field(default=0.99, gt=0, le=1)
        """The least score that counts as a right answer."""
        answer_in: Literal["boxed", "number", "text"] = "boxed"
        r"""Where the answer stands: in the last `\boxed{}`, as the last number of the last turn (for models that keep
        to no format), or it is the whole of the last turn."""
        max_answer_chars: int = Field(default=2000, ge=1)
        """A longer answer is wrong: verifiers were not written for what a policy may write."""

    def __init__(self, config: Config) -> None:
        self.config = config

    async def score(self, episode: FinishedEpisode) -> Score:
        answer = None if episode.final_text is None else self.answer(episode.final_text)
        score = self._verify(episode.prompt, answer) if answer is not None else 0.0
        outcome = float(score >= self.config.threshold)
        return Score(outcome, {"outcome": outcome, "score": score})

    def answer(self, final_text: str) -> str | None:
        if self.config.answer_in == "number":
            numbers = re.findall(r"-?[0-9]+(?:\.[0-9]+)?", final_text)
            return numbers[-1] if numbers else None
        text = extract_answer(final_text, ("boxed",)) if self.config.answer_in == "boxed" else final_text
        return text.strip() if text is not None else None

    def _verify(self, prompt: Prompt, answer: str) -> float:
        """The verifier's score of `answer` for the entry that the prompt's tags name."""
        try:
            task, params, number = (prompt.tags[tag] for tag in ("task", "params", "entry"))
        except KeyError as key:
            raise ValueError(
                f"prompt {prompt.index} has no tag {key}; use it with prompts of type reasoning_gym"
            ) from None
        if len(answer) > self.config.max_answer_chars:
            return 0.0
        try:
            score = float(dataset(task, params).score_answer(answer, entry(task, params, number)))
        except Exception:  # a verifier that fails on an answer, such as int("x"), has not accepted it
            return 0.0
        return score if 0 <= score <= 1 else 0.0
