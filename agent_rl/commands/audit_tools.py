"""`agent-rl audit-tools`: whether tools still answer as they did while rolling out."""

from pathlib import Path
from typing import Annotated

import typer

from agent_rl.commands.console import one_sentence_errors, print_table, say


def audit_tools(
    run: Annotated[Path, typer.Argument(help="Directory of a run")],
    episodes: Annotated[int, typer.Option(min=1, help="Recorded episodes whose tool calls are made again")] = 200,
) -> None:
    """Make recorded tool calls again in fresh sessions, twice: how often a turn's answer differs."""
    with one_sentence_errors():
        from agent_rl.tool_audit import audit_tools as audit

        table = audit(run, episodes)
        print_table(table, "tool answers that differ from the recorded ones, by turn; flaky: between two repetitions")
        say("environment: differing answers an episode, a bound on the tools' share of the improvement bound's budget")
