"""One optimizer step over micro-batches and ranks: denominators, the scope and tokens of q, rejected input."""

import math
import subprocess
import sys

import pytest
import torch
from golden_cases import DTYPES, array, assert_close, cases, tensor
from hypothesis import given, settings
from hypothesis import strategies as st
from objective_batches import Row, on_ranks, pack, random_rows

from agent_rl.objective import evaluate
from agent_rl.objective.config import ObjectiveConfig
from agent_rl.objective.errors import ObjectiveError
from agent_rl.objective.loss import Objective
from agent_rl.objective.metrics import step_metrics


def build(**config):
    return Objective(ObjectiveConfig.model_validate(config))


def golden_rows(inputs, indices):
    names = ("lp", "mu", "mut", "adv", "mask", "turn")
    lp, mu, _, adv, mask, turn = (array(inputs[name]) for name in names)
    rows = []
    for i in indices:
        active = mask[i].astype(bool)
        advantage = float(adv[i][active][0])
        none = active * 0
        rows.append(Row(i, active, turn[i].astype(int), lp[i], mu[i], none - 1.0, advantage, none))
    return rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scope", ["step", "microbatch"])
@pytest.mark.parametrize("case", [c for c in cases("quantile_scope.json") if "microbatches" in c.id])
def test_scope_of_the_quantile(case, scope, dtype):
    inputs, out = case["in"], case["out"]
    level = {"grpo": "token", "gspo": "sequence"}[case["name"].split("_")[0]]
    objective = build(clip={"type": "sat", "scope": scope, **inputs["hp"]}, ratio={"level": level})
    packed = [pack(golden_rows(inputs, part), dtype) for part in inputs["splits"]]
    batches, logprobs = [b for b, _ in packed], [lp.requires_grad_() for _, lp in packed]
    step = objective.begin_step(batches, logprobs if scope == "step" else None)
    outputs = [objective.loss(lp, b, step) for lp, b in zip(logprobs, batches, strict=True)]
    for output in outputs:
        output.loss.backward()
    want_q, want_grad = {
        "step": ([out["q_global"]] * len(outputs), out["grad_global_q"]),
        "microbatch": (out["q_micro"], out["grad_micro_q"]),
    }[scope]
    assert_close([float(o.q.max()) for o in outputs], want_q, dtype)
    order = [i for part in inputs["splits"] for i in part]
    gradient = torch.cat([lp.grad for lp in logprobs]).reshape(array(want_grad).shape)
    assert_close(gradient, array(want_grad)[order], dtype)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 3), st.sampled_from(["token_mean", "sequence_mean"]))
def test_ranks_agree_with_one_process(seed, ranks, aggregate):
    rows = random_rows(seed, 7)
    if not any(r.mask.any() for r in rows):
        return
    objective = build(clip="sat", aggregate=aggregate, kl={"coefficient": 0.1})
    batch, lp = pack(rows)
    step = objective.begin_step([batch], [lp])
    whole = objective.loss(lp, batch, step)
    shards = [rows[:3], rows[3:], []]

    def work(rank, reduce):
        part, values = pack(shards[rank])
        own = objective.begin_step([part], [values], reduce)
        output = objective.loss(values, part, own)
        return own, float(output.loss), step_metrics([part], [output], reduce)

    results = on_ranks(ranks, work)
    for own, _, _ in results:
        assert (own.num_tokens, own.num_sequences) == (step.num_tokens, step.num_sequences)
        assert torch.equal(own.reference, step.reference)
    assert sum(loss for _, loss, _ in results) == pytest.approx(float(whole.loss), rel=1e-12)
    for _, _, metrics in results:
        assert metrics == pytest.approx(step_metrics([batch], [whole]), rel=1e-11, abs=1e-13, nan_ok=True)


