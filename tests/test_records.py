"""Records refuse what does not fit together; the builder grows all fields at once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_rl.records import (
    Completion,
    FinishReason,
    Prompt,
    SamplingMask,
    SamplingParams,
    StopReason,
    TrajectoryBuilder,
)


def completion(ids: list[int], version: int = 0, routed: object = None) -> Completion:
    return Completion(
        token_ids=np.array(ids, np.int32),
        behavior_logprobs=-np.ones(len(ids), np.float32),
        sampling_mask=SamplingMask.full(len(ids)),
        policy_versions=np.full(len(ids), version, np.int32),
        finish_reason=FinishReason.STOP,
        routed_experts=routed,
    )


def build(builder: TrajectoryBuilder) -> object:
    return builder.build(
        group_id=0,
        episode_id=7,
        attempt=0,
        sampling_params=SamplingParams(),
        reward=1.0,
        reward_parts={},
        stop_reason=StopReason.ANSWER,
    )


def test_the_builder_marks_what_was_sampled_and_what_was_forced() -> None:
    builder = TrajectoryBuilder()
    builder.append([1, 2], -1)
    builder.append([3, 4], 0, completion([3, 4], version=5))
    builder.append([9], 0)
    builder.append([6], 1, completion([6], version=6))
    trajectory = build(builder)
    assert trajectory.token_ids.tolist() == [1, 2, 3, 4, 9, 6]
    assert trajectory.loss_mask.tolist() == [False, False, True, True, False, True]
    assert trajectory.turn_ids.tolist() == [-1, -1, 0, 0, 0, 1]
    assert trajectory.policy_versions.tolist() == [-1, -1, 5, 5, -1, 6]
    assert np.isnan(trajectory.behavior_logprobs).tolist() == [True, True, False, False, True, False]
    assert len(trajectory.sampling_mask) == 3
    assert trajectory.num_turns == 2


def routing(*first: int) -> np.ndarray:
    """Two layers, top 2: input i goes to the experts (first[i], 0) and (first[i], 1)."""
    return np.array([[[expert, 0], [expert, 1]] for expert in first], np.int16)


def test_routing_is_stitched_over_turns_and_ends_before_the_last_sampled_token() -> None:
    builder = TrajectoryBuilder()
    builder.append([1, 2], -1)
    builder.append([3, 4], 0, completion([3, 4], routed=routing(11, 12, 13)))
    assert builder.num_routed == 3
    builder.append([9], 0)
    builder.append([6], 1, completion([6], routed=routing(14, 19)))
    builder.append([8, 8], 1)
    trajectory = build(builder)
    assert trajectory.routed_experts.dtype == np.int16
    assert trajectory.routed_experts[:, 0, 0].tolist() == [11, 12, 13, 14, 19, -1, -1, -1]
    assert trajectory.routed_experts[:, 1, 1].tolist() == [1, 1, 1, 1, 1, -1, -1, -1]


@pytest.mark.parametrize(
    ("second", "sentence"),
    [
        (routing(14), "turn 1 has routed experts for 1 of 2 new inputs"),
        (routing(14, 19, 20), "turn 1 has routed experts for 3 of 2 new inputs"),
        (routing(14, 19)[:, :1], r"turn 1 has routed experts of shape \(2, 1, 2\), unlike"),
        (None, "turn 1 has no routed experts, but the turns before it have"),
    ],
)
def test_routing_that_does_not_fit_is_an_error(second: np.ndarray | None, sentence: str) -> None:
    builder = TrajectoryBuilder()
    builder.append([1, 2], -1)
    builder.append([3, 4], 0, completion([3, 4], routed=routing(11, 12, 13)))
    builder.append([9], 0)
    with pytest.raises(ValueError, match=sentence):
        builder.append([6], 1, completion([6], routed=second))


def test_the_routing_of_a_layer_is_whole_or_not_reported() -> None:
    dense_layer = np.array([[[4, 2], [-1, -1]]], np.int16)
    np.testing.assert_array_equal(completion([5], routed=dense_layer).routed_experts, dense_layer)
    for wrong, sentence in (([[[4, -1]]], "whole"), ([[[-2, -2]]], "whole"), ([[4, 2]], r"got shape \(1, 2\)")):
        with pytest.raises(ValueError, match=sentence):
            completion([5], routed=np.array(wrong))


def test_sampled_ids_must_be_the_completions_own() -> None:
    builder = TrajectoryBuilder()
    with pytest.raises(ValueError, match="completion's own"):
        builder.append([1, 2], 0, completion([1, 3]))


def test_a_trajectory_cannot_begin_with_a_sampled_token() -> None:
    builder = TrajectoryBuilder()
    builder.append([3], 0, completion([3]))
    with pytest.raises(ValueError, match="trajectory 7: the first token"):
        build(builder)


def test_a_completion_needs_a_log_prob_and_a_version_for_every_token() -> None:
    good = completion([1, 2])
    with pytest.raises(ValueError, match="finite behaviour log-prob"):
        Completion(
            good.token_ids,
            np.array([-1, np.nan], np.float32),
            good.sampling_mask,
            good.policy_versions,
            good.finish_reason,
        )
    with pytest.raises(ValueError, match=r"lengths of log-probs, kept sets, versions \(2, 1, 2\)"):
        Completion(
            good.token_ids,
            good.behavior_logprobs,
            SamplingMask.full(1),
            good.policy_versions,
            good.finish_reason,
        )


def test_arrays_on_a_record_cannot_be_written_to() -> None:
    own = np.array([1, 2], np.int32)
    record = Completion(own, -np.ones(2), SamplingMask.full(2), np.zeros(2), FinishReason.STOP)
    with pytest.raises(ValueError, match="read-only"):
        record.token_ids[0] = 5
    own[0] = 4  # the caller's own array is still the caller's


@given(st.lists(st.lists(st.lists(st.integers(0, 99), max_size=4), max_size=5), max_size=4))
def test_joined_sampling_masks_keep_every_row(parts: list[list[list[int]]]) -> None:
    masks = [SamplingMask.from_rows([np.array(row, np.int32) for row in rows]) for rows in parts]
    joined = SamplingMask.concat(masks)
    rows = [row for part in parts for row in part]
    assert len(joined) == len(rows)
    assert [joined.row(i).tolist() for i in range(len(rows))] == rows
    assert joined.sizes.tolist() == [len(row) for row in rows]


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"top_p": 0.0}, r"top_p must lie in \(0, 1\]"),
        ({"top_k": 0}, "top_k must be -1"),
        ({"temperature": -1.0}, "temperature must be"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
    ],
)
def test_impossible_sampling_is_refused(keys: dict[str, float], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        SamplingParams(**keys)


def test_a_prompt_needs_an_answer() -> None:
    with pytest.raises(ValueError, match="prompt 3 has no answer"):
        Prompt(3, ({"role": "user", "content": "1+1"},), "")
