"""Loss, per-token objective, radii and gradients against worked cases, through the public entry."""

import numpy as np
import pytest
import torch
from golden_cases import DTYPES, array, assert_close, cases, tensor

from agent_rl.objective import evaluate
from agent_rl.objective.errors import ObjectiveError


def turns(mode, min_tokens, shrinkage):
    return {"mode": mode, "min_tokens": min_tokens, "min_responses": 1, "shrinkage": shrinkage}


def objective_of(method, hp):
    """The composition that a golden method is; its clip may be SAT's in place of PPO's."""
    pg, proximal = {"type": "policy_gradient"}, {"denominator": "proximal"}
    dppo = {"type": "dppo", "delta": hp.get("delta", 1e-3)}
    composed = {
        "grpo": {},
        "gspo": {"ratio": {"level": "sequence"}},
        "seqclip": {"ratio": {"level": "sequence"}, "gates": [part("seqclip", hp, low="seq_lo", high="seq_hi")]},
        "dppo": {"gates": [dppo]} | ({"clip": "none"} if hp.get("dppo_form") == "mask" else {}),
        "spo": {"clip": "none", "surrogate": "spo"},
        "drpo": {"clip": "none", "surrogate": part("drpo", hp, delta="drpo_delta")},
        "tis_pg": {"clip": "none", "surrogate": part("policy_gradient", hp, cap="tis_cap")},
        "tis": {"ratio": proximal, "gates": [part("tis", hp, cap="tis_cap")]},
        "icepop": {"ratio": proximal, "gates": [part("icepop", hp, low="ice_lo", high="ice_hi")]},
        "kpop": {"ratio": proximal, "gates": [part("kpop", hp, phi="phi")]},
        "sao_dis": {
            "clip": "none",
            "surrogate": pg,
            "gates": [part("sao_dis", hp, eps_low="dis_low", eps_high="dis_high")],
        },
    }[method]
    clip = {"type": "sat" if hp.get("sat") else "ppo"}
    if hp.get("sat_mode", "pooled") != "pooled":
        clip["turns"] = turns(hp["sat_mode"], hp["n_min"], hp["kappa"])
    clip |= {name: hp[name] for name in ("eps_low", "eps_high") if name in hp}
    return {"clip": clip, "aggregate": hp.get("agg", "sequence_mean")} | composed


def part(name, hp, **keys):
    return {"type": name} | {key: hp[golden] for key, golden in keys.items() if golden in hp}


def run(inputs, objective, dtype=torch.float64):
    names = {"logprobs": "lp", "behavior_logprobs": "mu", "proximal_logprobs": "mut", "advantages": "adv"}
    given = {name: tensor(inputs[short], dtype) for name, short in names.items() if inputs.get(short) is not None}
    turns = inputs.get("turn")
    return evaluate(objective, loss_mask=inputs["mask"], turn_ids=turns, **given)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", cases("objectives.json"))
def test_objective(case, dtype):
    out, hp = case["out"], case["in"]["hp"]
    result = run(case["in"], objective_of(case["in"]["method"], hp), dtype)
    assert_close(result.loss, out["loss"], dtype)
    assert_close(result.grad_logprobs, out["grad"], dtype)
    assert_close(result.objective, out["S"], dtype)
    if case["in"]["method"] != "tis_pg":  # whose weight is the surrogate's own, not a gate's
        assert_close(result.weight, out["w"], dtype)
    if float(result.eps_low.max()) < float("inf"):  # the golden file names radii for methods that read none, too
        assert_close(result.eps_low, out["eps_lo"], dtype)
        assert_close(result.eps_high, out["eps_hi"], dtype)
    if "q" in out:
        assert_close(result.q, out["q"], dtype)
        np.testing.assert_array_equal(result.gate, array(out["gate"]))
        assert_close(result.factor, np.minimum(array(out["c_lo"]), array(out["c_hi"])), dtype)
        names = {"eps_low": "mean_eps_low", "eps_high": "mean_eps_high", "gate_rate": "gate_rate"}
        names |= {"min_factor": "min_c", "newly_clipped_fraction": "newly_clipped_frac"}
        for name, golden in names.items():
            assert_close(result.metrics[name], out["runtime"][golden], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", cases("properties.json"))
def test_sat_against_ppo(case, dtype):
    out = case["out"]
    sat, ppo = (run(case["in"], {"clip": clip}, dtype) for clip in ("sat", "ppo"))
    off = run(case["in"], {"clip": {"type": "sat", "alpha": 1.0}}, dtype)
    assert off.loss.hex() == ppo.loss.hex()
    assert torch.equal(off.grad_logprobs, ppo.grad_logprobs)
    assert_close(ppo.loss, float.fromhex(out.get("ppo_loss_hex") or out["loss_hex"]), dtype)
    if "gate_any" in out:
        assert bool(sat.gate.any()) is out["gate_any"]
        assert sat.loss.hex() == ppo.loss.hex()
        assert torch.equal(sat.grad_logprobs, ppo.grad_logprobs)
        return
    assert_close(ppo.grad_logprobs, out["ppo_grad"], dtype)
    assert_close(sat.grad_logprobs, out["sat_grad"], dtype)
    assert_close(sat.loss, out["sat_loss"], dtype)
    assert_close(sat.q.max(), out["q"], dtype)
    np.testing.assert_array_equal(sat.newly_clipped, array(out["changed"]))
    tc_min = run(case["in"], {"clip": {"type": "sat", "turns": turns("min", 4, 8.0)}}, dtype)
    assert_close(tc_min.loss, out["tc_min_loss"], dtype)
    assert_close(tc_min.grad_logprobs, out["tc_min_grad"], dtype)
    assert bool((tc_min.objective <= sat.objective).all())
    assert bool((sat.objective <= ppo.objective).all())


@pytest.mark.parametrize("case", cases("errors.json"))
def test_rejected_input(case):
    if "error" not in case["out"]:
        assert_close(run(case["in"], {}).loss, case["out"]["loss"], torch.float64)
        return
    hp = case["in"]["kw"]
    objective = hp.get("method", {"clip": {"type": "sat", "turns": {"mode": hp["sat_mode"]}}} if hp.get("sat") else {})
    with pytest.raises(ObjectiveError) as raised:
        run(case["in"], objective)
    assert raised.value.code == case["out"]["error"]


@pytest.mark.parametrize("case", [c for c in cases("quantile_scope.json") if "equal_length" in c.id])
def test_sat_gspo_gates_nothing_below_ten_equal_responses(case):
    level = {"ratio": {"level": "sequence"}}
    result = run(case["in"], {**level, "clip": {"type": "sat", **case["in"]["hp"]}})
    assert int(result.gate.any(1).sum()) == case["out"]["gated_responses"]
    assert_close(result.loss, case["out"]["loss"], torch.float64)
    assert_close(result.grad_logprobs, case["out"]["grad"], torch.float64)