def test_a_bad_rank_stops_all_ranks():
    objective = build(clip="sat")
    packed = [pack([r for r in random_rows(seed, 4) if r.mask.any()]) for seed in (1, 2)]
    packed[1][1][packed[1][0].active.index[0]] = math.nan
    results = on_ranks(2, lambda rank, reduce: objective.begin_step([packed[rank][0]], [packed[rank][1]], reduce))
    assert [r.code for r in results] == ["nonfinite", "nonfinite"]
    assert "another rank" in str(results[0])


def row(lp, mu, advantage=1.0, mask=None, sizes=None, trajectory_id=7):
    mask = array(mask or [1] * len(lp)).astype(bool)
    sizes = array(sizes or [0] * len(lp))
    return Row(trajectory_id, mask, array([0] * len(lp)), array(lp), array(mu), array(mu), advantage, sizes)


def test_which_tokens_the_quantile_counts():
    """20 tokens: 18 singletons with d = 0; one of 2 kept, d = 0.3; one with full support that was nearly sure."""
    mu = [0.0] * 18 + [-1.0, -0.001]
    lp = [0.0] * 18 + [-0.7, -0.501]
    batch, logprobs = pack([row(lp, mu, sizes=[1] * 18 + [2, 0])])
    found = {}
    for rule in ("supported", "all", "stochastic"):
        objective = build(clip={"type": "sat", "tokens": rule, "alpha": 0.5})
        step = objective.begin_step([batch], [logprobs])
        found[rule] = float(step.reference)
        output = objective.loss(logprobs, batch, step)
    assert found == pytest.approx({"supported": 0.3, "all": 0.0, "stochastic": 0.3})
    metrics = step_metrics([batch], [output])
    assert metrics["q_supported"] == pytest.approx(0.5)
    assert metrics["q_all"] == 0.0
    assert metrics["q_stochastic"] == pytest.approx(0.3)


def test_q_zero_is_counted_and_leaves_ppo():
    batch, lp = pack([row([-1.0] * 19 + [-0.5], [-1.0] * 20)])
    step = (sat := build(clip="sat")).begin_step([batch], [lp])
    output = sat.loss(lp, batch, step)
    metrics = step_metrics([batch], [output])
    assert (metrics["q"], metrics["q_zero"], metrics["gate_rate"]) == (0.0, 1.0, 0.0)
    assert metrics["eps_eff_low"] == metrics["eps_eff_high"] == pytest.approx(0.2)
    assert torch.equal(output.loss, (ppo := build()).loss(lp, batch, ppo.begin_step([batch], None)).loss)


def test_all_singletons_gate_nothing():
    batch, lp = pack([row([0.0] * 5, [0.0] * 5, sizes=[1] * 5)])
    sat = build(clip="sat")
    output = sat.loss(lp, batch, sat.begin_step([batch], [lp]))
    assert float(output.q.max()) == 0.0
    assert math.isnan(step_metrics([batch], [output])["q_supported"])


def test_worked_loss():
    """r = 2, 0.5, 1 with A = 1 in a trajectory of two tokens and A = -1 in one of one; k3 to a reference."""
    first = row([math.log(0.5), math.log(0.25)], [math.log(0.25), math.log(0.5)])
    second = row([-1.0], [-1.0], advantage=-1.0, trajectory_id=8)
    batch, lp = pack([first, second])
    for aggregate, want in (("sequence_mean", -((1.2 + 0.5) / 2 - 1) / 2), ("token_mean", -(1.2 + 0.5 - 1) / 3)):
        objective = build(aggregate=aggregate)
        output = objective.loss(lp, batch, objective.begin_step([batch], None))
        assert float(output.loss) == pytest.approx(want)
        assert output.clipped.tolist() == [True, False, False]
    objective = build(kl={"coefficient": 2.0})
    output = objective.loss(lp, batch, objective.begin_step([batch], None))
    kl = [0.5 - 1 + math.log(2), 2 - 1 - math.log(2), 0]
    assert output.kl.tolist() == pytest.approx(kl)
    assert float(output.loss) == pytest.approx(0.075 + 2 * (kl[0] + kl[1]) / 4)


