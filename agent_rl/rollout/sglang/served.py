"""A running SGLang server as the policy to evaluate: which model and weights it has, asked before anything starts."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_rl.rollout.engines.base import EngineError
from agent_rl.rollout.sglang.client import Client, RefusedError

_ANSWER_S = 60.0


@dataclass(frozen=True)
class ServedModel:
    """A server's own description. `context`: the longest sequence that it takes, in tokens."""

    url: str
    model: str
    tokenizer: str
    model_type: str
    architectures: list[str]
    weight_version: str
    context: int

    def directory(self) -> Path | None:
        """Where config.json and tokenizer of the model lie on this machine, if they do.

        After an update of the weights the server names where those came from, and its tokenizer is where it was.
        """
        for path in (Path(self.model), Path(self.tokenizer)):
            if (path / "config.json").is_file() and (path / "tokenizer_config.json").is_file():
                return path
        return None


async def served_model(url: str) -> ServedModel:
    """Ask a server. Raises `ValueError` if none answers at `url`, or one that is not SGLang."""
    client = Client(url)
    try:
        info = await client.get("/model_info", _ANSWER_S)
        cards = (await client.get("/v1/models", _ANSWER_S)).get("data", [])
        return ServedModel(
            client.url,
            info["model_path"],
            info["tokenizer_path"],
            info["model_type"],
            info["architectures"],
            str(info["weight_version"]),
            next(card["max_model_len"] for card in cards if card.get("max_model_len")),
        )
    except EngineError as error:
        raise ValueError(f"no SGLang server can be evaluated there: {error}") from None
    except (RefusedError, KeyError, StopIteration):
        raise ValueError(f"what answers at {client.url} is no SGLang server: it does not say what it serves") from None
    finally:
        await client.close()


async def check_same_model(served: ServedModel, directory: Path) -> None:
    """Raises `ValueError` unless the server's model has the architecture and vocabulary of the one in `directory`.

    For a server whose own files are not on this machine.
    """
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    ours, theirs = config.get("architectures"), served.architectures
    if config.get("model_type") != served.model_type or (ours and theirs and ours != theirs):
        raise _another_model(served, directory, f"a {served.model_type} model", f"a {config.get('model_type')} model")
    size = int(config["vocab_size"])
    if not await _knows(served.url, size - 1) or await _knows(served.url, size):
        raise _another_model(served, directory, "another vocabulary", f"one of {size} tokens")


def _another_model(served: ServedModel, directory: Path, theirs: str, ours: str) -> ValueError:
    return ValueError(
        f"the server at {served.url} has {theirs} ({served.model}), but model.path {str(directory)!r} is {ours}; "
        "name with model.path=… a copy of what it serves"
    )


async def _knows(url: str, token_id: int) -> bool:
    """Whether a token id is in the server's vocabulary. SGLang checks ids whose log-probs are asked for."""
    client = Client(url)
    body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1}, "return_logprob": True}
    try:
        await client.post("/generate", body | {"token_ids_logprob": [token_id]}, _ANSWER_S)
    except RefusedError:
        return False
    except EngineError as error:
        raise ValueError(f"no SGLang server can be evaluated there: {error}") from None
    finally:
        await client.close()
    return True
