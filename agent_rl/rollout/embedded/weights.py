"""Loading a new policy version into a model in place."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor


def load_weights(model: Any, path: str) -> None:
    """Copy the safetensors file `path`, with the model's own parameter names, into `model`.

    A tied weight may appear under either of its names. Raises `ValueError` before anything is copied if
    the file cannot be read or its names or shapes are not the model's.
    """
    if not Path(path).is_file():
        raise ValueError(f"weights file {path!r} does not exist")
    own: dict[str, Tensor] = model.state_dict()
    try:
        with safe_open(path, framework="pt") as file, torch.no_grad():
            _check(own, {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}, path)  # noqa: SIM118
            for name in file.keys():  # noqa: SIM118
                own[name].copy_(file.get_tensor(name))
    except SafetensorError as error:
        raise ValueError(f"weights file {path!r} is not a readable safetensors file: {error}") from error


def _check(own: dict[str, Tensor], found: dict[str, tuple[int, ...]], path: str) -> None:
    covered = {own[name].data_ptr() for name in found if name in own}
    missing = sorted(name for name in own if name not in found and own[name].data_ptr() not in covered)
    unknown = sorted(set(found) - set(own))
    if missing or unknown:
        raise ValueError(f"weights file {path!r} is of another model: missing {missing[:3]}, unknown {unknown[:3]}")
    wrong = [name for name, shape in found.items() if shape != tuple(own[name].shape)]
    if wrong:
        expected = tuple(own[wrong[0]].shape)
        raise ValueError(f"weights file {path!r} has {wrong[0]} as {found[wrong[0]]}, the model has {expected}")
