"""`agent-rl train`: start a run, or continue one."""

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agent_rl.commands.console import console, one_sentence_errors, say
from agent_rl.commands.directories import numbered

if TYPE_CHECKING:
    from agent_rl.config import RunConfig
    from agent_rl.run import Prompts

RUNS = Path("runs")


def train(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="A config file, then overrides such as objective.clip.type=sat pipeline.exact_lag=8"),
    ] = None,
    method: Annotated[str | None, typer.Option(help="Objective to use: a name from configs/methods")] = None,
    overlay: Annotated[
        list[Path] | None, typer.Option(help="File whose keys are laid over the config's, as in configs/data")
    ] = None,
    run: Annotated[Path | None, typer.Option(help="Directory of the run; default: a new one in runs/")] = None,
    resume: Annotated[Path | None, typer.Option(help="Continue this run from its newest checkpoint")] = None,
) -> None:
    """Train a policy; everything it records goes to the run directory."""
    with one_sentence_errors():
        config, path, prompts = _run_to_train(arguments or [], method, overlay or [], run, resume)
    from agent_rl.live import LiveView
    from agent_rl.pipeline.run_directory import list_checkpoints
    from agent_rl.run import train as train_run

    say(f"run directory: {path}")
    again = f"continue with: agent-rl train --resume {path}"

    def hint() -> str:
        return f"; {again}" if list_checkpoints(path) else ""

    with one_sentence_errors(hint), LiveView(console, path.name, config.num_steps) as view:
        outcome = train_run(config, path, resume is not None, view.show, prompts)
    if outcome.complete:
        say(f"done at step {outcome.step}; look at it with: agent-rl analyze {path}")
    elif outcome.step == 0:
        say("stopped before the first step; there is nothing to continue from")
    else:
        say(f"stopped at step {outcome.step}; {again}")


def _run_to_train(
    arguments: list[str], method: str | None, overlays: list[Path], run: Path | None, resume: Path | None
) -> "tuple[RunConfig, Path, Prompts | None]":
    from agent_rl.config import load

    files = [argument for argument in arguments if "=" not in argument]
    overrides = [argument for argument in arguments if "=" in argument]
    if resume is not None:
        if files or method is not None or overlays or run is not None:
            raise ValueError("--resume takes its config and directory from the run; give overrides only")
        return _resumed_config(resume, overrides), resume, None
    if len(files) != 1:
        got = f"; these are neither: {', '.join(files[1:])}" if files else ""
        raise ValueError(f"give one config file, such as configs/quickstart.yaml, and overrides as key=value{got}")
    config = load(Path(files[0]), overrides, method, overlays)
    from agent_rl.pipeline.run_directory import list_checkpoints
    from agent_rl.run import checked_prompts

    if run is not None and run.exists() and any(run.iterdir()):
        way = f"continue it with --resume {run}" if list_checkpoints(run) else "empty it"
        raise ValueError(f"{run} already holds files; {way} or name another directory")
    prompts = checked_prompts(config)  # reports a missing file before a directory is made
    return config, run or _new_run(Path(files[0]).stem), prompts


def _resumed_config(run: Path, overrides: list[str]) -> "RunConfig":
    """The run's own config with the overrides; refuses to change what shaped its recorded rollouts."""
    from agent_rl.config import load
    from agent_rl.pipeline.state import RunState
    from agent_rl.run import newest_checkpoint

    state = RunState.load(newest_checkpoint(run))
    before, after = load(run / "config.yaml"), load(run / "config.yaml", overrides)
    for key in ("seed", "model", "routing_replay", "prompts", "batch", "rollout", "reward", "pipeline"):
        if getattr(before, key) != getattr(after, key):
            raise ValueError(f"{key} cannot change when a run is resumed; start a new run with it")
    if after.num_steps <= state.step:
        raise ValueError(f"{run} is at step {state.step} of {after.num_steps}; give a higher num_steps to go on")
    return after


def _new_run(name: str) -> Path:
    """Make the first of runs/NAME, runs/NAME-2, … that is free: runs that start together get one each."""
    for path in numbered(RUNS / name):
        with suppress(FileExistsError):
            path.mkdir(parents=True)
            return path
    raise AssertionError
