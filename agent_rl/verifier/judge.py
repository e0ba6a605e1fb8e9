"""The script of a verifier process: math-verify on one question after the other, away from our packages.

Usage: judge.py SOCKET_FD CPU_SECONDS MEMORY_BYTES. A question is a line of JSON, `{"reference": […], "answer": […],
"ordered": bool}`, expressions to be equal one by one or in any order; the reply is a line with one JSON string:
correct, wrong, or why no verdict was reached. A question that takes more processor time kills the process, whatever
it is doing: the kernel sends SIGPROF, which nothing here handles.
"""

import contextlib
import json
import logging
import resource
import signal
import socket
import sys
from functools import lru_cache
from typing import Any

from latex2sympy2_extended import NormalizationConfig
from math_verify import parse, verify
from math_verify.parser import LatexExtractionConfig
from sympy import UnevaluatedExpr

CORRECT, WRONG = "correct", "wrong"
# No box inside an answer: the last one in `6 \boxed{5}` would be taken for the whole.
_SPELLING = NormalizationConfig(
    basic_latex=True, units=True, malformed_operators=True, nits=True, boxed="none", equations=False
)
_LATEX = [LatexExtractionConfig(boxed_match_priority=-1, normalization_config=_SPELLING)]
_TOLERANCE = 2e-6
"""Relative: a decimal stands for an irrational or unevaluated number if six significant digits agree."""
_WARM_UP = (
    ("x^2+2x+1", "(x+1)^2"),
    (r"\sin(2x)", r"2\sin x\cos x"),
    (r"\sum_{k=1}^{n}k", r"\frac{n(n+1)}{2}"),
    (r"\int_0^1 x^2 dx", r"\frac{1}{3}"),
)


class UnreadableError(Exception):
    """An expression that math-verify cannot parse."""


@lru_cache(maxsize=512)
def read(text: str) -> Any:
    # Timeouts are off here: they are alarms, which C code does not see, and this process has a limit of its own.
    found = parse(f"$${text}$$", _LATEX, fallback_mode="no_fallback", parsing_timeout=None, raise_on_error=True)
    if not found:
        raise UnreadableError(text)
    return found[0]


def equal(reference: str, answer: str) -> bool:
    gold, given = read(reference), read(answer)
    same = verify(gold, given, allow_set_relation_comp=True, timeout_seconds=None, raise_on_error=True)
    return bool(same) and _close(gold, given)


def _close(gold: Any, given: Any) -> bool:
    """math-verify compares differences to a fixed place, where all tiny numbers are equal: here their ratio counts."""
    if not (getattr(gold, "is_number", False) and getattr(given, "is_number", False)) or gold.has(UnevaluatedExpr):
        return True
    if given.has(UnevaluatedExpr) or gold == given:  # an unevaluated factor is a percent sign
        return True
    a, b = gold.evalf(), given.evalf()
    return bool(abs(a - b) <= _TOLERANCE * max(abs(a), abs(b)))


def judge(question: dict[str, Any]) -> str:
    left = list(question["answer"])
    for reference in question["reference"]:
        candidates = left[:1] if question["ordered"] else left
        match = next((answer for answer in candidates if equal(reference, answer)), None)
        if match is None:
            return WRONG
        left.remove(match)
    return WRONG if left else CORRECT


def reply(line: str, most_kb: int) -> str:
    """The verdict. math-verify swallows a `MemoryError` and then says wrong: growth beyond `most_kb` gives it away."""
    try:
        verdict = judge(json.loads(line))
        return "memory" if verdict == WRONG and peak_kb() > most_kb else verdict
    except UnreadableError:
        return "unreadable"
    except MemoryError:
        return "memory"
    except Exception as error:  # no verdict, whatever the reason
        return f"error: {type(error).__name__}"


def peak_kb() -> int:
    """Most resident memory this process has had, in kB. Not `ru_maxrss`, which remembers the parent's."""
    with open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith("VmHWM")).split()[1])


def main(descriptor: int, cpu_s: float, memory_bytes: int) -> None:
    logging.disable(logging.CRITICAL)
    for pair in _WARM_UP:
        equal(*pair)  # SymPy imports and caches at first use, which must not count against the first question's limit
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    gone = contextlib.suppress(ConnectionError)  # the asker has gone: nothing is left to do
    with gone, socket.socket(fileno=descriptor) as channel, channel.makefile("rw", encoding="utf-8") as lines:
        most_kb = peak_kb() + (memory_bytes >> 13)  # a failed allocation comes after ones an eighth of the limit large
        print(json.dumps("ready"), file=lines, flush=True)
        for line in lines:
            signal.setitimer(signal.ITIMER_PROF, cpu_s)
            answer = reply(line, most_kb)
            signal.setitimer(signal.ITIMER_PROF, 0)
            print(json.dumps(answer), file=lines, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
