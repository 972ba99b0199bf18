"""What a text says no to, counts, names and asks for at once, by plain English rules.

Rules and their edge cases are those of the NevIR study's English features (nevir notes, section 4); the expressions
are our own.
"""

from __future__ import annotations

import re

_APOSTROPHES = str.maketrans({"’": "'", "ʼ": "'"})

_CONTRACTED = (
    "ain't aren't can't couldn't didn't doesn't don't hadn't hasn't haven't isn't mightn't mustn't needn't shan't "
    "shouldn't wasn't weren't won't wouldn't"
)
_NEGATORS = {word: word for word in ("not", "no", "never", "neither", "nor", "without")}
_NEGATORS |= dict.fromkeys(["cannot", *_CONTRACTED.split()], "not")

_WORD = re.compile(r"[\w']+")
_GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?!\d)")
"""A number with thousands commas: 1,234 but neither 12,34 nor the end of 1.2,345."""

_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")

_ABBREVIATION = re.compile(
    r"\b(?:dr|mr|mrs|ms|prof|st|sr|jr|vs|etc|inc|ltd|dept|approx|e\.g|i\.e|[a-z])\.", re.IGNORECASE
)
"""Ends with a period that ends no clause: some abbreviations, and a single letter (U.S., J. Smith)."""

_INNER = re.compile(r"(?<=\d)\.(?=\d)")
_HELD_PERIOD, _HELD_COMMA = "\ue000", "\ue001"
"""Private-use characters that stand for protected punctuation while clauses are cut."""

_CUT = re.compile(
    r"[.,;:!?()\[\]{}\n\u2013\u2014\u3001\u3002\uff0c\uff1a\uff1b\uff01\uff1f]|\b(?:and|but|if)\b", re.IGNORECASE
)
_DENSE = re.compile(r"[^0-9a-z\u3400-\u4dbf\u4e00-\u9fff]+")


def negations(text: str) -> frozenset[str]:
    """The negating words of a text, whole words only; cannot and contractions with n't are "not".

    The three usual apostrophes are one. Hardly and barely do not negate, nor does a word that holds a negation.
    """
    words = _WORD.findall(text.translate(_APOSTROPHES).lower())
    return frozenset(_NEGATORS[word] for raw in words if (word := raw.strip("'")) in _NEGATORS)


def numbers(text: str) -> frozenset[str]:
    """The numbers of a text as written, decimals kept and thousands commas removed; signs are not read."""
    return frozenset(_NUMBER.findall(_ungrouped(text)))


def identifiers(text: str) -> frozenset[str]:
    """Lower-cased runs of letters, digits, periods, hyphens and underscores that hold a digit, ends trimmed."""
    found = (name.rstrip("._-") for name in _NAME.findall(_ungrouped(text.lower())))
    return frozenset(name for name in found if any("0" <= char <= "9" for char in name))


def clauses(text: str) -> tuple[str, ...]:
    """A text cut at punctuation and at and, but, if; decimals, grouped numbers, abbreviations and initials stay whole.

    Each clause is stripped; empty ones are left out.
    """
    held = _GROUPED.sub(lambda m: m[0].replace(",", _HELD_COMMA), text)
    held = _INNER.sub(_HELD_PERIOD, held)
    held = _ABBREVIATION.sub(lambda m: m[0].replace(".", _HELD_PERIOD), held)
    cut = (part.replace(_HELD_PERIOD, ".").replace(_HELD_COMMA, ",").strip() for part in _CUT.split(held))
    return tuple(part for part in cut if part)


def dense(text: str) -> str:
    """A text's lower-cased letters a–z, digits and CJK characters, with nothing between them: what n-grams are of."""
    return _DENSE.sub("", text.lower())


def ngrams(text: str, n: int) -> frozenset[str]:
    """The different runs of `n` characters of `dense(text)`."""
    run = dense(text)
    return frozenset(run[i : i + n] for i in range(len(run) - n + 1))


def _ungrouped(text: str) -> str:
    return _GROUPED.sub(lambda m: m[0].replace(",", ""), text)
