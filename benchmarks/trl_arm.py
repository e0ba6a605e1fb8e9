"""The TRL arm of vs_trl.py, run by the interpreter of an environment that has TRL.

The same model, prompts, reward, tool server and tool rendering as the other arms; one session an episode.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from agent_rl.data.sources.chains import ChainSource
from agent_rl.verifier.compare import compare
from agent_rl.verifier.extraction import extract_answer
from benchmarks.process_tree import cpu_seconds
from sandbox.base import ExecResult
from tools.python import render

MODEL = Path(__file__).parent.parent / "agent_rl" / "assets" / "tiny-qwen3"
CALLS = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "text",
            "transform": {"type": "function", "function": {"name": "python", "arguments": {"code": "{content}"}}},
        },
        "content": {"close_pattern": r"<\|end\|>\s*", "content": "text"},
    },
}


def environment(url: str) -> type:
    """An environment class whose one tool runs code at the tool server."""
    client = httpx.Client(base_url=url, timeout=60)

    class Session:
        def __init__(self) -> None:
            self._id: str | None = None
            self._calls = 0

        def reset(self, **_: Any) -> None:
            if self._id is not None:
                client.delete(f"/sessions/{self._id}")
            self._id = None

        def python(self, code: str) -> str:
            """Run Python code and return what it prints.

            Args:
                code: The code.

            Returns:
                Its output.
            """
            if self._id is None:
                self._id = client.post("/sessions").raise_for_status().json()["session_id"]
            self._calls += 1
            body = {"code": code, "request_id": f"{self._calls}"}
            answer = client.post(f"/sessions/{self._id}/exec", json=body)
            if answer.status_code == 404:  # its own code ended it
                self._id = None
                return "Error: the session ended"
            result = ExecResult.model_validate(answer.raise_for_status().json())
            if not result.alive:
                self._id = None
            return render(result)

    return Session


def score(completions: list[list[dict[str, str]]], answer: list[str], **_: Any) -> list[float]:
    found = [extract_answer(completion[-1]["content"]) for completion in completions]
    return [float(f is not None and compare(right, f) is True) for f, right in zip(found, answer, strict=True)]


class Marks(TrainerCallback):
    """Says after every step what the process has used so far."""

    def __init__(self, mark: Callable[[], None]) -> None:
        self.mark = mark

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.mark()


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("url", "steps", "prompts", "group", "budget", "turns"):
        parser.add_argument(f"--{name}", required=True)
    given = parser.parse_args()
    prompts, group = int(given.prompts), int(given.group)
    torch.set_num_threads(1)
    source = ChainSource(ChainSource.Config(type="chains"), seed=0)
    rows = [source.prompt(index) for index in range(prompts * int(given.steps))]
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.response_template = CALLS
    # TRL tries the template on calls with other arguments and wants to see them in the text
    any_call = "(call.arguments.code if call.arguments.code is defined else call.name ~ call.arguments | tojson)"
    tokenizer.chat_template = tokenizer.chat_template.replace("call.arguments.code", any_call, 1)

    def mark() -> None:
        print(json.dumps({"cpu_s": cpu_seconds(), "wall": time.monotonic()}), flush=True)

    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32),
            reward_funcs=score,
            args=GRPOConfig(
                output_dir=folder,
                per_device_train_batch_size=prompts * group,
                num_generations=group,
                max_completion_length=int(given.budget),
                max_tool_calling_iterations=int(given.turns),
                max_steps=int(given.steps),
                learning_rate=1e-9,
                lr_scheduler_type="constant",
                temperature=1.0,
                beta=0.0,
                epsilon=0.2,
                epsilon_high=0.28,
                bf16=False,
                gradient_checkpointing=False,
                use_cpu=True,
                shuffle_dataset=False,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                logging_steps=10**6,
            ),
            train_dataset=Dataset.from_list(
                [{"prompt": list(row.messages), "answer": row.answer} for row in rows],
            ),
            processing_class=tokenizer,
            environment_factory=environment(given.url),
            callbacks=[Marks(mark)],
        )
        trainer.train()


if __name__ == "__main__":
    main()
