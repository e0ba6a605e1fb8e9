"""`agent-rl doctor`: what this machine can run, and whether engine and trainer agree."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agent_rl.commands.console import one_sentence_errors, print_table, say

if TYPE_CHECKING:
    from agent_rl.parity import Parity


def doctor(
    parity: Annotated[Path | None, typer.Option(help="Prove that a config's engine and trainer agree at lag 0")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="With --parity: overrides of the config")] = None,
    episodes: Annotated[int, typer.Option(min=1, help="With --parity: episodes to sample")] = 32,
) -> None:
    """Say what this machine can run, with a fix for what it cannot."""
    with one_sentence_errors():
        if parity is not None:
            _prove(parity, overrides or [], episodes)
            return
        if overrides:
            raise ValueError(f"overrides such as {overrides[0]} belong to a config; name it with --parity")
        import polars as pl

        from agent_rl.doctor import machine_checks

        checks = machine_checks()
        rows = [{"": "ok" if c.ok else "no", "what": c.name, "found": c.detail} for c in checks]
        print_table(pl.DataFrame(rows), "")
        for check in checks:
            if not check.ok:
                say(f"{check.name}: {check.fix or check.detail}")


def _prove(path: Path, overrides: list[str], episodes: int) -> None:
    from agent_rl.config import load
    from agent_rl.doctor import MAX_BOUND, MEAN_BOUND, sample_parity

    parity = sample_parity(load(path, overrides), episodes)
    _print(parity)
    if parity.mean < MEAN_BOUND and parity.max < MAX_BOUND:
        say(f"engine and trainer agree: mean below {MEAN_BOUND:g}, max below {MAX_BOUND:g}; at lag 0 the ratio is 1")
        return
    better = parity.better_fit
    hint = f"; the engine's log-probs fit better if read as {better}" if better else ""
    say(f"engine and trainer disagree (mean {parity.mean:.2g}, max {parity.max:.2g}){hint}")
    raise typer.Exit(1)


def _print(parity: "Parity") -> None:
    import polars as pl

    rows = [{**row, "turn": "all" if row["turn"] is None else str(row["turn"])} for row in parity.rows]
    print_table(pl.DataFrame(rows), "|trainer - engine| in log-prob, by turn")
    others = [{"read as": name, "mean": mean} for name, mean in sorted(parity.alternatives.items(), key=lambda i: i[1])]
    print_table(pl.DataFrame(others), "mean if the engine's log-probs were")
