"""`agent-rl audit-bound`: the improvement bound's estimate against the truth."""

from pathlib import Path
from typing import Annotated

import typer

from agent_rl.commands.console import one_sentence_errors, print_table


def audit_bound(
    run: Annotated[Path, typer.Argument(help="Directory of a run, with the weights that its tokens were sampled with")],
    step: Annotated[int, typer.Option(help="The step whose batch and checkpoint are taken")],
) -> None:
    """Compare the estimated distance from the rollouts with the exact one, by turn, on one recorded batch."""
    with one_sentence_errors():
        from agent_rl.bound_audit import audit_bound as audit

        title = "total variation an episode by turn, exact and from sampled tokens; relative figures, see docs/bound.md"
        print_table(audit(run, step), title)
