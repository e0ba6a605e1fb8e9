"""A plain function as the reward."""

import asyncio

import pytest

from agent_rl import registry
from agent_rl.rewards.base import Score
from agent_rl.rewards.function import FunctionReward
from agent_rl.settings import check
from tests.rewards import functions
from tests.rewards.episodes import finished


def reward(name: str, **keys: object) -> FunctionReward:
    config = {"type": "function", "path": f"tests.rewards.functions.{name}", **keys}
    return FunctionReward(check(FunctionReward.Config, config))


def score(name: str, text: str = "17", **keys: object) -> Score:
    return asyncio.run(reward(name, **keys).score(finished(text)))


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


def test_waiting_for_a_thread_is_not_the_functions_time() -> None:
    async def scenario() -> list[Score]:
        queued = reward("half_a_second", num_threads=1, timeout_s=1.5)
        return await asyncio.gather(*(queued.score(finished("17")) for _ in range(5)))

    assert [one.reward for one in asyncio.run(scenario())] == [1.0] * 5


def test_a_call_that_never_ends_takes_no_thread_from_the_others() -> None:
    async def scenario() -> Score:
        one_thread = reward("waits_on_a_cross", num_threads=1, timeout_s=1.0)
        with pytest.raises(TimeoutError):
            await one_thread.score(finished("x"))
        return await one_thread.score(finished("17"))

    try:
        assert asyncio.run(scenario()).reward == 1.0
    finally:
        functions.RELEASED.set()


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
