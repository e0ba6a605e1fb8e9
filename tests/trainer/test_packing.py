"""Packing: every trajectory once, limits kept, columns where they belong."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_rl.trainer.packing import check_lengths, is_dummy, pack, unpack
from tests.trajectories import random_trajectory


@settings(deadline=None)
@given(seed=st.integers(0, 10_000), count=st.integers(1, 6), top_p=st.sampled_from([1.0, 0.9]))
def test_packed_columns_are_the_trajectories_own(seed: int, count: int, top_p: float) -> None:
    rng = np.random.default_rng(seed)
    trajectories = [random_trajectory(rng, i, turns=int(rng.integers(0, 3)), top_p=top_p) for i in range(count)]
    batch = pack(trajectories, list(range(count)))
    for segment, trajectory in enumerate(trajectories):
        span = slice(int(batch.cu_seqlens[segment]), int(batch.cu_seqlens[segment + 1]))
        assert batch.token_ids[span].tolist() == trajectory.token_ids.tolist()
        assert batch.position_ids[span].tolist() == list(range(len(trajectory)))
        assert set(batch.segment_ids[span].tolist()) == {segment}
        assert set(batch.advantages[span].tolist()) == {float(segment)}
        assert batch.turn_ids[span].tolist() == trajectory.turn_ids.tolist()
    rows = [row.tolist() for t in trajectories for row in (t.sampling_mask.row(i) for i in range(len(t.sampling_mask)))]
    if top_p < 1:
        assert batch.kept_offsets is not None
        assert batch.kept_ids is not None
        bounds = batch.kept_offsets.tolist()
        assert [batch.kept_ids[a:b].tolist() for a, b in pairwise(bounds)] == rows
    for values, trajectory in zip(unpack(batch.behavior_logprobs, batch), trajectories, strict=True):
        np.testing.assert_array_equal(values, trajectory.behavior_logprobs)


def test_a_trajectory_that_fits_nowhere_is_named() -> None:
    trajectory = random_trajectory(np.random.default_rng(0), episode_id=31, turns=3)
    with pytest.raises(ValueError, match=rf"episode 31 has {len(trajectory)} tokens.*max_tokens_per_microbatch"):
        check_lengths([trajectory], len(trajectory) - 1)
    check_lengths([trajectory], len(trajectory))


def test_no_trajectory_gives_a_dummy_that_no_loss_counts() -> None:
    batch = pack([], [])
    assert is_dummy(batch)
    assert not is_dummy(pack([random_trajectory(np.random.default_rng(0), 0)], [1.0]))
    assert len(batch.active) == 0
    assert unpack(batch.behavior_logprobs, batch) == []
