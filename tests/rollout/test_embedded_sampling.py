"""Sampling of the embedded engine: the kept-set rule on hand-made logits, frequencies, and the random stream."""

import numpy as np
import pytest
import torch

from agent_rl.records import SamplingParams
from agent_rl.rollout.embedded.sampling import SamplingTable, inverse_cdf, kept_mask, uniform


def kept(probs: list[float], top_p: float = 1.0, top_k: int | None = None) -> list[int]:
    scaled = torch.tensor([probs]).log()
    limit = torch.tensor([float("inf") if top_p == 1 else top_p])
    mask = kept_mask(scaled, limit, torch.tensor([top_k or len(probs)]))
    return mask[0].nonzero()[:, 0].tolist()


@pytest.mark.parametrize(
    ("top_p", "top_k", "expected"),
    [
        (1.0, None, [0, 1, 2, 3]),
        (0.6, None, [1, 3]),  # before: .50 and .00; the next would be .75
        (0.76, None, [1, 2, 3]),
        (0.74, None, [1, 3]),
        (0.01, None, [1]),
        (1.0, 1, [1]),
        (1.0, 3, [1, 2, 3]),
        (0.6, 3, [1, 3]),
        (0.99, 2, [1, 3]),
    ],
)
def test_kept_ids_have_a_rank_below_top_k_and_at_most_top_p_before_them(top_p, top_k, expected):
    assert kept([0.05, 0.5, 0.2, 0.25], top_p, top_k) == expected


def test_ties_are_kept_in_the_order_of_their_ids():
    assert kept([0.2] * 5, top_k=2) == [0, 1]
    assert kept([0.1, 0.3, 0.3, 0.3], top_p=0.35) == [1, 2]
    assert kept([0.25] * 4, top_p=0.5) == [0, 1, 2]  # exactly at the limit: kept


def test_top_p_counts_the_untruncated_distribution():
    """Renormalised over the top 2 the first would hold .56 and the second go; untruncated it holds .50."""
    assert kept([0.5, 0.4, 0.1], top_p=0.53, top_k=2) == [0, 1]


def table_of(*params: SamplingParams, vocab_size: int = 4) -> SamplingTable:
    table = SamplingTable(len(params))
    for slot, p in enumerate(params):
        table.set(slot, p, vocab_size)
    return table


def test_log_probs_are_after_temperature_and_over_the_kept_set():
    probs = np.array([0.05, 0.5, 0.2, 0.25])
    params = [
        SamplingParams(seed=1),
        SamplingParams(temperature=0.5, seed=1),
        SamplingParams(top_k=2, seed=1),
        SamplingParams(temperature=0.5, top_p=0.75, seed=1),
        SamplingParams(temperature=0.0),
    ]
    logits = torch.from_numpy(probs).float().log().expand(5, -1).clone()
    sampled = table_of(*params).sample(np.arange(5), np.zeros(5, np.int64), logits)
    squared = probs**2 / (probs**2).sum()
    expected = [
        probs,
        squared,
        probs * [0, 1, 0, 1] / 0.75,
        squared * [0, 1, 0, 1] / squared[[1, 3]].sum(),
        [0, 1, 0, 0],
    ]
    for row, (token, p) in enumerate(zip(sampled.token_ids, expected, strict=True)):
        assert sampled.logprobs[row] == pytest.approx(np.log(p[token]), abs=1e-6)
    assert sampled.restricted.tolist() == [2, 3, 4]
    assert [k.tolist() for k in sampled.kept] == [[1, 3], [1, 3], [1]]
    assert sampled.logprobs[4] == 0.0


@pytest.mark.parametrize("top_k", [-1, 3])
def test_frequencies_follow_the_distribution(top_k):
    probs, draws = np.array([0.05, 0.5, 0.2, 0.25]), 40_000
    table = table_of(SamplingParams(seed=9, top_k=top_k))
    logits = torch.from_numpy(probs).float().log().expand(draws, -1)
    sampled = table.sample(np.zeros(draws, np.int64), np.arange(draws), logits)
    expected = probs if top_k == -1 else probs * [0, 1, 1, 1] / 0.95
    frequency = np.bincount(sampled.token_ids, minlength=4) / draws
    np.testing.assert_allclose(frequency, expected, atol=4 * 0.5 / draws**0.5)


def test_draws_are_uniform_and_depend_on_stream_and_index_only():
    table = table_of(*(SamplingParams(seed=s) for s in (0, 1, 2**63 + 5)))
    index = np.arange(50_000)
    streams = [uniform(np.full(len(index), s), index) for s in table.stream]
    for draws in streams:
        assert 0 <= draws.min() < 1e-3
        assert 1 - 1e-3 < draws.max() < 1
        assert draws.mean() == pytest.approx(0.5, abs=0.01)
        assert np.corrcoef(draws[:-1], draws[1:])[0, 1] == pytest.approx(0, abs=0.02)
    assert np.corrcoef(streams[0], streams[1])[0, 1] == pytest.approx(0, abs=0.02)
    assert uniform(table.stream[1:2], np.array([77]))[0] == streams[1][77]


def test_a_draw_takes_the_id_whose_stretch_begins_at_it():
    scaled = torch.tensor([[0.0, 0.25, 0.25, 0.5]]).log().expand(5, -1)
    token_ids, logprobs = inverse_cdf(scaled, np.array([0.0, 0.2, 0.25, 0.5, 0.999]))
    assert token_ids.tolist() == [1, 1, 2, 3, 3]
    assert logprobs.exp().tolist() == [0.25, 0.25, 0.25, 0.5, 0.5]


def test_ids_of_probability_zero_are_never_drawn():
    logits = torch.tensor([[float("-inf"), 0.0, float("-inf"), 0.0, float("-inf")]]).expand(2_000, -1)
    table = table_of(SamplingParams(seed=4), vocab_size=5)
    sampled = table.sample(np.zeros(2_000, np.int64), np.arange(2_000), logits)
    assert set(sampled.token_ids.tolist()) == {1, 3}
