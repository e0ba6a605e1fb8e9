"""The trainer on a GPU: which one it takes, and, where there is one, the same training as on the CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch

from agent_rl.trainer.engines.torch import TorchEngine
from agent_rl.trainer.model import ComputeConfig, device_of
from tests.mixtures import EXPERTS, save_mixture
from tests.trainer.test_compute import MODEL, engine, episodes

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def test_a_gpu_that_is_asked_for_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert device_of(ComputeConfig()).type == "cpu"
    with pytest.raises(ValueError, match=r"sees no GPU; set ray\.trainer_gpus"):
        device_of(ComputeConfig(device="cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_RANK", "6")
    assert device_of(ComputeConfig()) == torch.device("cuda", 2)
    assert device_of(ComputeConfig(device="cpu")).type == "cpu"


@needs_gpu
@pytest.mark.parametrize("mixture", [False, True], ids=["dense", "mixture"])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_three_steps_are_those_of_the_cpu(mixture: bool, top_p: float, tmp_path: Path) -> None:
    path = save_mixture(tmp_path / "model") if mixture else MODEL
    batch = episodes(top_p=top_p, experts=EXPERTS if mixture else None)
    keys: dict[str, Any] = {"load_balancing": 1e-2} if mixture else {}
    trainers = [engine(path, {"device": device}, **keys) for device in ("cpu", "cuda")]
    for step in range(3):
        cpu, gpu = (trainer.train(batch, step) for trainer in trainers)
        assert gpu.metrics["loss"] == pytest.approx(cpu.metrics["loss"], abs=1e-4)
        for a, b in zip(cpu.logprobs, gpu.logprobs, strict=True):
            torch.testing.assert_close(torch.from_numpy(b), torch.from_numpy(a), atol=1e-4, rtol=1e-4, equal_nan=True)
    _same_weights(*trainers)
    trainers[1].save(tmp_path / "saved")
    trainers[0].load(tmp_path / "saved")
    _same_weights(*trainers)


@needs_gpu
def test_bfloat16_with_the_variable_length_kernel_stays_near_float32() -> None:
    batch = episodes()
    exact, half = engine(compute={"device": "cuda"}), engine(compute={"device": "cuda", "precision": "bfloat16"})
    for a, b in zip(exact.logprobs(batch), half.logprobs(batch), strict=True):
        torch.testing.assert_close(torch.from_numpy(b), torch.from_numpy(a), atol=0.1, rtol=0.05, equal_nan=True)


def _same_weights(cpu: TorchEngine, gpu: TorchEngine) -> None:
    for a, b in zip(cpu.model.parameters(), gpu.model.parameters(), strict=True):
        assert b.device.type == "cuda"
        torch.testing.assert_close(b.cpu(), a, atol=1e-4, rtol=1e-3)
