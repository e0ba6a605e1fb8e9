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
        num_experts = model.get("num_experts") or model.get(
            "num_local_experts"
        )  # either name, by transformers' version
        if self.num_ranks > 1 and model["model_type"] not in SPLIT_MODELS:
            raise ValueError(
                f"trainer.dp, tp and ep divide models of type {', '.join(SPLIT_MODELS)}, this one is a "
                f"{model['model_type']}; set all three to 1"
            )
        if self.ep not in (1, self.tp):
            raise ValueError(f"trainer.ep is {self.ep} and trainer.tp is {self.tp}; set ep to 1 or to the same as tp")
        if self.ep > 1 and not num_experts:
            raise ValueError(f"trainer.ep is {self.ep}, but the model has no experts; set trainer.ep to 1")
        for key in ("num_attention_heads", "num_key_value_heads"):
            _check_divides("trainer.tp", self.tp, key, model[key])
        if not num_experts or model.get("mlp_only_layers") or model.get("decoder_sparse_step", 1) > 1:
            _check_divides("trainer.tp", self.tp, "intermediate_size", model["intermediate_size"])
        if num_experts:
            _check_divides("trainer.ep", self.ep, "number of experts", num_experts)
            _check_divides("trainer.dp", self.dp, "moe_intermediate_size", model["moe_intermediate_size"])
        _check_divides("trainer.dp", self.dp, "hidden_size", model["hidden_size"])

    def check_episodes(self, num_episodes: int) -> None:
        """Raise `ValueError` unless a step of so many episodes has some for every rank."""
        if num_episodes < self.dp:
            raise ValueError(
                f"trainer.dp is {self.dp}, but a step has only {num_episodes} episodes for these ranks; raise "
                "batch.num_prompts or lower trainer.dp"
            )


def _check_divides(name: str, size: int, key: str, value: int) -> None:
    if value % size:
        raise ValueError(f"{name} is {size}, but the model's {key} is {value}; choose a divisor of that")
