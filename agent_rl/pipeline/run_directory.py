"""The files of a run: config, tables, metrics, TensorBoard, ledger and checkpoints."""

import fcntl
import json
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agent_rl import facts
from agent_rl.analysis.metric_lines import evaluations
from agent_rl.config import RunConfig, dump, load
from agent_rl.jsonl import read_jsonl, rewrite_jsonl
from agent_rl.pipeline.ledger import Ledger, truncate_ledger
from agent_rl.pipeline.state import RunState
from agent_rl.records import Episode, Trajectory

METRIC_KEYS = (
    "step",
    "policy_version",
    "reward_mean",
    "eval_avg",
    "lag_mean",
    "lag_max",
    "mismatch_mean_abs",
    "tokens_per_s",
    "wall_s",
)
"""Keys of every line of metrics.jsonl; null if there is no value."""


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """Keep other processes out of a run directory. Raises `ValueError` if another process uses it."""
    path.mkdir(parents=True, exist_ok=True)
    with (path / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{path} is in use by another process; wait for it or name another directory") from None
        try:
            yield
        finally:
            if [entry.name for entry in path.iterdir()] == ["lock"]:  # nothing was run: leave nothing
                shutil.rmtree(path)


def remove_contents(path: Path) -> None:
    """Remove what a run directory holds, but for its lock, which the caller has taken."""
    for entry in path.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        elif entry.name != "lock":
            entry.unlink()


class RunDirectory:
    """Writes the files of a run. Opening it removes everything that is newer than `state`, the start by default."""

    def __init__(self, path: Path, config: RunConfig, state: RunState | None = None) -> None:
        self.path, self.state = path, state or RunState()
        self.rollout_facts = path / facts.ROLLOUT_TABLE
        self.training_facts = path / facts.TRAINING_TABLE
        self.mismatch = path / facts.MISMATCH_TABLE
        self.evaluations = path / facts.EVALUATION_TABLE
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        path.mkdir(parents=True, exist_ok=True)
        _write_whole(path / "config.yaml", dump(config))  # if the disk is full, the old file stays
        self._truncate(self.state.step)
        self.ledger = Ledger(path / "ledger.jsonl")
        self._tensorboard = _summary_writer(path / "tensorboard", self.state.step)

    def _truncate(self, step: int) -> None:
        facts.truncate(self.rollout_facts, step, keep=self.state.queue)
        facts.truncate(self.training_facts, step)
        facts.truncate(self.mismatch, step)
        facts.truncate(self.evaluations, step)
        truncate_ledger(self.path / "ledger.jsonl", step)
        rewrite_jsonl(self.metrics, [row for row in read_metrics(self.path) if row["step"] < step])
        for unfinished in self.checkpoints.glob("*.tmp"):
            shutil.rmtree(unfinished)

    def write_rollouts(self, batch: int, episodes: list[Episode]) -> None:
        """Write the rollout facts of a batch."""
        self.write_rollout_rows(batch, [facts.rollout_row(batch, episode) for episode in episodes])

    def write_rollout_rows(self, batch: int, rows: list[dict[str, Any]]) -> None:
        """Write rows of rollout facts as those of a batch."""
        facts.write_part(self.rollout_facts, batch, rows, facts.ROLLOUT_FACTS)

    def read_queued(self, batch: int) -> list[Trajectory]:
        """The trajectories of a batch of the state's queue, without those of dropped groups and masked ones."""
        rows = facts.read_part(self.rollout_facts, batch)
        return facts.unmasked_trajectories(row for row in rows if row["group_id"] in self.state.queue[batch])

    def write_training(self, step: int, rows: list[dict[str, Any]], mismatch: list[dict[str, Any]]) -> None:
        """Write the training facts and the mismatch rows of a step."""
        facts.write_part(self.training_facts, step, rows, facts.TRAINING_FACTS)
        facts.write_part(self.mismatch, step, [{"step": step, **row} for row in mismatch], facts.MISMATCH)

    def write_evaluation(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Write the rows of the evaluation of the weights of `step`."""
        facts.write_part(self.evaluations, step, rows, facts.EVALUATION)

    def write_metrics(self, row: dict[str, Any]) -> None:
        """Append a line to metrics.jsonl and write its figures to TensorBoard."""
        row = {**dict.fromkeys(METRIC_KEYS), **row}
        row = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()
        }
        with self.metrics.open("a") as file:
            file.write(json.dumps(row) + "\n")
        for key, value in row.items():
            if isinstance(value, (int, float)) and key != "step":
                self._tensorboard.add_scalar(key, value, row["step"])
        self._tensorboard.flush()

    def checkpoint(self, step: int) -> Path:
        """The folder of the checkpoint of `step`."""
        return self.checkpoints / f"step-{step:06d}"

    def commit_checkpoint(
        self, temporary: Path, step: int, keep: int, keep_best: int = 0, evaluating: int | None = None
    ) -> None:
        """Give a finished checkpoint its name; delete all others but the newest `keep` and the `keep_best` best ones.

        `evaluating`: the step whose evaluation is under way. Its checkpoint is kept, as it may be one of the best.
        """
        final = self.checkpoint(step)
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        older = list_checkpoints(self.path)[:-keep]
        scores = {self.checkpoint(step): score for step, score in evaluations(read_metrics(self.path))}
        best = sorted(scores.keys() & set(older), key=lambda path: scores[path])[-keep_best:] if keep_best else []
        if keep_best and evaluating is not None:
            best.append(self.checkpoint(evaluating))
        for old in set(older) - set(best):
            shutil.rmtree(old)

    def close(self) -> None:
        """Close the TensorBoard file."""
        self._tensorboard.close()


def _write_whole(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    temporary.replace(path)


def _summary_writer(folder: Path, step: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter  # heavy

    return SummaryWriter(str(folder), purge_step=step)


def load_run_config(run: Path) -> RunConfig:
    """The config that a run was started with. Raises `ValueError` if there is no run at `run`."""
    if not (run / "config.yaml").is_file():
        raise ValueError(f"no run at {str(run)!r}; name the directory of a run, such as runs/quickstart")
    return load(run / "config.yaml")


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl, in order."""
    return read_jsonl(run / "metrics.jsonl")


def list_checkpoints(run: Path) -> list[Path]:
    """The finished checkpoints of a run, oldest first."""
    return sorted(path for path in (run / "checkpoints").glob("step-*") if path.suffix != ".tmp")


def checkpoint_step(checkpoint: Path) -> int:
    """The step that trains from a checkpoint, as its name says."""
    return int(checkpoint.name.removeprefix("step-"))
