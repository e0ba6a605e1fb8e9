"""No trained group is older than max_lag, whatever the order of arrivals; a step waits for nothing else."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_rl.pipeline.pacing import Pacing
from agent_rl.pipeline.regimes.fully_async import FullyAsync


def simulate(pacing: Pacing, rng: random.Random, failure_rate: float) -> tuple[dict[int, tuple[int, int]], int, int]:
    """Train all steps with arrivals in random order: (issue version, step) of trained groups, overdue and failed."""
    versions: dict[int, int] = {}
    trained: dict[int, tuple[int, int]] = {}
    arrived: list[int] = []
    issued = overdue = failed = 0
    for step in range(pacing.num_steps):
        while True:
            for group in range(issued, issued + pacing.room(step, issued - overdue - failed, len(versions))):
                versions[group] = step
                issued = group + 1
            assert len(versions) <= pacing.max_groups
            chosen = pacing.choose(step, versions, arrived)
            if chosen is not None and rng.random() < 0.5:
                break
            # Whoever is slow stays behind: arrivals favour the young ones.
            flying = sorted(versions.keys() - set(arrived), reverse=rng.random() < 0.8)
            assert flying or chosen is not None, "nothing can arrive and nothing can be trained"
            for group in flying[: rng.randint(0, 2)]:
                if rng.random() < failure_rate:
                    failed += 1
                    del versions[group]
                else:
                    arrived.append(group)
        late = pacing.overdue(step, versions, chosen)
        overdue += len(late)
        for group in chosen:
            trained[group] = (versions[group], step)
        versions = {group: v for group, v in versions.items() if group not in {*chosen, *late}}
        arrived = [group for group in arrived if group in versions]
    assert issued == len(trained) + overdue + failed + len(versions)
    return trained, overdue, failed


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 4), st.integers(1, 4), st.booleans(), st.floats(0, 0.4), st.booleans())
def test_no_group_is_trained_too_late(
    seed: int, max_lag: int, batch: int, wait: bool, failure_rate: float, bounded: bool
) -> None:
    bound = batch + 1 if bounded else (max_lag + 1) * batch
    pacing = Pacing(batch, max_lag, bound, num_steps=12, wait=wait)
    trained, overdue, _ = simulate(pacing, random.Random(seed), failure_rate)
    assert len(trained) == 12 * batch
    assert all(0 <= step - version <= max_lag for version, step in trained.values())
    assert not (wait and overdue)


def test_dropping_happens_and_only_when_asked_for() -> None:
    found = {wait: simulate(Pacing(1, 2, 3, 40, wait), random.Random(3), 0.0)[1] for wait in (True, False)}
    assert found[True] == 0
    assert found[False] > 0


def test_admission_is_the_rule_of_areal_within_the_bound() -> None:
    pacing = Pacing(batch_groups=4, max_lag=2, max_groups=10, num_steps=5, wait=True)
    assert pacing.room(served=0, num_issued=0, num_waiting=0) == 10  # 12 by the lag, 10 by the bound
    assert pacing.room(served=1, num_issued=14, num_waiting=10) == 0
    assert pacing.room(served=1, num_issued=14, num_waiting=6) == 2
    assert pacing.room(served=4, num_issued=18, num_waiting=2) == 2  # the last step needs no more


def test_a_young_group_goes_first_only_while_the_old_ones_keep_their_steps() -> None:
    pacing = Pacing(batch_groups=1, max_lag=2, max_groups=9, num_steps=9, wait=True)
    versions = {1: 0, 2: 0, 3: 1}  # at step 1, groups 1 and 2 are due by step 2: one of them must go now
    assert pacing.choose(1, versions, [3]) is None
    assert pacing.choose(1, versions, [3, 2]) == [2]
    assert pacing.choose(1, {1: 0, 3: 1}, [3]) == [3]
    dropping = Pacing(batch_groups=1, max_lag=2, max_groups=9, num_steps=9, wait=False)
    assert dropping.choose(1, versions, [3]) == [3]
    assert dropping.overdue(1, versions, [3]) == []
    assert dropping.choose(2, {1: 0, 2: 0}, []) is None
    assert dropping.overdue(2, {1: 0, 2: 0}, [1]) == [2]


def test_a_bound_below_a_batch_is_refused() -> None:
    with pytest.raises(ValueError, match=r"pipeline.max_groups is 3, but a step takes batch.num_prompts = 4"):
        FullyAsync(FullyAsync.Config(max_groups=3)).plan(4, 10)
