"""Messages to token ids and back, through the model's own chat template.

A sampled turn is never re-encoded: only the prompt and what tools answer are rendered, each once.
"""

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from agent_rl.records import IntArray

_MARK = "\x00assistant-turn\x00"


class Renderer:
    """Renders with the tokenizer of a model directory. Raises `ValueError` if it has no chat template."""

    def __init__(self, model_directory: Path, max_tool_output_tokens: int = 2**31) -> None:
        from transformers import AutoTokenizer  # heavy, and only rollout needs it

        self.tokenizer = AutoTokenizer.from_pretrained(str(model_directory))
        self.max_tool_output_tokens = max_tool_output_tokens
        if not self.tokenizer.chat_template:
            raise ValueError(f"the tokenizer in {str(model_directory)!r} has no chat template; add chat_template.jinja")
        self.stop_token_ids = _stop_token_ids(model_directory, self.tokenizer.eos_token_id)

    def prompt(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = (), name: str = "a prompt"
    ) -> IntArray:
        """Ids of the chat up to where the first assistant turn begins, int32 [L].

        Raises `ValueError`, which calls the prompt `name`, if the chat template refuses the messages.
        """
        from jinja2 import TemplateError  # what a template raises for a role or an order that it does not know

        try:
            return self._encode(self._render(messages, tools))
        except (TemplateError, TypeError) as error:
            raise ValueError(f"the model's chat template refuses the messages of {name}: {error}") from error

    def tool_turn(self, contents: Sequence[str]) -> IntArray:
        """Ids between an assistant turn's end token and the next assistant turn: the tools' answers, int32 [L].

        Rendered by difference, so any chat template works: the text that follows a marked assistant turn.
        """
        results = [{"role": "tool", "content": content} for content in contents]
        chat = [{"role": "user", "content": ""}, {"role": "assistant", "content": _MARK}, *results]
        after = self._render(chat, ()).partition(_MARK)[2]  # the first: a tool's output may hold the mark too
        return self._encode(after.removeprefix(self._turn_end))

    def clip_tool_output(self, content: str) -> str:
        """`content` with special tokens defused, cut to `max_tool_output_tokens` with a marker that says so.

        The marker alone takes up to about 20 tokens; the config allows no limit below 32.
        """
        content = self._defuse(content)
        ids = self._encode(content)
        if len(ids) <= self.max_tool_output_tokens:
            return content
        marker = f"...[{len(ids)} tokens]"
        room = self.max_tool_output_tokens - len(self._encode(marker))
        # A cut inside a character decodes to the replacement character, which would cost tokens of its own.
        return self._decode_raw(ids[:room]).rstrip("\ufffd") + marker

    def decode_turn(self, token_ids: IntArray) -> str:
        """Text of a sampled turn without its end token; tool-call markers stay."""
        ids = token_ids[:-1] if len(token_ids) and int(token_ids[-1]) in self.stop_token_ids else token_ids
        return self._decode_raw(ids)

    @cached_property
    def _turn_end(self) -> str:
        """The text of the end token that the policy itself samples at the end of a turn."""
        chat = [{"role": "user", "content": ""}, {"role": "assistant", "content": _MARK}]
        after = self._render(chat, (), generation_prompt=False).partition(_MARK)[2]
        for token_id in self.stop_token_ids:
            text = self.tokenizer.convert_ids_to_tokens(token_id)
            if after.startswith(text):
                return str(text)
        raise ValueError(f"the chat template ends an assistant turn with {after!r}, which is not a stop token")

    def _render(self, messages: Any, tools: Any, generation_prompt: bool = True) -> str:
        rendered = self.tokenizer.apply_chat_template(
            list(messages), tools=list(tools) or None, add_generation_prompt=generation_prompt, tokenize=False
        )
        return str(rendered)

    def _encode(self, text: str) -> IntArray:
        return np.asarray(self.tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)

    def _decode_raw(self, ids: IntArray) -> str:
        return str(self.tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _defuse(self, content: str) -> str:
        """Break up special tokens: a tool's output must not be able to end its own turn or speak as a role."""
        for text in self._special_texts:
            content = content.replace(text, f"{text[0]} {text[1:]}")
        return content

    @cached_property
    def _special_texts(self) -> list[str]:
        return sorted((str(token) for token in self.tokenizer.get_added_vocab() if len(token) > 1), key=len)


def _stop_token_ids(model_directory: Path, eos_token_id: int) -> tuple[int, ...]:
    """The tokenizer's end token and those that generation_config.json adds."""
    path = model_directory / "generation_config.json"
    configured = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
    extra = configured if isinstance(configured, list) else [configured]
    return tuple(dict.fromkeys([eos_token_id, *(token for token in extra if token is not None)]))
