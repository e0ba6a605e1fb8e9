"""Runs of a sweep side by side: means over seeds, paired differences to a baseline, collapses. Reads files only.

A difference is taken seed by seed, since runs with one seed share their prompts and their initial evaluation;
its spread over seeds, not that of the scores, says what can be told apart.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist, mean, stdev
from typing import Any

import polars as pl

from agent_rl.analysis.collapse import collapse_index, mismatch_collapse_index
from agent_rl.analysis.metric_lines import evaluations, series
from agent_rl.analysis.recorded import RecordedRun

_CONFIDENCE, _POWER = 0.95, 0.8


@dataclass(frozen=True)
class FinishedRun:
    """A run that took all its steps: `arm` at `place` of the sweep's grid (both may be empty), and its metrics."""

    arm: str
    place: str
    variant: str
    seed: int
    rows: tuple[dict[str, Any], ...]

    @property
    def evals(self) -> list[tuple[int, float]]:
        return evaluations(self.rows)


def values_by_step(runs: Sequence[FinishedRun], key: str) -> dict[int, list[float]]:
    """The values of `key` in the metrics of all runs, by step in order."""
    by_step: dict[int, list[float]] = {}
    for run in runs:
        for step, value in series(run.rows, key):
            by_step.setdefault(step, []).append(value)
    return dict(sorted(by_step.items()))


def read_run(directory: Path, arm: str, place: str, variant: str, seed: int) -> FinishedRun:
    return FinishedRun(arm, place, variant, seed, tuple(RecordedRun(directory).metrics()))


def per_run(runs: Sequence[FinishedRun]) -> pl.DataFrame:
    """One row a run: variant, arm, place, seed, last_eval, best_eval, collapsed (how; null if it did not), wall_s."""
    rows = [
        {
            "variant": run.variant,
            "arm": run.arm,
            "place": run.place,
            "seed": run.seed,
            "last_eval": run.evals[-1][1] if run.evals else None,
            "best_eval": max((score for _, score in run.evals), default=None),
            "collapsed": collapse(run.rows),
            "wall_s": sum(row.get("wall_s") or 0.0 for row in run.rows),
        }
        for run in runs
    ]
    schema = {"last_eval": pl.Float64, "best_eval": pl.Float64, "collapsed": pl.String, "wall_s": pl.Float64}
    return pl.DataFrame(rows, schema_overrides=schema)


def collapse(rows: Sequence[dict[str, Any]]) -> str | None:
    """How and at which step a run collapsed, or None: by its evaluations, its mismatch or its loss."""
    evals = evaluations(rows)
    if (index := collapse_index([score for _, score in evals])) is not None:
        return f"eval at {evals[index][0]}"
    steps = [row for row in rows if row.get("wall_s") is not None and not _was_empty(row)]
    mismatch = [math.nan if row.get("mismatch_mean_abs") is None else row["mismatch_mean_abs"] for row in steps]
    if (index := mismatch_collapse_index(mismatch)) is not None:
        return f"mismatch at {steps[index]['step']}"
    lost = next((row["step"] for row in steps if row.get("skipped_nonfinite") or row.get("loss", 0.0) is None), None)
    return None if lost is None else f"loss at {lost}"


def _was_empty(row: dict[str, Any]) -> bool:
    """Whether every update of a step had nothing to train on."""
    return bool((row.get("skipped_empty") or 0) >= (row.get("num_updates") or 1))


def summary(runs: pl.DataFrame, baseline: str | None, effect: float) -> pl.DataFrame:
    """One row a variant, in order of appearance, from the frame of `per_run`.

    Columns: variant, seeds, last (mean of the last evaluations), last_se, best, best_se, collapsed (how many),
    and with a baseline: difference (mean of last evaluation minus the baseline's, by seed), difference_se,
    pairs, and seeds_needed (to see a difference of `effect`; see `seeds_needed`). A standard error needs two
    seeds and is null otherwise. `baseline` is an arm, compared at the same place, or a place.
    """
    rows = []
    for variant in runs["variant"].unique(maintain_order=True):
        own = runs.filter(pl.col("variant") == variant)
        row: dict[str, Any] = {"variant": variant, "seeds": own.height}
        for name in ("last", "best"):
            row[name], row[f"{name}_se"] = mean_and_error(own[f"{name}_eval"].drop_nulls().to_list())
        row["collapsed"] = own["collapsed"].is_not_null().sum()
        if baseline is not None:
            row |= _difference(own, runs, baseline, effect)
        rows.append(row)
    return pl.DataFrame(rows, infer_schema_length=None)


def _difference(own: pl.DataFrame, runs: pl.DataFrame, baseline: str, effect: float) -> dict[str, Any]:
    arm, place = own["arm"][0], own["place"][0]
    same = pl.col("place") == place if baseline in runs["arm"] else pl.col("arm") == arm
    to = runs.filter(same, (pl.col("arm") == baseline) | (pl.col("place") == baseline))
    empty = {"difference": None, "difference_se": None, "pairs": 0, "seeds_needed": None}
    if baseline in (arm, place):
        return empty
    pairs = own.join(to, on="seed", suffix="_to").drop_nulls(["last_eval", "last_eval_to"])
    differences = (pairs["last_eval"] - pairs["last_eval_to"]).to_list()
    average, error = mean_and_error(differences)
    needed = seeds_needed(stdev(differences), effect) if len(differences) > 1 else None
    return {"difference": average, "difference_se": error, "pairs": len(differences), "seeds_needed": needed}


def mean_and_error(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Mean and its standard error (ddof 1); None where there are too few values."""
    if not values:
        return None, None
    return mean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def seeds_needed(deviation: float, effect: float) -> int:
    """Seeds at which a paired two-sided test at 5 % finds a mean difference of `effect` in 4 of 5 experiments.

    n = ((z_0.975 + z_0.8) * deviation / effect)^2, with `deviation` that of the differences over seeds: the normal
    approximation of the paired t-test's power, plus 2 for the estimated deviation, never below 3.
    """
    quantiles = NormalDist().inv_cdf(0.5 + _CONFIDENCE / 2) + NormalDist().inv_cdf(_POWER)
    return max(3, math.ceil((quantiles * deviation / effect) ** 2) + 2)
