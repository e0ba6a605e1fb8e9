"""Dynamic sampling: which groups a batch keeps, and what becomes of the others."""

from dataclasses import replace

import numpy as np

from agent_rl.pipeline.selection import keep_without_spread, select_groups
from agent_rl.records import Episode, Prompt
from agent_rl.rollout.episode import EpisodeTask
from agent_rl.rollout.worker import FailedTask, RolloutResult
from tests.trajectories import random_trajectory

RNG = np.random.default_rng(0)


def group(group_id: int, *outcomes: float) -> list[Episode]:
    prompt = Prompt(group_id, ({"role": "user", "content": "x"},), "1")
    made = [
        replace(
            random_trajectory(RNG, 0),
            group_id=group_id,
            episode_id=group_id * 10 + i,
            reward_parts={"outcome": outcome},
        )
        for i, outcome in enumerate(outcomes)
    ]
    return [Episode(prompt, (), each) for each in made]


def broken(group_id: int) -> FailedTask:
    prompt = Prompt(group_id, ({"role": "user", "content": "x"},), "1")
    return FailedTask(EpisodeTask(prompt, group_id, group_id * 10 + 5, 0), "SessionLost", "gone")


def kept_groups(results: list[RolloutResult], dynamic: bool) -> list[int]:
    kept = select_groups(results, dynamic).kept
    return sorted({episode.trajectory.group_id for episode in kept})


def test_groups_without_spread_are_dropped_with_a_reason() -> None:
    results = [
        RolloutResult([*group(3, 1, 1), *group(1, 0, 1)], [broken(2)]),
        RolloutResult([*group(2, 0), *group(0, 0, 0)]),
    ]
    assert kept_groups(results, dynamic=False) == [0, 1, 3]
    assert kept_groups(results, dynamic=True) == [1]
    selection = select_groups(results, True)
    assert {g: why for g, (why, _) in selection.dropped.items()} == {2: "SessionLost", 0: "no_spread", 3: "no_spread"}
    assert selection.dropped[2][1] == "gone"
    assert selection.num_whole == 3
    assert selection.num_kept_groups == 1
    assert [episode.trajectory.episode_id for episode in selection.kept] == [10, 11]


def test_masked_episodes_have_no_say_in_spread_and_are_not_kept() -> None:
    right, wrong, masked = group(0, 1, 1, 0)
    masked = Episode(masked.prompt, (), replace(masked.trajectory, mask_reason="truncated"))
    selection = select_groups([RolloutResult([right, wrong, masked])], True)
    assert {g: why for g, (why, _) in selection.dropped.items()} == {0: "no_spread"}
    selection = select_groups([RolloutResult([right, wrong, masked])], False)
    assert [episode.trajectory.episode_id for episode in selection.kept] == [0, 1]


def test_spread_is_that_of_the_outcome_not_of_the_shaped_reward() -> None:
    shaped = [Episode(e.prompt, (), replace(e.trajectory, reward=float(i))) for i, e in enumerate(group(0, 1, 1))]
    assert len({e.trajectory.reward for e in shaped}) == 2
    assert kept_groups([RolloutResult(shaped)], dynamic=True) == []


def test_if_nothing_has_spread_the_first_round_is_kept_and_every_group_has_one_fate() -> None:
    rounds = [[RolloutResult(group(0, 1, 1), [broken(1)])], [RolloutResult(group(2, 0, 0))]]
    nothing = select_groups([result for results in rounds for result in results], True)
    assert not nothing.kept
    selection = keep_without_spread(nothing, rounds[0])
    assert {e.trajectory.group_id for e in selection.kept} == {0}
    assert {g: why for g, (why, _) in selection.dropped.items()} == {1: "SessionLost", 2: "no_spread"}
    assert np.all([e.trajectory.reward_parts["outcome"] == 1 for e in selection.kept])
