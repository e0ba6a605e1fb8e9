"""Runs that are still writing, were cut off, or are none: read as far as they go, or named in one sentence."""

import json
from pathlib import Path

import polars as pl
import pytest
from typer.testing import CliRunner

from agent_rl import facts
from agent_rl.analysis.recorded import RecordedRun, find_runs, open_runs
from agent_rl.cli import app
from agent_rl.pipeline.run_directory import lock


def test_a_line_cut_in_the_middle_waits_for_its_rest(run: Path) -> None:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0] + lines[1][:40])
    reader = RecordedRun(run)
    assert [row["step"] for row in reader.metrics()] == [0]
    with path.open("a") as file:
        file.write(lines[1][40:] + lines[2])
    assert [row["step"] for row in reader.metrics()] == [0, 1, 2]
    assert reader.metrics() == [json.loads(line) for line in lines[:3]]


def test_a_resumed_run_cuts_its_metrics_back(run: Path) -> None:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    reader = RecordedRun(run)
    assert len(reader.metrics()) == 5
    path.write_text(lines[0])
    assert [row["step"] for row in reader.metrics()] == [0]
    # Cut back and written on to more than its old length between two reads: other lines, not a mixture.
    longer = [lines[0], *(line.replace('"loss":', '"other":') for line in lines[1:])] * 2
    path.write_text("".join(longer))
    assert reader.metrics() == [json.loads(line) for line in longer]
    path.unlink()
    assert reader.metrics() == []


def test_a_broken_line_is_passed_over(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write('\0\0\0\n{"loss": 1}\n[1]\n{"step": 9}\n')
    assert [row["step"] for row in RecordedRun(run).metrics()] == [0, 1, 2, 3, 4, 9]


def test_parts_that_cannot_be_read_are_left_out_until_they_can(run: Path) -> None:
    reader = RecordedRun(run)
    whole = reader.mismatch()
    part = run / "mismatch.parquet" / "part-000002.parquet"
    data = part.read_bytes()
    part.write_bytes(data[: len(data) // 2])
    (run / "mismatch.parquet" / "part-000009.tmp").write_bytes(data)
    assert sorted(reader.mismatch()["step"].unique()) == [0, 1, 3]
    assert reader.mismatch_parts.num_unreadable == 1
    part.write_bytes(data)
    assert reader.mismatch().equals(whole)
    part.unlink()
    assert sorted(reader.mismatch()["step"].unique()) == [0, 1, 3]


def test_status_follows_the_lock_and_the_steps(run: Path) -> None:
    assert RecordedRun(run).status() == "finished"
    with lock(run):
        assert RecordedRun(run).status() == "running"
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:2]))
    assert RecordedRun(run).status() == "interrupted"


def test_an_interrupted_run_reads(run: Path) -> None:
    for table in ("mismatch.parquet", "training_facts.parquet"):
        (run / table / "part-000003.parquet").unlink()
    result = CliRunner().invoke(app, ["analyze", str(run), "--table", "all"])
    assert result.exit_code == 0, result.output
    assert "by turn" in result.output


def test_runs_get_names_that_differ(recorded: Path, run: Path, tmp_path: Path) -> None:
    assert [r.name for r in open_runs([recorded, run])] == ["short", "run"]
    other = tmp_path / "second" / "run"
    other.parent.mkdir()
    run.rename(other)
    (tmp_path / "first").mkdir()
    facts.write_part(
        tmp_path / "first" / "run" / "mismatch.parquet",
        0,
        [{"step": 0, "part": "total", "scope": "all", "turn": -1, "n": 1, "mean_abs_d": 0.1}],
    )
    assert [r.name for r in open_runs([tmp_path / "first" / "run", other])] == ["first/run", "second/run"]
    with pytest.raises(ValueError, match="named twice"):
        open_runs([other, other])


def mistakes(run: Path, empty: Path, alien: Path) -> list[tuple[list[str], str]]:
    return [
        (["analyze", "absent"], "no mismatch.parquet in 'absent'"),
        (["analyze", str(run), str(empty)], "has no recorded step yet"),
        (["analyze", str(run), str(alien)], "was recorded by another version of agent-rl"),
        (["analyze", str(run), "--table", "turm"], "there is no table 'turm'"),
        (["analyze", str(run), str(run)], "named twice"),
        (["analyze", str(run), "--csv", "absent/a.csv"], "absent/a.csv"),
        (["report", str(empty)], "has no recorded step yet"),
        (["report", "absent"], "no mismatch.parquet in 'absent'"),
        (["report", str(run), "--output", "absent/a.html"], "absent/a.html"),
        (["dashboard", "absent"], "there is no directory 'absent'"),
        (["dashboard", str(run)], "is a run itself"),
    ]


def test_mistakes_get_one_sentence(run: Path, tmp_path: Path) -> None:
    empty, alien = tmp_path / "empty", tmp_path / "alien"
    empty.mkdir()
    (empty / "config.yaml").write_text((run / "config.yaml").read_text())
    facts.write_part(alien / "mismatch.parquet", 0, [{"step": "zero", "part": "total", "scope": "all"}])
    for arguments, sentence in mistakes(run, empty, alien):
        result = CliRunner().invoke(app, arguments)
        said = " ".join(result.output.split())
        assert (result.exit_code, sentence in said, "Traceback" in said) == (2, True, False), (arguments, said)


def test_parts_of_different_types_are_a_sentence(run: Path) -> None:
    part = run / "mismatch.parquet" / "part-000001.parquet"
    pl.read_parquet(part).with_columns(pl.lit([1]).alias("scope")).write_parquet(part)
    with pytest.raises(ValueError, match="disagree about their columns"):
        RecordedRun(run).mismatch()


def test_tables_are_exported_whole(run: Path, tmp_path: Path) -> None:
    csv, parquet = tmp_path / "a.csv", tmp_path / "a.parquet"
    arguments = ["analyze", str(run), "--table", "turn,clip", "--csv", str(csv), "--parquet", str(parquet)]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    found = pl.read_parquet(parquet)
    assert set(found["table"]) == {"turn", "clip"}
    assert set(found["part"].drop_nulls()) == {"total", "policy_lag", "implementation"}
    assert pl.read_csv(csv, infer_schema_length=None).height == found.height


def test_runs_are_found_and_links_are_not_followed(run: Path, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    (root / "sweep" / "lag").mkdir(parents=True)
    run.rename(root / "sweep" / "lag" / "seed-0")
    (root / "link").symlink_to(root / "sweep" / "lag" / "seed-0")
    assert set(find_runs(root)) == {"sweep/lag/seed-0"}
