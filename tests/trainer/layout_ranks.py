"""What each process of the tests of layouts does; a file of its own, so that spawned processes can import it."""

import multiprocessing
import multiprocessing.connection
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from agent_rl.objective.config import ObjectiveConfig
from agent_rl.records import Trajectory
from agent_rl.settings import check
from agent_rl.trainer.checkpoint import optimizer_state
from agent_rl.trainer.engines.torch import TorchEngine
from tests.mixtures import EXPERTS
from tests.trajectories import VOCABULARY, random_trajectory

NUM_STEPS = 3
Layout = tuple[int, int, int]
OBJECTIVE = {"clip": {"type": "sat", "scope": "step"}, "kl": {"coefficient": 0.02}}


def save_dense(directory: Path) -> str:
    """A random Qwen3 with tied embeddings and a vocabulary that two ranks cannot share evenly."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return str(directory)


def trajectories(step: int, routed: bool) -> list[Trajectory]:
    """Nine, so that ranks have unequal shares; the first samples nothing."""
    rng = np.random.default_rng(step)
    keys: dict[str, Any] = {"top_p": 0.9, "experts": EXPERTS if routed else None}
    return [random_trajectory(rng, i, 3, turns=i % 4, version=max(step - 1, 0), **keys) for i in range(9)]


def engine(layout: Layout, path: str, **keys: Any) -> TorchEngine:
    dp, tp, ep = layout
    settings = {"learning_rate": 1e-2, "eps": 1e-3, "max_grad_norm": 0.5, "max_tokens_per_microbatch": 64, **keys}
    config = TorchEngine.Config(dp=dp, tp=tp, ep=ep, **settings)
    return TorchEngine(config, path, check(ObjectiveConfig, OBJECTIVE))


def whole(tensor: Tensor) -> Tensor:
    """All of a sharded tensor, on every rank."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def weights(trainer: TorchEngine) -> dict[str, Tensor]:
    return {name: whole(p) for name, p in trainer.model.named_parameters()}


def gradients(trainer: TorchEngine) -> dict[str, Tensor]:
    return {name: whole(p.grad) for name, p in trainer.model.named_parameters()}


def everything(trainer: TorchEngine) -> dict[str, Tensor]:
    """Weights, AdamW's moments, the last gradient and the snapshots, whole."""
    found = {f"weights.{name}": value for name, value in weights(trainer).items()}
    state = optimizer_state(trainer.model, trainer.optimizer, trainer.alignment)
    found |= {name.replace("last_gradient", "last"): whole(value) for name, value in state.items()}
    for version, kept in trainer.snapshots.weights.items():
        found |= {f"snapshot.{version}.{name}": whole(value) for name, value in kept.items()}
    return found


def three_steps(layout: Layout, path: str) -> dict[str, Any]:
    """Three steps of the real loss: what came out of each, with gradients and weights after it."""
    routed = "mixture" in path
    trainer = engine(layout, path, max_cosine=0.1, proximal={"every": 1}, load_balancing=0.01)
    found: dict[str, Any] = {"results": [], "gradients": [], "weights": []}
    for step in range(NUM_STEPS):
        found["results"].append(trainer.train(trajectories(step, routed), step))
        found["gradients"].append(gradients(trainer))
        found["weights"].append(weights(trainer))
    found["logprobs"] = trainer.logprobs(trajectories(9, routed))
    return found


def in_layout(rank: int, directory: Path, name: str, layout: Layout, task: Callable[[], Any]) -> None:
    """Run `task` on the first dp x tp processes, as a group of that size; rank 0 writes what it returns."""
    size = layout[0] * layout[1]
    if rank >= size:
        return
    store = f"file://{directory}/{name}.store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=300))
    try:
        found = task()
        if rank == 0:
            torch.save(found, directory / f"{name}.pt")
    finally:
        dist.destroy_process_group()


def spawn(main: Callable[..., None], *args: Any, num_ranks: int = 4) -> None:
    """Run `main(rank, *args)` in `num_ranks` processes that share one import of torch and transformers."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.trainer.layout_ranks"])
    processes = [context.Process(target=main, args=(rank, *args)) for rank in range(num_ranks)]
    for process in processes:
        process.start()
    while any(process.is_alive() for process in processes) and not any(process.exitcode for process in processes):
        multiprocessing.connection.wait([process.sentinel for process in processes if process.is_alive()])
    for process in processes:
        if process.exitcode is None:
            process.terminate()  # the others wait for the one that failed
        process.join()
    assert [process.exitcode for process in processes] == [0] * num_ranks


def layouts_main(rank: int, directory: Path, cases: dict[str, tuple[Layout, str]]) -> None:
    torch.set_num_threads(1)
    for name, (layout, path) in cases.items():
        in_layout(rank, directory, name, layout, lambda layout=layout, path=path: three_steps(layout, path))


def chain_main(rank: int, directory: Path, path: str) -> None:
    torch.set_num_threads(1)
    routed = "mixture" in path
    keys: dict[str, Any] = {"max_cosine": 0.1, "proximal": {"every": 1}}

    def write() -> dict[str, Any]:
        trainer = engine((2, 1, 1), path, **keys)
        for step in range(2):
            trainer.train(trajectories(step, routed), step)
        saved = everything(trainer)
        trainer.save(directory / "a")
        trainer.publish(directory / "published.safetensors")
        metrics = trainer.train(trajectories(2, routed), 2).metrics
        return {"saved": saved, "loss": metrics["loss"], "cosine": metrics["gradient_cosine"]}

    def read_and_write() -> dict[str, Any]:
        trainer = engine((1, 2, 2 if routed else 1), path, **keys)
        trainer.load(directory / "a")
        trainer.save(directory / "b")
        return {"loaded": everything(trainer)}

    in_layout(rank, directory, "2x1", (2, 1, 1), write)
    in_layout(rank, directory, "1x2", (1, 2, 1), read_and_write)
