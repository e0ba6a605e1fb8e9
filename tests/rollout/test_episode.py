"""The turn loop: what ends an episode, what the model reads back, what is recorded. The tools are real."""

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from agent_rl import registry
from agent_rl.config import model_directory
from agent_rl.records import (
    Completion,
    Episode,
    FinishReason,
    IntArray,
    Prompt,
    SamplingMask,
    SamplingParams,
    StopReason,
)
from agent_rl.rollout import episode as episode_module
from agent_rl.rollout.episode import EpisodeParts, EpisodeTask, run_episode
from agent_rl.rollout.renderer import Renderer
from agent_rl.weights.base import Weights
from sandbox.base import SandboxError
from sandbox.client import SandboxClient
from tests.configs import quickstart
from tools.base import Tool, ToolError, ToolResult

RENDERER = Renderer(model_directory("builtin:tiny-qwen3"), max_tool_output_tokens=120)
PROMPT = Prompt(0, ({"role": "user", "content": "s37 *4 +19 %50"},), "17")


@dataclass
class Script:
    """A policy that writes what the test says, turn after turn; the last turn is repeated."""

    turns: list[str]
    policy_version: int = 3
    seen: list[IntArray] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)
    released: list[int] = field(default_factory=list)

    async def generate(
        self, sequence_id: int, token_ids: IntArray, params: SamplingParams, routed_from: int | None = None
    ) -> Completion:
        text = self.turns[min(len(self.seen), len(self.turns) - 1)]
        self.seen.append(token_ids)
        self.params.append(params)
        ids = RENDERER.tokenizer(text, add_special_tokens=False)["input_ids"]
        whole = [*ids, RENDERER.stop_token_ids[0]][: params.max_new_tokens]
        stopped = whole[-1] == RENDERER.stop_token_ids[0]
        return Completion(
            token_ids=np.array(whole, np.int32),
            behavior_logprobs=np.full(len(whole), -0.5, np.float32),
            sampling_mask=SamplingMask.full(len(whole)),
            policy_versions=np.full(len(whole), self.policy_version, np.int32),
            finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
        )

    def release(self, sequence_id: int) -> None:
        self.released.append(sequence_id)

    async def ready(self) -> None:
        return

    async def update_weights(self, weights: Weights, policy_version: int) -> None:
        raise AssertionError("a script has no weights")

    async def close(self) -> None:
        return


SILENT = "(no output; use print)"


def call(code: str) -> str:
    return f"<tool_call>{code}</tool_call>"


ROOMY = (
    "rollout.max_turn_tokens=6000",
    "rollout.max_episode_tokens=9000",
    "rollout.engine.max_sequence_tokens=9000",
)


def run(
    script: Script, tool_server: str, *overrides: str, prompt: Prompt = PROMPT, tool: Tool | None = None
) -> Episode:
    config = quickstart(*overrides)

    async def scenario() -> Episode:
        sandbox = SandboxClient(tool_server)

        def make_tools() -> dict[str, Tool]:
            return {"python": tool or registry.build("tool", config.rollout.tools[0], sandbox)}

        parts = EpisodeParts(
            config=config.rollout,
            engine=script,
            renderer=RENDERER,
            tool_format=registry.build("tool_format", config.rollout.tool_format),
            reward=registry.build("reward", config.reward),
            make_tools=make_tools,
        )
        try:
            return await run_episode(EpisodeTask(prompt, 0, 5, run_seed=1), parts)
        finally:
            await parts.reward.close()
            await sandbox.aclose()

    return asyncio.run(scenario())


def results(episode: Episode) -> list[str]:
    return [result.content for turn in episode.turns for result in turn.tool_results]


SOLUTION = [call("print(37*4)"), call("print(148+19)"), call("print(167%50)"), r"\boxed{17}"]


