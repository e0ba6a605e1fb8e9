"""Deaths of actors while they start or load weights: small actors on a real Ray, under the pool and the restarts."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from agent_rl import run
from agent_rl.pipeline import workers
from agent_rl.pipeline.controller import TrainerDiedError
from agent_rl.pipeline.watchdog import StalledError
from agent_rl.pipeline.workers import WorkerPool
from agent_rl.run import local_ray, serve_initial_weights
from agent_rl.weights.base import WeightsLostError
from tests.configs import quickstart

WEIGHTS: Any = SimpleNamespace(again=lambda: "again")


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with local_ray(4):
        yield


@ray.remote(num_cpus=0.1)
class Worker:
    """Answers at once; loads weights for `load_s` seconds, as where a server starts first, or until the file `end` is
    there. It makes the file `loading` when it begins."""

    def __init__(self, load_s: float, loading: Path | None = None, end: Path | None = None) -> None:
        self.load_s, self.loading, self.end, self.loaded = load_s, loading, end, list[Any]()

    def status(self) -> None: ...

    def update_weights(self, weights: Any, policy_version: int) -> None:
        if self.loading is not None:
            self.loading.touch()
        deadline = time.monotonic() + self.load_s
        while time.monotonic() < deadline and not (self.end is not None and self.end.exists()):
            time.sleep(0.02)
        self.loaded.append((weights if isinstance(weights, str) else "first", policy_version))

    def what(self) -> list[Any]:
        return self.loaded


def started(*load_s: float) -> list[Any]:
    """Workers that answer already."""
    found = [Worker.remote(seconds) for seconds in load_s]
    ray.get([worker.status.remote() for worker in found])
    return found


def kill(worker: Any) -> None:
    """Kill a worker and wait until it is gone: Ray does not."""
    ray.kill(worker)
    with suppress(RayActorError):
        while True:
            ray.get(worker.status.remote())


def pool_of(handles: list[Any], size: int, check: Callable[[], None]) -> WorkerPool:
    return WorkerPool(lambda place: handles.pop(0), size, check=check)


def test_a_worker_in_the_place_of_another_loads_weights_for_as_long_as_it_takes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """When it begins to load, the pool's clock goes ahead by more than a worker may take to answer."""
    loading, end, checks = tmp_path / "loading", tmp_path / "end", list[bool]()

    def clock() -> float:
        return time.monotonic() + 2 * workers._START_S * loading.exists()

    def check() -> None:
        checks.append(loading.exists())
        if sum(checks) == 4:
            end.touch()

    monkeypatch.setattr(workers, "time", SimpleNamespace(monotonic=clock))
    third = Worker.remote(60.0, loading, end)
    ray.get(third.status.remote())
    pool = pool_of([*started(0.0, 0.0), third], 2, check)
    pool.serve(lambda: WEIGHTS, 1)
    kill(pool.handles[0])
    pool.serve(lambda: WEIGHTS, 2)
    assert sum(checks) >= 4, "about one a second"
    loaded = ray.get([handle.what.remote() for handle in pool.handles])
    assert loaded == [[("again", 2)], [("first", 1), ("first", 2)]]
    assert pool.num_restarts == 1


def test_a_worker_that_cannot_be_placed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_START_S", 1.0)
    pool = pool_of([*started(0.0), Worker.options(num_cpus=99).remote(0.0)], 1, lambda: None)
    pool.serve(lambda: WEIGHTS, 1)
    kill(pool.handles[0])
    with pytest.raises(ValueError, match=r"no rollout worker could be started in 1 s .* has a free CPU"):
        pool.serve(lambda: WEIGHTS, 2)


def test_a_push_that_hangs_is_ended_by_the_watchdog() -> None:
    def check() -> None:
        raise StalledError("no progress")

    pool = pool_of(started(600.0), 1, check)
    with pytest.raises(StalledError, match="no progress"):
        pool.serve(lambda: WEIGHTS, 1)
    ray.kill(pool.handles[0])


@ray.remote(num_cpus=0.1)
class Trainer:
    """Cannot be made, or dies as it loads a checkpoint."""

    def __init__(self, fails: bool) -> None:
        if fails:
            raise ValueError("there is no such model")

    def ping(self) -> bool:
        return True

    def load(self, path: str) -> None:
        os._exit(1)


def test_a_trainer_that_dies_as_it_loads_can_be_started_again() -> None:
    stages: Any = SimpleNamespace(trainer=Trainer.remote(False))
    with pytest.raises(TrainerDiedError, match="The actor died unexpectedly"):
        serve_initial_weights(stages, Path("step-000001"), 1, served=1)


def test_a_trainer_that_cannot_be_made_is_not_started_again() -> None:
    stages: Any = SimpleNamespace(trainer=Trainer.remote(True))
    with pytest.raises(RayActorError, match="there is no such model") as failed:
        serve_initial_weights(stages, None, 0, served=0)
    assert not isinstance(failed.value, TrainerDiedError)


@pytest.mark.parametrize(
    ("death", "reason"),
    [
        (TrainerDiedError("The actor died unexpectedly before finishing this task."), "The actor died unexpectedly .*"),
        (
            WeightsLostError("the trainer gives no weights: it is gone\nmore"),
            "the trainer gives no weights: it is gone",
        ),
    ],
)
def test_the_sixth_death_of_a_trainer_is_said_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, death: Exception, reason: str
) -> None:
    calls: list[Any] = []

    def train_from(*arguments: Any) -> None:
        calls.append(arguments)
        raise death

    monkeypatch.setattr(run, "train_from", train_from)
    config = quickstart()
    with pytest.raises(ValueError, match=f"^the trainer died 6 times, last: {reason}; see whether .* resume the run$"):
        run.train(config, tmp_path, False, print, run.build_prompts(config))
    assert len(calls) == 6
