"""The trainer: what a step does must not depend on how it was packed, and off means off, to the bit."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from agent_rl.config import model_directory
from agent_rl.objective.config import ObjectiveConfig
from agent_rl.records import Trajectory
from agent_rl.settings import check
from agent_rl.trainer.engines.torch import TorchEngine
from tests.trajectories import random_trajectory

MODEL = str(model_directory("builtin:tiny-qwen3"))


def engine(objective: dict[str, Any] | None = None, **keys: Any) -> TorchEngine:
    config = TorchEngine.Config(**{"learning_rate": 1e-3, **keys})
    return TorchEngine(config, MODEL, check(ObjectiveConfig, objective or {}))


def trajectories(count: int = 8, **keys: Any) -> list[Trajectory]:
    rng = np.random.default_rng(0)
    return [random_trajectory(rng, i, turns=i % 4, **keys) for i in range(count)]


def weights(trainer: TorchEngine) -> dict[str, torch.Tensor]:
    return copy.deepcopy(trainer.model.state_dict())


def gradients(trainer: TorchEngine) -> list[torch.Tensor]:
    return [p.grad for p in trainer.model.parameters()]


def dense_logprobs(trajectory: Trajectory) -> np.ndarray:
    """The log-probs by a plain Hugging Face forward of one row, masked over the vocabulary: the slow, obvious way."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor(trajectory.token_ids[None], dtype=torch.int64)).logits[0]
    logits = logits / trajectory.sampling_params.temperature
    found = np.full(len(trajectory), np.nan, np.float32)
    for row, t in enumerate(np.flatnonzero(trajectory.loss_mask)):
        kept = trajectory.sampling_mask.row(row)
        masked = torch.full_like(logits[t - 1], -torch.inf)
        index = torch.tensor(kept if len(kept) else np.arange(len(masked)), dtype=torch.int64)
        masked[index] = logits[t - 1, index]
        found[t] = masked.log_softmax(-1)[trajectory.token_ids[t]]
    return found


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_logprobs_equal_a_plain_forward_over_the_recorded_support(top_p: float) -> None:
    batch = trajectories(top_p=top_p)
    for packed, trajectory in zip(engine().logprobs(batch), batch, strict=True):
        np.testing.assert_allclose(packed, dense_logprobs(trajectory), atol=2e-5)


@pytest.mark.parametrize("clip", ["ppo", "sat"])
@pytest.mark.parametrize("aggregate", ["sequence_mean", "token_mean"])
def test_loss_and_gradients_do_not_depend_on_packing(clip: str, aggregate: str) -> None:
    batch = trajectories(12, top_p=0.9)
    objective = {"clip": clip, "aggregate": aggregate, "kl": {"coefficient": 0.01}}
    results = []
    for limit in (10_000, 120, 45):
        trainer = engine(objective, max_tokens_per_microbatch=limit)
        result = trainer.train(batch, policy_version=1)
        results.append((result, gradients(trainer)))
    (whole, whole_gradients), *parts = results
    assert whole.metrics["num_microbatches"] == 1
    for part, part_gradients in parts:
        assert part.metrics["num_microbatches"] >= 2
        assert part.metrics["loss"] == pytest.approx(whole.metrics["loss"], abs=1e-6)
        for a, b in zip(part_gradients, whole_gradients, strict=True):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)
        for a, b in zip(part.logprobs, whole.logprobs, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)


def test_groups_without_a_sampled_token_change_no_gradient() -> None:
    sampled = [random_trajectory(np.random.default_rng(i), i, turns=2) for i in range(6)]
    silent = [random_trajectory(np.random.default_rng(i), i, turns=0) for i in range(6, 8)]
    plain, padded = engine(), engine()
    plain.train(sampled, 0)
    padded.train(silent + sampled, 0)
    for a, b in zip(gradients(plain), gradients(padded), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


def test_a_step_without_any_sampled_token_is_skipped_and_counted() -> None:
    trainer = engine()
    before = weights(trainer)
    silent = [random_trajectory(np.random.default_rng(9), i, turns=0) for i in range(2)]
    assert trainer.train(silent, 0).metrics["skipped_empty"] == 1
    assert trainer.train([], 0).metrics["skipped_empty"] == 1
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value, before[name])


