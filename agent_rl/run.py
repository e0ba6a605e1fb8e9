"""Builds the parts of a run from its config and runs the training loop."""

import contextlib
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray

from agent_rl import registry
from agent_rl.config import RunConfig
from agent_rl.data.check import check_overlap, prompts_of
from agent_rl.data.sources.base import PromptSource
from agent_rl.pipeline.batches import BatchController
from agent_rl.pipeline.cluster import Placement, cluster
from agent_rl.pipeline.cluster import local_ray as local_ray
from agent_rl.pipeline.continuous import ContinuousController
from agent_rl.pipeline.controller import Controller, Stages, TrainerDiedError, results_of, trainer_results
from agent_rl.pipeline.evaluation import Evaluation, collect_evaluation, start_evaluation
from agent_rl.pipeline.figures import OnRow
from agent_rl.pipeline.pacing import Pacing
from agent_rl.pipeline.run_directory import RunDirectory, list_checkpoints, lock
from agent_rl.pipeline.schedule import Schedule
from agent_rl.pipeline.state import SERVED_WEIGHTS, RunState, policy_version_at
from agent_rl.pipeline.wandb_log import wandb_log
from agent_rl.pipeline.watchdog import Watchdog, Watched
from agent_rl.pipeline.workers import MAX_RESTARTS, WorkerPool
from agent_rl.rollout.renderer import Renderer
from agent_rl.rollout.worker import RolloutWorker
from agent_rl.tool_server import ToolServer
from agent_rl.trainer.group import TrainGroup
from agent_rl.trainer.worker import TrainWorker
from agent_rl.weights.base import WeightsLostError

Prompts = tuple[PromptSource, PromptSource]
"""The training prompts and the held-out prompts."""
ANYWHERE = Placement()
_MAX_CALLS = 100_000
"""Calls that a worker runs at once. `fully_async` makes one for each group, and a new version of the weights must not
wait in line behind them, as it would at Ray's default of 1000."""


@dataclass(frozen=True)
class RunResult:
    """How a run ended. `step`: rollout batches trained. `complete`: whether these are all, or the run was stopped."""

    step: int
    complete: bool


def train(config: RunConfig, path: Path, resume: bool, on_row: OnRow, prompts: Prompts | None = None) -> RunResult:
    """Run `config` in the run directory `path`, from its newest checkpoint if `resume`.

    If the trainer dies, the run goes back to its newest checkpoint and continues. `prompts`: the result of
    `checked_prompts`, if the caller has it already. Raises `ValueError` if the run cannot start or go on, with the
    reason, and `StalledError` if the watchdog stops it.
    """
    if resume:
        newest_checkpoint(path)  # before the lock makes a directory of a wrong path
    with lock(path):  # before the checkpoint is chosen: another process may be about to write its last one
        checkpoint = newest_checkpoint(path) if resume else None
        if checkpoint:
            _check_resumed(path, RunState.load(checkpoint), config)
        prompts = prompts or checked_prompts(config)
        with wandb_log(config, path, on_row) as on_row:
            return _train_through_deaths(checkpoint, config, path, prompts, on_row)


def _train_through_deaths(
    checkpoint: Path | None, config: RunConfig, path: Path, prompts: Prompts, on_row: OnRow
) -> RunResult:
    num_deaths = 0
    while True:
        try:
            return train_from(checkpoint, config, path, prompts, on_row)
        except (TrainerDiedError, WeightsLostError) as death:
            num_deaths += 1
            if num_deaths > MAX_RESTARTS:
                raise ValueError(_gave_up(num_deaths, death)) from death
            checkpoint = next(reversed(list_checkpoints(path)), None)
            where = checkpoint.name if checkpoint else "the start"
            print(f"the trainer died; all of the run goes back to {where} and on from there", file=sys.stderr)


def _gave_up(num_deaths: int, last: Exception) -> str:
    """The message of a run that gives up. `last`: the last error, which Ray may have wrapped in a worker's stack."""
    reason = str(getattr(last, "cause", last)).strip().splitlines()[0].rstrip(".")
    return (
        f"the trainer died {num_deaths} times, last: {reason}; see whether its machine runs out of memory (lower "
        "trainer.max_tokens_per_microbatch) or its node goes down, then resume the run"
    )


