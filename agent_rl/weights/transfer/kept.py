"""What channels share whose versions are kept by the trainer, in its `Keeper`."""

import shutil
from typing import Any

import ray
from ray.exceptions import RayError

from agent_rl.weights.base import WeightsLostError
from agent_rl.weights.transfer.keeper import CLOSE_S


class KeptByTrainer:
    """Calls to the keeper in the trainer whose actor handle is `trainer`, and where it has the versions' files."""

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._folder = trainer, ""

    def _keeper(self, method: str, *arguments: Any) -> Any:
        """A call, begun."""
        return self._trainer.weights.remote(method, *arguments)

    def _path(self, policy_version: int) -> str:
        self._folder = self._folder or answer(self._keeper("folder"))
        return f"{self._folder}/{policy_version}.safetensors"

    def close(self) -> None:
        """Free the memory; of a trainer elsewhere that does not answer, its machine's next trainer does."""
        ray.wait([self._keeper("close")], timeout=CLOSE_S)
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)


def answer(ref: Any) -> Any:
    """What a call to the trainer returns. Raises `WeightsLostError` if it cannot."""
    try:
        return ray.get(ref)
    except RayError as error:
        raise WeightsLostError(f"the trainer gives no weights: {error}") from None
