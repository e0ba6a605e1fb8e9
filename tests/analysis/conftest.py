"""A real run, recorded once for the tests that read runs."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from agent_rl.run import local_ray, train
from tests.configs import quickstart

OVERRIDES = (
    *("num_steps=4", "batch.num_prompts=4", "batch.group_size=4", "eval.num_prompts=8", "eval.every=2"),
    *("rollout.sampling.top_p=0.9", "trainer.proximal.every=2", "checkpoint.every=0", "pipeline.exact_lag=2"),
)


def ignore(row: dict[str, Any]) -> None:
    return


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of four steps with top-p 0.9 and lag up to 2; read it, do not change it."""
    path = tmp_path_factory.mktemp("runs") / "short"
    with local_ray(4):
        train(quickstart(*OVERRIDES), path, False, ignore)
    return path


@pytest.fixture
def run(recorded: Path, tmp_path: Path) -> Path:
    """A copy of that run, to be changed."""
    shutil.copytree(recorded, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints", "tensorboard"))
    return tmp_path / "run"
