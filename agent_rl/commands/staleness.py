"""`agent-rl staleness`: predicts the mean lag of a config or a run, and recommends settings for another lag."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agent_rl.commands.console import one_sentence_errors, print_table, say

if TYPE_CHECKING:
    from agent_rl.analysis.measured_lag import MeasuredLag
    from agent_rl.config import RunConfig
    from agent_rl.pipeline.staleness import Load

_RHOS = (0.5, 0.8, 0.95, 1.05, 1.25, 2.0)
_MEANING = {
    "rho": "rollout speed over training speed",
    "concurrency": "responses sampled at once",
    "batch": "responses a step",
    "queue": "responses that the queue holds",
    "tail": "longest of a group over the mean",
}


def staleness(
    source: Annotated[
        Path | None, typer.Argument(help="A run's directory, for its measured figures, or a config file")
    ] = None,
    rho: Annotated[
        float | None, typer.Option(help="Responses a second: rollouts over trainer, each unhindered")
    ] = None,
    concurrency: Annotated[float | None, typer.Option(help="Responses sampled at once")] = None,
    batch: Annotated[float | None, typer.Option(help="Responses a training step")] = None,
    queue: Annotated[float | None, typer.Option(help="Responses that the queue holds")] = None,
    tail: Annotated[float | None, typer.Option(help="Mean longest response of a group over the mean response")] = None,
    full: Annotated[
        str | None, typer.Option(help="A full queue lets rollouts `wait` or will `drop` its oldest; default: wait")
    ] = None,
    side: Annotated[str | None, typer.Option(help="At rho = 1: the limit from the `left` or the `right`")] = None,
    target: Annotated[float | None, typer.Option(help="Recommend concurrency and queue for this mean lag")] = None,
    first_step: Annotated[int, typer.Option(help="Of a run, leave out the steps before this one")] = 0,
) -> None:
    """Predict mean lag before and in the queue, beside what a run measured; recommend concurrency and queue."""
    with one_sentence_errors():
        from agent_rl.pipeline.staleness import configured

        for option, choice, known in (("full", full, ("wait", "drop")), ("side", side, ("left", "right"))):
            if choice is not None and choice not in known:
                raise ValueError(f"--{option} is {' or '.join(known)}, got {choice!r}")
        config, measured = _read(source, first_step)
        given: dict[str, float | None] = {
            "rho": rho,
            "concurrency": concurrency,
            "batch": batch,
            "queue": queue,
            "tail": tail,
        }
        figures = {name: (value, "given") for name, value in given.items() if value is not None}
        if measured is not None:
            figures.setdefault("tail", (measured.tail, "measured"))
        figures.setdefault("tail", (1.0, "assumed"))
        if config is not None:
            for name, value in zip(
                ("concurrency", "batch", "queue"), configured(config, figures["tail"][0]), strict=True
            ):
                figures.setdefault(name, (value, "config"))
        if measured is not None:
            figures.setdefault("rho", (measured.rho(figures["concurrency"][0]), "measured"))
        if missing := [name for name in ("concurrency", "batch", "queue") if name not in figures]:
            raise ValueError(f"--{missing[0]} is missing; give it, or name a run or a config file")
        _show(figures, config, measured, {"full": full or "wait"}, side, target)


def _read(source: Path | None, first_step: int) -> "tuple[RunConfig | None, MeasuredLag | None]":
    from agent_rl.config import load

    if source is None:
        return None, None
    if source.suffix in (".yaml", ".yml"):
        return load(source), None
    from agent_rl.analysis.measured_lag import measured_lag
    from agent_rl.analysis.recorded import open_runs

    measured = measured_lag(open_runs([source])[0], first_step)
    return load(source / "config.yaml"), measured


def _show(
    figures: dict[str, tuple[float, str]],
    config: "RunConfig | None",
    measured: "MeasuredLag | None",
    rule: dict[str, Any],
    side: str | None,
    target: float | None,
) -> None:
    import polars as pl

    from agent_rl.pipeline.staleness import Load, mean_lag

    names = [name for name in _MEANING if name in figures]
    known = [{"figure": n, "value": float(figures[n][0]), "from": figures[n][1], "": _MEANING[n]} for n in names]
    print_table(pl.DataFrame(known), "figures")
    values = {name: value for name, (value, _) in figures.items()}
    loads = [Load(**(values | rule | {"rho": rho})) for rho in ([values["rho"]] if "rho" in values else _RHOS)]
    rows = [_lag_row("predicted", load, mean_lag(load, side)) for load in loads]  # type: ignore[arg-type]
    updates = config.updates_per_batch if config is not None else 1
    if measured is not None:
        lag = _lag(measured.pre_queue / updates, measured.in_queue / updates)
        rows.append({"": "measured", "rho": None} | lag)
    unit = "policy versions" if updates == 1 else f"batches of {updates} policy versions each"
    print_table(pl.DataFrame(rows), f"mean lag of continuous rollouts, in {unit}; a full queue: {rule['full']}")
    if config is not None:
        say(_promise(config.pipeline))
    if measured is not None:
        mean = measured.token_lag / updates
        say(f"mean over trained tokens: {mean:.2f}, below the total where weights change in flight")
    if target is not None:
        if len(loads) > 1:
            raise ValueError("--target needs --rho: how fast rollouts are at this concurrency, over the trainer")
        _recommend(target, loads[0], config)


def _lag_row(name: str, load: "Load", lag: Any) -> dict[str, Any]:
    return {"": name, "rho": load.rho} | _lag(lag.pre_queue, lag.in_queue)


def _lag(pre_queue: float, in_queue: float) -> dict[str, float]:
    return {"pre-queue": pre_queue, "in-queue": in_queue, "total": pre_queue + in_queue}


def _promise(pipeline: Any) -> str:
    """The lag that the regime itself guarantees; most regimes leave nothing to predict."""
    if (max_lag := getattr(pipeline, "max_lag", None)) is not None:
        return f"pipeline.type {pipeline.type} never trains on a token with more lag than {max_lag} batches"
    if pipeline.type == "sync":
        return "pipeline.type sync: the lag is 0; the prediction is for the same figures with continuous rollouts"
    lag = getattr(pipeline, "exact_lag", None)
    promised = f"min(step, {lag})" if lag is not None else f"1 to {pipeline.broadcast_interval} in turn"
    return f"pipeline.type {pipeline.type}: the lag is {promised} batches; the prediction is for continuous rollouts"


def _recommend(target: float, load: "Load", config: "RunConfig | None") -> None:
    from agent_rl.pipeline.staleness import recommend

    advice = recommend(target, load)
    say(
        f"for a mean lag of {target:g}: {advice.concurrency} responses at once and a queue of {advice.queue}; "
        f"rho is {advice.rho:.2f} then, if speed grows with concurrency, and mean lag {advice.lag.total:.2f}"
    )
    if config is not None:
        a_worker = max(advice.concurrency // config.rollout.num_workers, 1)
        groups = int((advice.concurrency * load.tail + advice.queue) // config.batch.group_size)
        keys = f"rollout.max_concurrent_episodes={a_worker}"
        say(f"as keys: {keys}, and with pipeline.type=fully_async pipeline.max_groups={max(groups, 1)}")
