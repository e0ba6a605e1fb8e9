"""The composer on packed batches: invariances, and that SAT only ever tightens."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from objective_batches import GARBAGE, Row, pack, random_rows

from agent_rl.objective.config import ObjectiveConfig
from agent_rl.objective.equivalent_radius import equivalent_radii
from agent_rl.objective.loss import Objective
from agent_rl.objective.methods import method_names, overlay
from agent_rl.objective.metrics import step_metrics

quick = settings(max_examples=40, deadline=None)
thorough = settings(max_examples=150, deadline=None)

KL = {"coefficient": 0.1}
FEW = {"num_buckets": 3, "min_tokens": 3, "min_responses": 1, "shrinkage": 4.0}
METHODS = [overlay(name)["objective"] for name in method_names()]
OBJECTIVES = [
    {"clip": "sat", "aggregate": "token_mean", "kl": {**KL, "aggregate": "token_mean"}},
    {"clip": {"type": "sat", "tokens": "all"}, "ratio": {"level": "sequence"}},
    {"clip": {"type": "sat", "tokens": "stochastic"}},
    {"clip": {"type": "sat", "gate_on": "behavior"}, "ratio": {"denominator": "proximal"}},
    {"clip": {"type": "sat", "turns": {"mode": "local", **FEW}}, "ratio": {"level": "turn"}},
    {"ratio": {"level": "turn"}},
    {"clip": {"type": "matched", "turns": [[0.1, 0.2], [0.3, 0.1]]}},
    {"gates": [{"type": "sequence_mask", "form": "product", "policy": "proximal"}, "dppo"]},
    *(method | {"kl": KL} for method in METHODS),
]
objectives = st.sampled_from(OBJECTIVES)


def build(config):
    return Objective(ObjectiveConfig.model_validate(config))


def run_step(objective, parts, reduce=None):
    """One optimizer step over micro-batches `parts` of rows: context, outputs, gradient per trajectory."""
    packed = [pack(rows) for rows in parts]
    batches = [batch for batch, _ in packed]
    logprobs = [lp.requires_grad_() for _, lp in packed]
    step = objective.begin_step(batches, [lp.detach() for lp in logprobs], reduce)
    if step.empty:
        return step, batches, [], {}
    outputs = [objective.loss(lp, batch, step) for lp, batch in zip(logprobs, batches, strict=True)]
    for output in outputs:
        output.loss.backward()
    gradients = {}
    for rows, lp in zip(parts, logprobs, strict=True):
        starts = np.cumsum([0, *(len(r.mask) for r in rows)])
        gradients |= {r.trajectory_id: lp.grad[s : s + len(r.mask)] for r, s in zip(rows, starts, strict=False)}
    return step, batches, outputs, gradients


def split(rows, cuts):
    bounds = [0, *sorted(c % (len(rows) + 1) for c in cuts), len(rows)]
    return [rows[a:b] for a, b in itertools.pairwise(bounds)]


@thorough
@given(objectives, st.integers(0, 10**6), st.integers(1, 12), st.data())
def test_packing_and_order_do_not_matter(config, seed, count, data):
    rows = random_rows(seed, count)
    shuffled = data.draw(st.permutations(rows))
    parts = split(shuffled, data.draw(st.lists(st.integers(0, 20), max_size=4)))
    objective = build(config)
    step, batches, whole, gradients = run_step(objective, [rows])
    other_step, other_batches, outputs, other_gradients = run_step(objective, parts)
    assert (step.num_tokens, step.num_sequences) == (other_step.num_tokens, other_step.num_sequences)
    if step.empty:
        assert not any(r.mask.any() for r in rows)
        return
    total = sum(float(o.loss.detach()) for o in outputs)
    assert total == pytest.approx(float(whole[0].loss.detach()), rel=1e-12, abs=1e-14)
    for trajectory_id, gradient in gradients.items():
        torch.testing.assert_close(other_gradients[trajectory_id], gradient, rtol=1e-12, atol=1e-15)
    one, many = step_metrics(batches, whole), step_metrics(other_batches, outputs)
    assert one == pytest.approx(many, rel=1e-10, abs=1e-13, nan_ok=True)


@thorough
@given(objectives, st.integers(0, 10**6), st.integers(0, 10**6))
def test_inactive_tokens_are_never_read(config, seed, noise):
    rows = random_rows(seed, 6)
    rng = np.random.default_rng(noise)
    changed = random_rows(seed, 6)
    for row in changed:
        for values in (row.lp, row.mu, row.ref, row.prox):
            values[~row.mask] = rng.choice(GARBAGE, int((~row.mask).sum()))
    first, second = run_step(build(config), [rows]), run_step(build(config), [changed])
    if first[0].empty:
        return
    assert torch.equal(first[2][0].loss, second[2][0].loss)
    for trajectory_id, gradient in first[3].items():
        assert torch.equal(gradient, second[3][trajectory_id])
    assert all(not g[~torch.as_tensor(r.mask)].any() for r, g in zip(rows, first[3].values(), strict=True))


@quick
@given(st.integers(0, 10**6), st.sampled_from(["token", "sequence"]), st.sampled_from(["supported", "all"]))
def test_sat_is_pessimistic_and_changes_exactly_its_band(seed, level, tokens):
    rows, ratio = random_rows(seed, 12, spread=0.15), {"ratio": {"level": level}}
    step, _, sat, sat_gradients = run_step(build({"clip": {"type": "sat", "tokens": tokens}, **ratio}), [rows])
    if step.empty:
        return
    _, _, ppo, ppo_gradients = run_step(build({"clip": "ppo", **ratio}), [rows])
    assert bool((sat[0].objective <= ppo[0].objective).all())
    assert bool((sat[0].eps_low <= ppo[0].eps_low).all())
    assert bool((sat[0].gate == (sat[0].clip_log_ratio.abs() > sat[0].q) & (sat[0].q > 0)).all())
    assert bool(((sat[0].factor < 1) == sat[0].gate)[ppo[0].eps_low > 0].all())
    differs = torch.cat(list(sat_gradients.values())) != torch.cat(list(ppo_gradients.values()))
    if level == "token":
        assert bool((differs == sat[0].newly_clipped).all())


@quick
@given(st.integers(0, 10**6), st.integers(-3, 3))
def test_q_scales_with_the_mismatch(seed, exponent):
    rows = [r for r in random_rows(seed, 8) if r.mask.any()]
    scaled = [Row(**{**vars(r), "lp": np.where(r.mask, 0.0, 0.0)}) for r in rows]
    for row, other in zip(rows, scaled, strict=True):
        row.mu, other.mu = np.where(row.mask, -40.0, 0.0), np.where(row.mask, -40.0, 0.0)
        d = np.random.default_rng(seed + row.trajectory_id).normal(0, 0.1, len(row.mask)).astype(np.float16)
        row.lp, other.lp = row.mu + d * row.mask, other.mu + d * 2.0**exponent * row.mask
    objective = build({"clip": "sat"})
    step, _, first, _ = run_step(objective, [rows])
    if step.empty:
        return
    _, _, second, _ = run_step(objective, [scaled])
    assert torch.equal(second[0].q, first[0].q * 2.0**exponent)
    assert torch.equal(second[0].gate, first[0].gate)
    assert torch.equal(second[0].factor, first[0].factor)


@quick
@given(st.integers(0, 10**6))
def test_sat_has_the_gradient_of_ppo_at_the_equivalent_radius(seed):
    rows = random_rows(seed, 12)
    step, _, _, sat = run_step(build({"clip": "sat"}), [rows])
    if step.empty or float(step.reference) < 1e-9:
        return
    low, high = equivalent_radii(float(step.reference), 0.2, 0.2)
    _, _, _, ppo = run_step(build({"clip": {"type": "ppo", "eps_low": low, "eps_high": high}}), [rows])
    assert all(torch.equal(sat[i], ppo[i]) for i in sat)


MOVING = ("sat", "cispo", "up", "policy_gradient")
"""Parts with constants of the gradient that move with the log-probs: differences of the loss would see them move."""


def smooth(config):
    parts = [config.get("clip", "ppo"), config.get("surrogate", "clip")]
    return not {p if isinstance(p, str) else p["type"] for p in parts} & set(MOVING)


@pytest.mark.parametrize("config", [c for c in OBJECTIVES if smooth(c)], ids=str)
def test_gradient_by_finite_differences(config):
    batch, lp = pack([r for r in random_rows(3, 8, spread=0.15) if r.mask.any()])
    objective = build(config)
    step = objective.begin_step([batch], [lp])
    values = lp.clone().requires_grad_()
    objective.loss(values, batch, step).loss.backward()
    checked, h = 0, 1e-6
    for t in batch.active.index.tolist():
        up, down = (objective.loss(lp.index_add(0, torch.tensor([t]), tensor([x])), batch, step) for x in (h, -h))
        if not (torch.equal(up.clipped, down.clipped) and torch.equal(up.weight > 0, down.weight > 0)):
            continue  # a kink lies between the two
        slope = float(up.loss - down.loss) / (2 * h)
        assert slope == pytest.approx(float(values.grad[t]), rel=1e-6, abs=1e-9)
        checked += 1
    assert checked > 20
    assert bool(values.grad.any())


@pytest.mark.parametrize(
    "config", [m for m in METHODS if m["surrogate"]["type"] in ("policy_gradient", "cispo")], ids=str
)
def test_the_gradient_of_a_weighted_log_prob_is_its_weight(config):
    """S = w A lp with w a constant: dS / dlp is S / lp, so the loss moves as if every weight stood still."""
    batch, lp = pack([r for r in random_rows(4, 8) if r.mask.any()])
    objective = build({**config, "aggregate": "token_mean"})
    values = lp.clone().requires_grad_()
    output = objective.loss(values, batch, step := objective.begin_step([batch], [lp]))
    output.loss.backward()
    active = batch.active.index
    want = -output.objective[active] / lp[active] / step.num_tokens
    torch.testing.assert_close(values.grad[active], want, rtol=1e-12, atol=1e-15)
    assert bool(want.any())


@quick
@given(st.integers(0, 10**6), st.sampled_from(["token", "turn", "sequence"]), st.sampled_from(["behavior", "proximal"]))
def test_turn_min_is_below_sat_is_below_ppo(seed, level, denominator):
    rows, ratio = random_rows(seed, 12, spread=0.15), {"ratio": {"level": level, "denominator": denominator}}
    clips = [{"type": "sat", "turns": {"mode": "min", **FEW}}, "sat", "ppo"]
    steps = [run_step(build({"clip": clip, **ratio, "gates": ["kpop"]}), [rows]) for clip in clips]
    if steps[0][0].empty:
        return
    least, middle, most = (outputs[0].objective for _, _, outputs, _ in steps)
    assert bool((least <= middle).all())
    assert bool((middle <= most).all())


@quick
@given(objectives, st.integers(0, 10**6))
def test_gates_that_keep_everything_change_no_bit(config, seed):
    """Only compositions without gates of their own can be compared with themselves."""
    rows = random_rows(seed, 6)
    open_gates = [{"type": "seqclip", "low": 0, "high": 1e300}, {"type": "dppo", "delta": 1.0}]
    plain, gated = (run_step(build({**config, "gates": g}), [rows]) for g in ([], open_gates))
    if plain[0].empty:
        return
    assert torch.equal(plain[2][0].loss, gated[2][0].loss)
    assert all(torch.equal(plain[3][i], gated[3][i]) for i in plain[3])


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)