def test_a_solved_chain_is_recorded_token_by_token(tool_server: str) -> None:
    script = Script(SOLUTION)
    episode = run(script, tool_server)
    trajectory = episode.trajectory
    assert results(episode) == ["148", "167", "17"]
    assert (trajectory.reward, trajectory.stop_reason) == (1.0, StopReason.ANSWER)
    text = RENDERER.tokenizer.decode(trajectory.token_ids.tolist(), skip_special_tokens=False)
    assert text == (
        "<|user|>s37 *4 +19 %50<|end|><|assistant|><tool_call>print(37*4)</tool_call><|end|><|tool|>148<|end|>"
        "<|assistant|><tool_call>print(148+19)</tool_call><|end|><|tool|>167<|end|>"
        "<|assistant|><tool_call>print(167%50)</tool_call><|end|><|tool|>17<|end|>"
        "<|assistant|>\\boxed{17}<|end|>"
    )
    sampled = RENDERER.tokenizer.decode(trajectory.token_ids[trajectory.loss_mask].tolist())
    assert sampled == "".join(turn + "<|end|>" for turn in SOLUTION)
    assert set(trajectory.policy_versions[trajectory.loss_mask].tolist()) == {3}
    assert trajectory.num_turns == len(episode.turns) == 4
    for turn_id, seen in enumerate(script.seen):
        np.testing.assert_array_equal(trajectory.token_ids[: len(seen)], seen)
        assert trajectory.turn_ids[len(seen)] == turn_id
    assert script.released == [5]
    assert len({params.seed for params in script.params}) == 4


@pytest.mark.parametrize("allowed", [0, 1, 2, 3, 5])
def test_max_tool_turn_counts_turns_with_calls_and_always_allows_an_answer(tool_server: str, allowed: int) -> None:
    endless = run(Script([call("print(1)")]), tool_server, f"rollout.max_tool_turn={allowed}")
    assert endless.trajectory.stop_reason is StopReason.MAX_TOOL_TURN
    assert [len(turn.tool_results) for turn in endless.turns] == [1] * allowed + [0]
    answering = [call("print(1)")] * allowed + [r"\boxed{17}"]
    episode = run(Script(answering), tool_server, f"rollout.max_tool_turn={allowed}")
    assert (episode.trajectory.stop_reason, episode.trajectory.reward) == (StopReason.ANSWER, 1.0)


def test_malformed_calls_are_readable_errors_and_cost_a_turn(tool_server: str) -> None:
    script = Script(["<tool_call>print(1)", call("print("), call("1/0"), r"\boxed{17}"])
    episode = run(script, tool_server, "rollout.max_tool_turn=3")
    unclosed, syntax, division = results(episode)
    assert unclosed == "Error: the tool call has no end marker"
    assert "SyntaxError" in syntax
    assert "ZeroDivisionError: division by zero" in division
    assert not any(result.ok for turn in episode.turns for result in turn.tool_results)
    assert episode.trajectory.stop_reason is StopReason.ANSWER
    again = run(Script(["<tool_call>print(1)"]), tool_server, "rollout.max_tool_turn=1")
    assert again.trajectory.stop_reason is StopReason.MAX_TOOL_TURN


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ('{"name": "python", "arguments": {"code": "print(6*7)"}}', None),
        ("{", "not valid JSON"),
        ('{"arguments": ' + "1" * 5000 + "}", "not valid JSON"),
        ('{"name": "python", "arguments": {"code": "\\ud800"}}', "not valid Unicode"),
        ("[1]", 'needs a "name"'),
        ('{"name": "python", "arguments": []}', "must be a JSON object"),
        ('{"name": "python"}', "needs the argument 'code'"),
        ('{"name": "python", "arguments": {"code": "1", "x": 1}}', "no argument 'x'"),
        ('{"name": "python", "arguments": {"code": 5}}', "must be a string"),
        ('{"name": "shell", "arguments": {}}', "no tool 'shell'; there is python"),
    ],
)
def test_hermes_calls(tool_server: str, body: str, error: str | None) -> None:
    overrides = ("rollout.tool_format.type=hermes", *ROOMY)
    episode = run(Script([call(body), r"\boxed{17}"]), tool_server, *overrides)
    if error is None:
        assert results(episode) == ["42"]
    else:
        assert error in results(episode)[0]
        assert results(episode)[0].startswith("Error: ")


def test_variables_persist_within_an_episode_and_not_beyond(tool_server: str) -> None:
    episode = run(Script([call("x=41"), call("print(x+1)"), r"\boxed{17}"]), tool_server)
    assert results(episode)[1] == "42"
    assert "NameError" in results(run(Script([call("print(x)"), "done"]), tool_server))[0]


def test_tool_output_is_cut_in_tokens(tool_server: str) -> None:
    episode = run(Script([call("print('7'*999)"), "done"]), tool_server)
    (content,) = results(episode)
    assert content.startswith("7777")
    assert content.endswith("...[999 tokens]")
    assert len(content) == 120


