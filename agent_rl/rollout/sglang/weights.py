"""New weights as SGLang reads them: a model directory, checked first, since SGLang itself takes more than it should."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from agent_rl.weights.base import Shapes, Weights

_TIED = {"lm_head.weight"}
_WEIGHT_FILES = (".safetensors", ".bin", ".pt")


def check_shapes(weights: Shapes, model: Shapes, source: Weights | Path) -> None:
    """Raises `ValueError` unless the weights are all of the model's. SGLang would broadcast, or keep the old ones.

    A tied output matrix may be in the one and not in the other.
    """
    problems = [f"{name} is missing" for name in model.keys() - weights.keys() - _TIED]
    problems += [f"{name} is unknown to it" for name in weights.keys() - model.keys() - _TIED]
    problems += [
        f"{name} is {shape}, not {model[name]}" for name, shape in weights.items() if model.get(name, shape) != shape
    ]
    if problems:
        raise ValueError(f"{source} does not hold the weights of this model: {sorted(problems)[0]}")


@contextlib.contextmanager
def as_directory(weights: Path, model_path: Path, parent: Path) -> Iterator[Path]:
    """A file of weights as a model directory: links to it and to all of the model that is no weights."""
    if weights.is_dir():
        yield weights
        return
    folder = Path(tempfile.mkdtemp(prefix=f"{weights.stem}-", dir=parent))
    for file in model_path.iterdir():
        if file.suffix not in _WEIGHT_FILES and not file.name.endswith(".index.json"):
            (folder / file.name).symlink_to(file.resolve())
    (folder / "model.safetensors").symlink_to(weights.absolute())
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
