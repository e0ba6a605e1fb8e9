"""Which parts go together: what they need, what is rejected with a reason, and methods by name."""

import re
from pathlib import Path

import pytest
import torch
import yaml
from objective_batches import pack, random_rows

from agent_rl.config import RunConfig
from agent_rl.objective import evaluate
from agent_rl.objective.config import ObjectiveConfig
from agent_rl.objective.errors import ObjectiveError
from agent_rl.objective.loss import Objective
from agent_rl.objective.methods import IDENTITY, lay_over, method, method_names, overlay
from agent_rl.settings import check

PROXIMAL = {"denominator": "proximal"}
PG = "policy_gradient"
METHODS_FOLDER = Path(__file__).parents[2] / "configs" / "methods"


def build(config):
    return Objective(check(ObjectiveConfig, config))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"clip": "sat", "surrogate": "spo"}, "surrogate spo has no clip for 'sat' to act on"),
        ({"surrogate": PG}, "surrogate policy_gradient has no clip for 'ppo' to act on"),
        (
            {"clip": {"type": "matched", "eps_low": 0.1, "eps_high": 0.1}, "surrogate": "drpo"},
            "set objective.clip to none",
        ),
        ({"clip": "none", "surrogate": "drpo", "ratio": {"level": "sequence"}}, "set objective.ratio.level to token"),
        ({"gates": ["tis"]}, "set objective.ratio.denominator to proximal"),
        ({"gates": ["icepop"]}, "corrects that already"),
        ({"gates": [{"type": "icepop", "policy": "current"}], "ratio": PROXIMAL}, "surrogate clip does too"),
        ({"gates": ["tis", "icepop"], "ratio": PROXIMAL}, "gates tis and icepop each weigh by an importance ratio"),
        ({"gates": ["sao_dis"]}, "set objective.surrogate to policy_gradient without a cap"),
        ({"gates": ["sao_dis"], "clip": "none", "surrogate": {"type": PG, "cap": 2.0}}, "without a cap"),
        ({"gates": [{"type": "sequence_mask", "low": 3, "high": 2}]}, "nothing would be kept"),
        ({"gates": [{"type": "seqclip", "low": 1.1}]}, "nothing would be kept"),
        ({"gates": [{"type": "icepop", "low": 6}], "ratio": PROXIMAL}, "nothing would be kept"),
        ({"gates": ["tiss"]}, "unknown gate type 'tiss'; did you mean 'tis'"),
        ({"surrogate": "cipso"}, "did you mean 'cispo'"),
        ({"gates": [{"type": "dppo", "delt": 1}]}, "did you mean 'delta'"),
        ({"aggregate": "sequence_sum"}, "set both or neither"),
        ({"sequence_length": 5}, "set both or neither"),
        ({"clip": {"type": "sat", "scope": "microbatch", "cap": "ema"}}, "set scope to step"),
        ({"clip": "matched"}, "exactly one source"),
        ({"clip": {"type": "matched", "eps_low": 0.1}}, "a pair: give both or neither"),
        ({"clip": {"type": "matched", "eps_low": 0.1, "eps_high": 0.1, "schedule": "run"}}, "exactly one source"),
        ({"clip": {"type": "matched", "turns": [[0.1, 0.1]], "by_turn": True}}, "by_turn reads a schedule"),
        ({"clip": {"type": "matched", "schedule": "no/such/run"}}, "no metrics at 'no/such/run'; name the directory"),
        ({"clip": {"type": "matched", "turns": [[1.1, 0.1]]}}, "turns.0.0: Input should be less than or equal to 1"),
    ],
)
def test_a_combination_that_means_nothing_is_rejected(config, reason):
    with pytest.raises(ValueError, match=re.escape(reason)):
        check(ObjectiveConfig, config)


@pytest.mark.parametrize(
    ("config", "needs"),
    [
        ({"gates": ["seqclip", "dppo", "sequence_mask"]}, set()),
        ({"ratio": PROXIMAL}, {"proximal_logprobs"}),
        ({"ratio": PROXIMAL, "gates": ["tis"], "kl": {"coefficient": 0.1}}, {"proximal_logprobs", "ref_logprobs"}),
        ({"gates": ["kpop"]}, {"proximal_logprobs"}),
        ({"gates": [{"type": "kpop", "policy": "current"}]}, set()),
        ({"gates": [{"type": "sequence_mask", "policy": "proximal"}]}, {"proximal_logprobs"}),
        ({"gates": ["tis"], "clip": "none", "surrogate": PG}, {"proximal_logprobs"}),
    ],
)
def test_needs(config, needs):
    objective = build(config)
    assert objective.needs == needs
    batch, lp = pack(random_rows(0, 4), proximal_logprobs=None)
    if "proximal_logprobs" in needs:
        with pytest.raises(ObjectiveError, match=r"choose ratio\.denominator: behavior") as raised:
            objective.begin_step([batch], [lp])
        assert raised.value.code == "missing_mut"
    else:
        assert not objective.begin_step([batch], [lp]).empty


def test_the_denominator():
    """lp - mu = 0.5, lp - mut = 0.1: the clip at 0.2 binds under the first alone; d stays lp - mu in both."""
    given = {"logprobs": [[-1.0]], "behavior_logprobs": [[-1.5]], "proximal_logprobs": [[-1.1]]}
    results = [
        evaluate({"ratio": {"denominator": name}}, advantages=[[1.0]], loss_mask=[[1]], **given)
        for name in ("behavior", "proximal")
    ]
    assert [r.clipped.item() for r in results] == [True, False]
    assert [r.log_ratio.item() for r in results] == pytest.approx([0.5, 0.5])
    assert results[1].loss == pytest.approx(-(2.718281828459045**0.1))


