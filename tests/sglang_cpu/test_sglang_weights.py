"""Weights that change under a running server: who sampled what is on the record, and no cache outlives its weights."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
import ray
import torch
from safetensors.torch import load_file, save_file

from agent_rl.records import Completion, IntArray, SamplingParams
from agent_rl.rollout.engines.base import EngineError
from agent_rl.rollout.engines.sglang import SGLangEngine
from agent_rl.rollout.live_engine import LiveEngine
from agent_rl.run import local_ray
from agent_rl.weights.base import WeightFile, Weights
from tests.rollout.engine_conformance import SHORT, UPDATES, Subject, prompts_of, reference_logprobs, reference_model
from tests.sglang_cpu.conftest import Shared
from tests.sglang_cpu.servers import ANSWER_S, CONTEXT, engine_on, other_weights
from tests.weights.receivers import Source, channel_of

LONG = SamplingParams(0.7, max_new_tokens=CONTEXT - 40, seed=1)


def run(engine: SGLangEngine, body: Callable[[SGLangEngine], Awaitable[None]]) -> None:
    async def main() -> None:
        try:
            await body(engine)
        finally:
            await engine.close()

    asyncio.run(main())


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with local_ray(1):
        yield


@pytest.fixture
def files(dense: Shared) -> Subject:
    model = str(dense.model)
    return Subject(lambda: engine_on(dense.url, dense.model), model, str(other_weights(dense.model)), CONTEXT)


@pytest.fixture(params=["disk", "distributed", "tensor"])
def subject(files: Subject, cluster: None, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Subject]:
    """Its weights come from a process of their own through a channel, in several buckets where it has some."""
    trainer = ray.remote(Source).remote()
    channel = channel_of(request.param, trainer, 1, tmp_path)

    def send(path: Path, version: int) -> Weights:
        ray.get(channel.restore(version, path))
        weights: Weights = channel.for_all(version)
        if request.param != "disk":
            assert len(weights.again().buckets) > 1
        return weights

    yield replace(files, send=send)
    channel.close()
    ray.kill(trainer)


@pytest.mark.parametrize("check", UPDATES)
def test_updates(subject: Subject, check: Callable[[Subject], None]) -> None:
    check(subject)


async def updated_under_way(engine: SGLangEngine, prompt: IntArray, subject: Subject) -> Completion:
    """A long request under which the weights change."""
    await engine.ready()
    others = subject.others(5)  # before: the request is not to end meanwhile
    task = asyncio.create_task(engine.generate(0, prompt, LONG))
    await engine.generate(1, prompt, SHORT)
    await engine.update_weights(others, 5)
    return await task


def test_in_place_records_both_versions_and_later_requests_see_no_old_entries(dense: Shared, subject: Subject) -> None:
    old, new = reference_model(subject), reference_model(subject, updated=True)
    prompt = prompts_of(old, [40])[0]

    async def body(engine: SGLangEngine) -> None:
        completion = await updated_under_way(engine, prompt, subject)
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


def test_an_interrupted_generation_goes_on_with_the_new_weights(files: Subject) -> None:
    """As one completion to its caller, whose first tokens are of the old weights."""
    models = {0: reference_model(files), 5: reference_model(files, updated=True)}
    prompt = prompts_of(models[0], [30])[0]

    async def body(engine: SGLangEngine) -> None:
        live = LiveEngine(engine, "abort")
        task = asyncio.create_task(live.generate(0, prompt, LONG))
        await live.generate(1, prompt, SHORT)
        await live.update_weights(files.others(5), 5)
        completion = await task
        assert len(completion.token_ids) == LONG.max_new_tokens
        assert set(completion.policy_versions.tolist()) == {0, 5}
        for version, model in models.items():
            fit = np.abs(completion.behavior_logprobs - reference_logprobs(model, prompt, completion, 0.7))
            assert fit[completion.policy_versions == version].max() < 1e-4

    run(files.make(), body)  # type: ignore[arg-type]


def test_drain_lets_running_requests_end_with_the_weights_they_began_with(dense: Shared, files: Subject) -> None:
    subject, old = files, reference_model(files)
    prompt = prompts_of(old, [10])[0]

    async def body(engine: SGLangEngine) -> None:
        completion = await updated_under_way(engine, prompt, subject)
        assert set(completion.policy_versions.tolist()) == {0}
        expected = reference_logprobs(old, prompt, completion, 0.7)
        np.testing.assert_allclose(completion.behavior_logprobs, expected, atol=1e-4)
        after = await engine.generate(0, prompt, SHORT)
        assert set(after.policy_versions.tolist()) == {5}

    run(engine_on(dense.url, dense.model, on_update="drain"), body)


def test_weights_of_another_model_are_refused_and_the_old_ones_stay(
    dense: Shared, files: Subject, tmp_path: Path
) -> None:
    old, prompt = reference_model(files), prompts_of(reference_model(files), [9])[0]
    wrong = {n: w[:1] if "up_proj" in n else w for n, w in load_file(other_weights(dense.model)).items()}
    save_file({n: w.contiguous() for n, w in wrong.items()}, tmp_path / "wrong.safetensors")

    async def body(engine: SGLangEngine) -> None:
        for name, message in (("wrong", "up_proj.weight is"), ("absent", "no safetensors file")):
            with pytest.raises(ValueError, match=message):
                await engine.update_weights(WeightFile(tmp_path / f"{name}.safetensors"), 3)
        assert engine.policy_version == 0
        completion = await engine.generate(0, prompt, SHORT)
        expected = reference_logprobs(old, prompt, completion, 1.0)
        np.testing.assert_allclose(completion.behavior_logprobs, expected, atol=1e-4)

    run(files.make(), body)  # type: ignore[arg-type]


def test_tokens_of_weights_that_this_run_did_not_load_are_an_error(dense: Shared, files: Subject) -> None:
    prompt = prompts_of(reference_model(files), [9])[0]

    async def body(engine: SGLangEngine) -> None:
        await engine.generate(0, prompt, SHORT)
        stranger = {"model_path": str(dense.model), "weight_version": "7"}
        httpx.post(f"{dense.url}/update_weights_from_disk", json=stranger, timeout=ANSWER_S).raise_for_status()
        with pytest.raises(EngineError, match="stamped tokens '7'"):
            await engine.generate(0, prompt, SHORT)

    run(files.make(), body)  # type: ignore[arg-type]


def test_a_prefix_cached_under_one_version_is_reused_only_under_it(dense: Shared, subject: Subject) -> None:
    prompt = prompts_of(reference_model(subject), [60])[0]
    body = {"input_ids": prompt.tolist(), "sampling_params": {"max_new_tokens": 1}}

    def cached() -> int:
        answer = httpx.post(f"{dense.url}/generate", json=body, timeout=ANSWER_S).json()
        return int(answer["meta_info"]["cached_tokens"])

    async def update(engine: SGLangEngine) -> None:
        await engine.generate(0, prompt, SHORT)
        assert cached() > 50
        await engine.update_weights(subject.others(1), 1)
        assert cached() == 0

    run(subject.make(), update)  # type: ignore[arg-type]


@pytest.mark.parametrize("subject", ["disk", "tensor"], indirect=True)
def test_many_updates_under_load_leave_every_token_with_the_log_prob_of_its_version(
    dense: Shared, subject: Subject
) -> None:
    models = [reference_model(subject), reference_model(subject, updated=True)]
    prompts = prompts_of(models[0], [5, 12, 30, 8])

    async def body(engine: SGLangEngine) -> None:
        files = [dense.model / "model.safetensors", Path(subject.other_weights)]
        sent = {version: subject.send(files[version % 2], version) for version in range(1, 5)}
        calls = [asyncio.create_task(engine.generate(i, p, LONG)) for i, p in enumerate(prompts)]
        for version, weights in sent.items():
            await engine.generate(99, prompts[0], SHORT)
            await engine.update_weights(weights, version)
        for prompt, completion in zip(prompts, await asyncio.gather(*calls), strict=True):
            assert len(set(completion.policy_versions.tolist())) >= 4
            expected = [reference_logprobs(m, prompt, completion, 0.7) for m in models]
            own = np.where(completion.policy_versions % 2 == 1, expected[1], expected[0])
            np.testing.assert_allclose(completion.behavior_logprobs, own, atol=1e-4)

    assert not torch.equal(*(next(m.parameters()) for m in models))
    run(subject.make(), body)  # type: ignore[arg-type]


async def check_recovery(engine: SGLangEngine, subject: Subject, lose: Callable[[], None]) -> None:
    """A server that is found anew gets the weights of before, not its model's; then it takes part in updates again."""
    new, prompt = reference_model(subject, updated=True), prompts_of(reference_model(subject), [20])[0]
    await engine.ready()
    await engine.update_weights(subject.others(6), 6)
    lose()
    completion = await engine.generate(0, prompt, SHORT)
    assert set(completion.policy_versions.tolist()) == {6}
    expected = reference_logprobs(new, prompt, completion, 1.0)
    np.testing.assert_allclose(completion.behavior_logprobs, expected, atol=1e-4)
    for version in (7, 8):  # a new group, where there are groups, and the same again
        await engine.update_weights(subject.send(Path(subject.model_path) / "model.safetensors", version), version)
        assert set((await engine.generate(0, prompt, SHORT)).policy_versions.tolist()) == {version}


def test_a_server_that_was_lost_is_given_what_is_served(dense: Shared, subject: Subject) -> None:
    async def body(engine: SGLangEngine) -> None:
        def lose() -> None:
            """It has no weights of this run any more."""
            assert engine._server.client is not None
            engine._server.lose(engine._server.client)
            old = {"model_path": str(dense.model), "weight_version": "none"}
            httpx.post(f"{dense.url}/update_weights_from_disk", json=old, timeout=ANSWER_S).raise_for_status()

        await check_recovery(engine, subject, lose)

    run(subject.make(), body)  # type: ignore[arg-type]
