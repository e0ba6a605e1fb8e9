"""Finished episodes for tests of rewards."""

import numpy as np

from agent_rl.records import Completion, FinishReason, Prompt, SamplingMask, StopReason, ToolCall, Turn
from agent_rl.rewards.base import FinishedEpisode
from tools.base import ToolResult


def turn(turn_id: int, num_tokens: int, ok: bool | None = None, malformed: bool = False) -> Turn:
    """A turn of `num_tokens` sampled tokens; with `ok`, one that called a tool, which succeeded or failed."""
    completion = Completion(
        token_ids=np.arange(num_tokens, dtype=np.int32),
        behavior_logprobs=np.full(num_tokens, -1.0, np.float32),
        sampling_mask=SamplingMask.full(num_tokens),
        policy_versions=np.zeros(num_tokens, np.int32),
        finish_reason=FinishReason.STOP,
    )
    if ok is None:
        return Turn(turn_id, np.empty(0, np.int32), completion)
    call = ToolCall("python", {}, error="not JSON" if malformed else None)
    return Turn(turn_id, np.empty(0, np.int32), completion, (call,), (ToolResult("17", ok),))


def finished(
    text: str | None,
    answer: str = "17",
    stop: StopReason = StopReason.ANSWER,
    turns: tuple[Turn, ...] = (),
) -> FinishedEpisode:
    """An episode whose last turn says `text`; None for one without a turn."""
    texts = () if text is None else (*["a call"] * (len(turns) - 1), text)
    prompt = Prompt(4, ({"role": "user", "content": "s37 *4 +19 %50"},), answer)
    if text is None and stop is StopReason.ANSWER:
        stop = StopReason.MAX_TOKENS
    return FinishedEpisode(4, 37, 0, prompt, turns, texts, stop)
