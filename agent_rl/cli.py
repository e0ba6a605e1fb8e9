"""The command line: `agent-rl COMMAND`. Each command is a file of `agent_rl/commands/`."""

import sys

import typer

from agent_rl.commands.analyze import analyze
from agent_rl.commands.audit_bound import audit_bound
from agent_rl.commands.audit_tools import audit_tools
from agent_rl.commands.compare import compare
from agent_rl.commands.dashboard import dashboard
from agent_rl.commands.data import data
from agent_rl.commands.doctor import doctor
from agent_rl.commands.evaluate import evaluate
from agent_rl.commands.replay import replay
from agent_rl.commands.report import report
from agent_rl.commands.sweep import sweep
from agent_rl.commands.train import train
from agent_rl.commands.warmstart import warmstart

app = typer.Typer(
    name="agent-rl",
    help="Train tool-using math agents with asynchronous reinforcement learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(train)
app.command(name="eval")(evaluate)
app.command()(compare)
app.command()(sweep)
app.command()(analyze)
app.command()(report)
app.command()(dashboard)
app.command()(replay)
app.command()(audit_bound)
app.command()(audit_tools)
app.command()(warmstart)
app.command()(doctor)
app.add_typer(data, name="data")


def main() -> None:
    """The console script."""
    sys.exit(app())


if __name__ == "__main__":
    main()
