"""Servers that die, hang, abort or cannot serve: what the engine and the worker make of it."""

import asyncio
import os
import signal
import sys

import httpx
import numpy as np
import pytest

from agent_rl import registry
from agent_rl.config import RunConfig
from agent_rl.records import SamplingParams
from agent_rl.rollout.engines.base import EngineError
from agent_rl.rollout.engines.sglang import SGLangEngine
from agent_rl.rollout.episode import EpisodeTask
from agent_rl.rollout.worker import RolloutResult, RolloutWorker
from agent_rl.weights.base import WeightFile
from tests.configs import quickstart
from tests.rollout.engine_conformance import SHORT, Subject, reference_logprobs, reference_model
from tests.sglang_cpu.conftest import Shared
from tests.sglang_cpu.servers import ANSWER_S, CONTEXT, TINY, cpu_config, engine_on, other_weights, wait_until_healthy

LONG = SamplingParams(1.0, max_new_tokens=CONTEXT - 40)
PROMPT = np.arange(1, 9, dtype=np.int32)


def num_running(url: str) -> int:
    """Requests that the server works on."""
    loads = httpx.get(f"{url}/v1/loads", timeout=ANSWER_S).json()["loads"]
    return sum(int(load["num_running_reqs"]) for load in loads)


def abort_all(url: str) -> None:
    httpx.post(f"{url}/abort_request", json={"rid": "", "abort_all": True}, timeout=ANSWER_S).raise_for_status()


def test_a_released_request_is_aborted_at_the_server(dense: Shared) -> None:
    async def body() -> None:
        engine = engine_on(dense.url, dense.model)
        task = asyncio.create_task(engine.generate(0, PROMPT, LONG))
        await engine.generate(1, PROMPT, SHORT)
        engine.release(0)
        with pytest.raises(asyncio.CancelledError):
            await task
        again = await engine.generate(0, PROMPT, SHORT)
        assert len(again.token_ids) == SHORT.max_new_tokens
        await engine.close()

    asyncio.run(body())
    assert num_running(dense.url) == 0


def test_what_was_sampled_before_an_abort_is_kept(dense: Shared) -> None:
    """Someone aborts all requests: the completion goes on from where it was, at full length and with true log-probs."""
    model = reference_model(Subject(SGLangEngine, str(dense.model), "", CONTEXT))  # type: ignore[arg-type]

    async def body() -> None:
        engine = engine_on(dense.url, dense.model)
        params = SamplingParams(0.7, 0.9, max_new_tokens=CONTEXT - 40)
        task = asyncio.create_task(engine.generate(0, PROMPT, params))
        for _ in range(2):
            await engine.generate(1, PROMPT, SHORT)
            abort_all(dense.url)
        completion = await task
        assert len(completion.token_ids) == params.max_new_tokens
        expected = reference_logprobs(model, PROMPT, completion, 0.7)
        np.testing.assert_allclose(completion.behavior_logprobs, expected, atol=1e-4)
        await engine.close()

    asyncio.run(body())


def test_an_abort_keeps_the_routing_whole(moe: Shared) -> None:
    async def body() -> None:
        engine = engine_on(moe.url, moe.model, report_routing=True)
        task = asyncio.create_task(engine.generate(0, PROMPT, LONG, routed_from=0))
        await engine.generate(1, PROMPT, SHORT)
        abort_all(moe.url)
        completion = await task
        assert completion.routed_experts is not None
        assert completion.routed_experts.shape == (len(PROMPT) + len(completion.token_ids) - 1, 3, 2)
        await engine.close()

    asyncio.run(body())


