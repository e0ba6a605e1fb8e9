"""The turn loop of one episode. Knows no Ray: an engine, a renderer and tools are all it needs."""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from agent_rl.records import (
    Completion,
    Episode,
    FinishReason,
    Prompt,
    SamplingParams,
    StopReason,
    ToolCall,
    TrajectoryBuilder,
    Turn,
)
from agent_rl.rewards.base import FinishedEpisode, Reward, RewardError, Score
from agent_rl.rollout.activity import GENERATE, QUEUE, SCORE, TOOL, Activity
from agent_rl.rollout.config import RolloutConfig, SamplingConfig, TruncatedConfig
from agent_rl.rollout.engines.base import Engine
from agent_rl.rollout.renderer import Renderer
from agent_rl.rollout.tool_formats.base import ToolFormat
from sandbox.base import SandboxError
from tools.base import Tool, ToolError, ToolResult

TIME_OVER = "the episode's time is over"
"""Why a call after `rollout.deadline_s` was not made, for the model."""


@dataclass(frozen=True)
class EpisodeTask:
    """One episode to run. `purpose` keeps the seeds and the sequences of training and evaluation apart.

    `sampling` is how tokens are drawn; None draws them as `rollout.sampling` says.
    """

    prompt: Prompt
    group_id: int
    episode_id: int
    run_seed: int
    purpose: str = "train"
    attempt: int = 0
    sampling: SamplingConfig | None = None

    @property
    def sequence_id(self) -> int:
        """The episode's name in the engine, where an evaluation may run beside the rollouts of training."""
        return self.episode_id if self.purpose == "train" else -1 - self.episode_id

    def seed(self, turn_id: int) -> int:
        """A 63-bit seed hashed from (run, purpose, episode, turn). A reissue replays the same choices."""
        text = f"{self.run_seed}/{self.purpose}/{self.episode_id}/{turn_id}"
        return int.from_bytes(blake2b(text.encode(), digest_size=8).digest()) >> 1


@dataclass(frozen=True)
class EpisodeParts:
    """What an episode is driven with; shared by all episodes of a worker except the tools it makes."""

    config: RolloutConfig
    engine: Engine
    renderer: Renderer
    tool_format: ToolFormat
    reward: Reward
    make_tools: Callable[[], dict[str, Tool]]
    routing_replay: bool = False
    activity: Activity = field(default_factory=Activity)
    """Told what each episode goes on to."""


async def no_wait() -> None:
    """The asynchronous regimes' `before_turn`: go on at once."""


async def run_episode(
    task: EpisodeTask, parts: EpisodeParts, before_turn: Callable[[], Awaitable[None]] = no_wait
) -> Episode:
    """Drive model → tool call → tool → … until an answer, a cap or the deadline; then score it.

    Consumes one task; waits for the engine and the tools; produces the episode with its trajectory.
    `before_turn` is awaited ahead of every generation (the wave gate of the sync regime). Raises what
    the engine or a tool raises when the infrastructure fails, and `RewardError`; a failed command is data.
    """
    tools = parts.make_tools()
    try:
        turns, stop, builder = await _drive(task, parts, tools, before_turn)
    finally:
        for tool in tools.values():
            await tool.close()
        parts.engine.release(task.sequence_id)
    parts.activity.at(task, SCORE, len(turns) - 1)
    return await _finish(task, parts, turns, stop, builder)  # the sessions are gone: nothing of the policy's runs on


