"""One answer against one reference: the exact path first, then, if that cannot tell, a verifier process."""

import enum
from dataclasses import dataclass

from agent_rl.verifier.compare import compare
from agent_rl.verifier.pool import VerifierPool


class Outcome(enum.StrEnum):
    """How an answer was judged; `unverifiable` means that no verdict was reached."""

    CORRECT = "correct"
    WRONG = "wrong"
    UNVERIFIABLE = "unverifiable"


@dataclass(frozen=True)
class Verdict:
    """An outcome; if unverifiable, why: too_long, timeout, memory, crash, unreadable, or error: and an exception."""

    outcome: Outcome
    reason: str | None = None


async def verify(reference: str, answer: str, pool: VerifierPool, max_chars: int = 1000) -> Verdict:
    """Whether `answer` is `reference`. Never raises on what they hold; an empty answer is wrong.

    Beyond `max_chars` only the reference itself, character by character, is correct. Raises `RuntimeError` if no
    verifier process can be started.
    """
    if answer == reference or not answer.strip():
        return Verdict(Outcome.CORRECT if answer.strip() else Outcome.WRONG)
    if max(len(answer), len(reference)) > max_chars:
        return Verdict(Outcome.UNVERIFIABLE, "too_long")
    left = compare(reference, answer)
    if isinstance(left, bool):
        return Verdict(Outcome.CORRECT if left else Outcome.WRONG)
    reply = await pool.ask(left)
    if reply in (Outcome.CORRECT, Outcome.WRONG):
        return Verdict(Outcome(reply))
    return Verdict(Outcome.UNVERIFIABLE, reply)
