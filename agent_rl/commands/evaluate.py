"""`agent-rl eval`: score a policy on held-out prompts."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agent_rl.commands.console import one_sentence_errors, print_table, say
from agent_rl.commands.directories import numbered

if TYPE_CHECKING:
    from agent_rl.config import RunConfig
    from agent_rl.evaluation_record import EvaluationRecord


def evaluate(
    target: Annotated[
        str,
        typer.Argument(
            help="A run (its newest checkpoint is taken), a checkpoint, a model, or the address of a running SGLang "
            "server, which is evaluated with the weights that it has"
        ),
    ],
    overrides: Annotated[list[str] | None, typer.Argument(help="Overrides such as eval.num_samples=8")] = None,
    config: Annotated[Path | None, typer.Option(help="Config to evaluate with; default: the run's own")] = None,
    overlay: Annotated[list[Path] | None, typer.Option(help="File whose keys are laid over the config's")] = None,
    output: Annotated[Path | None, typer.Option(help="New directory for the results; default: in the run")] = None,
) -> None:
    """Score a policy on held-out prompts: avg@k, pass@k and maj@k, with bootstrap intervals over problems."""
    with one_sentence_errors():
        choose = _choose_server if target.startswith(("http://", "https://")) else _choose
        chosen = choose(target, overrides or [], config, overlay or [])
        if output is not None and output.exists():
            raise ValueError(f"{output} exists already; name a new directory, or remove it")
        from agent_rl.evaluation_record import record_of, write_record
        from agent_rl.run import evaluate_model

        evaluation = evaluate_model(chosen.config, chosen.policy_version)
        record = record_of(chosen.config, chosen.policy_version, evaluation.rows, chosen.model, chosen.server)
        _say(record, evaluation.figures)  # first: the disk may be full
        named = numbered(chosen.folder / Path(chosen.model).name)
        path = output or next(directory for directory in named if not directory.exists())
        write_record(path, record)
    say(f"results: {path}")


def _say(record: "EvaluationRecord", figures: dict[str, Any]) -> None:
    import polars as pl

    say(f"{record.policy}: {record.rows['problem'].n_unique()} held-out prompts")
    rows = [{"metric": s.name, "value": s.value, "low": s.low, "high": s.high} for s in record.scores]
    print_table(pl.DataFrame(rows), "")
    say("low, high: 95 % bootstrap interval over problems")
    say(f"{figures['eval_turns']:.2f} turns an episode; {int(figures['eval_failed'])} episodes broken")


@dataclass(frozen=True)
class _Choice:
    """What to evaluate, and the folder that gets the results."""

    config: "RunConfig"
    model: str
    policy_version: int
    folder: Path
    server: dict[str, str] | None = None


def _choose_server(url: str, overrides: list[str], config: Path | None, overlays: list[Path]) -> _Choice:
    """Choose a running server as it is; its tokenizer is read where the server says, else at `model.path`."""
    from agent_rl.config import load
    from agent_rl.rollout.sglang.served import check_same_model, served_model

    if config is None:
        raise ValueError(f"say with --config which prompts, tools and sampling to evaluate {url} with")
    served = asyncio.run(served_model(url))
    directory = served.directory()
    engine = ["rollout.engine.type=sglang", *([f"model.path={directory}"] if directory else [])]
    chosen = load(config, [*engine, *overrides], overlays=overlays)
    if directory is None:
        asyncio.run(check_same_model(served, chosen.model.directory))
    if served.context < chosen.rollout.max_episode_tokens:
        raise ValueError(
            f"the server at {url} takes sequences of {served.context} tokens, but rollout.max_episode_tokens is "
            f"{chosen.rollout.max_episode_tokens}; lower it, or start the server with a longer --context-length"
        )
    as_it_is = {
        "urls": [url],
        "as_served": served.weight_version,
        "max_sequence_tokens": chosen.rollout.max_episode_tokens,
    }
    rollout = chosen.rollout.model_copy(update={"engine": chosen.rollout.engine.model_copy(update=as_it_is)})
    server = {"url": url, "weight_version": served.weight_version}
    folder = Path("runs") / "evaluations"
    return _Choice(chosen.model_copy(update={"rollout": rollout}), served.model, 0, folder, server)


def _choose(place: str, overrides: list[str], config: Path | None, overlays: list[Path]) -> _Choice:
    target = Path(place)
    from agent_rl.config import load
    from agent_rl.pipeline.state import FILE, RunState
    from agent_rl.run import newest_checkpoint

    if not target.is_dir():
        raise ValueError(f"there is nothing at {str(target)!r}; name a run, a model directory or a server's address")
    model = newest_checkpoint(target) if (target / "config.yaml").is_file() else target
    run = model.parent.parent
    is_checkpoint = (model / FILE).is_file() and (run / "config.yaml").is_file()
    if config is None and not is_checkpoint:
        raise ValueError(f"{target} is no run; say with --config which prompts, tools and sampling to evaluate with")
    chosen = load(config or run / "config.yaml", [*overrides, f"model.path={model}"], overlays=overlays)
    version = RunState.load(model).policy_version if is_checkpoint else 0
    return _Choice(chosen, str(model), version, (run if is_checkpoint else Path("runs")) / "evaluations")
