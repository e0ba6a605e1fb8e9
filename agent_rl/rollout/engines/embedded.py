"""The embedded engine: continuous batching inside the process of the rollout worker, for models that fit a CPU."""

import asyncio
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch
from pydantic import Field

from agent_rl.records import Completion, FinishReason, IntArray, LongArray, SamplingMask, SamplingParams
from agent_rl.registry import PartBase
from agent_rl.rollout.embedded.forward import Forward, build_forward, load_model
from agent_rl.rollout.embedded.kv_cache import KVCache, plan_step
from agent_rl.rollout.embedded.routing import RoutingTable
from agent_rl.rollout.embedded.sampling import SamplingTable
from agent_rl.rollout.embedded.slots import Slots
from agent_rl.rollout.embedded.weights import check_weights, load_weights
from agent_rl.rollout.engines.base import EngineConfig
from agent_rl.weights.base import Weights
from agent_rl.weights.transfer.group import GroupMembership


@dataclass(eq=False)
class _Request:
    """One `generate` call: its slot while it runs, and the kept set of every token sampled so far."""

    sequence_id: int
    token_ids: IntArray
    params: SamplingParams
    future: asyncio.Future[Completion]
    routed_from: int | None
    slot: int = -1
    kept: list[IntArray] = field(default_factory=list)


