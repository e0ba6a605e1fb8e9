"""Surrogates, gates, aggregation and advantages on numbers worked by hand, where no golden case exists."""

import math

import pytest
import torch

from agent_rl.objective import evaluate
from agent_rl.objective.advantage import group_advantages
from agent_rl.objective.config import AdvantageConfig, ObjectiveConfig
from agent_rl.objective.errors import ObjectiveError
from agent_rl.settings import check

LOG, MU = math.log, -4.0


def run(objective, ratios, advantages, mu=MU, **given):
    """One response a row, its behaviour log-prob `mu` and its current one log(ratio) above it."""
    ratios = torch.tensor(ratios, dtype=torch.float64)
    behavior = torch.full_like(ratios, mu) if isinstance(mu, float) else torch.tensor(mu, dtype=torch.float64)
    fields = {"loss_mask": torch.ones_like(ratios), **given}
    return evaluate(
        objective,
        logprobs=behavior + ratios.log(),
        behavior_logprobs=behavior,
        advantages=torch.tensor(advantages, dtype=torch.float64).expand_as(ratios),
        **fields,
    )


def assert_close(tensor, want):
    torch.testing.assert_close(tensor, torch.tensor(want, dtype=torch.float64), rtol=1e-12, atol=1e-15)


def test_cispo():
    """Weights clip([0.5, 1, 2], 0.8, 1.28); S = w A lp; every token has the gradient -w A / n, also a clipped one."""
    clip = {"type": "ppo", "eps_low": 0.2, "eps_high": 0.28}
    found = run({"surrogate": "cispo", "clip": clip, "aggregate": "token_mean"}, [[0.5, 1.0, 2.0]], -3.0)
    weights = [0.8, 1.0, 1.28]
    assert_close(found.objective, [[w * -3 * (MU + LOG(r)) for w, r in zip(weights, [0.5, 1, 2], strict=True)]])
    assert_close(found.grad_logprobs, [[3 * w / 3 for w in weights]])
    assert found.clipped.tolist() == [[True, False, True]]


def test_cispo_without_a_low_bound():
    found = run({"surrogate": "cispo", "clip": {"type": "ppo", "eps_low": 1.0}}, [[0.01]], 2.0)
    assert_close(found.grad_logprobs, [[-0.02]])


def test_cispo_newly_clips_only_what_the_full_radius_leaves():
    """SAT with q = 0.1 tightens at log-ratios of 0.15 and -0.6, of which -0.6 lies beyond 1 - 0.2 anyway."""
    clip = {"type": "sat", "alpha": 0.3, "eps_low": 0.2, "eps_high": 0.2}
    for advantage in (1.0, -1.0):
        ratios = [[math.exp(0.1), math.exp(0.15), math.exp(-0.6)]]
        found = run({"surrogate": "cispo", "clip": clip}, ratios, advantage)
        assert found.clipped.tolist() == [[False, True, True]]
        assert found.newly_clipped.tolist() == [[False, True, False]]


@pytest.mark.parametrize("gate", [{"type": "kpop", "policy": "current"}, {"type": "dppo", "divergence": "kl"}])
def test_sure_tokens_on_which_both_agree_are_kept(gate):
    """Float32 writes the log-prob of a sure token as 0, or just above it; -3e-5 is close to that, -5 is not."""
    behavior = torch.tensor([[0.0, -3e-5, 0.0, 1e-6, 0.0]], dtype=torch.float32)
    current = torch.tensor([[-3e-5, 0.0, 0.0, -3e-5, -5.0]], dtype=torch.float32)
    found = evaluate(
        {"gates": [gate]},
        logprobs=current,
        behavior_logprobs=behavior,
        advantages=-torch.ones(1, 5),
        loss_mask=torch.ones(1, 5),
    )
    assert found.weight.tolist() == [[1, 1, 1, 1, 0]]


def test_up():
    """A > 0: value A, gradient -A / n even at r = 3. A < 0: r A, and nothing below 1 - eps."""
    objective = {"surrogate": "up", "aggregate": "token_mean"}
    found = run(objective, [[3.0, 0.5]], 2.0)
    assert_close(found.objective, [[2.0, 2.0]])
    assert_close(found.grad_logprobs, [[-1.0, -1.0]])
    found = run(objective, [[3.0, 0.9, 0.5]], -2.0)
    assert_close(found.objective, [[-6.0, -1.8, -1.6]])
    assert_close(found.grad_logprobs, [[2.0, 0.6, 0.0]])
    assert found.clipped.tolist() == [[False, False, True]]


