"""Quantile, SAT factors, equivalent radius, KL and advantages against worked cases."""

import functools

import pytest
import torch
from golden_cases import DTYPES, array, assert_close, cases, tensor

from agent_rl.objective import evaluate
from agent_rl.objective.advantage import group_advantages, standardised
from agent_rl.objective.bernoulli import bernoulli_kl, bernoulli_tv
from agent_rl.objective.clips.sat import sat_factors
from agent_rl.objective.config import AdvantageConfig
from agent_rl.objective.equivalent_radius import equivalent_radii
from agent_rl.objective.errors import ObjectiveError
from agent_rl.objective.kl import low_var_kl
from agent_rl.objective.quantile import quantile
from agent_rl.objective.token_batch import TokenBatch
from agent_rl.trainer.kept_head import SampledTokens, head_logprobs
from agent_rl.trainer.routing_replay import replayed_weights


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", cases("quantile.json"))
@pytest.mark.parametrize("reduce", [None, lambda counts: counts], ids=["selection", "bisection"])
def test_quantile(case, dtype, reduce):
    x = tensor(case["in"]["x"], dtype)
    if "error" in case["out"]:
        with pytest.raises(ObjectiveError) as raised:
            quantile(x, case["in"]["alpha"], reduce)
        assert raised.value.code == case["out"]["error"]
        return
    q = quantile(x, case["in"]["alpha"], reduce)
    assert q.dtype == dtype
    assert_close(q, case["out"]["q"], dtype)
    assert int((x > q).sum()) == case["out"]["n_strictly_above"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", cases("sat_factors.json"))
def test_sat_factors(case, dtype):
    low, high, gate = sat_factors(tensor(case["in"]["d"], dtype), tensor(case["in"]["q"], dtype))
    out = case["out"]
    assert gate.tolist() == [bool(g) for g in out["gate"]]
    assert_close(low, out["c_lo"], dtype)
    assert_close(high, out["c_hi"], dtype)
    assert_close(0.2 * low, out["eps_low"], dtype)
    assert_close(0.2 * high, out["eps_high"], dtype)


@pytest.mark.parametrize("q", [1.0, 700.0, 1e4])
def test_a_mismatch_beyond_the_radii_leaves_them_whole(q):
    assert equivalent_radii(q, 0.2, 0.28) == (0.2, 0.28)


@pytest.mark.parametrize("case", cases("sat_equivalent_radius.json"))
def test_equivalent_radius(case):
    low, high = equivalent_radii(case["in"]["q"], case["in"]["eps"], case["in"]["eps"])
    assert low == pytest.approx(case["out"]["low"], rel=1e-9)
    assert high == pytest.approx(case["out"]["high"], rel=1e-9)


def replay(*starts):
    return [c for c in cases("kl_adv_replay.json") if c.values[0]["name"].startswith(starts)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", replay("grpo_advantage"))
def test_grpo_advantage(case, dtype):
    assert_close(standardised(tensor(case["in"]["rewards"], dtype)), case["out"]["adv"], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", replay("low_var_kl"))
def test_low_var_kl(case, dtype):
    mask = torch.as_tensor(array(case["in"]["mask"])).bool()
    lp = tensor(case["in"]["lp"], dtype).requires_grad_()
    kl = low_var_kl(lp[mask], tensor(case["in"]["ref"], dtype)[mask])
    kl.sum().backward()
    assert_close(kl.detach(), array(case["out"]["kl"])[mask], dtype)
    assert_close(lp.grad, case["out"]["dkl_dlp"], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", replay("bern_kl", "kpop"))
def test_bernoulli_divergences(case, dtype):
    """float32 is held to what rounding log p by half an ulp leaves of 1 - p."""
    inputs, out = case["in"], case["out"]
    names = ("p", "q") if "p" in inputs else ("p_train", "p_roll")
    p, q = (tensor(inputs[name], torch.float64).log().to(dtype) for name in names)
    assert_close(bernoulli_kl(p, q), out["kl"] if "kl" in out else out["fwd"], dtype)
    if "tv" in out:
        assert_close(bernoulli_tv(p, q), out["tv"], dtype)
        return
    assert_close(bernoulli_kl(q, p), out["rev"], dtype)
    tokens = {"logprobs": [[-1.0]], "proximal_logprobs": p[None, None], "behavior_logprobs": q[None, None]}
    gates = [{"type": "kpop", "phi": inputs["phi"]}]
    result = evaluate({"gates": gates}, advantages=[[1.0]], loss_mask=[[1]], **tokens)
    assert bool(result.weight) is out["keep"]


def test_no_case_is_left_out():
    read = ("grpo_advantage", "low_var_kl", "bern_kl", "kpop", "topp_", "r3_")
    assert all(c.values[0]["name"].startswith(read) for c in cases("kl_adv_replay.json"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", replay("r3_"))
def test_routing_replay(case, dtype):
    """As the trainer does it: the batch is checked, then a router's output is replaced."""
    experts = torch.tensor(case["in"]["idx"])
    batch = functools.partial(token_batch, token=1, kept=None, routed_experts=experts[:, None])
    if "error" in case["out"]:
        with pytest.raises(ObjectiveError, match="layer 0 routes position 0") as raised:
            batch()
        assert raised.value.code == case["out"]["error"]
        return
    replayed = batch().routed_experts[:, 0]
    weights = replayed_weights(tensor(case["in"]["z"], dtype), replayed)
    assert weights.dtype == dtype
    gates = torch.zeros(2, 4, dtype=dtype).scatter(1, replayed, weights)
    assert_close(gates, case["out"]["g"], dtype)


@pytest.mark.parametrize("case", replay("topp_"))
def test_top_p_replay(case):
    inputs, out = case["in"], case["out"]
    logits = torch.nn.Parameter(tensor([inputs["logits"]], torch.float32))
    kept = None if inputs["keep"] is None else torch.tensor(inputs["keep"]).nonzero().squeeze(1)
    batch = functools.partial(token_batch, token=inputs["token"], kept=kept)
    if "error" in out:
        with pytest.raises(ObjectiveError) as raised:
            batch()
        assert raised.value.code == out["error"]
        return
    made, identity = batch(), torch.eye(logits.shape[1])
    tokens = SampledTokens(made.token_ids[1:], made.temperature[1:], made.kept_ids, made.kept_offsets)
    logprobs = head_logprobs(logits, identity, tokens, budget_bytes=1).logprobs
    logprobs.sum().backward()
    assert_close(logprobs.detach()[0], out["logp"], torch.float32)
    assert_close(logits.grad[0], out["grad"], torch.float32)


def token_batch(token, kept, **fields):
    """One sampled token after a prompt of one."""
    two = torch.zeros(2, dtype=torch.int64)
    if kept is not None:
        fields |= {"kept_ids": kept, "kept_offsets": torch.tensor([0, len(kept)])}
    return TokenBatch(
        token_ids=torch.tensor([0, token]),
        position_ids=torch.arange(2),
        segment_ids=two,
        trajectory_ids=two,
        loss_mask=torch.tensor([False, True]),
        turn_ids=two,
        policy_versions=two,
        behavior_logprobs=torch.tensor([0.0, -1.0]),
        advantages=torch.ones(2),
        temperature=torch.ones(2),
        cu_seqlens=torch.tensor([0, 2], dtype=torch.int32),
        **fields,
    )


def test_kl_gradient_stays_finite_where_the_exponential_overflows():
    lp = torch.tensor([-5000.0, -1.0], requires_grad=True)
    low_var_kl(lp, torch.tensor([-1.0, -5000.0])).sum().backward()
    assert lp.grad.tolist() == [0.0, 0.0]


def test_advantages_by_group():
    rewards = torch.tensor([1.0, 3.0, 5.0, 2.0, 5.0])
    groups = torch.tensor([7, 2, 7, 2, 2])
    got = group_advantages(rewards, groups, AdvantageConfig())
    mean, std = 10 / 3, (7 / 3) ** 0.5
    want = [-2 / (8**0.5), (3 - mean) / std, 2 / (8**0.5), (2 - mean) / std, (5 - mean) / std]
    assert got.tolist() == pytest.approx(want, abs=2e-6)


def test_std_floor_and_group_of_one():
    rewards, groups = torch.tensor([0.0, 0.1]), torch.tensor([0, 0])
    assert group_advantages(rewards, groups, AdvantageConfig(std_floor=0.5)).tolist() == pytest.approx(
        [-0.1, 0.1], 1e-4
    )
    with pytest.raises(ObjectiveError, match="set group_size to at least 2") as raised:
        group_advantages(rewards, torch.tensor([0, 1]), AdvantageConfig())
    assert raised.value.code == "group_of_one"
