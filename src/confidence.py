"""How sure the engine was of a page: from the log probabilities of its tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

WINDOW_TOKENS = 16


@dataclass(frozen=True)
class Confidence:
    """Token probabilities of a page, 0 to 1: their mean, and the mean of the least sure window of neighbours.

    `lowest_at` is the index of that window's first token. A page may read well on the whole and have one bad line: the
    mean hides it, the window shows it. (On a page of few windows, `lowest` may lie above `mean`: the tokens at the ends
    stand in fewer windows.)
    """

    mean: float
    lowest: float
    lowest_at: int


def page_confidence(logprobs: Sequence[float | None], window: int = WINDOW_TOKENS) -> Confidence | None:
    """Return the confidence of a page whose tokens have these log probabilities; None where there is none.

    Fewer tokens than `window` are one window. What is no log probability is read cautiously: None and NaN count as
    probability 0, like vLLM's -9999 and -inf; a rounding error above 0 counts as 1.
    """
    if window < 1:
        raise ValueError(f"a window has at least one token, not {window}")
    chances = [_probability(logprob) for logprob in logprobs]
    if not chances:
        return None
    width = min(window, len(chances))
    sums = list(accumulate(chances, initial=0.0))
    means = [(sums[at + width] - sums[at]) / width for at in range(len(chances) - width + 1)]
    lowest_at = min(range(len(means)), key=means.__getitem__)
    mean = math.fsum(chances) / len(chances)
    lowest = math.fsum(chances[lowest_at : lowest_at + width]) / width
    return Confidence(mean=mean, lowest=lowest, lowest_at=lowest_at)


def _probability(logprob: float | None) -> float:
    if logprob is None or math.isnan(logprob):
        return 0.0
    return math.exp(min(logprob, 0.0))
