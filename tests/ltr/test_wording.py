"""The English rules of the features: negation, numbers, identifiers, clauses."""

from __future__ import annotations

import pytest

from pd_rerank.ltr.wording import clauses, dense, identifiers, negations, ngrams, numbers
from tests.designated import vectors


@pytest.mark.parametrize(
    ("kind", "rule"), [("negation", negations), ("numbers", numbers), ("identifiers", identifiers)]
)
def test_every_english_vector_of_sets_is_reproduced(kind, rule) -> None:  # type: ignore[no-untyped-def]
    rows = vectors("nevir_unit")["english_rules"][kind]
    assert rows
    assert [(text, sorted(rule(text))) for text, _ in rows] == [(text, want) for text, want in rows]


def test_every_english_vector_of_clauses_is_reproduced() -> None:
    rows = vectors("nevir_unit")["english_rules"]["clauses"]
    assert [(text, list(clauses(text))) for text, _ in rows] == [(text, want) for text, want in rows]


def test_negation_is_of_whole_words_with_any_apostrophe() -> None:
    assert negations("She can't, won’t and doesnʼt; cannot!") == {"not"}
    assert negations("'no' said he, neither more nor less") == {"no", "neither", "nor"}
    assert negations("knots, another, nowhere, cant") == frozenset()


def test_numbers_keep_decimals_and_lose_thousands_commas() -> None:
    assert numbers("1,234,567 of 12,34 and 0.5") == {"1234567", "12", "34", "0.5"}
    assert numbers("2,026, 3,1") == {"2026", "3", "1"}
    assert numbers("") == frozenset()


def test_identifiers_hold_a_digit_and_no_trailing_punctuation() -> None:
    assert identifiers("Boeing 747-8... and F_16-; no-digit") == {"747-8", "f_16"}


def test_clauses_keep_abbreviations_and_initials_whole() -> None:
    assert clauses("Mr. J. Smith left; Mrs. Lee stayed") == ("Mr. J. Smith left", "Mrs. Lee stayed")
    assert clauses("...") == ()
    assert clauses("It cost 1,234 and no more") == ("It cost 1,234", "no more")


def test_ngrams_are_of_letters_digits_and_cjk_only() -> None:
    assert dense("A-b, é 1 中文!") == "ab1中文"
    assert ngrams("A b1", 2) == {"ab", "b1"}
    assert ngrams("a", 2) == frozenset()
