"""The base of every config model, and validation errors as one sentence that says what to do."""

import difflib
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

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
    message = problem["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    got = "" if problem["type"] == "value_error" else f", got {problem['input']!r}"
    return f"{where}: {message}{got}" if where else f"{message}{got}"


def _unknown_key(model: type[BaseModel], location: tuple[Any, ...], where: str, name: str) -> str:
    known = list(_model_at(model, location[:-1]).model_fields)
    nearest = difflib.get_close_matches(str(location[-1]), known, n=1)
    hint = f"did you mean {nearest[0]!r}?" if nearest else f"known: {', '.join(known)}"
    return f"unknown key {where!r}{f' in {name}' if name else ''}; {hint}"


def _model_at(model: type[BaseModel], location: tuple[Any, ...]) -> type[BaseModel]:
    """The config model that the path `location` leads to; part configs are checked by themselves."""
    for part in location:
        annotation = model.model_fields[part].annotation
        assert isinstance(annotation, type)
        model = annotation
    return model
