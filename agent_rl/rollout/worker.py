"""The Ray rollout actor: one engine, many concurrent episodes on one event loop."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial

from agent_rl import registry
from agent_rl.config import RunConfig
from agent_rl.records import Episode
from agent_rl.rewards.base import RewardError
from agent_rl.rollout.activity import QUEUE, Activity, WorkerStatus
from agent_rl.rollout.engines.base import EngineError
from agent_rl.rollout.episode import EpisodeParts, EpisodeTask, no_wait, run_episode
from agent_rl.rollout.live_engine import LiveEngine
from agent_rl.rollout.renderer import Renderer
from agent_rl.rollout.wave import WaveGate
from agent_rl.stacks import dump_on_signal
from agent_rl.weights.base import Weights
from sandbox.base import SandboxError
from sandbox.client import SandboxClient
from tools.base import Tool, ToolError


@dataclass(frozen=True)
class FailedTask:
    """A task that no attempt could finish: `kind` of the last failure, such as SessionLost, and its message."""

    task: EpisodeTask
    kind: str
    message: str


@dataclass
class RolloutResult:
    """What a worker returns for a list of tasks."""

    episodes: list[Episode] = field(default_factory=list)
    failed: list[FailedTask] = field(default_factory=list)
    num_reissued: int = 0
    wall_s: float = 0.0


class RolloutWorker:
    """Runs lists of tasks with bounded concurrency and reissues what the infrastructure broke.

    run.py makes it an asynchronous actor; by itself it knows no Ray.
    """

    def __init__(
        self, config: RunConfig, tool_server: str, waves: bool, token: str | None = None, index: int = 0
    ) -> None:
        directory = config.model.directory
        rollout = config.rollout
        self.config, self.waves = config, waves
        # Lists of tasks that run at once share the slots: an evaluation beside the rollouts of training.
        self.slots = asyncio.Semaphore(rollout.max_concurrent_episodes)
        self.activity = Activity()
        self.sandbox = SandboxClient(tool_server, token)
        engine = registry.build(
            "engine",
            rollout.engine,
            model_path=str(directory),
            worker_index=index,
            report_routing=config.routing_replay,
        )
        self.engine = LiveEngine(engine, config.pipeline.weight_update)
        self.parts = EpisodeParts(
            config=rollout,
            engine=self.engine,
            renderer=Renderer(directory, rollout.max_tool_output_tokens),
            tool_format=registry.build("tool_format", rollout.tool_format),
            reward=registry.build("reward", config.reward),
            make_tools=self._make_tools,
            routing_replay=config.routing_replay,
            activity=self.activity,
        )

    def _make_tools(self) -> dict[str, Tool]:
        built = [registry.build("tool", tool, self.sandbox) for tool in self.config.rollout.tools]
        return {tool.name: tool for tool in built}

    async def run(self, tasks: list[EpisodeTask]) -> RolloutResult:
        """Run every task to its end. Raises `SandboxError` if the tool server stays away too long.

        With waves, one full set of concurrent episodes after the other, each with a gate of its own.
        """
        started, result = time.monotonic(), RolloutResult()
        size = self.config.rollout.max_concurrent_episodes if self.waves else max(len(tasks), 1)
        for first in range(0, len(tasks), size):
            await self._run_set(tasks[first : first + size], result)
        result.episodes.sort(key=lambda episode: episode.trajectory.episode_id)
        result.wall_s = time.monotonic() - started
        return result

    async def _run_set(self, tasks: list[EpisodeTask], result: RolloutResult) -> None:
        gate = WaveGate() if self.waves else None
        if gate:
            for task in tasks:
                gate.join(task.episode_id)
        try:
            async with asyncio.TaskGroup() as group:
                for task in tasks:
                    group.create_task(self._run_one(task, gate, result))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors  # the rest is the same failure, seen by other episodes

    async def _run_one(self, task: EpisodeTask, gate: WaveGate | None, result: RolloutResult) -> None:
        before_turn: Callable[[], Awaitable[None]] = partial(gate.wait, task.episode_id) if gate else no_wait
        self.activity.at(task, QUEUE)
        try:
            async with self.slots:
                await self._attempts(task, before_turn, result)
        finally:
            self.activity.leave(task)
            if gate:
                gate.leave(task.episode_id)

    async def _attempts(
        self, task: EpisodeTask, before_turn: Callable[[], Awaitable[None]], result: RolloutResult
    ) -> None:
        """Run one task. Failures are caught here: the task is issued again, or given up."""
        error: Exception | None = None
        for attempt in range(task.attempt, task.attempt + self.config.rollout.max_attempts):
            result.num_reissued += attempt > 0
            try:
                episode = await run_episode(replace(task, attempt=attempt), self.parts, before_turn)
            except (EngineError, ToolError) as failure:
                error = failure
            except RewardError as failure:
                error = failure
                if self.config.rollout.reward_errors == "drop":
                    break
            except SandboxError as failure:
                error = failure
                await self._tool_server_back(failure)
            else:
                result.episodes.append(episode)
                return
        result.failed.append(FailedTask(task, type(error).__name__, str(error)))

    async def _tool_server_back(self, error: SandboxError) -> None:
        """Wait until the tool server answers again; after `sandbox.patience_s` the error is raised."""
        deadline = time.monotonic() + self.config.sandbox.patience_s
        while True:
            try:
                await self.sandbox.health()
                return
            except SandboxError:
                if time.monotonic() > deadline:
                    raise error from None
                await asyncio.sleep(0.5)

    async def ready(self) -> None:
        """Return once the engine can load weights without delay; `update_weights` follows."""
        await self.engine.ready()

    async def update_weights(self, weights: Weights, policy_version: int) -> None:
        with self.activity.pushing():
            await self.engine.update_weights(weights, policy_version)

    async def seconds(self, begin: float, end: float) -> dict[str, float]:
        """Where the worker's seconds went between two times of `time.time`; see `Activity.seconds`."""
        return self.activity.seconds(begin, end)

    async def status(self) -> WorkerStatus:
        """What the worker's episodes are doing now."""
        return self.activity.status()

    async def dump_stacks_to(self, path: str) -> tuple[str, int]:
        """See `agent_rl.stacks`; works where the event loop hangs, since a signal asks for the dump."""
        return dump_on_signal(path)

    async def close(self) -> None:
        await self.parts.reward.close()
        await self.engine.close()
        await self.sandbox.aclose()
