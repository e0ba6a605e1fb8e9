"""Kill -9 of every process of a run, in the middle of it: nothing is lost and nothing is trained twice."""

import contextlib
import errno
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from safetensors.torch import load_file

from agent_rl.config import RunConfig
from agent_rl.pipeline.ledger import Ledger
from agent_rl.pipeline.run_directory import list_checkpoints, read_metrics
from agent_rl.run import local_ray, newest_checkpoint, train
from tests.configs import QUICKSTART, quickstart
from tests.disks import small_disk
from tests.processes import descendants, kill_later, kill_one

SMALL = ("batch.num_prompts=2", "batch.group_size=2", "eval.every=0", "checkpoint.every=2", "num_steps=6")
ASYNC = ("pipeline.type=fully_async", "pipeline.max_lag=2", "rollout.num_workers=2", "rollout.max_attempts=9")
SLOW = "rollout.tools=[{type: tests.parts.SlowPython}]"


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with local_ray(3):
        yield


def check_lineage(path: Path, config: RunConfig) -> Ledger:
    """All steps are there, every group is trained once and in whole, and the stream has no gap."""
    ledger = Ledger(path / "ledger.jsonl")
    num_groups = config.num_steps * config.batch.num_prompts
    assert not ledger.in_flight
    assert not ledger.dropped
    assert ledger.trained == set(range(num_groups))
    trained = pl.read_parquet(path / "training_facts.parquet" / "*.parquet")
    assert sorted(trained["episode_id"]) == list(range(num_groups * config.batch.group_size))
    rollouts = pl.read_parquet(path / "rollout_facts.parquet" / "*.parquet")
    assert sorted(rollouts["episode_id"]) == sorted(trained["episode_id"])
    assert [row["step"] for row in read_metrics(path)] == list(range(config.num_steps))
    return ledger


def same_weights(a: Path, b: Path) -> bool:
    first, second = (load_file(newest_checkpoint(path) / "model.safetensors") for path in (a, b))
    return all(torch.equal(first[name], second[name]) for name in first)


