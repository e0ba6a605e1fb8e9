"""The Ray that a run starts for itself."""

import os

import pytest
import ray

from agent_rl.run import local_ray


def test_its_actors_are_as_nice_as_the_run_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_worker_niceness", raising=False)
    with local_ray(1):
        niceness = ray.get(ray.remote(lambda: os.nice(0)).remote())
    assert niceness == os.nice(0)
