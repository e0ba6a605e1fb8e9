"""The command line: what a user who gets it wrong reads, as one sentence and exit code 2."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from agent_rl.cli import app
from agent_rl.config import dump
from agent_rl.pipeline.state import RunState
from tests.configs import QUICKSTART, quickstart


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["train"], "give one config file"),
        (["train", "a.yaml", "num_steps", "4"], "these are neither: num_steps, 4"),
        (["train", "absent.yaml"], "no config file at 'absent.yaml'"),
        (["train", str(QUICKSTART), "num_step=4"], "did you mean 'num_steps'?"),
        (["train", str(QUICKSTART), "--method", "sat_gsp"], "unknown method 'sat_gsp'; did you mean"),
        (["train", "--resume", "absent"], "there is no run at 'absent'"),
        (["eval", "absent"], "there is nothing at 'absent'"),
        (["analyze", "absent"], "no mismatch.parquet in 'absent'"),
        (["warmstart", "absent.yaml"], "no config file at 'absent.yaml'"),
    ],
)
def test_mistakes_get_one_sentence(arguments: list[str], sentence: str) -> None:
    code, output = run(*arguments)
    assert code == 2
    assert sentence in output
    assert "Traceback" not in output
    assert len(output.strip().splitlines()) == 1


def test_a_run_that_is_done_is_not_started_again(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoints" / "step-000060"
    checkpoint.mkdir(parents=True)
    RunState(step=60).save(checkpoint)
    (tmp_path / "config.yaml").write_text(dump(quickstart()))
    code, output = run("train", "--resume", str(tmp_path))
    assert (code, "is at step 60 of 60; give a higher num_steps" in output.replace("\n", " ")) == (2, True)
    code, output = run("train", "--resume", str(tmp_path), "seed=3", "num_steps=99")
    assert (code, "seed cannot change when a run is resumed" in output.replace("\n", " ")) == (2, True)


def test_a_run_directory_with_other_files_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    code, output = run("train", str(QUICKSTART), "--run", str(tmp_path))
    assert code == 2
    assert "already holds files; empty it or name another directory" in output.replace("\n", " ")
