"""Buckets of a safetensors file: consecutive tensors, whose bytes are one contiguous range of the file."""

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agent_rl.weights.transfer.names import DTYPES, LENGTH_BYTES


@dataclass(frozen=True)
class Bucket:
    """Consecutive tensors of a weight file. Their bytes are the `size` bytes from offset `begin` of the file."""

    names: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]
    begin: int
    size: int

    def read(self, path: Path) -> Tensor:
        """The bytes of the bucket, uint8 [size]."""
        data = torch.empty(self.size, dtype=torch.uint8)
        with path.open("rb") as file:
            file.seek(self.begin)
            got = file.readinto(data.numpy().data)
        assert got == self.size, f"{path} is cut short"
        return data

    def spans(self) -> list[tuple[int, int]]:
        """The first byte of each tensor in the bucket, and the byte after its last."""
        ends, end = [], 0
        for dtype, shape in zip(self.dtypes, self.shapes, strict=True):
            begin, end = end, end + prod(shape) * dtype.itemsize
            ends.append((begin, end))
        return ends

    def tensors(self, data: Tensor) -> dict[str, Tensor]:
        """The tensors, as views of `data`: the bytes of the bucket, uint8 [size]."""
        parts = zip(self.names, self.dtypes, self.shapes, self.spans(), strict=True)
        return {name: data[b:e].view(dtype).reshape(shape) for name, dtype, shape, (b, e) in parts}


def head(path: Path) -> bytes:
    """The header of a safetensors file: all bytes before those of the tensors."""
    with path.open("rb") as file:
        length = file.read(LENGTH_BYTES)
        return length + file.read(int.from_bytes(length, "little"))


def plan(path: Path, bucket_bytes: int) -> tuple[Bucket, ...]:
    """The buckets of a weight file, of at most `bucket_bytes` each. A larger tensor is a bucket of its own."""
    text = head(path)
    entries = json.loads(text[LENGTH_BYTES:])
    entries.pop("__metadata__", None)
    runs: list[list[tuple[str, Any]]] = [[]]
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        if runs[-1] and entry["data_offsets"][1] - runs[-1][0][1]["data_offsets"][0] > bucket_bytes:
            runs.append([])
        runs[-1].append((name, entry))
    return tuple(_bucket(run, len(text)) for run in runs if run)


def _bucket(run: list[tuple[str, Any]], first: int) -> Bucket:
    begin, end = run[0][1]["data_offsets"][0], run[-1][1]["data_offsets"][1]
    return Bucket(
        names=tuple(name for name, _ in run),
        dtypes=tuple(DTYPES[entry["dtype"]] for _, entry in run),
        shapes=tuple(tuple(entry["shape"]) for _, entry in run),
        begin=first + begin,
        size=end - begin,
    )
