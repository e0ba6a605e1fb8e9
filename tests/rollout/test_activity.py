"""Seconds by state: a worker is in one state at a time, and any span of time is covered."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_rl.records import Prompt
from agent_rl.rollout.activity import STATES, Activity
from agent_rl.rollout.episode import EpisodeTask


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def task(number: int) -> EpisodeTask:
    return EpisodeTask(Prompt(0, ({"role": "user", "content": "1+1"},), "2"), 0, number, 0)


def test_sampling_hides_tools_and_tools_hide_waiting() -> None:
    clock = Clock()
    activity = Activity(clock)
    for at, number, doing in [(101, 0, "queue"), (102, 0, "generate"), (104, 1, "tool"), (105, 0, "tool")]:
        clock.now = at
        activity.at(task(number), doing, turn_id=0)
    clock.now = 106
    with activity.pushing():
        clock.now = 107
    clock.now = 110
    activity.leave(task(0))
    activity.leave(task(1))
    clock.now = 112
    assert activity.seconds(100, 111) == {"push": 1, "generate": 3, "tool": 4, "score": 0, "queue": 1, "idle": 2}
    assert activity.seconds(111, 112) == {**dict.fromkeys(STATES, 0), "idle": 1}
    assert activity.status().oldest is None


def test_the_oldest_episode_is_the_one_that_started_first() -> None:
    clock = Clock()
    activity = Activity(clock)
    activity.at(task(5), "queue")
    clock.now = 101
    activity.at(task(3), "generate", 0)
    clock.now = 102
    activity.at(task(5), "tool", 1)
    status = activity.status()
    assert status.oldest is not None
    assert (status.oldest.task.episode_id, status.oldest.started, status.oldest.changed) == (5, 100, 102)
    assert (status.num_changes, status.doing) == (3, {"generate": 1, "tool": 1})


@given(
    steps=st.lists(st.tuples(st.floats(0, 10), st.integers(0, 3), st.sampled_from(STATES[1:5])), max_size=30),
    cuts=st.lists(st.floats(0, 400), min_size=2, max_size=6),
)
def test_seconds_sum_to_the_span_whatever_happened(steps: list[tuple[float, int, str]], cuts: list[float]) -> None:
    clock = Clock()
    activity = Activity(clock)
    for wait, number, doing in steps:
        clock.now += wait
        activity.at(task(number), doing)
    ordered = sorted(cuts)
    for begin, end in itertools.pairwise(ordered):
        assert sum(activity.seconds(begin, end).values()) == pytest.approx(end - begin, abs=1e-6)