def test_worker_tool_server_and_trainer_die_and_the_run_goes_on(
    cluster: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = quickstart(*SMALL, *ASYNC, SLOW)
    victims = {0: "ray::RolloutWorker", 1: "sandbox.server", 3: "ray::TrainWorker", 4: "ray::RolloutWorker"}
    steps = []

    def kill_after(row: dict[str, Any]) -> None:
        steps.append(row["step"])
        if victim := victims.pop(row["step"], None):
            kill_one(victim)

    assert train(config, tmp_path, False, kill_after).complete
    assert not victims
    assert steps == [0, 1, 2, 3, 2, 3, 4, 5], "the trainer died after step 3, the checkpoint is of step 2"
    assert check_lineage(tmp_path, config).num_reissued > 0
    said = capfd.readouterr().err
    assert re.search(r"rollout worker \d died", said)
    assert "the trainer died; all of the run goes back to step-000002" in said


def test_a_sync_run_reaches_the_same_bits_although_its_worker_and_its_trainer_die(
    cluster: None, tmp_path: Path
) -> None:
    config = quickstart(*SMALL, "pipeline.type=sync", "num_steps=3", "checkpoint.every=1")
    victims = {0: "ray::RolloutWorker", 1: "ray::TrainWorker"}

    def kill_after(row: dict[str, Any]) -> None:
        if victim := victims.pop(row["step"], None):
            kill_one(victim)

    calm, chaotic = tmp_path / "calm", tmp_path / "chaotic"
    train(config, calm, False, lambda row: None)
    train(config, chaotic, False, kill_after)
    assert not victims
    check_lineage(chaotic, config)
    assert same_weights(calm, chaotic)


def test_a_trainer_that_dies_at_any_moment_costs_no_step(
    cluster: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Killed a random part of a step and a half, at this machine's pace, after the second step of six; at the latest
    after the fifth."""
    config = quickstart(*SMALL, "pipeline.type=sync", "checkpoint.every=1")
    kills: list[Callable[[], None]] = []

    def kill_soon(row: dict[str, Any]) -> None:
        if row["step"] == 1 and not kills:
            delay_s = random.Random(20).uniform(0.0, 1.5 * row["wall_s"])
            kills.append(kill_later("ray::TrainWorker", delay_s))
        elif row["step"] == 4:
            kills[0]()

    assert train(config, tmp_path, False, kill_soon).complete
    assert "the trainer died; all of the run goes back to step-00000" in capfd.readouterr().err
    ledger = check_lineage(tmp_path, config)
    assert ledger.issued == ledger.trained == set(range(12))


def start_driver(path: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "agent_rl.cli", "train", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(QUICKSTART.parent.parent)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True)


def test_the_driver_is_killed_and_resumed_and_leaves_nothing_behind(tmp_path: Path) -> None:
    run, config = tmp_path / "run", quickstart(*SMALL, *ASYNC, SLOW)
    driver = start_driver(run, str(QUICKSTART), *SMALL, *ASYNC, SLOW, "--run", str(run))
    assert driver.stdout is not None
    for line in driver.stdout:
        if line.startswith("step 3 "):
            break
    driver.send_signal(signal.SIGSTOP)  # so that it is still at that step when it is killed
    below = descendants(driver.pid)
    assert any("sandbox.server" in command for command in below.values())
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait()
    driver.stdout.close()
    wait_until_gone(below)
    assert list_checkpoints(run)[-1].name in ("step-000002", "step-000004")
    with (run / "ledger.jsonl").open("a") as file:
        file.write('{"event": "issued", "step": 4, "gro')  # as if killed in the middle of a line
    (run / "checkpoints" / "step-000009.tmp").mkdir()
    memory = set(weight_folders())
    with start_driver(run, "--resume", str(run)) as again:
        output = again.communicate()[0]
    assert again.returncode == 0, output
    check_lineage(run, config)
    assert not (run / "checkpoints" / "step-000009.tmp").exists()
    assert not [folder for folder in memory & set(weight_folders()) if f"-{driver.pid}-" in folder.name]


def weight_folders() -> list[Path]:
    return [folder for root in ("/dev/shm", "/tmp") for folder in Path(root).glob("agent-rl-weights-*")]


def wait_until_gone(processes: dict[int, str]) -> None:
    """Ray's own agents are left out: they notice the end of their node by a timeout of a minute."""
    deadline = time.monotonic() + 300
    ours = {pid: command for pid, command in processes.items() if "Agent" not in command}
    while left := {pid: command for pid, command in ours.items() if alive(pid)}:
        assert time.monotonic() < deadline, f"processes of a killed run live on: {left}"
        time.sleep(0.2)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_full_disk_stops_a_run_that_can_be_resumed(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "14m") as disk:
        run, config = disk / "run", quickstart(*SMALL, "pipeline.type=sync", "checkpoint.keep=9", "checkpoint.every=1")
        options = (*SMALL, "pipeline.type=sync", "checkpoint.keep=9", "checkpoint.every=1")
        command = [sys.executable, "-m", "agent_rl.cli", "train", str(QUICKSTART), *options, "--run", str(run)]
        full = subprocess.run(command, capture_output=True, text=True)
        assert full.returncode == 2, full.stdout + full.stderr
        assert "Traceback" not in full.stderr
        assert f"continue with: agent-rl train --resume {run}" in full.stderr
        subprocess.run(["mount", "-o", "remount,size=200m", disk], check=True)
        again = [sys.executable, "-m", "agent_rl.cli", "train", "--resume", str(run)]
        assert subprocess.run(again, capture_output=True).returncode == 0
        check_lineage(run, config)


def test_a_disk_that_fills_up_between_checkpoints_costs_nothing_that_was_recorded(
    cluster: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Tables, metrics and ledger find no room; nor does the resumed run, which leaves all as it was."""
    config = quickstart(*SMALL, "pipeline.type=sync", "checkpoint.keep=1")
    with small_disk(tmp_path / "disk", "24m") as disk:

        def fill(row: dict[str, Any]) -> None:
            if row["step"] == 2:
                with contextlib.suppress(OSError):
                    (disk / "filling").write_bytes(bytes(1 << 25))

        for resume in (False, True):
            with pytest.raises(OSError, match="No space left") as full:
                train(config, disk / "run", resume, fill)
            assert full.value.errno == errno.ENOSPC
            assert "Traceback" not in capfd.readouterr().err
        (disk / "filling").unlink()
        assert train(config, disk / "run", True, lambda row: None).complete
        check_lineage(disk / "run", config)