def test_a_kept_set_above_the_cap_is_an_error_that_names_the_key(dense: Shared) -> None:
    async def body() -> None:
        engine = engine_on(dense.url, dense.model, sampling_mask_max_tokens=4)
        with pytest.raises(ValueError, match=r"raise rollout\.engine\.sampling_mask_max_tokens"):
            await engine.generate(0, PROMPT, SamplingParams(2.0, top_p=0.99, max_new_tokens=20))
        with pytest.raises(ValueError, match=r"raise rollout\.engine\.sampling_mask_max_tokens"):
            await engine.generate(0, PROMPT, SamplingParams(top_k=5))
        await engine.close()

    asyncio.run(body())


def test_a_server_that_lacks_what_a_run_needs_is_refused_before_it_starts(dense: Shared) -> None:
    cases = [
        ({"sampling_mask_max_tokens": 5000}, False, "--sampling-mask-max-tokens"),
        ({}, True, "--enable-return-routed-experts"),
    ]

    async def body() -> None:
        for keys, routed, message in cases:
            engine = engine_on(dense.url, dense.model, report_routing=routed, **keys)
            with pytest.raises(ValueError, match=message):
                await engine.update_weights(WeightFile(other_weights(dense.model)), 0)
            await engine.close()

    asyncio.run(body())


def sglang_run(**keys: object) -> RunConfig:
    """The quickstart on a server that its worker launches."""
    config = quickstart()
    mapping = config.model_dump(mode="json")
    mapping["rollout"]["engine"] = cpu_config(**keys).model_dump(mode="json")
    return RunConfig.model_validate(mapping)


def test_a_server_killed_in_mid_generation_comes_back_with_its_weights_and_all_episodes_end(
    sglang_python: str, tool_server: str
) -> None:
    config = sglang_run()

    async def body() -> tuple[RolloutResult, RolloutWorker]:
        worker = RolloutWorker(config, tool_server, waves=False)
        await worker.update_weights(WeightFile(TINY / "model.safetensors"), 7)
        source = registry.build("prompts", config.prompts, 3)
        run = asyncio.create_task(worker.run([EpisodeTask(source.prompt(i), i, i, 0) for i in range(8)]))
        process = worker.engine.engine._server.process
        while len(worker.engine.engine._tasks) < 8:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)  # all first turns are under way
        os.killpg(process.process_id, signal.SIGKILL)
        result = await run
        await worker.close()
        return result, worker

    result, worker = asyncio.run(body())
    assert not result.failed
    assert result.num_reissued > 0
    assert sorted(e.trajectory.episode_id for e in result.episodes) == list(range(8))
    for episode in result.episodes:
        versions = episode.trajectory.policy_versions[episode.trajectory.loss_mask]
        assert set(versions.tolist()) == {7}
    assert not worker.engine.engine._server.process.alive


def test_a_server_that_hangs_is_noticed_and_its_requests_are_failed(moe: Shared) -> None:
    async def body() -> None:
        engine = engine_on(moe.url, moe.model, hang_deadline_s=5.0)
        await engine.ready()  # not a request: on a busy machine one that is well might be silent for so long
        task = asyncio.create_task(engine.generate(0, PROMPT, LONG))
        while not engine._rids:
            await asyncio.sleep(0.01)
        os.killpg(moe.process.process_id, signal.SIGSTOP)
        try:
            with pytest.raises(EngineError, match="hung"):
                await task
        finally:
            os.killpg(moe.process.process_id, signal.SIGCONT)
        await asyncio.to_thread(wait_until_healthy, moe.process)
        again = await engine.generate(0, PROMPT, SHORT)  # it answers again, and is given its weights anew
        assert len(again.token_ids) == SHORT.max_new_tokens
        await engine.close()

    asyncio.run(body())


def test_a_launch_that_fails_says_why() -> None:
    bare = cpu_config(python=sys.executable)
    absent = cpu_config(python="no/such/python")

    async def body() -> None:
        for config, message in ((bare, "No module named"), (absent, "make sglang-cpu")):
            engine = SGLangEngine(config, str(TINY))
            with pytest.raises(ValueError, match=message):
                await engine.generate(0, PROMPT, SHORT)
            await engine.close()

    asyncio.run(body())
