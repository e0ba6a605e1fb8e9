"""Tables: means over tokens, not over steps; what can be put together exactly is, and equals the tokens' own."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_rl import facts
from agent_rl.analysis import tables
from agent_rl.analysis.recorded import RecordedRun, open_runs
from agent_rl.objective.diagnostics import StepTokens, mismatch_table
from tests.whole_runs import per_turn

COLUMNS = ("mean_abs_d", "gate_rate", "clip_fraction", "entropy", "kept_size", "lag_mean")


def write(run: Path) -> None:
    """Two steps: turn 0 with 10 and then 30 tokens, turn 1 in the second step only."""

    def row(scope: str, turn: int, n: int, value: float) -> dict[str, object]:
        return {"part": "total", "scope": scope, "turn": turn, "n": n, **dict.fromkeys(COLUMNS, value)}

    steps = [
        [row("all", -1, 10, 1.0), row("first", -1, 10, 1.0), row("turn", 0, 10, 1.0)],
        [row("all", -1, 40, 4.0), row("turn", 0, 30, 5.0), row("turn", 1, 10, 1.0)],
    ]
    for step, rows in enumerate(steps):
        facts.write_part(run / "mismatch.parquet", step, [{"step": step, **r} for r in rows])


def test_means_are_weighted_by_tokens(tmp_path: Path) -> None:
    write(tmp_path)
    table = per_turn(tmp_path)
    assert table["turn"].to_list() == ["0", "1", "all"]
    assert table["n"].to_list() == [40, 10, 50]
    assert table["steps"].to_list() == [2, 1, 2]
    for name in COLUMNS:
        assert table[name].to_list() == pytest.approx([(10 * 1 + 30 * 5) / 40, 1.0, (10 * 1 + 40 * 4) / 50])


def test_first_step_leaves_earlier_ones_out(tmp_path: Path) -> None:
    write(tmp_path)
    assert per_turn(tmp_path, first_step=1).filter(pl.col("turn") == "0")["mean_abs_d"].item() == 5.0
    with pytest.raises(ValueError, match="no recorded step from step 7 on"):
        per_turn(tmp_path, first_step=7)


def test_a_directory_that_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no mismatch.parquet in .*; name the directory of a run"):
        per_turn(tmp_path)


def test_routing_is_a_table_of_layers_by_turn_weighted_by_tokens(tmp_path: Path) -> None:
    write(tmp_path)
    assert tables.routing(RecordedRun(tmp_path)).is_empty()
    cells = {(0, -1): (10, 0.1), (0, 0): (30, 0.0), (10, -1): (10, 0.3), (10, 0): (30, 0.2), (10, 1): (20, 0.5)}

    def routing_row(step: int, layer: int, turn: int, n: int, differed: float) -> dict[str, object]:
        return {"step": step, "part": "routing", "layer": layer, "turn": turn, "n": n, "routing_differed": differed}

    rows = [routing_row(0, layer, turn, *cell) for (layer, turn), cell in cells.items()]
    facts.write_part(tmp_path / "mismatch.parquet", 0, rows, facts.MISMATCH)
    facts.write_part(tmp_path / "mismatch.parquet", 1, [routing_row(1, 0, 0, 10, 0.4)], facts.MISMATCH)
    table = tables.routing(RecordedRun(tmp_path))
    assert table.columns == ["layer", "prompt", "0", "1", "all"]
    assert table["layer"].to_list() == ["0", "10", "all"]
    assert table["0"].to_list() == pytest.approx([4 / 40, 0.2, 10 / 70])
    assert table["1"].to_list() == [None, 0.5, 0.5]
    assert table["all"].to_list() == pytest.approx([5 / 50, 19 / 60, 24 / 110])
    assert tables.routing(RecordedRun(tmp_path), first_step=1)["0"].to_list() == pytest.approx([0.4, 0.4])


def tokens(rng: np.random.Generator, n: int, spread: float) -> StepTokens:
    mu = torch.from_numpy(-rng.exponential(1.0, n))
    return StepTokens(
        logprobs=torch.clamp(mu + torch.from_numpy(rng.normal(0, spread, n)), max=0.0),
        behavior_logprobs=mu,
        turn_ids=torch.from_numpy(rng.integers(0, 4, n)),
        num_turns=torch.full((n,), 4),
        entropy=torch.from_numpy(rng.exponential(1.0, n)),
        gate=torch.from_numpy(rng.random(n) < 0.2),
        clipped=torch.from_numpy(rng.random(n) < 0.1),
        kept_sizes=torch.from_numpy(rng.integers(1, 30, n)),
        lag=torch.from_numpy(rng.integers(0, 3, n)),
    )


def joined(steps: list[StepTokens]) -> StepTokens:
    return StepTokens(**{name: torch.cat([getattr(step, name) for step in steps]) for name in vars(steps[0])})


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**32 - 1), sizes=st.lists(st.integers(1, 60), min_size=1, max_size=5))
def test_steps_put_together_equal_all_their_tokens_at_once(seed: int, sizes: list[int]) -> None:
    rng = np.random.default_rng(seed)
    steps = [tokens(rng, n, spread) for n, spread in zip(sizes, rng.uniform(0.01, 0.8, len(sizes)), strict=True)]
    rows = [{"step": step, **row} for step, each in enumerate(steps) for row in mismatch_table(each)]
    truth = {(row["scope"], row["turn"], row["lag"]): row for row in mismatch_table(joined(steps))}
    scopes = pl.DataFrame(rows, infer_schema_length=None).filter(pl.col("scope") != "turn_by_num_turns")
    for row in tables.combine(scopes, ["scope", "turn", "lag"]).to_dicts():
        expected = truth[row["scope"], row["turn"], row["lag"]]
        assert row["n"] == expected["n"]
        for name in (*tables.MEANS, "var_d", "ess"):
            assert row[name] == pytest.approx(expected[name], rel=1e-9, abs=1e-12), name


def test_a_step_without_a_value_does_not_pull_the_mean() -> None:
    """Entropy and kept sets are not recorded for the parts, and kept sizes are NaN under full support."""
    rows = pl.DataFrame({"step": [0, 1], "n": [10, 90], "mean_abs_d": [1.0, 2.0], "kept_size": [3.0, float("nan")]})
    found = tables.combine(rows.with_columns(turn=0), ["turn"]).to_dicts()[0]
    assert (found["kept_size"], found["mean_abs_d"], found["entropy"]) == (3.0, 1.9, None)


def test_the_tables_of_a_run_agree_with_its_tokens(recorded: Path) -> None:
    run = open_runs([recorded])[0]
    found = tables.tables([run], tables.TABLES)
    every = found["turn"].filter(pl.col("turn") == "all")
    assert every["n"].item() == run.rollouts()["num_sampled"].sum()
    assert found["first"]["half"].to_list() == ["first", "later"]
    assert found["first"]["n"].sum() == found["lag"]["n"].sum() == found["kl"]["n"].sum() == every["n"].item()
    assert found["lag"]["lag"].to_list() == [0, 1, 2]
    assert found["turns"]["n"].sum() == every["n"].item()
    assert found["turns"].select("num_turns", "turn").rows() == sorted(
        found["turns"].select("num_turns", "turn").rows(), key=lambda row: (row[0], int(row[1]))
    )
    assert every["implementation"].item() < 1e-5 < every["policy_lag"].item()
    assert every["kept_size"].item() > 1
    q = found["clip"].filter(pl.col("figure") == "q").to_dicts()[0]
    values = [row["q"] for row in run.metrics() if row.get("q") is not None]
    assert (q["step_mean"], q["step_max"], q["last"]) == pytest.approx((np.mean(values), max(values), values[-1]))
    assert found["stop"]["episodes"].sum() == 64
    assert found["reference"].is_empty()


def test_parts_are_rows_when_asked_for(recorded: Path) -> None:
    rows = tables.tables(open_runs([recorded]), ["first"], parts=True)["first"]
    assert rows["part"].to_list() == ["total"] * 2 + ["policy_lag"] * 2 + ["implementation"] * 2
    assert (rows.filter(pl.col("part") == "total")["n"] > rows.filter(pl.col("part") == "policy_lag")["n"]).all()


def test_several_runs_stand_side_by_side(recorded: Path, run: Path) -> None:
    runs = [RecordedRun(recorded, "a"), RecordedRun(run, "b")]
    table = tables.tables(runs, ["turn"])["turn"]
    assert table["run"].to_list() == ["a", "b"] * (table.height // 2)
    assert table["turn"].to_list()[-2:] == ["all", "all"]
    twice = table.select(pl.exclude("run")).to_dicts()
    assert twice[0::2] == twice[1::2]
    everything = tables.tidy(tables.tables(runs, tables.TABLES))
    assert set(everything["table"].unique()) == {*tables.TABLES} - {"reference"}


def test_an_unknown_table_is_named(recorded: Path) -> None:
    with pytest.raises(ValueError, match="there is no table 'turm'; there are turn, first"):
        tables.tables(open_runs([recorded]), ["turm"])
