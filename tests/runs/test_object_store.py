"""Ray's object store fills up under a run, with no disk to spill to: a stop in one sentence that can be resumed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray.exceptions import ObjectStoreFullError, OutOfDiskError
from typer import Exit

from agent_rl.commands.console import one_sentence_errors
from agent_rl.pipeline.run_directory import list_checkpoints, read_metrics
from agent_rl.run import train
from tests.configs import quickstart

STORE = 80 << 20  # the least that Ray takes
INLINE = 100 << 10  # what is smaller goes along in the call


@pytest.fixture(scope="module", autouse=True)
def small_store() -> Iterator[None]:
    """A Ray with a small store that takes its disk to be full."""
    no_disk = {"local_fs_capacity_threshold": 0.01, "automatic_object_spilling_enabled": False}
    ray.init(
        num_cpus=2,
        object_store_memory=STORE,
        include_dashboard=False,
        logging_level="error",
        log_to_driver=False,
        _system_config=no_disk | {"oom_grace_period_s": 1},
    )
    yield
    ray.shutdown()


def fill() -> list[Any]:
    """Objects that leave no room in the store for one more that does not go along in its call."""
    held, size = [], STORE // 2
    while size >= INLINE:
        try:
            held.append(ray.put(np.zeros(size, np.uint8)))
        except (ObjectStoreFullError, OutOfDiskError):
            size //= 4
    return held


def test_a_full_object_store_is_said_and_the_run_can_be_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ("num_steps=3", "batch.num_prompts=8", "batch.group_size=8", "checkpoint.every=1", "eval.every=0")
    config = quickstart(*sizes, "pipeline={type: sync}")
    held: list[Any] = []

    def fill_after_the_second(row: dict[str, Any]) -> None:
        if row["step"] == 1:
            held.extend(fill())

    with pytest.raises(Exit), one_sentence_errors():
        train(config, tmp_path, False, fill_after_the_second)
    assert "error: Ray's object store is full" in capsys.readouterr().err
    assert [checkpoint.name for checkpoint in list_checkpoints(tmp_path)][-1:] == ["step-000001"]

    held.clear()
    assert train(config, tmp_path, True, lambda row: None).complete
    rows = [row for row in read_metrics(tmp_path) if row["wall_s"] is not None]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[-1]["groups/issued"] == rows[-1]["groups/trained"] == 24
