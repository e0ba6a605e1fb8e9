"""The base of every config model, and validation errors as one sentence that says what to do."""

import difflib
import re
from collections.abc import Mapping
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

_KINDS = {
    "int_parsing": "must be an integer",
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "bool_parsing": "must be true or false",
    "list_type": "must be a list",
    "string_type": "must be a text",
}
"""Pydantic's own words for these say what was given twice."""

Model = TypeVar("Model", bound=BaseModel)


class Settings(BaseModel):
    """A frozen config model; unknown keys are errors, field docstrings are the descriptions."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


def check(model: type[Model], mapping: Mapping[str, Any], name: str = "") -> Model:
    """`mapping` as a `model`. Raises `ValueError`, a sentence a problem; `name` is said of unknown keys."""
    try:
        return model.model_validate(mapping)
    except ValidationError as error:
        problems = [_sentence(model, problem, name) for problem in error.errors()]
        raise ValueError("; ".join(problems)) from None


def _sentence(model: type[BaseModel], problem: Any, name: str) -> str:
    where = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return _unknown_key(model, problem["loc"], where, name)
    if problem["type"] == "missing":
        return f"{where} is missing{f' in {name}' if name else ''}; give it a value"
    message = _KINDS.get(problem["type"], problem["msg"]).removeprefix("Value error, ")
    got = "" if problem["type"] == "value_error" else f", got {problem['input']!r}"
    inner = re.match(r"[\w.]+: ", message)  # a part's own key, checked by itself
    return f"{where}{'.' if inner else ': '}{message}{got}" if where else f"{message}{got}"


def _unknown_key(model: type[BaseModel], location: tuple[Any, ...], where: str, name: str) -> str:
    owner = _model_at(model, location[:-1])
    known = list(owner.model_fields) if owner else []
    nearest = difflib.get_close_matches(str(location[-1]), known, n=1)
    hint = f"did you mean {nearest[0]!r}?" if nearest else f"known: {', '.join(known) or 'none here'}"
    return f"unknown key {where!r}{f' in {name}' if name else ''}; {hint}"


def _model_at(model: type[BaseModel], location: tuple[Any, ...]) -> type[BaseModel] | None:
    """The config model that the path `location` leads to, through lists and optional fields; None if none does."""
    found: Any = model
    for part in location:
        if isinstance(part, str):
            field = getattr(found, "model_fields", {}).get(part)
            found = field.annotation if field else None
        while (arguments := get_args(found)) and not hasattr(found, "model_fields"):
            found = next((a for a in arguments if hasattr(a, "model_fields")), arguments[0])
    return found if isinstance(found, type) and issubclass(found, BaseModel) else None
