"""The text of single tokens, by the tokenizer of the run's model; ids where there is none."""

from collections.abc import Sequence
from typing import Any

_REPLACEMENT = "\ufffd"
_LONGEST_CHARACTER = 4
"""Bytes of one character in UTF-8, and so the most tokens that it is spread over."""


class TokenTexts:
    """Numbers the different (id, text) pairs; `table` lists them. `notes` says why ids are shown, if they are."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.table: list[tuple[int, str]] = []
        self.notes: list[str] = []
        self._known: dict[tuple[int, str], int] = {}
        self._pieces: dict[int, str] = {}
        self._tokenizer = self._load(config)

    def _load(self, config: dict[str, Any]) -> Any:
        from agent_rl.config import model_directory

        model = config.get("model") or {}
        path = model_directory(str(model.get("path", ""))) if isinstance(model, dict) else None
        if path is None or not (path / "tokenizer_config.json").is_file():
            self.notes.append("tokens are shown by id: the run's tokenizer is not where config.yaml says")
            return None
        from transformers import AutoTokenizer  # heavy

        try:
            return AutoTokenizer.from_pretrained(str(path))
        except (OSError, ValueError) as error:
            self.notes.append(f"tokens are shown by id: {str(error).splitlines()[0]}")
            return None

    def indices(self, ids: Sequence[int]) -> list[int]:
        """The index in `table` of each token. A character that is spread over tokens is the text of the last one."""
        indices, pending = [], list[int]()
        for token in ids:
            text = self._piece(token) if not pending else self._decode([*pending, token])
            whole = _REPLACEMENT not in text or len(pending) + 1 == _LONGEST_CHARACTER
            pending = [] if whole else [*pending, token]
            indices.append(self._number((token, text if whole else "")))
        return indices

    def _number(self, key: tuple[int, str]) -> int:
        if key not in self._known:
            self._known[key] = len(self.table)
            self.table.append(key)
        return self._known[key]

    def _piece(self, token: int) -> str:
        if token not in self._pieces:
            self._pieces[token] = self._decode([token])
        return self._pieces[token]

    def _decode(self, ids: list[int]) -> str:
        if self._tokenizer is None:
            return "".join(f"⟨{token}⟩" for token in ids)
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
