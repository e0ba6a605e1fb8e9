"""The ranks of a trainer as Ray actors, behind one actor that is called as a single trainer is."""

import socket
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from agent_rl.config import RunConfig
from agent_rl.records import Trajectory
from agent_rl.trainer.base import TrainResult
from agent_rl.trainer.worker import RankAddress, TrainWorker

_DEATH_S = 10.0


class TrainGroup:
    """dp x tp `TrainWorker`s, one process each; every call goes to all, and the first one's answer is the answer.

    With reserved places, all of them run in the first, which is the trainer's own.
    """

    def __init__(self, config: RunConfig) -> None:
        num_ranks = config.trainer.layout.num_ranks
        port = _free_port()
        gpus, here = config.ray.trainer_gpus / num_ranks, ray.util.get_current_placement_group()
        worker = ray.remote(TrainWorker).options(
            num_cpus=1,
            num_gpus=gpus,
            scheduling_strategy="DEFAULT" if here is None else PlacementGroupSchedulingStrategy(here, 0),
        )
        addresses = [RankAddress(rank, num_ranks, ray.util.get_node_ip_address(), port) for rank in range(num_ranks)]
        self._workers = [worker.remote(config, address) for address in addresses]

    def train(self, trajectories: list[Trajectory], policy_version: int) -> TrainResult:
        shared = ray.put(trajectories)  # once for all ranks
        result: TrainResult = self._all("train", shared, policy_version)
        return result

    def publish(self, path: str) -> None:
        self._all("publish", path)

    def weights(self, method: str, *arguments: Any) -> Any:
        """As `TrainWorker.weights`, of rank 0, which has what all ranks published."""
        return ray.get(self._workers[0].weights.remote(method, *arguments))

    def begin_save(self, directory: str) -> None:
        self._all("begin_save", directory)

    def finish_save(self, directory: str) -> None:
        self._all("finish_save", directory)

    def load(self, directory: str) -> None:
        self._all("load", directory)

    def is_idle(self) -> bool:
        """Return True once all earlier calls are done."""
        return True

    def dump_stacks_to(self, path: str) -> tuple[str, int]:
        """Let a signal dump the stacks of rank 0; see `agent_rl.stacks`."""
        found: tuple[str, int] = ray.get(self._workers[0].dump_stacks_to.remote(path))
        return found

    def _all(self, method: str, *arguments: Any) -> Any:
        """Rank 0's result, once every rank has its own. Raises the first error of any rank, since the others may wait
        for it in vain; if a rank died, raises that and not the errors that followed on other ranks."""
        calls = [getattr(worker, method).remote(*arguments) for worker in self._workers]
        pending = list(calls)
        while pending:
            done, pending = ray.wait(pending)
            try:
                ray.get(done)
            except RayError:
                _raise_death(calls)
                raise
        return ray.get(calls[0])


def _raise_death(calls: list[Any]) -> None:
    """Raise `RayActorError` if an actor that was called has died; Ray may know it a little later than its peers."""
    for call in ray.wait(calls, num_returns=len(calls), timeout=_DEATH_S)[0]:
        try:
            ray.get(call)
        except RayActorError:
            raise
        except RayError:
            continue


def _free_port() -> int:
    """A port that nothing listens on now, for the ranks to meet at."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
