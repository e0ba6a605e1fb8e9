"""At lag 0 the ratio is 1: engine and trainer agree on every sampled token of real multi-turn episodes."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from agent_rl import registry
from agent_rl.config import RunConfig, model_directory
from agent_rl.records import Episode, Trajectory
from agent_rl.rollout.episode import EpisodeTask
from agent_rl.rollout.worker import RolloutWorker
from agent_rl.trainer.engines.torch import TorchEngine
from tests.configs import quickstart


def sample(config: RunConfig, tool_server: str, count: int = 24) -> list[Episode]:
    """Episodes of the shipped model on chains, through the engine, the renderer and the sandbox."""

    async def run() -> list[Episode]:
        worker = RolloutWorker(config, tool_server, waves=False)
        source = registry.build("prompts", config.prompts, 3)
        tasks = [EpisodeTask(source.prompt(i), i, i, config.seed) for i in range(count)]
        result = await worker.run(tasks)
        await worker.close()
        assert not result.failed
        return result.episodes

    return asyncio.run(run())


def trainer(config: RunConfig) -> TorchEngine:
    return TorchEngine(config.trainer, str(model_directory(config.model.path)), config.objective)


def mean_abs_difference(behavior: list[Trajectory], logprobs: list[np.ndarray], shift: int) -> float:
    """Mean |trainer - engine| over sampled tokens, the trainer's column moved by `shift`."""
    differences = []
    for trajectory, values in zip(behavior, logprobs, strict=True):
        moved = np.roll(values, shift)
        both = np.isfinite(moved) & trajectory.loss_mask
        differences.append(np.abs(moved - trajectory.behavior_logprobs)[both])
    return float(np.concatenate(differences).mean())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_engine_and_trainer_agree(tool_server: str, temperature: float, top_p: float) -> None:
    config = quickstart(f"rollout.sampling.temperature={temperature}", f"rollout.sampling.top_p={top_p}")
    trajectories = [episode.trajectory for episode in sample(config, tool_server)]
    assert max(t.num_turns for t in trajectories) >= 3
    logprobs = trainer(config).logprobs(trajectories)
    for trajectory, values in zip(trajectories, logprobs, strict=True):
        active = trajectory.loss_mask
        np.testing.assert_allclose(values[active], trajectory.behavior_logprobs[active], atol=1e-4)
    aligned = mean_abs_difference(trajectories, logprobs, 0)
    assert aligned < 1e-5
    assert mean_abs_difference(trajectories, logprobs, 1) > 100 * aligned
    assert mean_abs_difference(trajectories, logprobs, -1) > 100 * aligned
    kept = np.concatenate([t.sampling_mask.sizes for t in trajectories])
    assert (kept > 0).all() if top_p < 1 else (kept == 0).all()


def test_another_architecture_agrees_too(tool_server: str, tmp_path: Path) -> None:
    """Any causal LM directory works: here a Llama with random weights and the quickstart's tokenizer."""
    tiny = model_directory("builtin:tiny-qwen3")
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    torch.manual_seed(0)
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    llama.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    config = quickstart(f"model.path={tmp_path}", "rollout.sampling.top_p=0.9")
    trajectories = [episode.trajectory for episode in sample(config, tool_server, count=8)]
    logprobs = trainer(config).logprobs(trajectories)
    aligned = mean_abs_difference(trajectories, logprobs, 0)
    assert aligned < 1e-5
    assert mean_abs_difference(trajectories, logprobs, 1) > 100 * aligned
