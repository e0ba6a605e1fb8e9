"""The routers of a mixture of experts: where engine and trainer both find them in a Hugging Face model."""

from typing import Any

ROUTED_MODELS = ("qwen3_moe",)
"""Model types whose routing can be recorded and replayed."""


def routers(model: Any) -> dict[int, Any]:
    """The modules that choose experts, by decoder layer; their output is (logits, weights, experts [T, k]).

    Empty for a dense model; a dense layer of a mixed one is left out.
    """
    if model.config.model_type not in ROUTED_MODELS:
        return {}
    return {index: layer.mlp.gate for index, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "gate")}
