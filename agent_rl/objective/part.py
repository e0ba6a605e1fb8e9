"""The base of clips, surrogates and gates."""

from typing import TYPE_CHECKING, Any

from agent_rl.registry import PartBase

if TYPE_CHECKING:
    from agent_rl.objective.config import ObjectiveConfig


class ObjectivePart(PartBase):
    """A part of an objective."""

    needs: frozenset[str] = frozenset()
    """The optional fields of `TokenBatch` that it reads."""
    needs_turns: bool = False
    """Whether every active token must have a turn id."""

    @classmethod
    def conflict(cls, config: Any, objective: "ObjectiveConfig") -> str | None:
        """Why `config`, this part's own, means nothing within `objective`, and what to do; None if it is sound."""
        return None
