"""The scalars of one optimizer step, from what its losses already computed."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from agent_rl.objective.clips.sat import RULES, counted
from agent_rl.objective.equivalent_radius import equivalent_radii
from agent_rl.objective.loss import LossOutput, StepContext
from agent_rl.objective.quantile import ALPHA, Reduce, kth_smallest, quantiles
from agent_rl.objective.token_batch import TokenBatch
from agent_rl.objective.turn_reference import TurnReference

Row = dict[str, float | int | bool]

_MEANS = {
    "objective": "objective",
    "kl": "kl",
    "weight": "gate_weight",
    "gate": "gate_rate",
    "clipped": "clip_fraction",
    "newly_clipped": "newly_clipped_fraction",
    "eps_low": "eps_low",
    "eps_high": "eps_high",
}


def step_metrics(
    batches: Sequence[TokenBatch],
    outputs: Sequence[LossOutput],
    reduce: Reduce | None = None,
    step: StepContext | None = None,
) -> dict[str, float]:
    """What one step did, over its active tokens, and over all ranks with `reduce` (each with a micro-batch).

    loss; means `objective`, `kl`, `gate_weight` (of the objective's gates), `gate_rate` (of the clip's),
    `clip_fraction`, `newly_clipped_fraction`, `eps_low`, `eps_high`; `dropped_fraction`, tokens that the gates weigh
    0; `min_factor`, the smallest c; `q_supported`, `q_all`, `q_stochastic`: the 0.90 quantile of the gated
    |log-ratio| under each token rule, NaN where a rule counts no token. For a clip with a quantile also `q` and
    `q_zero` (share of tokens whose q is 0, so that nothing was gated), and, where they exist, `eps_eff_low` and
    `eps_eff_high`: the radii with which PPO has the same gradient; with `step` and references by turn also
    `eps_eff_low_turn_<bucket>` and `eps_eff_high_turn_<bucket>`. Radii without end (`clip: none`) are left out.
    """
    sums = {"tokens": float(sum(len(b.active) for b in batches)), "loss": sum(float(o.loss.detach()) for o in outputs)}
    sums |= {label: float(_column(batches, outputs, name).double().sum()) for name, label in _MEANS.items()}
    sums["dropped_fraction"] = float((_column(batches, outputs, "weight") == 0).sum())
    if outputs[0].q is not None:
        sums |= _quantile_sums(_column(batches, outputs, "q"), outputs[0].base_radii)
    if reduce is not None:
        total = reduce(torch.tensor(list(sums.values()), dtype=torch.float64, device=outputs[0].ratio.device))
        sums = dict(zip(sums, total.tolist(), strict=True))
    tokens = sums.pop("tokens")
    metrics = {name: value if name == "loss" else value / tokens for name, value in sums.items()}
    factors = _column(batches, outputs, "factor")
    metrics["min_factor"] = float(factors.min()) if reduce is None else float(kth_smallest([factors], [1], reduce)[0])
    metrics = {name: x for name, x in metrics.items() if name not in ("eps_low", "eps_high") or math.isfinite(x)}
    return metrics | _quantiles_by_rule(batches, outputs, reduce) | _radii_by_turn(outputs[0], step)


def turn_rows(
    batches: Sequence[TokenBatch], outputs: Sequence[LossOutput], step: StepContext, reduce: Reduce | None = None
) -> list[Row]:
    """One row a turn bucket that has counted tokens, none without references by turn.

    Columns: those of `TurnReference.rows` (bucket, n, q_bucket, q_hat, q, fallback, num_responses); gate_rate over
    all active tokens of the bucket; and eps_eff_low, eps_eff_high where an equivalent radius exists.
    """
    if not isinstance(step.reference, TurnReference):
        return []
    turns = torch.cat([b.active.turn_ids for b in batches]).clamp(max=len(step.reference.q) - 1)
    gated = turns[_column(batches, outputs, "gate")]
    counts = torch.stack([torch.bincount(t, minlength=len(step.reference.q)) for t in (turns, gated)])
    total, fired = (counts if reduce is None else reduce(counts)).tolist()
    rows: list[Row] = []
    for row in step.reference.rows():
        k = int(row["bucket"])
        rate = fired[k] / total[k] if total[k] else math.nan
        rows.append(row | {"gate_rate": rate} | _equivalent(float(row["q"]), outputs[0].base_radii))
    return rows


def _equivalent(q: float, base_radii: tuple[float, float] | None) -> dict[str, float]:
    if base_radii is None:
        return {}
    low, high = equivalent_radii(q, *base_radii)
    return {"eps_eff_low": low, "eps_eff_high": high}


def _radii_by_turn(output: LossOutput, step: StepContext | None) -> dict[str, float]:
    if step is None or not isinstance(step.reference, TurnReference):
        return {}
    return {
        f"{name}_turn_{row['bucket']}": radius
        for row in step.reference.rows()
        for name, radius in _equivalent(float(row["q"]), output.base_radii).items()
    }


def _column(batches: Sequence[TokenBatch], outputs: Sequence[LossOutput], name: str) -> Tensor:
    """One field of the outputs at the active tokens of the step, [n]."""
    return torch.cat([getattr(o, name)[b.active.index] for b, o in zip(batches, outputs, strict=True)])


def _quantile_sums(q: Tensor, base_radii: tuple[float, float] | None) -> dict[str, float]:
    """Sums over tokens of q, of q = 0 and of the equivalent radii; q takes few distinct values."""
    sums = {"q": float(q.double().sum()), "q_zero": float((q == 0).sum())}
    if base_radii is None:
        return sums
    values, counts = torch.unique(q, return_counts=True)
    radii = [equivalent_radii(value, *base_radii) for value in values.tolist()]
    return sums | {
        "eps_eff_low": sum(n * low for n, (low, _) in zip(counts.tolist(), radii, strict=True)),
        "eps_eff_high": sum(n * high for n, (_, high) in zip(counts.tolist(), radii, strict=True)),
    }


def _quantiles_by_rule(
    batches: Sequence[TokenBatch], outputs: Sequence[LossOutput], reduce: Reduce | None
) -> dict[str, float]:
    magnitudes = _column(batches, outputs, "gate_log_ratio").abs()
    samples = [magnitudes[torch.cat([counted(b.active, rule) for b in batches])] for rule in RULES]
    found = quantiles(samples, ALPHA, reduce)
    return {f"q_{rule}": float(q) for rule, q in zip(RULES, found, strict=True)}
