"""`agent-rl eval`: score a policy on held-out prompts."""

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agent_rl.commands.console import one_sentence_errors, print_table, say

if TYPE_CHECKING:
    from agent_rl.config import RunConfig


def evaluate(
    target: Annotated[Path, typer.Argument(help="A run (its newest checkpoint is taken), a checkpoint or a model")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Overrides such as eval.num_samples=8")] = None,
    config: Annotated[Path | None, typer.Option(help="Config to evaluate with; default: the run's own")] = None,
    overlay: Annotated[list[Path] | None, typer.Option(help="File whose keys are laid over the config's")] = None,
    output: Annotated[Path | None, typer.Option(help="New directory for the results; default: in the run")] = None,
) -> None:
    """Score a policy on held-out prompts: avg@k, pass@k and maj@k, with bootstrap intervals over problems."""
    with one_sentence_errors():
        chosen = _choose(target, overrides or [], config, overlay or [])
        if output is not None and output.exists():
            raise ValueError(f"{output} exists already; name a new directory, or remove it")
        from agent_rl.evaluation_record import write_record
        from agent_rl.run import evaluate_model

        evaluation = evaluate_model(chosen.config, chosen.policy_version)
        path = output or _new_directory(chosen.folder, chosen.model.name)
        record = write_record(path, chosen.config, chosen.policy_version, evaluation.rows)
    import polars as pl

    say(f"{chosen.model}, policy version {chosen.policy_version}: {chosen.config.eval.num_prompts} held-out prompts")
    rows = [{"metric": s.name, "value": s.value, "low": s.low, "high": s.high} for s in record.scores]
    print_table(pl.DataFrame(rows), "")
    say("low, high: 95 % bootstrap interval over problems")
    figures = evaluation.figures
    say(f"{figures['eval_turns']:.2f} turns an episode; {int(figures['eval_failed'])} episodes broken")
    say(f"results: {path}")


@dataclass(frozen=True)
class _Choice:
    """What to evaluate, and the folder that gets the results."""

    config: "RunConfig"
    model: Path
    policy_version: int
    folder: Path


def _choose(target: Path, overrides: list[str], config: Path | None, overlays: list[Path]) -> _Choice:
    from agent_rl.config import load
    from agent_rl.pipeline.state import FILE, RunState
    from agent_rl.run import newest_checkpoint

    if not target.is_dir():
        raise ValueError(f"there is nothing at {str(target)!r}; name a run or a model directory")
    model = newest_checkpoint(target) if (target / "config.yaml").is_file() else target
    run = model.parent.parent
    is_checkpoint = (model / FILE).is_file() and (run / "config.yaml").is_file()
    if config is None and not is_checkpoint:
        raise ValueError(f"{target} is no run; say with --config which prompts, tools and sampling to evaluate with")
    chosen = load(config or run / "config.yaml", [*overrides, f"model.path={model}"], overlays=overlays)
    version = RunState.load(model).policy_version if is_checkpoint else 0
    return _Choice(chosen, model, version, (run if is_checkpoint else Path("runs")) / "evaluations")


def _new_directory(folder: Path, name: str) -> Path:
    """FOLDER/NAME, or the first of NAME-2, NAME-3, … that is free."""
    paths = (folder / (name if number == 1 else f"{name}-{number}") for number in itertools.count(1))
    return next(path for path in paths if not path.exists())
