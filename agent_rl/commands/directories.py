"""Names of directories that a command makes."""

import itertools
from collections.abc import Iterator
from pathlib import Path


def numbered(path: Path) -> Iterator[Path]:
    """`path`, then `path`-2, `path`-3, … without end."""
    yield path
    for number in itertools.count(2):
        yield path.with_name(f"{path.name}-{number}")
