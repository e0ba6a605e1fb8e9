"""Prompts from a JSON Lines file: one `{"prompt": str | "messages": [...], "answer": ...}` a line."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agent_rl.data.rows import NumberedRow, RowsConfig, RowSource


class JsonlSource(RowSource):
    """The lines of a file as rows. A missing file or a bad line is a `ValueError` that names the file and the line."""

    class Config(RowsConfig):
        path: Path
        """The file, UTF-8."""

    def __init__(self, config: Config, seed: int) -> None:
        super().__init__(config, seed, _rows(config.path), f"prompt file {config.path}")


def _rows(path: Path) -> Iterator[NumberedRow]:
    if not path.is_file():
        raise ValueError(f"prompt file {path} does not exist; set `path` to a JSON Lines file")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"prompt file {path} is not UTF-8; convert it first ({error})") from error
    # Not splitlines(): JSON strings may hold U+2028 and its kin unescaped, which it would split at.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            where = f"{path}, line {number}"
            yield where, _parse(line, where)


def _parse(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON ({error}); write one JSON object a line") from error
    if not isinstance(row, dict):
        raise ValueError(f'{where}: not a JSON object; write {{"prompt": ..., "answer": ...}}')
    return row
