"""A run's files as they stand right now. A run that is still writing, or was killed in mid-write, reads as well.

Every read is incremental: what an earlier call of the same object read is not read again unless it changed.
"""

import fcntl
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import polars as pl
import yaml

from agent_rl.facts import MISMATCH_TABLE, ROLLOUT_TABLE

ROLLOUT_COLUMNS = ("batch", "group_id", "episode_id", "attempt", "reward", "stop_reason", "num_turns", "num_sampled")
"""The columns of the rollout facts that hold one value a trajectory and that charts and tables read."""

_DEPTH = 3
"""Folders between a runs directory and a run: sweeps keep theirs in folders of their own."""

_NEEDED = {"step": True, "part": False, "scope": False, "turn": True, "n": True, "mean_abs_d": True}
"""Columns without which a mismatch table says nothing, and whether they hold numbers."""


class PartTable:
    """A table of part files: `read` gives them all, `part` one. Parts that cannot be read are left out."""

    def __init__(self, folder: Path, columns: Sequence[str] | None = None) -> None:
        self.folder, self.columns = folder, columns
        self.num_unreadable = 0
        self._known: dict[str, tuple[tuple[int, int], pl.DataFrame]] = {}
        self._whole: tuple[list[tuple[str, tuple[int, int]]], pl.DataFrame] = ([], pl.DataFrame())

    def paths(self) -> list[Path]:
        """The finished parts, oldest first; what is still being written has another suffix."""
        return sorted(self.folder.glob("part-*.parquet"))

    def read(self) -> pl.DataFrame:
        """All rows, in the order of the parts; columns that a part lacks are null there."""
        frames = {path.name: self._part(path) for path in self.paths()}
        self._known = {name: known for name, known in self._known.items() if name in frames}
        read = {name: frame for name, frame in frames.items() if frame is not None}
        self.num_unreadable = len(frames) - len(read)
        stamps = [(name, self._known[name][0]) for name in read]
        if stamps != self._whole[0]:
            self._whole = (stamps, self._concat(list(read.values())))
        return self._whole[1]

    def _concat(self, frames: list[pl.DataFrame]) -> pl.DataFrame:
        try:
            return pl.concat(frames, how="diagonal_relaxed", rechunk=True) if frames else pl.DataFrame()
        except pl.exceptions.PolarsError as error:
            raise ValueError(f"the parts of {self.folder} disagree about their columns: {_first_line(error)}") from None

    def _part(self, path: Path) -> pl.DataFrame | None:
        try:
            stat = path.stat()
            stamp = (stat.st_mtime_ns, stat.st_size)
            if path.name not in self._known or self._known[path.name][0] != stamp:
                self._known[path.name] = (stamp, read_columns(path, self.columns))
        except (OSError, pl.exceptions.PolarsError):
            return None
        return self._known[path.name][1]


def read_columns(path: Path, columns: Sequence[str] | None) -> pl.DataFrame:
    """Those of `columns` that a Parquet file has; all for None."""
    # Read whole into memory first: a mapped file that a resumed run deletes or replaces would be read torn.
    data = path.read_bytes()
    if columns is None:
        return pl.read_parquet(data)
    schema = pl.read_parquet_schema(data)
    return pl.read_parquet(data, columns=[name for name in columns if name in schema])


