"""A run that stands still says what it is stuck in: with a tool that hangs for real, and worker by worker."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from agent_rl.pipeline import watchdog, workers
from agent_rl.pipeline.watchdog import StalledError, standstill
from agent_rl.records import Prompt, ToolCall
from agent_rl.rollout.activity import EpisodeStatus, WorkerStatus
from agent_rl.rollout.episode import EpisodeTask
from agent_rl.run import local_ray, train
from tests.configs import quickstart
from tools.base import Tool, ToolResult


class HangingTool(Tool):
    class Config(BaseModel):
        type: Literal["tests.runs.test_watchdog.HangingTool"] = "tests.runs.test_watchdog.HangingTool"
        blocks_loop: bool = False
        called: Path

    name = "python"

    def __init__(self, config: Config, sandbox: Any) -> None:
        self.config = config

    async def call(self, code: str) -> ToolResult:
        """Never answers."""
        self.config.called.touch()
        if self.config.blocks_loop:
            time.sleep(3600)
        await asyncio.sleep(3600)
        return ToolResult("", ok=True)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """One Ray for both runs; each has two actors, and those of the first may outlive it."""
    with local_ray(4):
        yield


def hang(path: Path, monkeypatch: pytest.MonkeyPatch, blocks_loop: bool) -> str:
    """Run until the watchdog stops it; what it said.

    The watchdog's clock stands still until the tool is called, so that a slow start or a slow generation is no
    standstill; and whatever is to answer it has 20 s.
    """
    called = path.with_name("called")

    def clock() -> float:
        return time.time() - called.stat().st_mtime if called.exists() else 0.0

    def answer_of(ref: Any, seconds: float) -> Any:
        return workers.answer_of(ref, seconds if blocks_loop and called.exists() else 20.0)

    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=clock, time=time.time))
    monkeypatch.setattr(watchdog, "answer_of", answer_of)
    tool = f"{{type: tests.runs.test_watchdog.HangingTool, called: {called}, blocks_loop: {str(blocks_loop).lower()}}}"
    config = quickstart(
        *("num_steps=2", "batch.num_prompts=2", "batch.group_size=2", "eval.every=0", "pipeline={type: sync}"),
        *("watchdog={after_s: 4, policy: stop}",),
        f"rollout.tools=[{tool}]",
    )
    with pytest.raises(StalledError) as stalled:
        train(config, path, False, lambda row: None)
    return str(stalled.value)


def test_a_tool_that_hangs_is_named_and_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = hang(tmp_path / "run", monkeypatch, blocks_loop=False)
    assert said.startswith("no progress for ")
    assert "at step 0: the oldest episode is " in said
    assert "in turn 0" in said
    assert "tool call python({'code':" in said
    assert "on worker 0 (" in said
    assert "2 groups are in flight; the trainer has nothing to do; stacks of 3 processes" in said
    assert "watchdog.py" in (tmp_path / "run" / "stacks" / "driver.txt").read_text()
    assert (tmp_path / "run" / "stacks" / "worker-0.txt").read_text()


def test_a_worker_whose_loop_is_blocked_still_leaves_its_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "worker 0 does not answer" in hang(tmp_path / "run", monkeypatch, blocks_loop=True)
    assert "test_watchdog.py" in (tmp_path / "run" / "stacks" / "worker-0.txt").read_text()


def test_the_oldest_episode_of_all_workers_is_described() -> None:
    def status(episode: int, started: float, doing: str, turn: int) -> WorkerStatus:
        prompt = Prompt(7, ({"role": "user", "content": "?"},), "1")
        calls = (ToolCall("python", {"code": "x" * 500}),)
        return WorkerStatus(
            9, {doing: 1}, EpisodeStatus(EpisodeTask(prompt, 7, episode, 0), started, 20.0, doing, turn, calls)
        )

    said = standstill([status(3, 10.0, "tool", 2), status(4, 5.0, "queue", -1), None], now=30.0)
    assert said == (
        "worker 2 does not answer; the oldest episode is 4 of group 7, train, attempt 0, 25 s old, before its first "
        "turn, for 10 s in: waiting for a slot, on worker 1 (1 in queue)"
    )
    assert len(standstill([status(3, 10.0, "tool", 2)], 30.0)) < 400
    assert standstill([WorkerStatus(0, {}, None)], 30.0) == "no worker has an episode"
