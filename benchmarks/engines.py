"""Generated tokens per second: the embedded engine, SGLang on the CPU and `transformers` generate, in one run.

    python -m benchmarks.engines [--new-tokens 128] [--repeats 3]

The shipped model, ragged prompts, temperature 1, no end token, 1, 16 and 64 sequences at once. Wall time, since
SGLang computes in other processes; one compute thread each. The three take turns within one run, so that a slow
phase of the machine meets all of them. `make sglang-cpu` makes the environment that SGLang needs.
"""

import argparse
import asyncio
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from transformers import AutoModelForCausalLM, GenerationConfig

from agent_rl.records import IntArray
from agent_rl.rollout.engines.base import Engine
from agent_rl.rollout.engines.embedded import EmbeddedEngine
from agent_rl.rollout.engines.sglang import SGLangEngine
from benchmarks.embedded_engine import one_turn, release_all, run_generate

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "agent_rl" / "assets" / "tiny-qwen3"
CONCURRENT = (1, 16, 64)
CONTEXT = 256


async def engine_tokens(engine: Engine, prompts: Sequence[IntArray], new_tokens: int) -> int:
    """How many tokens the engine sampled."""
    written = await one_turn(engine, prompts, new_tokens)
    release_all(engine, len(prompts))
    return sum(map(len, written)) - sum(map(len, prompts))


def generate_tokens(model: Any, prompts: Sequence[IntArray], new_tokens: int) -> int:
    """The same from `model.generate`."""
    run_generate(model, prompts, new_tokens)
    return len(prompts) * new_tokens


def sglang_engine(folder: Path) -> SGLangEngine:
    """As the SGLang quickstart has it, on a copy of the model that names no end token: SGLang would stop at it."""
    shipped = yaml.safe_load((ROOT / "configs" / "quickstart_sglang.yaml").read_text())["rollout"]["engine"]
    endless = json.loads((MODEL / "config.json").read_text()) | {"eos_token_id": None}
    (folder / "config.json").write_text(json.dumps(endless))
    shutil.copy(MODEL / "model.safetensors", folder)
    return SGLangEngine(SGLangEngine.Config.model_validate(shipped), str(folder))


async def compare(folder: Path, new_tokens: int, repeats: int) -> None:
    """Print the median rate of each engine at each concurrency, with the smallest and the largest."""
    embedded = EmbeddedEngine(
        EmbeddedEngine.Config(max_concurrent_sequences=64, max_sequence_tokens=CONTEXT), str(MODEL)
    )
    sglang = sglang_engine(folder)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    model.generation_config = GenerationConfig()  # its end token would otherwise be filled in
    rng = np.random.default_rng(0)
    print(f"{'sequences':<12}{'embedded':>24}{'SGLang on the CPU':>24}{'transformers':>24}   tok/s")
    for count in CONCURRENT:
        prompts = [rng.integers(0, model.config.vocab_size, n).astype(np.int32) for n in rng.integers(12, 32, count)]
        rates: list[list[float]] = [[], [], []]
        for repeat in range(repeats + 1):
            found = [
                await _rate(engine_tokens(embedded, prompts, new_tokens)),
                await _rate(engine_tokens(sglang, prompts, new_tokens)),
                _timed(partial(generate_tokens, model, prompts, new_tokens)),
            ]
            if repeat:  # the first round warms up
                for own, rate in zip(rates, found, strict=True):
                    own.append(rate)
        print(f"{count:<12}" + "".join(f"{_range(own):>24}" for own in rates))
    await sglang.close()
    await embedded.close()


async def _rate(run: Any) -> float:
    start = time.perf_counter()
    tokens: int = await run
    return tokens / (time.perf_counter() - start)


def _timed(run: Callable[[], int]) -> float:
    start = time.perf_counter()
    return run() / (time.perf_counter() - start)


def _range(rates: list[float]) -> str:
    return f"{statistics.median(rates):,.0f} ({min(rates):,.0f} to {max(rates):,.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(compare(Path(folder), args.new_tokens, args.repeats))


if __name__ == "__main__":
    main()
