"""Tables of what runs recorded. Reads files only.

How steps are combined. A row of mismatch.parquet describes the n tokens of one step. Over several steps:

- means over tokens (mean |d|, k1, k3, fractions, entropy, gate rate, clip fraction, lag, kept-set size) are weighted
  by n, which gives the mean over all tokens exactly. A kept-set size is recorded where the support was cut, which a
  run does for all of its tokens or for none.
- var_d is the variance over all tokens, exactly: E[d^2] - E[d]^2 with E[d^2] = var_d + k1^2 of each step.
- ess is (sum r)^2 / (n sum r^2) over all tokens, exactly: mean r = 1 + k3 - k1, and a step's own ess gives sum r^2.
- Pearson correlations cannot be put together from what is recorded: `pearson_*_step_mean` is the mean over steps,
  weighted by n. Quantiles (q) and everything in the tables `clip` and `reference` are plain means over steps.

policy_lag is mean |trainer now - trainer at the sampling weights|, and implementation is mean |trainer at the sampling
weights - engine|, over the steps where proximal log-probs were computed, which need not be all; they bound mean |d| of
those steps, and do not add up to it.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import polars as pl

from agent_rl.analysis.recorded import RecordedRun
from agent_rl.analysis.seconds import seconds_table

MEANS = (
    "mean_abs_d",
    "k1",
    "k3",
    "is_dev_frac",
    "mean_abs_dp",
    "pi_tail",
    "mu_tail",
    "both_tail",
    "entropy",
    "gate_rate",
    "clip_fraction",
    "kept_size",
    "lag_mean",
)
"""Means over tokens."""
MAIN = (
    *("mean_abs_d", "policy_lag", "implementation", "gate_rate", "clip_fraction", "entropy", "kept_size", "lag_mean"),
    *("ess", "k3", "pearson_logp_step_mean"),
)
"""What to look at first, in this order; the two parts of the mismatch where they were computed."""
REFERENCE_COLUMNS = (
    "n",
    "q_bucket",
    "q_hat",
    "q",
    "fallback",
    "num_responses",
    "gate_rate",
    "eps_eff_low",
    "eps_eff_high",
)
_EPSILON_BY_TURN = ("eps_eff_low_turn_", "eps_eff_high_turn_")
CLIP_FIGURES = (
    "q",
    "q_zero",
    "q_supported",
    "q_stochastic",
    "q_all",
    "gate_rate",
    "eps_low",
    "eps_high",
    "eps_eff_low",
    "eps_eff_high",
    "min_factor",
    "clip_fraction",
    "newly_clipped_fraction",
    "dropped_fraction",
    "gate_weight",
)


class Table(NamedTuple):
    """A table's title and the keys of its rows. A table by tokens has `scopes`: those of mismatch.parquet it reads."""

    title: str
    keys: tuple[str, ...]
    scopes: tuple[str, ...] = ()


TABLES = {
    "turn": Table("by turn", ("turn",), ("turn", "all")),
    "first": Table("first turn against later turns", ("half",), ("first", "later")),
    "lag": Table("by lag, in policy versions", ("lag",), ("lag",)),
    "kl": Table("by k3 of the whole step's batch", ("kl_bin",), ("all",)),
    "turns": Table("by turns of the episode, then by turn", ("num_turns", "turn"), ("turn_by_num_turns",)),
    "clip": Table("what the clip did, over steps", ("figure",)),
    "reference": Table("what each turn was compared with, means over steps", ("turn",)),
    "stop": Table("why episodes ended", ("stop_reason",)),
    "seconds": Table("where the seconds of a step went: means over steps", ("who",)),
}
KL_BINS = {1: "≤ 1e-3", 2: "1e-3 to 2e-2", 3: "2e-2 to 1e-1", 4: "> 1e-1"}


def tables(
    runs: Sequence[RecordedRun], names: Collection[str], first_step: int = 0, parts: bool = False
) -> dict[str, pl.DataFrame]:
    """The named tables over one run or several. Rows of the same key stand together, a row a run.

    Columns: run, table, the keys, then the figures. `parts` adds rows for `part` policy_lag and implementation;
    without it those are columns, of mean |d| only. Raises `ValueError` on an unknown name, and if a run has recorded
    nothing from `first_step` on.
    """
    unknown = [name for name in names if name not in TABLES]
    if unknown:
        raise ValueError(f"there is no table {unknown[0]!r}; there are {', '.join(TABLES)}")
    frames = {}
    for name in dict.fromkeys(names):
        each = [_labelled(run, name, _one(run, name, first_step, parts)) for run in runs]
        filled = [table for table in each if table.height]
        frames[name] = _sorted(pl.concat(filled, how="diagonal_relaxed"), name) if filled else pl.DataFrame()
    return frames


