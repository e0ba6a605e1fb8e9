"""Run the cells of a sweep as processes: finished ones are kept, a failed one is reported and the rest goes on."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from agent_rl.analysis.recorded import RecordedRun
from agent_rl.config import load
from agent_rl.pipeline.run_directory import list_checkpoints, lock, remove_contents
from agent_rl.sweep.config import Cell, cell_config, has_radii

_POLL_S = 0.5


class State(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass
class Progress:
    """How far a cell is, in steps, and the last line it said if it failed."""

    state: State
    step: int
    num_steps: int
    message: str = ""


@dataclass(frozen=True)
class Running:
    """A cell's process, and the files that it writes."""

    cell: Cell
    process: subprocess.Popen[bytes]
    recorded: RecordedRun

    def look(self, progress: Progress) -> None:
        """Bring `progress` up to date with the process and its files."""
        code = self.process.poll()
        progress.step = self.recorded.steps_done
        if code is None:
            return
        progress.state = State.DONE if code == 0 and progress.step == progress.num_steps else State.FAILED
        if progress.state is State.FAILED:
            said = log_file(self.cell).read_text(errors="replace").strip().splitlines() or ["it said nothing"]
            progress.message = f"exit code {code}: {said[-1]} (all of it: {log_file(self.cell)})"


OnProgress = Callable[[dict[str, Progress]], None]


def check_cells(cells: Sequence[Cell]) -> dict[str, Progress]:
    """Where every cell stands on disk, by name. Nothing is started or changed.

    Raises `ValueError` if a cell's config is wrong, or if its directory holds a run with another config.
    """
    progress = {}
    for cell in cells:
        config = cell_config(cell)
        if (cell.directory / "config.yaml").is_file() and (cell.after is None or has_radii(cell.after)):
            recorded = load(cell.directory / "config.yaml")
            changed = [key for key in type(config).model_fields if getattr(config, key) != getattr(recorded, key)]
            if changed:
                raise ValueError(
                    f"{cell.directory} was run with another {changed[0]} than the sweep now says; "
                    "give another --out, or delete that directory to run it again"
                )
        step = RecordedRun(cell.directory).steps_done
        state = State.DONE if step == config.num_steps else State.WAITING
        progress[cell.name] = Progress(state, step, config.num_steps)
    return progress


def run_cells(cells: Sequence[Cell], jobs: int, on_progress: OnProgress) -> dict[str, Progress]:
    """Run what is not done yet, `jobs` cells at a time, in order; a cell waits for the one whose radii it reads.

    Consumes the cells' directories, waits for their processes, and produces where each ended. On an interrupt, a
    hang-up, or an error of its own, every running cell is asked to stop with a checkpoint, from which a rerun goes on.
    """
    progress = check_cells(cells)
    running: list[Running] = []
    try:
        with interrupted_by(signal.SIGTERM, signal.SIGHUP):
            while any(p.state in (State.WAITING, State.RUNNING) for p in progress.values()):
                _start_what_is_ready(cells, jobs, progress, running)
                for one in running:
                    one.look(progress[one.cell.name])
                running[:] = [one for one in running if progress[one.cell.name].state is State.RUNNING]
                on_progress(progress)
                time.sleep(_POLL_S)
    finally:
        _stop(running, progress)
    return progress


@contextmanager
def interrupted_by(*signals: signal.Signals) -> Iterator[None]:
    """Let these signals raise KeyboardInterrupt as Ctrl-C does, since the cells would live on without the sweep.

    A signal that is ignored stays so: `nohup` ignores SIGHUP.
    """
    before = {number: signal.getsignal(number) for number in signals}
    taken = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    for number in taken:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, before[number])


def _start_what_is_ready(
    cells: Sequence[Cell], jobs: int, progress: dict[str, Progress], running: list[Running]
) -> None:
    """Start waiting cells while there is room. One whose source has failed fails, one whose source runs waits on."""
    by_directory = {cell.directory: cell for cell in cells}
    for cell in cells:
        own = progress[cell.name]
        source = by_directory.get(cell.after) if cell.after else None
        before = progress[source.name].state if source else State.DONE
        if own.state is not State.WAITING:
            continue
        if source and before is State.FAILED:
            own.state, own.message = State.FAILED, f"needs the radii of {source.name}, which failed"
        elif before is State.DONE and len(running) < jobs:
            try:
                running.append(_start(cell))
                own.state = State.RUNNING
            except ValueError as error:
                own.state, own.message = State.FAILED, str(error)


def _start(cell: Cell) -> Running:
    """Start a cell or go on with it. Raises `ValueError` if another process, as one of an earlier sweep, runs it."""
    with lock(cell.directory):
        if list_checkpoints(cell.directory):
            arguments = ["--resume", str(cell.directory)]
        else:  # stopped before a checkpoint: nothing to go on from
            remove_contents(cell.directory)
            arguments = [*cell.arguments, "--run", str(cell.directory)]
    log = log_file(cell)
    log.parent.mkdir(parents=True, exist_ok=True)
    # its own process group: Ctrl-C is passed on by us, once
    with log.open("wb") as file:
        command = [sys.executable, "-m", "agent_rl.cli", "train", *arguments]
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    return Running(cell, process, RecordedRun(cell.directory))


def _stop(running: Sequence[Running], progress: dict[str, Progress]) -> None:
    for one in running:
        one.process.send_signal(signal.SIGINT)
        progress[one.cell.name].state = State.STOPPED
    for one in running:
        one.process.wait()


def log_file(cell: Cell) -> Path:
    """The file with what a cell's process printed; it is beside the run's directory, which must start empty."""
    return cell.directory.with_suffix(".log")
