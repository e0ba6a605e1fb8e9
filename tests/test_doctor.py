"""The doctor: what is there is found, what is missing has a fix, and a wrong engine is told from a right one."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agent_rl import doctor
from agent_rl.cli import app
from agent_rl.parity import _moved
from agent_rl.records import FloatArray, Trajectory
from agent_rl.trainer.engines.torch import TorchEngine
from tests.configs import QUICKSTART


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["doctor", *arguments])
    return result.exit_code, " ".join(result.output.split())


def test_this_machine_can_run_the_quickstart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    found = {check.name: check for check in doctor.machine_checks()}
    needed = ("python", "torch", "transformers", "ray", "/dev/shm", "zygote: namespaces", "engine: embedded")
    assert [name for name in needed if not found[name].ok] == []
    assert found["engine: sglang"].fix == "make sglang-cpu, or set rollout.engine.python or rollout.engine.urls"
    assert all(check.fix for check in found.values() if not check.ok)


def test_parity_holds_for_the_quickstart() -> None:
    code, said = run("--parity", str(QUICKSTART), "--episodes", "4", "rollout.sampling.top_p=0.9")
    assert code == 0
    assert "engine and trainer agree" in said
    assert "over the whole vocabulary" in said


def test_parity_of_a_trainer_of_several_ranks_is_measured_in_one_process() -> None:
    code, said = run("--parity", str(QUICKSTART), "--episodes", "2", "trainer.dp=2")
    assert (code, "engine and trainer agree" in said) == (0, True), said


def test_an_engine_that_shifts_is_caught_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    logprobs = TorchEngine.logprobs

    def shifted(self: TorchEngine, trajectories: Sequence[Trajectory]) -> list[FloatArray]:
        return [_moved(values, 1) for values in logprobs(self, trajectories)]

    monkeypatch.setattr(TorchEngine, "logprobs", shifted)
    code, said = run("--parity", str(QUICKSTART), "--episodes", "4")
    assert code == 1
    assert "engine and trainer disagree" in said
    assert "fit better if read as shifted by -1" in said


def test_overrides_need_a_config() -> None:
    code, said = run("rollout.sampling.top_p=0.9")
    assert (code, "belong to a config; name it with --parity" in said) == (2, True)
