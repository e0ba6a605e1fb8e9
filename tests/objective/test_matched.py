"""PPO at the radii of a SAT run: constant, by turn, and step by step from that run's metrics."""

import json

import pytest
import torch
from objective_batches import pack, random_rows

from agent_rl.objective.config import ObjectiveConfig
from agent_rl.objective.loss import Objective
from agent_rl.objective.metrics import step_metrics, turn_rows
from agent_rl.settings import check

TURNS = {"mode": "local", "num_buckets": 3, "min_tokens": 3, "min_responses": 1, "shrinkage": 4.0}


def build(**clip):
    return Objective(check(ObjectiveConfig, {"clip": clip}))


def train_step(objective, seed, step):
    """One step of an objective: its loss and gradient, and the metrics that a run would log for it."""
    batch, lp = pack([r for r in random_rows(seed, 40, spread=0.05) if r.mask.any()])
    lp.requires_grad_()
    context = objective.begin_step([batch], [lp], step=step)
    output = objective.loss(lp, batch, context)
    output.loss.backward()
    metrics = step_metrics([batch], [output], step=context)
    return output, lp.grad, {"step": step, **metrics}, turn_rows([batch], [output], context)


def write(directory, rows):
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def radii(objective, step):
    batch, lp = pack([r for r in random_rows(9, 20) if r.mask.any()])
    output = objective.loss(lp, batch, objective.begin_step([batch], None, step=step))
    index = batch.active.index
    return output.eps_low[index], output.eps_high[index], batch.active.turn_ids


def test_a_constant_pair_is_ppo():
    for seed in range(4):
        ours, theirs = (train_step(build(type=t, eps_low=0.07, eps_high=0.11), seed, 0) for t in ("matched", "ppo"))
        assert torch.equal(ours[0].loss, theirs[0].loss)
        assert torch.equal(ours[1], theirs[1])
        assert not ours[0].newly_clipped.any()


def test_constant_pairs_by_turn():
    low, high, turns = radii(build(type="matched", turns=[[0.1, 0.2], [0.3, 0.4]]), step=0)
    assert set(turns.tolist()) == {0, 1, 2}
    assert low.tolist() == [0.1 if turn == 0 else 0.3 for turn in turns.tolist()]
    assert high.tolist() == [0.2 if turn == 0 else 0.4 for turn in turns.tolist()]


def test_a_schedule_follows_its_run(tmp_path):
    """Steps 2 and 3 of the run are missing, as skipped steps are; before its first and after its last is an error."""
    rows = [{"step": 1, "eps_eff_low": 0.1, "eps_eff_high": 0.15}, {"step": 2, "loss": None}]
    write(tmp_path, [{"step": 0}, *rows, {"step": 4, "eps_eff_low": 0.01, "eps_eff_high": 0.02}])
    objective = build(type="matched", schedule=str(tmp_path))
    for step, pair in ((1, (0.1, 0.15)), (2, (0.1, 0.15)), (3, (0.1, 0.15)), (4, (0.01, 0.02))):
        low, high, _ = radii(objective, step)
        assert (set(low.tolist()), set(high.tolist())) == ({pair[0]}, {pair[1]})
    for step in (0, 5):
        with pytest.raises(ValueError, match=f"steps 1 to 4, not for step {step}; name a run that covers it"):
            radii(objective, step)


def test_steps_that_the_run_skipped_are_covered_at_both_ends(tmp_path):
    skipped = {"skipped_empty": 1.0}
    radii_of_step_1 = {"step": 1, "skipped_empty": 0.0, "eps_eff_low": 0.1, "eps_eff_high": 0.15}
    write(tmp_path, [{"step": 0, **skipped}, radii_of_step_1, {"step": 2, **skipped}, {"step": 3, "eval_avg": 0.5}])
    objective = build(type="matched", schedule=str(tmp_path))
    for step in (0, 1, 2):
        low, high, _ = radii(objective, step)
        assert (set(low.tolist()), set(high.tolist())) == ({0.1}, {0.15})
    with pytest.raises(ValueError, match="steps 0 to 2, not for step 3"):
        radii(objective, 3)


