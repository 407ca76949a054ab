"""What is asked of a page whose text is not sound depends on page and attempt alone; the best text is kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from src.attempts import BEST_FIRST, better, next_attempt
from src.question import Attempt, Question, first_attempt, page_seed
from src.result import STATUSES, PageResult

QUESTION = Question("", temperature=0.2, top_p=0.9, max_tokens=4096, seed=7, chat_template_kwargs={})
LINE = "The mill stands by the river. "


def result(status: str = "ok", text: str | None = "text") -> PageResult:
    return PageResult(None if status == "error" else text, status)


def test_attempt_0_is_the_page_s_own_question() -> None:
    assert next_attempt(QUESTION, 5, 0, "ok", 9000) == Attempt(0.2, page_seed(7, 5), 4096)


def test_an_attempt_has_another_seed_and_is_warmer() -> None:
    attempts = [next_attempt(QUESTION, 5, number, "repetition", 12_000) for number in range(5)]
    assert [attempt.temperature for attempt in attempts] == [0.2, 0.4, 0.6, 0.8, 0.8]
    assert len({attempt.seed for attempt in attempts}) == 5
    assert {attempt.max_tokens for attempt in attempts} == {4096}


@pytest.mark.parametrize(
    ("attempt", "context_left", "max_tokens"),
    [(1, 14_000, 8192), (2, 14_000, 14_000), (1, 5000, 5000), (1, 3000, 4096), (1, None, 4096)],
)
def test_a_truncated_page_may_say_more_where_the_context_allows(
    attempt: int, context_left: int | None, max_tokens: int
) -> None:
    assert next_attempt(QUESTION, 5, attempt, "truncated", context_left).max_tokens == max_tokens


def test_without_max_tokens_the_context_is_the_only_limit() -> None:
    question = Question("", 0.1, 1.0, None, 7, {})
    assert next_attempt(question, 5, 1, "truncated", 9000).max_tokens is None


def test_a_question_that_is_warm_already_stays_as_warm() -> None:
    assert next_attempt(Question("", 1.2, 1.0, None, 7, {}), 5, 1, "repetition").temperature == 1.2


@given(st.integers(0, 2**31), st.integers(0, 10**7), st.integers(0, 10))
def test_a_seed_fits_31_bits_and_depends_on_nothing_else(seed: int, row: int, attempt: int) -> None:
    assert 0 <= page_seed(seed, row, 0, attempt) < 2**31
    assert page_seed(seed, row, 0, attempt) == page_seed(seed, row, 0, attempt)


def test_the_seeds_of_pages_frames_and_attempts_are_apart() -> None:
    seeds = {page_seed(7, row, frame, attempt) for row in range(50) for frame in range(10) for attempt in range(4)}
    assert len(seeds) > 1990


def test_a_frame_is_asked_again_with_seeds_of_its_own() -> None:
    assert first_attempt(QUESTION, 5) == Attempt(0.2, page_seed(7, 5), 4096)
    assert first_attempt(QUESTION, 5, 2).seed == page_seed(7, 5, 2) != page_seed(7, 5)
    assert next_attempt(QUESTION, 5, 1, "repetition", frame=2).seed == page_seed(7, 5, 2, 1)


# The better of two

statuses = st.sampled_from(BEST_FIRST)
page_results = st.builds(result, statuses, st.sampled_from(["", "a", "ab", LINE * 50, "Of mills. " + LINE * 50]))


def test_every_status_has_its_rank() -> None:
    assert set(BEST_FIRST) == set(STATUSES)


@given(page_results, page_results)
def test_the_better_status_wins_whichever_came_first(a: PageResult, b: PageResult) -> None:
    first = min(a.status, b.status, key=BEST_FIRST.index)
    assert better(a, b).status == better(b, a).status == first


@given(page_results, page_results, page_results)
def test_the_best_of_three_does_not_depend_on_the_pairing(a: PageResult, b: PageResult, c: PageResult) -> None:
    assert better(better(a, b), c) == better(a, better(b, c))


def test_of_two_ok_attempts_the_earlier_is_kept() -> None:
    assert better(result(text="a"), result(text="longer")).text == "a"


def test_of_two_truncated_attempts_the_longer_is_kept() -> None:
    assert better(result("truncated", "a"), result("truncated", "longer")).text == "longer"


def test_of_two_loops_the_one_with_more_before_it_is_kept() -> None:
    early, late = LINE * 200, "Of the mills in this parish, one burnt down. " + LINE * 100
    assert better(result("repetition", early), result("repetition", late)).text == late
