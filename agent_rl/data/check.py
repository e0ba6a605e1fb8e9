"""Finds faults in a run's prompts before it starts: duplicates, leaks, prompts that do not fit."""

import sys
from collections import Counter
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from typing import Literal

from agent_rl.data.rows import normalise_text
from agent_rl.data.sources.base import PromptSource
from agent_rl.data.sources.mixture import MixtureSource
from agent_rl.records import Prompt

Level = Literal["ok", "warning", "error"]

OVERLAP = "also in the training prompts"
SAMPLE = 2000
"""How many prompts of an endless source are checked."""
_SAMPLED = f"the first {SAMPLE} of each source that has no end"
_TOLERATED = 0.01


@dataclass(frozen=True)
class Finding:
    """One line of the report. `count` of `total` prompts are concerned; `detail` says how, with an example."""

    level: Level
    source: str
    check: str
    count: int
    total: int
    detail: str


@dataclass(frozen=True)
class Lengths:
    """How prompts are measured: `measure` gives (tokens, unknown tokens) of the rendered chat; `budget` is the most."""

    measure: Callable[[Prompt], tuple[int, int]]
    budget: int


def prompts_of(source: PromptSource, limit: int | None = None) -> tuple[list[Prompt], bool]:
    """The prompts of one epoch, or a sample where there is no end (or a `limit`); and whether these are all.

    A mixture has no end, but what it draws from may: without a `limit`, those of each of its sources.
    """
    if isinstance(source, MixtureSource) and limit is None:
        parts = [prompts_of(part) for part in source.sources]
        return [prompt for prompts, _ in parts for prompt in prompts], all(whole for _, whole in parts)
    size = len(source) if isinstance(source, Sized) else None
    wanted = min(size if size is not None else SAMPLE, limit if limit is not None else sys.maxsize)
    return [source.prompt(index) for index in range(wanted)], wanted == size


def check_prompts(name: str, prompts: Sequence[Prompt], whole: bool, lengths: Lengths | None = None) -> list[Finding]:
    """Counts, duplicates and, with `lengths`, prompts that leave no room in the budget or hold unknown tokens."""
    total = len(prompts)
    count = "every prompt was looked at" if whole else f"only {total} were looked at, {_SAMPLED}"
    found = [Finding("ok", name, "prompts", total, total, count), _duplicates(name, prompts)]
    if lengths is not None:
        measured = [lengths.measure(prompt) for prompt in prompts]
        longest = max(tokens for tokens, _ in measured)
        long = [i for i, (tokens, _) in enumerate(measured) if tokens >= lengths.budget]
        detail = f"longest prompt: {longest} of rollout.max_episode_tokens {lengths.budget}"
        found.append(_share(name, "prompt over the budget", long, prompts, detail))
        strange = [i for i, (_, unknown) in enumerate(measured) if unknown]
        found.append(_share(name, "text the tokenizer does not know", strange, prompts, "it is lost on the model"))
    return found


def check_overlap(train: Sequence[Prompt], heldout: Sequence[Prompt], whole: bool = True) -> Finding:
    """Held-out problems that are trained on as well; boilerplate around either is ignored.

    `whole`: whether `train` is all of the training prompts. If it is not, finding none proves little, and the detail
    says how many were checked.
    """
    known = set(problem_texts(train))
    shared = [i for i, text in enumerate(problem_texts(heldout)) if text in known]
    if shared:
        detail = f"such as {_excerpt(heldout[shared[0]])}; take them out of one"
    else:
        among = "" if whole else f", but only {len(train)} training prompts were looked at, {_SAMPLED}"
        detail = f"no problem is in both{among}"
    return Finding("error" if shared else "ok", "eval", OVERLAP, len(shared), len(heldout), detail)


def problem_texts(prompts: Sequence[Prompt]) -> list[str]:
    """The normalised text of each problem, without the paragraphs that more than half of the prompts share.

    So an instruction such as "Solve the following problem" hides no problem from comparison.
    """
    split = [[normalise_text(part) for part in prompt.messages[-1]["content"].split("\n\n")] for prompt in prompts]
    shares = Counter(paragraph for paragraphs in split for paragraph in set(paragraphs))
    limit = len(prompts) / 2 if len(prompts) > 2 else len(prompts)
    own = [[paragraph for paragraph in paragraphs if shares[paragraph] <= limit] for paragraphs in split]
    return ["\n".join(kept or paragraphs) for kept, paragraphs in zip(own, split, strict=True)]


def _duplicates(name: str, prompts: Sequence[Prompt]) -> Finding:
    texts = problem_texts(prompts)
    answers: dict[str, set[str]] = {}
    for text, prompt in zip(texts, prompts, strict=True):
        answers.setdefault(text, set()).add(normalise_text(prompt.answer))
    torn = [text for text, given in answers.items() if len(given) > 1]
    if torn:
        example = _excerpt(prompts[texts.index(torn[0])])
        detail = f"of these, {len(torn)} problems have several answers, such as {example}"
    else:
        detail = "in files, `deduplicate: true` keeps one of each; a generator draws again what it drew before"
    repeated = len(prompts) - len(answers)
    return Finding("warning" if repeated else "ok", name, "duplicates", repeated, len(prompts), detail)


def _share(name: str, check: str, indices: list[int], prompts: Sequence[Prompt], detail: str) -> Finding:
    """An error where more than a hundredth of the prompts is concerned, else a warning."""
    level: Level = "ok" if not indices else "error" if len(indices) > _TOLERATED * len(prompts) else "warning"
    example = f"; such as prompt {prompts[indices[0]].index}: {_excerpt(prompts[indices[0]])}" if indices else ""
    return Finding(level, name, check, len(indices), len(prompts), detail + example)


def _excerpt(prompt: Prompt, length: int = 40) -> str:
    text = " ".join(prompt.messages[-1]["content"][:400].split())
    return repr(text if len(text) <= length else text[:length] + "…")
