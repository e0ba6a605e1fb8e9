"""Lag is arithmetic: the schedule against worked rows, and against what the two promises say."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_rl.pipeline.regimes.batch_async import BatchAsync
from agent_rl.pipeline.regimes.sync import Sync
from agent_rl.pipeline.schedule import Schedule

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "lag_staleness.json").read_text())["cases"]


@pytest.mark.parametrize("name", ["broadcast_every_1_steps_per_rollout_1", "broadcast_every_8_steps_per_rollout_1"])
def test_broadcast_schedule_matches_the_worked_rows(name: str) -> None:
    case = next(case for case in GOLDEN if case["name"] == name)
    config = BatchAsync.Config(broadcast_interval=case["in"]["broadcast_every"])
    schedule = BatchAsync(config).plan(16, 60)
    rows = [[i, schedule.sampling_step(i), i, i - schedule.sampling_step(i)] for i in range(case["in"]["n_rollouts"])]
    assert rows == case["out"]["rows_rollout_l_j_N"]


@pytest.mark.parametrize(
    "name",
    [
        "broadcast_every_1_steps_per_rollout_1",
        "broadcast_every_1_steps_per_rollout_8",
        "broadcast_every_2_steps_per_rollout_2",
    ],
)
def test_versions_count_updates_where_a_batch_is_used_for_several(name: str) -> None:
    """As the controller counts: batch i is trained from version i * U on, at what `sampling_step(i)` * U sampled."""
    case = next(case for case in GOLDEN if case["name"] == name)
    updates = case["in"]["steps_per_rollout"]
    schedule = BatchAsync(BatchAsync.Config(broadcast_interval=case["in"]["broadcast_every"])).plan(16, 60)
    rows = [
        [i, schedule.sampling_step(i) * updates, i * updates + h, i * updates + h - schedule.sampling_step(i) * updates]
        for i in range(case["in"]["n_rollouts"])
        for h in range(updates)
    ]
    assert rows == case["out"]["rows_rollout_l_j_N"]
    assert sum(row[3] for row in rows) / len(rows) == pytest.approx(case["out"]["mean_N"])


@given(k=st.integers(0, 20), step=st.integers(0, 200))
def test_exact_lag_ramps_and_then_holds(k: int, step: int) -> None:
    schedule = BatchAsync(BatchAsync.Config(exact_lag=k)).plan(16, 60)
    assert step - schedule.sampling_step(step) == min(step, k)


@given(n=st.integers(1, 20))
def test_a_broadcast_interval_cycles_through_1_to_n(n: int) -> None:
    schedule = BatchAsync(BatchAsync.Config(broadcast_interval=n)).plan(16, 60)
    lags = [step - schedule.sampling_step(step) for step in range(n + 1, 3 * n + 1)]
    assert lags == list(range(1, n + 1)) * 2


@given(prefetch=st.integers(0, 9), interval=st.integers(1, 9), batch=st.integers(0, 99))
def test_a_batch_is_sampled_with_what_is_served_when_its_sampling_starts(
    prefetch: int, interval: int, batch: int
) -> None:
    schedule = Schedule(prefetch, interval)
    assert schedule.sampling_step(batch) == schedule.served(max(0, batch - prefetch)) <= batch
    assert schedule.sampling_step(batch) % interval == 0


@given(k=st.integers(0, 5), step=st.integers(1, 30), queued=st.integers(0, 5))
def test_a_continued_run_ramps_only_what_was_not_queued(k: int, step: int, queued: int) -> None:
    queued = min(queued, k)
    schedule = Schedule(prefetch=k, broadcast_interval=1)
    continued = schedule.continued(step, queued)
    for batch in range(step, step + queued):
        assert continued.sampling_step(batch) == schedule.sampling_step(batch)
    for batch in range(step + queued, step + 20):
        assert continued.sampling_step(batch) == max(step if queued < k else 0, batch - k)


def test_sync_has_no_lag_and_runs_in_waves() -> None:
    schedule = Sync(Sync.Config()).plan(16, 60)
    assert [schedule.sampling_step(i) for i in range(4)] == [0, 1, 2, 3]
    assert schedule.waves
