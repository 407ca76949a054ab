"""The confidence of a page: its mean token probability, and that of its least sure stretch."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from src.confidence import Confidence, page_confidence

SURE, UNSURE = math.log(0.9), math.log(0.1)
logprobs = st.floats(max_value=0.0, allow_nan=False)
pages = st.lists(logprobs, min_size=1, max_size=80)


def test_a_page_without_tokens_has_none() -> None:
    assert page_confidence([]) is None


def test_one_bad_line_shows_in_the_lowest_window_and_not_in_the_mean() -> None:
    confidence = page_confidence([SURE] * 400 + [UNSURE] * 16 + [SURE] * 400)
    assert confidence
    assert confidence.mean > 0.88
    assert confidence.lowest == pytest.approx(0.1)
    assert confidence.lowest_at == 400


def test_a_page_shorter_than_the_window_is_one_window() -> None:
    confidence = page_confidence([SURE, UNSURE])
    assert confidence
    assert confidence.lowest == confidence.mean == pytest.approx(0.5)
    assert confidence.lowest_at == 0


@pytest.mark.parametrize("logprob", [None, math.nan, -math.inf, -9999.0])
def test_what_is_no_probability_counts_as_none(logprob: float | None) -> None:
    assert page_confidence([logprob]) == Confidence(0.0, 0.0, 0)


def test_a_rounding_error_above_0_counts_as_certain() -> None:
    assert page_confidence([1e-7, 0.0]) == Confidence(1.0, 1.0, 0)


def test_a_window_has_at_least_one_token() -> None:
    with pytest.raises(ValueError, match="at least one token, not 0"):
        page_confidence([SURE], window=0)


@given(pages, st.integers(1, 100))
def test_both_are_probabilities(page: list[float], window: int) -> None:
    confidence = page_confidence(page, window)
    assert confidence
    assert 0.0 <= confidence.lowest <= 1.0
    assert 0.0 <= confidence.mean <= 1.0
    assert 0 <= confidence.lowest_at < len(page)


@given(pages, st.integers(1, 20))
def test_the_lowest_is_that_of_all_windows(page: list[float], window: int) -> None:
    width = min(window, len(page))
    means = [sum(map(math.exp, page[at : at + width])) / width for at in range(len(page) - width + 1)]
    confidence = page_confidence(page, window)
    assert confidence
    assert confidence.lowest == pytest.approx(min(means), abs=1e-9)
    assert means[confidence.lowest_at] == pytest.approx(min(means), abs=1e-9)


@given(logprobs, st.integers(1, 60))
def test_equal_tokens_give_their_own_probability(logprob: float, count: int) -> None:
    confidence = page_confidence([logprob] * count)
    assert confidence
    assert confidence.mean == pytest.approx(math.exp(logprob))
    assert confidence.lowest == pytest.approx(math.exp(logprob))


@given(pages, st.integers(0, 79))
def test_a_token_less_sure_raises_neither(page: list[float], at: int) -> None:
    worse = [*page]
    worse[at % len(page)] -= 1.0
    before, after = page_confidence(page), page_confidence(worse)
    assert before
    assert after
    assert after.mean <= before.mean + 1e-12
    assert after.lowest <= before.lowest + 1e-9
