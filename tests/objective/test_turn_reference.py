"""Turn-conditioned references: worked cases, fall-back, shrinkage, micro-batches and ranks."""

import pytest
import torch
from golden_cases import DTYPES, array, assert_close, cases, tensor
from hypothesis import given, settings
from hypothesis import strategies as st
from objective_batches import on_ranks, pack, random_rows

from agent_rl.objective import evaluate
from agent_rl.objective.clips.sat import sat_factors
from agent_rl.objective.config import ObjectiveConfig
from agent_rl.objective.errors import ObjectiveError
from agent_rl.objective.loss import Objective
from agent_rl.objective.turn_reference import TurnConfig, turn_reference

MODES = ["local", "min", "anchor"]


def golden(kind):
    return [c for c in cases("turn_reference.json") if ("error" in c.values[0]["out"]) == (kind == "errors")]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", golden("values"))
def test_reference(case, dtype):
    inputs, out = case["in"], case["out"]
    mask = torch.as_tensor(array(inputs["mask"])).bool()
    d, turns = tensor(inputs["d"], dtype)[mask], tensor(inputs["turn"]).long()[mask]
    pooled = inputs["mode"] == "pooled"
    config = {"mode": "local" if pooled else inputs["mode"], "min_tokens": inputs["n_min"], "min_responses": 1}
    config |= {"shrinkage": inputs.get("kappa", 1024.0), "num_buckets": inputs.get("k_max", 8)}
    reference = turn_reference(d.abs(), turns, mask.nonzero()[:, 0], TurnConfig(**config), 0.9)
    assert_close(reference.q_pool, out["q_pool"], dtype)
    rows = reference.rows()
    assert [r["bucket"] for r in rows] == [b["k"] for b in out["buckets"]]
    for row, bucket in zip(rows, out["buckets"], strict=True):
        assert (row["n"], row["fallback"]) == (bucket["n"], bucket["fallback"])
        assert_close(row["q_bucket"], bucket["q_k"], dtype)
        assert_close(row["q_hat"], bucket["q_hat"], dtype)
    q = reference.q_pool.expand_as(d) if pooled else reference.at(turns)
    low, high, gate = sat_factors(d, q)
    assert_close(q, array(out["q"])[mask], dtype)
    assert_close(low, array(out["c_lo"])[mask], dtype)
    assert_close(high, array(out["c_hi"])[mask], dtype)
    assert gate.tolist() == array(out["gate"])[mask].astype(bool).tolist()


@pytest.mark.parametrize("case", golden("errors"))
def test_rejected(case):
    inputs = case["in"]
    d = tensor(inputs["d"])
    clip = {"type": "sat", "turns": {"mode": inputs.get("mode", "local")}}
    given = {"logprobs": d - 1, "behavior_logprobs": torch.full_like(d, -1.0), "advantages": torch.ones_like(d)}
    with pytest.raises(ValueError, match=r".") as raised:
        evaluate({"clip": clip}, loss_mask=inputs["mask"], turn_ids=inputs["turn"], **given)
    if case["out"]["error"] == "bad_mode":
        assert "'local', 'min' or 'anchor'" in str(raised.value)
    else:
        assert isinstance(raised.value, ObjectiveError)
        assert raised.value.code == case["out"]["error"]


def test_few_responses_fall_back():
    magnitudes, turns = torch.tensor([0.1] * 10 + [0.4] * 10), torch.tensor([0] * 10 + [1] * 10)
    responses = torch.tensor([0] * 5 + [1] * 5 + [0] * 10)
    config = TurnConfig(mode="local", min_tokens=1, min_responses=2, shrinkage=0)
    reference = turn_reference(magnitudes, turns, responses, config, 0.5)
    assert [(r["num_responses"], r["fallback"]) for r in reference.rows()] == [(2, False), (1, True)]
    assert reference.at(torch.tensor([0, 1, 99])).tolist() == pytest.approx([0.1, 0.1, 0.1])


def build(mode, level="token"):
    turns = {"mode": mode, "min_tokens": 3, "min_responses": 2, "shrinkage": 4.0, "num_buckets": 3}
    clip = {"type": "sat", "turns": turns}
    return Objective(ObjectiveConfig.model_validate({"clip": clip, "ratio": {"level": level}}))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(MODES), st.sampled_from(["token", "turn", "sequence"]), st.integers(0, 9))
def test_packing_and_ranks_do_not_matter(seed, mode, level, cut):
    rows = random_rows(seed, 9)
    objective = build(mode, level)
    batch, lp = pack(rows)
    step = objective.begin_step([batch], [lp])
    if step.empty:
        return
    parts = [pack(rows[:cut]), pack(rows[cut:])]
    packed = objective.begin_step([b for b, _ in parts], [lp for _, lp in parts])
    ranks = on_ranks(2, lambda i, reduce: objective.begin_step([parts[i][0]], [parts[i][1]], reduce))
    for other in (packed, *ranks):
        torch.testing.assert_close(other.reference.q, step.reference.q, rtol=1e-12, atol=1e-15)
        assert other.reference.rows() == [pytest.approx(r, rel=1e-12, nan_ok=True) for r in step.reference.rows()]
    losses = [objective.loss(lp, b, packed).loss for b, lp in parts]
    assert float(sum(losses)) == pytest.approx(float(objective.loss(lp, batch, step).loss), rel=1e-11, abs=1e-14)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(["token", "sequence"]))
def test_min_is_tighter_than_pooled(seed, level):
    batch, lp = pack(random_rows(seed, 12))
    pooled = Objective(ObjectiveConfig.model_validate({"clip": "sat", "ratio": {"level": level}}))
    tight = build("min", level)
    if (step := tight.begin_step([batch], [lp])).empty:
        return
    least = tight.loss(lp, batch, step)
    middle = pooled.loss(lp, batch, pooled.begin_step([batch], [lp]))
    assert bool((least.q <= middle.q).all())
    assert bool((least.objective <= middle.objective).all())


def test_an_active_token_without_turn_is_named():
    rows = [r for r in random_rows(5, 6) if r.mask.any()]
    rows[1].turns = rows[1].turns - 1
    batch, lp = pack(rows)
    for objective in (build("local"), build("local", "turn")):
        with pytest.raises(ObjectiveError, match=f"turn_ids of trajectory {rows[1].trajectory_id} at position"):
            objective.begin_step([batch], [lp])
    pooled = Objective(ObjectiveConfig.model_validate({"clip": "sat"}))
    assert not pooled.begin_step([batch], [lp]).empty