def test_up_on_the_sequence_ratio():
    """d = log 4, 0 has mean log 2: the gradient is that of A log rho, spread over its two tokens."""
    found = run({"surrogate": "up", "ratio": {"level": "sequence"}}, [[4.0, 1.0]], 2.0)
    assert_close(found.objective, [[2.0, 2.0]])
    assert_close(found.grad_logprobs, [[-1.0, -1.0]])


def test_policy_gradient():
    plain = {"surrogate": "policy_gradient", "clip": "none", "aggregate": "token_mean"}
    found = run(plain, [[4.0, 0.5]], 3.0)
    assert_close(found.objective, [[3 * (MU + LOG(4)), 3 * (MU + LOG(0.5))]])
    assert_close(found.grad_logprobs, [[-1.5, -1.5]])
    found = run(plain | {"surrogate": {"type": "policy_gradient", "cap": 2.0}}, [[4.0, 0.5]], 3.0)
    assert_close(found.grad_logprobs, [[-3.0, -0.75]])
    assert found.clipped.tolist() == [[True, False]]
    assert not found.newly_clipped.any()


def test_spo_turns_back_beyond_its_radius():
    """r A - |A| (r - 1)^2 / 0.4 has slope A - |A| (r - 1) / 0.2 in r: 0 at 1.2, below 0 beyond it."""
    found = run({"surrogate": "spo", "clip": "none"}, [[1.2], [1.4], [0.8]], [[1.0], [1.0], [-1.0]])
    assert_close(found.objective, [[1.2 - 0.04 / 0.4], [1.4 - 0.16 / 0.4], [-0.8 - 0.04 / 0.4]])
    assert_close(found.grad_logprobs, [[0.0], [1.4 / 3], [0.0]])


def test_dppo_kl():
    """mu = 0.5: to 0.6 the KL is 0.5 ln(0.25 / 0.24) = 0.0204, to 0.8 it is 0.5 ln(0.25 / 0.16) = 0.2231."""
    gate = {"type": "dppo", "divergence": "kl", "delta": 0.05}
    objective = {"clip": "none", "gates": [gate]}
    mu = [[LOG(0.5)] * 3]
    assert run(objective, [[1.2, 1.6, 0.4]], 1.0, mu=mu).weight.tolist() == [[1.0, 0.0, 1.0]]
    assert run(objective, [[1.2, 1.6, 0.4]], -1.0, mu=mu).weight.tolist() == [[1.0, 1.0, 0.0]]
    edge = {"type": "dppo", "divergence": "kl", "delta": 0.5 * LOG(0.25 / 0.16)}
    below, above = ({**edge, "delta": edge["delta"] * (1 + x)} for x in (-1e-9, 1e-9))
    weights = [run({"gates": [g]}, [[1.6]], 1.0, mu=[[LOG(0.5)]]).weight.item() for g in (below, above)]
    assert weights == [0.0, 1.0]


def test_sequence_mask():
    """Ratios (4, 1), (4, 4) and (1/8, 2): geometric means 2, 4 and 1/2; products 4, 16 and 1/4."""
    ratios = [[4.0, 1.0], [4.0, 4.0], [0.125, 2.0]]

    def kept(**keys):
        gate = {"type": "sequence_mask", "low": 0.3, "high": 3.0, **keys}
        return run({"gates": [gate]}, ratios, 1.0).weight[:, 0].tolist()

    assert kept() == [1, 0, 1]
    assert kept(form="product", high=5.0, low=0.2) == [1, 0, 1]
    assert kept(form="product", high=5.0) == [1, 0, 0]
    assert kept(veto=0.2) == [1, 0, 0]
    assert kept(high=100.0, veto=0.0) == [1, 1, 1]


@pytest.mark.parametrize(
    ("gate", "ratio", "weight"),
    [
        ({"type": "icepop", "low": 0.5, "policy": "current"}, 0.5, 0.5),
        ({"type": "icepop", "low": 0.1, "high": 0.5, "policy": "current"}, 0.5, 0.5),
        ({"type": "seqclip", "low": 0.5, "high": 0.6}, 0.5, 1.0),
        ({"type": "seqclip", "low": 0.4, "high": 0.5}, 0.5, 1.0),
        ({"type": "sequence_mask", "low": 0.5, "high": 0.5, "veto": 0.5}, 0.5, 1.0),
        ({"type": "dppo", "delta": 0.5}, 0.5, 1.0),
        ({"type": "sao_dis", "eps_low": 0.5}, 0.5, 0.0),
        ({"type": "sao_dis", "eps_low": 0.51}, 0.5, 0.5),
    ],
)
def test_values_on_a_boundary(gate, ratio, weight):
    """They are kept, but by SAO-DIS, whose band is open. mu = 1, so that the ratio is exact."""
    found = run({"gates": [gate], "clip": "none", "surrogate": "policy_gradient"}, [[ratio]], -1.0, mu=[[0.0]])
    assert math.exp(LOG(ratio)) == ratio
    assert found.weight.item() == weight


