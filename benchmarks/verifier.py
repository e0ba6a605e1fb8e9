"""The verifier against calling math-verify directly, in one process and one run: throughput and what each gets right.

Both judge the same pairs, the answers in a \\boxed{}. A figure is processor seconds, those of the verifier process
included, so that a busy machine slows neither: the ratio is that of answers per core. Both begin with their parser's
tables built and with sympy's cache empty, and see each pair once.
Usage: python -m benchmarks.verifier [REPEATS]
"""

import asyncio
import logging
import sys
import time
from pathlib import Path
from statistics import median

from math_verify import parse
from math_verify import verify as math_verify
from rich.console import Console
from rich.table import Table
from sympy.core.cache import clear_cache

from agent_rl.verifier.compare import Question, compare
from agent_rl.verifier.extraction import extract_answer
from agent_rl.verifier.pool import PoolConfig, VerifierPool
from agent_rl.verifier.verdict import Outcome, verify

Pair = tuple[str, str, bool]
ANSWERS = Path(__file__).parent.parent / "tests" / "rewards" / "answers.txt"
LIMITS = PoolConfig(num_processes=1, cpu_s=20.0, wall_s=60.0)


def read_pairs() -> list[Pair]:
    rows = [line.split("\t") for line in ANSWERS.read_text().splitlines() if line and not line.startswith("#")]
    return [(reference, answer, right == "=") for reference, answer, right in rows]


def directly(pairs: list[Pair]) -> list[bool]:
    """As its README says: parse both texts, then verify."""
    return [bool(math_verify(parse(f"${reference}$"), parse(rf"\boxed{{{answer}}}"))) for reference, answer, _ in pairs]


def cpu_s(pids: list[int]) -> float:
    """Processor time so far of these processes and of this one."""
    others = (int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) for pid in pids)
    return time.process_time() + sum(others) / 1e9


async def ours(pairs: list[Pair]) -> tuple[list[bool], float]:
    """(verdicts, processor seconds) with a new pool, whose process is up but has seen none of the pairs."""
    pool = VerifierPool(LIMITS)
    await pool.ask(Question(("x^2",), ("x^2",), ordered=True))
    started = cpu_s(pool.processes)
    texts = [(reference, extract_answer(rf"\boxed{{{answer}}}") or "") for reference, answer, _ in pairs]
    found = [(await verify(reference, answer, pool)).outcome is Outcome.CORRECT for reference, answer in texts]
    spent = cpu_s(pool.processes) - started
    await pool.close()
    return found, spent


def compared(name: str, pairs: list[Pair], repeats: int, table: Table) -> None:
    """One row: milliseconds an answer of each, their ratio, and how many each gets right."""
    times: dict[str, list[float]] = {"ours": [], "direct": []}
    for _ in range(repeats):
        clear_cache()
        started = cpu_s([])
        found = {"direct": directly(pairs)}
        times["direct"].append(cpu_s([]) - started)
        found["ours"], spent = asyncio.run(ours(pairs))
        times["ours"].append(spent)
    each = {who: 1e3 * median(seconds) / len(pairs) for who, seconds in times.items()}
    right = {who: sum(a == b for a, (_, _, b) in zip(f, pairs, strict=True)) / len(pairs) for who, f in found.items()}
    table.add_row(
        f"{name} ({len(pairs)})",
        f"{each['ours']:.3f}",
        f"{each['direct']:.3f}",
        f"{each['direct'] / each['ours']:.2f}",
        f"{right['ours']:.1%}",
        f"{right['direct']:.1%}",
    )


def main() -> None:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    logging.disable(logging.CRITICAL)
    directly([("x^2", "x^2", True)])
    pairs = read_pairs()
    integers = [(str(n), str(n + n % 2), n % 2 == 0) for n in range(1000, 1400)]
    hard = [pair for pair in pairs if isinstance(compare(pair[0], pair[1]), Question)]
    table = Table("answers", "ours, ms", "direct, ms", "direct / ours", "ours right", "direct right")
    compared("plain integers", integers, repeats, table)
    compared("LaTeX that takes algebra, isolation included", hard, repeats, table)
    compared("the whole table of tests/rewards", pairs, repeats, table)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