async def _drive(
    task: EpisodeTask, parts: EpisodeParts, tools: dict[str, Tool], before_turn: Callable[[], Awaitable[None]]
) -> tuple[list[Turn], StopReason, TrajectoryBuilder]:
    ends_at, builder, turns = time.monotonic() + parts.config.deadline_s, TrajectoryBuilder(), list[Turn]()
    schemas = [tool.schema() for tool in tools.values()]
    forced = parts.renderer.prompt(task.prompt.messages, schemas, f"{task.purpose} prompt {task.prompt.index}")
    # A prompt over the budget leaves no room for a turn: its episode samples nothing, and trains nothing.
    builder.append(forced[: parts.config.max_episode_tokens], turn_id=-1)
    stop = None
    while stop is None:
        turn_id = len(turns)
        if (params := _sampling_params(task, parts, turn_id, len(builder.token_ids))) is None:
            stop = StopReason.MAX_TOKENS
        elif time.monotonic() > ends_at:
            stop = StopReason.DEADLINE
        else:
            parts.activity.at(task, QUEUE, turn_id)
            await before_turn()
            completion, generate_s = await _generate(task, parts, builder, params, turn_id)
            calls = parts.tool_format.parse(parts.renderer.decode_turn(completion.token_ids))
            stop = _stop_reason(completion.finish_reason, calls, turn_id, parts.config)
            results, tool_s = ((), 0.0) if stop else await _answers(task, parts, tools, calls, turn_id, ends_at)
            turns.append(Turn(turn_id, forced, completion, calls, results, generate_s, tool_s))
            if stop is None:
                forced = parts.renderer.tool_turn([result.content for result in results])
                if len(builder.token_ids) + len(forced) < parts.config.max_episode_tokens:
                    builder.append(forced, turn_id)
                else:
                    stop = StopReason.MAX_TOKENS
    return turns, stop, builder


async def _generate(
    task: EpisodeTask, parts: EpisodeParts, builder: TrajectoryBuilder, params: SamplingParams, turn_id: int
) -> tuple[Completion, float]:
    """The turn that the policy samples, which is appended to the trajectory, and the seconds it took."""
    parts.activity.at(task, GENERATE, turn_id)
    started = time.monotonic()
    routed_from = builder.num_routed if parts.routing_replay and task.purpose == "train" else None
    completion = await parts.engine.generate(task.sequence_id, builder.token_ids, params, routed_from)
    seconds = time.monotonic() - started
    if routed_from is not None and completion.routed_experts is None:
        raise ValueError("routing_replay is true, but the engine reported no routing; choose another engine")
    builder.append(completion.token_ids, turn_id, completion)
    return completion, seconds


async def _answers(
    task: EpisodeTask,
    parts: EpisodeParts,
    tools: dict[str, Tool],
    calls: tuple[ToolCall, ...],
    turn_id: int,
    ends_at: float,
) -> tuple[tuple[ToolResult, ...], float]:
    """What the tools answer to a turn's calls, one after the other, and the seconds it took.

    Calls beyond `max_calls_per_turn`, and those after `ends_at`, are not made: their answer is an error.
    """
    parts.activity.at(task, TOOL, turn_id, calls)
    started, most, results = time.monotonic(), parts.config.max_calls_per_turn, list[ToolResult]()
    for place, call in enumerate(calls):
        if place >= most:
            call = replace(call, error=too_many_calls(most))
        elif time.monotonic() > ends_at:
            call = replace(call, error=TIME_OVER)
        results.append(await answer(call, tools, parts.renderer))
    return tuple(results), time.monotonic() - started


def too_many_calls(most: int) -> str:
    """Why a call beyond `rollout.max_calls_per_turn` was not made, for the model."""
    return f"only {most} calls a turn are made"


def _sampling_params(task: EpisodeTask, parts: EpisodeParts, turn_id: int, used: int) -> SamplingParams | None:
    """Parameters of the next turn, or None if no token of the episode's budget is left."""
    room = min(parts.config.max_turn_tokens, parts.config.max_episode_tokens - used)
    if room < 1:
        return None
    sampling = task.sampling or parts.config.sampling
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_new_tokens=room,
        stop_token_ids=parts.renderer.stop_token_ids,
        seed=task.seed(turn_id),
    )


def _stop_reason(
    finish: FinishReason, calls: tuple[ToolCall, ...], turn_id: int, config: RolloutConfig
) -> StopReason | None:
    """Why the episode ends after this turn, or None. Every turn before it held a tool call."""
    if finish is not FinishReason.STOP:
        return StopReason.MAX_TOKENS
    if not calls:
        return StopReason.ANSWER
    return StopReason.MAX_TOOL_TURN if turn_id >= config.max_tool_turn else None


