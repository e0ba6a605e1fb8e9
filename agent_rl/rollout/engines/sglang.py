"""The SGLang engine: one server a rollout worker, launched and kept alive by it, or one that is already there."""

import asyncio
import secrets
import time
from pathlib import Path
from typing import Any

import numpy as np

from agent_rl.records import Completion, FinishReason, IntArray, SamplingParams
from agent_rl.registry import PartBase
from agent_rl.rollout.engines.base import EngineError, joined
from agent_rl.rollout.sglang.client import Client, RefusedError, UnreachableError
from agent_rl.rollout.sglang.config import SGLangConfig
from agent_rl.rollout.sglang.messages import ModelShape, VersionLabels, read_part, request_body
from agent_rl.rollout.sglang.supervisor import Supervisor
from agent_rl.weights.base import Weights

_ABORT_S = 30.0
_WATCH_S = 10.0
_MAX_EMPTY_ABORTS = 5
_HUNG = "the SGLang server has hung: its scheduler is silent"
_SUPPORT_TOO_LARGE = "Sampling support exceeds"  # SGLang's words


class SGLangEngine(PartBase):
    """An `Engine` over the HTTP interface of SGLang 0.5.23.

    A worker has a server of its own, on loopback or at `urls[worker_index]`: then its weights have one writer, an
    episode finds its prefix where its last turn was, and a server that dies takes one worker's requests with it.
    The first request or weight update launches the server and checks it.

    Requests carry their seeds, which SGLang draws with only in its deterministic mode. It also stops at the end
    tokens of the model's config, whether or not they are among a request's `stop_token_ids`. With `on_update: in_place`
    the tokens after an update attend to KV entries of the old weights, and are stamped with the new version; no later
    request sees those entries.
    """

    Config = SGLangConfig
    can_replay_routing = True

    def __init__(
        self, config: SGLangConfig, model_path: str, worker_index: int = 0, report_routing: bool = False
    ) -> None:
        shared = config.as_served is not None
        if shared and not config.urls:
            raise ValueError("rollout.engine.as_served needs servers that run; give their addresses as urls")
        if config.urls and worker_index >= len(config.urls) and not shared:
            raise ValueError(
                f"rollout.engine.urls names {len(config.urls)} servers, but worker {worker_index} needs one too; "
                "give one address for each of rollout.num_workers and eval.workers"
            )
        self._config, self._report_routing = config, report_routing
        self._shape = ModelShape.of(Path(model_path))
        if config.max_sequence_tokens > self._shape.max_positions:
            raise ValueError(
                f"rollout.engine.max_sequence_tokens is {config.max_sequence_tokens}, but the model has "
                f"{self._shape.max_positions} positions; lower it"
            )
        self._versions = VersionLabels(secrets.token_hex(4), config.as_served)
        self._server = Supervisor(config, Path(model_path), worker_index, report_routing, self._versions)
        self._tasks: dict[int, asyncio.Task[Completion]] = {}
        self._failures: dict[asyncio.Task[Completion], Exception] = {}
        self._rids: dict[str, Client] = {}
        """Requests at a server that are not interrupted."""
        self._aborts: set[asyncio.Task[None]] = set()
        self._watch: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def policy_version(self) -> int:
        return self._server.policy_version

    async def generate(
        self, sequence_id: int, token_ids: IntArray, params: SamplingParams, routed_from: int | None = None
    ) -> Completion:
        """Continue `token_ids` as `Engine.generate` says; a completion is cut where the context ends.

        Raises `EngineError` if the server dies, hangs or fails under the request; the next request starts it again.
        Raises `ValueError` for a request that it cannot serve, and when no server can be had any more.
        """
        token_ids = np.asarray(token_ids, np.int32)
        self._check(sequence_id, token_ids, params, routed_from)
        task = asyncio.ensure_future(self._complete(token_ids, params, routed_from))
        self._tasks[sequence_id] = task
        try:
            return await task
        except asyncio.CancelledError:
            if failure := self._failures.pop(task, None):
                raise failure from None
            raise
        finally:
            del self._tasks[sequence_id]

    def _fail(self, failure: Exception) -> None:
        """End every request that runs with `failure`."""
        for task in self._tasks.values():
            if not task.done():
                self._failures[task] = failure
                task.cancel()

    def _check(self, sequence_id: int, token_ids: IntArray, params: SamplingParams, routed_from: int | None) -> None:
        if self._closed:
            raise RuntimeError("the engine is closed")
        if sequence_id in self._tasks:
            raise ValueError(f"sequence {sequence_id} already has a request; await it before the next turn")
        capacity, cap = self._config.max_sequence_tokens, self._config.sampling_mask_max_tokens
        if not 0 < len(token_ids) < capacity:
            raise ValueError(
                f"a prompt of {len(token_ids)} tokens must have at least one token and leave room for one more in "
                f"{capacity}; raise max_sequence_tokens or shorten the prompt"
            )
        if token_ids.min() < 0 or token_ids.max() >= self._shape.vocab_size:
            raise ValueError(f"the prompt has ids outside the model's vocabulary of {self._shape.vocab_size}")
        if params.temperature > 0 and params.top_k > cap:
            raise ValueError(
                f"top_k is {params.top_k}, but the server reports kept sets of at most {cap} tokens; lower "
                "rollout.sampling.top_k or raise rollout.engine.sampling_mask_max_tokens"
            )
        if routed_from is not None and not self._report_routing:
            raise ValueError("routed_from was given to an engine that was not built to report routing")

    async def _complete(self, token_ids: IntArray, params: SamplingParams, routed_from: int | None) -> Completion:
        """Send the request, and again from where it got to while the server aborts it: nothing sampled is lost.

        What was to be interrupted is handed out, once it has a token.
        """
        limit = min(params.max_new_tokens, self._config.max_sequence_tokens - len(token_ids))
        parts: list[Completion] = []
        for _ in range(limit + _MAX_EMPTY_ABORTS):
            rid = secrets.token_hex(12)
            try:
                part = await self._sample(await self._server.ready(), rid, token_ids, params, limit, routed_from)
            finally:
                interrupted = self._rids.pop(rid, None) is None
            parts.append(part)
            handed_out = interrupted and any(len(part.token_ids) for part in parts)
            if part.finish_reason is not FinishReason.ABORT or handed_out:
                return joined(parts)
            token_ids, limit = np.concatenate([token_ids, part.token_ids]), limit - len(part.token_ids)
            if routed_from is not None and part.routed_experts is not None:
                routed_from += len(part.routed_experts)
        raise EngineError("the SGLang server aborted a request again and again")

    async def _sample(
        self, client: Client, rid: str, token_ids: IntArray, params: SamplingParams, limit: int, routed_from: int | None
    ) -> Completion:
        body = request_body(token_ids, params, limit, self._top_k(params), routed_from)
        body["rid"], self._rids[rid] = rid, client
        if self._config.on_update == "in_place":
            body["extra_key"] = self._versions.of(self.policy_version)  # each version has a prefix cache of its own
        if self._watch is None or self._watch.done():
            self._watch = asyncio.ensure_future(self._watch_server())
        try:
            answer = await client.post("/generate", body)
        except asyncio.CancelledError:
            self._abort(client, rid)
            raise
        except UnreachableError:
            await self._server.examine(client)
            raise
        except RefusedError as refusal:
            raise ValueError(f"{refusal}{_hint(str(refusal))}") from None
        part = read_part(answer, body, self._versions, self._shape)
        self._check_nucleus(part, params)
        return part

    def _top_k(self, params: SamplingParams) -> int:
        """The top-k to send: SGLang reports kept sets only for a finite one, so top-p alone gets the largest."""
        if params.top_k == -1 and params.cuts_support:
            return min(self._config.sampling_mask_max_tokens, self._shape.vocab_size)
        return params.top_k

    def _check_nucleus(self, part: Completion, params: SamplingParams) -> None:
        cap = self._config.sampling_mask_max_tokens
        if params.top_k == -1 and cap < self._shape.vocab_size and part.sampling_mask.sizes.max(initial=0) >= cap:
            raise ValueError(f"top-p kept {cap} tokens or more, the most that the server reports{_hint('')}")

    def _abort(self, client: Client, rid: str) -> None:
        """Tell the server to drop a request, without waiting for it."""

        async def post() -> None:
            try:
                await client.post("/abort_request", {"rid": rid}, _ABORT_S)
            except (EngineError, RefusedError):
                return  # a server that is gone holds no requests

        task = asyncio.ensure_future(post())
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _watch_server(self) -> None:
        """While requests run, ask whether the scheduler is alive; if it has hung, fail all requests.

        SGLang itself answers that it is not after 20 s without a step, which a busy machine may need: only
        `hang_deadline_s` without a good answer count. A start and a weight update have their own deadlines.
        """
        within, last_good = self._config.hang_deadline_s, time.monotonic()
        while self._tasks:
            await asyncio.sleep(min(within / 4, _WATCH_S))
            client = self._server.client
            healthy = client is None or self._server.changing.locked() or await client.healthy(within)
            if healthy or self._server.changing.locked():
                last_good = time.monotonic()
            elif client is not None and time.monotonic() - last_good > within:
                self._server.lose(client)
                self._fail(EngineError(_HUNG))

    def interrupt(self) -> None:
        """Let the server abort running requests, which return what they have; waiting ones are sent again."""
        rids, self._rids = self._rids, {}
        for rid, client in rids.items():
            self._abort(client, rid)

    def release(self, sequence_id: int) -> None:
        """Cancel the request of a sequence, if it has one. Its prefix is left to the server's cache."""
        if task := self._tasks.get(sequence_id):
            task.cancel()

    async def ready(self) -> None:
        """Launch or find the server. Raises `ValueError` if none can be had."""
        await self._server.ready()

    async def update_weights(self, weights: Weights, policy_version: int) -> None:
        """Serve `weights`; requests that run are treated as `on_update` says.

        Raises `ValueError`, with the server's reason, if it refuses the weights.
        """
        await asyncio.gather(*self._aborts)  # interrupted requests end with the weights that they have
        await self._server.load(weights, policy_version)

    async def close(self) -> None:
        """End a launched server; requests that still wait get a `RuntimeError`."""
        self._closed = True
        ending: list[asyncio.Task[Any]] = [*self._tasks.values()]
        self._fail(RuntimeError("the engine was closed while this request ran"))
        if self._watch:
            self._watch.cancel()
            ending.append(self._watch)
        await asyncio.gather(*ending, return_exceptions=True)
        await asyncio.gather(*self._aborts)
        await self._server.close()


def _hint(refusal: str) -> str:
    """Which key to change, where a kept set is larger than the server reports."""
    if refusal and _SUPPORT_TOO_LARGE not in refusal:
        return ""
    return "; raise rollout.engine.sampling_mask_max_tokens or set a lower rollout.sampling.top_k"
