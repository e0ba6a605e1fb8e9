"""Whole runs on a real Ray, tool server, engine and trainer: lag, learning, reproducibility, resuming, failures."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import polars as pl
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from agent_rl import registry
from agent_rl.analysis import tables
from agent_rl.analysis.plots import run_picture
from agent_rl.cli import app
from agent_rl.config import RunConfig, SandboxConfig, model_directory
from agent_rl.pipeline.batches import BatchController
from agent_rl.pipeline.controller import Stages
from agent_rl.pipeline.run_directory import METRIC_KEYS, RunDirectory, list_checkpoints, read_metrics
from agent_rl.pipeline.schedule import Schedule
from agent_rl.pipeline.state import RunState
from agent_rl.run import build_prompts, load_weights, local_ray, lock, newest_checkpoint, start_stages, train
from agent_rl.tool_server import ToolServer
from sandbox.base import SandboxError
from tests.configs import QUICKSTART, quickstart

TINY = model_directory("builtin:tiny-qwen3")
SMALL = ("batch.num_prompts=2", "batch.group_size=2", "eval.every=0", "checkpoint.every=0")


def ignore(row: dict[str, Any]) -> None:
    return


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """One Ray for all runs of this file."""
    with local_ray(4):
        yield


def control(config: RunConfig, schedule: Schedule, stages: Stages, path: Path) -> RunDirectory:
    """Run all steps of `config` with given stages, from version 0."""
    load_weights(stages, None, 0, served=0)
    directory = RunDirectory(path, config)
    BatchController(config, schedule, stages, directory, ignore).run()
    directory.close()
    return directory


@pytest.fixture(scope="module")
def stages() -> Iterator[Stages]:
    config = quickstart(*SMALL)
    with ToolServer(config.sandbox) as server:
        made = start_stages(config, build_prompts(config), server, waves=False)
        yield made
        made.close()


def recorded_lags(path: Path) -> list[tuple[int, int, int]]:
    """(step, smallest lag, largest lag) over the sampled tokens of each trained batch, from the facts alone."""
    facts = tables.read_rollout_facts(path)
    trained = pl.read_parquet(path / "training_facts.parquet" / "*.parquet")
    joined = trained.join(facts, on="episode_id").explode("policy_versions").filter(pl.col("policy_versions") >= 0)
    lag = pl.col("step") - pl.col("policy_versions")
    grouped = joined.group_by("step").agg(lag.min().alias("low"), lag.max().alias("high")).sort("step")
    return [tuple(row) for row in grouped.iter_rows()]


@pytest.mark.parametrize("k", range(9))
def test_exact_lag_holds_on_the_recorded_versions(stages: Stages, tmp_path: Path, k: int) -> None:
    config = quickstart(*SMALL, f"pipeline.exact_lag={k}", f"num_steps={k + 2}")
    schedule = registry.build("pipeline", config.pipeline).plan(16, 60)
    directory = control(config, schedule, stages, tmp_path)
    assert recorded_lags(tmp_path) == [(step, min(step, k), min(step, k)) for step in range(k + 2)]
    assert directory.ledger.counts()["in_flight"] == 0
    assert directory.ledger.counts()["trained"] == 2 * (k + 2)


def test_a_broadcast_interval_cycles(stages: Stages, tmp_path: Path) -> None:
    config = quickstart(*SMALL, "pipeline.exact_lag=null", "pipeline.broadcast_interval=3", "num_steps=8")
    control(config, registry.build("pipeline", config.pipeline).plan(16, 60), stages, tmp_path)
    assert [low for _, low, _ in recorded_lags(tmp_path)] == [0, 1, 2, 3, 1, 2, 3, 1]
    assert [high for _, _, high in recorded_lags(tmp_path)] == [0, 1, 2, 3, 1, 2, 3, 1]


def final_weights(path: Path) -> dict[str, torch.Tensor]:
    return load_file(newest_checkpoint(path) / "model.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_sync_is_reproducible_and_resuming_changes_nothing(tmp_path: Path) -> None:
    overrides = ("pipeline.type=sync", "batch.num_prompts=4", "batch.group_size=4", "eval.every=0", "num_steps=3")
    waves = "rollout.max_concurrent_episodes=6"  # sixteen episodes: two full waves and a smaller one
    config = quickstart(*overrides, waves, "checkpoint.every=1", "checkpoint.keep=3")
    first, again, stopped = tmp_path / "first", tmp_path / "again", tmp_path / "stopped"
    for path in (first, again):
        assert train(config, path, False, ignore).complete
    facts = [tables.read_rollout_facts(path).sort("episode_id").drop("turns") for path in (first, again)]
    assert facts[0].equals(facts[1])
    assert facts[0]["reward"].sum() > 0
    assert same(final_weights(first), final_weights(again))
    train(config.model_copy(update={"num_steps": 1}), stopped, False, ignore)
    train(config, stopped, True, ignore)
    assert same(final_weights(first), final_weights(stopped))
    assert tables.read_rollout_facts(stopped).sort("episode_id").drop("turns").equals(facts[0])


def test_a_resumed_asynchronous_run_keeps_its_queue_and_its_lag(tmp_path: Path) -> None:
    config = quickstart(*SMALL, "pipeline.exact_lag=2", "num_steps=6", "checkpoint.every=2")
    rows: list[dict[str, Any]] = []

    def stop_after_three(row: dict[str, Any]) -> None:
        rows.append(row)
        if row["step"] == 2:
            signal.raise_signal(signal.SIGINT)

    outcome = train(config, tmp_path, False, stop_after_three)
    assert (outcome.step, outcome.complete) == (3, False)
    assert [folder.name for folder in list_checkpoints(tmp_path)] == ["step-000002", "step-000003"]
    assert train(config, tmp_path, True, ignore).complete
    assert recorded_lags(tmp_path) == [(step, min(step, 2), min(step, 2)) for step in range(6)]
    assert [row["step"] for row in read_metrics(tmp_path)] == list(range(6))
    extended = config.model_copy(update={"num_steps": 8})
    assert train(extended, tmp_path, True, ignore).complete
    assert recorded_lags(tmp_path)[6:] == [(6, 0, 0), (7, 1, 1)]


def test_a_batch_used_for_several_updates_is_recorded_at_the_lag_of_each_and_resumed(tmp_path: Path) -> None:
    reuse = ("trainer.num_minibatches=2", "trainer.num_epochs=2", "pipeline.exact_lag=1", "eval.every=1")
    config = quickstart(*SMALL, *reuse, "eval.num_prompts=2", "num_steps=3", "trainer.proximal.every=1")
    train(config.model_copy(update={"num_steps": 1}), tmp_path, False, ignore)
    assert RunState.load(newest_checkpoint(tmp_path)).policy_version == 4
    with pytest.raises(ValueError, match="made 4 updates of each batch, and the config now asks for 1"):
        train(quickstart(*SMALL, "pipeline.exact_lag=1", "num_steps=3"), tmp_path, True, ignore)
    assert train(config, tmp_path, True, ignore).complete
    facts = tables.read_rollout_facts(tmp_path)
    sampled_at = facts.group_by("batch").agg(pl.col("min_policy_version").min(), pl.col("max_policy_version").max())
    # The run ended after its first batch, so its second was sampled with the weights then: version 4, after 4 updates.
    assert sampled_at.sort("batch").rows() == [(0, 0, 0), (1, 4, 4), (2, 4, 4)]
    trained = pl.read_parquet(tmp_path / "training_facts.parquet" / "*.parquet").sort("step", "order")
    assert trained["trained_at"].to_list() == [[4 * s + m, 4 * s + m + 2] for s in range(3) for m in (0, 0, 1, 1)]
    lags = tables.read_mismatch(tmp_path).filter(pl.col("part") == "total", pl.col("scope") == "lag")
    recorded = lags.select("step", "update", "lag").unique().sort("step", "update").rows()
    assert recorded == [(0, h, h) for h in range(4)] + [(1, h, h) for h in range(4)] + [(2, h, 4 + h) for h in range(4)]
    rows = read_metrics(tmp_path)
    assert [row["policy_version"] for row in rows] == [0, 4, 8, 12]
    assert [row["lag_max"] for row in rows[:3]] == [3, 3, 7]
    assert [row["eval_policy_version"] for row in rows] == [0, 4, 8, 12]


def test_a_run_stopped_near_its_end_can_go_on_for_longer(tmp_path: Path) -> None:
    config = quickstart(*SMALL, "pipeline.exact_lag=2", "num_steps=4")

    def stop_before_the_last(row: dict[str, Any]) -> None:
        if row["step"] == 2:
            signal.raise_signal(signal.SIGINT)

    assert train(config, tmp_path, False, stop_before_the_last).step == 3
    assert train(config.model_copy(update={"num_steps": 6}), tmp_path, True, ignore).complete
    # Batch 3 was queued; nothing was sampled for 4 and 5, so they are as fresh as the weights at step 3.
    assert recorded_lags(tmp_path) == [(0, 0, 0), (1, 1, 1), (2, 2, 2), (3, 2, 2), (4, 1, 1), (5, 2, 2)]


def test_a_run_directory_is_one_process_s(tmp_path: Path) -> None:
    with lock(tmp_path), pytest.raises(ValueError, match="in use by another process"):
        train(quickstart(*SMALL), tmp_path, False, ignore)


def test_what_cannot_start_leaves_no_directory(tmp_path: Path) -> None:
    config = quickstart(*SMALL, "sandbox.url=http://127.0.0.1:9")
    with pytest.raises(ValueError, match="no tool server answers"):
        train(config, tmp_path / "run", False, ignore)
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="there is no run at"):
        newest_checkpoint(tmp_path / "run")


def test_a_short_run_learns_and_records_what_it_did(tmp_path: Path) -> None:
    config = quickstart("num_steps=10", "eval.num_prompts=64", "eval.every=10")
    rows: list[dict[str, Any]] = []
    train(config, tmp_path, False, rows.append)
    assert [row["step"] for row in read_metrics(tmp_path)] == list(range(11))
    assert all(set(METRIC_KEYS) <= row.keys() for row in read_metrics(tmp_path))
    assert all(row["publish_s"] > 0 and row["update_weights_s"] > 0 for row in rows[:-1])
    assert rows[-1]["eval_avg"] > rows[0]["eval_avg"] + 0.15
    assert rows[0]["mismatch_mean_abs"] < 1e-5 < rows[5]["mismatch_mean_abs"]
    table = tables.per_turn(tmp_path)
    assert table["turn"].to_list()[0] == "0"
    assert table["turn"].to_list()[-1] == "all"
    sampled = tables.read_rollout_facts(tmp_path)["num_sampled"].sum()
    assert table.filter(pl.col("turn") == "all")["n"].item() == sampled
    run_picture(tmp_path, read_metrics(tmp_path), tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def test_sat_fires_at_top_p_below_1_and_the_mismatch_splits(tmp_path: Path) -> None:
    """Tokens that were the only one kept have d = 0 by construction; counting them would set q to 0."""
    sat = ("objective.clip.tokens=supported", "rollout.sampling.top_p=0.9")
    config = quickstart("num_steps=3", "eval.every=0", "trainer.proximal.every=1", *sat)
    rows: list[dict[str, Any]] = []
    train(config, tmp_path, False, rows.append)
    for row in rows[1:]:
        assert row["gate_rate"] > 0.01
        assert row["q_supported"] > row["q_all"]
        assert row["q_zero"] == 0
    table = tables.per_turn(tmp_path, first_step=1).filter(pl.col("turn") == "all")
    assert table["implementation"].item() < 1e-5 < table["policy_lag"].item()
    assert 1 <= table["kept_size"].item() < 20


def kill_while_busy(server: ToolServer) -> None:
    """Kill the server once it has run a few calls."""
    with httpx.Client() as client:
        while client.get(f"{server.url}/health").json()["execs"] < 3:
            time.sleep(0.02)
    server.process.kill()


def test_a_tool_server_that_dies_is_restarted_and_its_episodes_are_reissued(tmp_path: Path) -> None:
    config = quickstart("num_steps=3", "batch.num_prompts=8", "eval.every=0", "rollout.max_attempts=5")
    with ToolServer(config.sandbox) as server:
        stages = start_stages(config, build_prompts(config), server, waves=False)
        killer = threading.Thread(target=kill_while_busy, args=(server,))
        schedule = Schedule(prefetch=1, broadcast_interval=1)
        load_weights(stages, None, 0, served=0)
        directory = RunDirectory(tmp_path, config)
        killer.start()
        BatchController(config, schedule, stages, directory, ignore).run()
        assert server.num_restarts == 1
        stages.close()
    counts = directory.ledger.counts()
    assert counts["episodes_reissued"] > 0
    assert counts["issued"] == counts["trained"] + counts["dropped"] == 24
    assert (tables.read_rollout_facts(tmp_path)["attempt"] > 0).sum() > 0


def test_a_tool_server_that_stays_away_stops_the_run_with_its_name(tmp_path: Path) -> None:
    with ToolServer(SandboxConfig()) as server:
        config = quickstart(*SMALL, f"sandbox.url={server.url}", "sandbox.patience_s=1", "num_steps=2")
        threading.Thread(target=kill_while_busy, args=(server,)).start()
        with pytest.raises(SandboxError, match=server.url):
            train(config, tmp_path, False, ignore)


def test_ctrl_c_on_the_command_line_says_how_to_continue(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "agent_rl.cli", "train", str(QUICKSTART), *SMALL, "--run", str(tmp_path / "run")]
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if line.startswith("step 1 "):
                os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to everyone
    assert process.returncode == 0
    assert f"continue with: agent-rl train --resume {tmp_path / 'run'}" in lines[-1]
    assert RunState.load(newest_checkpoint(tmp_path / "run")).step >= 2


def test_groups_without_spread_are_replaced_at_the_promised_lag_and_resumed(tmp_path: Path) -> None:
    more = ("batch.max_replacements=6", "batch.group_size=4", "pipeline.exact_lag=2", "num_steps=4")
    config = quickstart(*SMALL, *more)
    train(config.model_copy(update={"num_steps": 3}), tmp_path, False, ignore)
    assert train(config, tmp_path, True, ignore).complete
    # Nothing was queued at the end of the first run, so its last weights sampled the fourth batch.
    assert recorded_lags(tmp_path) == [(0, 0, 0), (1, 1, 1), (2, 2, 2), (3, 0, 0)]
    facts = tables.read_rollout_facts(tmp_path)
    outcome = pl.col("reward_parts").str.json_decode(pl.Struct({"outcome": pl.Float64})).struct.field("outcome")
    spread = facts.group_by("batch", "group_id").agg(outcome.n_unique().alias("values"))
    trained = pl.read_parquet(tmp_path / "training_facts.parquet" / "*.parquet").filter(pl.col("fate") == "trained")
    kept = spread.filter(pl.col("group_id").is_in(trained["group_id"].to_list()))
    assert kept.height == trained["group_id"].n_unique() <= 8
    counts = read_metrics(tmp_path)[-1]
    assert counts["groups/issued"] == counts["groups/trained"] + counts["groups/dropped"] == spread.height
    assert counts["groups/dropped/no_spread"] == spread.height - kept.height > 0
    assert sorted(spread["group_id"].to_list()) == list(range(spread.height)), "the stream has no gap and no repeat"
    per_batch = kept.group_by("batch").agg((pl.col("values") > 1).all().alias("all_spread"), pl.len().alias("groups"))
    assert (per_batch["groups"] <= 2).all()
    sampled = spread.group_by("batch").len()
    short = per_batch.filter(~pl.col("all_spread")).join(sampled, on="batch")
    assert (short["len"] == 8).all(), "a group without spread is trained on only where no prompt gave one"


def test_evaluation_beside_training_is_of_a_named_version_and_compares(tmp_path: Path) -> None:
    run = tmp_path / "run"
    held_out = ("eval.every=1", "eval.num_prompts=6", "eval.num_samples=2", "eval.sampling.temperature=0.5")
    config = quickstart(*SMALL, *held_out, "pipeline.exact_lag=1", "num_steps=2")
    train(config, run, False, ignore)
    assert recorded_lags(run) == [(0, 0, 0), (1, 1, 1)]
    rows = pl.read_parquet(run / "evaluations.parquet" / "*.parquet")
    assert rows.group_by("policy_version").len().sort("policy_version").rows() == [(0, 12), (1, 12), (2, 12)]
    assert [row["eval_policy_version"] for row in read_metrics(run)] == [0, 1, 2]
    again = CliRunner().invoke(app, ["eval", str(run)])
    assert again.exit_code == 0, again.output
    last = rows.filter(pl.col("policy_version") == 2)
    found = pl.read_parquet(run / "evaluations" / "step-000002" / "results.parquet")
    assert found["outcome"].to_list() == last["outcome"].to_list(), "the same weights, seeds and sampler"
    model = ["eval", str(TINY), "--config", str(run / "config.yaml"), "--output", str(tmp_path / "first")]
    assert CliRunner().invoke(app, model).exit_code == 0
    compared = CliRunner().invoke(app, ["compare", str(tmp_path / "first"), str(run / "evaluations" / "step-000002")])
    assert compared.exit_code == 0, compared.output
    assert "pass@2" in compared.output
