r"""The math reward: from a finished episode to a score."""

import asyncio

import pytest

from agent_rl import registry
from agent_rl.records import StopReason
from agent_rl.rewards.base import FinishedEpisode, Score
from agent_rl.rewards.math import MathReward
from agent_rl.settings import check
from tests.rewards.episodes import finished


def score(episode: FinishedEpisode, **keys: object) -> Score:
    reward = MathReward(check(MathReward.Config, {"type": "math", **keys}))

    async def run() -> Score:
        try:
            return await reward.score(episode)
        finally:
            await reward.close()

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        (r"\boxed{17}", 1.0),
        (r"so \boxed{ 17 }.", 1.0),
        (r"\boxed{\frac{34}{2}}", 1.0),
        ("The answer is 17.", 1.0),
        (r"\boxed{18}", 0.0),
        (r"\boxed{}", 0.0),
        (r"\boxed{17", 0.0),
        ("", 0.0),
        (None, 0.0),
    ],
)
def test_the_reward_is_the_outcome(text: str | None, outcome: float) -> None:
    assert score(finished(text)) == Score(outcome, {"outcome": outcome, "unverifiable": 0.0})


@pytest.mark.parametrize("stop", [s for s in StopReason if s != StopReason.ANSWER])
def test_only_an_ended_answer_is_scored(stop: StopReason) -> None:
    assert score(finished(r"\boxed{17}", stop=stop)).reward == 0.0


def test_extraction_can_be_strict() -> None:
    assert score(finished("17"), extraction=["boxed"]).reward == 0.0
    assert score(finished(r"\boxed{17}"), extraction=["boxed"]).reward == 1.0


@pytest.mark.parametrize(("policy", "reason"), [("wrong", None), ("mask", "unverifiable")])
def test_an_answer_without_a_verdict_is_counted_and_may_be_masked(policy: str, reason: str | None) -> None:
    found = score(finished(r"\boxed{" + "9" * 2000 + "}"), unverifiable=policy)
    assert found == Score(0.0, {"outcome": 0.0, "unverifiable": 1.0}, mask_reason=reason)


def test_algebra_goes_to_a_process() -> None:
    keys = {"pool": {"cpu_s": 20, "wall_s": 30, "num_processes": 1}}
    assert score(finished(r"\boxed{(x+1)^2}", "x^2+2x+1"), **keys).reward == 1.0
    assert score(finished(r"\boxed{(x-1)^2}", "x^2+2x+1"), **keys).reward == 0.0


def test_registry_finds_it() -> None:
    assert registry.find("reward", "math") is MathReward
    assert registry.names("reward") == ["composite", "function", "math", "reasoning_gym"]
    assert registry.names("shaping") == ["format", "length", "tool_use"]
