"""Generated tokens per CPU-second: the embedded engine against `transformers` generate, and KV kept over turns.

    python -m benchmarks.embedded_engine [MODEL_DIRECTORY] [--sequences 64] [--new-tokens 128] [--repeats 5]

One thread, CPU time of this process. Both sides are warm, use the same model, ragged prompts and numbers of new
tokens, sample at temperature 1, and take turns within one run, so that a slow phase of the machine meets both.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from agent_rl.records import IntArray, SamplingParams
from agent_rl.rollout.engines.base import Engine
from agent_rl.rollout.engines.embedded import EmbeddedEngine

NUM_TURNS, TURN_TOKENS, TOOL_TOKENS = 3, 40, 12
DEFAULT_MODEL = Path(__file__).parents[1] / "agent_rl" / "assets" / "tiny-qwen3"


async def one_turn(engine: Engine, prompts: Sequence[IntArray], new_tokens: int) -> list[IntArray]:
    """Every prompt with its completion."""
    params = [SamplingParams(max_new_tokens=new_tokens, seed=i) for i in range(len(prompts))]
    calls = (engine.generate(i, p, s) for i, (p, s) in enumerate(zip(prompts, params, strict=True)))
    completions = await asyncio.gather(*calls)
    return [np.concatenate([p, c.token_ids]) for p, c in zip(prompts, completions, strict=True)]


def release_all(engine: Engine, count: int) -> None:
    for sequence_id in range(count):
        engine.release(sequence_id)


def run_engine(engine: EmbeddedEngine, prompts: Sequence[IntArray], new_tokens: int) -> None:
    asyncio.run(one_turn(engine, prompts, new_tokens))
    release_all(engine, len(prompts))


def run_generate(model: Any, prompts: Sequence[IntArray], new_tokens: int) -> None:
    """`model.generate` on the left-padded prompts; without an end token, so that all rows are full length."""
    width = max(map(len, prompts))
    padding = [width - len(p) for p in prompts]
    ids = torch.from_numpy(np.stack([np.pad(p, (n, 0)) for p, n in zip(prompts, padding, strict=True)])).long()
    mask = (torch.arange(width) >= torch.tensor(padding)[:, None]).long()
    config = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=new_tokens, pad_token_id=0)
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=mask, generation_config=config)
    assert out.shape == (len(prompts), width + new_tokens)


def run_turns(engine: EmbeddedEngine, prompts: Sequence[IntArray], keep_cache: bool) -> None:
    """Turns with tool output appended between them; `keep_cache` False releases every slot after a turn."""

    async def episode() -> None:
        sequences = list(prompts)
        for _ in range(NUM_TURNS):
            written = await one_turn(engine, sequences, TURN_TOKENS)
            sequences = [np.concatenate([s, np.arange(TOOL_TOKENS, dtype=np.int32)]) for s in written]
            if not keep_cache:
                release_all(engine, len(prompts))

    asyncio.run(episode())
    release_all(engine, len(prompts))


def cpu_seconds(run: Callable[[], None]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def compare(title: str, tokens: int, repeats: int, first: tuple[str, Callable[[], None]], second: Any) -> None:
    """Print tokens per CPU-second of two runs that take turns, and the median ratio of the pairs."""
    for _, run in (first, second):
        run()
    pairs = [(cpu_seconds(first[1]), cpu_seconds(second[1])) for _ in range(repeats)]
    print(title)
    for (name, _), seconds in zip((first, second), zip(*pairs, strict=True), strict=True):
        rates = sorted(tokens / s for s in seconds)
        middle = statistics.median(rates)
        print(f"  {name:<24}{middle:>10,.0f} tok/CPU-s   ({rates[0]:,.0f} to {rates[-1]:,.0f})")
    ratios = [b / a for a, b in pairs]
    print(f"  {'ratio':<24}{statistics.median(ratios):>9.2f}x             ({min(ratios):.2f} to {max(ratios):.2f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(DEFAULT_MODEL))
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    config = EmbeddedEngine.Config(max_concurrent_sequences=args.sequences, max_sequence_tokens=512)
    engine = EmbeddedEngine(config, args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    model.generation_config = GenerationConfig()  # its end token would otherwise be filled in
    rng = np.random.default_rng(0)
    lengths = rng.integers(12, 32, args.sequences)
    prompts = [rng.integers(0, model.config.vocab_size, n).astype(np.int32) for n in lengths]
    compare(
        f"{args.sequences} sequences, prompts of 12 to 31 tokens, {args.new_tokens} new tokens each",
        args.sequences * args.new_tokens,
        args.repeats,
        ("embedded engine", lambda: run_engine(engine, prompts, args.new_tokens)),
        ("transformers generate", lambda: run_generate(model, prompts, args.new_tokens)),
    )
    compare(
        f"{args.sequences} episodes of {NUM_TURNS} turns, {TURN_TOKENS} new and {TOOL_TOKENS} tool tokens a turn",
        args.sequences * NUM_TURNS * TURN_TOKENS,
        args.repeats,
        ("KV kept between turns", lambda: run_turns(engine, prompts, keep_cache=True)),
        ("prefilled every turn", lambda: run_turns(engine, prompts, keep_cache=False)),
    )


if __name__ == "__main__":
    main()