class EmbeddedEngine(PartBase):
    """An `Engine` over the modules of a Hugging Face causal LM, in the event loop of its caller.

    Every sequence has a slot of the KV cache and keeps it between its `generate` calls, so a further turn
    prefills only what was appended. A step packs whatever its rows need, one token for a decoding row and a
    chunk for one in prefill. Steps run between the other tasks of the event loop, one at a time; requests
    submitted meanwhile join the next step in the order of their submission. The same submissions in the
    same order give the same bits; what is drawn depends on a request's own seed only.
    """

    can_replay_routing = True

    class Config(EngineConfig):
        """How much runs at once."""

        type: str = "embedded"
        max_concurrent_sequences: int = Field(64, ge=1)
        """Slots of the KV cache. Further requests wait; an idle episode loses its slot to one that runs."""
        prefill_tokens_per_step: int = Field(4096, ge=1)
        """The most prompt tokens computed between two decoding steps; it bounds latency and memory."""

    def __init__(
        self,
        config: Config,
        model_path: str,
        worker_index: int = 0,
        report_routing: bool = False,
    ) -> None:
        slots, max_tokens = config.max_concurrent_sequences, config.max_sequence_tokens
        self._config = config
        self._model = load_model(model_path, max_tokens)
        self._vocab_size: int = self._model.get_input_embeddings().num_embeddings
        self._cache = KVCache(slots, max_tokens)
        self._forward: Forward = build_forward(self._model, self._cache, max_tokens)
        self._routing = RoutingTable(self._model, slots, max_tokens)
        self._slots = Slots(slots, max_tokens)
        self._sampling = SamplingTable(slots)
        self._logprobs = np.zeros((slots, max_tokens), np.float32)
        self._versions = np.zeros((slots, max_tokens), np.int32)
        self._prompt_length = np.zeros(slots, np.int64)
        self._limit = np.zeros(slots, np.int64)
        self._policy_version = 0
        self._queue: deque[_Request] = deque()
        self._running: dict[int, _Request] = {}  # by slot, in the order of admission
        self._task: asyncio.Task[None] | None = None
        self._stepping = asyncio.Lock()
        """Held during a step, and while weights change."""
        self._membership = GroupMembership(worker_index)
        self._closed = False
        self._probe()

    @property
    def policy_version(self) -> int:
        return self._policy_version

    async def generate(
        self, sequence_id: int, token_ids: IntArray, params: SamplingParams, routed_from: int | None = None
    ) -> Completion:
        """Continue `token_ids` as `Engine.generate` says; a completion is cut where the context ends.

        Raises `ValueError` for a prompt that is empty, leaves no room for a token or holds an id outside the
        vocabulary, for a sequence that already has a request, and for `routed_from` outside the prompt or on a
        model without routers; `RuntimeError` once the engine is closed.
        """
        request = self._submit(sequence_id, np.asarray(token_ids, np.int32), params, routed_from)
        try:
            return await request.future
        finally:
            self._withdraw(request)

    def _submit(
        self, sequence_id: int, token_ids: IntArray, params: SamplingParams, routed_from: int | None
    ) -> _Request:
        if self._closed:
            raise RuntimeError("the engine is closed")
        if any(r.sequence_id == sequence_id for r in self._requests()):
            raise ValueError(f"sequence {sequence_id} already has a request; await it before the next turn")
        capacity = self._config.max_sequence_tokens
        if not 0 < len(token_ids) < capacity:
            raise ValueError(
                f"a prompt of {len(token_ids)} tokens must have at least one token and leave room for one more in "
                f"{capacity}; raise max_sequence_tokens or shorten the prompt"
            )
        if token_ids.min() < 0 or token_ids.max() >= self._vocab_size:
            raise ValueError(f"the prompt has ids outside the model's vocabulary of {self._vocab_size}")
        self._check_routing(routed_from, len(token_ids))
        loop = asyncio.get_running_loop()
        request = _Request(sequence_id, token_ids, params, loop.create_future(), routed_from)
        self._queue.append(request)
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._run())
        return request

    def _check_routing(self, routed_from: int | None, num_tokens: int) -> None:
        if routed_from is None:
            return
        if not self._routing.supported:
            kind = self._model.config.model_type
            raise ValueError(f"the model, a {kind}, has no routing that could be reported; set routing_replay to false")
        if not 0 <= routed_from < num_tokens:
            raise ValueError(f"routed_from is {routed_from}, but the prompt has the positions 0 to {num_tokens - 1}")

    def _requests(self) -> list[_Request]:
        return [*self._running.values(), *self._queue]

    def _withdraw(self, request: _Request) -> None:
        """Take a request out of the engine; its sequence keeps its slot. One that is out already stays so."""
        if self._running.get(request.slot) is request:
            del self._running[request.slot]
            self._slots.park(request.sequence_id)
        elif request in self._queue:
            self._queue.remove(request)

    def interrupt(self) -> None:
        """Hand out what running requests have sampled, with `FinishReason.ABORT`; those without a token run on."""
        for request in list(self._running.values()):
            if self._slots.length[request.slot] > len(request.token_ids):
                self._finish(request, FinishReason.ABORT)

    def release(self, sequence_id: int) -> None:
        """Free the slot of a sequence; a request it still has is cancelled."""
        for request in [r for r in self._requests() if r.sequence_id == sequence_id]:
            self._withdraw(request)
            request.future.cancel()
        self._slots.release(sequence_id)

    async def ready(self) -> None:
        return

    async def update_weights(self, weights: Weights, policy_version: int) -> None:
        """Serve `weights`; sequences are recomputed with them before their next token, and none is stepped meanwhile.

        Raises `ValueError`, and changes nothing, if they are not of this model. If they cannot be had whole the engine
        is closed: it holds parts of two versions.
        """
        check_weights(self._model, weights)
        async with self._stepping:
            try:
                await load_weights(self._model, weights, self._membership)
            except BaseException:
                await self.close()
                raise
            self._forward = build_forward(self._model, self._cache, self._config.max_sequence_tokens)
            self._slots.forget_computed()
            self._policy_version = policy_version

    async def close(self) -> None:
        """Stop; requests that still wait get a `RuntimeError`."""
        self._closed = True
        self._fail(RuntimeError("the engine was closed while this request ran"))
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        """Step while there are requests. Ends when there are none; the next one starts it again."""
        while self._queue or self._running:
            async with self._stepping:
                try:
                    self._admit()
                    self._step()
                except Exception as error:
                    self._fail(error)
            await asyncio.sleep(0)

    def _fail(self, error: Exception) -> None:
        """Give `error` to every waiting request and start over with an empty cache."""
        for request in self._requests():
            self._withdraw(request)
            if not request.future.done():
                request.future.set_exception(error)
        self._cache.clear()
        self._slots.forget_computed()

    def _admit(self) -> None:
        while self._queue:
            request = self._queue[0]
            slot = self._slots.acquire(request.sequence_id, request.token_ids)
            if slot is None:
                return
            prompt, capacity = len(request.token_ids), self._config.max_sequence_tokens
            self._prompt_length[slot] = prompt
            self._limit[slot] = min(prompt + request.params.max_new_tokens, capacity)
            self._sampling.set(slot, request.params, self._vocab_size)
            self._routing.begin(slot, int(self._slots.computed[slot]))
            request.slot = slot
            self._running[slot] = self._queue.popleft()

    @torch.inference_mode()
    def _step(self) -> None:
        """Compute what the rows need, up to the prefill budget, and sample for those that are complete."""
        slots = np.fromiter(self._running, np.int64, len(self._running))
        todo = self._slots.length[slots] - self._slots.computed[slots]
        count = self._schedule(todo)
        order = np.argsort(slots)
        order = order[count[order] > 0]
        slots, count, ready = slots[order], count[order], count[order] == todo[order]
        step = plan_step(self._slots.tokens, slots, self._slots.computed[slots], count, np.flatnonzero(ready))
        logits = self._forward(step)
        self._routing.store(step)
        self._slots.computed[slots] += count
        if ready.any():
            self._append(slots[ready], logits)

    def _schedule(self, todo: LongArray) -> LongArray:
        """How many tokens each row computes: a decoding row its one, prefills share the budget in order."""
        prefill = np.where(todo > 1, todo, 0)
        left = self._config.prefill_tokens_per_step - (np.cumsum(prefill) - prefill)
        return np.where(todo > 1, np.clip(left, 0, todo), 1)

    def _append(self, slots: LongArray, logits: torch.Tensor) -> None:
        """Sample the next token of every slot and hand out the completions that end with it."""
        at = self._slots.length[slots]
        sampled = self._sampling.sample(slots, at - self._prompt_length[slots], logits)
        self._slots.tokens[slots, at] = sampled.token_ids
        self._logprobs[slots, at] = sampled.logprobs
        self._versions[slots, at] = self._policy_version
        self._slots.length[slots] += 1
        requests = [self._running[slot] for slot in slots.tolist()]
        for row, ids in zip(sampled.restricted.tolist(), sampled.kept, strict=True):
            requests[row].kept.append(ids)
        full = (at + 1 == self._limit[slots]).tolist()
        for request, token, is_full in zip(requests, sampled.token_ids.tolist(), full, strict=True):
            if token in request.params.stop_token_ids:
                self._finish(request, FinishReason.STOP)
            elif is_full:
                self._finish(request, FinishReason.LENGTH)

    def _finish(self, request: _Request, reason: FinishReason) -> None:
        self._withdraw(request)
        slot, length = request.slot, int(self._slots.length[request.slot])
        span, first = slice(len(request.token_ids), length), request.routed_from
        completion = Completion(
            token_ids=self._slots.tokens[slot, span].copy(),
            behavior_logprobs=self._logprobs[slot, span].copy(),
            sampling_mask=SamplingMask.from_rows(request.kept)
            if request.kept
            else SamplingMask.full(span.stop - span.start),
            policy_versions=self._versions[slot, span].copy(),
            finish_reason=reason,
            routed_experts=None if first is None else self._routing.rows(slot, first, length - 1),
        )
        if not request.future.done():
            request.future.set_result(completion)

    def _probe(self) -> None:
        """One token through the model, so that a model the engine cannot serve is refused here."""
        one = np.ones(1, np.int64)
        with torch.inference_mode():
            self._forward(plan_step(self._slots.tokens, 0 * one, 0 * one, one, 0 * one))
