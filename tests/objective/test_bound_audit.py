"""The audit's figures on numbers worked by hand, and its limits against what they are limits of."""

import math

import numpy as np
import pytest
import torch

from agent_rl.objective.bound import bound_table
from agent_rl.objective.intervals import bernstein_margin, visited_interval, wilson_interval

RATIOS = torch.tensor([0.5, 2.0, 0.9, 1.0, 0.25], dtype=torch.float64)
TURNS = torch.tensor([0, 0, 1, 0, 2])
EPISODES = torch.tensor([0, 0, 0, 2, 2])


def test_figures_are_means_over_all_episodes() -> None:
    """Four episodes, two of them without a token: episode 0 has turns 0 and 1, episode 2 has turns 0 and 2."""
    rows = bound_table(RATIOS.log(), TURNS, EPISODES, 4)
    assert [row["turn"] for row in rows] == [0, 1, 2, -1]
    assert [row["tv"] for row in rows] == pytest.approx([0.5 / 4, 0.1 / 4, 0.75 / 4, 1.35 / 4])
    assert [row["ratio_drift"] for row in rows] == pytest.approx([0.5 / 4, -0.1 / 4, -0.75 / 4, -0.35 / 4])
    assert [row["state_shift"] for row in rows] == pytest.approx([0, 0.125, 0.15, 0])
    gaps = [0.0, 0.1, 0.75, 3 * (1 - 0.9 ** (1 / 3)) + 2 * (1 - 0.25**0.5)]
    assert [row["gspo_gap"] for row in rows] == pytest.approx([gap / 4 for gap in gaps])
    assert rows[-1]["penalty_var"] == pytest.approx(np.var([0.6, 0, 0.75, 0], ddof=1))
    assert all("off_support" not in row and row["num_episodes"] == 4 for row in rows)


def test_mass_off_the_kept_set_is_part_of_the_penalty() -> None:
    lost = torch.tensor([0.1, 0.0, 0.2, 0.0, 0.3])
    rows = bound_table(RATIOS.log(), TURNS, EPISODES, 4, lost)
    assert [row["off_support"] for row in rows] == pytest.approx([0.025, 0.05, 0.075, 0.15])
    assert [row["state_shift"] for row in rows] == pytest.approx([0, 0.15, 0.225, 0])
    assert rows[-1]["penalty_var"] == pytest.approx(np.var([0.9, 0, 1.05, 0], ddof=1))


def test_no_token_and_one_episode() -> None:
    empty = torch.zeros(0)
    (row,) = bound_table(empty, empty.long(), empty.long(), 3)
    assert (row["turn"], row["tv"], row["gspo_gap"]) == (-1, 0.0, 0.0)
    alone = bound_table(RATIOS.log(), TURNS, torch.zeros(5, dtype=torch.int64), 1)
    assert math.isnan(alone[-1]["penalty_var"])


def test_limits_on_worked_numbers() -> None:
    assert bernstein_margin(0.25, 101, 2.0, delta=2 / math.e) == pytest.approx(math.sqrt(0.5 / 101) + 14 / 300)
    assert bernstein_margin(0.25, 1, 2.0) == math.inf
    assert wilson_interval(0, 10) == pytest.approx((0, 0.2775), abs=1e-4)
    assert wilson_interval(5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    assert wilson_interval(0, 0) == (0.0, 1.0)
    low, high = visited_interval(0.0)
    assert low == 0
    assert high == pytest.approx(math.log(160) / -math.expm1(-6.4))
    low, high = visited_interval(1000.0)
    assert 870 < low < 1000 < high < 1130


@pytest.mark.parametrize("rare", [False, True])
def test_the_visited_limits_hold_for_tokens_that_depend_on_each_other(rare: bool) -> None:
    """The next token's distance depends on the last one's outcome; z is 1 with probability D, or spread below it."""
    rng = np.random.default_rng(0)
    runs, steps = 2000, 200
    true, seen, last = np.zeros(runs), np.zeros(runs), np.zeros(runs)
    for _ in range(steps):
        distance = np.where(last > 0, 0.2, 0.01)
        last = (rng.random(runs) < distance) * 1.0 if rare else 2 * distance * rng.random(runs)
        true, seen = true + distance, seen + last
        last = last > 0.015
    limits = [visited_interval(total) for total in seen]
    low, high = np.array(limits).T
    assert (true < low).mean() <= 0.05
    assert (true > high).mean() <= 0.05


def test_the_bernstein_limit_holds_for_skewed_episodes() -> None:
    rng = np.random.default_rng(0)
    samples = rng.beta(0.1, 3.0, (2000, 100))
    margins = np.array([bernstein_margin(float(row.var(ddof=1)), 100, 1.0) for row in samples])
    expected = 0.1 / 3.1
    assert (samples.mean(1) + margins < expected).mean() <= 0.05
    assert (samples.mean(1) - margins > expected).mean() <= 0.05