def test_sign_selection_acts_only_when_gate_and_clip_read_different_scalars():
    """d > q tightens the high side although lp - mut is below 0; gated on lp - mut, the low side is tightened."""
    behavior = torch.full((1, 10), -2.0, dtype=torch.float64)
    d = torch.tensor([[0.3] + [0.05] * 9], dtype=torch.float64)
    proximal = behavior + d + torch.tensor([[0.15] + [0.0] * 9], dtype=torch.float64)
    given = {"logprobs": behavior + d, "behavior_logprobs": behavior, "proximal_logprobs": proximal}
    found = {
        gate_on: evaluate(
            {"clip": {"type": "sat", "gate_on": gate_on}, "ratio": PROXIMAL},
            advantages=-torch.ones_like(d),
            loss_mask=torch.ones_like(d),
            **given,
        )
        for gate_on in ("clip", "behavior")
    }
    c = 1 / (1 + (0.3 / 0.05) ** 2)
    assert found["behavior"].q[0, 0] == pytest.approx(0.05)
    assert found["behavior"].eps_high[0, 0] == pytest.approx(0.2 * c)
    assert found["behavior"].eps_low[0, 0] == 0.2
    assert found["clip"].q[0, 0] == pytest.approx(0.0, abs=1e-15)
    assert "eps_eff_low" in found["clip"].metrics
    assert "eps_eff_low" not in found["behavior"].metrics
    assert not found["behavior"].newly_clipped.any()


def test_methods_are_whole_overlays():
    assert {"grpo", "grpo_tis", "sat_grpo", "gspo", "gspo_tis", "sat_gspo", "dppo", "cispo", "dr_grpo"} <= set(
        method_names()
    )
    assert {p.stem for p in METHODS_FOLDER.glob("*.yaml")} == set(method_names())
    for path in METHODS_FOLDER.glob("*.yaml"):
        text = path.read_text()
        assert re.match(r"# .+\.\n[^#]", text), f"{path.name} begins with one comment line that names its source"
        assert yaml.safe_load(text).keys() == {"objective"} | (
            {"routing_replay"} if path.stem.endswith("_r3") else set()
        )
        assert set(IDENTITY) - {"sequence_length"} <= yaml.safe_load(text)["objective"].keys() <= set(IDENTITY)


def test_the_paper_s_grid_of_13_rows():
    """Each of GRPO and GSPO bare, with R3, TIS, TIS and R3, SAT, SAT and R3; and DPPO. R3 changes nothing else."""
    for base in ("grpo", "gspo"):
        level, (low, high) = ("token" if base == "grpo" else "sequence"), (0.2, 0.2)
        for name, clip, gates in ((base, "ppo", []), (f"{base}_tis", "ppo", ["tis"]), (f"sat_{base}", "sat", [])):
            bare, replayed = overlay(name), overlay(f"{name}_r3")
            assert "routing_replay" not in bare
            assert replayed == bare | {"routing_replay": True}
            config = method(name)
            assert (config.ratio.level, config.clip.type, config.clip.eps_low, config.clip.eps_high) == (
                level,
                clip,
                low,
                high,
            )
            assert [gate.type for gate in config.gates] == gates
    assert [gate.type for gate in method("dppo").gates] == ["dppo"]


def test_routing_replay_belongs_to_the_method():
    """On for the R3 rows only, whatever the run says, so that the rows of a comparison are what they are called."""
    mixture = {"model": {"path": "builtin:tiny-qwen3-moe"}}
    for run in (mixture, mixture | {"routing_replay": True}):
        assert check(RunConfig, lay_over(run, "gspo_r3")).routing_replay is True
        assert check(RunConfig, lay_over(run, "gspo")).routing_replay is False
    with pytest.raises(ValueError, match="routing_replay is for mixtures of experts"):
        check(RunConfig, lay_over({}, "gspo_r3"))


@pytest.mark.parametrize("name", method_names())
def test_method(name):
    """It loads alone and over a run whose own objective sets everything, which leaves no trace but the KL."""
    config = method(name)
    other = {"clip": {"type": "sat", "alpha": 0.5}, "gates": ["seqclip"], "aggregate": "sequence_sum"}
    run = {
        "seed": 3,
        "model": {"path": "builtin:tiny-qwen3-moe"},
        "objective": {**other, "sequence_length": 9, "kl": {"coefficient": 0.5}},
    }
    merged = check(RunConfig, lay_over(run, name))
    assert merged.seed == 3
    assert merged.objective == config.model_copy(update={"kl": merged.objective.kl})
    assert merged.objective.kl.coefficient == 0.5
    assert check(ObjectiveConfig, config.model_dump(mode="json")) == config
    rows = [r for r in random_rows(1, 6) if r.mask.any()]
    batch, lp = pack(rows)
    objective = Objective(config)
    output = objective.loss(lp, batch, objective.begin_step([batch], [lp]))
    assert bool(torch.isfinite(output.loss))


def test_evaluate_takes_a_method_by_name():
    given = {"logprobs": [[-1.0, -0.5]], "behavior_logprobs": [[-2.0, -0.5]], "advantages": [[1, 1]]}
    assert evaluate("grpo", loss_mask=[[1, 1]], **given).loss == pytest.approx(-(1.2 + 1) / 2)
    assert evaluate("no_clip", loss_mask=[[1, 1]], **given).loss == pytest.approx(-(2.718281828459045 + 1) / 2)
    with pytest.raises(ObjectiveError, match="did you mean 'sat_gspo'") as raised:
        evaluate("sat_gsp", loss_mask=[[1, 1]], **given)
    assert raised.value.code == "bad_method"
    assert overlay("grpo")["objective"]["gates"] == []
