"""What each process of the distributed test does; a file of its own, so that spawned processes can import it."""

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from objective_batches import pack, random_rows

from agent_rl.objective.config import ObjectiveConfig
from agent_rl.objective.loss import Objective
from agent_rl.objective.metrics import step_metrics, turn_rows
from agent_rl.objective.quantile import quantile
from agent_rl.settings import check

TURNS = {"mode": "local", "num_buckets": 3, "min_tokens": 3, "min_responses": 1, "shrinkage": 4.0}
CLIPS = [{}, {"turns": TURNS}, {"scope": "previous_step", "cap": "ema"}]


def rank_main(rank, directory, shards):
    """Three processes over gloo; the group of the first two runs first. Results go to `directory`."""
    torch.set_num_threads(1)
    store = f"file://{directory}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=3, timeout=timedelta(seconds=300))
    for size in (2, 3):
        group = dist.new_group(list(range(size)))
        if rank < size:
            torch.save(work(rank, size, group, shards), Path(directory) / f"{size}_{rank}.pt")
    dist.destroy_process_group()


def work(rank, size, group, shards):
    def reduce(tensor):
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    mine = [[x for i, part in enumerate(case) if i % size == rank for x in part] for case in shards]
    found = {"quantiles": [quantile(torch.tensor(part, dtype=torch.float32), 0.9, reduce) for part in mine]}
    steps = [train_step(build(clip), step_rows(rank, size), reduce) for clip in CLIPS]
    return found | {"steps": steps}


def build(clip):
    return Objective(check(ObjectiveConfig, {"clip": {"type": "sat", **clip}}))


def step_rows(rank, size):
    """Trajectories of a rank; of three ranks the second has none, and the third none with an active token."""
    rows = random_rows(5, 24)
    active, silent = [r for r in rows if r.mask.any()], [r for r in rows if not r.mask.any()]
    assert len(silent) > 0
    assert len(active) > 10
    return {2: [active[:6], active[6:]], 3: [active, [], silent]}[size][rank]


def train_step(objective, rows, reduce):
    """Two steps on the same rows: the sums that all ranks must agree on, and this rank's share of the loss."""
    results = []
    for number in range(2):
        batch, lp = pack(rows, torch.float32)
        step = objective.begin_step([batch], [lp], reduce, number)
        output = objective.loss(lp, batch, step)
        objective.end_step([batch], [lp], step, reduce)
        reference = step.reference if isinstance(step.reference, torch.Tensor) else step.reference.q
        rows_by_turn = turn_rows([batch], [output], step, reduce)
        metrics = step_metrics([batch], [output], reduce, step)
        results.append({"q": reference, "metrics": metrics, "turns": rows_by_turn, "loss": float(output.loss)})
    return results
