"""A plain function as the reward."""

import asyncio

import pytest

from agent_rl import registry
from agent_rl.rewards.base import Score
from agent_rl.rewards.function import FunctionReward
from agent_rl.settings import check
from tests.rewards.episodes import finished


def score(name: str, text: str = "17", **keys: object) -> Score:
    config = {"type": "function", "path": f"tests.rewards.functions.{name}", **keys}
    return asyncio.run(FunctionReward(check(FunctionReward.Config, config)).score(finished(text)))


def test_what_a_function_may_return() -> None:
    assert score("length_of_answer") == Score(2.0, {"outcome": 2.0})
    assert score("with_parts") == Score(0.75, {"outcome": 1.0, "fee": -0.25})
    assert score("whole_score") == Score(2.0, {"outcome": 1.0}, "undecided")


@pytest.mark.parametrize("name", ["text_instead", "not_a_number"])
def test_what_it_may_not_return(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        score(name)


def test_its_own_errors_come_through() -> None:
    with pytest.raises(ZeroDivisionError, match="no judge"):
        score("broken")
    with pytest.raises(TimeoutError):
        score("too_slow", timeout_s=0.05)
    assert score("too_slow").reward == 1.0


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("tests.rewards.functions.missing", "cannot be imported"),
        ("no_such_module.reward", "PYTHONPATH"),
        ("plain", "cannot be imported"),
        ("..", "no dotted path"),
        ("agent_rl.rewards.math.MathReward", "is not a function"),
    ],
)
def test_a_wrong_path_is_refused_before_the_run(path: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        check(FunctionReward.Config, {"type": "function", "path": path})
    with pytest.raises(ValueError, match="path is missing"):
        registry.PartKind("reward").parse("function")
