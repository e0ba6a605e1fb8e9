r"""Compares the episode's answer with the reference answer, as mathematics."""

from typing import Annotated, Literal

from pydantic import Field

from agent_rl.registry import PartConfig
from agent_rl.rewards.base import FinishedEpisode, Reward, Score
from agent_rl.verifier.extraction import RULES, Rule, extract_answer
from agent_rl.verifier.pool import PoolConfig, VerifierPool
from agent_rl.verifier.verdict import Outcome, Verdict, verify


class MathReward(Reward):
    """1 if the episode ended with an answer equal to the prompt's, else 0.

    Parts: outcome; unverifiable, 1.0 where no verdict was reached.
    """

    class Config(PartConfig):
        type: Literal["math"] = "math"
        extraction: Annotated[tuple[Rule, ...], Field(min_length=1)] = RULES
        r"""Where an answer is looked for, in order: in the last `\boxed{}`, after "answer is", after `####`, in the
        last line. The first mark that is there decides."""
        unverifiable: Literal["wrong", "mask"] = "wrong"
        """What an answer without a verdict earns: 0, or nothing at all, its episode then being left out of training.
        A policy can write such answers on purpose, so under `mask` watch the metric reward/unverifiable."""
        max_answer_chars: int = Field(1000, ge=1, le=4000)
        """A longer answer is unverifiable, unless it is the reference itself, character by character."""
        pool: PoolConfig = PoolConfig()
        """The processes for answers that take computer algebra, and their limits."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.pool = VerifierPool(config.pool)

    async def score(self, episode: FinishedEpisode) -> Score:
        verdict = await self._verdict(episode)
        outcome = float(verdict.outcome is Outcome.CORRECT)
        unverifiable = verdict.outcome is Outcome.UNVERIFIABLE
        masked = unverifiable and self.config.unverifiable == "mask"
        parts = {"outcome": outcome, "unverifiable": float(unverifiable)}
        return Score(outcome, parts, mask_reason="unverifiable" if masked else None)

    async def _verdict(self, episode: FinishedEpisode) -> Verdict:
        answer = self.answer(episode.final_text or "")
        if answer is None:
            return Verdict(Outcome.WRONG)
        return await verify(episode.prompt.answer, answer, self.pool, self.config.max_answer_chars)

    def answer(self, final_text: str) -> str | None:
        return extract_answer(final_text, self.config.extraction)

    async def close(self) -> None:
        await self.pool.close()
