"""An engine whose weights change while episodes run on it."""

import asyncio
from dataclasses import replace
from hashlib import blake2b
from typing import Literal

import numpy as np

from agent_rl.records import Completion, FinishReason, IntArray, SamplingParams
from agent_rl.rollout.engines.base import Engine, joined
from agent_rl.weights.base import Weights

Update = Literal["in_flight", "drain", "abort"]


class LiveEngine:
    """An `Engine` around another one, which says what becomes of running generations when weights arrive.

    `in_flight`: they go on with the new weights. `drain`: they end first, and no other starts meanwhile.
    `abort`: they are cut, and each `generate` goes on from what it had, as one completion to its caller.
    """

    def __init__(self, engine: Engine, update: Update = "in_flight") -> None:
        self.engine, self.update = engine, update
        self._running = 0
        self._open, self._idle = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._idle.set()

    @property
    def policy_version(self) -> int:
        return self.engine.policy_version

    async def generate(
        self, sequence_id: int, token_ids: IntArray, params: SamplingParams, routed_from: int | None = None
    ) -> Completion:
        """As `Engine.generate`; waits while weights are being replaced."""
        parts: list[Completion] = []
        while not parts or parts[-1].finish_reason is FinishReason.ABORT:
            done = sum(len(part.token_ids) for part in parts)
            so_far = np.concatenate([token_ids, *(part.token_ids for part in parts)])
            # The last token of a part was no input of it, so that is where the next part's routing starts.
            first = routed_from if not parts or routed_from is None else len(so_far) - 1
            parts.append(await self._generate_part(sequence_id, so_far, rest_of(params, done), first))
        return parts[0] if len(parts) == 1 else joined(parts)

    async def _generate_part(
        self, sequence_id: int, token_ids: IntArray, params: SamplingParams, routed_from: int | None
    ) -> Completion:
        while not self._open.is_set():
            await self._open.wait()
        self._running += 1
        self._idle.clear()
        try:
            return await self.engine.generate(sequence_id, token_ids, params, routed_from)
        finally:
            self._running -= 1
            if self._running == 0:
                self._idle.set()

    def interrupt(self) -> None:
        self.engine.interrupt()

    def release(self, sequence_id: int) -> None:
        self.engine.release(sequence_id)

    async def ready(self) -> None:
        """As `Engine.ready`, after draining; no request starts until the weights have come."""
        await self.engine.ready()
        if self.update == "drain":
            self._open.clear()
            await self._idle.wait()

    async def update_weights(self, weights: Weights, policy_version: int) -> None:
        self._open.clear()
        try:
            if self.update == "drain":
                await self._idle.wait()
            elif self.update == "abort":
                self.engine.interrupt()
            await self.engine.update_weights(weights, policy_version)
        finally:
            self._open.set()

    async def close(self) -> None:
        await self.engine.close()


def rest_of(params: SamplingParams, num_done: int) -> SamplingParams:
    """Parameters for the rest after `num_done` tokens; the seed is new, since draws count from a request's start."""
    if num_done == 0:
        return params
    seed = int.from_bytes(blake2b(f"{params.seed}/{num_done}".encode(), digest_size=8).digest()) >> 1
    return replace(params, max_new_tokens=params.max_new_tokens - num_done, seed=seed)