def test_dppo_keeps_what_has_no_advantage():
    assert run({"gates": [{"type": "dppo", "delta": 0.01}]}, [[0.5]], 0.0, mu=[[-0.1]]).weight.item() == 1.0


def test_seqclip_looks_at_the_response_whatever_is_clipped():
    """Ratios (2, 1/2) have geometric mean 1, (2, 2) has 2; token ratios are clipped, against the proximal policy."""
    objective = {"gates": [{"type": "seqclip", "low": 0.9, "high": 1.1}], "ratio": {"denominator": "proximal"}}
    proximal = torch.full((2, 2), -1.5, dtype=torch.float64)
    found = run(objective, [[2.0, 0.5], [2.0, 2.0]], 1.0, proximal_logprobs=proximal)
    assert found.weight.tolist() == [[1.0, 1.0], [0.0, 0.0]]


def test_the_veto_removes_the_whole_response():
    gate = {"type": "sequence_mask", "low": 0, "high": 100.0}
    found = run({"gates": [gate], "clip": "none"}, [[0.99e-4, 2.0], [1.01e-4, 2.0]], 1.0)
    assert found.weight.tolist() == [[0, 0], [1, 1]]
    assert_close(found.grad_logprobs, [[0.0, 0.0], [-1.01e-4 / 4, -0.5]])


def test_a_dropped_token_cannot_spoil_the_gradient():
    """e^1000 overflows; the gate drops that token, and its term, infinite times 0, must be 0."""
    gate = {"type": "sequence_mask"}
    found = run({"gates": [gate], "clip": "none"}, [[1.0], [1.0]], 1.0, mu=[[-1.0], [-2.0]])
    assert bool(found.weight.all())
    found = evaluate(
        {"gates": [gate], "clip": "none"},
        logprobs=[[-1.0], [-1.0]],
        behavior_logprobs=[[-1.0], [-1001.0]],
        advantages=[[1.0], [1.0]],
        loss_mask=[[1], [1]],
    )
    assert (found.loss, found.grad_logprobs.tolist()) == (-0.5, [[-0.5], [0.0]])
    assert found.metrics["dropped_fraction"] == 0.5


def test_gates_multiply():
    """IcePop keeps k = 1.5 and drops k = 8; KPop drops the first by its KL; weights multiply."""
    mu = torch.tensor([[LOG(0.5), LOG(0.1), LOG(0.4)]], dtype=torch.float64)
    proximal = mu + torch.tensor([[1.5, 8.0, 1.1]], dtype=torch.float64).log()
    given = {"logprobs": proximal, "behavior_logprobs": mu, "proximal_logprobs": proximal}
    gates = ["icepop", {"type": "kpop", "phi": 0.05}]
    objective = {"ratio": {"denominator": "proximal"}, "gates": gates}
    found = evaluate(objective, advantages=[[1.0] * 3], loss_mask=[[1] * 3], **given)
    assert_close(found.weight, [[0.0, 0.0, 1.1]])
    assert found.loss == pytest.approx(-1.1 / 3)
    assert found.metrics["gate_weight"] == pytest.approx(1.1 / 3)


def test_tis_is_a_token_weight_on_the_sequence_term():
    mu = torch.tensor([[MU, MU]], dtype=torch.float64)
    proximal = mu + torch.tensor([[4.0, 0.5]], dtype=torch.float64).log()
    given = {"logprobs": proximal, "behavior_logprobs": mu, "proximal_logprobs": proximal}
    objective = {"ratio": {"level": "sequence", "denominator": "proximal"}, "gates": ["tis"]}
    found = evaluate(objective, advantages=[[1.0] * 2], loss_mask=[[1] * 2], **given)
    assert_close(found.objective, [[2.0, 0.5]])


def test_sequence_sum():
    """Dr. GRPO: sums of 3 and 1 tokens over 2 responses of a budget of 8, whatever their lengths."""
    objective = {"aggregate": "sequence_sum", "sequence_length": 8}
    found = run(objective, [[1.1, 1.0, 0.9], [1.0, 1.0, 1.0]], 1.0, loss_mask=[[1, 1, 1], [1, 0, 0]])
    assert found.loss == pytest.approx(-(3.0 + 1.0) / (2 * 8))
    assert_close(found.grad_logprobs, [[-1.1 / 16, -1 / 16, -0.9 / 16], [-1 / 16, 0, 0]])


