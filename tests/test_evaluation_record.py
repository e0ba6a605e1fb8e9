"""Evaluations as directories, and two of them compared."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from agent_rl import evaluation_record as records
from agent_rl.cli import app
from agent_rl.commands.console import one_sentence_errors
from tests.configs import quickstart
from tests.disks import small_disk

RNG = np.random.default_rng(0)


def rows(outcomes: list[list[int]], first: int = 0) -> list[dict[str, Any]]:
    return [
        {"policy_version": 3, "problem": first + p, "sample": s, "messages": f"m{first + p}", "answer": "1"}
        | {"outcome": float(outcome), "final_answer": str(outcome)}
        for p, row in enumerate(outcomes)
        for s, outcome in enumerate(row)
    ]


def write(path: Path, outcomes: list[list[int]], *overrides: str, first: int = 0) -> records.EvaluationRecord:
    record = records.record_of(quickstart(*overrides), 3, rows(outcomes, first))
    records.write_record(path, record)
    return record


def test_a_record_reads_back_and_describes_itself(tmp_path: Path) -> None:
    written = write(tmp_path / "a", [[1, 0], [1, 1]], "eval.num_samples=2", "eval.sampling.temperature=0")
    read = records.read_record(tmp_path / "a")
    assert read.rows.equals(written.rows)
    assert read.settings == json.loads(json.dumps(written.settings))
    assert read.settings["sampling.temperature"] == 0
    described = json.loads((tmp_path / "a" / "evaluation.json").read_text())
    assert described["scores"][0]["name"] == "avg@2"
    assert described["scores"][0]["value"] == 0.75
    with pytest.raises(ValueError, match="no evaluation in"):
        records.read_record(tmp_path)


def test_paired_intervals_are_narrower_than_the_policies_spread(tmp_path: Path) -> None:
    """b solves what a solves and a little more: problems differ much, the policies do not."""
    easy = RNG.random(200) < 0.5
    more = easy | (RNG.random(200) < 0.1)
    a, b = (write(tmp_path / n, [[int(x)] for x in v]) for n, v in (("a", easy), ("b", more)))
    found = records.compare(a, b).row(0, named=True)
    assert found["difference"] == pytest.approx(more.mean() - easy.mean())
    assert 0 < found["low"] < found["difference"] < found["high"]
    assert found["high"] - found["low"] < 0.6 * (a.scores[0].high - a.scores[0].low)
    assert found["problems"] == 200


def test_only_shared_and_whole_problems_are_compared(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", [[1], [0], [1]]), write(tmp_path / "b", [[1], [1], [1]], first=1)
    assert records.compare(a, b)["problems"].to_list() == [2]
    assert records.compare(a, b)["difference"].to_list() == [0.5]
    with pytest.raises(ValueError, match="no problem in common"):
        records.compare(a, write(tmp_path / "c", [[1]], first=9))


def test_what_makes_evaluations_incomparable(tmp_path: Path) -> None:
    a = write(tmp_path / "a", [[1]])
    same = write(tmp_path / "b", [[0]], "rollout.num_workers=2", "num_steps=9", "trainer.learning_rate=1")
    other = write(tmp_path / "c", [[0]], "rollout.max_tool_turn=1", "eval.sampling.top_p=0.9")
    assert records.differing_settings(a, same) == {}
    assert records.differing_settings(a, other) == {"max_tool_turn": (6, 1), "sampling.top_p": (1.0, 0.9)}


def test_the_command_refuses_different_settings_unless_forced(tmp_path: Path) -> None:
    write(tmp_path / "a", [[1], [0]])
    write(tmp_path / "b", [[1], [1]], "seed=1")
    command = ["compare", str(tmp_path / "a"), str(tmp_path / "b")]
    refused = CliRunner().invoke(app, command)
    assert refused.exit_code == 2
    forced = CliRunner().invoke(app, [*command, "--force"])
    assert forced.exit_code == 0, forced.output
    assert "compared although these settings differ: seed" in forced.output
    assert "avg@1" in forced.output


def test_what_a_full_disk_has_no_room_for_leaves_nothing_and_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = records.record_of(quickstart(), 3, [row | {"messages": str(RNG.bytes(9000))} for row in rows([[1]] * 99)])
    with small_disk(tmp_path / "disk", "256k") as disk:
        with pytest.raises(typer.Exit) as ended, one_sentence_errors():
            records.write_record(disk / "evaluation", record)
        assert list(disk.iterdir()) == []
    assert ended.value.exit_code == 2
    assert f"is full, at {tmp_path}/disk/evaluation; free some space" in capsys.readouterr().err.replace("\n", "")
