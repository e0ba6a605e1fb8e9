"""What tests of whole runs share."""

from pathlib import Path
from typing import Any

import polars as pl

from agent_rl.analysis import tables
from agent_rl.analysis.recorded import open_runs

SMALL = ("batch.num_prompts=2", "batch.group_size=2", "eval.every=0", "checkpoint.every=0")


def ignore(row: dict[str, Any]) -> None:
    return


def rollout_facts(path: Path) -> pl.DataFrame:
    """All columns of a run's rollout facts, one row a trajectory."""
    return pl.read_parquet(path / "rollout_facts.parquet" / "*.parquet")


def per_turn(path: Path, first_step: int = 0) -> pl.DataFrame:
    """The table `turn` of a run."""
    return tables.tables(open_runs([path]), ["turn"], first_step)["turn"]


def recorded_lags(path: Path) -> list[tuple[int, int, int]]:
    """(step, smallest lag, largest lag) over the sampled tokens of each trained batch, from the facts alone."""
    facts = rollout_facts(path)
    trained = pl.read_parquet(path / "training_facts.parquet" / "*.parquet")
    joined = trained.join(facts, on="episode_id").explode("policy_versions").filter(pl.col("policy_versions") >= 0)
    lag = pl.col("step") - pl.col("policy_versions")
    grouped = joined.group_by("step").agg(lag.min().alias("low"), lag.max().alias("high")).sort("step")
    return [tuple(row) for row in grouped.iter_rows()]
