"""Random models on disk, made once."""

from collections.abc import Callable

import pytest
import torch
from safetensors.torch import save_file

from tests.rollout.random_models import MODELS


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The directory of a random model of that name, with `other.safetensors` for it beside the weights."""
    root = tmp_path_factory.mktemp("models")

    def path_of(name: str) -> str:
        directory = root / name
        if not directory.exists():
            torch.manual_seed(0)
            model = MODELS[name]()
            for norm in (p for n, p in model.named_parameters() if "norm" in n):
                norm.data.uniform_(0.5, 1.5)
            model.save_pretrained(directory)
            shared = {p.data_ptr(): n for n, p in reversed(list(model.named_parameters()))}
            other = {
                n: model.get_parameter(n) * 0.9 + 0.05 * torch.randn_like(model.get_parameter(n))
                for n in shared.values()
            }
            save_file({n: p.detach().contiguous() for n, p in other.items()}, directory / "other.safetensors")
        return str(directory)

    return path_of