def test_the_kl_has_its_own_average():
    first, second = row([-1.0] * 3, [-1.0] * 3), row([-1.0], [-1.0], trajectory_id=8)
    for r, ref in ((first, -2.0), (second, -1.5)):
        r.ref = array([ref] * len(r.mask))
    batch, lp = pack([first, second])
    a, b = (math.exp(x) - 1 - x for x in (-1.0, -0.5))
    for aggregate, want in (("token_mean", (3 * a + b) / 4), ("sequence_mean", (a + b) / 2)):
        objective = build(kl={"coefficient": 1.0, "aggregate": aggregate})
        loss = objective.loss(lp, batch, objective.begin_step([batch], None)).loss
        assert float(loss) == pytest.approx(want - 1)


def test_ratio_levels():
    lp, mu = [-1.0, -1.2, -1.0, -1.1], [-1.1, -1.0, -1.3, -1.1]
    first, second = row(lp, mu), row([-2.0], [-2.5], trajectory_id=8)
    first.turns = array([0, 0, 1, 1])
    batch, logprobs = pack([first, second])
    want = {"token": [0.1, -0.2, 0.3, 0, 0.5], "turn": [-0.05] * 2 + [0.15] * 2 + [0.5], "sequence": [0.05] * 4 + [0.5]}
    for level, log_ratios in want.items():
        objective = build(ratio={"level": level}, clip="none")
        output = objective.loss(logprobs, batch, objective.begin_step([batch], None))
        assert output.clip_log_ratio.tolist() == pytest.approx(log_ratios)
        assert output.log_ratio.tolist() == pytest.approx(want["token"])
        assert output.ratio.tolist() == pytest.approx([math.exp(x) for x in log_ratios])


def test_a_clipped_token_of_huge_ratio_has_gradient_zero():
    batch, lp = pack([row([-0.1], [-900.0])])
    lp.requires_grad_()
    objective = build()
    output = objective.loss(lp, batch, objective.begin_step([batch], None))
    output.loss.backward()
    assert (output.loss.item(), lp.grad.tolist()) == (pytest.approx(-1.2), [0.0])


def test_an_empty_micro_batch_still_takes_part():
    full, lp = pack([row([-1.0], [-1.0])])
    empty, other = pack([row([-1.0], [-1.0], mask=[0], trajectory_id=9)])
    other.requires_grad_()
    sat = build(clip="sat")
    step = sat.begin_step([full, empty], [lp, other])
    output = sat.loss(other, empty, step)
    output.loss.backward()
    assert (step.num_tokens, output.loss.item(), other.grad.tolist()) == (1, 0.0, [0.0])


def test_an_empty_step_is_reported():
    empty, lp = pack([row([-1.0], [-1.0], mask=[0])])
    objective = build(clip="sat")
    step = objective.begin_step([empty], [lp])
    assert step.empty
    with pytest.raises(ObjectiveError, match="skip it") as raised:
        objective.loss(lp, empty, step)
    assert raised.value.code == "empty_active_set"


def test_needs():
    assert (build().needs, build(kl={"coefficient": 0.1}).needs) == (frozenset(), {"ref_logprobs"})
    assert [build(clip=c).needs_step_pass for c in ("ppo", "none", "sat")] == [False, False, True]
    batch, _ = pack([row([-1.0], [-1.0])], ref_logprobs=None)
    with pytest.raises(ObjectiveError, match=r"set objective\.kl\.coefficient to 0") as raised:
        build(kl={"coefficient": 0.1}).begin_step([batch], None)
    assert raised.value.code == "missing_ref"


@pytest.mark.parametrize(("value", "code"), [(math.nan, "nonfinite"), (math.inf, "nonfinite"), (0.01, "positive_logp")])
def test_bad_logprobs_name_trajectory_and_position(value, code):
    rows = [row([-1.0], [-1.0], trajectory_id=3), row([-1.0, value, -1.0], [-1.0] * 3, trajectory_id=41)]
    batch, lp = pack(rows)
    objective = build(clip="sat")
    for use in (lambda: objective.begin_step([batch], [lp]), lambda: build().loss(lp, batch, build_step(batch))):
        with pytest.raises(ObjectiveError, match="logprobs of trajectory 41 at position 1 is") as raised:
            use()
        assert raised.value.code == code


