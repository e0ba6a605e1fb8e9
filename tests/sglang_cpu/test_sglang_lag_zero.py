"""At lag 0 the trainer's log-probs are those that the real server sampled with."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from agent_rl import registry
from agent_rl.objective.config import ObjectiveConfig
from agent_rl.parity import Parity, measure
from agent_rl.records import SamplingParams, StopReason, Trajectory, TrajectoryBuilder
from agent_rl.rollout.engines.sglang import SGLangEngine
from agent_rl.rollout.episode import EpisodeTask
from agent_rl.rollout.worker import RolloutWorker
from agent_rl.trainer.engines.torch import TorchEngine
from tests.configs import quickstart
from tests.sglang_cpu.conftest import Shared
from tests.sglang_cpu.servers import TINY, cpu_config, engine_on

SAMPLINGS = [(1.0, 1.0, -1), (0.7, 1.0, -1), (1.0, 0.9, -1), (0.7, 0.9, -1), (0.7, 0.95, 6)]


def assert_parity(found: Parity) -> None:
    print(found)
    assert found.mean < 1e-5
    assert found.max < 1e-4
    assert found.better_fit is None
    assert min(found.alternatives.values()) > 100 * found.mean


@pytest.mark.parametrize(("temperature", "top_p", "top_k"), SAMPLINGS)
def test_real_episodes(dense: Shared, tool_server: str, temperature: float, top_p: float, top_k: int) -> None:
    """Chains with the shipped model: turns with tool output between them."""
    config = quickstart()
    sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    mapping = config.model_dump(mode="json")
    mapping["rollout"] |= {"sampling": sampling, "engine": cpu_config(urls=[dense.url]).model_dump(mode="json")}
    config = type(config).model_validate(mapping)

    async def sample() -> list[Trajectory]:
        worker = RolloutWorker(config, tool_server, waves=False)
        source = registry.build("prompts", config.prompts, 3)
        result = await worker.run([EpisodeTask(source.prompt(i), i, i, config.seed) for i in range(12)])
        await worker.close()
        assert not result.failed
        return [episode.trajectory for episode in result.episodes]

    trajectories = asyncio.run(sample())
    assert max(t.num_turns for t in trajectories) >= 3
    kept = np.concatenate([t.sampling_mask.sizes for t in trajectories])
    assert (kept == 0).all() if (top_p, top_k) == (1.0, -1) else (kept > 0).all()
    trainer = TorchEngine(config.trainer, str(TINY), config.objective)
    assert_parity(measure(trajectories, trainer.logprobs))


async def written(engine: SGLangEngine, episode_id: int, params: SamplingParams, routed: bool) -> Trajectory:
    """Three turns of a random model, with made-up tool output between them."""
    rng, builder = np.random.default_rng(episode_id), TrajectoryBuilder()
    builder.append(rng.integers(0, 105, 3 + 4 * episode_id), -1)
    for turn in range(3):
        routed_from = builder.num_routed if routed else None
        own = replace(params, max_new_tokens=10 + episode_id, seed=3 * episode_id + turn)
        completion = await engine.generate(episode_id, builder.token_ids, own, routed_from)
        builder.append(completion.token_ids, turn, completion)
        builder.append(rng.integers(0, 105, 2 + episode_id), turn)
    facts: dict[str, Any] = {"group_id": 0, "attempt": 0, "reward": 0.0, "reward_parts": {}}
    return builder.build(episode_id=episode_id, sampling_params=params, stop_reason=StopReason.MAX_TOKENS, **facts)


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_mixture_of_experts_with_its_routing_replayed(moe: Shared, top_p: float) -> None:
    """Every input's routing is on record, over turns and from cached prefixes, and is the trainer's own here."""

    async def sample() -> list[Trajectory]:
        engine = engine_on(moe.url, moe.model, report_routing=True)
        params = SamplingParams(0.7, top_p)
        found = await asyncio.gather(*(written(engine, i, params, routed=True) for i in range(5)))
        await engine.close()
        return found

    trajectories = asyncio.run(sample())
    trainer = TorchEngine(TorchEngine.Config(), str(moe.model), ObjectiveConfig())
    found = measure(trajectories, trainer.logprobs)
    print(found)
    assert found.mean < 1e-5
    assert found.max < 1e-4
    # at the same weights the replayed routing is the trainer's own: "without routing replay" fits as well
    assert found.alternatives.pop("without routing replay") < 1e-5
    assert min(found.alternatives.values()) > 100 * found.mean
    for trajectory in trajectories:
        routed = trajectory.routed_experts
        assert routed is not None
        last = int(np.flatnonzero(trajectory.loss_mask)[-1])
        assert (routed[:last] >= 0).all()
        assert (routed[last:] == -1).all()


def test_replay_needs_the_recorded_routing_once_weights_differ(moe: Shared) -> None:
    """Another membership gives other log-probs: what was recorded is really what the trainer routes by."""

    async def sample() -> Trajectory:
        engine = engine_on(moe.url, moe.model, report_routing=True)
        found = await written(engine, 1, SamplingParams(0.7), routed=True)
        await engine.close()
        return found

    trajectory = asyncio.run(sample())
    assert trajectory.routed_experts is not None
    wrong = np.where(trajectory.routed_experts >= 0, (trajectory.routed_experts + 1) % 8, -1)
    trainer = TorchEngine(TorchEngine.Config(), str(moe.model), ObjectiveConfig())
    found = measure([replace(trajectory, routed_experts=wrong.astype(np.int16))], trainer.logprobs)
    assert found.better_fit == "without routing replay"
    assert found.mean > 1e-2