class RecordedRun:
    """One run directory. `name` is what tables and charts call it."""

    def __init__(self, path: Path, name: str = "") -> None:
        self.path, self.name = path, name or path.resolve().name
        self.mismatch_parts = PartTable(path / MISMATCH_TABLE)
        self.rollout_parts = PartTable(path / ROLLOUT_TABLE, ROLLOUT_COLUMNS)
        self._metrics: list[dict[str, Any]] = []
        self._read_to = 0
        self._tail = b""

    @cached_property
    def config(self) -> dict[str, Any]:
        """The keys of config.yaml; none where there is no such file."""
        try:
            config = yaml.safe_load((self.path / "config.yaml").read_text())
        except (OSError, yaml.YAMLError):
            return {}
        return config if isinstance(config, dict) else {}

    def metrics(self) -> list[dict[str, Any]]:
        """The whole lines of metrics.jsonl, in order; a line that is still being written waits for the next call."""
        path = self.path / "metrics.jsonl"
        if not path.is_file():
            self._metrics, self._read_to, self._tail = [], 0, b""
            return self._metrics
        with path.open("rb") as file:
            file.seek(max(self._read_to - len(self._tail), 0))
            if file.read(len(self._tail)) != self._tail:  # a resumed run has cut the file back
                self._metrics, self._read_to = [], 0
                file.seek(0)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._metrics = self._metrics + [row for line in whole.splitlines() if (row := _parse(line)) is not None]
        self._read_to += len(whole)
        self._tail = (self._tail + whole)[-200:] if self._read_to > len(whole) else whole[-200:]
        return self._metrics

    def mismatch(self) -> pl.DataFrame:
        """Rows of mismatch.parquet. Raises `ValueError` if another version of the tables was recorded."""
        frame = self.mismatch_parts.read()
        for name, numeric in _NEEDED.items() if frame.width else ():
            if name not in frame.columns or frame[name].dtype.is_numeric() != numeric:
                raise ValueError(
                    f"{self.path}/{MISMATCH_TABLE} has no column {name!r} of {'numbers' if numeric else 'text'}: "
                    "it was recorded by another version of agent-rl; read it with that one"
                )
        return frame

    def rollouts(self) -> pl.DataFrame:
        """One row a trajectory, with `ROLLOUT_COLUMNS`."""
        return self.rollout_parts.read()

    @property
    def num_steps(self) -> int | None:
        """Steps, a rollout batch each, that the config asks for."""
        steps = self.config.get("num_steps")
        return steps if isinstance(steps, int) else None

    @property
    def steps_done(self) -> int:
        """Steps recorded; a line of metrics without a wall time is an evaluation alone."""
        return max((row["step"] + 1 for row in self.metrics() if row.get("wall_s") is not None), default=0)

    def stamp(self) -> str:
        """A text that changes whenever the run's files change."""
        parts = [*self.mismatch_parts.paths(), *self.rollout_parts.paths()[-1:]]
        stamps = []
        for path in (self.path / "metrics.jsonl", *parts[-2:]):
            try:
                stat = path.stat()
                stamps.append(f"{stat.st_size}.{stat.st_mtime_ns}")
            except OSError:
                stamps.append("-")
        return f"{self.status()} {len(parts)} {' '.join(stamps)}"

    def status(self) -> str:
        """`running` (a process holds the run's lock), `finished`, or `interrupted`."""
        if _is_locked(self.path):
            return "running"
        return "finished" if self.num_steps is not None and self.steps_done >= self.num_steps else "interrupted"


def find_runs(root: Path) -> dict[str, Path]:
    """The runs below `root`, to a depth of `_DEPTH`, by their path relative to it. Links are not followed.

    Raises `ValueError` if `root` is no directory, or itself a run.
    """
    if not root.is_dir():
        raise ValueError(f"there is no directory {str(root)!r}; name the one that holds your runs, such as runs")
    if _is_run(root):
        raise ValueError(f"{root} is a run itself; name the directory that holds it")
    runs: dict[str, Path] = {}
    folders = [root]
    for _ in range(_DEPTH):
        inner = [path for folder in folders for path in _subfolders(folder)]
        runs |= {path.relative_to(root).as_posix(): path for path in inner if _is_run(path)}
        folders = [path for path in inner if not _is_run(path)]
    return runs


def _subfolders(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]
    except OSError:  # not ours to read, or gone
        return []


def _is_run(path: Path) -> bool:
    return (path / "config.yaml").is_file() and any(
        (path / name).exists() for name in ("lock", "metrics.jsonl", MISMATCH_TABLE)
    )


def open_runs(paths: Sequence[Path]) -> list[RecordedRun]:
    """The runs at `paths`, each with at least one recorded step, under names that differ.

    Raises `ValueError`, one sentence, for what is no run, for a run that has recorded nothing, and for tables of
    another version.
    """
    names = _distinct_names(paths)
    runs = [RecordedRun(path, name) for path, name in zip(paths, names, strict=True)]
    for run in runs:
        if not (run.path / MISMATCH_TABLE).is_dir() and not (run.path / "config.yaml").is_file():
            known = "name the directory of a run, such as runs/quickstart"
            raise ValueError(f"no {MISMATCH_TABLE} in {str(run.path)!r}; {known}")
        if run.mismatch().is_empty():
            raise ValueError(f"{run.path} has no recorded step yet; wait for its first step or name another run")
    return runs


def _distinct_names(paths: Sequence[Path]) -> list[str]:
    """The last parts of the paths, as many as it takes to tell them apart."""
    whole = [path.resolve().parts for path in paths]
    if len(set(whole)) < len(whole):
        raise ValueError("the same run is named twice; name each run once")
    for length in range(1, max((len(parts) for parts in whole), default=1) + 1):
        names = ["/".join(parts[-length:]) for parts in whole]
        if len(set(names)) == len(names):
            return names
    return names


def _parse(line: bytes) -> dict[str, Any] | None:
    """A line of metrics; None for one that is broken or has no step, as after a crash of the machine."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _is_locked(path: Path) -> bool:
    """Whether a process holds the run's lock, as `train` does while it runs."""
    try:
        with (path / "lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
