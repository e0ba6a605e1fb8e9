"""Memory and precision: what changes neither gradients nor log-probs, and what stays in float32."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from agent_rl.config import model_directory
from agent_rl.objective.config import ObjectiveConfig
from agent_rl.objective.token_batch import TokenBatch
from agent_rl.records import Trajectory
from agent_rl.trainer.engines.torch import TorchEngine
from agent_rl.trainer.packing import pack
from agent_rl.trainer.token_logprobs import token_logprobs
from tests.mixtures import EXPERTS, save_mixture
from tests.trajectories import random_trajectory

MODEL = str(model_directory("builtin:tiny-qwen3"))


def engine(path: str = MODEL, compute: dict[str, Any] | None = None, **keys: Any) -> TorchEngine:
    return TorchEngine(TorchEngine.Config(learning_rate=1e-3, compute=compute or {}, **keys), path, ObjectiveConfig())


def episodes(count: int = 16, **keys: Any) -> list[Trajectory]:
    rng = np.random.default_rng(0)
    return [random_trajectory(rng, i, turns=1 + i % 3, **keys) for i in range(count)]


def saved_bytes(trainer: TorchEngine, batch: TokenBatch) -> int:
    """What the forward pass keeps for the backward pass, parameters apart."""
    own = {p.data_ptr() for p in trainer.model.parameters()}
    kept: dict[int, int] = {}

    def pack_hook(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack_hook, lambda tensor: tensor):
        token_logprobs(trainer.model, batch)
    return sum(kept.values())


@pytest.mark.parametrize("mixture", [False, True], ids=["dense", "mixture"])
def test_activation_checkpointing_saves_memory_and_changes_no_gradient(mixture: bool, tmp_path: Path) -> None:
    path = save_mixture(tmp_path) if mixture else MODEL
    batch = episodes(top_p=0.9, experts=EXPERTS if mixture else None)
    plain, lean = engine(path), engine(path, {"activation_checkpointing": True})
    packed = pack(batch, [0.0] * len(batch))
    assert saved_bytes(lean, packed) < 0.5 * saved_bytes(plain, packed)
    results = [trainer.train(batch, 0) for trainer in (plain, lean)]
    assert results[0].metrics["loss"] == results[1].metrics["loss"]
    assert results[0].metrics.get("routing_differed") == results[1].metrics.get("routing_differed")
    for a, b in zip(plain.model.parameters(), lean.model.parameters(), strict=True):
        assert a.grad is not None
        assert a.grad.abs().max() > 0
        torch.testing.assert_close(a.grad, b.grad, atol=1e-7, rtol=1e-5)


def test_a_small_head_budget_changes_no_gradient() -> None:
    batch = episodes(count=60)
    whole, sliced = engine(), engine(compute={"head_budget_mb": 1})
    sliced.model.token_head.budget_bytes = 5000  # less than a mebibyte: the shipped vocabulary is small
    losses = [trainer.train(batch, 0).metrics["loss"] for trainer in (whole, sliced)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    for a, b in zip(whole.model.parameters(), sliced.model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("mixture", [False, True], ids=["dense", "mixture"])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_bfloat16_keeps_master_weights_head_and_ratio(mixture: bool, top_p: float, tmp_path: Path) -> None:
    path = save_mixture(tmp_path) if mixture else MODEL
    batch = episodes(top_p=top_p, experts=EXPERTS if mixture else None)
    exact, half = engine(path), engine(path, {"precision": "bfloat16"})
    seen: list[torch.dtype] = []
    half.model.base_model.layers[0].self_attn.o_proj.register_forward_hook(lambda _m, _i, out: seen.append(out.dtype))
    found = half.logprobs(batch)
    assert seen == [torch.bfloat16]
    differences = np.concatenate([np.abs(a - b) for a, b in zip(found, exact.logprobs(batch), strict=True)])
    assert 1e-5 < np.nanmean(differences) < 0.05
    result = half.train(batch, 0)
    for own, again in zip(result.logprobs, found, strict=True):
        np.testing.assert_array_equal(own, again)  # with and without gradient: the ratio to itself is 1
    assert {p.dtype for p in half.model.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in half.model.parameters() if p.grad is not None} == {torch.float32}
    assert {s.dtype for state in half.optimizer.state.values() for s in state.values()} == {torch.float32}
    exact.train(batch, 0)
    flat = [torch.cat([p.grad.flatten() for p in t.model.parameters() if p.grad is not None]) for t in (exact, half)]
    assert torch.cosine_similarity(*flat, dim=0) > 0.98


def test_a_bfloat16_step_smaller_than_its_resolution_is_not_lost() -> None:
    """bfloat16 weights have 8 bits: a change of 1e-6 would vanish in them."""
    trainer = engine(compute={"precision": "bfloat16"})
    trainer.optimizer.param_groups[0]["lr"] = 1e-6
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train(episodes(), 0)
    moved = [(a != b).float().mean() for a, b in zip(before, trainer.model.parameters(), strict=True)]
    assert torch.stack(moved).mean() > 0.5


def test_the_mass_off_the_kept_set_is_computed_when_it_is_due() -> None:
    trainer = engine(off_support_every=2)
    results = [trainer.train(episodes(top_p=0.9), version) for version in range(3)]
    rows = [next(row for row in result.mismatch if row["scope"] == "all") for result in results]
    assert ["off_support" in row for row in rows] == [True, False, True]
    known = [row["tv"] + row["off_support"] if "off_support" in row else None for row in rows]
    assert [result.metrics.get("bound_budget") for result in results] == known  # a part of it alone would be a jump
    never = engine(off_support_every=0).train(episodes(top_p=0.9), 0)
    assert never.metrics["bound_budget"] == next(row["tv"] for row in never.mismatch if row["scope"] == "all")
    full = engine(off_support_every=2).train(episodes(), 1)
    assert full.metrics["bound_budget"] == next(row["tv"] for row in full.mismatch if row["scope"] == "all")
