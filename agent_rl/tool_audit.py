"""Recorded tool calls, made again: how far the tools have moved since the rollouts.

An answer that differs when the same calls are made again bounds the total variation between what the tool did then
and does now, whatever the cause: timeouts, randomness, load, another version of a library.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import polars as pl

from agent_rl import facts, registry
from agent_rl.analysis.recorded import PartTable
from agent_rl.config import RunConfig
from agent_rl.objective.intervals import wilson_interval
from agent_rl.pipeline.run_directory import load_run_config
from agent_rl.records import ToolCall
from agent_rl.rollout.episode import TIME_OVER, answer, too_many_calls
from agent_rl.rollout.renderer import Renderer
from agent_rl.tool_server import ToolServer
from sandbox.client import SandboxClient

Answers = dict[int, list[str]]
"""The tools' answers in each turn of an episode, as the model read them."""


def audit_tools(run: Path, num_episodes: int = 200) -> pl.DataFrame:
    """How often tools answer otherwise than recorded, by turn, when a run's calls are made twice in fresh sessions.

    The calls are those of up to `num_episodes` episodes, spread evenly over the run. One row a turn and one for all
    ("all", last). Columns: turn; calls, turns with a tool call and with no difference before it, since the history is
    another one after a difference; differ, the calls whose answers differ from the recorded ones; rate, low and high,
    the share that differs and its 95 % interval; flaky, the share that differs between the two repetitions, which no
    change of the tools explains; environment, `differ` over all episodes, a bound on the tools' part of the budget of
    docs/bound.md. Raises `ValueError` without recorded calls, `SandboxError` if the tool server fails.
    """
    config = load_run_config(run)
    episodes = _episodes(run, num_episodes)
    recorded = [{t["turn_id"]: t["tool_results"] for t in turns if t["tool_results"]} for turns in episodes]
    if not any(recorded):
        raise ValueError(f"none of the {len(episodes)} episodes chosen from {run} called a tool; raise --episodes")
    first, second = _replay_twice(config, episodes)
    return _table(_differences(recorded, first), _differences(first, second), len(episodes))


def _episodes(run: Path, num_episodes: int) -> list[list[dict[str, Any]]]:
    """The turns of up to `num_episodes` recorded episodes, spread evenly over the run."""
    rollouts = PartTable(run / facts.ROLLOUT_TABLE, ("batch", "episode_id", "turns")).read()
    if rollouts.is_empty():
        raise ValueError(f"{run} has recorded no episode yet; wait for its first step or name another run")
    turns: list[list[dict[str, Any]]] = rollouts.sort("batch", "episode_id")["turns"].to_list()
    count = min(num_episodes, len(turns))
    return [turns[i * len(turns) // count] for i in range(count)]


def _replay_twice(config: RunConfig, episodes: list[list[dict[str, Any]]]) -> tuple[list[Answers], list[Answers]]:
    async def both(server: ToolServer) -> tuple[list[Answers], list[Answers]]:
        sandbox = SandboxClient(server.url, server.token)
        try:
            return await _replay(config, sandbox, episodes), await _replay(config, sandbox, episodes)
        finally:
            await sandbox.aclose()

    with ToolServer(config.sandbox) as server:
        return asyncio.run(both(server))


async def _replay(config: RunConfig, sandbox: SandboxClient, episodes: list[list[dict[str, Any]]]) -> list[Answers]:
    """The answers to every episode's calls, as many at once as one worker of the run had in flight."""
    renderer = Renderer(config.model.directory, config.rollout.max_tool_output_tokens)
    slots = asyncio.Semaphore(config.rollout.max_concurrent_episodes)
    refusals = (TIME_OVER, too_many_calls(config.rollout.max_calls_per_turn))
    not_made = {(await answer(ToolCall("", {}, why), {}, renderer)).content for why in refusals}

    async def episode(turns: list[dict[str, Any]]) -> Answers:
        async with slots:
            built = [registry.build("tool", tool, sandbox) for tool in config.rollout.tools]
            tools, answers = {tool.name: tool for tool in built}, Answers()
            try:
                for turn in (t for t in turns if t["tool_results"]):
                    calls = [ToolCall(*call) for call in json.loads(turn["tool_calls"])]
                    answers[turn["turn_id"]] = [
                        old if old in not_made else (await answer(call, tools, renderer)).content
                        for call, old in zip(calls, turn["tool_results"], strict=True)
                    ]
            finally:
                for tool in built:
                    await tool.close()
            return answers

    return list(await asyncio.gather(*(episode(turns) for turns in episodes)))


def _differences(before: list[Answers], after: list[Answers]) -> dict[int, tuple[int, int]]:
    """(turns compared, turns that differ) by turn; an episode counts up to its first difference."""
    counts: dict[int, tuple[int, int]] = {}
    for old, new in zip(before, after, strict=True):
        for turn, answers in sorted(old.items()):
            differs = answers != new[turn]
            compared, different = counts.get(turn, (0, 0))
            counts[turn] = compared + 1, different + differs
            if differs:
                break
    return counts


def _table(moved: dict[int, tuple[int, int]], flaky: dict[int, tuple[int, int]], num_episodes: int) -> pl.DataFrame:
    def row(turn: str, calls: int, differ: int, flaky_calls: int, flakes: int) -> dict[str, Any]:
        low, high = wilson_interval(differ, calls)
        figures = {"rate": differ / calls, "low": low, "high": high, "flaky": flakes / max(flaky_calls, 1)}
        return {"turn": turn, "calls": calls, "differ": differ, **figures, "environment": differ / num_episodes}

    rows = [row(str(turn), *counts, *flaky.get(turn, (0, 0))) for turn, counts in sorted(moved.items())]
    totals = [sum(column) for counts in (moved, flaky) for column in zip(*counts.values(), strict=True)]
    return pl.DataFrame([*rows, row("all", *totals)])
