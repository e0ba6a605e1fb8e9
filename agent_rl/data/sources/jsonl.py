"""Prompts from a JSON Lines file: one `{"prompt": str | "messages": [...], "answer": ...}` a line."""

import json
import random
from pathlib import Path
from typing import Any

from agent_rl.data.sources.base import PromptSource
from agent_rl.records import Prompt
from agent_rl.registry import PartConfig

_OWN_KEYS = {"prompt", "messages", "answer"}


class JsonlSource(PromptSource):
    """Every line once an epoch; index i is place i % n of epoch i // n. Other keys of a line become tags.

    The file is read and checked once, on construction: a missing file or a bad line is a `ValueError` that
    names the file and the line.
    """

    class Config(PartConfig):
        path: Path
        """The file, UTF-8."""
        shuffle: bool = False
        """Draw a new order for each epoch; False keeps the order of the file."""

    def __init__(self, config: Config, seed: int) -> None:
        self.seed = seed
        self.shuffle = config.shuffle
        self.lines = _read(config.path)
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


Line = tuple[tuple[dict[str, str], ...], str, dict[str, Any]]


def _read(path: Path) -> list[Line]:
    if not path.is_file():
        raise ValueError(f"prompt file {path} does not exist; set `path` to a JSON Lines file")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"prompt file {path} is not UTF-8; convert it first ({error})") from error
    # Not splitlines(): JSON strings may hold U+2028 and its kin unescaped, which it would split at.
    lines = [_parse(line, f"{path}, line {n}") for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise ValueError(f"prompt file {path} has no prompts; write one JSON object a line")
    return lines


def _parse(line: str, where: str) -> Line:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON ({error}); write one JSON object a line") from error
    if not isinstance(row, dict):
        raise ValueError(f'{where}: not a JSON object; write {{"prompt": ..., "answer": ...}}')
    messages = _messages(row, where)
    return messages, _answer(row, where), {k: v for k, v in row.items() if k not in _OWN_KEYS}


def _answer(row: dict[str, Any], where: str) -> str:
    answer = row.get("answer")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float) or not str(answer).strip():
        raise ValueError(f"{where}: no answer; give `answer` a non-empty string or a number")
    return str(answer)


def _messages(row: dict[str, Any], where: str) -> tuple[dict[str, str], ...]:
    if ("prompt" in row) == ("messages" in row):
        raise ValueError(f"{where}: give exactly one of `prompt` and `messages`")
    if "prompt" in row:
        if not isinstance(row["prompt"], str) or not row["prompt"]:
            raise ValueError(f"{where}: `prompt` must be a non-empty string; for a chat use `messages`")
        return ({"role": "user", "content": row["prompt"]},)
    messages = row["messages"]
    if not isinstance(messages, list) or not messages or not all(_is_message(m) for m in messages):
        raise ValueError(f'{where}: `messages` must be a non-empty list of {{"role": str, "content": str}}')
    return tuple(messages)


def _is_message(message: object) -> bool:
    return (
        isinstance(message, dict)
        and set(message) == {"role", "content"}
        and all(isinstance(text, str) for text in message.values())
    )
