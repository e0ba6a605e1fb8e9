"""Fully asynchronous runs on a real Ray, engine, tool server and trainer: lag, fairness, drops, resuming."""

import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from agent_rl.config import RunConfig
from agent_rl.jsonl import read_jsonl
from agent_rl.pipeline.continuous import OVERDUE, ContinuousController
from agent_rl.pipeline.ledger import Ledger
from agent_rl.pipeline.pacing import Pacing
from agent_rl.pipeline.run_directory import RunDirectory, read_metrics
from agent_rl.run import build_prompts, local_ray, serve_initial_weights, start_stages, train
from agent_rl.tool_server import ToolServer
from tests.configs import quickstart
from tests.parts import TwoSpeedMath
from tests.whole_runs import per_turn, rollout_facts

SMALL = ("batch.num_prompts=2", "batch.group_size=2", "eval.every=0", "checkpoint.every=0", "pipeline.type=fully_async")
SLOW_TOOL = ("rollout.tools=[{type: tests.parts.SlowPython}]", "rollout.num_workers=2")
TWO_SPEEDS = ("prompts.max_steps=2", "reward.type=tests.parts.TwoSpeedMath")
NEVER = "reward.delay_s=86400"


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with local_ray(3):
        yield


def lags_by_step(path: Path) -> dict[int, set[int]]:
    """The lags of the sampled tokens of each trained batch, from the facts alone."""
    facts = rollout_facts(path)
    trained = pl.read_parquet(path / "training_facts.parquet" / "*.parquet").filter(pl.col("fate") == "trained")
    joined = trained.join(facts, on="episode_id").explode("policy_versions").filter(pl.col("policy_versions") >= 0)
    lag = joined.select("step", lag=pl.col("step") - pl.col("policy_versions"))
    return {step: set(part["lag"].to_list()) for (step,), part in lag.group_by("step")}


def num_mixed(path: Path) -> int:
    """Trajectories with tokens of several versions."""
    facts = rollout_facts(path)
    return facts.filter(pl.col("min_policy_version") < pl.col("max_policy_version")).height


def check_fates(path: Path) -> Ledger:
    """Every group is trained once, and only whole: what the ledger says is what the tables hold."""
    ledger = Ledger(path / "ledger.jsonl")
    trained = pl.read_parquet(path / "training_facts.parquet" / "*.parquet").filter(pl.col("fate") == "trained")
    assert trained["episode_id"].is_unique().all()
    assert Counter(trained["group_id"].to_list()) == dict.fromkeys(ledger.trained, 2)
    assert ledger.issued == ledger.trained | ledger.dropped.keys() | ledger.in_flight
    orders = trained.sort("step", "order").group_by("step", maintain_order=True).agg("episode_id")
    assert all(ids == sorted(ids) for ids in orders["episode_id"].to_list()), "the order is by group, not by arrival"
    return ledger


def stop_at(step: int) -> Any:
    def on_row(row: dict[str, Any]) -> None:
        if row["step"] == step:
            signal.raise_signal(signal.SIGINT)

    return on_row


def test_no_trained_token_exceeds_max_lag(tmp_path: Path) -> None:
    config = quickstart(*SMALL, "rollout.num_workers=2")
    with ToolServer(config.sandbox) as server:
        stages = start_stages(config, build_prompts(config), server, waves=False)
        for max_lag in range(5):
            num_steps, path = max_lag + 3, tmp_path / str(max_lag)
            serve_initial_weights(stages, None, 0, served=0)
            directory = RunDirectory(path, config.model_copy(update={"num_steps": num_steps}))
            pacing = Pacing(2, max_lag, (max_lag + 1) * 2, num_steps, wait=True)
            own = config.model_copy(update={"num_steps": num_steps})
            ContinuousController(own, pacing, stages, directory, lambda row: None).run()
            directory.close()
            lags = lags_by_step(path)
            assert all(0 <= lag <= max_lag for found in lags.values() for lag in found)
            assert lags.keys() == set(range(num_steps))
            assert len(check_fates(path).trained) == 2 * num_steps
        stages.close()


def cohort(path: Path, max_lag: int, steps: int) -> tuple[set[int], set[int]]:
    """The groups whose last step is over: those issued, and those trained."""
    ledger = Ledger(path / "ledger.jsonl")
    events = [e for e in read_jsonl(path / "ledger.jsonl") if e["event"] == "issued" and e["step"] + max_lag < steps]
    issued = {group for event in events for group in event["group_ids"]}
    return issued, issued & ledger.trained


