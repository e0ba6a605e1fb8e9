"""`agent-rl report`: one HTML file of what runs recorded."""

from pathlib import Path
from typing import Annotated

import typer

from agent_rl.commands.console import one_sentence_errors, say


def report(
    runs: Annotated[list[Path], typer.Argument(help="Directories of runs; several are drawn over each other")],
    output: Annotated[
        Path | None, typer.Option(help="File to write; default: report.html in the run, or here for several runs")
    ] = None,
    episodes: Annotated[int, typer.Option(min=0, help="Episodes in the viewer, over all runs")] = 48,
) -> None:
    """Write a report that opens offline: learning, mismatch by turn, clip, time, and episodes token by token."""
    with one_sentence_errors():
        from agent_rl.analysis.recorded import open_runs
        from agent_rl.analysis.report import write_report

        opened = open_runs(runs)
        target = output or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
        write_report(opened, target, episodes)
    say(f"report: {target} ({target.stat().st_size / 1e6:.1f} MB)")
