"""`type:` in a config names a part; this module finds its class.

The tree is the registry: `type: sat` of kind `clip` is the one class that `agent_rl/objective/clips/sat.py` defines
with a `Config` in its own body. Adding a part is adding a file. A dotted path (`my_package.my_module.MyClip`) names a
class that lives elsewhere.
"""

import difflib
import importlib
import importlib.util
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import BaseModel
from pydantic_core import core_schema

from agent_rl.settings import Settings, check

PACKAGES = {
    "clip": "agent_rl.objective.clips",
    "surrogate": "agent_rl.objective.surrogates",
    "gate": "agent_rl.objective.gates",
    "prompts": "agent_rl.data.sources",
    "engine": "agent_rl.rollout.engines",
    "tool_format": "agent_rl.rollout.tool_formats",
    "tool": "tools",
    "reward": "agent_rl.rewards",
    "shaping": "agent_rl.rewards.shaping",
    "pipeline": "agent_rl.pipeline.regimes",
    "trainer": "agent_rl.trainer.engines",
    "weights": "agent_rl.weights",
}


CONFIG_BASES = {
    "engine": "agent_rl.rollout.engines.base.EngineConfig",
    "trainer": "agent_rl.trainer.base.TrainerConfig",
    "pipeline": "agent_rl.pipeline.regimes.base.RegimeConfig",
    "tool": "pydantic.BaseModel",
}
"""What the `Config` of a part of these kinds derives from; of every other kind, `PartConfig`."""


class PartConfig(Settings):
    """The base of every part's `Config`: `type` plus the part's own keys; unknown keys are errors."""

    type: str
    """Which part: the name of its file, or the dotted path of its class."""

    def check_run(self, run: Any) -> None:
        """Raise `ValueError`, with what to change, if the part cannot serve a run of the config `run` (`RunConfig`)."""


class PartBase:
    """A swappable part: its `Config` declares its keys."""

    Config: ClassVar[type[BaseModel]]
    can_replay_routing: bool = False
    """For an engine, whether it reports routed experts; for a trainer, whether it applies them."""


def names(kind: str) -> list[str]:
    """The built-in names of a kind, found without importing any part."""
    package = importlib.util.find_spec(PACKAGES[kind])
    assert package is not None
    assert package.submodule_search_locations is not None
    modules = pkgutil.iter_modules(list(package.submodule_search_locations))
    return sorted(m.name for m in modules if m.name != "base" and not m.name.startswith("_") and not m.ispkg)


def find(kind: str, name: str) -> type[Any]:
    """The class of part `name`. Raises `ValueError` with the nearest known name if there is none."""
    if "." in name:
        return _from_path(kind, name)
    if name not in names(kind):
        nearest = difflib.get_close_matches(name, names(kind), n=1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"known: {', '.join(names(kind))}."
        raise ValueError(f"unknown {kind} type {name!r}; {hint}")
    module = importlib.import_module(f"{PACKAGES[kind]}.{name}")
    own = [c for c in vars(module).values() if _is_part(c) and c.__module__ == module.__name__]
    assert len(own) == 1, f"{module.__name__} must define exactly one part, found {own}"
    return own[0]  # type: ignore[no-any-return]


@dataclass(frozen=True)
class PartKind:
    """Annotates a config field that holds a part: `clip: Annotated[Any, PartKind("clip")]`.

    The field takes a name, a mapping with `type`, or a `Config`, and holds the part's `Config`.
    """

    kind: str

    def parse(self, value: Any) -> BaseModel:
        if isinstance(value, BaseModel):
            return value
        mapping = {"type": value} if isinstance(value, str) else value
        if not isinstance(mapping, dict) or not isinstance(mapping.get("type"), str):
            raise ValueError(f"must be a mapping with a `type`; known {self.kind} types: {', '.join(names(self.kind))}")
        model: type[BaseModel] = find(self.kind, mapping["type"]).Config
        if not issubclass(model, base := _config_base(self.kind)):
            raise ValueError(f"the Config of {self.kind} {mapping['type']} must derive from {base.__qualname__}")
        return check(model, mapping, f"{self.kind} {mapping['type']}")

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        dump = core_schema.plain_serializer_function_ser_schema(lambda part: part.model_dump(mode="json"))
        return core_schema.no_info_plain_validator_function(self.parse, serialization=dump)


def build(kind: str, config: Any, *args: Any, **dependencies: Any) -> Any:
    """An instance of the part that `config` (a part's `Config`) describes."""
    return find(kind, config.type)(config, *args, **dependencies)


def _config_base(kind: str) -> type[BaseModel]:
    if kind not in CONFIG_BASES:
        return PartConfig
    module, _, name = CONFIG_BASES[kind].rpartition(".")
    found: type[BaseModel] = getattr(importlib.import_module(module), name)
    return found


def part_configs(value: Any) -> Iterator[PartConfig]:
    """The configs of all parts in a config, also of those within a part; tools' are not among them."""
    if isinstance(value, PartConfig):
        yield value
    if isinstance(value, BaseModel):
        value = [getattr(value, name) for name in type(value).model_fields]
    elif isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from part_configs(item)


def _is_part(candidate: object) -> bool:
    """Whether `candidate` is a class with a `Config` in its own body; an inherited one does not count."""
    return isinstance(candidate, type) and "Config" in vars(candidate)


def _from_path(kind: str, path: str) -> type[Any]:
    if not all(name.isidentifier() for name in path.split(".")):
        raise ValueError(f"{kind} type {path!r} is no dotted path; name a class as in my_package.my_module.MyClass")
    module_name, _, class_name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{kind} type {path!r} cannot be imported: {error}") from error
    if not _is_part(found):
        raise ValueError(f"{kind} type {path!r} is not a part: a class with its own `Config` is needed")
    return found  # type: ignore[no-any-return]
