r"""Is the number in the last `\boxed{}` the reference answer? Strings, integers, fractions and decimals.

Everything here takes time linear in the text, or works on at most `max_answer_chars` digits: nothing that a
policy writes can hang it.
"""

import re
from fractions import Fraction

from pydantic import Field

from agent_rl.records import Prompt, StopReason
from agent_rl.registry import PartConfig
from agent_rl.rewards.base import Reward

_BOXED = r"\boxed{"
# No exponents: Fraction("1e999999999") would build the integer.
_NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+|[0-9]+/0*[1-9][0-9]*)")
_THOUSANDS = re.compile(r"[+-]?[0-9]{1,3}(,[0-9]{3})+(\.[0-9]*)?")


class MathReward(Reward):
    """1 if the episode ended with an answer equal to the prompt's, else 0."""

    class Config(PartConfig):
        max_answer_chars: int = Field(default=256, ge=1, le=4000)
        """A longer answer is wrong unless it is the reference itself, character by character."""

    def __init__(self, config: Config) -> None:
        self.max_answer_chars = config.max_answer_chars

    def score(self, prompt: Prompt, final_text: str | None, stop_reason: StopReason) -> tuple[float, dict[str, float]]:
        answer = extract_answer(final_text or "") if stop_reason == StopReason.ANSWER else None
        right = answer is not None and is_equal(answer, prompt.answer, self.max_answer_chars)
        return float(right), {"outcome": float(right)}


def extract_answer(text: str) -> str | None:
    r"""The content of the last `\boxed{...}`, nested braces included; None if there is none or it is not closed."""
    start = text.rfind(_BOXED)
    if start < 0:
        return None
    begin = start + len(_BOXED)
    depth = 1
    for match in re.finditer(r"\\.|[{}]", text[begin:], re.DOTALL):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0:
            return text[begin : begin + match.start()]
    return None


def is_equal(answer: str, reference: str, max_chars: int = 256) -> bool:
    """Whether two answers are the same string after normalisation or the same number: 0.5 equals 1/2."""
    if answer == reference:
        return bool(answer)
    if max(len(answer), len(reference)) > max_chars:
        return False
    left, right = normalise(answer), normalise(reference)
    if left == right:
        return bool(left)
    numbers = parse_number(left), parse_number(right)
    return numbers[0] is not None and numbers[0] == numbers[1]


def normalise(answer: str) -> str:
    """`answer` without whitespace around or doubled inside it, `$` around it, or commas between thousands."""
    text = " ".join(answer.split()).strip("$").strip()
    return text.replace(",", "") if _THOUSANDS.fullmatch(text) else text


def parse_number(text: str) -> Fraction | None:
    """The exact value of an integer, a decimal or a fraction of integers, else None."""
    return Fraction(text) if _NUMBER.fullmatch(text) else None
