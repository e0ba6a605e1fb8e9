"""A run whose trainer is several processes: the same loop, the same checkpoints."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from agent_rl.pipeline.ledger import Ledger
from agent_rl.pipeline.run_directory import list_checkpoints, read_metrics
from agent_rl.run import local_ray, train
from tests.configs import quickstart
from tests.processes import kill_later


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with local_ray(4):
        yield


def test_a_run_on_two_ranks_is_resumed_on_one(tmp_path: Path) -> None:
    """Ranks that are Ray actors, a checkpoint that is written beside the next step, and the layout changed after it."""
    small = ("batch.num_prompts=2", "batch.group_size=2", "eval.every=0", "checkpoint.every=1", "num_steps=2")
    seen: list[dict[str, Any]] = []
    train(quickstart(*small, "trainer.dp=2"), tmp_path, resume=False, on_row=seen.append)
    assert [folder.name for folder in list_checkpoints(tmp_path)] == ["step-000001", "step-000002"]
    assert not list((tmp_path / "checkpoints").glob("*.tmp"))
    assert all(row["mismatch_mean_abs"] < 1e-3 for row in seen)  # what was sampled from is what is trained
    before = load_file(tmp_path / "checkpoints" / "step-000002" / "model.safetensors")
    outcome = train(quickstart(*small[:-1], "num_steps=3"), tmp_path, resume=True, on_row=seen.append)
    assert (outcome.step, outcome.complete) == (3, True)
    assert len(read_metrics(tmp_path)) == 3
    assert seen[-1]["mismatch_mean_abs"] < 1e-3
    after = load_file(tmp_path / "checkpoints" / "step-000003" / "model.safetensors")
    assert after.keys() == before.keys()


def test_a_rank_that_dies_takes_the_run_back_to_its_checkpoint(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """In the middle of a step: to the other rank its death is a broken connection, which is not what is said."""
    small = ("batch.num_prompts=2", "batch.group_size=2", "eval.every=0", "checkpoint.every=1", "num_steps=3")
    kills: list[Callable[[], None]] = []

    def kill_a_rank(row: dict[str, Any]) -> None:
        if row["step"] == 1 and not kills:
            kills.append(kill_later("ray::TrainWorker", 0.5 * row["wall_s"]))
        elif row["step"] == 2:
            kills[0]()  # the second step took longer than two of the third

    assert train(quickstart(*small, "trainer.dp=2"), tmp_path, resume=False, on_row=kill_a_rank).complete
    assert [row["step"] for row in read_metrics(tmp_path)] == [0, 1, 2]
    ledger = Ledger(tmp_path / "ledger.jsonl")
    assert (ledger.trained, ledger.in_flight) == (set(range(6)), set())
    assert "the trainer died; all of the run goes back to step-00000" in capfd.readouterr().err
