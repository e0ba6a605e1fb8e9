"""`agent-rl warmstart`: make the tiny model that the quickstart starts from."""

from pathlib import Path
from typing import Annotated

import typer

from agent_rl.commands.console import console, one_sentence_errors, say


def warmstart(
    config: Annotated[Path, typer.Argument(help="A warm-start config, such as configs/warmstart.yaml")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Overrides such as seed=1")] = None,
) -> None:
    """Make the tiny model that the quickstart starts from: a new Qwen3 trained on written traces."""
    with one_sentence_errors():
        from rich.progress import Progress

        from agent_rl.config import apply_override, read_yaml
        from agent_rl.settings import check
        from agent_rl.warmstart import WarmstartConfig, run

        mapping = read_yaml(config)
        for override in overrides or []:
            apply_override(mapping, override)
        settings = check(WarmstartConfig, mapping, str(config))
        with Progress(console=console) as bar:
            task = bar.add_task("warm start")
            run(
                settings,
                lambda done: bar.update(
                    task, total=done.num_steps, completed=done.step, description=f"warm start, loss {done.loss:.3f}"
                ),
            )
    say(f"model directory: {settings.output}")
