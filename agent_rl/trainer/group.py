"""A trainer of several processes, behind one Ray actor with the methods of a `TrainWorker`."""

from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from agent_rl.config import RunConfig
from agent_rl.ports import free_port
from agent_rl.records import Trajectory
from agent_rl.trainer.base import TrainResult
from agent_rl.trainer.worker import RankAddress, TrainWorker

_DEATH_S = 10.0


class TrainGroup:
    """dp x tp `TrainWorker`s, one process each. A call goes to all ranks, and the result of rank 0 is returned.

    In a placement group, all ranks are in bundle 0, which is reserved for the trainer.
    """

    def __init__(self, config: RunConfig) -> None:
        num_ranks = config.trainer.layout.num_ranks
        port = free_port()
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

    def call_version_store(self, method: str, *arguments: Any) -> Any:
        """See `TrainWorker.call_version_store`. Rank 0 has the files that all ranks have published."""
        return ray.get(self._workers[0].call_version_store.remote(method, *arguments))

    def begin_save(self, directory: str) -> None:
        self._all("begin_save", directory)

    def finish_save(self, directory: str) -> None:
        self._all("finish_save", directory)

    def load(self, directory: str) -> None:
        self._all("load", directory)

    def ping(self) -> bool:
        """Returns True once all earlier calls are done, since the actor runs its calls in order."""
        return True

    def dump_stacks_to(self, path: str) -> tuple[str, int]:
        """Write the stacks of rank 0 to `path` on a signal; see `agent_rl.stacks`. Returns host name and process id."""
        found: tuple[str, int] = ray.get(self._workers[0].dump_stacks_to.remote(path))
        return found

    def _all(self, method: str, *arguments: Any) -> Any:
        """Call a method of every rank; returns the result of rank 0 once all have one.

        Raises the first error of any rank at once, since the other ranks may wait for that rank forever. The death of
        a rank is raised as `RayActorError`, instead of the errors that it causes in the others.
        """
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
    """Raise `RayActorError` if a called actor has died. Waits a little: its peers may notice before Ray does."""
    for call in ray.wait(calls, num_returns=len(calls), timeout=_DEATH_S)[0]:
        try:
            ray.get(call)
        except RayActorError:
            raise
        except RayError:
            continue