@pytest.mark.parametrize("by_turn", [False, True])
def test_the_schedule_of_a_run_gives_its_gradient_back(tmp_path, by_turn):
    """Replayed on the very batches it came from, the equivalent radius has SAT's gradient to the bit."""
    sat = build(type="sat", **({"turns": TURNS} if by_turn else {}))
    steps = [train_step(sat, seed, seed) for seed in range(5)]
    write(tmp_path, [metrics for _, _, metrics, _ in steps])
    matched = build(type="matched", schedule=str(tmp_path / "metrics.jsonl"), by_turn=by_turn)
    assert matched.needs_turns is by_turn
    assert any(output.newly_clipped.any() for output, *_ in steps)
    for step, (_, gradient, _, _) in enumerate(steps):
        assert torch.equal(train_step(matched, step, step)[1], gradient)
    others = [train_step(matched, seed, (seed + 1) % 5)[1] for seed in range(5)]
    assert not all(torch.equal(other, gradient) for other, (_, gradient, _, _) in zip(others, steps, strict=True))


def test_a_turn_without_radii_has_the_mean_ones(tmp_path):
    """Turns beyond the last bucket share its radii; at step 1 no token of bucket 1 was counted."""
    mean = {"eps_eff_low": 0.05, "eps_eff_high": 0.06}
    first = {"eps_eff_low_turn_0": 0.1, "eps_eff_high_turn_0": 0.15}
    second = {"eps_eff_low_turn_1": 0.2, "eps_eff_high_turn_1": 0.25}
    write(tmp_path, [{"step": 0, **mean, **first, **second}, {"step": 1, **mean, **first}])
    objective = build(type="matched", schedule=str(tmp_path), by_turn=True)
    for step, later in ((0, (0.2, 0.25)), (1, (0.05, 0.06))):
        low, high, turns = radii(objective, step)
        assert set(turns.tolist()) == {0, 1, 2}
        assert low.tolist() == [0.1 if turn == 0 else later[0] for turn in turns.tolist()]
        assert high.tolist() == [0.15 if turn == 0 else later[1] for turn in turns.tolist()]


def test_rows_by_turn():
    output, _, metrics, rows = train_step(build(type="sat", turns=TURNS), 3, 0)
    assert [row["bucket"] for row in rows] == [0, 1, 2]
    assert rows[0].keys() >= {"n", "q_bucket", "q_hat", "q", "fallback", "gate_rate", "eps_eff_low", "eps_eff_high"}
    gated = sum(row["n"] * row["gate_rate"] for row in rows)
    batch, _ = pack([r for r in random_rows(3, 40, spread=0.05) if r.mask.any()])
    counts = torch.bincount(batch.active.turn_ids, minlength=3).tolist()
    gates = [output.gate[batch.active.index][batch.active.turn_ids == k].float().mean().item() for k in range(3)]
    assert [row["gate_rate"] for row in rows] == pytest.approx(gates)
    assert gated <= sum(counts)
    assert any(gates)
    for row in rows:
        assert metrics[f"eps_eff_low_turn_{row['bucket']}"] == row["eps_eff_low"] <= 0.2
    mean = sum(n * row["eps_eff_high"] for n, row in zip(counts, rows, strict=True)) / sum(counts)
    assert metrics["eps_eff_high"] == pytest.approx(mean)
    assert train_step(build(type="sat"), 3, 0)[3] == []


def test_a_run_without_radii_is_no_schedule(tmp_path):
    write(tmp_path, [{"step": 0, "eps_low": 0.2}])
    with pytest.raises(ValueError, match="logs no eps_eff_low: its run must have clip sat"):
        build(type="matched", schedule=str(tmp_path))
    write(tmp_path, [{"step": 0, "eps_eff_low": 0.2, "eps_eff_high": 0.2}])
    with pytest.raises(ValueError, match="must have clip sat with turns"):
        build(type="matched", schedule=str(tmp_path), by_turn=True)
