"""The order statistic: against sorting, over simulated ranks, and beyond 2^24 elements."""

from fractions import Fraction

import pytest
import torch
from golden_cases import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from objective_batches import on_ranks

from agent_rl.objective.quantile import kth_smallest, quantile, quantiles, rank_of

quick = settings(max_examples=60, deadline=None)
values = st.lists(st.floats(0, 8, width=32) | st.sampled_from([0.0, 0.5, 2.0]), min_size=1, max_size=60)
levels = st.sampled_from(["0.9", "0.5", "0.05", "0.3", "0.97", "1"])


@pytest.mark.parametrize("case", cases("quantile_sharded.json"))
def test_shards_agree(case):
    shards = [torch.tensor(s, dtype=torch.float32) for s in case["in"]["shards"]]
    results = on_ranks(len(shards), lambda rank, reduce: quantile(shards[rank], case["in"]["alpha"], reduce).item())
    assert results == [case["out"]["q"]] * len(shards)
    assert quantile(torch.cat(shards), case["in"]["alpha"]).item() == case["out"]["q"]


@quick
@given(values, levels)
def test_against_sorting(xs, alpha):
    rank = next(k for k in range(1, len(xs) + 1) if Fraction(k, len(xs)) >= Fraction(alpha))
    want = sorted(xs)[rank - 1]
    for dtype in (torch.float32, torch.float64):
        x = torch.tensor(xs, dtype=dtype)
        assert quantile(x, float(alpha)).item() == want
        assert quantile(x, float(alpha), lambda counts: counts).item() == want
    assert sum(x > want for x in xs) <= len(xs) - rank


@quick
@given(values, st.integers(-20, 20))
def test_scales_with_its_input(xs, exponent):
    x = torch.tensor(xs, dtype=torch.float64)
    assert quantile(x * 2.0**exponent).item() == quantile(x).item() * 2.0**exponent


@quick
@given(st.lists(st.lists(st.floats(0, 4, width=32), max_size=8), min_size=3, max_size=3))
def test_several_samples_share_collectives(parts):
    calls = []

    def counting(tensor):
        calls.append(tensor.shape)
        return tensor

    samples = [torch.tensor(p, dtype=torch.float32) for p in parts]
    alone = quantiles(samples)
    shared = quantiles(samples, reduce=counting)
    torch.testing.assert_close(torch.stack(shared), torch.stack(alone), rtol=0, atol=0, equal_nan=True)
    assert calls == [(4,)] + [(3,)] * 31


def test_rank_is_exact_where_the_product_is_not():
    assert [rank_of(0.07, 100), rank_of(0.55, 100), rank_of(0.9, 10), rank_of(0.9, 9)] == [7, 55, 9, 9]
    assert 0.07 * 100 > 7
    assert all(rank_of(k / n, n) == k for n in range(1, 200) for k in range(1, n + 1))


def test_extremes_of_the_bit_patterns():
    x = torch.tensor([0.0, 1e-45, 3.4028234663852886e38])
    found = [kth_smallest([x], [k], lambda counts: counts)[0].item() for k in (1, 2, 3)]
    assert found == x.tolist()


def test_more_than_two_to_the_24_elements():
    n = 2**24 + 10
    x = torch.zeros(n)
    x[: n // 5] = 1.0
    x[: n // 20] = 3.0
    assert quantile(x, 0.9).item() == 1.0
    assert quantile(x, 0.96).item() == 3.0
    assert quantile(x, 0.9, lambda counts: counts).item() == 1.0