def test_budgets_end_an_episode(tool_server: str) -> None:
    long_turn = run(Script(["1" * 60]), tool_server)
    assert long_turn.trajectory.stop_reason is StopReason.MAX_TOKENS
    assert long_turn.trajectory.loss_mask.sum() == 48
    full = run(Script([call("print(1)")]), tool_server, "rollout.max_tool_turn=99", "rollout.max_episode_tokens=100")
    assert full.trajectory.stop_reason is StopReason.MAX_TOKENS
    assert 80 <= len(full.trajectory) <= 100


def test_the_deadline_is_looked_at_before_each_turn_and_each_call(
    tool_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(episode_module, "time", SimpleNamespace(monotonic=lambda: now[0]))

    class Slow(Tool):
        name = "python"

        async def call(self, code: str) -> ToolResult:
            """Takes as many seconds as it is told."""
            now[0] += float(code)
            return ToolResult("done", ok=True)

    turns = [call("40"), call("50") + call("50") + call("50")]
    late = run(Script(turns), tool_server, "rollout.deadline_s=100", tool=Slow())
    assert results(late) == ["done", "done", "done", "Error: the episode's time is over"]
    assert (late.trajectory.stop_reason, len(late.turns)) == (StopReason.DEADLINE, 2)


def test_calls_of_one_turn_are_bounded(tool_server: str) -> None:
    script = Script([call("x=1") + call("x+=1") + call("x+=1"), call("x"), "done"])
    episode = run(script, tool_server, "rollout.max_calls_per_turn=2", *ROOMY)
    refused = "Error: only 2 calls a turn are made"
    assert results(episode) == [SILENT, SILENT, refused, "2"]
    assert [result.ok for result in episode.turns[0].tool_results] == [True, True, False]
    assert not any(made.error for made in episode.turns[0].tool_calls)  # they are well formed


def test_a_prompt_over_the_budget_samples_nothing_and_stays_within_it(tool_server: str) -> None:
    long_prompt = Prompt(0, ({"role": "user", "content": "7" * 400},), "17")
    episode = run(Script(["done"]), tool_server, prompt=long_prompt)
    assert (episode.trajectory.stop_reason, episode.turns) == (StopReason.MAX_TOKENS, ())
    assert len(episode.trajectory) == 256
    assert not episode.trajectory.loss_mask.any()


@pytest.mark.parametrize("limit", range(60, 100, 7))
def test_no_episode_is_longer_than_its_budget(tool_server: str, limit: int) -> None:
    episode = run(Script([call("print(10**9)")]), tool_server, f"rollout.max_episode_tokens={limit}")
    assert len(episode.trajectory) <= limit


def test_a_tool_that_breaks_is_an_infrastructure_failure(tool_server: str) -> None:
    class Broken(Tool):
        name = "python"

        async def call(self, code: str) -> ToolResult:
            """Always fails."""
            raise RuntimeError("no such backend")

    with pytest.raises(ToolError, match="tool python: RuntimeError: no such backend"):
        run(Script([call("print(1)")]), tool_server, tool=Broken())


def test_only_an_answer_is_scored(tool_server: str) -> None:
    forged = run(Script([call(r"print('\\boxed{17}')"), "no idea"]), tool_server)
    assert forged.trajectory.reward == 0
    capped = run(Script([call(r"print(1)#\boxed{17}")]), tool_server, "rollout.max_tool_turn=0")
    assert (capped.trajectory.stop_reason, capped.trajectory.reward) == (StopReason.MAX_TOOL_TURN, 0.0)


def test_a_dead_tool_server_is_an_exception_and_the_engine_is_told(tool_server: str) -> None:
    script = Script([call("print(1)")])
    with pytest.raises(SandboxError):
        run(script, "http://127.0.0.1:9")
    assert script.released == [5]


def test_seeds_differ_by_run_purpose_episode_and_turn_but_not_by_attempt() -> None:
    base: dict[str, Any] = {"prompt": PROMPT, "group_id": 0, "episode_id": 5, "run_seed": 1}
    tasks = [EpisodeTask(**base), EpisodeTask(**base | {"run_seed": 2}), EpisodeTask(**base | {"episode_id": 6})]
    tasks.append(EpisodeTask(**base, purpose="eval"))
    assert len({task.seed(turn) for task in tasks for turn in range(3)}) == 12
    assert EpisodeTask(**base, attempt=2).seed(1) == tasks[0].seed(1)
