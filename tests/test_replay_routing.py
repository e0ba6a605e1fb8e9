"""Replay of a run that recorded routing: the R3 methods send tokens where the engine did, the others do not."""

from pathlib import Path

import pytest

from agent_rl import facts
from agent_rl.objective.methods import method_names
from agent_rl.replay import OWN, replay_run
from tests.mixtures import EXPERTS, save_mixture
from tests.test_replay import NEAR, PROXIMAL, R3, STEP, make_run, row


@pytest.mark.parametrize("limit", [8192, 60])
def test_each_method_routes_as_its_name_says(tmp_path: Path, limit: int) -> None:
    """The figures are those of training, with one micro-batch and with several."""
    short = (f"trainer.max_tokens_per_microbatch={limit}", "rollout.max_episode_tokens=48")
    keys = (f"model.path={save_mixture(tmp_path / 'model')}", "routing_replay=true", "objective.kl.coefficient=0.1")
    run = tmp_path / "run"
    _, kept, engine = make_run(run, *keys, *short, experts=EXPERTS)
    metrics = engine.train(kept, STEP).metrics
    assert (metrics["num_microbatches"] > 2) == (limit == 60)
    assert metrics["routing_differed"] > 0.5
    rows = facts.read_part(run / "training_facts.parquet", STEP)
    rows = [r | {"proximal_logprobs": r["logprobs"]} for r in rows]
    facts.write_part(run / "training_facts.parquet", STEP, rows, facts.TRAINING_FACTS)
    found = replay_run(run, STEP)
    assert set(found.table["method"]) == {OWN, *method_names()}
    assert row(found, OWN)["gradient_norm"] == NEAR(metrics["grad_norm"], rel=1e-4)
    assert row(found, OWN)["loss"] == NEAR(metrics["loss"], rel=1e-4)
    assert abs(row(found, "sat_grpo")["gradient_norm"] / row(found, "sat_grpo_r3")["gradient_norm"] - 1) > 0.01
    assert row(found, "grpo")["cosine"] == NEAR(1, abs=1e-6)
    assert row(found, "grpo_r3")["cosine"] < 0.99
    assert set(found.skipped) == PROXIMAL
    assert found.skipped["grpo_tis"].endswith("the recorded ones are with replay")
    assert {name for name in R3 if row(found, name)["gradient_norm"] > 0} == R3