def _check_resumed(path: Path, state: RunState, config: RunConfig) -> None:
    if state.evaluating is not None and not config.eval.workers:
        version = policy_version_at(state.evaluating, state.updates_per_batch)
        raise ValueError(
            f"{path} was evaluating version {version} beside training and has to do so again; "
            "set eval.workers to 1 or more"
        )
    if state.updates_per_batch != config.updates_per_batch:
        raise ValueError(
            f"{path} made {state.updates_per_batch} updates of each batch, and the config now asks for "
            f"{config.updates_per_batch}, which would miscount its policy versions; leave trainer.num_minibatches * "
            "trainer.num_epochs as it was"
        )


def train_from(checkpoint: Path | None, config: RunConfig, path: Path, prompts: Prompts, on_row: OnRow) -> RunResult:
    """Run `config` from a checkpoint, or from the start. What `path` holds of later steps is removed."""
    state = RunState.load(checkpoint) if checkpoint else RunState()
    plan = plan_of(config, state, resumed=checkpoint is not None)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ToolServer(config.sandbox))
        placement = stack.enter_context(cluster(config, with_trainer=True))
        stages = start_stages(config, prompts, server, plan.waves, placement)
        stack.callback(stages.close)
        serve_initial_weights(stages, checkpoint, state.step, plan.served(state.step))
        directory = RunDirectory(path, config, state)
        stack.callback(directory.close)
        controller = build_controller(config, plan, stages, directory, on_row)
        if checkpoint:
            controller.resume_evaluation(checkpoint)
        stack.enter_context(watch(config, stages, controller, path / "stacks"))
        with stop_on_interrupt(controller):
            controller.run()
    return RunResult(controller.step, controller.step == config.num_steps)


def plan_of(config: RunConfig, state: RunState, resumed: bool) -> Schedule | Pacing:
    """The plan of the regime: when to sample and to train. `resumed`: whether `state` is from a checkpoint."""
    regime = registry.build("pipeline", config.pipeline)
    plan: Schedule | Pacing = regime.plan(config.batch.num_prompts, config.num_steps)
    if isinstance(plan, Pacing):
        return plan
    schedule = replace(plan, ramps=state.ramps)
    return schedule.continued(state.step, len(state.queue)) if resumed else schedule


def build_controller(
    config: RunConfig, plan: Schedule | Pacing, stages: Stages, directory: RunDirectory, on_row: OnRow
) -> Controller:
    """The training loop for `plan`."""
    if isinstance(plan, Pacing):
        return ContinuousController(config, plan, stages, directory, on_row)
    return BatchController(config, plan, stages, directory, on_row)


def start_stages(
    config: RunConfig, prompts: Prompts, server: ToolServer, waves: bool, placement: Placement = ANYWHERE
) -> Stages:
    """Start the Ray actors of a run and build its other parts. Close the stages when done."""
    kind = TrainWorker if config.num_trainer_ranks == 1 else TrainGroup
    trainer = ray.remote(kind).options(**placement.trainer()).remote(config)
    stages = Stages(
        prompts=prompts[0],
        eval_prompts=prompts[1],
        workers=start_workers(config, server, waves, placement),
        trainer=trainer,
        channel=registry.build(
            "weights",
            config.weights,
            trainer=trainer,
            num_workers=config.rollout.num_workers,
            engine=config.rollout.engine,
        ),
        tool_server=server,
        updates_per_batch=config.updates_per_batch,
        eval_workers=start_workers(config, server, waves, placement, for_evaluation=True)
        if config.eval.workers
        else None,
    )
    for pool in stages.pools:
        pool.check = stages.check
    return stages


def start_workers(
    config: RunConfig, server: ToolServer, waves: bool, placement: Placement = ANYWHERE, for_evaluation: bool = False
) -> WorkerPool:
    """Start the workers of training, or those that only evaluate, whose places come after the others."""
    worker = ray.remote(max_concurrency=_MAX_CALLS)(RolloutWorker)
    first = config.rollout.num_workers if for_evaluation else 0

    def start(place: int) -> Any:
        options = placement.worker(first + place)
        return worker.options(**options).remote(config, server.url, waves, server.token, first + place)

    if for_evaluation:
        return WorkerPool(start, config.eval.workers, role="evaluation")
    return WorkerPool(start, config.rollout.num_workers)


