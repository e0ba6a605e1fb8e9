"""The per-turn table, eval scores and the collapse detector."""

import math

import numpy as np
import pytest
import torch
from golden_cases import DTYPES, array, assert_close, cases, tensor

from agent_rl.analysis.collapse import collapse_index, mismatch_collapse_index
from agent_rl.analysis.scores import avg_at_n
from agent_rl.objective.diagnostics import (
    StepTokens,
    kl_bin,
    mismatch_table,
)


def tokens_of(inputs, dtype):
    mask = torch.as_tensor(array(inputs["mask"])).bool()
    lp, mu, entropy = (tensor(inputs[name], dtype)[mask] for name in ("lp", "mu", "entropy"))
    return StepTokens(lp, mu, torch.as_tensor(inputs["turn"])[mask], entropy=entropy)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [c for c in cases("diagnostics.json") if c.id.startswith("diag_")])
def test_mismatch_table(case, dtype):
    out = case["out"]
    rows = {(row["scope"], row["turn"]): row for row in mismatch_table(tokens_of(case["in"], dtype))}
    want = {(scope, -1): out[scope] for scope in ("all", "first", "later")}
    want |= {("turn", int(k)): row for k, row in out["turns"].items()}
    assert rows.keys() == want.keys()
    for key, row in want.items():
        for name, value in row.items():
            # fp32 inputs carry half an ulp of lp and mu, which is relative to lp, not to their difference d
            assert_close(rows[key][name], value, dtype)
    assert kl_bin(rows["all", -1]["k3"]) == out["kl_bin"]


@pytest.mark.parametrize("n", range(1, 40))
def test_constant_columns_have_no_correlation(n):
    same = torch.full((n,), 0.1).log()
    (row, *_) = mismatch_table(StepTokens(same - 0.01, same, torch.zeros(n, dtype=torch.int64)))
    assert math.isnan(row["pearson_logp"])
    assert math.isnan(row["pearson_p"])


def test_optional_columns():
    tokens = StepTokens(
        torch.log(torch.tensor([0.5, 0.5, 1.0])),
        torch.log(torch.tensor([0.5, 0.25, 1.0])),
        torch.tensor([1, 0, 1]),
        gate=torch.tensor([True, False, False]),
        clipped=torch.tensor([False, True, True]),
        kept_sizes=torch.tensor([3, 0, 1]),
        lag=torch.tensor([0, 2, 1]),
    )
    everything, first, later, *_ = mismatch_table(tokens)
    assert (first["n"], later["n"]) == (1, 2)
    assert (everything["gate_rate"], everything["clip_fraction"]) == (1 / 3, 2 / 3)
    assert (everything["kept_size"], later["kept_size"]) == (2.0, 2.0)
    assert math.isnan(first["kept_size"])
    assert everything["lag_mean"] == 1.0
    assert everything["ess"] == pytest.approx(16 / (3 * 6))
    assert "entropy" not in everything


@pytest.mark.parametrize(("k3", "want"), [(0, 1), (1e-3, 1), (1.1e-3, 2), (2e-2, 2), (0.1, 3), (0.11, 4)])
def test_kl_bin(k3, want):
    assert kl_bin(k3) == want


@pytest.mark.parametrize("case", [c for c in cases("diagnostics.json") if c.id.startswith("collapse")])
def test_collapse(case):
    assert collapse_index(array(case["in"]["scores"]).tolist()) == case["out"]["index"]


@pytest.mark.parametrize("case", [c for c in cases("diagnostics.json") if c.id == "avg_at_k"])
def test_avg_at_k(case):
    assert 100 * avg_at_n(np.array(case["in"]["correct"], np.float64)).mean() == case["out"]["avg"]


def test_mismatch_collapse():
    calm, wild = [0.01, 0.012] * 20, [0.07] * 10
    assert mismatch_collapse_index(calm + wild) == 40
    assert mismatch_collapse_index(calm + wild[:9] + calm) is None
    assert mismatch_collapse_index(calm + [math.nan] * 10) == 40
    assert mismatch_collapse_index([]) is None
    assert mismatch_collapse_index([1e-7] + [0.02] * 40) is None, "the step at lag 0 is no trailing median"
    assert mismatch_collapse_index([1e-7] * 12 + [0.02] * 40) is None, "nor are steps before anything was learnt"
    assert mismatch_collapse_index([1e-7] * 12 + calm + wild) == 52


def test_collapse_thresholds():
    assert collapse_index([1.0, 0.6, 0.6, 0.6, 0.79]) == 1
    assert collapse_index([1.0, 0.61, 0.61, 0.61]) is None
    assert collapse_index([1.0, 0.6, 0.6, 0.6, 0.8]) is None