def test_waiting_keeps_slow_prompts_and_dropping_counts_them(tmp_path: Path) -> None:
    """Where slow groups never end and are dropped, a step has just the two others that there are to train on: none of
    these is late, whatever the pace."""
    steps, max_lag = 6, 1
    base = (*SMALL, *TWO_SPEEDS, "num_steps=50", "trainer.proximal.every=1", f"pipeline.max_lag={max_lag}")
    wait, drop = tmp_path / "wait", tmp_path / "drop"
    train(quickstart(*base, *SLOW_TOOL), wait, False, stop_at(steps - 1))
    issued, trained = cohort(wait, max_lag, steps)
    assert issued == trained, "a group that was issued is trained, however slow it is"
    assert {TwoSpeedMath.is_slow(group) for group in issued} == {True, False}
    assert not check_fates(wait).dropped
    dropping = ("pipeline.overdue=drop", "pipeline.update=abort", "batch.num_prompts=2")
    train(quickstart(*base, *SLOW_TOOL, *dropping, NEVER), drop, False, stop_at(steps - 1))
    issued, trained = cohort(drop, max_lag, steps)
    assert trained == {group for group in issued if not TwoSpeedMath.is_slow(group)}
    assert trained < issued
    ledger = check_fates(drop)
    assert set(ledger.dropped.values()) == {OVERDUE}
    assert read_metrics(drop)[-1]["groups/dropped/overdue"] == len(ledger.dropped) > 0
    for path in (wait, drop):
        assert all(max(lags) <= max_lag for lags in lags_by_step(path).values())


def test_a_resumed_run_keeps_its_queue_and_issues_the_rest_again(tmp_path: Path) -> None:
    more = ("pipeline.max_lag=3", "pipeline.update=drain", "trainer.proximal.every=1", "num_steps=6")
    config = quickstart(*SMALL, *SLOW_TOOL, *more)
    assert train(config, tmp_path, False, stop_at(2)).step == 3
    before = Ledger(tmp_path / "ledger.jsonl")
    assert len(before.in_flight) > 0
    assert train(config, tmp_path, True, lambda row: None).complete
    ledger = check_fates(tmp_path)
    assert ledger.trained == set(range(12)), "the stream has no gap and no repeat"
    assert before.trained <= ledger.trained
    assert not ledger.in_flight
    assert [row["step"] for row in read_metrics(tmp_path)] == list(range(6))
    assert all(max(lags) <= 3 for lags in lags_by_step(tmp_path).values())
    assert num_mixed(tmp_path) > 0, "some responses have several versions, or this test shows nothing"
    split = per_turn(tmp_path, first_step=1).filter(pl.col("turn") == "all")
    assert np.isfinite(split["policy_lag"].item())
    assert split["implementation"].item() < 1e-4, "each token is recomputed at its own version"


def test_a_stop_is_heard_while_a_step_waits_for_groups_that_do_not_come(tmp_path: Path) -> None:
    """Nothing is trained since the start, so nothing is to be saved and the step need not be made."""
    gated = f"reward={{type: tests.parts.GatedMath, gate: {tmp_path / 'never'}}}"
    run, ended, before = tmp_path / "run", threading.Event(), signal.getsignal(signal.SIGINT)

    def waits() -> bool:
        """The run has its own handler of the signal, and has issued what it waits for."""
        issued = (run / "ledger.jsonl").exists() and Ledger(run / "ledger.jsonl").issued
        return bool(issued) and signal.getsignal(signal.SIGINT) is not before

    def interrupt_once_it_waits() -> None:
        while not ended.wait(0.1):
            if waits():
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                return

    thread = threading.Thread(target=interrupt_once_it_waits, daemon=True)
    thread.start()
    try:
        outcome = train(quickstart(*SMALL, "prompts.min_steps=2", gated), run, False, print)
    finally:
        ended.set()
        thread.join()
    assert (outcome.step, outcome.complete) == (0, False)
    assert Ledger(run / "ledger.jsonl").in_flight


def test_too_small_a_bound_is_said_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"pipeline.max_groups is 1, but a step takes"):
        train(quickstart(*SMALL, "pipeline.max_groups=1"), tmp_path, False, lambda row: None)


def test_a_slow_trainer_pauses_admission(tmp_path: Path) -> None:
    """Nothing takes groups but the trainer, so those in flight and queued never exceed the bound."""
    config: RunConfig = quickstart(*SMALL, "pipeline.max_lag=4", "pipeline.max_groups=3", "num_steps=4")
    rows: list[dict[str, Any]] = []
    train(config, tmp_path, False, rows.append)
    assert all(row["num_queued"] + row["num_sampling"] <= 3 for row in rows)
    assert len(check_fates(tmp_path).trained) == 8
