"""The exact path: what can be decided without computer algebra is decided here, the rest becomes a question."""

import re
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

from agent_rl.verifier.normal import normalise
from agent_rl.verifier.numbers import parse_number

_INTEGER = re.compile(r"-?[0-9]{1,1000}")
_VARIABLE = re.compile(r"((?:[A-Za-z](?:_(?:\{\w+\}|\w))?|\\[a-z]+|\\text\{[^{}]*\})(?:\([a-z]\))?)=(?!=)")
_MEMBER = re.compile(r"[a-z]\s*\\in(?![a-z])\s*")
_BASE = re.compile(r"\(?([0-9A-Za-z]+)\)?_(?:\{?\s*(?:\\text\{)?\(?\s*([0-9]+|[a-z]+)\s*\)?\}?\}?)")
_BASE_NAMES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10,
               "twelve": 12, "sixteen": 16}  # fmt: skip
_PERCENT = re.compile(r"\s*(?:\\?%|\\text\{\s*(?:\\?%|percent)\s*\}|percent)")
_UNIT_WORDS = (
    r"(?:square |cubic |sq\.? )?(?:[cmk]?m|in|ft|yd|km|kg|g|mg|lb|oz|s|ms|h|hr|min|mph|inch(?:es)?|f(?:oo|ee)t|yards?"
    r"|miles?|(?:centi|milli|kilo)?(?:met(?:er|re)|gram|lit(?:er|re))s?|pounds?|ounces?|seconds?|minutes?|hours?|days?"
    r"|weeks?|months?|years?|dollars?|cents?|euros?|degrees?|radians?|units?|people|students?|ways|times|points?"
    r"|thousand|million|billion|trillion)"
)
_UNIT = re.compile(
    rf"\s*(?:\\text\{{([^{{}}]*)\}}|\^\{{\\circ\}}|(?<=[0-9}}\s])({_UNIT_WORDS}))(?:\s*\^\s*\{{?([23])\}}?)?", re.I
)
_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_TAIL = 60
"""How many last characters are searched for a unit."""
_CHOICE = re.compile(r"\(?([A-J])\)?(?:[.):].*)?", re.DOTALL)
_LETTER = re.compile(r"\(?([A-J])\)?")
_WORDS = re.compile(r"[A-Za-z][A-Za-z' -]{3,}")
_WORD = re.compile(r"[A-Za-z][A-Za-z' -]+")
_OPEN, _CLOSE = {"(": ")", "[": "]", r"\{": r"\}"}, (")", "]", r"\}")
_UNORDERED = {"", "{}"}  # the brackets, none or braces, of lists whose order says nothing
_TOKEN = re.compile(r"\\[{}]|\\[A-Za-z]+|\\.|.", re.DOTALL)


@dataclass(frozen=True)
class Question:
    """A question for computer algebra: are these expressions equal, one by one or, if not `ordered`, as a set?"""

    reference: tuple[str, ...]
    answer: tuple[str, ...]
    ordered: bool


@dataclass(frozen=True)
class Item:
    """One expression without what may be left off it: `x =`, a unit, a percent sign, the base of its digits."""

    text: str
    value: Fraction | None
    variable: str | None = None
    unit: str | None = None
    percent: bool = False
    base: int | None = None
    whole: str = ""


def compare(reference: str, answer: str) -> bool | Question:
    """Whether `answer` is `reference`, or the question that is left.

    Two exact numbers are equal or not: 0.333 is not 1/3. Units, `x =` and a base may be left off on one side; on
    both sides they must agree. 50 % is 0.5 and also 50, but 0.5 % is not 0.5. Order matters in tuples and intervals,
    not in sets and bare lists.
    """
    if _INTEGER.fullmatch(reference) and _INTEGER.fullmatch(answer):  # most pairs, which need no reading
        return int(reference) == int(answer)
    left, right = normalise(reference), normalise(answer)
    if left == right:
        return bool(left)
    if not left or not right:
        return False
    if letter := _LETTER.fullmatch(left):
        choice = _CHOICE.fullmatch(right)
        return choice is not None and choice.group(1) == letter.group(1)
    if _WORDS.fullmatch(left) and (_WORD.fullmatch(right) or parse_number(right) is not None):
        return left.casefold() == right.casefold()
    if parse_number(left) is not None and _WORD.fullmatch(right):
        return False
    return _compare_lists(split(left), split(right), left, right)


