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
"""Messages by error type; Pydantic's own would repeat what was given."""

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
    where, _ = _located(model, problem["loc"])
    if problem["type"] == "extra_forbidden":
        return _unknown_key(model, problem["loc"], where, name)
    if problem["type"] == "missing":
        return f"{where} is missing{f' in {name}' if name else ''}; give it a value"
    message = _KINDS.get(problem["type"], problem["msg"]).removeprefix("Value error, ")
    got = "" if problem["type"] == "value_error" else f", got {problem['input']!r}"
    inner = re.match(r"[\w.]+: ", message)  # a part's own key, checked by itself
    return f"{where}{'.' if inner else ': '}{message}{got}" if where else f"{message}{got}"


def _unknown_key(model: type[BaseModel], location: tuple[Any, ...], where: str, name: str) -> str:
    _, owner = _located(model, location[:-1])
    known = list(owner.model_fields) if owner else []
    nearest = difflib.get_close_matches(str(location[-1]), known, n=1)
    hint = f"did you mean {nearest[0]!r}?" if nearest else f"known: {', '.join(known) or 'none here'}"
    return f"unknown key {where!r}{f' in {name}' if name else ''}; {hint}"


def _located(model: type[BaseModel], location: tuple[Any, ...]) -> tuple[str, type[BaseModel] | None]:
    """The dotted path as the user wrote it, and the config model that it leads to; None if none does.

    Pydantic puts the `type` of a union's member into the path, where the user wrote nothing.
    """
    path: list[str] = []
    models = [model]
    for part in location:
        named = [m for m in models if "type" in m.model_fields and m.model_fields["type"].default == part]
        if len(models) > 1 and named:
            models = named
            continue
        path.append(str(part))
        if isinstance(part, str):
            field = models[0].model_fields.get(part) if models else None
            models = _members(field.annotation) if field else []
    return ".".join(path), models[0] if models else None


def _members(annotation: Any) -> list[type[BaseModel]]:
    """The config models in a field's type, through lists, unions and optional fields."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [member for argument in get_args(annotation) for member in _members(argument)]
