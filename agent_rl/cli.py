"""The command line. Heavy imports stand inside the commands, so that --help answers at once."""

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    import polars as pl

    from agent_rl.config import RunConfig

app = typer.Typer(
    name="agent-rl",
    help="Train tool-using math agents with asynchronous reinforcement learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console()
RUNS = Path("runs")


def say(sentence: str) -> None:
    """Print one line, unbroken: paths in it can be copied."""
    console.print(sentence, highlight=False, soft_wrap=True)


@contextmanager
def one_sentence_errors(hint: Callable[[], str] = str) -> Iterator[None]:
    """What the user can mend is one sentence and exit code 2; a traceback is for our own bugs."""
    try:
        yield
    except Exception as error:
        from sandbox.base import SandboxError

        cause = getattr(error, "cause", None) or error  # Ray wraps what an actor raised
        if not _from_ray(cause) and not isinstance(cause, (ValueError, OSError, SandboxError)):
            raise
        Console(stderr=True).print(f"[bold red]error:[/] {_sentence(cause)}{hint()}", highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        say(f"stopped at once{hint()}")
        raise typer.Exit(130) from None


def _from_ray(error: BaseException) -> bool:
    """An actor that died, a store that is full."""
    return type(error).__module__.startswith("ray.")


def _sentence(error: BaseException) -> str:
    """What to tell of an error. Where an actor died as it was made, Ray's text ends with the reason."""
    text = str(error).strip()
    if not _from_ray(error):
        return text
    lines = text.splitlines()
    return lines[-1].strip() if "creation task" in lines[0] else f"{type(error).__name__}: {lines[0].rstrip('.')}"


@app.command()
def train(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="A config file, then overrides such as objective.clip.type=sat pipeline.exact_lag=8"),
    ] = None,
    method: Annotated[str | None, typer.Option(help="Objective to use: a name from configs/methods")] = None,
    run: Annotated[Path | None, typer.Option(help="Directory of the run; default: a new one in runs/")] = None,
    resume: Annotated[Path | None, typer.Option(help="Continue this run from its newest checkpoint")] = None,
) -> None:
    """Train a policy; everything it records goes to the run directory."""
    with one_sentence_errors():
        config, path = _run_to_train(arguments or [], method, run, resume)
    from agent_rl.live import LiveView
    from agent_rl.pipeline.run_directory import list_checkpoints
    from agent_rl.run import train as train_run

    say(f"run directory: {path}")
    again = f"continue with: agent-rl train --resume {path}"

    def hint() -> str:
        return f"; {again}" if list_checkpoints(path) else ""

    with one_sentence_errors(hint), LiveView(console, path.name, config.num_steps) as view:
        outcome = train_run(config, path, resume is not None, view.show)
    if outcome.complete:
        say(f"done at step {outcome.step}; look at it with: agent-rl analyze {path}")
    elif outcome.step == 0:
        say("stopped before the first step; there is nothing to continue from")
    else:
        say(f"stopped at step {outcome.step}; {again}")


def _run_to_train(
    arguments: list[str], method: str | None, run: Path | None, resume: Path | None
) -> "tuple[RunConfig, Path]":
    from agent_rl.config import load

    files = [argument for argument in arguments if "=" not in argument]
    overrides = [argument for argument in arguments if "=" in argument]
    if resume is not None:
        if files or method is not None or run is not None:
            raise ValueError("--resume takes its config and directory from the run; give overrides only")
        return _resumed_config(resume, overrides), resume
    if len(files) != 1:
        got = f"; these are neither: {', '.join(files[1:])}" if files else ""
        raise ValueError(f"give one config file, such as configs/quickstart.yaml, and overrides as key=value{got}")
    config = load(Path(files[0]), overrides, method)
    from agent_rl.pipeline.run_directory import list_checkpoints
    from agent_rl.run import build_prompts

    if run is not None and run.exists() and any(run.iterdir()):
        way = f"continue it with --resume {run}" if list_checkpoints(run) else "empty it"
        raise ValueError(f"{run} already holds files; {way} or name another directory")
    build_prompts(config)  # a missing file is said before a directory is made
    return config, run or _new_run(Path(files[0]).stem)


def _resumed_config(run: Path, overrides: list[str]) -> "RunConfig":
    """The run's own config with overrides that leave alone what its recorded rollouts were made with."""
    from agent_rl.config import load
    from agent_rl.pipeline.state import RunState
    from agent_rl.run import newest_checkpoint

    state = RunState.load(newest_checkpoint(run))
    before, after = load(run / "config.yaml"), load(run / "config.yaml", overrides)
    for key in ("seed", "model", "prompts", "batch", "rollout", "reward", "pipeline"):
        if getattr(before, key) != getattr(after, key):
            raise ValueError(f"{key} cannot change when a run is resumed; start a new run with it")
    if after.num_steps <= state.step:
        raise ValueError(f"{run} is at step {state.step} of {after.num_steps}; give a higher num_steps to go on")
    return after


def _new_run(name: str) -> Path:
    """Make runs/NAME, or the first free runs/NAME-2, -3, …: runs that start together get one each."""
    for number in itertools.count(1):
        path = RUNS / (name if number == 1 else f"{name}-{number}")
        with suppress(FileExistsError):
            path.mkdir(parents=True)
            return path
    raise AssertionError


