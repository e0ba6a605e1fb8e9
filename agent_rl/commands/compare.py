"""`agent-rl compare`: two evaluations side by side."""

from pathlib import Path
from typing import Annotated

import typer

from agent_rl.commands.console import one_sentence_errors, print_table, say


def compare(
    a: Annotated[Path, typer.Argument(help="A directory that `agent-rl eval` wrote")],
    b: Annotated[Path, typer.Argument(help="Another one")],
    force: Annotated[bool, typer.Option("--force", help="Compare although the settings differ")] = False,
) -> None:
    """Compare two evaluations problem by problem, with paired bootstrap intervals."""
    with one_sentence_errors():
        from agent_rl import evaluation_record as records

        first, second = records.read_record(a), records.read_record(b)
        differing = records.differing_settings(first, second)
        if differing and not force:
            said = "; ".join(
                f"{key} is {old!r} in one and {new!r} in the other" for key, (old, new) in differing.items()
            )
            raise ValueError(f"the settings differ: {said}; evaluate both alike, or compare anyway with --force")
        table = records.compare(first, second)
        for name, record in (("a", first), ("b", second)):
            say(f"{name}: {record.policy}")
        if differing:
            say(f"compared although these settings differ: {', '.join(differing)}")
        print_table(table, "")
        say("difference: b - a; low, high: its paired 95 % bootstrap interval over problems")
