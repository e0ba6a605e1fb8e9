"""The plan of micro-batches: every trajectory once, limits kept, ranks level in cost."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from agent_rl.config import model_directory
from agent_rl.trainer.microbatches import attention_share, plan_microbatches, step_cost


@given(
    lengths=st.lists(st.integers(1, 100), max_size=60),
    limit=st.integers(100, 300),
    ranks=st.integers(1, 5),
    quadratic=st.sampled_from([0.0, 0.001, 0.1]),
)
def test_every_trajectory_once_under_the_limit_as_often_on_every_rank(
    lengths: list[int], limit: int, ranks: int, quadratic: float
) -> None:
    plan = plan_microbatches(lengths, limit, ranks, quadratic)
    assert sorted(index for parts in plan for part in parts for index in part) == list(range(len(lengths)))
    assert all(len(parts) == ranks for parts in plan)
    assert all(any(parts) for parts in plan), "no micro-batch is made of dummies alone"
    assert all(sum(lengths[index] for index in part) <= limit for parts in plan for part in parts)
    assert all(part == sorted(part) for parts in plan for part in parts)
    assert plan == plan_microbatches(list(lengths), limit, ranks, quadratic)


def mix(kind: str, rng: np.random.Generator, count: int) -> np.ndarray:
    """Lengths as runs have them: a long tail, turns times tokens a turn, anything up to a cap."""
    if kind == "long_tail":
        found = rng.lognormal(6.5, 0.8, count)
    elif kind == "turns":
        found = 100 + rng.geometric(0.25, count) * rng.lognormal(5.5, 0.5, count)
    else:
        found = rng.uniform(100, 8192, count)
    return np.clip(found, 20, 8192).astype(int)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    kind=st.sampled_from(["long_tail", "turns", "uniform"]),
    ranks=st.sampled_from([2, 4, 8]),
    per_rank=st.integers(16, 48),
    limit=st.sampled_from([16_384, 24_576, 32_768]),
    quadratic=st.sampled_from([1 / 50_000, 1 / 8192]),
)
def test_ranks_are_level_within_a_tenth_of_the_lower_bound(
    seed: int, kind: str, ranks: int, per_rank: int, limit: int, quadratic: float
) -> None:
    """No plan can take less than an even share of all the work, nor than the costliest trajectory."""
    lengths = mix(kind, np.random.default_rng(seed), ranks * per_rank)
    costs = lengths + quadratic * lengths.astype(float) ** 2
    plan = plan_microbatches(lengths.tolist(), limit, ranks, quadratic)
    assert step_cost(plan, costs) <= 1.10 * max(costs.sum() / ranks, costs.max())


def test_a_long_trajectory_is_worth_several_short_ones_of_as_many_tokens() -> None:
    """By tokens alone ranks would get 400 each; the long one costs 400 + 1600, all the short ones 800 + 400."""
    lengths = [400] + [100] * 8
    plan = plan_microbatches(lengths, 1200, 2, quadratic=0.01)
    assert plan == [[[0], [1, 2, 3, 4, 5, 6, 7, 8]]]
    assert plan_microbatches(lengths, 1200, 2)[0][0] != [0]


def test_few_trajectories_leave_ranks_with_nothing() -> None:
    assert plan_microbatches([5, 7], 10, 4) == [[[1], [0], [], []]]
    assert plan_microbatches([], 10, 4) == []
    with pytest.raises(AssertionError, match="fits in no micro-batch"):
        plan_microbatches([11], 10)


def test_the_share_of_attention_counts_what_a_token_is_multiplied_with() -> None:
    model = AutoModelForCausalLM.from_pretrained(model_directory("builtin:tiny-qwen3"))
    parameters = sum(p.numel() for p in model.parameters())
    assert attention_share(model) == pytest.approx(3 * 3 * 32 / parameters)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 30}
    config = Qwen3MoeConfig(
        **sizes, num_hidden_layers=2, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32
    )
    mixture = Qwen3MoeForCausalLM(config)
    experts = 2 * 8 * 3 * 16 * 32
    active = sum(p.numel() for p in mixture.parameters()) - experts + experts * 2 / 8
    assert attention_share(mixture) == pytest.approx(2 * 2 * 8 / active)
