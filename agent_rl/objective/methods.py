"""Methods by name: each file of configs/methods is a whole objective, laid over the config of a run."""

import difflib
from importlib import resources
from typing import Any

import yaml

from agent_rl.objective.config import ObjectiveConfig
from agent_rl.objective.errors import ObjectiveError
from agent_rl.settings import check

_FILES = resources.files("agent_rl") / "assets" / "methods"
"""Inside the package, so that an installed one has them; configs/methods links here."""

IDENTITY = ("ratio", "clip", "surrogate", "gates", "aggregate", "sequence_length", "advantage")
"""The keys of `objective` that belong to the method: nothing of the run's own remains in them."""


def method_names() -> list[str]:
    """The names that `overlay` knows."""
    return sorted(file.name.removesuffix(".yaml") for file in _FILES.iterdir() if file.name.endswith(".yaml"))


def overlay(name: str) -> dict[str, Any]:
    """The partial run config of a method: `objective`, and `routing_replay` if it has it.

    Raises `ObjectiveError` (bad_method) with the nearest name if there is none.
    """
    known = method_names()
    if name not in known:
        nearest = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"known: {', '.join(known)}"
        raise ObjectiveError("bad_method", f"unknown method {name!r}; {hint}")
    found: dict[str, Any] = yaml.safe_load((_FILES / f"{name}.yaml").read_text())
    return found


def replays_routing(name: str) -> bool:
    """Whether a method includes routing replay (R3)."""
    return bool(overlay(name).get("routing_replay", False))


def method(name: str) -> ObjectiveConfig:
    """The objective of a method, with every other key at its default."""
    return check(ObjectiveConfig, overlay(name)["objective"], f"method {name}")


def lay_over(run: dict[str, Any], name: str) -> dict[str, Any]:
    """The mapping of a run's config with its objective replaced by a method's; `kl` and the like stay the run's.

    Routing replay belongs to the method too: it is on for those that say so, and off for the others.
    """
    kept = {key: value for key, value in (run.get("objective") or {}).items() if key not in IDENTITY}
    return {**run, "routing_replay": replays_routing(name), "objective": kept | overlay(name)["objective"]}