def build_step(batch):
    return build().begin_step([batch], None)


def test_a_trajectory_in_two_segments_is_rejected():
    batch, _ = pack([row([-1.0], [-1.0]), row([-1.0], [-1.0])])
    with pytest.raises(ObjectiveError, match="trajectory 7 lies in two segments") as raised:
        build().begin_step([batch], None)
    assert raised.value.code == "split_trajectory"


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        ({"temperature": torch.ones(2)}, "shape_mismatch", "temperature has shape"),
        ({"segment_ids": torch.tensor([0, 1, 1])}, "shape_mismatch", "segment_ids disagree"),
        ({"cu_seqlens": torch.tensor([0, 2], dtype=torch.int32)}, "shape_mismatch", "cu_seqlens must rise"),
        ({"trajectory_ids": torch.tensor([1, 1, 2])}, "shape_mismatch", "more than one trajectory"),
        ({"kept_offsets": torch.tensor([0, 0])}, "shape_mismatch", "one row for each of 3 active tokens"),
        ({"kept_offsets": None}, "shape_mismatch", "come together"),
        ({"loss_mask": torch.ones(3)}, "shape_mismatch", "must be bool"),
        (
            {"behavior_logprobs": tensor([-1, "nan", -1])},
            "nonfinite",
            "behavior_logprobs of trajectory 7 at position 1",
        ),
        ({"ref_logprobs": tensor([-1, -1, "-inf"])}, "nonfinite", "ref_logprobs of trajectory 7 at position 2"),
        ({"proximal_logprobs": tensor([0.5, -1, -1])}, "positive_logp", "proximal_logprobs of trajectory 7"),
        ({"advantages": tensor([1, 1, "inf"])}, "nonfinite", "advantages of trajectory 7 at position 2"),
        (
            {"kept_offsets": torch.tensor([0, 0, 2, 2]), "kept_ids": torch.tensor([5, 6])},
            "sampled_token_outside_mask",
            "trajectory 7 at position 1 is not in its own kept set",
        ),
        (
            {"kept_offsets": torch.tensor([0, 0, 3, 3]), "kept_ids": torch.tensor([0, 4, 0])},
            "repeated_in_mask",
            "trajectory 7 at position 1 is in its kept set more than once",
        ),
    ],
)
def test_a_batch_is_validated(changes, code, message):
    with pytest.raises(ObjectiveError, match=message) as raised:
        pack([row([-1.0] * 3, [-1.0] * 3)], **changes)
    assert raised.value.code == code


def test_rounding_above_zero_is_accepted():
    batch, lp = pack([row([1e-6], [5e-5])])
    assert float(build().loss(lp, batch, build_step(batch)).loss) == pytest.approx(-1, abs=1e-4)


def test_evaluate_reads_kept_set_sizes_and_names_bad_keys():
    given = {
        "logprobs": [[-1.0, -0.5]],
        "behavior_logprobs": [[-1.1, -0.5]],
        "advantages": [[1, 1]],
        "loss_mask": [[1, 1]],
    }
    assert evaluate({"clip": "sat"}, **given).metrics["q_supported"] == pytest.approx(0.1)
    sizes = evaluate({"clip": "sat"}, **given, kept_set_sizes=[[1, 4]])
    assert (sizes.metrics["q_supported"], float(sizes.q.max())) == (0.0, 0.0)
    with pytest.raises(ValueError, match="did you mean 'aggregate'"):
        evaluate({"agregate": "token_mean"}, **given)
    with pytest.raises(ValueError, match="did you mean 'sat'"):
        evaluate({"clip": "satt"}, **given)


def test_importing_the_config_does_not_import_torch():
    code = "import sys, agent_rl.objective.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
