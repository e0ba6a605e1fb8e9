"""How a server is given new weights: a file, tensors in shared memory, or a broadcast that it receives."""

import base64
import contextlib
import io
from collections.abc import AsyncIterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.multiprocessing
from torch import Tensor

from agent_rl.rollout.engines.base import EngineError
from agent_rl.rollout.sglang.client import Client, RefusedError
from agent_rl.rollout.sglang.config import SGLangConfig
from agent_rl.rollout.sglang.weights import as_directory
from agent_rl.weights.base import WeightFile, Weights
from agent_rl.weights.transfer.buckets import Bucket
from agent_rl.weights.transfer.group import Rendezvous
from agent_rl.weights.transfer.handles import WeightBroadcast, WeightObjects


class Loading:
    """The weight updates of one server. Buckets are loaded one after the other, the last one with the version's label
    and the flushing of the prefix cache, so the server must be paused."""

    def __init__(self, client: Client, config: SGLangConfig, model_path: Path, folder: Path, worker_index: int) -> None:
        self.client, self._config = client, config
        self._model_path, self._folder, self._worker_index = model_path, folder, worker_index
        self._group: str | None = None
        """Name of the process group that the server has joined; None if it has joined none."""

    async def load(self, weights: Weights, label: str, flush_cache: bool) -> None:
        """Load `weights` into the server. Raises `RefusedError` if a file is refused, with the old weights in place,
        and `EngineError` if parts of both versions may be in place."""
        stamp = {"weight_version": label, "flush_cache": flush_cache}
        match weights:
            case WeightFile():
                with as_directory(weights.path, self._model_path, self._folder) as directory:
                    body = {"model_path": str(directory)} | stamp
                    await self.client.post("/update_weights_from_disk", body, self._config.update_deadline_s)
            case WeightObjects():
                await self._take_tensors(weights, stamp)
            case WeightBroadcast():
                await self._receive(weights, stamp)
            case _:
                raise ValueError(f"an SGLang server cannot be given {type(weights).__name__}; choose other weights")

    async def _take_tensors(self, weights: WeightObjects, stamp: dict[str, Any]) -> None:
        async with self._session():
            async for bucket, data in weights.data():
                payloads = [shared(bucket, data) for _ in range(self._config.tp_size)]
                body = {"serialized_named_tensors": payloads, "load_format": "flattened_bucket"}
                is_last = bucket is weights.buckets[-1]
                await self._post("/update_weights_from_tensor", body | (stamp if is_last else {"flush_cache": False}))

    async def _receive(self, weights: WeightBroadcast, stamp: dict[str, Any]) -> None:
        """What is sent to all, or, where the server has no part in that, what is sent to it alone."""
        if weights.rendezvous is not None and weights.is_for(self._group):
            await self._receive_at(weights.rendezvous, 1 + self._worker_index * self._config.tp_size, weights, stamp)
            return
        private = await weights.ask(self._worker_index)
        await self._receive_at(private.rendezvous, 1, weights, stamp)
        await self._leave()
        await private.end()

    async def _receive_at(
        self, rendezvous: Rendezvous, rank: int, weights: WeightBroadcast, stamp: dict[str, Any]
    ) -> None:
        if rendezvous.name != self._group:
            await self._leave()
            place = {"master_address": rendezvous.host, "master_port": rendezvous.port, "backend": rendezvous.backend}
            group = {"group_name": rendezvous.name, "rank_offset": rank, "world_size": rendezvous.size}
            await self._post("/init_weights_update_group", place | group)
            self._group = rendezvous.name
        async with self._session():
            for bucket in weights.buckets:
                body = {
                    "names": bucket.names,
                    "dtypes": [str(dtype).removeprefix("torch.") for dtype in bucket.dtypes],
                    "shapes": bucket.shapes,
                    "group_name": rendezvous.name,
                    "load_format": "flattened_bucket",
                }
                is_last = bucket is weights.buckets[-1]
                path = "/update_weights_from_distributed"
                await self._post(path, body | (stamp if is_last else {"flush_cache": False}))

    async def _leave(self) -> None:
        if self._group is not None:
            name, self._group = self._group, None
            with contextlib.suppress(EngineError):
                await self._post("/destroy_weights_update_group", {"group_name": name})

    @contextlib.asynccontextmanager
    async def _session(self) -> AsyncIterator[None]:
        """The session that SGLang requires around the loading of tensors."""
        try:
            await self._post("/begin_weight_update", {})
        except EngineError:  # a load that broke off has left its session open
            await self._post("/end_weight_update", {})
            await self._post("/begin_weight_update", {})
        try:
            yield
        finally:
            await self._post("/end_weight_update", {})

    async def _post(self, path: str, body: dict[str, Any]) -> None:
        try:
            await self.client.post(path, body, self._config.update_deadline_s)
        except RefusedError as refusal:
            raise EngineError(str(refusal)) from None


def shared(bucket: Bucket, data: Tensor) -> str:
    """A bucket as SGLang takes it over HTTP: the name of the shared memory that its bytes are moved to.

    The memory must live until the server has taken it. It goes by file name, since a file descriptor would have to be
    fetched from this process, which the server may not do.
    """
    torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    parts = zip(bucket.names, bucket.dtypes, bucket.shapes, bucket.spans(), strict=True)
    metadata = [
        SimpleNamespace(name=name, shape=torch.Size(shape), dtype=dtype, start_idx=b, end_idx=e, numel=e - b)
        for name, dtype, shape, (b, e) in parts
    ]
    pickled = io.BytesIO()
    ForkingPickler(pickled).dump({"flattened_tensor": data, "metadata": metadata})
    return base64.b64encode(pickled.getvalue()).decode()
