"""`agent-rl analyze`: tables of what a run recorded."""

from pathlib import Path
from typing import Annotated

import typer

from agent_rl.commands.console import one_sentence_errors, print_table, say


def analyze(
    run: Annotated[Path, typer.Argument(help="Directory of a run")],
    first_step: Annotated[int, typer.Option(help="Leave out the steps before this one")] = 0,
    picture: Annotated[Path | None, typer.Option(help="Also draw the run into this PNG file")] = None,
) -> None:
    """Show mismatch, gating, clipping and entropy by turn, and why episodes ended."""
    with one_sentence_errors():
        import polars as pl

        from agent_rl.analysis import tables

        print_table(tables.per_turn(run, first_step), "by turn; d = trainer log-prob - behaviour log-prob")
        if (routing := tables.routing(run, first_step)).height:
            percent = routing.with_columns((pl.exclude("layer") * 100).round(2))
            print_table(percent, "% of tokens that the trainer would send to other experts, by layer and turn")
        print_table(tables.stop_reasons(run), "why episodes ended")
        if picture is not None:
            from agent_rl.analysis import plots
            from agent_rl.pipeline.run_directory import read_metrics

            plots.run_picture(run, read_metrics(run), picture)
            say(f"picture: {picture}")
