"""A cluster of two raylets on this machine: the run joins it, one of them is killed, and the run goes on."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from agent_rl.pipeline.run_directory import read_metrics
from agent_rl.run import train
from tests.configs import quickstart

STORE = 100 << 20
START_S = 300
"""How long a node may take to join."""
SMALL = ("batch.num_prompts=2", "batch.group_size=2", "eval.every=0", "checkpoint.every=1", "num_steps=4")


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Cluster]:
    # A node that is killed refuses each check at once; one that is slow has a minute to answer.
    quickly = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_timeout_ms": 60_000}
    head = {"num_cpus": 2, "object_store_memory": STORE, "include_dashboard": False, "_system_config": quickly}
    found = Cluster(initialize_head=True, head_node_args=head | {"wait": False})
    found.wait_for_nodes(timeout=START_S)  # the head first: what joins the cluster is to be at this node
    found.add_node(wait=False, num_cpus=1, object_store_memory=STORE)
    found.wait_for_nodes(timeout=START_S)
    yield found
    found.shutdown()


def test_a_cluster_without_room_is_said(two_nodes: Cluster, tmp_path: Path) -> None:
    address = f"ray.address={two_nodes.address}"
    crowded = quickstart(*SMALL, address, "rollout.num_workers=2", "ray.placement=strict_pack", "ray.patience_s=1")
    with pytest.raises(ValueError, match=r"has no room for 3 actors placed strict_pack after 1 s; free are 3 CPU"):
        train(crowded, tmp_path / "crowded", False, lambda row: None)


def test_a_node_that_is_killed_costs_no_step(two_nodes: Cluster, tmp_path: Path) -> None:
    config = quickstart(*SMALL, f"ray.address={two_nodes.address}", "ray.placement=spread")
    nodes: set[str] = set()

    def kill_after_the_first(row: dict[str, Any]) -> None:
        if row["step"] == 0:
            nodes.update(node["NodeID"] for node in ray.nodes() if node["Alive"])
            other = next(node for node in two_nodes.list_all_nodes() if not node.head)
            threading.Thread(target=two_nodes.remove_node, args=(other, False)).start()

    assert train(config, tmp_path, False, kill_after_the_first).complete
    assert len(nodes) == 2
    assert [row["step"] for row in read_metrics(tmp_path) if row["wall_s"] is not None] == [0, 1, 2, 3]
    last = read_metrics(tmp_path)[-1]
    assert last["groups/issued"] == last["groups/trained"] + last["groups/dropped"] + last["groups/in_flight"]


def test_the_ranks_of_a_trainer_stand_in_its_own_place(two_nodes: Cluster, tmp_path: Path) -> None:
    """Of the rollout workers' places none is taken: they would wait for ever."""
    two_nodes.add_node(wait=False, num_cpus=3, object_store_memory=STORE)
    two_nodes.wait_for_nodes(timeout=START_S)
    config = quickstart(*SMALL, f"ray.address={two_nodes.address}", "trainer.dp=2", "num_steps=1")
    assert train(config, tmp_path, False, lambda row: None).complete
