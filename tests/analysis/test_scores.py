"""avg@n, pass@k and maj@n on worked numbers; the bootstrap against a known spread."""

import itertools
import math

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_rl import facts
from agent_rl.analysis.scores import bootstrap_interval, maj_at_n, pass_at_k, pass_ks, per_problem

CORRECT = np.array([[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]], np.float64)


def rows(outcomes: list[list[float]], answers: list[list[str | None]]) -> pl.DataFrame:
    return facts.evaluation_frame(
        [
            {"problem": p, "sample": s, "outcome": outcome, "final_answer": answers[p][s]}
            for p, row in enumerate(outcomes)
            for s, outcome in enumerate(row)
        ]
    )


def test_pass_at_k_worked_example() -> None:
    assert pass_at_k(CORRECT, 1).mean() == pytest.approx(0.5)
    assert pass_at_k(CORRECT, 2).tolist() == pytest.approx([5 / 6, 0, 1])
    assert pass_at_k(CORRECT, 4).mean() == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match="pass@5 needs at least 5 samples"):
        pass_at_k(CORRECT, 5)


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.integers(1, 7))
def test_pass_at_k_is_the_share_of_draws_that_solve(samples: list[bool], k: int) -> None:
    k = min(k, len(samples))
    draws = list(itertools.combinations(samples, k))
    assert pass_at_k(np.array([samples], np.float64), k)[0] == pytest.approx(sum(map(any, draws)) / len(draws))


def test_the_majority_is_right_or_wrong_as_its_answer_is() -> None:
    correct = np.array([[0, 1, 1], [1, 0, 0], [0, 0, 0], [1, 0, 0], [0, 1, 0]], np.float64)
    answers = [["3", "2", "2"], ["1", "7", "7"], [None, None, None], ["5", None, None], ["8", "9", None]]
    assert maj_at_n(correct, answers).tolist() == [1, 0, 0, 1, 0]


def test_which_k_are_told() -> None:
    assert [pass_ks(n) for n in (1, 2, 3, 8, 12)] == [[], [2], [2, 3], [2, 4, 8], [2, 4, 8, 12]]


def test_per_problem_leaves_out_what_the_infrastructure_broke() -> None:
    frame = rows([[1, 0], [1, 1], [0, 0]], [["a", "b"], ["c", "c"], ["d", None]])
    found = per_problem(frame)
    assert {name: values.tolist() for name, values in found.items()} == {
        "avg@2": [0.5, 1, 0],
        "pass@2": [1, 1, 0],
        "maj@2": [1, 1, 0],
    }
    failure = pl.when((pl.col("problem") == 1) & (pl.col("sample") == 0)).then(pl.lit("SessionLost: gone"))
    broken = frame.with_columns(failure.alias("failure"))
    assert per_problem(broken)["avg@2"].tolist() == [0.5, 0]
    with pytest.raises(ValueError, match="no evaluation prompt could be run"):
        per_problem(broken.filter(pl.col("problem") == 1))
    assert list(per_problem(frame.filter(pl.col("sample") == 0))) == ["avg@1"]


def test_rewards_that_are_no_shares_of_right_answers_have_no_odd_pass_at_k() -> None:
    """Of one's own reward: -1 or a part of 1 is not right, 1 is, and the mean is the mean."""
    found = per_problem(rows([[-1, 1], [0.5, 0.5]], [["a", "b"], ["c", "c"]]))
    assert {name: values.tolist() for name, values in found.items()} == {
        "avg@2": [0, 0.5],
        "pass@2": [1, 0],
        "maj@2": [0, 0],
    }


def test_the_bootstrap_interval_is_that_of_a_binomial() -> None:
    values = np.array([1.0] * 60 + [0.0] * 140)
    found = bootstrap_interval("avg@1", values)
    half = 1.96 * math.sqrt(0.3 * 0.7 / 200)
    assert found.value == pytest.approx(0.3)
    assert found.low == pytest.approx(0.3 - half, abs=0.01)
    assert found.high == pytest.approx(0.3 + half, abs=0.01)
    assert bootstrap_interval("avg@1", values) == found
    assert (bootstrap_interval("x", np.ones(5)).low, bootstrap_interval("x", np.ones(5)).high) == (1, 1)


def test_every_column_of_an_evaluation_is_described() -> None:
    assert facts.evaluation_frame([]).columns == facts.EVALUATION.names
