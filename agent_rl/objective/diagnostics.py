"""Mismatch between what was sampled from and what is trained, overall and per turn."""

import bisect
import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

Row = dict[str, float | int | str]

KL_BIN_EDGES = (1e-3, 2e-2, 1e-1)
"""k3 of a whole optimizer step's batch: bin 1 up to the first edge (included), ..., bin 4 above the last."""

_TAIL = 1e-3
_DEVIATION = 1.5


@dataclass(frozen=True, eq=False)
class StepTokens:
    """The active tokens of one optimizer step, concatenated: every tensor is [n].

    logprobs and behavior_logprobs, float; turn_ids int. Optional, and then a column of the table: entropy, gate,
    clipped, kept_sizes (0 for full vocabulary) and lag (current policy version - the token's own). Optional, and
    then a scope of the table: num_turns, the turns of the trajectory that the token belongs to.
    """

    logprobs: Tensor
    behavior_logprobs: Tensor
    turn_ids: Tensor
    num_turns: Tensor | None = None
    entropy: Tensor | None = None
    gate: Tensor | None = None
    clipped: Tensor | None = None
    kept_sizes: Tensor | None = None
    lag: Tensor | None = None

    def select(self, chosen: Tensor | slice) -> "StepTokens":
        """The tokens at `chosen`."""
        columns: dict[str, Any] = {name: None if t is None else t[chosen] for name, t in vars(self).items()}
        return StepTokens(**columns)


def mismatch_table(tokens: StepTokens) -> list[Row]:
    """Rows `scope` = all, first (turn 0), later (turns >= 1), then `turn`, `lag` and `turn_by_num_turns`.

    `turn`, `lag` and `num_turns` say which, and are -1 on rows of other scopes. `kl_bin` is that of all tokens, on
    every row. By number of turns, since later turns exist only in longer episodes. Empty scopes have no row.

    Columns over the row's tokens, computed in float64, d = lp - mu, r = e^d: n, mean_abs_d, var_d (ddof 0), k1 =
    mean(-d), k3 = mean(r - 1 - d), is_dev_frac = Pr[|r - 1| > 1.5], mean_abs_dp = mean|e^lp - e^mu|, pi_tail,
    mu_tail, both_tail = Pr[probability < 1e-3], pearson_logp, pearson_p (NaN for constant columns), ess =
    (sum r)^2 / (n sum r^2), and where given entropy, gate_rate, clip_fraction, kept_size (mean over tokens whose
    support was cut, NaN if none was), lag_mean.
    """
    if not len(tokens.turn_ids):
        return []
    first = tokens.turn_ids == 0
    scopes: list[tuple[Row, StepTokens]] = [
        ({"scope": "all"}, tokens),
        ({"scope": "first"}, tokens.select(first)),
        ({"scope": "later"}, tokens.select(~first)),
        *_groups(tokens, "turn", {"turn": tokens.turn_ids}),
    ]
    if tokens.lag is not None:
        scopes += _groups(tokens, "lag", {"lag": tokens.lag})
    if tokens.num_turns is not None:
        scopes += _groups(tokens, "turn_by_num_turns", {"num_turns": tokens.num_turns, "turn": tokens.turn_ids})
    rows = [labels | _statistics(chosen) for labels, chosen in scopes if len(chosen.turn_ids)]
    nowhere: Row = {"turn": -1, "lag": -1, "num_turns": -1, "kl_bin": kl_bin(float(rows[0]["k3"]))}
    return [nowhere | row for row in rows]


def _groups(tokens: StepTokens, scope: str, keys: dict[str, Tensor]) -> list[tuple[Row, StepTokens]]:
    """(labels, tokens) of every combination of key values that occurs, in order; keys are ints of at least 0."""
    code = torch.zeros_like(tokens.turn_ids)
    for values in keys.values():
        code = code * (int(values.max()) + 1) + values
    order = torch.argsort(code, stable=True)  # one sort, then slices: a mask a group would read everything again
    tokens = tokens.select(order)
    ends = torch.unique_consecutive(code[order], return_counts=True)[1].cumsum(0).tolist()
    found: list[tuple[Row, StepTokens]] = []
    for start, end in pairwise([0, *ends]):
        labels = {name: int(values[order[start]]) for name, values in keys.items()}
        found.append(({"scope": scope, **labels}, tokens.select(slice(start, end))))
    return found


def _statistics(tokens: StepTokens) -> Row:
    lp, mu = tokens.logprobs.double(), tokens.behavior_logprobs.double()
    d, pi, behavior = lp - mu, lp.exp(), mu.exp()
    r = d.exp()
    row: Row = {
        "n": len(d),
        "mean_abs_d": float(d.abs().mean()),
        "var_d": float(d.var(correction=0)),
        "k1": float(-d.mean()),
        "k3": float((torch.expm1(d) - d).mean()),
        "is_dev_frac": _share((r - 1).abs() > _DEVIATION),
        "mean_abs_dp": float((pi - behavior).abs().mean()),
        "pi_tail": _share(pi < _TAIL),
        "mu_tail": _share(behavior < _TAIL),
        "both_tail": _share((pi < _TAIL) & (behavior < _TAIL)),
        "pearson_logp": _pearson(lp, mu),
        "pearson_p": _pearson(pi, behavior),
        "ess": float(r.sum() ** 2 / (len(r) * (r**2).sum())),
    }
    named = {"entropy": "entropy", "gate": "gate_rate", "clipped": "clip_fraction", "lag": "lag_mean"}
    columns = {label: getattr(tokens, name) for name, label in named.items()}
    row |= {label: _share(column) for label, column in columns.items() if column is not None}
    if tokens.kept_sizes is not None:
        row["kept_size"] = _share(tokens.kept_sizes[tokens.kept_sizes > 0])
    return row


def _share(values: Tensor) -> float:
    return float(values.double().mean())


def _pearson(x: Tensor, y: Tensor) -> float:
    if bool((x == x[0]).all()) or bool((y == y[0]).all()):  # subtracting the mean leaves a residue, not 0
        return math.nan
    x, y = x - x.mean(), y - y.mean()
    scale = float(x.norm() * y.norm())
    return float(x @ y) / scale if scale > 0 else math.nan


def kl_bin(k3: float) -> int:
    """The bin, 1 to 4, of an optimizer step whose batch has this k3; boundary values belong to the lower bin."""
    return 1 + bisect.bisect_left(KL_BIN_EDGES, k3)
