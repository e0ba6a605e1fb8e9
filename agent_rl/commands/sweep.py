"""`agent-rl sweep`: runs the cells of a sweep and compares them."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agent_rl.commands.console import console, one_sentence_errors, print_table, say

if TYPE_CHECKING:
    from agent_rl.sweep.config import Cell, SweepConfig
    from agent_rl.sweep.run import Progress


def sweep(
    file: Annotated[Path, typer.Argument(help="A file of configs/sweeps, or your own")],
    out: Annotated[Path | None, typer.Option(help="Where the runs go; default: runs/sweeps/NAME")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs at one time; default: half of the CPU cores")] = None,
    effect: Annotated[float, typer.Option(min=1e-6, help="Say how many seeds a difference of this size needs")] = 0.05,
    table: Annotated[bool, typer.Option("--table", help="Run nothing; show what is finished")] = False,
) -> None:
    """Run every cell of a sweep that is not finished yet, then compare the finished ones."""
    with one_sentence_errors():
        from agent_rl.sweep.config import cells, read_sweep

        settings, directory = read_sweep(file), out or Path("runs") / "sweeps" / file.stem
        every = cells(settings, file, directory)
        progress = _run(every, jobs or max(1, (os.cpu_count() or 2) // 2), table)
        _report(settings, every, progress, directory, file.stem, effect)
    if any(p.state == "failed" for p in progress.values()):
        raise typer.Exit(1)


def _run(every: "list[Cell]", jobs: int, only_look: bool) -> "dict[str, Progress]":
    from rich.live import Live

    from agent_rl.sweep.run import check_cells, run_cells

    if only_look:
        return check_cells(every)
    try:
        if not console.is_terminal:
            return run_cells(every, jobs, _say_what_ends())
        with Live(console=console, refresh_per_second=2, transient=True) as view:
            return run_cells(every, jobs, lambda progress: view.update(_progress_view(progress)))
    except KeyboardInterrupt:
        say("stopped; run the same command again to go on")
        raise typer.Exit(130) from None


def _say_what_ends() -> Callable[["dict[str, Progress]"], None]:
    """A progress display for files and pipes: one line for each run that has ended, earlier ones first."""
    said: set[str] = set()

    def show(progress: "dict[str, Progress]") -> None:
        for name, p in progress.items():
            if p.state in ("done", "failed") and name not in said:
                said.add(name)
                say(f"{len(said)} of {len(progress)}: {name} {p.state}")

    return show


def _progress_view(progress: "dict[str, Progress]") -> Any:
    """A bar over all steps of all cells, and a line for each running cell."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.text import Text

    states = [p.state for p in progress.values()]
    total, done = sum(p.num_steps for p in progress.values()), sum(p.step for p in progress.values())
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    running = [f"  {name}: step {p.step} of {p.num_steps}" for name, p in progress.items() if p.state == "running"]
    return Group(Text(f"{len(progress)} runs: {counts}"), ProgressBar(total, done, width=60), *map(Text, running))


def _report(
    settings: "SweepConfig",
    every: "list[Cell]",
    progress: "dict[str, Progress]",
    directory: Path,
    name: str,
    effect: float,
) -> None:
    from agent_rl.analysis.comparison import per_run, read_run, summary
    from agent_rl.analysis.sweep_plot import sweep_picture
    from agent_rl.analysis.sweep_report import write_sweep_report

    for cell_name, p in progress.items():
        if p.state == "failed":
            say(f"[red]failed:[/] {cell_name}: {p.message}")
    done = [cell for cell in every if progress[cell.name].state == "done"]
    if not done:
        say(f"none of the {len(every)} runs of {name} is finished")
        return
    runs = [read_run(c.directory, c.variant.arm, c.variant.place, c.variant.name, c.seed) for c in done]
    frame = per_run(runs)
    frame.write_csv(directory / "runs.csv")
    compared = summary(frame, settings.baseline, effect)
    compared.write_csv(directory / "summary.csv")
    sweep_picture(runs, name, directory / "sweep.png")
    write_sweep_report(runs, compared, name, settings.baseline, directory / "report.html")
    against = f"; difference to {settings.baseline}, by seed" if settings.baseline else ""
    title = f"held-out accuracy, mean ± standard error over seeds{against}; seeds needed to see {effect:g}"
    print_table(_shown(compared), title)
    files = "{runs.csv,summary.csv,sweep.png,report.html}"
    say(f"{len(done)} of {len(every)} runs finished; tables, picture and report: {directory}/{files}")


def _shown(compared: Any) -> Any:
    """The summary with each mean and its error in one column."""
    import polars as pl

    def joined(name: str) -> Any:
        cells = [
            "" if mean is None else f"{mean:.3f}" + ("" if error is None else f" ± {error:.3f}")
            for mean, error in compared.select(name, f"{name}_se").iter_rows()
        ]
        return pl.Series(name, cells)

    columns: list[Any] = ["variant", "seeds", joined("last"), joined("best"), "collapsed"]
    if "difference" in compared.columns:
        needed = compared["seeds_needed"].cast(pl.String).fill_null("").alias("seeds needed")
        columns += [joined("difference"), needed]
    return compared.select(columns)
