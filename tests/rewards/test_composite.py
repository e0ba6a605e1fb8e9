"""Composite rewards: worked numbers for each term, and their sum."""

import asyncio
from typing import Any

import pytest

from agent_rl.records import StopReason, Turn
from agent_rl.registry import PartKind, build
from agent_rl.rewards.base import FinishedEpisode, Score
from tests.rewards.episodes import finished, turn


def value(part: dict[str, Any], episode: FinishedEpisode) -> float:
    found = build("shaping", PartKind("shaping").parse({"weight": 1.0, **part})).value(episode)
    assert isinstance(found, float)
    return found


def score(config: dict[str, Any], episode: FinishedEpisode) -> Score:
    async def run() -> Score:
        reward = build("reward", PartKind("reward").parse({"type": "composite", **config}))
        try:
            found = await reward.score(episode)
            assert isinstance(found, Score)
            return found
        finally:
            await reward.close()

    return asyncio.run(run())


def test_format_wants_a_closed_box_and_calls_that_parse() -> None:
    called = (turn(0, 5, ok=True), turn(1, 5))
    broken = (turn(0, 5, ok=False, malformed=True), turn(1, 5))
    assert value({"type": "format"}, finished(r"\boxed{18}", turns=called)) == 1.0
    assert value({"type": "format"}, finished(r"\boxed{18}", turns=broken)) == 0.0
    assert value({"type": "format"}, finished(r"\boxed{ }")) == 0.0
    assert value({"type": "format"}, finished("The answer is 18")) == 0.0
    assert value({"type": "format"}, finished(r"\boxed{18}", stop=StopReason.MAX_TOKENS)) == 0.0


@pytest.mark.parametrize(
    ("calls", "expected"),
    [([], 0.0), ([True], 0.5), ([True, True], 1.0), ([True] * 9, 1.0), ([False], -0.3), ([True, False], 0.5 - 0.15)],
)
def test_tool_use_saturates_and_failures_cost(calls: list[bool], expected: float) -> None:
    turns = (*(turn(k, 5, ok) for k, ok in enumerate(calls)), turn(len(calls), 5))
    part = {"type": "tool_use", "enough": 2, "error_weight": 0.3}
    assert value(part, finished(r"\boxed{17}", turns=turns)) == pytest.approx(expected)


@pytest.mark.parametrize(("sampled", "expected"), [(50, 0.0), (100, 0.0), (125, -0.25), (200, -1.0), (900, -1.0)])
def test_length_falls_in_a_straight_line(sampled: int, expected: float) -> None:
    turns: tuple[Turn, ...] = (turn(0, sampled - 20, ok=True), turn(1, 20))
    part = {"type": "length", "free_tokens": 100, "max_tokens": 200}
    assert value(part, finished(r"\boxed{17}", turns=turns)) == expected


def test_the_sum_with_every_term_in_the_parts() -> None:
    config = {
        "outcome_weight": 2.0,
        "shaping": [
            {"type": "format", "weight": 0.1},
            {"type": "tool_use", "weight": 0.2},
            {"type": "length", "weight": 0.4, "free_tokens": 0, "max_tokens": 100},
        ],
    }
    turns = (turn(0, 15, ok=True), turn(1, 10))
    right = score(config, finished(r"\boxed{17}", turns=turns))
    assert right.parts == {"outcome": 1.0, "unverifiable": 0.0, "format": 0.1, "tool_use": 0.2, "length": -0.1}
    assert right.reward == pytest.approx(2.2)
    wrong = score(config, finished(r"\boxed{18}", turns=turns))
    assert wrong.parts["outcome"] == 0.0
    assert wrong.reward == pytest.approx(0.2)


def test_the_outcome_may_be_a_function_and_its_mask_stays() -> None:
    config = {
        "outcome": {"type": "function", "path": "tests.rewards.functions.whole_score"},
        "shaping": [{"type": "format", "weight": 0.5}],
    }
    assert score(config, finished(r"\boxed{3}")) == Score(2.5, {"outcome": 1.0, "format": 0.5}, "undecided")


@pytest.mark.parametrize(
    ("shaping", "problem"),
    [
        ([{"type": "format", "weight": 1}, {"type": "format", "weight": 2}], "format twice"),
        ([{"type": "format"}], "weight is missing"),
        ([{"type": "lenght", "weight": 1}], "did you mean 'length'"),
        ([{"type": "length", "weight": 1, "free_tokens": 9, "max_tokens": 9}], "must be below max_tokens"),
    ],
)
def test_a_wrong_config_says_what_to_do(shaping: list[dict[str, Any]], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        PartKind("reward").parse({"type": "composite", "shaping": shaping})
