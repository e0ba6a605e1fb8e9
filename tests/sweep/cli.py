"""`agent-rl sweep` as tests call it."""

from pathlib import Path

from typer.testing import CliRunner

from agent_rl.cli import app

SMALL = {"num_steps": 1, "batch.num_prompts": 2, "batch.group_size": 2, "eval.num_prompts": 4, "checkpoint.every": 0}


def sweep(path: Path, out: Path, *flags: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["sweep", str(path), "--out", str(out), *flags])
    return result.exit_code, " ".join(result.output.split())
