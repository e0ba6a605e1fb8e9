"""Weights that change under a running server: who sampled what is on the record, and no cache outlives its weights."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from agent_rl.records import Completion, IntArray, SamplingParams
from agent_rl.rollout.engines.base import EngineError
from agent_rl.rollout.engines.sglang import SGLangEngine
from tests.rollout.engine_conformance import SHORT, Subject, prompts_of, reference_logprobs, reference_model
from tests.sglang_cpu.conftest import Shared
from tests.sglang_cpu.servers import CONTEXT, engine_on, other_weights

LONG = SamplingParams(0.7, max_new_tokens=CONTEXT - 40, seed=1)


def run(engine: SGLangEngine, body: Callable[[SGLangEngine], Awaitable[None]]) -> None:
    async def main() -> None:
        try:
            await body(engine)
        finally:
            await engine.close()

    asyncio.run(main())


@pytest.fixture
def subject(dense: Shared) -> Subject:
    return Subject(
        lambda: engine_on(dense.url, dense.model), str(dense.model), str(other_weights(dense.model)), CONTEXT
    )


async def updated_under_way(engine: SGLangEngine, prompt: IntArray, weights: str) -> Completion:
    """A long request under which the weights change."""
    task = asyncio.create_task(engine.generate(0, prompt, LONG))
    await engine.generate(1, prompt, SHORT)
    await engine.update_weights(weights, 5)
    return await task


def test_in_place_records_both_versions_and_later_requests_see_no_old_entries(dense: Shared, subject: Subject) -> None:
    old, new = reference_model(subject), reference_model(subject, updated=True)
    prompt = prompts_of(old, [40])[0]

    async def body(engine: SGLangEngine) -> None:
        completion = await updated_under_way(engine, prompt, subject.other_weights)
        is_new = completion.policy_versions == 5
        assert set(completion.policy_versions.tolist()) == {0, 5}
        assert np.array_equal(np.sort(completion.policy_versions), completion.policy_versions)
        fit = np.abs(completion.behavior_logprobs - reference_logprobs(old, prompt, completion, 0.7))
        assert fit[~is_new].max() < 1e-4
        # old entries under new weights: neither model's log-probs
        assert fit[is_new].max() > 1e-2
        assert (
            np.abs(completion.behavior_logprobs - reference_logprobs(new, prompt, completion, 0.7))[is_new].max() > 1e-2
        )
        longer = np.concatenate([prompt, completion.token_ids[:50]])
        later = await engine.generate(0, longer, SamplingParams(max_new_tokens=8))
        expected = reference_logprobs(new, longer, later, 1.0)
        np.testing.assert_allclose(later.behavior_logprobs, expected, atol=1e-4)

    run(engine_on(dense.url, dense.model, on_update="in_place"), body)


def test_drain_lets_running_requests_end_with_the_weights_they_began_with(dense: Shared, subject: Subject) -> None:
    old = reference_model(subject)
    prompt = prompts_of(old, [10])[0]

    async def body(engine: SGLangEngine) -> None:
        completion = await updated_under_way(engine, prompt, subject.other_weights)
        assert set(completion.policy_versions.tolist()) == {0}
        expected = reference_logprobs(old, prompt, completion, 0.7)
        np.testing.assert_allclose(completion.behavior_logprobs, expected, atol=1e-4)
        after = await engine.generate(0, prompt, SHORT)
        assert set(after.policy_versions.tolist()) == {5}

    run(engine_on(dense.url, dense.model, on_update="drain"), body)


def test_weights_of_another_model_are_refused_and_the_old_ones_stay(
    dense: Shared, subject: Subject, tmp_path: Path
) -> None:
    old, prompt = reference_model(subject), prompts_of(reference_model(subject), [9])[0]
    wrong = {n: w[:1] if "up_proj" in n else w for n, w in load_file(other_weights(dense.model)).items()}
    save_file({n: w.contiguous() for n, w in wrong.items()}, tmp_path / "wrong.safetensors")

    async def body(engine: SGLangEngine) -> None:
        for name, message in (("wrong", "up_proj.weight is"), ("absent", "no safetensors file")):
            with pytest.raises(ValueError, match=message):
                await engine.update_weights(str(tmp_path / f"{name}.safetensors"), 3)
        assert engine.policy_version == 0
        completion = await engine.generate(0, prompt, SHORT)
        expected = reference_logprobs(old, prompt, completion, 1.0)
        np.testing.assert_allclose(completion.behavior_logprobs, expected, atol=1e-4)

    run(subject.make(), body)  # type: ignore[arg-type]


def test_tokens_of_weights_that_this_run_did_not_load_are_an_error(dense: Shared, subject: Subject) -> None:
    prompt = prompts_of(reference_model(subject), [9])[0]

    async def body(engine: SGLangEngine) -> None:
        await engine.generate(0, prompt, SHORT)
        stranger = {"model_path": str(dense.model), "weight_version": "7"}
        httpx.post(f"{dense.url}/update_weights_from_disk", json=stranger, timeout=60).raise_for_status()
        with pytest.raises(EngineError, match="stamped tokens '7'"):
            await engine.generate(0, prompt, SHORT)

    run(subject.make(), body)  # type: ignore[arg-type]


def test_a_prefix_cached_under_one_version_is_reused_only_under_it(dense: Shared, subject: Subject) -> None:
    prompt = prompts_of(reference_model(subject), [60])[0]
    body = {"input_ids": prompt.tolist(), "sampling_params": {"max_new_tokens": 1}}

    def cached() -> int:
        answer = httpx.post(f"{dense.url}/generate", json=body, timeout=60).json()
        return int(answer["meta_info"]["cached_tokens"])

    async def update(engine: SGLangEngine) -> None:
        await engine.generate(0, prompt, SHORT)
        assert cached() > 50
        await engine.update_weights(subject.other_weights, 1)
        assert cached() == 0

    run(subject.make(), update)  # type: ignore[arg-type]


def test_many_updates_under_load_leave_every_token_with_the_log_prob_of_its_version(
    dense: Shared, subject: Subject
) -> None:
    models = [reference_model(subject), reference_model(subject, updated=True)]
    prompts = prompts_of(models[0], [5, 12, 30, 8])

    async def body(engine: SGLangEngine) -> None:
        calls = [asyncio.create_task(engine.generate(i, p, LONG)) for i, p in enumerate(prompts)]
        for version in range(1, 5):
            await engine.generate(99, prompts[0], SHORT)
            weights = subject.other_weights if version % 2 else str(dense.model / "model.safetensors")
            await engine.update_weights(weights, version)
        for prompt, completion in zip(prompts, await asyncio.gather(*calls), strict=True):
            assert len(set(completion.policy_versions.tolist())) >= 4
            expected = [reference_logprobs(m, prompt, completion, 0.7) for m in models]
            own = np.where(completion.policy_versions % 2 == 1, expected[1], expected[0])
            np.testing.assert_allclose(completion.behavior_logprobs, own, atol=1e-4)

    assert not torch.equal(*(next(m.parameters()) for m in models))
    run(subject.make(), body)  # type: ignore[arg-type]