def split(text: str) -> tuple[str, list[str]]:
    r"""(brackets, elements) of a list: brackets "", "()", "[)", "{}" and so on; a lone expression has one element.

    `2 \pm 1` outside of a tuple stands for both of its values.
    """
    text = _MEMBER.sub("", text, count=1) if _MEMBER.match(text) else text
    if parse_number(text) is not None:
        return "", [text]
    brackets, inner = _unwrap(text)
    elements = _at_commas(inner)
    if brackets and len(elements) == 1 and not (brackets == "{}" and not re.search(r"\\mid|[|:]", inner)):
        brackets, elements = "", [inner if brackets == "()" else text]
    if brackets in ("", "{}"):
        elements = [sign for element in elements for sign in _plus_minus(element)]
    return brackets, elements


def _unwrap(text: str) -> tuple[str, str]:
    """Brackets around the whole of `text`, and what is in them; ("", text) if there are none."""
    opening = r"\{" if text.startswith(r"\{") else text[:1]
    closing = r"\}" if text.endswith(r"\}") else text[-1:]
    if opening not in _OPEN or closing not in _CLOSE or (opening == r"\{") != (closing == r"\}"):
        return "", text
    inner = text[len(opening) : len(text) - len(closing)]
    depth = 0
    for token in _TOKEN.findall(inner):
        depth += (token in _OPEN) - (token in _CLOSE)
        if depth < 0:
            return "", text
    return (opening + closing).replace("\\", ""), inner.strip()


def _at_commas(text: str) -> list[str]:
    parts, depth, current = list[str](), 0, list[str]()
    for token in _TOKEN.findall(text):
        depth += (token in _OPEN or token == "{") - (token in _CLOSE or token == "}")
        if token == "," and depth == 0:
            parts.append("".join(current).strip())
            current = []
        else:
            current.append(token)
    return [*parts, "".join(current).strip()]


def _plus_minus(element: str) -> list[str]:
    if element.count(r"\pm") != 1:
        return [element]
    before, _, after = element.partition(r"\pm")
    lead = before.strip()
    plus = "" if not lead or lead.endswith("=") else "+"
    return [f"{lead}{plus}{after.strip()}", f"{lead}-{after.strip()}"]


def _compare_lists(
    reference: tuple[str, list[str]], answer: tuple[str, list[str]], whole: str, given: str
) -> bool | Question:
    (left_kind, left), (right_kind, right) = (_plain(*reference), _plain(*answer))
    ordered = not {left_kind, right_kind} <= _UNORDERED
    left_lone, right_lone = not left_kind and len(left) == 1, not right_kind and len(right) == 1
    if ordered and left_lone != right_lone:
        number = parse_number(whole if left_lone else given)
        return False if number is not None else Question((whole,), (given,), ordered=True)
    if ordered and _brackets_disagree(left_kind, right_kind):
        return False
    left, right = (items if ordered else list(dict.fromkeys(items)) for items in (left, right))
    if len(left) != len(right):
        # A lone expression that is no number may stand for several values, as a formula with a sign does.
        single = next((items[0] for items in (left, right) if len(items) == 1), None)
        if single is None or read_item(single).value is not None:
            return False
        return Question((whole,), (given,), ordered=True)
    return _compare_items([read_item(t) for t in left], [read_item(t) for t in right], ordered)


def _brackets_disagree(left: str, right: str) -> bool:
    """Of two ordered lists; one that is written without brackets is a tuple, never an interval."""
    return (left or "()") != (right or "()")


def _plain(brackets: str, elements: list[str]) -> tuple[str, list[str]]:
    """Brackets and elements, with those of a tuple for three or more elements, which are no interval."""
    return ("()" if len(elements) > 2 and brackets not in ("", "{}") else brackets), elements


def _compare_items(left: list[Item], right: list[Item], ordered: bool) -> bool | Question:
    if ordered or len(left) == 1:
        verdicts = [item_equal(a, b) for a, b in zip(left, right, strict=True)]
        if False in verdicts:
            return False
        open_pairs = [(a, b) for a, b, known in zip(left, right, verdicts, strict=True) if known is None]
        if not open_pairs:
            return True
        texts = [_texts(a, b) for a, b in open_pairs]
        return Question(tuple(a for a, _ in texts), tuple(b for _, b in texts), ordered=True)
    values = [[item.value for item in items] for items in (left, right)]
    if None not in values[0] and None not in values[1]:
        return Counter(values[0]) == Counter(values[1])
    return Question(tuple(i.text for i in left), tuple(i.text for i in right), ordered=False)


