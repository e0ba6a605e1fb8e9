"""The routing that the embedded engine reports for mixtures of experts."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from agent_rl.records import Completion, SamplingParams
from agent_rl.weights.base import WeightFile
from tests.rollout.engine_conformance import check_routing_over_turns, reference_model, reference_routing
from tests.rollout.random_models import ids, make_engine, subject_of


@pytest.mark.parametrize("keys", [{}, {"prefill_tokens_per_step": 5}, {"slots": 2}])
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_moe_biased"])
def test_reported_routing_is_hugging_face_s(model_path, name, keys):
    check_routing_over_turns(subject_of(model_path(name), **keys))


def test_a_dense_layer_reports_nothing_and_a_dense_model_refuses(model_path):
    engine, params = make_engine(model_path("qwen3_moe_mixed")), SamplingParams(max_new_tokens=3)
    routed = asyncio.run(engine.generate(0, ids(4)[0], params, 0)).routed_experts
    assert routed.shape == (6, 2, 2)
    assert (routed[:, 0] == -1).all()
    assert (routed[:, 1] >= 0).all()
    with pytest.raises(ValueError, match="a llama, has no routing"):
        asyncio.run(make_engine(model_path("llama")).generate(0, ids(4)[0], params, 0))
    for outside in (-1, 4):
        with pytest.raises(ValueError, match="positions 0 to 3"):
            asyncio.run(engine.generate(0, ids(4)[0], params, outside))


def test_routing_before_an_update_in_mid_request_stays_that_of_the_old_weights(model_path):
    """It is what the tokens were sampled with, though their prefix is computed again with the new weights."""
    subject = subject_of(model_path("qwen3_moe"))
    engine, prompt, params = subject.make(), ids(9)[0], SamplingParams(max_new_tokens=100)

    async def main() -> Completion:
        call = asyncio.create_task(engine.generate(0, prompt, params, 0))
        while engine._slots.length[0] < 50:
            await asyncio.sleep(0)
        await engine.update_weights(WeightFile(Path(subject.other_weights)), 1)
        return await call

    completion = asyncio.run(main())
    tokens = np.concatenate([prompt, completion.token_ids])[:-1]
    old, new = (np.sort(reference_routing(reference_model(subject, updated=u), tokens), -1) for u in (False, True))
    routed, update = (
        np.sort(completion.routed_experts, -1),
        len(prompt) - 1 + completion.policy_versions.searchsorted(1),
    )
    assert 20 < update < 90
    np.testing.assert_array_equal(routed[:update], old[:update])
    np.testing.assert_array_equal(routed[update:], new[update:])
    assert (old != new).any(-1).mean() > 0.05
