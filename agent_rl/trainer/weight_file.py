"""Sharded weights to and from a safetensors file: every rank maps the file and copies its own shards, no rank more."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from agent_rl.trainer.ranks import Ranks
from agent_rl.trainer.shards import is_split, like, local, slices
from agent_rl.weights.transfer.names import DTYPES, LENGTH_BYTES, expert_names

_DTYPES = {dtype: name for name, dtype in DTYPES.items()}


def write_weights(
    path: Path,
    weights: Mapping[str, Tensor],
    ranks: Ranks,
    group: dist.ProcessGroup | None = None,
    by_expert: bool = False,
) -> None:
    """Write whole tensors of which each rank has its shard; the file is there whole or not at all.

    All ranks call it and see one file system. `by_expert` names each expert's weights as Hugging Face's files do,
    instead of the fused ones of the model. Raises `OSError` if the disk is full.
    """
    header, places, size = _layout(weights, by_expert)
    temporary = path.with_suffix(".tmp")
    if ranks.is_first:
        _create(temporary, header, size)
    ranks.barrier(group)
    storage = torch.UntypedStorage.from_file(str(temporary), shared=True, nbytes=size)
    for name, tensor in weights.items():
        if ranks.tp_rank == 0 or is_split(tensor, "tp"):
            whole = torch.empty(0, dtype=tensor.dtype)
            whole.set_(storage, places[name] // tensor.element_size(), tensor.shape)  # type: ignore[call-overload]
            whole[slices(tensor)] = local(tensor.detach())
    del storage
    ranks.barrier(group)
    if ranks.is_first:
        temporary.rename(path)
    ranks.barrier(group)


def read_weights(path: Path, layout: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """This rank's shards of the tensors of a file, laid out as those of the same name in `layout`."""
    with safe_open(path, "pt") as file:
        return {name: like(file.get_slice(name)[slices(tensor)], tensor) for name, tensor in layout.items()}


def _layout(weights: Mapping[str, Tensor], by_expert: bool) -> tuple[bytes, dict[str, int], int]:
    """(the file's header, where each tensor begins in the file, bytes in all). Wide types first: all are aligned."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begins: dict[str, int] = {}
    end = 0
    for name, tensor in sorted(weights.items(), key=lambda item: (-item[1].element_size(), item[0])):
        begins[name] = end
        whole = [(name, tuple(tensor.shape))]
        for part, shape in (expert_names(*whole[0]) or whole) if by_expert else whole:
            begin, end = end, end + torch.Size(shape).numel() * tensor.element_size()
            entries[part] = {"dtype": _DTYPES[tensor.dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    first = LENGTH_BYTES + len(text)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text, {n: first + b for n, b in begins.items()}, first + end


def _create(path: Path, header: bytes, size: int) -> None:
    """A file of `size` bytes, all reserved: writing to a mapped hole of a full disk would kill the process."""
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)
        file.write(header)
