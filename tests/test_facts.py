"""What is written to Parquet comes back bit for bit, and polars and duckdb read it."""

from pathlib import Path

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from agent_rl import facts
from agent_rl.records import Episode, Prompt, ToolCall, Turn
from tests.trajectories import completion, random_trajectory
from tools.base import ToolResult


def episode(seed: int, top_p: float = 1.0, experts: tuple[int, int, int] | None = None) -> Episode:
    rng = np.random.default_rng(seed)
    turn = Turn(
        turn_id=0,
        prompt_token_ids=np.array([1], np.int32),
        completion=completion(rng, np.array([1, 2], np.int32), False, 0),
        tool_calls=(ToolCall("python", {"code": "print(1)"}),),
        tool_results=(ToolResult("1", ok=True),),
    )
    prompt = Prompt(0, ({"role": "user", "content": "1+0"},), "1", {"k": 1})
    return Episode(prompt, (turn,), random_trajectory(rng, seed, top_p=top_p, version=seed, experts=experts))


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_trajectory_survives_the_table_bit_for_bit(tmp_path: Path, top_p: float) -> None:
    episodes = [episode(seed, top_p) for seed in range(3)]
    rows = [facts.rollout_row(4, e) for e in episodes]
    facts.write_part(tmp_path / "t.parquet", 4, rows, facts.ROLLOUT_FACTS)
    read = [facts.trajectory(row) for row in facts.read_part(tmp_path / "t.parquet", 4)]
    for before, after in zip((e.trajectory for e in episodes), read, strict=True):
        for name in ("token_ids", "loss_mask", "behavior_logprobs", "turn_ids", "policy_versions"):
            a, b = getattr(before, name), getattr(after, name)
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(before.sampling_mask.token_ids, after.sampling_mask.token_ids)
        np.testing.assert_array_equal(before.sampling_mask.offsets, after.sampling_mask.offsets)
        scalars = [(t.group_id, t.episode_id, t.reward, t.stop_reason, t.sampling_params) for t in (before, after)]
        assert scalars[0] == scalars[1]


def test_routing_survives_the_table_and_its_absence_too(tmp_path: Path) -> None:
    episodes = [episode(1, experts=(8, 3, 2)), episode(2), episode(3, experts=(300, 2, 4))]
    rows = [facts.rollout_row(0, e) for e in episodes]
    facts.write_part(tmp_path / "t.parquet", 0, rows, facts.ROLLOUT_FACTS)
    read = [facts.trajectory(row) for row in facts.read_part(tmp_path / "t.parquet", 0)]
    for before, after in zip((e.trajectory for e in episodes), read, strict=True):
        if before.routed_experts is None:
            assert after.routed_experts is None
        else:
            assert after.routed_experts is not None
            assert after.routed_experts.dtype == np.int16
            np.testing.assert_array_equal(before.routed_experts, after.routed_experts)
    older = facts.read_part(tmp_path / "t.parquet", 0)[0]
    for name in ("routed_experts", "routed_layers", "routed_k"):
        del older[name]
    assert facts.trajectory(older).routed_experts is None


def test_polars_and_duckdb_read_the_parts_as_one_table(tmp_path: Path) -> None:
    table = tmp_path / "rollout_facts.parquet"
    for batch in range(3):
        facts.write_part(table, batch, [facts.rollout_row(batch, episode(batch))], facts.ROLLOUT_FACTS)
    with_polars = pl.read_parquet(table / "*.parquet").sort("batch")
    found = duckdb.sql(f"select batch, sum(len(token_ids)) from '{table}/*.parquet' group by batch order by batch")
    assert found.fetchall() == list(with_polars.select("batch", pl.col("num_tokens").cast(pl.Int64)).iter_rows())
    assert with_polars["turns"][0][0]["tool_results"] == ["1"]


def test_truncating_deletes_later_parts_only(tmp_path: Path) -> None:
    table = tmp_path / "t.parquet"
    for batch in range(4):
        facts.write_part(table, batch, [{"x": batch}])
    facts.truncate(table, 2)
    assert pl.read_parquet(table / "*.parquet")["x"].sort().to_list() == [0, 1]
    assert facts.read_part(table, 3) == []


def test_a_part_is_written_whole(tmp_path: Path) -> None:
    with pytest.raises(pa.ArrowInvalid):
        facts.write_part(tmp_path / "t.parquet", 0, [{"x": 1}, {"x": "not a number"}])
    assert not facts.part_path(tmp_path / "t.parquet", 0).exists()