def test_sat_that_never_gates_is_bit_identical_to_ppo() -> None:
    """With alpha 1 no |d| exceeds q, so every radius is the full one."""
    batch = trajectories(8)
    ppo, sat = engine({"clip": "ppo"}), engine({"clip": {"type": "sat", "alpha": 1.0}})
    assert ppo.train(batch, 0).metrics["loss"] == sat.train(batch, 0).metrics["loss"]
    assert all(torch.equal(a, b) for a, b in zip(weights(ppo).values(), weights(sat).values(), strict=True))


def test_the_same_input_gives_the_same_weights() -> None:
    first, second = engine({"clip": "sat"}), engine({"clip": "sat"})
    for trainer in (first, second):
        for step in range(2):
            trainer.train(trajectories(8), step)
    assert all(torch.equal(a, b) for a, b in zip(weights(first).values(), weights(second).values(), strict=True))


def test_published_weights_are_the_current_ones(tmp_path: Path) -> None:
    trainer = engine()
    trainer.train(trajectories(8), 0)
    trainer.publish(tmp_path / "w.safetensors")
    state = weights(trainer)
    published = load_file(tmp_path / "w.safetensors")
    assert published
    assert all(torch.equal(value, state[name]) for name, value in published.items())


def test_a_checkpoint_continues_as_if_nothing_had_happened(tmp_path: Path) -> None:
    straight, stopped = engine(), engine()
    for trainer in (straight, stopped):
        trainer.train(trajectories(8), 0)
    stopped.save(tmp_path / "checkpoint")
    resumed = engine()
    resumed.load(tmp_path / "checkpoint")
    for trainer in (straight, resumed):
        trainer.train(trajectories(8), 1)
    assert all(torch.equal(a, b) for a, b in zip(weights(straight).values(), weights(resumed).values(), strict=True))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint").config.model_type == "qwen3"


def test_the_reference_is_the_initial_policy() -> None:
    trainer = engine({"kl": {"coefficient": 0.1}})
    batch = trajectories(8)
    first = trainer.train(batch, 0)
    assert first.ref_logprobs is not None
    assert first.metrics["kl"] == pytest.approx(0, abs=1e-9)
    second = trainer.train(batch, 1)
    assert second.metrics["kl"] > 1e-6
    for a, b in zip(first.ref_logprobs, second.ref_logprobs or [], strict=True):
        np.testing.assert_array_equal(a, b)


def test_advantages_come_from_the_group() -> None:
    batch = trajectories(8)
    result = engine().train(batch, 0)
    for group in {t.group_id for t in batch}:
        members = [i for i, t in enumerate(batch) if t.group_id == group]
        rewards = np.array([batch[i].reward for i in members])
        expected = np.zeros(2) if rewards[0] == rewards[1] else (rewards - 0.5) / (np.sqrt(0.5) + 1e-6)
        np.testing.assert_allclose(result.advantages[members], expected, rtol=1e-6)


def test_gradient_alignment_limits_the_cosine_and_survives_a_checkpoint(tmp_path: Path) -> None:
    batch = trajectories(8)
    free, limited = engine(gradient_alignment=True), engine(max_cosine=0.1)
    cosines = []
    for trainer in (free, limited):
        trainer.train(batch, 0)
        cosines.append(trainer.train(batch, 1).metrics["gradient_cosine"])
    assert cosines[0] == pytest.approx(cosines[1], abs=1e-6)  # the raw gradient is what is measured
    assert cosines[0] > 0.1
    assert not same_gradients(free, limited)
    limited.save(tmp_path / "checkpoint")
    resumed = engine(max_cosine=0.1)
    resumed.load(tmp_path / "checkpoint")
    after = [trainer.train(batch, 2).metrics["gradient_cosine"] for trainer in (limited, resumed)]
    assert after[0] == after[1]


def same_gradients(a: TorchEngine, b: TorchEngine) -> bool:
    return all(torch.equal(x, y) for x, y in zip(gradients(a), gradients(b), strict=True))
