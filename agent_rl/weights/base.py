"""What a weight channel is: it carries weights from the trainer to the engines. The channel over files is here."""

import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from safetensors import SafetensorError, safe_open
from torch import Tensor

from agent_rl.weights.transfer.group import GroupMembership

Shapes = dict[str, tuple[int, ...]]


class WeightsLostError(Exception):
    """The requested weights no longer exist, for example because the trainer that kept them died."""


class Weights(Protocol):
    """A handle to the weights of one step, from which an engine loads them.

    It is sent to rollout workers, so it can be pickled.
    """

    def shapes(self) -> Shapes:
        """The shape of every tensor, by name. Raises `ValueError` if the weights cannot be read."""
        ...

    def tensors(self, membership: GroupMembership) -> AsyncIterator[dict[str, Tensor]]:
        """Iterate over all tensors, a few at a time. `membership`: the calling engine's place in the process group.

        If the broadcast breaks, iteration restarts from the first tensor, once. Raises `WeightsLostError` if the
        weights no longer exist.
        """
        ...

    def again(self) -> "Weights":
        """A handle to the same weights that one engine can load alone, later or after a failure."""
        ...


class WeightChannel(Protocol):
    """Keeps the weights of every step from `publish` to `retire`, so that engines can load any of them in between.

    `step`: rollout batches trained before the weights were published. The channel uses it as a key only; the policy
    version that engines stamp on tokens is not known here.

    Built as `cls(config, trainer=…, num_workers=…, engine=…)`. `trainer`: its Ray actor handle. `num_workers`: how many
    engines there are. `engine`: their config. Methods that return a list return Ray calls to the trainer. Await them
    before relying on the effect.
    """

    together: bool
    """Whether `for_all` starts a broadcast, so that all engines must be ready before it is called."""

    def publish(self, step: int) -> list[Any]:
        """Keep the trainer's current weights as those of `step`."""
        ...

    def weights(self, step: int) -> Weights:
        """The weights of `step`, for an engine to load at any time. Raises `WeightsLostError` if the trainer died."""
        ...

    def for_all(self, step: int) -> Weights:
        """The weights of `step`, for all engines to load now, together. Equals `weights` unless `together`."""
        ...

    def save(self, step: int, path: Path) -> list[Any]:
        """Write the kept weights of `step` to the safetensors file `path`."""
        ...

    def restore(self, step: int, path: Path) -> list[Any]:
        """Keep the weights in `path`, which `save` wrote, as those of `step`."""
        ...

    def retire(self, step: int) -> None:
        """Delete the weights of `step`: no engine will load them again. Unknown steps are ignored."""
        ...

    def close(self) -> None:
        """Delete all weights that are kept."""
        ...


@dataclass(frozen=True)
class WeightFile:
    """Weights that engines read from a safetensors file, or from all such files in a model's directory."""

    path: Path

    def __str__(self) -> str:
        return f"weights file {str(self.path)!r}"

    def shapes(self) -> Shapes:
        found: Shapes = {}
        for file in sorted(self.path.glob("*.safetensors")) if self.path.is_dir() else [self.path]:
            try:
                with safe_open(file, "pt") as opened:
                    found |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
            except (OSError, SafetensorError) as error:
                raise ValueError(f"{file} is no safetensors file ({error})") from None
        return found

    async def tensors(self, membership: GroupMembership) -> AsyncIterator[dict[str, Tensor]]:
        with safe_open(self.path, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                yield {name: opened.get_tensor(name)}

    def again(self) -> Self:
        return self


class FileChannel:
    """A channel over a folder that trainer and engines share: one file for each step. `close` removes the folder."""

    together = False

    def __init__(self, folder: Path, trainer: Any) -> None:
        self._folder, self._trainer = folder, trainer

    def _path(self, step: int) -> Path:
        return self._folder / f"{step}.safetensors"

    def publish(self, step: int) -> list[Any]:
        return [self._trainer.publish.remote(str(self._path(step)))]

    def weights(self, step: int) -> WeightFile:
        return WeightFile(self._path(step))

    for_all = weights

    def save(self, step: int, path: Path) -> list[Any]:
        shutil.copyfile(self._path(step), path)
        return []

    def restore(self, step: int, path: Path) -> list[Any]:
        shutil.copyfile(path, self._path(step))
        return []

    def retire(self, step: int) -> None:
        self._path(step).unlink(missing_ok=True)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
