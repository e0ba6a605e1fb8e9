"""Objectives: what is maximised, composed from one log-ratio. Pure torch, which is imported on first use."""

from typing import TYPE_CHECKING, Any

from agent_rl.objective.config import ObjectiveConfig

if TYPE_CHECKING:
    from agent_rl.objective.padded import ObjectiveValues, evaluate

__all__ = ["ObjectiveConfig", "ObjectiveValues", "evaluate"]


def __getattr__(name: str) -> Any:
    if name not in ("ObjectiveValues", "evaluate"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from agent_rl.objective import padded

    return getattr(padded, name)
