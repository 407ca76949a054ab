"""Which pages are asked again for a better text, how, and which of the texts is kept."""

from __future__ import annotations

from .loops import find_loop
from .question import Attempt, Question, page_seed
from .result import PageResult

ASKED_AGAIN = frozenset({"truncated", "repetition"})
WARMER_EACH_TIME = 0.2
WARMEST = 0.8
BEST_FIRST = ("ok", "blank", "truncated", "repetition", "error")


def next_attempt(
    question: Question,
    row: int,
    attempt: int,
    last_status: str,
    context_left: int | None = None,
    frame: int = 0,
) -> Attempt:
    """Return how to ask about the page in `row` for the `attempt`-th time after the first, which was attempt 0.

    Another seed; a higher temperature, up to `WARMEST` (a question warmer than that stays as warm); after a truncation
    twice the tokens, four times, … as far as `context_left`, the context less the prompt, is known to allow. A function
    of its arguments alone, so that offline, served and resumed runs ask the same.
    """
    warmer = min(WARMEST, question.temperature + WARMER_EACH_TIME * attempt)
    most = question.max_tokens
    if last_status == "truncated" and most is not None and context_left is not None:
        most = max(most, min(most * 2**attempt, context_left))
    return Attempt(
        temperature=round(max(question.temperature, warmer), 4),
        seed=page_seed(question.seed, row, frame, attempt),
        max_tokens=most,
    )


def better(a: PageResult, b: PageResult) -> PageResult:
    """Return the better of two attempts at a page; the earlier one, `a`, where nothing speaks for `b`.

    By status: ok, truncated, repetition, error. Between two truncated texts the longer one; between two that loop the
    one that has more before the loop. Of two ok ones the earlier: its sampling is the nearer to the model's own.
    """
    return max(a, b, key=_merit)


def _merit(result: PageResult) -> tuple[int, int]:
    text = result.text or ""
    rank = -BEST_FIRST.index(result.status)
    if result.status == "truncated":
        return rank, len(text)
    if result.status == "repetition":
        loop = find_loop(text, finished=False)
        return rank, loop.start if loop else len(text)
    return rank, 0
