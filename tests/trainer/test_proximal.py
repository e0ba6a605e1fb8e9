"""Proximal log-probs: each token at the weights it was sampled with, and the mismatch split by them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent_rl import facts
from agent_rl.config import model_directory
from agent_rl.objective.config import ObjectiveConfig
from agent_rl.objective.methods import method
from agent_rl.records import Trajectory
from agent_rl.trainer.engines.torch import TorchEngine
from tests.trajectories import random_trajectory

MODEL = str(model_directory("builtin:tiny-qwen3"))
NEEDS_PROXIMAL = method("icepop")


def engine(objective: ObjectiveConfig | None = None, **proximal: Any) -> TorchEngine:
    config = TorchEngine.Config(learning_rate=1e-3, max_tokens_per_microbatch=120, proximal=proximal)
    return TorchEngine(config, MODEL, objective or ObjectiveConfig())


def episodes(count: int = 8, **keys: Any) -> list[Trajectory]:
    rng = np.random.default_rng(0)
    return [random_trajectory(rng, i, turns=1 + i % 3, **keys) for i in range(count)]


def test_every_token_is_recomputed_at_its_own_version() -> None:
    trainer = engine(every=1)
    batch = episodes(version_step=1)
    at_version = []
    for version in range(2):
        at_version.append(trainer.logprobs(batch))
        trainer.train(episodes(), version)
    at_version.append(trainer.logprobs(batch))
    found = trainer.train(batch, 2).proximal_logprobs
    assert found is not None
    for i, trajectory in enumerate(batch):
        for t in np.flatnonzero(trajectory.loss_mask):
            version = trajectory.policy_versions[t]
            assert found[i][t] == pytest.approx(at_version[version][i][t], abs=1e-6)
            if version < 2:
                assert abs(found[i][t] - at_version[2][i][t]) > 1e-7


def test_an_empty_batch_leaves_its_version_for_those_after_it() -> None:
    """All of its groups were masked; the next batch was sampled with the same weights."""
    trainer = engine(every=1)
    batch = episodes(version=0)
    before = trainer.logprobs(batch)
    trainer.train([], 0)
    found = trainer.train(batch, 1).proximal_logprobs
    assert found is not None
    mask = batch[0].loss_mask
    assert found[0][mask] == pytest.approx(before[0][mask], abs=1e-6)


def test_the_parts_of_the_mismatch_add_up() -> None:
    trainer = engine(every=1)
    trainer.train(episodes(), 0)
    rows = trainer.train(episodes(), 1).mismatch
    k1 = {row["part"]: row["k1"] for row in rows if row["scope"] == "all"}
    assert k1["total"] == pytest.approx(k1["policy_lag"] + k1["implementation"], abs=1e-6)
    assert abs(k1["policy_lag"]) > 1e-6
    turns = {(row["part"], row["turn"]) for row in rows if row["scope"] == "turn"}
    assert turns == {(part, turn) for part in ("total", "policy_lag", "implementation") for turn in range(3)}


def test_rows_by_number_of_turns_and_lag_partition_the_tokens() -> None:
    batch = episodes(version_step=1)
    rows = engine().train(batch, 5).mismatch
    total = sum(int(t.loss_mask.sum()) for t in batch)
    for scope in ("turn", "lag", "turn_by_num_turns"):
        assert sum(row["n"] for row in rows if row["scope"] == scope) == total
    stratified = {(row["num_turns"], row["turn"]) for row in rows if row["scope"] == "turn_by_num_turns"}
    assert stratified == {(1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (3, 2)}
    assert {row["lag"] for row in rows if row["scope"] == "lag"} == {3, 4, 5}


def test_a_version_that_is_not_kept_is_named() -> None:
    trainer = engine(every=1, max_snapshots=2)
    for version in range(3):
        trainer.train(episodes(version=version), version)
    with pytest.raises(ValueError, match=r"policy version 0 are not kept \(there are: 2, 3\); raise trainer.proximal"):
        trainer.train(episodes(version=0), 3)


def test_every_and_fraction_bound_the_cost() -> None:
    trainer = engine(every=2, fraction=0.5)
    assert trainer.train(episodes(), 1).proximal_logprobs is None
    found = trainer.train(episodes(version=1), 2).proximal_logprobs
    assert found is not None
    assert [values is not None for values in found] == [False, True] * 4


def test_objectives_that_need_them_get_them_always_and_after_a_checkpoint(tmp_path: Path) -> None:
    straight, stopped = engine(NEEDS_PROXIMAL), engine(NEEDS_PROXIMAL)
    for trainer in (straight, stopped):
        trainer.train(episodes(), 0)
    stopped.save(tmp_path)
    resumed = engine(NEEDS_PROXIMAL)
    resumed.load(tmp_path)
    first, second = (trainer.train(episodes(), 1) for trainer in (straight, resumed))
    assert first.metrics["loss"] == second.metrics["loss"]
    assert first.proximal_logprobs is not None
    assert all(values is not None for values in first.proximal_logprobs)


def test_a_turn_conditioned_clip_records_what_it_compared_each_turn_with(tmp_path: Path) -> None:
    turns = {"mode": "min", "min_tokens": 2, "min_responses": 1}
    trainer = engine(ObjectiveConfig(clip={"type": "sat", "turns": turns}))
    trainer.train(episodes(), 0)
    found = trainer.train(episodes(), 1)
    rows = {row["turn"]: row for row in found.mismatch if row["part"] == "reference"}
    per_turn = {row["turn"]: row["n"] for row in found.mismatch if (row["part"], row["scope"]) == ("total", "turn")}
    assert {turn: row["n"] for turn, row in rows.items()} == per_turn
    assert all(row["q"] <= found.metrics["q_supported"] + 1e-9 for row in rows.values())
    assert {row["fallback"] for row in rows.values()} == {0.0}
    facts.write_part(tmp_path / "m.parquet", 0, [{"step": 0, **row} for row in found.mismatch], facts.MISMATCH)
    assert len(facts.read_part(tmp_path / "m.parquet", 0)) == len(found.mismatch)