def tidy(tables: dict[str, pl.DataFrame]) -> pl.DataFrame:
    """All tables in one: a row a (run, table, part, key), a column a figure; what a table lacks is null."""
    frames = [frame for frame in tables.values() if frame.width]
    return pl.concat(frames, how="diagonal_relaxed") if frames else pl.DataFrame()


def routing(run: RecordedRun, first_step: int = 0) -> pl.DataFrame:
    """Of a run with routing replay, the fraction of tokens for which the trainer would have chosen other experts.

    One row a layer ("all" last); columns layer, prompt (inputs of the prompt), one a turn, and all. Over the steps
    from `first_step` on. Without recorded routing it has no row.
    """
    rows = run.mismatch().filter(pl.col("step") >= first_step, pl.col("part") == "routing")
    if rows.is_empty():
        return rows
    counted = rows.select("layer", "turn", "n", (pl.col("routing_differed") * pl.col("n")).alias("differed"))
    name = pl.when(pl.col("turn") < 0).then(pl.lit("prompt")).otherwise(pl.col("turn").cast(pl.String)).alias("turn")
    turns = counted.sort("turn").select(name.unique(maintain_order=True))["turn"].to_list()
    cells = counted.select(pl.col("layer").cast(pl.String), name, "n", "differed")
    whole = pl.lit("all")
    cells = pl.concat(
        [
            cells,
            cells.with_columns(turn=whole),
            cells.with_columns(layer=whole),
            cells.with_columns(layer=whole, turn=whole),
        ]
    )
    fraction = (pl.col("differed").sum() / pl.col("n").sum()).alias("fraction")
    table = cells.group_by("layer", "turn", maintain_order=True).agg(fraction).pivot("turn", index="layer")
    order = pl.col("layer").cast(pl.Int32, strict=False)
    return table.sort(order, nulls_last=True).select("layer", *turns, "all")


def _one(run: RecordedRun, name: str, first_step: int, parts: bool) -> pl.DataFrame:
    if name == "stop":
        return _stop_reasons(run, first_step)
    if name == "clip":
        return _clip(run, first_step)
    if name == "seconds":
        return seconds_table([row for row in run.metrics() if row["step"] >= first_step])
    rows = run.mismatch().filter(pl.col("step") >= first_step)
    if rows.filter(pl.col("part") == "total").is_empty():
        raise ValueError(f"{run.path} has no recorded step from step {first_step} on")
    return _reference(rows) if name == "reference" else _by_tokens(rows, TABLES[name], parts)


def _by_tokens(rows: pl.DataFrame, table: Table, parts: bool) -> pl.DataFrame:
    keys = list(table.keys)
    rows = _keyed(rows.filter(pl.col("scope").is_in(table.scopes)), keys)
    if parts:
        return combine(rows.filter(pl.col("part") != "reference"), ["part", *keys])
    combined = combine(rows.filter(pl.col("part") == "total"), keys)
    for part in ("policy_lag", "implementation"):
        known = rows.filter(pl.col("part") == part)
        if known.height:
            mean = combine(known, keys).select(*keys, pl.col("mean_abs_d").alias(part))
            combined = combined.join(mean, on=keys, how="left")
    return combined


def _keyed(rows: pl.DataFrame, keys: list[str]) -> pl.DataFrame:
    """Keys as text: a turn is a number or "all", a half is first or later, a bin is its range."""
    texts = {
        "turn": pl.when(pl.col("scope") == "all").then(pl.lit("all")).otherwise(pl.col("turn").cast(pl.String)),
        "half": pl.col("scope"),
    }
    if "kl_bin" in keys:
        texts["kl_bin"] = pl.col("kl_bin").replace_strict(KL_BINS, default="unknown", return_dtype=pl.String)
    return rows.with_columns(texts[key].alias(key) for key in keys if key in texts)


def combine(rows: pl.DataFrame, keys: list[str]) -> pl.DataFrame:
    """One row for each value of `keys`, over all of its rows as the module says.

    Columns: the keys, steps, n, `MEANS`, var_d, ess, pearson_logp_step_mean and pearson_p_step_mean.
    """
    names = [*MEANS, "var_d", "ess", "pearson_logp", "pearson_p"]
    absent = [pl.lit(None, pl.Float64).alias(name) for name in names if name not in rows.columns]
    rows = rows.with_columns(absent).with_columns(pl.col(names).cast(pl.Float64).fill_nan(None))
    k1, k3 = pl.col("k1"), pl.col("k3")
    ratios = pl.col("n") * (1 + k3 - k1)  # the sum of r over the row's tokens
    squares = ratios**2 / (pl.col("n") * pl.col("ess"))
    return rows.group_by(keys).agg(
        pl.col("step").n_unique().alias("steps"),
        pl.col("n").sum(),
        *(_mean(pl.col(name)).alias(name) for name in MEANS),
        (_mean(pl.col("var_d") + k1**2) - _mean(k1) ** 2).clip(lower_bound=0).alias("var_d"),
        (ratios.sum() ** 2 / (pl.col("n").filter(squares.is_not_null()).sum() * squares.sum())).alias("ess"),
        *(_mean(pl.col(name)).alias(f"{name}_step_mean") for name in ("pearson_logp", "pearson_p")),
    )