async def answer(call: ToolCall, tools: dict[str, Tool], renderer: Renderer) -> ToolResult:
    """The tool's answer as the model will read it; a call that cannot be made is an answer too."""
    tool = tools.get(call.name)
    if call.error is not None:
        result = ToolResult(f"Error: {call.error}", ok=False)
    elif tool is None:
        result = ToolResult(f"Error: no tool {call.name!r}; there is {', '.join(tools)}", ok=False)
    elif problem := _argument_problem(tool, call):
        result = ToolResult(f"Error: {problem}", ok=False)
    else:
        result = await _call(tool, call)
    return ToolResult(renderer.clip_tool_output(result.content), result.ok)


async def _call(tool: Tool, call: ToolCall) -> ToolResult:
    """Raises `SandboxError`, or `ToolError` for anything else that goes wrong in the tool itself."""
    try:
        return await tool.call(**call.arguments)
    except SandboxError:
        raise
    except Exception as error:
        raise ToolError(f"tool {call.name}: {type(error).__name__}: {error}") from error


def _argument_problem(tool: Tool, call: ToolCall) -> str | None:
    """What is wrong with the arguments by the tool's schema, or None."""
    parameters = tool.schema()["function"]["parameters"]
    kinds: dict[str, tuple[type, ...]] = {
        "string": (str,),
        "integer": (int,),
        "number": (int, float),
        "boolean": (bool,),
    }
    for name in parameters["required"]:
        if name not in call.arguments:
            return f"{call.name} needs the argument {name!r}"
    for name, value in call.arguments.items():
        if name not in parameters["properties"]:
            return f"{call.name} has no argument {name!r}"
        kind = parameters["properties"][name]["type"]
        if not isinstance(value, kinds[kind]):
            return f"the argument {name!r} of {call.name} must be a {kind}"
    return None


async def _finish(
    task: EpisodeTask, parts: EpisodeParts, turns: list[Turn], stop: StopReason, builder: TrajectoryBuilder
) -> Episode:
    texts = tuple(parts.renderer.decode_turn(turn.completion.token_ids) for turn in turns)
    finished = FinishedEpisode(
        task.group_id, task.episode_id, task.attempt, task.prompt, tuple(turns), texts, stop_reason=stop
    )
    score = apply_truncation(await _score(finished, parts.reward), stop, parts.config.truncated)
    sampling = task.sampling or parts.config.sampling
    trajectory = builder.build(
        group_id=task.group_id,
        episode_id=task.episode_id,
        attempt=task.attempt,
        sampling_params=SamplingParams(sampling.temperature, sampling.top_p, sampling.top_k),
        reward=score.reward,
        reward_parts=score.parts,
        stop_reason=stop,
        mask_reason=score.mask_reason,
    )
    final_text = finished.final_text
    answer = parts.reward.answer(final_text) if final_text is not None else None
    return Episode(task.prompt, tuple(turns), trajectory, final_text, answer)


async def _score(episode: FinishedEpisode, reward: Reward) -> Score:
    """Raises `RewardError`, which names the episode, for anything that goes wrong in the reward."""
    try:
        return await reward.score(episode)
    except Exception as error:
        where = f"episode {episode.episode_id} of prompt {episode.prompt.index}"
        raise RewardError(f"the reward of {where} raised {type(error).__name__}: {error}") from error


def apply_truncation(score: Score, stop: StopReason, config: TruncatedConfig) -> Score:
    """`score` as `rollout.truncated` has it. What it takes off is the part "truncated"; the outcome stays."""
    if stop not in config.stop_reasons or config.policy == "score":
        return score
    if config.policy == "mask":
        return replace(score, mask_reason=score.mask_reason or "truncated")
    cost = score.reward if config.policy == "zero" else config.penalty
    return replace(score, reward=score.reward - cost, parts={**score.parts, "truncated": -cost})
