"""The ranks of a trainer: joining their process group, and what is summed or gathered over them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from agent_rl.objective.quantile import Reduce
from agent_rl.trainer.layout import Layout
from agent_rl.trainer.shards import is_split

Value = TypeVar("Value")


class Ranks:
    """This process among the ranks of a layout, a mesh of axes dp and tp. One process alone needs no group.

    Ranks communicate by NCCL on GPUs, by gloo on CPUs.
    Raises `ValueError` if the processes that were started are not as many as the layout has.
    """

    def __init__(self, layout: Layout, device: torch.device | None = None) -> None:
        device = device or torch.device("cpu")
        self.layout = layout
        self.mesh: DeviceMesh | None = None
        self.dp_rank, self.tp_rank = 0, 0
        if layout.num_ranks > 1:
            _join(layout.num_ranks, device)
            self.mesh = init_device_mesh(device.type, (layout.dp, layout.tp), mesh_dim_names=("dp", "tp"))
            self.dp_rank, self.tp_rank = self.mesh.get_local_rank("dp"), self.mesh.get_local_rank("tp")

    @property
    def is_first(self) -> bool:
        """Whether this rank does the writes that happen once."""
        return self.dp_rank == 0 and self.tp_rank == 0

    @property
    def reduce(self) -> Reduce | None:
        """Sums a tensor over dp, whose ranks have different trajectories; None where there is one."""
        return self._sum_over_dp if self.layout.dp > 1 else None

    @property
    def reduce_shards(self) -> Reduce | None:
        """Sums a tensor over all ranks, which hold different shards; None for one process."""
        return _sum_over_all if self.mesh is not None else None

    def copies(self, tensor: Tensor) -> int:
        """How many ranks hold the same shard of a parameter."""
        return 1 if is_split(tensor, "tp") else self.layout.tp

    def gather(self, value: Value) -> list[Value]:
        """The value of each dp rank, in order and on every rank; any object that can be pickled."""
        if self.mesh is None or self.layout.dp == 1:
            return [value]
        found: list[Any] = [None] * self.layout.dp
        dist.all_gather_object(found, value, group=self.mesh.get_group("dp"))
        return found

    @contextmanager
    def together(self) -> Iterator[None]:
        """Raise on all dp ranks if the block raises `ValueError` on one, so that none waits for the others."""
        problem: ValueError | None = None
        try:
            yield
        except ValueError as error:
            problem = error
        others = [message for message in self.gather(None if problem is None else str(problem)) if message]
        if problem is not None:
            raise problem
        if others:
            raise ValueError(others[0])

    def barrier(self, group: dist.ProcessGroup | None = None) -> None:
        """Wait until every rank is here."""
        if self.mesh is not None:
            dist.barrier(group=group)

    def new_group(self) -> dist.ProcessGroup:
        """Another group of all ranks, for work beside the training; every rank must call it."""
        if self.mesh is not None:
            return _group()
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        return _group([dist.get_rank()])

    def _sum_over_dp(self, tensor: Tensor) -> Tensor:
        assert self.mesh is not None
        total = tensor.clone()
        dist.all_reduce(total, group=self.mesh.get_group("dp"))
        return total


def _group(ranks: list[int] | None = None) -> dist.ProcessGroup:
    made: dist.ProcessGroup = dist.new_group(ranks, backend="gloo", use_local_synchronization=ranks is not None)
    return made


def _sum_over_all(tensor: Tensor) -> Tensor:
    total = tensor.clone()
    dist.all_reduce(total)
    return total


def _join(num_ranks: int, device: torch.device) -> None:
    """Have a process group of so many ranks: the one that is there, or the one that torchrun describes."""
    if not dist.is_initialized():
        if "WORLD_SIZE" not in os.environ:
            raise ValueError(
                f"the layout has {num_ranks} ranks, but this is one process without others; "
                f"start it with torchrun --nproc-per-node {num_ranks}, or set trainer.dp, tp and ep to 1"
            )
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    if (started := dist.get_world_size()) != num_ranks:
        raise ValueError(
            f"the layout has {num_ranks} ranks (trainer.dp x trainer.tp), but {started} processes were started; "
            "make them the same number"
        )
