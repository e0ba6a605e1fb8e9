"""Checkpoints: copied in memory while training waits, written while it goes on, readable under any layout.

A checkpoint is a Hugging Face model directory with the trainer's state beside it: `optimizer/` (AdamW's moments and
the last gradient, by torch.distributed.checkpoint), `objective.pt`, and `snapshots/` (whole weights by policy version).
"""

import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from agent_rl.objective.gradient_alignment import GradientAlignment
from agent_rl.trainer.model import weights_of
from agent_rl.trainer.ranks import Ranks
from agent_rl.trainer.shards import clone, like, local
from agent_rl.trainer.snapshots import Snapshots
from agent_rl.trainer.weight_file import write_weights

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json",
                    "vocab.json", "merges.txt", "added_tokens.json")  # fmt: skip
_SHAPES = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
           "intermediate_size", "num_experts", "moe_intermediate_size")  # fmt: skip


@dataclass(frozen=True)
class Staged:
    """The content of a checkpoint, in tensors that nothing else changes."""

    weights: dict[str, Tensor]
    snapshots: dict[int, dict[str, Tensor]]
    optimizer: dict[str, Tensor]
    objective: dict[str, Any]


class CheckpointWriter:
    """Writes one checkpoint at a time in a thread, with a process group of its own.

    Every rank calls `begin` and `finish`, in the same order.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._group: dist.ProcessGroup | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def begin(self, directory: Path, staged: Staged, model: Any, source: Path) -> None:
        """Start writing `staged` into `directory`, with config of `model` and tokenizer of `source`."""
        self.finish()
        self._group = self._group or self._ranks.new_group()
        directory.mkdir(parents=True, exist_ok=True)
        if self._ranks.is_first:
            model.config.save_pretrained(directory)
            if model.can_generate():
                model.generation_config.save_pretrained(directory)
            for name in _TOKENIZER_FILES:
                if (source / name).is_file():
                    shutil.copyfile(source / name, directory / name)
            torch.save(staged.objective, directory / "objective.pt")
        self._writing = self._thread.submit(self._write, directory, staged)

    def finish(self) -> None:
        """Wait until what was begun is on disk. Raises what went wrong with it."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write(self, directory: Path, staged: Staged) -> None:
        if self._ranks.is_first:  # nothing of an overwritten checkpoint may stay
            for name in ("optimizer", "snapshots"):
                shutil.rmtree(directory / name, ignore_errors=True)
            (directory / "snapshots").mkdir()
        self._ranks.barrier(self._group)
        for version, weights in sorted(staged.snapshots.items()):
            write_weights(directory / "snapshots" / f"{version}.safetensors", weights, self._ranks, self._group)
        save_distributed(staged.optimizer, checkpoint_id=directory / "optimizer", process_group=self._group)
        write_weights(directory / "model.safetensors", staged.weights, self._ranks, self._group, by_expert=True)


def staged(
    model: Any,
    optimizer: torch.optim.Optimizer,
    alignment: GradientAlignment,
    snapshots: Snapshots,
    objective: dict[str, Any],
) -> Staged:
    """A copy of the weights and of what learns; of a sharded tensor, the shard of this rank."""
    weights = {name: clone(weight) for name, weight in weights_of(model).items()}
    state = {name: clone(value) for name, value in optimizer_state(model, optimizer, alignment).items()}
    return Staged(weights, dict(snapshots.weights), state, objective)  # snapshots never change


def optimizer_state(model: Any, optimizer: torch.optim.Optimizer, alignment: GradientAlignment) -> dict[str, Tensor]:
    """AdamW's moments and step by parameter name, and the last gradient if alignment keeps one.

    Moments that are not there yet are made: zeros at step 0, with which AdamW starts.
    """
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = like(torch.zeros_like(local(parameter.detach())), parameter)
            state["exp_avg_sq"] = like(torch.zeros_like(local(parameter.detach())), parameter)
        found |= {f"{key}.{name}": value for key, value in state.items()}
    if alignment.previous is not None:
        named = zip(model.named_parameters(), alignment.previous, strict=True)
        found |= {f"last_gradient.{name}": like(gradient, parameter) for (name, parameter), gradient in named}
    return found


def load_optimizer(
    directory: Path, model: Any, optimizer: torch.optim.Optimizer, alignment: GradientAlignment, ranks: Ranks
) -> None:
    """Read `optimizer/` of a checkpoint into AdamW and the alignment, whatever layout wrote it."""
    reader = FileSystemReader(directory / "optimizer")
    has_gradient = any(key.startswith("last_gradient.") for key in reader.read_metadata().state_dict_metadata)
    gradients = [torch.zeros_like(local(p.detach())) for p in model.parameters()]
    alignment.previous = gradients if has_gradient else None
    load_distributed(
        optimizer_state(model, optimizer, alignment), storage_reader=reader, process_group=ranks.new_group()
    )


def check_architecture(directory: Path, model: Any) -> None:
    """Raise `ValueError` if a checkpoint is of another architecture than `model`, naming the first difference."""
    from transformers import AutoConfig  # heavy

    if not (directory / "config.json").is_file():
        raise ValueError(f"{directory} is no checkpoint: there is no config.json")
    found = AutoConfig.from_pretrained(directory)
    for key in _SHAPES:
        theirs, own = getattr(found, key, None), getattr(model.config, key, None)
        if theirs != own:
            raise ValueError(
                f"the checkpoint {directory} has {key} {theirs}, but the model of this run has {own}; "
                "resume with the model that it was made with"
            )
