"""Build the parts of a run from its config and run the loop."""

import contextlib
import fcntl
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
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
from agent_rl.pipeline.pacing import Pacing
from agent_rl.pipeline.run_directory import RunDirectory, list_checkpoints
from agent_rl.pipeline.schedule import Schedule
from agent_rl.pipeline.state import SERVED_WEIGHTS, RunState
from agent_rl.pipeline.wandb_log import wandb_log
from agent_rl.pipeline.watchdog import Watchdog, Watched
from agent_rl.pipeline.workers import MAX_RESTARTS, WorkerPool
from agent_rl.rollout.renderer import Renderer
from agent_rl.rollout.worker import RolloutWorker
from agent_rl.tool_server import ToolServer
from agent_rl.trainer.group import TrainGroup
from agent_rl.trainer.worker import TrainWorker
from agent_rl.weights.base import WeightsLostError

OnRow = Callable[[dict[str, Any]], None]
Prompts = tuple[PromptSource, PromptSource]
ANYWHERE = Placement()


@dataclass(frozen=True)
class Outcome:
    """How a run ended: at `step` optimizer steps, complete or stopped early."""

    step: int
    complete: bool


def train(config: RunConfig, path: Path, resume: bool, on_row: OnRow, prompts: Prompts | None = None) -> Outcome:
    """Run `config` in the run directory `path`, from its newest checkpoint if `resume`.

    The stages in order: prompts, rollout workers (with tools in the sandbox), pipeline, trainer, weights. `prompts`:
    what `checked_prompts` gives, where it is at hand already.
    """
    checkpoint = newest_checkpoint(path) if resume else None
    if checkpoint:
        _check_resumed(path, RunState.load(checkpoint), config)
    prompts = prompts or checked_prompts(config)
    with lock(path), wandb_log(config, path, on_row) as on_row:
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
    """`last` may be as Ray gives it: what a worker raised, below the worker's stack."""
    reason = str(getattr(last, "cause", last)).strip().splitlines()[0].rstrip(".")
    return (
        f"the trainer died {num_deaths} times, last: {reason}; see whether its machine runs out of memory (lower "
        "trainer.max_tokens_per_microbatch) or its node goes down, then resume the run"
    )


def _check_resumed(path: Path, state: RunState, config: RunConfig) -> None:
    if state.evaluating is not None and not config.eval.workers:
        raise ValueError(
            f"{path} was evaluating version {state.evaluating * state.updates_per_batch} beside training and has to do "
            "so again; set eval.workers to 1 or more"
        )
    if state.updates_per_batch != config.updates_per_batch:
        raise ValueError(
            f"{path} made {state.updates_per_batch} updates of each batch, and the config now asks for "
            f"{config.updates_per_batch}, which would miscount its policy versions; leave trainer.num_minibatches * "
            "trainer.num_epochs as it was"
        )


def train_from(checkpoint: Path | None, config: RunConfig, path: Path, prompts: Prompts, on_row: OnRow) -> Outcome:
    """Run `config` from a checkpoint, or from the start; what `path` holds of later steps is cut."""
    state = RunState.load(checkpoint) if checkpoint else RunState()
    plan = plan_of(config, state, resumed=checkpoint is not None)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ToolServer(config.sandbox))
        placement = stack.enter_context(cluster(config, with_trainer=True))
        stages = start_stages(config, prompts, server, plan.waves, placement)
        stack.callback(stages.close)
        load_weights(stages, checkpoint, state.step, plan.served(state.step), config.updates_per_batch)
        directory = RunDirectory(path, config, state)
        stack.callback(directory.close)
        controller = build_controller(config, plan, stages, directory, on_row)
        if checkpoint:
            controller.resume_evaluation(checkpoint)
        stack.enter_context(watch(config, stages, controller, path / "stacks"))
        with stop_on_interrupt(controller):
            controller.run()
    return Outcome(controller.step, controller.step == config.num_steps)


def plan_of(config: RunConfig, state: RunState, resumed: bool) -> Schedule | Pacing:
    """When what is sampled and trained, as the regime has it."""
    regime = registry.build("pipeline", config.pipeline)
    plan: Schedule | Pacing = regime.plan(config.batch.num_prompts, config.num_steps)
    if isinstance(plan, Pacing):
        return plan
    schedule = replace(plan, ramps=state.ramps)
    return schedule.continued(state.step, len(state.queue)) if resumed else schedule


def build_controller(
    config: RunConfig, plan: Schedule | Pacing, stages: Stages, directory: RunDirectory, on_row: OnRow
) -> Controller:
    if isinstance(plan, Pacing):
        return ContinuousController(config, plan, stages, directory, on_row)
    return BatchController(config, plan, stages, directory, on_row)


def start_stages(
    config: RunConfig, prompts: Prompts, server: ToolServer, waves: bool, placement: Placement = ANYWHERE
) -> Stages:
    """Start the Ray actors of a run and build the rest. Close them when done."""
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
        check_tool_server=server.check,
        eval_workers=start_workers(config, server, waves, placement, for_evaluation=True)
        if config.eval.workers
        else None,
    )
    for pool in stages.pools:
        pool.check = lambda: stages.check_tool_server()  # as it is by then: `watch` puts another in its place
    return stages


