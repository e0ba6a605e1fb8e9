"""Starts or joins the Ray cluster of a run, and places the trainer and the rollout workers in it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from agent_rl.config import RunConfig

_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


@dataclass(frozen=True)
class Placement:
    """Ray options for a run's actors. Without a placement group, Ray places them anywhere."""

    worker_gpus: float = 0.0
    trainer_gpus: float = 0.0
    """GPUs of the trainer's actor. 0 for a trainer of several ranks, whose actors reserve GPUs themselves."""
    group: Any = None
    first_worker: int = 0
    """Bundle of worker 0. A trainer has the bundle before it."""

    def trainer(self) -> dict[str, Any]:
        """Options for the trainer's actor."""
        return self._options(self.first_worker - 1, self.trainer_gpus)

    def worker(self, place: int) -> dict[str, Any]:
        """Options for the actor of the rollout worker at `place`."""
        return self._options(self.first_worker + place, self.worker_gpus)

    def _options(self, bundle: int, gpus: float) -> dict[str, Any]:
        options: dict[str, Any] = {"num_cpus": 1, "num_gpus": gpus}
        if self.group is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                self.group, placement_group_bundle_index=bundle
            )
        return options


@contextmanager
def cluster(config: RunConfig, with_trainer: bool) -> Iterator[Placement]:
    """Joins the cluster at `ray.address` and reserves places there, or starts Ray on this machine for the run alone."""
    num_actors = _num_workers(config, with_trainer) + with_trainer * _num_trainers(config)
    gpus = Placement(config.ray.worker_gpus, config.ray.trainer_gpus if config.num_trainer_ranks == 1 else 0.0)
    if config.ray.address is None:
        with local_ray(num_actors):
            yield gpus
        return
    with _joined(config.ray.address):
        group = _reserve(config, with_trainer)
        try:
            yield Placement(gpus.worker_gpus, gpus.trainer_gpus, group, int(with_trainer))
        finally:
            remove_placement_group(group)


def _num_trainers(config: RunConfig) -> int:
    """Actors of the trainer: its ranks, and one more in front of several."""
    return config.num_trainer_ranks + (config.num_trainer_ranks > 1)


def _num_workers(config: RunConfig, with_trainer: bool) -> int:
    """Rollout workers, with those of evaluation if there is a trainer."""
    return config.rollout.num_workers + with_trainer * config.eval.workers


def _reserve(config: RunConfig, with_trainer: bool) -> Any:
    """Reserve a place for each actor. Raises `ValueError` if the cluster has no room or the weight channel no reach."""
    workers = [{"CPU": 1.0, "GPU": config.ray.worker_gpus} for _ in range(_num_workers(config, with_trainer))]
    trainer = {"CPU": float(_num_trainers(config)), "GPU": config.ray.trainer_gpus}
    wanted = [trainer] * with_trainer + workers
    bundles = [{name: amount for name, amount in bundle.items() if amount} for bundle in wanted]
    group = placement_group(bundles, strategy=config.ray.placement.upper())
    if not group.wait(timeout_seconds=config.ray.patience_s):
        free = ", ".join(f"{ray.available_resources().get(name, 0):g} {name}" for name in ("CPU", "GPU"))
        remove_placement_group(group)
        raise ValueError(
            f"the Ray cluster has no room for {len(bundles)} actors placed {config.ray.placement} after "
            f"{config.ray.patience_s:g} s; free are {free}; add nodes, lower rollout.num_workers or change "
            "ray.placement"
        )
    hosts = {node["NodeID"]: node["NodeManagerHostname"] for node in ray.nodes()}
    used = {hosts.get(node, node) for node in placement_group_table(group)["bundles_to_node_id"].values()}
    if len(used) > 1 and config.weights.type == "shared_memory":
        remove_placement_group(group)
        raise ValueError(
            f"weights.type shared_memory reaches one machine, but the run is placed on {', '.join(sorted(used))}; "
            "use weights.type distributed or tensor, or {type: disk, directory: …} on a disk that all of them see"
        )
    return group


@contextmanager
def _joined(address: str) -> Iterator[None]:
    if ray.is_initialized():
        yield
        return
    try:
        ray.init(
            address=address,
            log_to_driver=False,
            logging_level="error",
            runtime_env={"env_vars": _ENVIRONMENT},
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"no Ray cluster could be joined at ray.address {address!r} ({reason}); "
            "start one with `ray start --head`, or set ray.address to null"
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def local_ray(num_actors: int) -> Iterator[None]:
    """Starts Ray on this machine, with one CPU slot and one compute thread for each actor, and stops it at the end.

    If Ray already runs in this process, as in a notebook, it is used and not stopped.
    """
    if ray.is_initialized():
        yield
        return
    # The actors are what this process waits for. Ray's own default, 15, leaves them little of a crowded processor.
    os.environ.setdefault("RAY_worker_niceness", "0")
    ray.init(
        address="local",  # not a cluster that RAY_ADDRESS or an earlier `ray start` names
        num_cpus=num_actors,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        runtime_env={"env_vars": _ENVIRONMENT},
    )
    try:
        yield
    finally:
        ray.shutdown()
