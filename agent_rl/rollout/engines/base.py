"""The interface of inference engines: token ids in, token ids out."""

from typing import Any, Protocol

import numpy as np
from pydantic import Field

from agent_rl.records import Completion, IntArray, SamplingMask, SamplingParams
from agent_rl.registry import PartConfig
from agent_rl.weights.base import Weights


class EngineConfig(PartConfig):
    """What an engine's `Config` derives from."""

    max_sequence_tokens: int = Field(1024, ge=2)
    """The longest sequence, prompt and completion together."""

    def check_run(self, run: Any) -> None:
        """Episodes fit into a sequence."""
        longest = run.rollout.max_episode_tokens
        if self.max_sequence_tokens < longest:
            raise ValueError(
                f"rollout.max_episode_tokens is {longest}, but rollout.engine.max_sequence_tokens is "
                f"{self.max_sequence_tokens}; make them fit"
            )


class EngineError(Exception):
    """The engine failed under a request; the same request may succeed when it is made again."""


class Engine(Protocol):
    """Built as `cls(config, model_path=…, worker_index=…, report_routing=…)`: which of the run's rollout workers it is
    for, and whether `routed_from` will be asked for.

    An engine serves many concurrent `generate` calls and stamps every token with its policy version.

    `sequence_id` names one episode: successive calls with the same id extend the same token sequence, so
    an engine may keep its KV cache between them. `release` says that the episode is over; it is safe to
    call for an unknown id. The class of an engine that can report routing says so: `can_replay_routing = True`.
    """

    @property
    def policy_version(self) -> int:
        """The version that the next sampled token will be stamped with."""
        ...

    async def generate(
        self, sequence_id: int, token_ids: IntArray, params: SamplingParams, routed_from: int | None = None
    ) -> Completion:
        """Continue `token_ids` (int32 [L], the whole sequence so far) by up to `params.max_new_tokens`.

        With `routed_from`, the completion also holds the experts that each input from that position on was
        routed to, as `Completion.routed_experts` says; None asks for none.

        Raises `ValueError` if the sequence cannot fit into the engine's context, or if it already has a
        request that runs.
        """
        ...

    def interrupt(self) -> None:
        """End every request that has sampled a token now: its `generate` returns what there is, with `ABORT`.

        Its sequence is kept, so that a further `generate` goes on from there; other requests stay.
        """
        ...

    def release(self, sequence_id: int) -> None:
        """Forget a sequence; a request that it still has is cancelled."""
        ...

    async def ready(self) -> None:
        """Return once the engine can load weights without delay; they are then sent to all engines."""
        ...

    async def update_weights(self, weights: Weights, policy_version: int) -> None:
        """Load `weights` and serve them as `policy_version` from the next token on.

        May be called while requests run: their later tokens carry the new version, and no KV entry of
        the old weights is used for them. Nothing is sampled while a part of the weights is the old ones. Raises
        `ValueError`, with the old weights in place, if the new ones are not of this model.
        """
        ...

    async def close(self) -> None: ...


def joined(parts: list[Completion]) -> Completion:
    """Consecutive parts of one turn as one completion, which ends as the last part does."""
    routed = [part.routed_experts for part in parts if part.routed_experts is not None]
    assert len(routed) in (0, len(parts)), "some parts of a turn report routing and some do not"
    return Completion(
        token_ids=np.concatenate([part.token_ids for part in parts]),
        behavior_logprobs=np.concatenate([part.behavior_logprobs for part in parts]),
        sampling_mask=SamplingMask.concat([part.sampling_mask for part in parts]),
        policy_versions=np.concatenate([part.policy_versions for part in parts]),
        finish_reason=parts[-1].finish_reason,
        routed_experts=np.concatenate(routed) if routed else None,
    )
