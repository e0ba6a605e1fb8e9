"""Rows of a data set as prompts: which columns are read, and the order in which a finite set is drawn."""

import random
import unicodedata
from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import Field

from agent_rl.data.sources.base import PromptSource
from agent_rl.records import Prompt
from agent_rl.registry import PartConfig

Line = tuple[tuple[dict[str, str], ...], str, dict[str, Any]]
"""Messages, answer and tags of one row."""

NumberedRow = tuple[str, dict[str, Any]]
"""A row, after its place as messages to the user name it."""


class RowsConfig(PartConfig):
    """Keys of every source that reads rows. A column inside another is named by a dotted path."""

    prompt_column: str | None = None
    """Column with the problem: a text, or a chat as a list of `{"role": …, "content": …}`. Null takes `prompt` or
    `messages`, whichever a row has."""
    answer_column: str = "answer"
    """Column with the reference answer: a text, a number, or a list that holds one of them."""
    tag_columns: tuple[str, ...] | None = None
    """Columns that are recorded with each episode; null records all but those of the problem and the answer."""
    instruction: str = ""
    """Appended to the last message after an empty line: how the answer is to be given, for instance."""
    deduplicate: bool = False
    """Keep the first of the rows with the same problem and answer, up to case and white space."""
    limit: int | None = Field(default=None, ge=1)
    """Read so many prompts at most; null reads all."""
    shuffle: bool = False
    """Draw a new order for each epoch; False keeps the order of the data."""


class RowSource(PromptSource):
    """Every row once an epoch; index i is place i % n of epoch i // n.

    All rows are read and checked on construction: bad ones are one `ValueError` that names the first and their number.
    """

    def __init__(self, config: RowsConfig, seed: int, rows: Iterable[NumberedRow], where: str) -> None:
        self.seed, self.shuffle = seed, config.shuffle
        self.lines = list(_parsed(rows, config, where))
        if not self.lines:
            raise ValueError(f"{where} has no prompts; it must hold one row for each")
        self._epoch = -1
        self._order: list[int] = list(range(len(self.lines)))

    def __len__(self) -> int:
        """Prompts in one epoch."""
        return len(self.lines)

    def prompt(self, index: int) -> Prompt:
        assert index >= 0
        epoch, place = divmod(index, len(self.lines))
        messages, answer, tags = self.lines[self._order_of(epoch)[place]]
        return Prompt(index, messages, answer, tags)

    def _order_of(self, epoch: int) -> list[int]:
        if self.shuffle and epoch != self._epoch:
            self._order = list(range(len(self.lines)))
            random.Random(f"{self.seed}/{epoch}").shuffle(self._order)
            self._epoch = epoch
        return self._order


def columns_read(config: RowsConfig) -> set[str] | None:
    """The top-level columns that a config reads; None if it takes them as they come."""
    if config.tag_columns is None or config.prompt_column is None:
        return None
    return {path.partition(".")[0] for path in (config.prompt_column, config.answer_column, *config.tag_columns)}


def normalise_text(text: str) -> str:
    """`text` for comparing problems: compatible Unicode forms, case and white space do not matter."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _parsed(rows: Iterable[NumberedRow], config: RowsConfig, where: str) -> Iterator[Line]:
    seen: set[tuple[str, str]] = set()
    problems: list[str] = []
    kept = 0
    for place, row in rows:
        try:
            line = parse_row(row, config, place)
        except ValueError as error:
            problems.append(str(error))
            continue
        key = (normalise_text(" ".join(message["content"] for message in line[0])), normalise_text(line[1]))
        if not (config.deduplicate and key in seen):
            if config.deduplicate:
                seen.add(key)
            kept += 1
            yield line
        if kept == config.limit:
            break
    if problems:
        more = f"; {len(problems)} rows of {where} are bad" if len(problems) > 1 else ""
        raise ValueError(f"{problems[0]}{more}")


def parse_row(row: dict[str, Any], config: RowsConfig, where: str) -> Line:
    """Messages, answer and tags of `row`. Raises `ValueError` that begins with `where`."""
    column = config.prompt_column or _own_column(row, where)
    messages = _messages(_value(row, column, where), column, config.prompt_column is None, where)
    if config.instruction:
        last = {**messages[-1], "content": f"{messages[-1]['content']}\n\n{config.instruction}"}
        messages = (*messages[:-1], last)
    return messages, _answer(row, config.answer_column, where), _tags(row, column, config, where)


def _own_column(row: dict[str, Any], where: str) -> str:
    if ("prompt" in row) == ("messages" in row):
        raise ValueError(f"{where}: give exactly one of `prompt` and `messages`, or name one with `prompt_column`")
    return "prompt" if "prompt" in row else "messages"


def _value(row: dict[str, Any], path: str, where: str) -> Any:
    """The value at a dotted path; a column whose own name has dots is found too."""
    if path in row:
        return row[path]
    node: Any = row
    for key in path.split("."):
        if not isinstance(node, dict) or key not in node:
            raise ValueError(f"{where}: no column {path!r}; there are {', '.join(map(str, row))}")
        node = node[key]
    return node


def _messages(value: Any, column: str, by_name: bool, where: str) -> tuple[dict[str, str], ...]:
    if isinstance(value, str) and value.strip() and not (by_name and column == "messages"):
        return ({"role": "user", "content": value},)
    if isinstance(value, list) and value and all(_is_message(m) for m in value):
        return tuple({"role": m["role"], "content": m["content"]} for m in value)
    if column == "messages" or isinstance(value, list):
        raise ValueError(f'{where}: `{column}` must be a non-empty list of {{"role": str, "content": str}}')
    raise ValueError(f"{where}: `{column}` must be a non-empty string or a list of messages")


def _is_message(message: object) -> bool:
    return (
        isinstance(message, dict)
        and set(message) == {"role", "content"}
        and all(isinstance(text, str) for text in message.values())
    )


def _answer(row: dict[str, Any], column: str, where: str) -> str:
    try:
        answer = _value(row, column, where)
    except ValueError as error:
        raise ValueError(f"{where}: no answer ({str(error).removeprefix(f'{where}: ')})") from None
    if isinstance(answer, list) and len(answer) == 1:
        answer = answer[0]
    if isinstance(answer, bool) or not isinstance(answer, str | int | float) or not str(answer).strip():
        raise ValueError(f"{where}: no answer; give `{column}` a non-empty string or a number")
    return str(answer)


def _tags(row: dict[str, Any], prompt_column: str, config: RowsConfig, where: str) -> dict[str, Any]:
    if config.tag_columns is not None:
        return {path: _plain(_value(row, path, where)) for path in config.tag_columns}
    read = {
        prompt_column,
        prompt_column.partition(".")[0],
        config.answer_column,
        config.answer_column.partition(".")[0],
    }
    return {key: _plain(value) for key, value in row.items() if key not in read}


def _plain(value: Any) -> Any:
    """`value` as JSON can hold it: tags are recorded as JSON, and a Parquet column may be a date."""
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else str(value)
