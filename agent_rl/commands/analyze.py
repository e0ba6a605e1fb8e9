"""`agent-rl analyze`: tables of what runs recorded."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agent_rl.commands.console import one_sentence_errors, print_table, say

if TYPE_CHECKING:
    from polars import DataFrame

    from agent_rl.analysis.recorded import RecordedRun

_SHOWN = "turn,stop,seconds"
_FIRST_TO_GO = ("steps", "k3", "entropy", "ess", "pearson_logp_step_mean", "lag_mean", "kept_size", "implementation")
"""Columns that a narrow terminal leaves out, first ones first."""


def analyze(
    runs: Annotated[list[Path], typer.Argument(help="Directories of runs, shown side by side")],
    table: Annotated[
        str,
        typer.Option(
            help="Tables with commas between: turn, first, lag, kl, turns, clip, reference, stop, seconds; or all"
        ),
    ] = _SHOWN,
    every: Annotated[bool, typer.Option("--all", help="All columns, and rows for each part of the mismatch")] = False,
    first_step: Annotated[int, typer.Option(help="Leave out the steps before this one")] = 0,
    bound: Annotated[
        bool, typer.Option("--bound", help="Also show what each turn's distance from the rollouts costs")
    ] = False,
    csv: Annotated[Path | None, typer.Option(help="Also write the tables, all columns, into this CSV file")] = None,
    parquet: Annotated[Path | None, typer.Option(help="The same as one Parquet file")] = None,
    picture: Annotated[Path | None, typer.Option(help="Also draw the run (one only) into this PNG file")] = None,
) -> None:
    """Show mismatch, gating, clipping and entropy by turn, lag and KL, and why episodes ended."""
    with one_sentence_errors():
        from agent_rl.analysis import tables
        from agent_rl.analysis.recorded import open_runs

        if picture is not None and len(runs) > 1:
            raise ValueError("--picture draws one run; name one, or use agent-rl report for several")
        opened = open_runs(runs)
        names = tuple(tables.TABLES) if table == "all" else tuple(name.strip() for name in table.split(","))
        frames = tables.tables(opened, names, first_step, parts=every)
        for name, frame in frames.items():
            _show(frame, name, every, alone=len(opened) == 1)
        for run in opened:
            _show_extras(run, first_step, bound, f" of {run.path}" if len(opened) > 1 else "")
        if csv or parquet:
            _export(tables.tidy(tables.tables(opened, names, first_step, parts=True)), csv, parquet)
        if picture is not None:
            from agent_rl.analysis import plots

            plots.run_picture(opened[0], picture)
            say(f"picture: {picture}")


def _show_extras(run: "RecordedRun", first_step: int, bound: bool, whose: str) -> None:
    """Show tables of one run at a time: routing if it was replayed, the bound if it is asked for."""
    import polars as pl

    from agent_rl.analysis import tables

    if (routing := tables.routing(run, first_step)).height:
        percent = routing.with_columns((pl.exclude("layer") * 100).round(2))
        print_table(percent, f"% of tokens{whose} that the trainer would send to other experts, by layer and turn")
    if bound:
        from agent_rl.analysis.bound import CAPTION, bound_summary

        print_table(bound_summary(run, first_step), f"{CAPTION}{whose}")


def _show(frame: "DataFrame", name: str, every: bool, alone: bool) -> None:
    from agent_rl.analysis.tables import MAIN, TABLES

    title, keys, scopes = TABLES[name]
    title += "; d = trainer log-prob - behaviour log-prob" if scopes else ""
    compact = (*keys, "run", "part", "steps", "n", *MAIN)
    if frame.is_empty():
        say(f"{title}: nothing was recorded for this table")
        return
    hidden = {"table", *(["run"] if alone else [])}
    if scopes and not every:
        hidden |= set(frame.columns) - set(compact) | ({"lag_mean"} if name == "lag" else set())
    ordered = [*(key for key in compact if key in frame.columns), *(key for key in frame.columns if key not in compact)]
    print_table(frame.select(ordered).drop(hidden), title, () if every else _FIRST_TO_GO)


def _export(frame: "DataFrame", csv: Path | None, parquet: Path | None) -> None:
    if csv:
        frame.write_csv(csv)
        say(f"{frame.height} rows: {csv}")
    if parquet:
        frame.write_parquet(parquet)
        say(f"{frame.height} rows: {parquet}")
