"""Whole runs whose weights travel in buckets: the same bits as with files, whatever dies, whatever is served."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from safetensors.torch import load_file

from agent_rl.pipeline.run_directory import list_checkpoints, read_metrics
from agent_rl.run import local_ray, newest_checkpoint, train
from tests.configs import quickstart
from tests.processes import kill_one

SMALL = ("batch.num_prompts=2", "batch.group_size=2", "eval.every=0", "checkpoint.every=1", "rollout.num_workers=2")
IN_BUCKETS = ["distributed", "tensor"]


def channel(kind: str) -> tuple[str, ...]:
    return () if kind == "shared_memory" else (f"weights.type={kind}", "weights.bucket_mb=0.1")


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with local_ray(5):
        yield


def final_weights(path: Path) -> dict[str, torch.Tensor]:
    return load_file(newest_checkpoint(path) / "model.safetensors")


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """What a run with files comes to."""
    path = tmp_path_factory.mktemp("calm")
    train(quickstart(*SMALL, "pipeline.type=sync", "num_steps=3"), path, False, lambda row: None)
    return final_weights(path)


@pytest.mark.parametrize("kind", IN_BUCKETS)
def test_a_worker_and_the_trainer_die_and_the_run_comes_to_the_same_bits(
    kind: str, calm: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """The worker dies in the middle of sampling and asks for the served version; with the trainer all versions go."""
    victims = {0: "ray::RolloutWorker", 1: "ray::TrainWorker"}

    def kill_after(row: dict[str, Any]) -> None:
        if victim := victims.pop(row["step"], None):
            kill_one(victim)

    config = quickstart(*SMALL, "pipeline.type=sync", "num_steps=3", *channel(kind))
    assert train(config, tmp_path, False, kill_after).complete
    assert not victims
    found = final_weights(tmp_path)
    assert all(torch.equal(found[name], tensor) for name, tensor in calm.items())
    rows = read_metrics(tmp_path)
    assert all(row["publish_s"] > 0 and row["update_weights_s"] > 0 for row in rows)


@pytest.mark.parametrize("kind", IN_BUCKETS)
def test_an_older_version_is_served_again_after_an_evaluation_and_after_a_resume(kind: str, tmp_path: Path) -> None:
    """Weights go out every third step; evaluations between are of the newest version, and a run that is resumed there
    samples with the older one, from its checkpoint."""
    interval = ("pipeline.exact_lag=null", "pipeline.broadcast_interval=3", "eval.every=1", "eval.num_prompts=2")
    config = quickstart(*SMALL, *interval, "num_steps=5", *channel(kind))
    train(config.model_copy(update={"num_steps": 2}), tmp_path, False, lambda row: None)
    assert (list_checkpoints(tmp_path)[-1] / "served.safetensors").is_file()
    assert train(config, tmp_path, True, lambda row: None).complete
    evaluated = [row["eval_policy_version"] for row in read_metrics(tmp_path) if "eval_policy_version" in row]
    assert sorted(set(evaluated)) == [0, 1, 2, 3, 4, 5]
    facts = pl.read_parquet(tmp_path / "rollout_facts.parquet" / "*.parquet")
    versions = facts.explode("policy_versions").filter(pl.col("policy_versions") >= 0)
    by_batch = versions.group_by("batch").agg(pl.col("policy_versions").unique()).sort("batch")
    assert [row["policy_versions"] for row in by_batch.iter_rows(named=True)][:2] == [[0], [0]]
    mismatch = [row["mismatch_mean_abs"] for row in read_metrics(tmp_path) if row["wall_s"] is not None]
    assert len(mismatch) == 5
    assert max(mismatch) < 1.0


def test_trainers_of_two_ranks_broadcast_whole_weights(tmp_path: Path) -> None:
    """Each rank has shards; what engines sample with is what is trained, so at lag 0 log-probs agree."""
    config = quickstart(*SMALL, "pipeline.type=sync", "num_steps=2", "trainer.dp=2", *channel("distributed"))
    train(config, tmp_path, False, lambda row: None)
    assert all(row["mismatch_mean_abs"] < 1e-4 for row in read_metrics(tmp_path))
