"""What a sweep does without running a cell: bad files, cells that others run, signals."""

import signal
from pathlib import Path

import pytest
import yaml

from agent_rl.pipeline.run_directory import lock
from agent_rl.sweep.run import interrupted_by
from tests.configs import QUICKSTART
from tests.sweep.cli import SMALL, sweep


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
    own = signal.getsignal(signal.SIGTERM)  # Ray's, where an earlier test has started it
    with pytest.raises(KeyboardInterrupt), interrupted_by(signal.SIGTERM):
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is own
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
