"""The bound's audit in the trainer: mass off the kept set, exact distances, and the rows of a step."""

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from agent_rl import facts
from agent_rl.config import model_directory
from agent_rl.objective.config import ObjectiveConfig
from agent_rl.objective.token_batch import TokenBatch
from agent_rl.records import Trajectory
from agent_rl.trainer.engines.torch import TorchEngine
from agent_rl.trainer.packing import pack
from agent_rl.trainer.token_logprobs import token_logprobs
from agent_rl.trainer.total_variation import total_variation
from tests.trajectories import random_trajectory

MODEL = str(model_directory("builtin:tiny-qwen3"))


def engine(**keys: object) -> TorchEngine:
    return TorchEngine(TorchEngine.Config(**{"learning_rate": 1e-3, **keys}), MODEL, ObjectiveConfig())


def episodes(top_p: float, count: int = 8) -> list[Trajectory]:
    rng = np.random.default_rng(0)
    return [random_trajectory(rng, i, turns=i % 4, top_p=top_p) for i in range(count)]


def dense(model: torch.nn.Module, batch: TokenBatch) -> torch.Tensor:
    """Softmax over the whole vocabulary at each sampled token, by one plain forward a trajectory, [A, V]."""
    found = []
    for start, end in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False):
        span = slice(int(start), int(end))
        with torch.no_grad():
            logits = model(batch.token_ids[None, span], cu_seq_lens_q=torch.tensor([0, end - start])).logits[0]
        rows = batch.loss_mask[span].nonzero().squeeze(1)
        found.append((logits[rows - 1] / batch.temperature[span][rows, None]).softmax(-1))
    return torch.cat(found).double()


def kept(batch: TokenBatch, probabilities: torch.Tensor) -> torch.Tensor:
    """Which tokens each row keeps, bool [A, V]."""
    mask = torch.ones_like(probabilities, dtype=torch.bool)
    if batch.kept_ids is not None and batch.kept_offsets is not None:
        for row, (start, end) in enumerate(zip(batch.kept_offsets, batch.kept_offsets[1:], strict=False)):
            mask[row] = False
            mask[row, batch.kept_ids[start:end]] = True
    return mask


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_distances_equal_those_of_the_whole_distributions(top_p: float) -> None:
    before, trained = engine(), engine()
    trained.train(episodes(1.0), 0)
    batch = pack(episodes(top_p), [0.0] * 8)
    mu, pi = dense(before.model, batch), dense(trained.model, batch)
    inside = kept(batch, pi)
    lost = 1 - (pi * inside).sum(1)
    mu, pi = (torch.where(inside, p, 0) / torch.where(inside, p, 0).sum(1, keepdim=True) for p in (mu, pi))
    want = 0.5 * (mu - pi).abs().sum(1)
    found = total_variation(before.model, trained.model, batch)
    assert want.max() > 0.01
    torch.testing.assert_close(found.double(), want, atol=1e-5, rtol=1e-4)
    estimate = torch.where(mu > 0, mu * (1 - pi / mu).clamp(min=0), 0).sum(1)
    torch.testing.assert_close(estimate, want, atol=1e-9, rtol=0)  # (1 - r)+ is unbiased on any support
    off_support = token_logprobs(trained.model, batch, off_support=True).off_support
    if top_p == 1:
        assert off_support is None
    else:
        assert off_support is not None
        torch.testing.assert_close(off_support[batch.active.index].double(), lost, atol=1e-5, rtol=1e-4)


def test_the_rows_of_a_step_do_not_depend_on_packing(tmp_path: Path) -> None:
    batch = episodes(0.9, 12)
    whole, split = (engine(max_tokens_per_microbatch=limit).train(batch, 1) for limit in (10_000, 45))
    assert split.metrics["num_microbatches"] > 2
    names = ("tv", "off_support", "penalty_var", "ratio_drift", "state_shift", "gspo_gap")
    for a, b in zip(whole.mismatch, split.mismatch, strict=True):
        assert ("tv" in a) == (a["part"] == "total" and a["scope"] in ("turn", "all"))
        if "tv" in a:
            assert a["num_episodes"] == b["num_episodes"] == 12  # three of them sampled nothing
            assert [a[name] for name in names] == pytest.approx([b[name] for name in names], abs=1e-5)
    turns = [row["tv"] + row["off_support"] for row in whole.mismatch if row["scope"] == "turn"]
    assert whole.metrics["bound_budget"] == pytest.approx(sum(turns))
    facts.write_part(tmp_path / "m.parquet", 0, [{"step": 0, **row} for row in whole.mismatch], facts.MISMATCH)
    assert facts.read_part(tmp_path / "m.parquet", 0)[0]["tv"] == whole.mismatch[0]["tv"]


def test_on_policy_rollouts_use_none_of_the_budget() -> None:
    trainer = engine()
    batch = copy.deepcopy(episodes(1.0))
    on_policy = [replace(t, behavior_logprobs=lp) for t, lp in zip(batch, trainer.logprobs(batch), strict=True)]
    assert trainer.train(on_policy, 0).metrics["bound_budget"] < 1e-4
    assert trainer.train(on_policy, 1).metrics["bound_budget"] > 1e-3
