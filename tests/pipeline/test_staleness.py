"""Mean lag: worked numbers, and a simulator that agrees where the assumptions hold and differs where they do not."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_rl.pipeline.staleness import Load, mean_lag, recommend
from tests.pipeline.queue_simulator import simulate

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "lag_staleness.json").read_text())["cases"]
CASES = [case for case in GOLDEN if case["name"].startswith("mean_staleness")]


def exponential(rng: random.Random) -> float:
    return rng.expovariate(1.0)


def uniform(rng: random.Random) -> float:
    return rng.uniform(0.5, 1.5)


def constant(rng: random.Random) -> float:
    return 1.0


def tail(length: object, group_size: int) -> float:
    """M of the distributions above: the harmonic number for the exponential, G / (G + 1) of the range for uniform."""
    if length is exponential:
        return sum(1 / i for i in range(1, group_size + 1))
    return 0.5 + group_size / (group_size + 1) if length is uniform else 1.0


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["name"]))
def test_worked_numbers(case: dict[str, dict[str, float]]) -> None:
    given_ = dict(case["in"])
    side = given_.pop("side", None)
    load = Load(given_["rho"], given_["C"], given_["B"], given_["Q"], given_["M_tail"])
    if "error" in case["out"]:
        with pytest.raises(ValueError, match="say from which side"):
            mean_lag(load, side)  # type: ignore[arg-type]
        return
    lag = mean_lag(load, side)  # type: ignore[arg-type]
    assert [lag.pre_queue, lag.in_queue, lag.total] == pytest.approx(case["out"]["pqs_iqs_total"], rel=1e-12)


AGREES = [
    # rho, C, B, Q, length, group size
    (0.3, 64, 32, 64, uniform, 1),
    (0.7, 128, 64, 128, exponential, 1),
    (0.9, 256, 32, 64, uniform, 1),
    (0.6, 256, 64, 128, exponential, 8),
    (1.5, 128, 64, 192, exponential, 1),
    (1.2, 256, 64, 256, uniform, 1),
    (1.4, 256, 64, 256, exponential, 8),
]


@pytest.mark.parametrize(("rho", "concurrency", "batch", "queue", "length", "group"), AGREES)
def test_the_simulator_agrees_where_arrivals_are_even(
    rho: float, concurrency: int, batch: int, queue: int, length: object, group: int
) -> None:
    predicted = mean_lag(Load(rho, concurrency, batch, queue, tail(length, group)))
    found = simulate(rho, concurrency, batch, queue, length, group)  # type: ignore[arg-type]
    assert found.pre_queue == pytest.approx(predicted.pre_queue, abs=0.1)
    assert found.in_queue == pytest.approx(predicted.in_queue, abs=0.1)


@pytest.mark.parametrize("rho", [1.2, 2.0, 4.0])
@pytest.mark.parametrize("batches", [1, 3])
def test_a_queue_that_makes_rollouts_wait_keeps_its_lag_however_fast_they_are(rho: float, batches: int) -> None:
    predicted = mean_lag(Load(rho, 128, 64, 64 * batches, full="wait"))
    found = simulate(rho, 128, 64, 64 * batches, exponential, full="wait")
    assert found.pre_queue == pytest.approx(predicted.pre_queue, rel=0.05)
    assert found.in_queue == pytest.approx(predicted.in_queue, abs=0.05)


def test_where_the_formulas_do_not_hold() -> None:
    """Each of these breaks one assumption; the size of the error is what a user should know."""
    # Responses of one length that start together end together: they arrive in bursts, and none while a step trains.
    in_step = simulate(0.5, 64, 64, 64, constant, in_step=True)
    assert in_step.total == pytest.approx(1.0)
    assert mean_lag(Load(0.5, 64, 64, 64)).total == 1.5
    # rho just below 1 and uneven arrivals: the queue is a buffer, and what waits in it is more than rho.
    buffered = simulate(0.97, 128, 64, 640, exponential, 8)
    assert buffered.in_queue > 0.97 + 0.5
    # One group at a time: nothing is in flight but what the trainer is waiting for.
    alone = simulate(0.2, 8, 8, 8, exponential, 8)
    assert alone.pre_queue < 0.9 * mean_lag(Load(0.2, 8, 8, 8, tail(exponential, 8))).pre_queue


LOADS = st.builds(
    Load,
    rho=st.floats(0.05, 4),
    concurrency=st.integers(1, 4096).map(float),
    batch=st.integers(1, 4096).map(float),
    queue=st.integers(1, 8192).map(float),
    tail=st.floats(1, 4),
    full=st.sampled_from(["drop", "wait"]),
)


@given(load=LOADS, target=st.floats(0.1, 16))
def test_a_recommendation_keeps_the_target_and_wastes_nothing(load: Load, target: float) -> None:
    least = load.tail / load.batch + load.rho / load.concurrency
    if min(target / least, load.concurrency / load.rho) < 1:
        with pytest.raises(ValueError, match="cannot have a mean lag"):
            recommend(target, load)
        return
    found = recommend(target, load)
    assert found.rho <= 1 + 1e-6
    assert found.lag.total <= target + 1e-6
    more = replace(load, concurrency=found.concurrency + 1.0, rho=load.rho * (found.concurrency + 1) / load.concurrency)
    assert more.rho > 1 or mean_lag(more, "left").total > target - 1e-6
    if found.queue > math.ceil(load.batch):
        just_above = replace(load, rho=1.0, concurrency=float(found.concurrency), queue=float(found.queue))
        assert mean_lag(just_above, "right").total <= target + 1e-6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rho": 0.0}, "rho must be above 0"),
        ({"batch": math.nan}, "batch must be above 0"),
        ({"queue": -1.0}, "queue must be at least 0"),
        ({"tail": 0.9}, "at least 1"),
    ],
)
def test_figures_out_of_range_are_named(change: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(Load(0.5, 1, 1, 1), **change)  # type: ignore[arg-type]
