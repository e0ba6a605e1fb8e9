"""`agent-rl replay`: one recorded batch through many objectives."""

from pathlib import Path
from typing import Annotated

import typer

from agent_rl.commands.console import one_sentence_errors, print_table, say


def replay(
    target: Annotated[Path, typer.Argument(help="Directory of a run, or a Parquet file of one batch")],
    step: Annotated[int | None, typer.Option(help="The step of the run whose batch and checkpoint are taken")] = None,
    methods: Annotated[str, typer.Option(help="Names from configs/methods with commas between, or all")] = "all",
    csv: Annotated[Path | None, typer.Option(help="Also write all figures, by turn too, into this file")] = None,
    picture: Annotated[Path | None, typer.Option(help="Also draw the comparison into this PNG file")] = None,
) -> None:
    """Put one recorded batch through many objectives: loss, gradient, gating and clipping side by side."""
    with one_sentence_errors():
        import polars as pl

        from agent_rl.analysis.replay_plot import replay_picture
        from agent_rl.replay import replay_batch, write_csv

        replayed = replay_batch(target, step, methods)
        rates = {"gate_rate": "gate rate", "clip_fraction": "clip fraction"}
        title = f"gradient with respect to {replayed.gradient_of}; cosine to that of grpo"
        print_table(replayed.overall().drop(*rates), title)
        for figure, name in rates.items():
            shown = replayed.by_turn(figure).filter(pl.col("all") > 0)
            if shown.is_empty():
                say(f"{name}: 0 for every method")
            else:
                print_table(shown, f"{name}, overall and by turn; 0 for every other method")
        for word, sentences in (("note", replayed.notes), ("skipped", replayed.skipped)):
            for method, sentence in sentences.items():
                say(f"{word}: {method} {sentence}")
        if csv is not None:
            write_csv(replayed, csv)
            say(f"figures: {csv}")
        if picture is not None:
            replay_picture(replayed.overall(), replayed.by_turn("gate_rate"), picture)
            say(f"picture: {picture}")
