"""The base of the channels whose versions the trainer keeps, in its `VersionStore`."""

import shutil
from typing import Any

import ray
from ray.exceptions import RayError

from agent_rl.weights.base import WeightsLostError
from agent_rl.weights.transfer.version_store import CLOSE_S


class KeptByTrainer:
    """Calls the `VersionStore` of `trainer`, an actor handle, and knows where it has the files of the versions."""

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._folder = trainer, ""

    def _call_store(self, method: str, *arguments: Any) -> Any:
        """Start a call of a method of the `VersionStore`; returns its Ray reference."""
        return self._trainer.call_version_store.remote(method, *arguments)

    def _path(self, step: int) -> str:
        self._folder = self._folder or result_of(self._call_store("folder"))
        return f"{self._folder}/{step}.safetensors"

    def close(self) -> None:
        """Free the memory. If the trainer does not answer and is on another machine, the next trainer there does."""
        ray.wait([self._call_store("close")], timeout=CLOSE_S)
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)


def result_of(ref: Any) -> Any:
    """The result of a call to the trainer. Raises `WeightsLostError` if the call failed or the trainer died."""
    try:
        return ray.get(ref)
    except RayError as error:
        raise WeightsLostError(f"the trainer gives no weights: {error}") from None
