"""What tests of whole runs share."""

from pathlib import Path
from typing import Any

import polars as pl

from agent_rl.analysis import tables

SMALL = ("batch.num_prompts=2", "batch.group_size=2", "eval.every=0", "checkpoint.every=0")


def ignore(row: dict[str, Any]) -> None:
    return


def recorded_lags(path: Path) -> list[tuple[int, int, int]]:
    """(step, smallest lag, largest lag) over the sampled tokens of each trained batch, from the facts alone."""
    facts = tables.read_rollout_facts(path)
    trained = pl.read_parquet(path / "training_facts.parquet" / "*.parquet")
    joined = trained.join(facts, on="episode_id").explode("policy_versions").filter(pl.col("policy_versions") >= 0)
    lag = pl.col("step") - pl.col("policy_versions")
    grouped = joined.group_by("step").agg(lag.min().alias("low"), lag.max().alias("high")).sort("step")
    return [tuple(row) for row in grouped.iter_rows()]
