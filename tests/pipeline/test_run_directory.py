"""What a run leaves on disk, and what resuming it keeps."""

from pathlib import Path

import numpy as np

from agent_rl.pipeline.run_directory import RunDirectory, list_checkpoints, read_metrics
from agent_rl.pipeline.state import RunState
from agent_rl.records import Episode, Prompt
from tests.configs import quickstart
from tests.trajectories import random_trajectory

CONFIG = quickstart()


def episodes(batch: int) -> list[Episode]:
    """Two groups of two."""
    rng = np.random.default_rng(batch)
    prompt = Prompt(0, ({"role": "user", "content": "1+1"},), "2")
    ids = range(4 * batch, 4 * batch + 4)
    return [Episode(prompt, (), random_trajectory(rng, episode_id, version=batch)) for episode_id in ids]


def write(path: Path) -> None:
    """Three batches sampled one step ahead, one step trained; group 2 was dropped as it was sampled."""
    directory = RunDirectory(path, CONFIG)
    for batch in range(3):
        directory.ledger.record("issued", max(0, batch - 1), [2 * batch, 2 * batch + 1])
        directory.write_rollouts(batch, episodes(batch))
    directory.ledger.record("dropped", 0, [2], reason="SessionLost")
    directory.ledger.record("trained", 0, [0, 1])
    for step in range(3):
        directory.write_metrics({"step": step, "reward_mean": float("nan")})
    directory.close()


def test_a_resumed_run_has_the_queue_of_its_checkpoint_and_nothing_later(tmp_path: Path) -> None:
    write(tmp_path)
    state = RunState(step=1, queue={1: [3]})
    state.save(tmp_path)
    directory = RunDirectory(tmp_path, CONFIG, RunState.load(tmp_path))
    assert sorted({t.group_id for t in directory.read_queued(1)}) == [3]
    assert sorted(p.stem for p in directory.rollout_facts.iterdir()) == ["part-000000", "part-000001"]
    assert directory.ledger.in_flight == {3}
    assert directory.ledger.counts()["dropped/SessionLost"] == 1
    assert [row["step"] for row in read_metrics(tmp_path)] == [0]
    directory.close()


def test_a_fresh_run_has_nothing(tmp_path: Path) -> None:
    write(tmp_path)
    directory = RunDirectory(tmp_path, CONFIG)
    assert list(directory.rollout_facts.iterdir()) == []
    assert directory.ledger.issued == set()
    assert read_metrics(tmp_path) == []
    directory.close()


def test_a_figure_that_is_not_a_number_is_null(tmp_path: Path) -> None:
    write(tmp_path)
    assert read_metrics(tmp_path)[0]["reward_mean"] is None


def test_the_newest_and_the_best_checkpoints_are_kept(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path, quickstart())
    for step, score in enumerate([0.1, 0.9, None, 0.4, None]):
        temporary = directory.checkpoint(step).with_suffix(".tmp")
        temporary.mkdir(parents=True)
        directory.commit_checkpoint(temporary, step, keep=1, keep_best=2)
        directory.write_metrics({"step": step, "eval_avg": score})
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000001", "step-000003", "step-000004"]
    for step, evaluating in ((5, 4), (6, 4), (7, None)):  # of 4 the score comes late, by the line of step 6
        temporary = directory.checkpoint(step).with_suffix(".tmp")
        temporary.mkdir()
        directory.commit_checkpoint(temporary, step, keep=1, keep_best=2, evaluating=evaluating)
        late = {"eval_step": 4, "eval_avg": 0.8} if step == 6 else {}
        directory.write_metrics({"step": step, **late})
        kept = ["step-000001", "step-000003"] if step < 7 else ["step-000001"]
        assert [path.name for path in list_checkpoints(tmp_path)] == [*kept, "step-000004", f"step-{step:06d}"]
    (directory.checkpoint(5).with_suffix(".tmp")).mkdir()  # a crash in the middle of a save
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000001", "step-000004", "step-000007"]
    directory.close()
