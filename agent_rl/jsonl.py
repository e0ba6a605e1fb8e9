"""JSON lines that survive a crash: what a killed writer left half-written is cut, not a traceback."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The objects of a file, one a line; none if it is not there. A last line that was torn off is left out.

    Raises `ValueError`, with the line's number, for a whole line that is not JSON.
    """
    text = path.read_text() if path.is_file() else ""
    rows = []
    for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            raise ValueError(f"{path}, line {number}, is not JSON; restore the file or start a new run") from None
    return rows


def rewrite_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Replace a file's lines; whole or not at all."""
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
