"""A sweep file and its cells: one run for each variant and seed."""

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import Field, model_validator

from agent_rl.config import RunConfig, load, read_yaml
from agent_rl.settings import Settings, check

_SCHEDULE = "objective.clip.schedule"


class ArmConfig(Settings):
    """One arm of a comparison: the base config with a method and a few keys changed."""

    method: str | None = None
    """Objective to use: a name from configs/methods; null keeps the base's."""
    set: dict[str, Any] = Field(default_factory=dict)
    """Dotted keys and their values, laid over the base and the sweep's own `set`."""
    schedule_of: str | None = None
    """For `clip: matched`: take the radii of this arm's run with the next seed, step by step."""


class SweepConfig(Settings):
    """The keys of a file in configs/sweeps."""

    base: Path
    """The run config that every cell starts from; relative to the sweep file."""
    set: dict[str, Any] = Field(default_factory=dict)
    """Dotted keys and their values, the same in every cell."""
    seeds: list[int] = Field(min_length=1)
    """Each variant runs once with each of these."""
    arms: dict[str, ArmConfig] = Field(default_factory=lambda: {"base": ArmConfig()}, min_length=1)
    """Variants by name."""
    grid: dict[str, list[Any]] = Field(default_factory=dict)
    """Dotted keys and lists of values: every arm runs at every combination."""
    baseline: str | None = None
    """The variant that others are compared with, seed by seed: an arm (at the same place of the grid) or, where there
    is one arm only, a place of the grid such as `exact_lag=0`."""

    @model_validator(mode="after")
    def _names(self) -> Self:
        for name, arm in self.arms.items():
            if "/" in name or not name.strip():
                raise ValueError(f"the arm {name!r} names a folder; use letters, digits, - and _")
            if arm.schedule_of is not None and arm.schedule_of not in self.arms:
                raise ValueError(f"{name} takes the schedule of {arm.schedule_of!r}, which is no arm of this sweep")
            if arm.schedule_of is not None and self.arms[arm.schedule_of].schedule_of is not None:
                raise ValueError(
                    f"{name} takes the schedule of {arm.schedule_of!r}, which takes one itself; name a SAT arm"
                )
            if arm.schedule_of is not None and len(self.seeds) < 2:
                raise ValueError(f"{name} takes the schedule of a run with another seed; give at least two seeds")
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds has {self.seeds}, where one comes twice; a pair of runs must differ")
        if empty := [key for key, values in self.grid.items() if not values]:
            raise ValueError(f"grid.{empty[0]} is an empty list; give it the values to try")
        known = [*self.arms, *(place_name(place) for place in self.places() if place)]
        if self.baseline is not None and self.baseline not in known:
            raise ValueError(f"baseline {self.baseline!r} is neither an arm nor a place; known: {', '.join(known)}")
        return self

    def places(self) -> list[dict[str, Any]]:
        """Every combination of the grid's values; without a grid, one empty combination."""
        return [dict(zip(self.grid, values, strict=True)) for values in itertools.product(*self.grid.values())]


@dataclass(frozen=True)
class Variant:
    """An arm at a place of the grid."""

    arm: str
    place: str

    @property
    def name(self) -> str:
        return " ".join(part for part in (self.arm if self.arm != "base" else "", self.place) if part) or "base"


@dataclass(frozen=True)
class Cell:
    """One run of a sweep. `after`: the cell whose logged radii it needs."""

    variant: Variant
    seed: int
    directory: Path
    file: Path
    overrides: tuple[str, ...]
    method: str | None = None
    after: Path | None = None

    @property
    def name(self) -> str:
        return f"{self.variant.name} seed {self.seed}"

    @property
    def arguments(self) -> tuple[str, ...]:
        """What `agent-rl train` is called with, without --run."""
        return (str(self.file), *self.overrides, *(("--method", self.method) if self.method else ()))


def read_sweep(path: Path) -> SweepConfig:
    """Read a sweep file. Raises `ValueError` with a sentence a problem."""
    return check(SweepConfig, read_yaml(path), str(path))


def cells(sweep: SweepConfig, path: Path, out: Path) -> list[Cell]:
    """Every cell of the sweep read from `path`, seeds outermost, so that whole comparisons finish first."""
    made = []
    for index, seed in enumerate(sweep.seeds):
        other = sweep.seeds[(index + 1) % len(sweep.seeds)]
        for place, (name, arm) in itertools.product(sweep.places(), sweep.arms.items()):
            variant = Variant(name, place_name(place))
            after = cell_directory(out, Variant(arm.schedule_of, variant.place), other) if arm.schedule_of else None
            keys = {**sweep.set, **place, **arm.set, **({_SCHEDULE: str(after)} if after else {}), "seed": seed}
            overrides = tuple(f"{key}={flow(value)}" for key, value in keys.items())
            directory, file = cell_directory(out, variant, seed), path.parent / sweep.base
            made.append(Cell(variant, seed, directory, file, overrides, arm.method, after))
    return made


def cell_config(cell: Cell) -> RunConfig:
    """The cell's run config. Raises `ValueError`, naming the cell, if a key of the sweep does not fit it."""
    overrides = list(cell.overrides)
    if cell.after is not None and not has_radii(cell.after):  # they come from a run that is still to be made
        overrides = [o for o in overrides if not o.startswith(_SCHEDULE)]
        overrides += ["objective.clip.eps_low=0.1", "objective.clip.eps_high=0.1"]
    try:
        return load(cell.file, overrides, cell.method)
    except ValueError as error:
        raise ValueError(f"{cell.name}: {error}") from None


def has_radii(run: Path) -> bool:
    """Whether a run that others read their radii from has logged any."""
    return (run / "metrics.jsonl").is_file()


def cell_directory(out: Path, variant: Variant, seed: int) -> Path:
    return out / variant.arm / variant.place / f"seed-{seed}"


def place_name(place: dict[str, Any]) -> str:
    """A name for a folder: the last word of each key with its value, such as `exact_lag=8`."""
    return ",".join(f"{key.rpartition('.')[2]}={flow(value)}".replace("/", "_") for key, value in place.items())


def flow(value: Any) -> str:
    """A value as YAML on one line, as overrides are written."""
    return yaml.safe_dump(value, default_flow_style=True, width=10**9).strip().removesuffix("...").strip()