@contextlib.contextmanager
def watch(config: RunConfig, stages: Stages, controller: Controller, stacks: Path) -> Iterator[None]:
    """Let a watchdog look at a run. With `policy: stop` it stops the run through `stages.check`."""
    watched = Watched(
        workers=lambda: stages.worker_handles,
        trainer=stages.trainer,
        step=lambda: controller.step,
        num_in_flight=lambda: len(controller.directory.ledger.in_flight),
    )
    with Watchdog(config.watchdog, watched, stacks) as stages.watchdog:
        yield


def build_prompts(config: RunConfig) -> Prompts:
    """Build the training and the held-out prompts. Call it before anything is started, since a file may be missing.

    Raises `ValueError` if the model's chat template refuses the first prompt of either.
    """
    train, heldout = (registry.build("prompts", part, config.seed) for part in (config.prompts, config.eval.prompts))
    renderer = Renderer(config.model.directory)
    schemas = [registry.find("tool", tool.type).schema() for tool in config.rollout.tools]
    for name, source in (("prompts", train), ("eval.prompts", heldout)):
        renderer.prompt(source.prompt(0).messages, schemas, f"the first of {name}")
    return train, heldout


def checked_prompts(config: RunConfig) -> Prompts:
    """`build_prompts`, for training. Raises `ValueError` if a held-out problem is also trained on."""
    train, heldout = build_prompts(config)
    if config.eval.every and not config.eval.allow_overlap:
        found = check_overlap(prompts_of(train)[0], prompts_of(heldout, config.eval.num_prompts)[0])
        if found.level == "error":
            raise ValueError(
                f"{found.count} of {found.total} held-out prompts are trained on as well, {found.detail}; "
                "`agent-rl data check` shows more, and eval.allow_overlap=true starts all the same"
            )
    return train, heldout


def serve_initial_weights(stages: Stages, checkpoint: Path | None, start: int, served: int) -> None:
    """Load the trainer's weights for step `start`, publish them, and let the engines serve those of step `served`.

    Raises `TrainerDiedError` if the trainer dies meanwhile.
    """
    trainer_results([stages.trainer.ping.remote()])  # raises why its constructor failed, before a channel calls it
    if checkpoint:
        trainer_results([stages.trainer.load.remote(str(checkpoint))])
    trainer_results(stages.channel.publish(start))
    if checkpoint and served != start:
        trainer_results(stages.channel.restore(served, checkpoint / SERVED_WEIGHTS))
    stages.serve(served)


def newest_checkpoint(path: Path) -> Path:
    """The newest finished checkpoint of a run. Raises `ValueError` if there is none."""
    checkpoints = list_checkpoints(path)
    if not path.is_dir():
        raise ValueError(f"there is no run at {str(path)!r}; see the directories in runs/")
    if not checkpoints:
        raise ValueError(f"{path} holds no checkpoint to resume from; start the run again with its config")
    return checkpoints[-1]


@contextlib.contextmanager
def stop_on_interrupt(controller: Controller) -> Iterator[None]:
    """Ctrl-C stops the run after the current step, with a checkpoint; a second Ctrl-C stops it at once."""

    def on_signal(number: int, frame: Any) -> None:
        if controller.stop_requested:
            raise KeyboardInterrupt
        controller.stop_requested = True
        print("stopping after this step; press Ctrl-C again to stop at once", file=sys.stderr)

    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def evaluate_model(config: RunConfig, policy_version: int) -> Evaluation:
    """Evaluate `model.path` on the held-out prompts. `policy_version`: what the rows say that it is."""
    _, prompts = build_prompts(config)
    with ToolServer(config.sandbox) as server, cluster(config, with_trainer=False) as placement:
        workers = start_workers(config, server, waves=False, placement=placement)
        workers.check = server.check
        results = results_of(workers, start_evaluation(config, prompts, workers), server.check)
        workers.close()
    return collect_evaluation(config, policy_version, results)
