r"""The exact value of what is written as one number: integer, decimal, fraction, mixed, recurring, scientific."""

import re
from fractions import Fraction

_D = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
_THOUSANDS = re.compile(r"[+-]?[0-9]{1,3}(?:(?:,[0-9]{3})+|(?: [0-9]{3})+|(?:, [0-9]{3})+(?=\.))(?:\.[0-9]*)?")
_DECIMAL = re.compile(_D)
_RATIO = re.compile(rf"\\frac\{{\s*([+-]?)\s*({_D})\s*\}}\{{\s*([+-]?)\s*({_D})\s*\}}|({_D})\s*/\s*([+-]?)({_D})")
_MIXED = re.compile(r"([0-9]+)\s*(?:\\frac\{([0-9]+)\}\{([0-9]+)\}|\s([0-9]+)/([0-9]+))")
_RECURRING = re.compile(r"([0-9]*)\.([0-9]*)(?:\\overline\{([0-9]+)\}|\\bar\{([0-9]+)\}|\\dot\{([0-9])\}|\(([0-9]+)\))")
_SCIENTIFIC = re.compile(
    rf"(?:({_D})\s*(?:\\times|\\cdot|\*|x)\s*)?10\s*\^\s*\{{?\s*([+-]?[0-9]{{1,4}})\s*\}}?|({_D})[eE]([+-]?[0-9]{{1,4}})"
)
_SIGN = re.compile(r"[+-]\s*")
_MAX_EXPONENT = 400
"""Larger powers of ten are left to the verifier processes: a Fraction would build the integer."""


def parse_number(text: str) -> Fraction | None:
    r"""The value of a number in the spelling of `normalise`, else None: `1,234`, `-3 1/2`, `0.1\overline{6}`, `2e5`."""
    sign = 1
    while match := _SIGN.match(text):
        sign *= -1 if text[0] == "-" else 1
        text = text[match.end() :]
    if text.startswith("(") and text.endswith(")") and text.count("(") == 1:
        inner = parse_number(text[1:-1].strip())
        return None if inner is None else sign * inner
    value = _unsigned(text.replace(",", "").replace(" ", "") if _THOUSANDS.fullmatch(text) else text)
    return None if value is None else sign * value


def _unsigned(text: str) -> Fraction | None:
    if _DECIMAL.fullmatch(text):
        return Fraction(text)
    if match := _RATIO.fullmatch(text):
        s1, n1, s2, d1, n2, s3, d2 = match.groups()
        top, bottom = Fraction(f"{s1 or ''}{n1 or n2}"), Fraction(f"{s2 or s3 or ''}{d1 or d2}")
        return top / bottom if bottom else None
    if match := _MIXED.fullmatch(text):
        whole, *rest = match.groups()
        top, bottom = (Fraction(g) for g in rest if g is not None)
        return Fraction(whole) + top / bottom if bottom else None
    if match := _RECURRING.fullmatch(text):
        return _recurring(match.group(1), match.group(2), next(g for g in match.groups()[2:] if g is not None))
    if match := _SCIENTIFIC.fullmatch(text):
        exponent = int(match.group(2) or match.group(4))
        if abs(exponent) <= _MAX_EXPONENT:
            return Fraction(match.group(1) or match.group(3) or 1) * Fraction(10) ** exponent
    return None


def _recurring(whole: str, fixed: str, cycle: str) -> Fraction:
    head = Fraction(int(whole + fixed or "0"), 10 ** len(fixed))
    return head + Fraction(int(cycle), (10 ** len(cycle) - 1) * 10 ** len(fixed))
