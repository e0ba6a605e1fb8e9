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
from agent_rl.pipeline.controller import Controller, Stages, wait_for
from agent_rl.pipeline.evaluation import Evaluation, collect_evaluation, start_evaluation
from agent_rl.pipeline.run_directory import RunDirectory, list_checkpoints
from agent_rl.pipeline.schedule import Schedule
from agent_rl.pipeline.state import RunState
from agent_rl.rollout.worker import RolloutWorker
from agent_rl.tool_server import ToolServer
from agent_rl.trainer.worker import TrainWorker
from agent_rl.weights.base import WeightChannel

OnRow = Callable[[dict[str, Any]], None]
Prompts = tuple[PromptSource, PromptSource]


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
    state = RunState.load(checkpoint) if checkpoint else RunState()
    schedule = replace(registry.build("pipeline", config.pipeline).schedule, ramps=state.ramps)
    schedule = schedule.continued(state.step, len(state.queue)) if checkpoint else schedule
    prompts = prompts or checked_prompts(config)
    with contextlib.ExitStack() as stack:
        stack.enter_context(lock(path))
        server = stack.enter_context(ToolServer(config.sandbox))
        stack.enter_context(local_ray(config.rollout.num_workers + 1))
        stages = start_stages(config, prompts, server, schedule.waves)
        stack.callback(stages.channel.close)
        stack.callback(close_workers, stages.workers)
        load_weights(stages, checkpoint, state.step, schedule)
        directory = RunDirectory(path, config, state)
        stack.callback(directory.close)
        controller = Controller(config, schedule, stages, directory, on_row)
        with stop_on_interrupt(controller):
            controller.run()
    return Outcome(controller.step, controller.step == config.num_steps)


def start_stages(config: RunConfig, prompts: Prompts, server: ToolServer, waves: bool) -> Stages:
    """Start the Ray actors of a run and build the rest. Close `channel` when done."""
    return Stages(
        prompts=prompts[0],
        eval_prompts=prompts[1],
        workers=start_workers(config, server, waves),
        trainer=ray.remote(TrainWorker).remote(config),
        channel=registry.build("weights", config.weights),
        check_tool_server=server.check,
    )


def start_workers(config: RunConfig, server: ToolServer, waves: bool) -> list[Any]:
    worker = ray.remote(RolloutWorker)
    return [worker.remote(config, server.url, waves, server.token, i) for i in range(config.rollout.num_workers)]


def close_workers(workers: list[Any]) -> None:
    """Let workers end what they hold at the tool server; one that does not answer is left to Ray."""
    ray.wait([worker.close.remote() for worker in workers], num_returns=len(workers), timeout=5.0)


def build_prompts(config: RunConfig) -> Prompts:
    """The training and the held-out prompts; built before anything is started, since a file may be missing."""
    sources = [registry.build("prompts", part, config.seed) for part in (config.prompts, config.eval.prompts)]
    return sources[0], sources[1]


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


def load_weights(stages: Stages, checkpoint: Path | None, start: int, schedule: Schedule) -> None:
    """Give trainer and engines the weights that step `start` begins with: the newest and the served version."""
    channel: WeightChannel = stages.channel
    if checkpoint:
        ray.get(stages.trainer.load.remote(str(checkpoint)))
    ray.get(stages.trainer.publish.remote(str(channel.path(start))))
    served = schedule.served(start)
    if checkpoint and served != start:
        channel.path(served).write_bytes((checkpoint / "served.safetensors").read_bytes())
    path = str(channel.path(served))
    ray.get([worker.update_weights.remote(path, served) for worker in stages.workers])


def newest_checkpoint(path: Path) -> Path:
    """The newest whole checkpoint of a run. Raises `ValueError` if there is none."""
    checkpoints = list_checkpoints(path)
    if not path.is_dir():
        raise ValueError(f"there is no run at {str(path)!r}; see the directories in runs/")
    if not checkpoints:
        raise ValueError(f"{path} holds no checkpoint to resume from; start the run again with its config")
    return checkpoints[-1]


@contextlib.contextmanager
def local_ray(num_actors: int) -> Iterator[None]:
    """A Ray of this run's own on this machine, one CPU slot an actor, with one compute thread each.

    Where a Ray is up already, as in a notebook, that one is used and left up.
    """
    if ray.is_initialized():
        yield
        return
    environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    ray.init(
        address="local",  # not a cluster that RAY_ADDRESS or an earlier `ray start` names
        num_cpus=num_actors,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        runtime_env={"env_vars": environment},
    )
    try:
        yield
    finally:
        ray.shutdown()


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
    with ToolServer(config.sandbox) as server, local_ray(config.rollout.num_workers):
        workers = start_workers(config, server, waves=False)
        results = wait_for(start_evaluation(config, prompts, workers), server.check)
        close_workers(workers)
    return collect_evaluation(config, policy_version, results)
