"""A sweep for real: finished cells are kept, a failed one is reported and the rest goes on."""

import signal
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from agent_rl.cli import app
from agent_rl.pipeline.run_directory import lock
from agent_rl.sweep.run import interrupted_by
from tests.configs import QUICKSTART

SMALL = {"num_steps": 1, "batch.num_prompts": 2, "batch.group_size": 2, "eval.num_prompts": 4, "checkpoint.every": 0}


def sweep(path: Path, out: Path, *flags: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["sweep", str(path), "--out", str(out), *flags])
    return result.exit_code, " ".join(result.output.split())


def test_a_failed_cell_is_reported_and_a_finished_one_is_kept(tmp_path: Path) -> None:
    path, out = tmp_path / "tiny.yaml", tmp_path / "out"
    lost = {"set": {"prompts": {"type": "jsonl", "path": str(tmp_path / "absent.jsonl")}}}
    keys = {"base": str(QUICKSTART), "set": SMALL, "seeds": [0], "arms": {"lost": lost, "good": {}}}
    path.write_text(yaml.safe_dump({**keys, "baseline": "good"}))
    assert sweep(path, out, "--table") == (0, "none of the 2 runs of tiny is finished")
    code, said = sweep(path, out, "--jobs", "2")
    assert code == 1
    assert "failed: lost seed 0: exit code 2" in said
    assert "1 of 2: lost seed 0 failed 2 of 2: good seed 0 done" in said  # as they ended, where there is no terminal
    assert "1 of 2 runs finished" in said
    written = (out / "good" / "seed-0" / "metrics.jsonl").stat().st_mtime_ns
    for name in ("runs.csv", "summary.csv", "sweep.png", "report.html"):
        assert (out / name).stat().st_size > 0
    code, said = sweep(path, out)
    assert (code, "1 of 2 runs finished" in said) == (1, True)
    assert (out / "good" / "seed-0" / "metrics.jsonl").stat().st_mtime_ns == written

    path.write_text(yaml.safe_dump({**keys, "set": {**SMALL, "batch.group_size": 4}}))
    code, said = sweep(path, out)
    assert (code, "was run with another batch than the sweep now says" in said) == (2, True)


def test_a_cell_that_another_process_runs_is_left_alone(tmp_path: Path) -> None:
    path, out = tmp_path / "tiny.yaml", tmp_path / "out"
    path.write_text(yaml.safe_dump({"base": str(QUICKSTART), "set": SMALL, "seeds": [0], "arms": {"good": {}}}))
    theirs = out / "good" / "seed-0"
    with lock(theirs):
        (theirs / "metrics.jsonl").write_text("")
        code, said = sweep(path, out)
        assert (theirs / "metrics.jsonl").is_file()
    assert code == 1
    assert "failed: good seed 0:" in said
    assert "is in use by another process" in said


def test_a_terminated_sweep_stops_as_an_interrupted_one() -> None:
    with pytest.raises(KeyboardInterrupt), interrupted_by(signal.SIGTERM):
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interrupted_by(signal.SIGHUP):
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("seeds: [0]", "base is missing"), ("base: absent.yaml\nseeds: [0]", "no config file at"), (None, "no config")],
)
def test_bad_files_get_a_sentence(text: str | None, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    if text is not None:
        path.write_text(text)
    code, said = sweep(path, tmp_path / "out")
    assert code == 2
    assert sentence in said