@app.command(name="eval")
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
    _print(pl.DataFrame(columns), "")


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


@app.command()
def analyze(
    run: Annotated[Path, typer.Argument(help="Directory of a run")],
    first_step: Annotated[int, typer.Option(help="Leave out the steps before this one")] = 0,
    picture: Annotated[Path | None, typer.Option(help="Also draw the run into this PNG file")] = None,
) -> None:
    """Show mismatch, gating, clipping and entropy by turn, and why episodes ended."""
    with one_sentence_errors():
        from agent_rl.analysis import tables

        _print(tables.per_turn(run, first_step), "by turn; d = trainer log-prob - behaviour log-prob")
        _print(tables.stop_reasons(run), "why episodes ended")
        if picture is not None:
            from agent_rl.analysis import plots
            from agent_rl.pipeline.run_directory import read_metrics

            plots.run_picture(run, read_metrics(run), picture)
            say(f"picture: {picture}")


_HEADINGS = {
    "mean_abs_d": "mean |d|",
    "gate_rate": "gate",
    "clip_fraction": "clip",
    "kept_size": "kept",
    "lag_mean": "lag",
    "policy_lag": "policy",
    "implementation": "implem.",
    "stop_reason": "stop reason",
    "reward_mean": "reward",
    "turns_mean": "turns",
    "gradient_norm": "gradient",
    "dropped_fraction": "dropped",
    "eps_low": "ε low",
    "eps_high": "ε high",
}


def _print(frame: "pl.DataFrame", title: str) -> None:
    shown = [name for name in frame.columns if not _is_empty(frame[name])]
    table = Table(
        title=title,
        title_justify="left",
        box=box.HORIZONTALS,
        padding=(0, 1),
        collapse_padding=True,
        pad_edge=False,
    )
    for name in shown:
        table.add_column(_HEADINGS.get(name, name), justify="right", no_wrap=True)
    for row in frame.select(shown).iter_rows():
        table.add_row(*(f"{cell:.3g}" if isinstance(cell, float) else f"{cell}" for cell in row))
    console.print(table)


def _is_empty(column: "pl.Series") -> bool:
    """Whether a column holds nothing but NaN, as kept-set sizes do under full support."""
    return column.dtype.is_float() and bool(column.is_nan().all())


@app.command()
def replay(
    target: Annotated[Path, typer.Argument(help="Directory of a run, or a Parquet file of one batch")],
    step: Annotated[int | None, typer.Option(help="The step of the run whose batch and checkpoint are taken")] = None,
    methods: Annotated[str, typer.Option(help="Names from configs/methods with commas between, or all")] = "all",
    csv: Annotated[Path | None, typer.Option(help="Also write all figures, by turn too, into this file")] = None,
    picture: Annotated[Path | None, typer.Option(help="Also draw the comparison into this PNG file")] = None,
) -> None:
    """Put one recorded batch through many objectives: loss, gradient, gating and clipping side by side."""
    with one_sentence_errors():
        import polars as pl

        from agent_rl.analysis.replay_plot import replay_picture
        from agent_rl.replay import replay_batch, write_csv

        replayed = replay_batch(target, step, methods)
        rates = {"gate_rate": "gate rate", "clip_fraction": "clip fraction"}
        title = f"gradient with respect to {replayed.gradient_of}; cosine to that of grpo"
        _print(replayed.overall().drop(*rates), title)
        for figure, name in rates.items():
            shown = replayed.by_turn(figure).filter(pl.col("all") > 0)
            if shown.is_empty():
                say(f"{name}: 0 for every method")
            else:
                _print(shown, f"{name}, overall and by turn; 0 for every other method")
        for word, sentences in (("note", replayed.notes), ("skipped", replayed.skipped)):
            for method, sentence in sentences.items():
                say(f"{word}: {method} {sentence}")
        if csv is not None:
            write_csv(replayed, csv)
            say(f"figures: {csv}")
        if picture is not None:
            replay_picture(replayed.overall(), replayed.by_turn("gate_rate"), picture)
            say(f"picture: {picture}")


@app.command()
def warmstart(
    config: Annotated[Path, typer.Argument(help="A warm-start config, such as configs/warmstart.yaml")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Overrides such as seed=1")] = None,
) -> None:
    """Make the tiny model that the quickstart starts from: a new Qwen3 trained on written traces."""
    with one_sentence_errors():
        from rich.progress import Progress

        from agent_rl.config import apply_override, read_yaml
        from agent_rl.settings import check
        from agent_rl.warmstart import WarmstartConfig, run

        mapping = read_yaml(config)
        for override in overrides or []:
            apply_override(mapping, override)
        settings = check(WarmstartConfig, mapping, str(config))
        with Progress(console=console) as bar:
            task = bar.add_task("warm start")
            run(settings, lambda p: bar.update(task, total=p.num_steps, completed=p.step))
    say(f"model directory: {settings.output}")


def main() -> None:
    """The console script."""
    sys.exit(app())


if __name__ == "__main__":
    main()