def mean_by_step(rows: pl.DataFrame, column: str, *keys: str) -> pl.DataFrame:
    """What a curve draws of rows of mismatch.parquet: one row a step and value of `keys`, sorted.

    Columns: step, the keys, `column`, n. A step has a row an update: their mean is weighted by n, the tokens of each,
    and `n` is their sum. Rows whose value is null, NaN or infinite are left out.
    """
    finite = rows.filter(pl.col(column).is_finite())
    return (
        finite.group_by("step", *keys).agg(_mean(pl.col(column)).alias(column), pl.col("n").sum()).sort("step", *keys)
    )


def _mean(values: pl.Expr) -> pl.Expr:
    """Weighted by n, over the rows that have a value; null where none has."""
    weight = pl.col("n").filter(values.is_not_null()).sum()
    return pl.when(weight > 0).then((values * pl.col("n")).sum() / weight)


def _clip(run: RecordedRun, first_step: int) -> pl.DataFrame:
    """What the clip did: a row a figure, its plain mean over steps, smallest, largest and last value."""
    steps = [row for row in run.metrics() if row["step"] >= first_step]
    by_turn = sorted({key for row in steps for key in row if key.startswith(_EPSILON_BY_TURN)})
    rows = []
    for name in (*CLIP_FIGURES, *by_turn):
        values = [float(row[name]) for row in steps if row.get(name) is not None]
        if values:
            mean = sum(values) / len(values)
            extremes = {"step_mean": mean, "step_min": min(values), "step_max": max(values), "last": values[-1]}
            rows.append({"figure": name, "steps": len(values)} | extremes)
    return pl.DataFrame(rows)


def _reference(rows: pl.DataFrame) -> pl.DataFrame:
    """What a turn-conditioned clip compared each turn with: plain means over steps of each turn bucket."""
    known = rows.filter(pl.col("part") == "reference")
    if known.is_empty():
        return pl.DataFrame()
    present = [name for name in REFERENCE_COLUMNS if name in known]
    means = [pl.col(name).fill_nan(None).mean().alias(f"{name}_step_mean") for name in present]
    turn = pl.col("turn").cast(pl.String)
    return known.group_by(turn).agg(pl.col("step").n_unique().alias("steps"), *means)


def _stop_reasons(run: RecordedRun, first_step: int) -> pl.DataFrame:
    """Share of trajectories by stop reason, with their mean reward and number of turns."""
    facts = run.rollouts()
    if facts.is_empty():
        return facts
    facts = facts.filter(pl.col("batch") >= first_step)
    shares = (pl.len() / max(facts.height, 1)).alias("share")
    means = pl.col("reward").mean().alias("reward_mean"), pl.col("num_turns").mean().alias("turns_mean")
    return facts.group_by("stop_reason").agg(pl.len().cast(pl.Int64).alias("episodes"), shares, *means)


def _labelled(run: RecordedRun, name: str, table: pl.DataFrame) -> pl.DataFrame:
    return table.select(pl.lit(run.name).alias("run"), pl.lit(name).alias("table"), pl.all()) if table.height else table


def _sorted(frame: pl.DataFrame, name: str) -> pl.DataFrame:
    """By part, then key, then run as given: numbers as numbers, `all` last, figures in their own order."""
    runs = {run: position for position, run in enumerate(frame["run"].unique(maintain_order=True))}
    order = [pl.col("run").replace_strict(runs, return_dtype=pl.Int64)]
    if name == "stop":
        return frame.sort(-pl.col("share").sum().over("stop_reason"), "stop_reason", *order)
    if name == "seconds":
        return frame.sort(pl.col("who") == "trainer", "who", *order)
    if name == "clip":
        figures = {figure: position for position, figure in enumerate(frame["figure"].unique(maintain_order=True))}
        return frame.sort(pl.col("figure").replace_strict(figures, return_dtype=pl.Int64), *order)
    parts = [] if "part" not in frame.columns else [pl.col("part").replace_strict(_PARTS, default=9)]
    keys = TABLES[name].keys
    bins = {text: number for number, text in KL_BINS.items()}
    numbers = {
        "turn": pl.col("turn").cast(pl.Int64, strict=False).fill_null(2**31),
        "kl_bin": pl.col("kl_bin").replace_strict(bins, default=0) if "kl_bin" in keys else pl.lit(0),
    }
    return frame.sort(*parts, *(numbers.get(key, pl.col(key)) for key in keys), *order)


_PARTS = {"total": 0, "policy_lag": 1, "implementation": 2}
