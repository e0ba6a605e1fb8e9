"""`agent-rl eval`: score a policy on held-out prompts."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agent_rl.commands.console import one_sentence_errors, print_table, say

if TYPE_CHECKING:
    from agent_rl.config import RunConfig


def evaluate(
    target: Annotated[Path, typer.Argument(help="A run (its newest checkpoint is taken) or a model directory")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Overrides such as eval.num_samples=8")] = None,
    config: Annotated[Path | None, typer.Option(help="Config to evaluate with; default: the run's own")] = None,
) -> None:
    """Score a policy on held-out prompts: avg@k and pass@k."""
    with one_sentence_errors():
        from agent_rl.run import evaluate_model, newest_checkpoint

        run_config, model = _model_to_evaluate(target, overrides or [], config, newest_checkpoint)
        figures = evaluate_model(run_config)
    import polars as pl

    k = run_config.eval.num_samples
    columns = {"prompts": run_config.eval.num_prompts, f"avg@{k}": figures["eval_avg"]}
    columns |= {f"pass@{k}": figures["eval_pass"], "turns": figures["eval_turns"]}
    say(f"{model} on held-out prompts")
    print_table(pl.DataFrame(columns), "")


def _model_to_evaluate(
    target: Path, overrides: list[str], config: Path | None, newest_checkpoint: Any
) -> "tuple[RunConfig, Path]":
    from agent_rl.config import load

    if not target.is_dir():
        raise ValueError(f"there is nothing at {str(target)!r}; name a run or a model directory")
    is_run = (target / "config.yaml").is_file()
    model = newest_checkpoint(target) if is_run else target
    own = target / "config.yaml" if is_run else target.parent.parent / "config.yaml"
    if config is None and not own.is_file():
        raise ValueError(f"{target} is no run; say with --config which prompts, tools and sampling to evaluate with")
    return load(config or own, [*overrides, f"model.path={model}"]), model
