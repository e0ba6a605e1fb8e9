"""Run the cells of a sweep as processes: finished ones are kept, a failed one is reported and the rest goes on."""

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from agent_rl.config import load
from agent_rl.pipeline.run_directory import list_checkpoints, read_metrics
from agent_rl.sweep.config import Cell, cell_config

_POLL_S = 0.5


class State(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass
class Progress:
    """How far a cell is, in optimizer steps, and the last line it said if it failed."""

    state: State
    step: int
    num_steps: int
    message: str = ""


OnProgress = Callable[[dict[str, Progress]], None]


def check_cells(cells: Sequence[Cell]) -> dict[str, Progress]:
    """Where every cell stands on disk, by name. Nothing is started or changed.

    Raises `ValueError` if a cell's config is wrong, or if its directory holds a run with another config.
    """
    found = {}
    for cell in cells:
        config = cell_config(cell)
        if (cell.directory / "config.yaml").is_file() and (cell.after is None or cell.after.is_dir()):
            recorded = load(cell.directory / "config.yaml")
            changed = [key for key in type(config).model_fields if getattr(config, key) != getattr(recorded, key)]
            if changed:
                raise ValueError(
                    f"{cell.directory} was run with another {changed[0]} than the sweep now says; "
                    "give another --out, or delete that directory to run it again"
                )
        step = steps_done(cell.directory)
        state = State.DONE if step == config.num_steps else State.WAITING
        found[cell.name] = Progress(state, step, config.num_steps)
    return found


def run_cells(cells: Sequence[Cell], jobs: int, on_progress: OnProgress) -> dict[str, Progress]:
    """Run what is not done yet, `jobs` cells at a time, in order; a cell waits for the one whose radii it reads.

    Consumes the cells' directories, waits for their processes, and produces where each ended. On
    KeyboardInterrupt every running cell is asked to stop with a checkpoint, and a rerun goes on from there.
    """
    progress = check_cells(cells)
    waiting = [cell for cell in cells if progress[cell.name].state is State.WAITING]
    running: dict[str, tuple[Cell, subprocess.Popen[bytes]]] = {}
    try:
        while waiting or running:
            for cell in [c for c in waiting if len(running) < jobs]:
                if len(running) < jobs and _ready(cell, cells, progress):
                    waiting.remove(cell)
                    if progress[cell.name].state is State.WAITING:
                        running[cell.name] = (cell, _start(cell))
                        progress[cell.name].state = State.RUNNING
            for name, (cell, process) in list(running.items()):
                _look(cell, process, progress[name])
                if progress[name].state is not State.RUNNING:
                    del running[name]
            on_progress(progress)
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        _stop(running, progress)
        raise
    return progress


def _ready(cell: Cell, cells: Sequence[Cell], progress: dict[str, Progress]) -> bool:
    """Whether a cell may leave the queue; one whose source has failed leaves it as failed."""
    source = next((c for c in cells if c.directory == cell.after), None)
    if source is None:
        return True
    state = progress[source.name].state
    if state is State.FAILED:
        progress[cell.name].state = State.FAILED
        progress[cell.name].message = f"needs the radii of {source.name}, which failed"
    return state in (State.DONE, State.FAILED)


def _start(cell: Cell) -> subprocess.Popen[bytes]:
    if list_checkpoints(cell.directory):
        arguments = ["--resume", str(cell.directory)]
    else:
        shutil.rmtree(cell.directory, ignore_errors=True)  # stopped before a checkpoint: nothing to go on from
        arguments = [*cell.arguments, "--run", str(cell.directory)]
    log = log_file(cell)
    log.parent.mkdir(parents=True, exist_ok=True)
    # its own process group: Ctrl-C is passed on by us, once
    with log.open("wb") as file:
        command = [sys.executable, "-m", "agent_rl.cli", "train", *arguments]
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)


def _look(cell: Cell, process: subprocess.Popen[bytes], progress: Progress) -> None:
    """Bring `progress` up to date with the cell's process and its directory."""
    code = process.poll()
    progress.step = steps_done(cell.directory)
    if code is None:
        return
    progress.state = State.DONE if code == 0 and progress.step == progress.num_steps else State.FAILED
    if progress.state is State.FAILED:
        said = log_file(cell).read_text(errors="replace").strip().splitlines() or ["it said nothing"]
        progress.message = f"exit code {code}: {said[-1]} (all of it: {log_file(cell)})"


def _stop(running: dict[str, tuple[Cell, subprocess.Popen[bytes]]], progress: dict[str, Progress]) -> None:
    for name, (_, process) in running.items():
        process.send_signal(signal.SIGINT)
        progress[name].state = State.STOPPED
    for _, process in running.values():
        process.wait()


def log_file(cell: Cell) -> Path:
    """What the cell's process printed; beside its directory, which must be empty when a run starts."""
    return cell.directory.with_suffix(".log")


def steps_done(directory: Path) -> int:
    """Optimizer steps that a run has recorded; a line without a wall time is an evaluation alone."""
    return max((row["step"] + 1 for row in read_metrics(directory) if row.get("wall_s") is not None), default=0)
