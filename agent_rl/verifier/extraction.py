r"""Which piece of a text is its answer. Every rule takes time linear in the text."""

import re
from collections.abc import Sequence
from typing import Literal

Rule = Literal["boxed", "answer_is", "hashes", "last_line"]
RULES: tuple[Rule, ...] = ("boxed", "answer_is", "hashes", "last_line")

_BOXED = r"\boxed{"
_ANSWER_IS = re.compile(r"\banswer\b(?:[ \t]*(?:is\b[ \t]*:?|[:=])|:?\*\*:?)", re.IGNORECASE)
_MATH = re.compile(r"\$\$?(.+?)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_SENTENCE_END = re.compile(r"[.!](?=\s|$)")
_TEXT = re.compile(r"\\(?:text|mathrm|mbox)\{[^{}]*\}")
_PROSE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}[,:;]?\s+[A-Za-z]{2,}")
_LONGEST_LINE = 200


def extract_answer(text: str, rules: Sequence[Rule] = RULES) -> str | None:
    r"""The answer by the first of `rules` whose mark stands in the text; None if none does.

    boxed: the content of the last `\boxed{…}`, nested braces included; a last box that is never closed is no
    answer, and the later rules are not tried. answer_is: after the last "answer is", "answer:" or "answer =", the
    formula that begins there, or else the sentence. hashes: the line after the last `####`. last_line: the last
    line that is not empty, unless it is prose or over 200 characters long.
    """
    readers = {"boxed": _boxed, "answer_is": _answer_is, "hashes": _hashes, "last_line": _last_line}
    for rule in rules:
        marked, answer = readers[rule](text)
        if marked:
            return answer
    return None


def _boxed(text: str) -> tuple[bool, str | None]:
    start = text.rfind(_BOXED)
    if start < 0:
        return False, None
    begin = start + len(_BOXED)
    depth = 1
    for match in re.finditer(r"\\.|[{}]", text[begin:], re.DOTALL):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0:
            return True, text[begin : begin + match.start()]
    return True, None


def _answer_is(text: str) -> tuple[bool, str | None]:
    ends = [match.end() for match in _ANSWER_IS.finditer(text)]
    if not ends:
        return False, None
    rest = text[ends[-1] :].lstrip(" \t\r\n:*")
    if formula := _MATH.match(rest):
        return True, next(group for group in formula.groups() if group is not None)
    return True, _sentence(rest.partition("\n")[0])


def _hashes(text: str) -> tuple[bool, str | None]:
    _, mark, rest = text.rpartition("####")
    return bool(mark), _strip(rest.strip().partition("\n")[0])


def _last_line(text: str) -> tuple[bool, str | None]:
    line = text.rstrip().rpartition("\n")[2]
    plain = 0 < len(line) <= _LONGEST_LINE and not _PROSE.search(_TEXT.sub("", line))
    return plain, _strip(line) if plain else None


def _sentence(line: str) -> str:
    end = _SENTENCE_END.search(line)
    return _strip(line[: end.start()] if end else line)


def _strip(answer: str) -> str:
    return answer.strip().strip("*`").strip()
