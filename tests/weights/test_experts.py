"""A mixture's weights are published one expert a tensor, as model files have them, and every engine takes them so."""

import asyncio
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from agent_rl.objective.config import ObjectiveConfig
from agent_rl.rollout.engines.embedded import EmbeddedEngine
from agent_rl.rollout.sglang.weights import check_shapes
from agent_rl.trainer.engines.torch import TorchEngine
from agent_rl.weights.base import WeightFile
from tests.mixtures import save_mixture


def test_what_the_trainer_publishes_fits_both_engines(tmp_path: Path) -> None:
    model = Path(save_mixture(tmp_path / "model"))
    trainer = TorchEngine(TorchEngine.Config(), str(model), ObjectiveConfig())
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(1.25)
    published = WeightFile(tmp_path / "w.safetensors")
    trainer.publish(published.path)
    check_shapes(published.shapes(), WeightFile(model).shapes(), published)
    engine = EmbeddedEngine(EmbeddedEngine.Config(max_sequence_tokens=256), str(model))
    asyncio.run(engine.update_weights(published, 1))
    own = engine._model.state_dict()
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(own[name], parameter), name
    before = AutoModelForCausalLM.from_pretrained(model).state_dict()
    assert not any(torch.equal(own[name], tensor) for name, tensor in before.items() if "experts" in name)


def test_a_file_without_one_expert_is_refused(tmp_path: Path) -> None:
    model = Path(save_mixture(tmp_path / "model"))
    engine = EmbeddedEngine(EmbeddedEngine.Config(max_sequence_tokens=256), str(model))
    weights = load_file(model / "model.safetensors")
    (name,) = [name for name in weights if name.endswith("layers.1.mlp.experts.2.up_proj.weight")]
    save_file({n: w for n, w in weights.items() if n != name}, tmp_path / "w.safetensors")
    with pytest.raises(ValueError, match=f"missing \\['{name}'\\]"):
        asyncio.run(engine.update_weights(WeightFile(tmp_path / "w.safetensors"), 1))
