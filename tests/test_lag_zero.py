"""At lag 0 the ratio is 1: engine and trainer agree on every sampled token of real multi-turn episodes."""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from agent_rl import registry
from agent_rl.config import RunConfig, model_directory
from agent_rl.records import Episode, Trajectory
from agent_rl.rollout.episode import EpisodeTask
from agent_rl.rollout.worker import RolloutWorker
from agent_rl.trainer.engines.torch import TorchEngine
from agent_rl.trainer.packing import pack
from agent_rl.trainer.token_logprobs import token_logprobs
from agent_rl.weights.base import WeightFile
from tests.configs import quickstart
from tests.mixtures import EXPERTS, masked_routers, save_mixture


def sample(config: RunConfig, tool_server: str, count: int = 24, weights: str | None = None) -> list[Episode]:
    """Episodes of the shipped model, or of its shape with `weights`, through engine, renderer and sandbox."""

    async def run() -> list[Episode]:
        worker = RolloutWorker(config, tool_server, waves=False)
        if weights is not None:
            await worker.update_weights(WeightFile(Path(weights)), 0)
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


DENSE = ()
MIXTURE = ("model.path=builtin:tiny-qwen3-moe", "routing_replay=true")


@pytest.mark.parametrize("model", [DENSE, MIXTURE], ids=["dense", "mixture"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_engine_and_trainer_agree(tool_server: str, model: tuple[str, ...], temperature: float, top_p: float) -> None:
    config = quickstart(*model, f"rollout.sampling.temperature={temperature}", f"rollout.sampling.top_p={top_p}")
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
    assert all((t.routed_experts is not None) == bool(model) for t in trajectories)


def test_replay_brings_back_the_routing_of_an_engine_with_other_weights(tool_server: str, tmp_path: Path) -> None:
    """The engine's routers are a little off, so it routes some tokens elsewhere, and log-probs jump there. With its
    choice replayed the trainer is nearer, and exactly at the formula: softmax over the recorded experts."""
    config = quickstart(f"model.path={save_mixture(tmp_path / 'model')}", "routing_replay=true")
    state = AutoModelForCausalLM.from_pretrained(config.model.path).state_dict()
    torch.manual_seed(0)
    for weight in (weight for name, weight in state.items() if name.endswith("mlp.gate.weight")):
        weight += 0.01 * weight.std() * torch.randn_like(weight)
    save_file(state, tmp_path / "other.safetensors")
    trajectories = [e.trajectory for e in sample(config, tool_server, weights=str(tmp_path / "other.safetensors"))]
    here = trainer(config)
    replayed = here.logprobs(trajectories)
    free = here.logprobs([replace(t, routed_experts=None) for t in trajectories])
    aligned = mean_abs_difference(trajectories, replayed, 0)
    assert 1e-4 < aligned < 0.7 * mean_abs_difference(trajectories, free, 0)
    one_group = [replace(t, group_id=0) for t in trajectories]
    assert 0.002 < trainer(config).train(one_group, 1).metrics["routing_differed"] < 0.1
    number, layers, k = EXPERTS
    for trajectory, values in list(zip(trajectories, replayed, strict=True))[:6]:
        assert trajectory.routed_experts is not None
        routed = np.where(trajectory.routed_experts < 0, np.arange(k), trajectory.routed_experts)
        membership = torch.zeros(len(routed), layers, number, dtype=torch.bool)
        membership.scatter_(2, torch.from_numpy(routed).long(), True)
        batch = pack([replace(trajectory, routed_experts=None)], [0.0])
        with torch.no_grad(), masked_routers(here.model, membership):
            expected = token_logprobs(here.model, batch)[0].numpy()
        active = trajectory.loss_mask
        np.testing.assert_allclose(values[active], expected[active], atol=1e-5)


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
