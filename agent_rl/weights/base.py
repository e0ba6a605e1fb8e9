"""How a new policy version travels from the trainer to the engines."""

import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from safetensors import SafetensorError, safe_open
from torch import Tensor

from agent_rl.weights.transfer.group import Seat

Shapes = dict[str, tuple[int, ...]]


class WeightsLostError(Exception):
    """A version that an engine asked for cannot be had any more, as when the trainer that kept it is gone."""


class Weights(Protocol):
    """One version, as an engine is given it. Sent to rollout workers, so it can be pickled."""

    def shapes(self) -> Shapes:
        """Of every tensor, by name. Raises `ValueError` if that cannot be read."""
        ...

    def tensors(self, seat: Seat) -> AsyncIterator[dict[str, Tensor]]:
        """All tensors, some at a time. Where the way they come is cut, they may begin anew, once.

        Raises `WeightsLostError` if they cannot be had.
        """
        ...

    def again(self) -> "Weights":
        """The same version for an engine that asks for it by itself, later on or after a failure."""
        ...


class WeightChannel(Protocol):
    """Keeps versions, from `publish` to `retire`, so that any of them can be served whenever it is due.

    Built as `cls(config, trainer=…, num_workers=…, engine=…)`: the actor handle of the trainer, and how many engines of
    which config there are. What returns a list gives calls to the trainer; what it says holds once they have ended.
    """

    together: bool
    """Whether `for_all` begins to send, so that all engines must be ready for it."""

    def publish(self, policy_version: int) -> list[Any]:
        """Keep the trainer's present weights as this version."""
        ...

    def weights(self, policy_version: int) -> Weights:
        """What an engine is to be given, whenever that is. Raises `WeightsLostError` if the trainer is gone."""
        ...

    def for_all(self, policy_version: int) -> Weights:
        """What all engines are to be given now, together; `weights`, where that makes no difference."""
        ...

    def save(self, policy_version: int, path: Path) -> list[Any]:
        """Write a version that is kept as the safetensors file `path`."""
        ...

    def restore(self, policy_version: int, path: Path) -> list[Any]:
        """Keep what `save` wrote as this version."""
        ...

    def retire(self, policy_version: int) -> None:
        """No engine will be given this version again; unknown versions are ignored."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class WeightFile:
    """A safetensors file, or a model's directory with some, that engines read."""

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

    async def tensors(self, seat: Seat) -> AsyncIterator[dict[str, Tensor]]:
        with safe_open(self.path, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                yield {name: opened.get_tensor(name)}

    def again(self) -> Self:
        return self


class FileChannel:
    """A channel over a folder that trainer and engines both see: a file for each version."""

    together = False

    def __init__(self, folder: Path, trainer: Any) -> None:
        self._folder, self._trainer = folder, trainer

    def _path(self, policy_version: int) -> Path:
        return self._folder / f"{policy_version}.safetensors"

    def publish(self, policy_version: int) -> list[Any]:
        return [self._trainer.publish.remote(str(self._path(policy_version)))]

    def weights(self, policy_version: int) -> WeightFile:
        return WeightFile(self._path(policy_version))

    for_all = weights

    def save(self, policy_version: int, path: Path) -> list[Any]:
        shutil.copyfile(self._path(policy_version), path)
        return []

    def restore(self, policy_version: int, path: Path) -> list[Any]:
        shutil.copyfile(path, self._path(policy_version))
        return []

    def retire(self, policy_version: int) -> None:
        self._path(policy_version).unlink(missing_ok=True)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