SEQUENCE = {"level": "sequence"}
UNEQUAL = {"ratios": [[4.0, 1.0], [0.5, 1.0]], "advantages": 1.0, "loss_mask": [[1, 1], [1, 0]]}


def test_gspo_with_its_length_restored():
    """rho = sqrt(4) and 0.5 over 2 and 1 tokens; S is rho A a token, summed over 2 responses of 8 tokens."""
    objective = {"ratio": SEQUENCE, "clip": "none", "surrogate": "clip", "aggregate": "sequence_sum"}
    found = run({**objective, "sequence_length": 8}, **UNEQUAL)
    assert found.loss == pytest.approx(-(2 * 2 + 0.5) / (2 * 8))
    assert_close(found.grad_logprobs, [[-2 / 16, -2 / 16], [-0.5 / 16, 0]])


def test_gspo_with_a_constant_length():
    """rho = 4 ** (1 / 8) and 0.5 ** (1 / 8), one term each: long and short responses weigh the same a token."""
    found = run({"ratio": {**SEQUENCE, "length": 8}, "clip": "none", "surrogate": "clip"}, **UNEQUAL)
    long, short = 4 ** (1 / 8), 0.5 ** (1 / 8)
    assert found.loss == pytest.approx(-(long + short) / 2)
    assert_close(found.grad_logprobs, [[-long / 16, -long / 16], [-short / 16, 0]])
    bound = run({"ratio": {**SEQUENCE, "length": 8}, "clip": {"type": "ppo", "eps_high": 0.1}}, **UNEQUAL)
    assert bound.clipped.tolist() == [[True, True], [False, False]]


def test_a_length_that_is_the_response_s_own_is_gspo():
    ratios = [[1.1, 0.7, 1.3], [0.9, 1.0, 1.2]]
    plain, constant = (run({"ratio": r}, ratios, 1.0) for r in (SEQUENCE, {**SEQUENCE, "length": 3}))
    assert_close(constant.grad_logprobs, plain.grad_logprobs.tolist())
    off = run({"ratio": {**SEQUENCE, "length": None}}, ratios, 1.0)
    assert torch.equal(off.grad_logprobs, plain.grad_logprobs)


@pytest.mark.parametrize(
    ("objective", "sentence"),
    [
        ({"ratio": {"length": 8}}, "ratio.length is for level sequence, not token"),
        ({"ratio": {**SEQUENCE, "length": 8}, "aggregate": "token_mean"}, "set aggregate to sequence_mean"),
        ({"ratio": {**SEQUENCE, "length": 0}}, "greater than or equal to 1"),
    ],
)
def test_a_length_that_means_nothing_is_refused(objective, sentence):
    with pytest.raises(ValueError, match=sentence):
        check(ObjectiveConfig, objective)


REWARDS, GROUPS = torch.tensor([1.0, 0.0, 0.0, 5.0, 5.0, 2.0]), torch.tensor([3, 3, 3, 1, 1, 1])
CENTRED = [2 / 3, -1 / 3, -1 / 3, 1, 1, -2]
BATCH_STD = math.sqrt((sum((r - 13 / 6) ** 2 for r in (1, 0, 0, 5, 5, 2))) / 5)
CENTRED_STD = math.sqrt(sum(c**2 for c in CENTRED) / 5)


@pytest.mark.parametrize(
    ("estimator", "want"),
    [
        ("dr_grpo", CENTRED),
        ("rloo", [1, -0.5, -0.5, 1.5, 1.5, -3]),
        ("reinforce_pp", [(r - 13 / 6) / (BATCH_STD + 1e-6) for r in (1, 0, 0, 5, 5, 2)]),
        ("reinforce_pp_baseline", [c / (CENTRED_STD + 1e-6) for c in CENTRED]),
    ],
)
def test_advantage_estimators(estimator, want):
    found = group_advantages(REWARDS.double(), GROUPS, AdvantageConfig(estimator=estimator))
    assert found.tolist() == pytest.approx(want, rel=1e-12)
    equal = group_advantages(torch.full((6,), 0.1), GROUPS, AdvantageConfig(estimator=estimator))
    assert equal.tolist() == [0.0] * 6


def test_groups_of_one():
    lone = torch.arange(3)
    assert group_advantages(torch.tensor([0.0, 1.0, 2.0]), lone, AdvantageConfig(estimator="reinforce_pp")).sum() == 0
    for estimator in ("dr_grpo", "rloo", "reinforce_pp_baseline"):
        with pytest.raises(ObjectiveError, match="set group_size to at least 2"):
            group_advantages(torch.ones(3), lone, AdvantageConfig(estimator=estimator))
    with pytest.raises(ValueError, match="rloo divides by no std"):
        AdvantageConfig(estimator="rloo", std_floor=0.1)
