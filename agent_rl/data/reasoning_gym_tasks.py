"""reasoning-gym's generators, shared by the source and the reward: found by name, refused if grading is unsafe."""

import difflib
import json
from functools import lru_cache
from typing import Any

_EVALUATES = "evaluates the answer as code, which is unsafe on what a policy wrote"
REFUSED = {
    "binary_matrix": _EVALUATES,
    "countdown": _EVALUATES,
    "intermediate_integration": _EVALUATES,
    "n_queens": _EVALUATES,
    "polynomial_multiplication": _EVALUATES,
    "puzzle24": _EVALUATES,
    "simple_integration": _EVALUATES,
    "spiral_matrix": _EVALUATES,
    "string_insertion": _EVALUATES,
    "coin_flip": "can be made to compute for ever by an answer such as 1e999999999",
    "complex_arithmetic": "accepts nan for any answer",
    "game_of_life_halting": "accepts every answer",
    "list_functions": "judges entries that differ from one drawing to the next",
}
"""Refused tasks, with what is wrong with their verifiers as of reasoning-gym 0.1.25."""


def dataset(name: str, params: dict[str, Any]) -> Any:
    """The generator `name` with its own `params`, the same in every process.

    Raises `ValueError` for an unknown task or parameter, and for a task whose verifier cannot be trusted.
    """
    return _cached(name, json.dumps(params, sort_keys=True))


def entry(name: str, params: dict[str, Any], number: int) -> dict[str, Any]:
    """Entry `number` >= 0: its question, answer and metadata. Numbers wrap if the generator keeps a list."""
    generator = dataset(name, params)
    try:
        found: dict[str, Any] = generator[number]
    except IndexError:
        found = generator[number % len(generator)]
    return found


@lru_cache(maxsize=256)
def _cached(name: str, params: str) -> Any:
    import reasoning_gym  # heavy
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        nearest = difflib.get_close_matches(name, DATASETS, n=1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else "see reasoning_gym.factory.DATASETS for the names"
        raise ValueError(f"reasoning-gym has no task {name!r}; {hint}")
    if name in REFUSED:
        raise ValueError(f"reasoning-gym's verifier of {name!r} {REFUSED[name]}; choose another task")
    try:
        return reasoning_gym.create_dataset(name, **{"seed": 0, **json.loads(params)})
    except (TypeError, AssertionError, ValueError) as error:
        raise ValueError(f"reasoning-gym task {name!r} refuses its params: {error}") from None
