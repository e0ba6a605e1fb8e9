"""Recorded tool calls made again on a real tool server: what moved, what is flaky, what counts."""

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from agent_rl.cli import app
from agent_rl.pipeline.run_directory import RunDirectory
from agent_rl.records import Episode, Prompt, ToolCall, Turn
from agent_rl.tool_audit import audit_tools
from tests.configs import quickstart
from tests.trajectories import completion, random_trajectory
from tools.base import ToolResult

RANDOM = "import random; print(random.SystemRandom().random())"
SAME = [("x = 20", "(no output; use print)"), ("print(x + 1)", "21")]
MOVED = [("print(2)", "3"), ("print(4)", "5")]
"""Recorded with a tool that answers one more; after the first difference the history is another one."""
FLAKY = [("print(7)", "7"), (RANDOM, "0.5")]


def write(path: Path, url: str, *episodes: list[tuple[str, str]]) -> None:
    """A run whose episodes made these calls, a turn each, and read these answers; the last turn calls nothing."""
    rng = np.random.default_rng(0)
    ids = np.array([1], np.int32)
    done = []
    for i, calls in enumerate(episodes):
        turns = [
            Turn(
                k, ids, completion(rng, ids, False, 0), (ToolCall("python", {"code": code}),), (ToolResult(out, True),)
            )
            for k, (code, out) in enumerate(calls)
        ]
        last = Turn(len(calls), ids, completion(rng, ids, False, 0))
        prompt = Prompt(i, ({"role": "user", "content": "1"},), "1")
        done.append(Episode(prompt, (*turns, last), random_trajectory(rng, i)))
    directory = RunDirectory(path, quickstart(f"sandbox.url={url}"))
    directory.write_rollouts(0, done)
    directory.close()


def test_differences_by_turn(tool_server: str, tmp_path: Path) -> None:
    write(tmp_path, tool_server, SAME, MOVED, FLAKY, [], SAME)
    table = audit_tools(tmp_path)
    assert table["turn"].to_list() == ["0", "1", "all"]
    assert table["calls"].to_list() == [4, 3, 7]
    assert table["differ"].to_list() == [1, 1, 2]
    assert table["rate"].to_list() == pytest.approx([1 / 4, 1 / 3, 2 / 7])
    assert table["flaky"].to_list() == pytest.approx([0, 1 / 4, 1 / 8])  # the moved one answers alike twice
    assert table["environment"].to_list() == pytest.approx([1 / 5, 1 / 5, 2 / 5])


def test_the_command_chooses_evenly_and_says_what_is_missing(tool_server: str, tmp_path: Path) -> None:
    write(tmp_path, tool_server, SAME, [], MOVED, [])
    result = CliRunner().invoke(app, ["audit-tools", str(tmp_path), "--episodes", "2"])
    assert result.exit_code == 0, result.output
    assert [line.split()[:3] for line in result.output.splitlines() if line.strip().startswith(("0 ", "1 "))] == [
        ["0", "2", "1"],
        ["1", "1", "0"],
    ]
    write(tmp_path / "silent", tool_server, [], [])
    with pytest.raises(ValueError, match="called a tool; raise --episodes"):
        audit_tools(tmp_path / "silent")
    with pytest.raises(ValueError, match="no run at"):
        audit_tools(tmp_path / "absent")


def test_a_call_that_was_not_made_is_not_made_again(tool_server: str, tmp_path: Path) -> None:
    refused = [("print(1)", "Error: only 8 calls a turn are made"), ("print(2)", "Error: the episode's time is over")]
    write(tmp_path, tool_server, SAME, refused)
    assert audit_tools(tmp_path)["differ"].to_list() == [0, 0, 0]