def item_equal(reference: Item, answer: Item) -> bool | None:
    """Whether two items are equal; None if that takes algebra."""
    if reference.variable and answer.variable and reference.variable != answer.variable:
        return None
    if reference.unit and answer.unit and reference.unit != answer.unit:
        return False
    if reference.text == answer.text and reference.percent == answer.percent and reference.base == answer.base:
        return True
    if reference.base and answer.base:
        return _in_base(reference) == _in_base(answer)
    if reference.base or answer.base:
        return reference.text == answer.text
    if reference.value is None or answer.value is None:
        return None
    if reference.percent != answer.percent:
        percent, other = (reference, answer) if reference.percent else (answer, reference)
        assert percent.value is not None
        return other.value == percent.value / 100 or (other.value == percent.value and abs(percent.value) >= 1)
    return reference.value == answer.value


def _texts(reference: Item, answer: Item) -> tuple[str, str]:
    """The texts to compare: whole equations, unless they give the same unknown or only one side is an equation."""
    if reference.variable != answer.variable and "=" in reference.whole and "=" in answer.whole:
        return reference.whole, answer.whole
    if reference.percent != answer.percent:
        return tuple(item.text + (r"\%" if item.percent else "") for item in (reference, answer))  # type: ignore[return-value]
    return reference.text, answer.text


def _in_base(item: Item) -> int | str:
    try:
        return int(item.text, item.base or 10)
    except ValueError:
        return item.text


def read_item(whole: str) -> Item:
    """An expression taken apart; `value` is set where it is one exact number."""
    text, variable = whole, None
    if match := _VARIABLE.match(text):
        variable, text = match.group(1), text[match.end() :].strip()
    if (match := _BASE.fullmatch(text)) and (base := _base(match.group(2))):
        return Item(match.group(1).upper(), None, variable, base=base, whole=whole)
    start = max(len(text) - _TAIL, 0)
    found = [m for pattern in (_PERCENT, _UNIT) if (m := _suffix(pattern, text, start))]
    percent, unit, scale = False, None, 1
    if found:
        match = found[0]
        text, percent = text[: match.start()].strip(), match.re is _PERCENT
        unit = None if percent else _unit(match)
        scale = _SCALES.get(unit or "", 1)
        unit = unit if scale == 1 else None
    value = parse_number(text)
    if scale != 1:
        text, value = (rf"({text})\cdot {scale}", value * scale if value is not None else None)
    return Item(text, value, variable, unit, percent, whole=whole)


def _suffix(pattern: re.Pattern[str], text: str, start: int) -> re.Match[str] | None:
    """The match of `pattern` that ends `text` and leaves something before it."""
    matches = (m for m in pattern.finditer(text, max(start, 1)) if m.end() == len(text))
    return next((m for m in matches if text[: m.start()].strip()), None)


def _base(name: str) -> int | None:
    base = _BASE_NAMES.get(name) if name.isalpha() else int(name[:3])
    return base if base is not None and 2 <= base <= 36 else None


_LONG_UNITS = {"centimeter": "cm", "millimeter": "mm", "kilometer": "km", "meter": "m", "gram": "g", "kilogram": "kg",
               "inche": "in", "inch": "in", "feet": "ft", "foot": "ft", "second": "s", "minute": "min", "hour": "h",
               "hr": "h", "pound": "lb", "liter": "l", "yard": "yd", "^circ": "degree"}  # fmt: skip


def _unit(match: re.Match[str]) -> str:
    """A unit in one spelling: singular, short, with its power."""
    name = (match.group(1) or match.group(2) or "degree").strip().casefold().rstrip(".").replace("metre", "meter")
    power = match.group(3) or ""
    for word, exponent in (("square ", "2"), ("sq. ", "2"), ("sq ", "2"), ("cubic ", "3")):
        if name.startswith(word):
            name, power = name.removeprefix(word), exponent
    if (shape := re.fullmatch(r"(.*?)\s*\^?\{?([23])\}?", name)) and shape.group(1):
        name, power = shape.group(1), shape.group(2)
    name = name.removesuffix("s") if len(name) > 2 else name
    return _LONG_UNITS.get(name, name) + power
