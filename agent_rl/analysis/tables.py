"""Tables of what runs recorded. Reads files only."""

from pathlib import Path

import polars as pl

_WEIGHTED = ("mean_abs_d", "gate_rate", "clip_fraction", "entropy", "kept_size", "lag_mean")


def per_turn(run: Path, first_step: int = 0) -> pl.DataFrame:
    """One row a turn and one for all, over the steps from `first_step` on: n and means over tokens.

    Columns: turn ("all" last), n, mean_abs_d, gate_rate, clip_fraction, entropy, kept_size (NaN with full
    support), lag_mean, and where proximal log-probs were computed policy_lag = mean|lp - mut| and
    implementation = mean|mut - mu|. Raises `ValueError` if the run has recorded nothing.
    """
    every = read_mismatch(run).filter(pl.col("step") >= first_step, pl.col("scope").is_in(["turn", "all"]))
    steps = every.filter(pl.col("part") == "total")
    if steps.is_empty():
        raise ValueError(f"{run} has no recorded step from step {first_step} on")
    weights = pl.col("n")
    means = [((pl.col(name) * weights).sum() / weights.sum()).alias(name) for name in _WEIGHTED]
    turns = (
        steps.group_by("scope", "turn").agg(pl.col("n").sum(), *means).sort("scope", "turn", descending=[True, False])
    )
    for part in ("policy_lag", "implementation"):
        known = every.filter(pl.col("part") == part)
        if known.height:
            mean = ((pl.col("mean_abs_d") * weights).sum() / weights.sum()).alias(part)
            turns = turns.join(known.group_by("scope", "turn").agg(mean), on=["scope", "turn"], how="left")
    label = pl.when(pl.col("scope") == "all").then(pl.lit("all")).otherwise(pl.col("turn").cast(pl.String))
    parts = [name for name in ("policy_lag", "implementation") if name in turns.columns]
    return turns.select(label.alias("turn"), "n", *_WEIGHTED, *parts)


def routing(run: Path, first_step: int = 0) -> pl.DataFrame:
    """Of a run with routing replay, the fraction of tokens for which the trainer would have chosen other experts.

    One row a layer ("all" last); columns layer, prompt (inputs of the prompt), one a turn, and all. Over the steps
    from `first_step` on. Without recorded routing it has no row.
    """
    rows = read_mismatch(run).filter(pl.col("step") >= first_step, pl.col("part") == "routing")
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


def read_mismatch(run: Path) -> pl.DataFrame:
    """mismatch.parquet of a run: one row for each step × part × scope."""
    return _read(run, "mismatch.parquet")


def read_rollout_facts(run: Path) -> pl.DataFrame:
    """rollout_facts.parquet of a run: one row a trajectory."""
    return _read(run, "rollout_facts.parquet")


def stop_reasons(run: Path) -> pl.DataFrame:
    """Share of trajectories by stop reason, with their mean reward and number of turns."""
    facts = read_rollout_facts(run)
    return (
        facts.group_by("stop_reason")
        .agg(
            (pl.len() / facts.height).alias("share"),
            pl.col("reward").mean().alias("reward_mean"),
            pl.col("num_turns").mean().alias("turns_mean"),
        )
        .sort("share", descending=True)
    )


def _read(run: Path, table: str) -> pl.DataFrame:
    if not any((run / table).glob("*.parquet")):
        raise ValueError(f"no {table} in {str(run)!r}; name the directory of a run, such as runs/quickstart")
    return pl.read_parquet(run / table / "*.parquet")
