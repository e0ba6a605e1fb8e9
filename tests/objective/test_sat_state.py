"""SAT across steps: the previous step's q, the EMA cap, and both through a checkpoint."""

import pytest
import torch
from objective_batches import pack, random_rows

from agent_rl.objective.config import ObjectiveConfig
from agent_rl.objective.ema_cap import EMACap
from agent_rl.objective.loss import Objective
from agent_rl.objective.turn_reference import TurnReference
from agent_rl.settings import check

TURNS = {"mode": "min", "num_buckets": 3, "min_tokens": 3, "min_responses": 1, "shrinkage": 4.0}


def build(**clip):
    return Objective(check(ObjectiveConfig, {"clip": {"type": "sat", **clip}}))


def batch_of(seed, spread=0.15):
    return pack([r for r in random_rows(seed, 12, spread=spread) if r.mask.any()])


def train_step(objective, seed, parts=1):
    """One whole step, its context and its loss; `parts` is how many micro-batches it comes in."""
    rows = [r for r in random_rows(seed, 12, spread=0.15) if r.mask.any()]
    packed = [pack(rows[i::parts]) for i in range(parts)]
    batches, logprobs = [b for b, _ in packed], [lp for _, lp in packed]
    step = objective.begin_step(batches, logprobs if objective.needs_step_pass else None)
    losses = [objective.loss(lp, b, step).loss for b, lp in packed]
    objective.end_step(batches, logprobs, step)
    return step, float(sum(losses))


def q_of(reference):
    return reference.q if isinstance(reference, TurnReference) else reference


@pytest.mark.parametrize("turns", [None, TURNS])
@pytest.mark.parametrize("parts", [1, 3])
def test_previous_step(turns, parts):
    """It needs no pass ahead of the losses, gates nothing at first, and then lags `scope: step` by one step."""
    lagging, exact = build(scope="previous_step", turns=turns), build(turns=turns)
    assert not lagging.needs_step_pass
    ppo = Objective(check(ObjectiveConfig, {"clip": "ppo"}))
    wanted = [q_of(train_step(exact, seed)[0].reference) for seed in range(4)]
    found = [train_step(lagging, seed, parts) for seed in range(4)]
    assert float(found[0][0].reference) == 0.0
    assert found[0][1] == pytest.approx(train_step(ppo, 0)[1], rel=1e-12)
    for (step, _), want in zip(found[1:], wanted, strict=False):
        torch.testing.assert_close(q_of(step.reference), want, rtol=1e-12, atol=0)


@pytest.mark.parametrize("turns", [None, TURNS])
@pytest.mark.parametrize("keys", [{"scope": "previous_step"}, {"cap": "ema"}, {"scope": "previous_step", "cap": "ema"}])
def test_a_checkpoint_continues_where_it_stopped(turns, keys, tmp_path):
    whole, stopped, resumed = (build(turns=turns, **keys) for _ in range(3))
    losses = [train_step(whole, seed)[1] for seed in range(60)]
    for seed in range(55):
        train_step(stopped, seed)
    torch.save(stopped.state_dict(), tmp_path / "objective.pt")
    resumed.load_state_dict(torch.load(tmp_path / "objective.pt", weights_only=True))
    assert [train_step(resumed, seed)[1] for seed in range(55, 60)] == losses[55:]
    fresh = build(turns=turns, **keys)
    assert [train_step(fresh, seed)[1] for seed in range(55, 60)] != losses[55:]


def test_parts_without_state_save_nothing():
    assert build().state_dict() == {}
    assert Objective(check(ObjectiveConfig, {})).state_dict() == {}
    build(scope="previous_step", cap="ema").load_state_dict({})


def test_ema_cap_on_worked_numbers():
    """0.9 and 0.1: q = 1 once, then 2 for 49 steps, is 2 - 0.9^49; it caps from then on, and stays as it is."""
    cap = EMACap()
    for step in range(50):
        q = torch.tensor(1.0 if step == 0 else 2.0)
        assert torch.equal(cap.apply(torch.tensor(9.0)), torch.tensor(9.0))
        cap.observe(q)
    frozen = 2 - 0.9**49
    assert float(cap.average) == pytest.approx(frozen, rel=1e-12)
    for _ in range(3):
        cap.observe(torch.tensor(5.0))
    assert float(cap.apply(torch.tensor(9.0))) == pytest.approx(frozen)
    assert float(cap.apply(torch.tensor(0.5))) == 0.5


def test_the_cap_is_absolute():
    """After the warm-up, mismatch ten times larger gates as against the old q, where plain SAT would follow it."""
    capped, plain = build(cap="ema"), build()
    for seed in range(50):
        train_step(capped, seed)
    batch, lp = batch_of(99)
    wide = batch.behavior_logprobs + 10 * (lp - batch.behavior_logprobs)
    wide = torch.where(batch.loss_mask, wide.clamp(max=-1e-6), lp)
    steps = [objective.begin_step([batch], [wide]) for objective in (capped, plain)]
    assert float(steps[0].reference) == pytest.approx(float(capped.clip.cap.average))
    assert float(steps[1].reference) > 3 * float(steps[0].reference)
    rates = [o.loss(wide, batch, s).gate.float().sum() for o, s in zip((capped, plain), steps, strict=True)]
    assert rates[0] > rates[1]


def test_the_cap_keeps_turn_min_below_pooled():
    pooled, by_turn = build(cap="ema"), build(cap="ema", turns=TURNS)
    for seed in range(52):
        train_step(pooled, seed)
        train_step(by_turn, seed)
    batch, lp = batch_of(7, spread=1.0)
    least, middle = (o.loss(lp, batch, o.begin_step([batch], [lp])) for o in (by_turn, pooled))
    assert bool((least.q <= middle.q).all())
    assert bool((least.objective <= middle.objective).all())
