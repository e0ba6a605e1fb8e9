r"""Answers in one spelling: Unicode, dollar signs, spacing commands and LaTeX variants are brought to one form."""

import re
import unicodedata

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_SUPERSCRIPT = re.compile(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+")
_VULGAR = re.compile(r"(?<=[0-9])(?=[¼½¾⅐-⅞])")
_SYMBOLS = {
    "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "⁄": "/", "∕": "/", "÷": "/",
    "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∗": "*", "π": r"\pi ", "∞": r"\infty ", "±": r"\pm ",
    "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∅": r"\emptyset ",
    "θ": r"\theta ", "°": r"^{\circ}", "º": r"^{\circ}", "ℝ": r"\mathbb{R}", "′": "'", "’": "'",
}  # fmt: skip
_ROOT = re.compile(r"√\s*(?:\(([^()]*)\)|\{([^{}]*)\}|([0-9]+|[A-Za-z]))")
_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(?<!\\)\\[!,;:> ]|~|\\(?:quad|qquad|displaystyle|limits|nolimits)(?![A-Za-z])", " "),
        (r"\\(?:left|right|bigl|bigr|Bigl|Bigr|big|Big)(?![A-Za-z])\s*", ""),
        (r"\\(?:d|t|c)frac(?![A-Za-z])", r"\\frac"),
        (r"\\(?:mathrm|textrm|textbf|textit|mathbf|mbox|textup|operatorname|mathsf|textnormal|rm|bf)\{", r"\\text{"),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\\(?:lparen|rparen)(?![A-Za-z])", ""),
        (r"\\leq(?![A-Za-z])|\\leqslant(?![A-Za-z])|<=", r"\\le "),
        (r"\\geq(?![A-Za-z])|\\geqslant(?![A-Za-z])|>=", r"\\ge "),
        (r"\\neq(?![A-Za-z])", r"\\ne "),
        (r"\\ast(?![A-Za-z])", "*"),
        (r"\\varnothing(?![A-Za-z])|\\\{\s*\\\}", r"\\emptyset "),
        (r"\^\s*\{?\s*\\(?:circ|degree)(?![A-Za-z])\s*\}?|\\degree(?![A-Za-z])", r"^{\\circ}"),
        (r"\{,\}", ","),
        (r"\\frac\s*([0-9])\s*([0-9])", r"\\frac{\1}{\2}"),
        (r"\\frac\s*([0-9])\s*\{", r"\\frac{\1}{"),
        (r"\\frac\s*\{([^{}]*)\}\s*([0-9])", r"\\frac{\1}{\2}"),
        (r"\\sqrt\s*([0-9A-Za-z])", r"\\sqrt{\1}"),
        (r"\\\$|[$€£¥]", ""),
        (r"\\#|\\&(?=\s*$)", ""),
    )
]
_TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
_DEGREES = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*\^\{\\circ\}")
_AND = re.compile(r",?\s*\\text\{\s*(?:and|or)\s*\}\s*|,?\s+(?:and|or)\s+|\s*;\s*")
_WRAPPER = re.compile(r"\\(?:text|boxed|fbox)\{([^{}]*)\}")


def normalise(answer: str) -> str:
    r"""`answer` in one spelling: `$` and `\( \)` gone, full-width digits and Unicode signs as ASCII or LaTeX,
    `\dfrac` as `\frac`, "and" as a comma, degrees in `\sin` and its kind as radians, one space at most and no
    trailing period."""
    text = _SUPERSCRIPT.sub(lambda match: f"^{{{match.group().translate(_SUPERSCRIPTS)}}}", answer)
    text = _VULGAR.sub(" ", text)
    text = "".join(_SYMBOLS.get(c, c) for c in text)
    text = "".join(_SYMBOLS.get(c, c) for c in unicodedata.normalize("NFKC", text))
    text = _ROOT.sub(lambda match: rf"\sqrt{{{next(g for g in match.groups() if g is not None)}}}", text)
    text = re.sub(r"\\[()\[\]](?![0-9a-z]*\])", "", text) if text.lstrip().startswith(("\\(", "\\[")) else text
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    if _TRIGONOMETRY.search(text):
        text = _DEGREES.sub(r"(\\frac{\1\\pi}{180})", text)
    text = _AND.sub(", ", _trim(text))
    if whole := _WRAPPER.fullmatch(text):
        text = _trim(whole.group(1))
    return text


def _trim(text: str) -> str:
    text = " ".join(text.split()).strip("*`").strip()
    text = text.rstrip(".,:").rstrip() if text[-1:] in (".", ",", ":") else text
    return re.sub(r"\s*([=<>])\s*|\s+(,)", r"\1\2", text)
