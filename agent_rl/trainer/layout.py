"""How many ranks a trainer has and what each dimension of them divides."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SPLIT_MODELS = ("qwen3", "qwen3_moe")
"""Model types that tensor and expert parallelism know."""


@dataclass(frozen=True)
class Layout:
    """dp x tp ranks. `ep`: over how many of the tp ranks the experts of a layer are spread."""

    dp: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def num_ranks(self) -> int:
        return self.dp * self.tp

    def check(self, model: Mapping[str, Any]) -> None:
        """Raise `ValueError` unless a model with this config.json can be laid out so."""
        if self.num_ranks > 1 and model["model_type"] not in SPLIT_MODELS:
            raise ValueError(
                f"trainer.dp, tp and ep divide models of type {', '.join(SPLIT_MODELS)}, this one is a "
                f"{model['model_type']}; set all three to 1"
            )
        if self.ep not in (1, self.tp):
            raise ValueError(f"trainer.ep is {self.ep} and trainer.tp is {self.tp}; set ep to 1 or to the same as tp")
        if self.ep > 1 and not model.get("num_experts"):
            raise ValueError(f"trainer.ep is {self.ep}, but the model has no experts; set trainer.ep to 1")
        for key, size in (("num_attention_heads", self.tp), ("num_key_value_heads", self.tp)):
            _check_divides("trainer.tp", size, key, model)
        if _has_dense_layers(model):
            _check_divides("trainer.tp", self.tp, "intermediate_size", model)
        if model.get("num_experts"):
            _check_divides("trainer.ep", self.ep, "num_experts", model)
            _check_divides("trainer.dp", self.dp, "moe_intermediate_size", model)
        _check_divides("trainer.dp", self.dp, "hidden_size", model)


def _has_dense_layers(model: Mapping[str, Any]) -> bool:
    return not model.get("num_experts") or bool(model.get("mlp_only_layers")) or model.get("decoder_sparse_step", 1) > 1


def _check_divides(name: str, size: int, key: str, model: Mapping[str, Any]) -> None:
    if size > 1 and model[key] % size:
        raise ValueError(f"{name} is {size}, but the model's {key} is {model[key]}; choose a divisor of that")
