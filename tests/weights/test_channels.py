"""What every weight channel does: versions are kept, given to engines whenever asked for, and gone when retired."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from safetensors.torch import load_file, save_file

from agent_rl import registry
from agent_rl.registry import PartKind
from agent_rl.run import local_ray
from agent_rl.weights.base import WeightChannel, WeightsLostError
from agent_rl.weights.transfer.buckets import plan
from agent_rl.weights.transfer.memory import make_folder
from tests.weights.receivers import Receiver, Source, answers_of, channel_of, file_of, folders_of


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with local_ray(4):
        yield


@pytest.fixture(scope="module")
def source(cluster: None) -> Any:
    return ray.remote(Source).remote()


@pytest.fixture(scope="module")
def engines(cluster: None) -> list[Any]:
    """Two, used by one channel after the other; one that a test ends it starts again."""
    return [ray.remote(Receiver).remote(i) for i in range(2)]


def sum_of(version: int) -> float:
    return float(sum(tensor.double().sum() for _, tensor in sorted(file_of(version).items())))


@pytest.mark.parametrize("kind", registry.names("weights"))
def test_versions_are_kept_given_saved_restored_and_retired(
    kind: str, source: Any, engines: list[Any], tmp_path: Path
) -> None:
    channel = channel_of(kind, source, 2, tmp_path)
    for version in (3, 4, 5):
        ray.get(source.become.remote(version))
        ray.get(channel.publish(version))
    for version in (5, 3, 4):  # an older one is served after a newer one
        given = channel.for_all(version)
        assert given.shapes() == {"a": (300, 7), "b": (5,), "big": (900, 1000), "half": (11, 3)}
        assert answers_of(engines, given) == [sum_of(version)] * 2
    ray.get(channel.save(4, tmp_path / "saved.safetensors"))
    saved = load_file(tmp_path / "saved.safetensors")
    assert all(torch.equal(saved[name], tensor) for name, tensor in file_of(4).items())
    assert saved.keys() == file_of(4).keys()
    save_file(file_of(9), tmp_path / "other.safetensors")
    ray.get(channel.restore(9, tmp_path / "other.safetensors"))
    assert answers_of(engines, channel.for_all(9)) == [sum_of(9)] * 2
    channel.retire(3)
    channel.retire(99)
    channel.close()
    assert not [
        folder for process in (os.getpid(), ray.get(source.process_id.remote())) for folder in folders_of(process)
    ]


@pytest.mark.parametrize("kind", ["distributed", "tensor"])
def test_an_engine_that_is_started_again_asks_for_what_is_served(
    kind: str, source: Any, engines: list[Any], tmp_path: Path
) -> None:
    """Alone, while the trainer has newer weights; the next broadcast then reaches all, the new engine too."""
    channel = channel_of(kind, source, 2, tmp_path)
    ray.get(source.become.remote(0))
    ray.get(channel.publish(0))
    given = channel.for_all(0)
    assert answers_of(engines, given) == [sum_of(0)] * 2
    ray.get(source.become.remote(1))
    ray.get(channel.publish(1))
    ray.kill(engines[1])
    engines[1] = ray.remote(Receiver).remote(1)
    assert answers_of(engines[1:], given.again()) == [sum_of(0)]
    for _ in range(2):
        assert answers_of(engines, channel.for_all(1)) == [sum_of(1)] * 2
    channel.close()


def test_a_broadcast_that_an_engine_dies_in_still_reaches_the_others(
    source: Any, engines: list[Any], tmp_path: Path
) -> None:
    """One is gone before it: the other finds the group broken and asks for itself. That group is never used again."""
    channel = channel_of("distributed", source, 2, tmp_path)
    ray.get(source.become.remote(0))
    ray.get(channel.publish(0))
    expected = sum_of(0)
    for _ in range(2):  # engines of earlier tests may have to meet first
        assert answers_of(engines, channel.for_all(0)) == [expected] * 2
    group = ray.get(engines[0].group.remote())
    assert answers_of(engines, channel.for_all(0)) == [expected] * 2
    assert ray.get(engines[0].group.remote()) == group, "the group is kept"
    ray.kill(engines[1])
    assert answers_of(engines[:1], channel.for_all(0)) == [expected]
    engines[1] = ray.remote(Receiver).remote(1)
    assert answers_of(engines, channel.for_all(0)) == [expected] * 2
    assert ray.get(engines[0].group.remote()) != group
    channel.close()


def test_weights_that_went_with_their_trainer_are_said_to_be_lost(engines: list[Any], tmp_path: Path) -> None:
    trainer = ray.remote(Source).remote()
    channel: WeightChannel = channel_of("distributed", trainer, 1, tmp_path)
    ray.get(channel.publish(0))
    given = channel.for_all(0)
    assert answers_of(engines[:1], given) == [sum_of(0)]
    ray.kill(trainer)
    with pytest.raises(WeightsLostError):
        answers_of(engines[:1], given.again())
    with pytest.raises(WeightsLostError):
        channel.for_all(0)


def test_a_trainer_that_is_busy_is_waited_for(source: Any, engines: list[Any], tmp_path: Path) -> None:
    """Ranks wait for each other only so long: nobody joins a group before the trainer has begun to send."""
    channel, free = channel_of("distributed", source, 2, tmp_path), tmp_path / "free"
    ray.get(source.become.remote(2))
    ray.get(channel.publish(2))
    given = channel.weights(2)
    source.work.remote(free)
    asked = [engine.joined_after.remote(given, free) for engine in engines]
    assert not ray.wait(asked, timeout=3.0)[0]
    free.touch()
    assert ray.get(asked) == [(sum_of(2), [True])] * 2
    channel.close()


def test_buckets_hold_whole_tensors_of_about_the_size_asked_for(tmp_path: Path) -> None:
    save_file(file_of(0), tmp_path / "w.safetensors")
    buckets = plan(tmp_path / "w.safetensors", 1 << 20)
    assert [set(bucket.names) for bucket in buckets] == [{"big"}, {"a", "b", "half"}] or [
        set(bucket.names) for bucket in buckets
    ] == [{"a", "b"}, {"big"}, {"half"}]
    found = {n: t for bucket in buckets for n, t in bucket.tensors(bucket.read(tmp_path / "w.safetensors")).items()}
    assert all(torch.equal(found[name], tensor) for name, tensor in file_of(0).items())
    assert [b.begin + b.size for b in buckets[:-1]] == [b.begin for b in buckets[1:]]


def test_a_directory_that_is_not_there_is_said(tmp_path: Path) -> None:
    config = PartKind("weights").parse({"type": "disk", "directory": str(tmp_path / "absent")})
    with pytest.raises(ValueError, match="is no directory; make it first"):
        registry.build("weights", config, trainer=None, num_workers=1, engine=None)


@pytest.mark.parametrize("in_memory", [True, False])
def test_folders_of_processes_that_are_gone_are_swept(in_memory: bool, tmp_path: Path) -> None:
    parent = None if in_memory else tmp_path
    left = make_folder(parent)
    gone = str(1 << 22)  # above the largest process id
    orphan = left.with_name(left.name.replace(f"-{os.getpid()}-", f"-{gone}-"))
    elsewhere = left.with_name(f"agent-rl-weights-another-host-{gone}-x")
    for folder in (orphan, elsewhere):
        folder.mkdir()
    mine = make_folder(parent)
    found = [folder.exists() for folder in (left, orphan, mine, elsewhere)]
    for folder in (left, mine, elsewhere):
        folder.rmdir()
    assert found == [True, False, True, True]
