"""Masks and failing rewards in whole runs: on a real Ray, tool server, engine and trainer."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest

from agent_rl.pipeline.continuous import ContinuousController
from agent_rl.pipeline.pacing import Pacing
from agent_rl.pipeline.run_directory import RunDirectory, read_metrics
from agent_rl.pipeline.selection import masked_groups
from agent_rl.pipeline.state import RunState
from agent_rl.records import Episode, Prompt
from agent_rl.rollout.worker import RolloutResult
from agent_rl.run import local_ray, train
from tests.configs import quickstart
from tests.trajectories import random_trajectory
from tests.whole_runs import rollout_facts


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """One Ray for all runs of this file."""
    with local_ray(2):
        yield


def run(path: Path, function: str, *overrides: str) -> list[dict[str, Any]]:
    """Two steps of three groups of four with a function as the reward; the ledger's events."""
    config = quickstart(
        "num_steps=2",
        "batch.num_prompts=3",
        "batch.group_size=4",
        "eval.every=0",
        "checkpoint.every=0",
        "pipeline={type: sync}",
        f"reward={{type: function, path: tests.rewards.functions.{function}}}",
        *overrides,
    )
    assert train(config, path, False, lambda row: None).complete
    return [json.loads(line) for line in (path / "ledger.jsonl").read_text().splitlines()]


def fates(path: Path) -> list[tuple[int, str, str | None, int]]:
    """(group, fate, reason, number of episodes), from the training facts."""
    rows = pl.read_parquet(path / "training_facts.parquet" / "*.parquet")
    counted = rows.group_by("group_id", "fate", "reason").len().sort("group_id", "fate")
    return list(counted.iter_rows())


def dropped(ledger: list[dict[str, Any]]) -> dict[int, tuple[str, str]]:
    return {
        group: (event["reason"], event["message"])
        for event in ledger
        if event["event"] == "dropped"
        for group in event["group_ids"]
    }


def test_masked_episodes_are_not_trained_and_are_counted(tmp_path: Path) -> None:
    ledger = run(tmp_path, "masks_some")
    lone = ("masked_undecided", "3 of 4 episodes are masked")
    assert dropped(ledger) == {2: lone, 5: lone}
    assert fates(tmp_path) == [
        (0, "trained", None, 4),
        (1, "masked", "undecided", 1),
        (1, "trained", None, 3),
        (2, "dropped", "masked_undecided", 4),
        (3, "trained", None, 4),
        (4, "masked", "undecided", 1),
        (4, "trained", None, 3),
        (5, "dropped", "masked_undecided", 4),
    ]
    for row in read_metrics(tmp_path):
        assert row["masked/undecided"] == 4
        assert row["reward/outcome"] == 0.25
        # The tokens of the masked episodes are not among those of the step.
        facts = rollout_facts(tmp_path).filter(pl.col("batch") == row["step"])
        kept = facts.filter(pl.col("mask_reason").is_null() & (pl.col("group_id") % 3 != 2))
        assert row["trained_tokens"] == kept["num_sampled"].sum() < facts["num_sampled"].sum()
    # The baseline of a group is the mean of the episodes that are left: rewards 0, 0, 1.
    training = pl.read_parquet(tmp_path / "training_facts.parquet" / "*.parquet")
    left = training.filter((pl.col("group_id") == 1) & (pl.col("fate") == "trained")).sort("episode_id")
    rewards = np.array([0.0, 0.0, 1.0])
    assert left["advantage"].to_list() == pytest.approx(list((rewards - 1 / 3) / (rewards.std(ddof=1) + 1e-6)))


def test_a_batch_that_is_masked_whole_changes_nothing_and_the_run_goes_on(tmp_path: Path) -> None:
    ledger = run(tmp_path, "masks_all")
    assert len(dropped(ledger)) == 6
    assert [row["skipped_empty"] for row in read_metrics(tmp_path)] == [1.0, 1.0]
    assert [row["trained_tokens"] for row in read_metrics(tmp_path)] == [0, 0]