def start_workers(
    config: RunConfig, server: ToolServer, waves: bool, placement: Placement = ANYWHERE, for_evaluation: bool = False
) -> WorkerPool:
    """The workers of training or those for evaluation alone, whose places come after the others."""
    worker = ray.remote(RolloutWorker)
    first = config.rollout.num_workers if for_evaluation else 0

    def start(place: int) -> Any:
        options = placement.worker(first + place)
        return worker.options(**options).remote(config, server.url, waves, server.token, first + place)

    if for_evaluation:
        return WorkerPool(start, config.eval.workers, role="evaluation")
    return WorkerPool(start, config.rollout.num_workers)


@contextlib.contextmanager
def watch(config: RunConfig, stages: Stages, controller: Controller, stacks: Path) -> Iterator[None]:
    """Let a watchdog look at a run; with `policy: stop` the loop hears of a standstill where it waits."""
    check_tool_server = stages.check_tool_server
    watched = Watched(
        workers=lambda: stages.worker_handles,
        trainer=stages.trainer,
        step=lambda: controller.step,
        num_in_flight=lambda: len(controller.directory.ledger.in_flight),
    )
    with Watchdog(config.watchdog, watched, stacks) as watchdog:

        def check() -> None:
            check_tool_server()
            watchdog.check()

        stages.check_tool_server = check
        yield


def build_prompts(config: RunConfig) -> Prompts:
    """The training and the held-out prompts; built before anything is started, since a file may be missing.

    Raises `ValueError` too if the model's chat template refuses the first prompt of either.
    """
    train, heldout = (registry.build("prompts", part, config.seed) for part in (config.prompts, config.eval.prompts))
    renderer = Renderer(config.model.directory)
    schemas = [registry.find("tool", tool.type).schema() for tool in config.rollout.tools]
    for name, source in (("prompts", train), ("eval.prompts", heldout)):
        renderer.prompt(source.prompt(0).messages, schemas, f"the first of {name}")
    return train, heldout


def checked_prompts(config: RunConfig) -> Prompts:
    """`build_prompts` for training. Raises `ValueError` if a held-out problem is seen among those trained on."""
    train, heldout = build_prompts(config)
    if config.eval.every and not config.eval.allow_overlap:
        found = check_overlap(prompts_of(train)[0], prompts_of(heldout, config.eval.num_prompts)[0])
        if found.level == "error":
            raise ValueError(
                f"{found.count} of {found.total} held-out prompts are trained on as well, {found.detail}; "
                "`agent-rl data check` shows more, and eval.allow_overlap=true starts all the same"
            )
    return train, heldout


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
    """Keep other processes out of a run directory. Raises `ValueError` if one is in it."""
    path.mkdir(parents=True, exist_ok=True)
    with (path / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{path} is in use by another process; wait for it or name another directory") from None
        try:
            yield
        finally:
            if [entry.name for entry in path.iterdir()] == ["lock"]:  # nothing was run: leave nothing
                shutil.rmtree(path)


def load_weights(stages: Stages, checkpoint: Path | None, start: int, served: int, updates_per_batch: int = 1) -> None:
    """Give trainer and engines the weights that step `start` begins with: the newest and the version `served`.

    Raises `TrainerDiedError` if the trainer dies meanwhile.
    """
    trainer_results([stages.trainer.is_idle.remote()])  # one that cannot be made says why, before a channel asks it
    if checkpoint:
        trainer_results([stages.trainer.load.remote(str(checkpoint))])
    trainer_results(stages.channel.publish(start))
    if checkpoint and served != start:
        trainer_results(stages.channel.restore(served, checkpoint / SERVED_WEIGHTS))
    stages.serve(served, updates_per_batch)


def newest_checkpoint(path: Path) -> Path:
    """The newest whole checkpoint of a run. Raises `ValueError` if there is none."""
    checkpoints = list_checkpoints(path)
    if not path.is_dir():
        raise ValueError(f"there is no run at {str(path)!r}; see the directories in runs/")
    if not checkpoints:
        raise ValueError(f"{path} holds no checkpoint to resume from; start the run again with its config")
    return checkpoints[-1]


@contextlib.contextmanager
def stop_on_interrupt(controller: Controller) -> Iterator[None]:
    """Ctrl-C asks for a stop after the running step, with a checkpoint; a second one stops at once."""

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
    """Evaluate `model.path` on the config's held-out prompts, through the whole rollout, as `policy_version`."""
    _, prompts = build_prompts(config)
    with ToolServer(config.sandbox) as server, cluster(config, with_trainer=False) as placement:
        workers = start_workers(config, server, waves=False, placement=placement)
        workers.check = server.check
        results = results_of(workers, start_evaluation(config, prompts, workers), server.check)
        workers.close()
    return collect_evaluation(config, policy_version, results)
