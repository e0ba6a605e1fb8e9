"""The shard of a tensor that this rank holds: where it lies in the whole, and how many ranks hold the same."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard


def local(tensor: Tensor) -> Tensor:
    """This rank's shard, without a copy; a tensor that is not sharded, as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def slices(tensor: Tensor) -> tuple[slice, ...]:
    """Where `local(tensor)` lies in the whole, one slice a dimension.

    A rank's chunk is that of `torch.chunk`: all but the last ones are as large as the first.
    """
    found = [slice(0, size) for size in tensor.shape]
    if isinstance(tensor, DTensor):
        coordinate = tensor.device_mesh.get_coordinate()
        assert coordinate is not None, "this rank is outside of the tensor's mesh"
        for axis, placement in enumerate(tensor.placements):
            if isinstance(placement, Shard):
                size, part = tensor.shape[placement.dim], tensor.device_mesh.size(axis)
                assert found[placement.dim] == slice(0, size), "two axes of the mesh shard one dimension"
                chunk = -(-size // part)
                first = min(coordinate[axis] * chunk, size)
                found[placement.dim] = slice(first, min(first + chunk, size))
    return tuple(found)


def is_split(tensor: Tensor, axis: str) -> bool:
    """Whether the ranks along a named axis of the mesh hold different shards."""
    if not isinstance(tensor, DTensor):
        return False
    names = tensor.device_mesh.mesh_dim_names or ()
    return axis in names and isinstance(tensor.placements[names.index(axis)], Shard)


def like(shard: Tensor, whole: Tensor) -> Tensor:
    """A shard of this rank as the tensor that is laid out as `whole` is."""
    if not isinstance(whole, DTensor):
        return shard
    return DTensor.from_local(
        shard, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def map_local(function: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """`function` of this rank's shard, laid out as `tensor` is; it must keep the shape."""
    return like(function(local(tensor.detach())), tensor)


def clone(tensor: Tensor) -> Tensor:
    return map_local(torch.clone, tensor)