def test_a_fully_async_run_whose_groups_are_all_masked_stops_with_the_reason(tmp_path: Path) -> None:
    """Each is replaced by another, so it would wait for its first batch for ever."""
    with pytest.raises(ValueError, match=r"the last 12 groups gave nothing to train on; .* masked_undecided: 4 of 4"):
        run(tmp_path, "masks_all", "pipeline={type: fully_async}")
    events = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert len(dropped(events)) == 11, "the one that stops the run is still in flight"
    assert not [event for event in events if event["event"] == "trained"]


def result_of(masked: bool) -> RolloutResult:
    """A group of three, of which masking takes all or one."""
    rng, prompt = np.random.default_rng(0), Prompt(0, ({"role": "user", "content": "1+1"},), "2")
    group = [random_trajectory(rng, i, group_size=3) for i in range(3)]
    group = [replace(t, mask_reason="truncated") if masked or t is group[0] else t for t in group]
    return RolloutResult([Episode(prompt, (), t) for t in group])


@pytest.mark.parametrize(("stop", "number"), [(False, 8), (True, 2)])
def test_how_many_groups_in_a_row_may_give_nothing(tmp_path: Path, stop: bool, number: int) -> None:
    """Four batches' worth, or one where a stop is asked for; one group to train on begins the count anew."""
    config = quickstart("batch.num_prompts=2", "pipeline={type: fully_async}")
    directory = RunDirectory(tmp_path, config)
    stages: Any = SimpleNamespace(eval_workers=None)
    controller = ContinuousController(config, Pacing(2, 0, 2, 9, wait=True), stages, directory, print)
    controller.stop_requested = stop
    for masked in [*[True] * (number - 1), False] * 2:
        controller._select(result_of(masked))
    for _ in range(number - 1):
        controller._select(result_of(masked=True))
    with pytest.raises(ValueError, match=f"the last {number} groups gave nothing to train on; .* masked_truncated"):
        controller._select(result_of(masked=True))
    directory.close()


def test_a_failing_reward_drops_the_group_and_names_the_episode(tmp_path: Path) -> None:
    ledger = run(tmp_path, "fails_on_one_group")
    found = dropped(ledger)
    assert sorted(found) == [1, 3, 5]
    reason, message = found[3]
    assert reason == "RewardError"
    assert "of prompt 3 raised ConnectionError: the judge is away" in message
    assert not [event for event in ledger if event["event"] == "reissued"]
    assert {(group, fate) for group, fate, _, _ in fates(tmp_path)} == {
        (group, "dropped" if group % 2 else "trained") for group in range(6)
    }
    assert read_metrics(tmp_path)[-1]["groups/dropped/RewardError"] == 3


def test_a_failing_reward_can_have_its_episode_issued_again_within_bounds(tmp_path: Path) -> None:
    ledger = run(tmp_path, "fails_at_first_or_always", "rollout.reward_errors=reissue", "rollout.max_attempts=2")
    assert sorted(dropped(ledger)) == [1, 3, 5]
    assert sum(event["count"] for event in ledger if event["event"] == "reissued") == 24
    assert rollout_facts(tmp_path)["attempt"].to_list() == [1] * 18


def test_a_reward_that_always_fails_stops_the_run_with_its_message(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no group of batch 0 .*ZeroDivisionError: no judge"):
        run(tmp_path, "broken")


def test_a_queue_is_read_back_without_its_masked_episodes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    batch = [random_trajectory(rng, i, group_size=4) for i in range(8)]
    batch[1] = replace(batch[1], mask_reason="truncated")
    prompt = Prompt(0, ({"role": "user", "content": "1+1"},), "2")
    directory = RunDirectory(tmp_path, quickstart(), RunState(step=1, queue={1: [0]}))
    directory.write_rollouts(1, [Episode(prompt, (), trajectory) for trajectory in batch])
    assert [t.episode_id for t in directory.read_queued(1)] == [0, 2, 3]
    directory.close()


def test_which_groups_masking_leaves_with_too_few() -> None:
    rng = np.random.default_rng(0)
    batch = [random_trajectory(rng, i, group_size=3) for i in range(9)]
    for index in (3, 6, 7):
        batch[index] = replace(batch[index], mask_reason="truncated")
    assert masked_groups(batch) == {2: ("masked_truncated", "2 of 3 episodes are masked")}
    assert masked_groups([batch[0]]) == {}
