"""What a comparison found, as one object: the counts, distributions and rates that every report is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .compare import PageScores, RowMatch, distance_histogram, worst_decile_mean
from .error_rates import FloatArray, Interval, SideErrors, paired_bootstrap


@dataclass(frozen=True)
class ComparedSide:
    """One of the two results: where it comes from, and what its `inference_info` says about its making."""

    source: str
    split: str
    column: str
    rows: int
    tokens: int | None = None
    made_by: Sequence[str] = ()


@dataclass(frozen=True)
class MatchSummary:
    """Rows in both, and on one side only; the id lists are cut to the first few."""

    by: str
    both: int
    only_a: int
    only_b: int
    duplicate_ids_a: int
    duplicate_ids_b: int
    null_ids_a: int
    null_ids_b: int
    examples: Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class TextSummary:
    """How far apart the texts are, over the pages that have a text on both sides."""

    pages: int
    no_text_a: int
    no_text_b: int
    no_text_both: int
    identical: int
    equal_normalised: int
    similarity_mean: float | None
    similarity_median: float | None
    similarity_worst_decile_mean: float | None
    similarity_mean_missing_as_0: float | None
    distance_histogram: Sequence[int]
    characters_a: int
    characters_b: int
    length_ratio_median: float | None
    length_ratio_p5: float | None
    length_ratio_p95: float | None
    length_beyond_2x: int


@dataclass(frozen=True)
class ErrorSummary:
    """An error rate over pages: of the pages, and micro, that is all edits over all characters or words."""

    mean: float
    median: float
    micro: float


@dataclass(frozen=True)
class TruthSummary:
    """Both sides against the truth. A null text counts as an empty one."""

    source: str
    pages: int
    pages_without_truth: int
    pages_with_empty_truth: int
    cer_a: ErrorSummary
    cer_b: ErrorSummary
    wer_a: ErrorSummary
    wer_b: ErrorSummary
    cer_difference: Interval
    better_a: int
    better_b: int
    equal: int
    cer_histogram_a: Sequence[int]
    cer_histogram_b: Sequence[int]


@dataclass(frozen=True)
class WorstPage:
    """A page on which the two differ most; its texts are for the HTML page and not in the JSON."""

    page: str
    similarity: float | None
    length_a: int | None
    length_b: int | None
    status_a: str | None
    status_b: str | None
    error_a: str | None
    error_b: str | None
    first_difference: int | None
    excerpt_a: str
    excerpt_b: str
    text_a: str | None = field(repr=False)
    text_b: str | None = field(repr=False)
    cer_a: float | None = None
    cer_b: float | None = None


@dataclass(frozen=True)
class Comparison:
    """Everything that is reported."""

    a: ComparedSide
    b: ComparedSide
    normalisations: Sequence[str]
    match: MatchSummary
    texts: TextSummary
    statuses: Mapping[str, Mapping[str, int]]
    truth: TruthSummary | None
    worst: Sequence[WorstPage]


def summarise_match(match: RowMatch, by: str, examples: int = 5) -> MatchSummary:
    """The counts of a match, with the first few ids of each kind."""
    lists = {
        "only_a": match.only_a,
        "only_b": match.only_b,
        "duplicate_ids_a": match.duplicates_a,
        "duplicate_ids_b": match.duplicates_b,
    }
    return MatchSummary(
        by=by,
        both=len(match.rows_a),
        **{name: len(ids) for name, ids in lists.items()},
        null_ids_a=match.null_ids_a,
        null_ids_b=match.null_ids_b,
        examples={name: list(ids[:examples]) for name, ids in lists.items() if ids},
    )


def summarise_texts(scores: PageScores) -> TextSummary:
    """The distribution of similarities and lengths."""
    import numpy as np

    has_a, has_b = scores.length_a >= 0, scores.length_b >= 0
    both = has_a & has_b
    distance = scores.distance[both]
    penalty = scores.penalty()[has_a | has_b]
    length_a, length_b = scores.length_a[both], scores.length_b[both]
    filled = (length_a > 0) & (length_b > 0)
    ratio = length_b[filled] / length_a[filled]
    one_empty = (length_a > 0) != (length_b > 0)
    beyond = int(((ratio > 2) | (ratio < 0.5)).sum() + one_empty.sum())
    p5, median, p95 = (float(value) for value in np.quantile(ratio, (0.05, 0.5, 0.95))) if len(ratio) else (None,) * 3
    return TextSummary(
        pages=int(both.sum()),
        no_text_a=int((~has_a & has_b).sum()),
        no_text_b=int((has_a & ~has_b).sum()),
        no_text_both=int((~has_a & ~has_b).sum()),
        identical=int(scores.identical.sum()),
        equal_normalised=int(scores.equal_normalised.sum()),
        similarity_mean=1 - float(distance.mean()) if len(distance) else None,
        similarity_median=1 - float(np.median(distance)) if len(distance) else None,
        similarity_worst_decile_mean=1 - worst_decile_mean(distance) if len(distance) else None,
        similarity_mean_missing_as_0=1 - float(penalty.mean()) if len(penalty) else None,
        distance_histogram=distance_histogram(distance),
        characters_a=int(length_a.sum()),
        characters_b=int(length_b.sum()),
        length_ratio_median=median,
        length_ratio_p5=p5,
        length_ratio_p95=p95,
        length_beyond_2x=beyond,
    )


def summarise_truth(scores: PageScores, source: str, resamples: int, seed: int) -> TruthSummary:
    """Error rates of each side and the interval of their difference; at least one page must have a truth."""
    errors_a, errors_b = scores.errors_a, scores.errors_b
    cer_a, cer_b = errors_a.cer(), errors_b.cer()
    return TruthSummary(
        source=source,
        pages=len(cer_a),
        pages_without_truth=int((~scores.has_truth).sum()),
        pages_with_empty_truth=int((errors_a.characters == 0).sum()),
        cer_a=_error_summary(cer_a, errors_a, words=False),
        cer_b=_error_summary(cer_b, errors_b, words=False),
        wer_a=_error_summary(errors_a.wer(), errors_a, words=True),
        wer_b=_error_summary(errors_b.wer(), errors_b, words=True),
        cer_difference=paired_bootstrap(cer_a - cer_b, resamples, seed),
        better_a=int((cer_a < cer_b).sum()),
        better_b=int((cer_b < cer_a).sum()),
        equal=int((cer_a == cer_b).sum()),
        cer_histogram_a=distance_histogram(cer_a),
        cer_histogram_b=distance_histogram(cer_b),
    )


def _error_summary(rates: FloatArray, errors: SideErrors, words: bool) -> ErrorSummary:
    import numpy as np

    edits, total = (errors.word_edits, errors.words) if words else (errors.character_edits, errors.characters)
    micro = float(edits.sum()) / max(1, int(total.sum()))
    return ErrorSummary(mean=float(rates.mean()), median=float(np.median(rates)), micro=micro)


def cross_table(pairs: Mapping[tuple[str, str], int]) -> dict[str, dict[str, int]]:
    """Counts by A's status, then by B's."""
    table: dict[str, dict[str, int]] = {}
    for (status_a, status_b), count in sorted(pairs.items()):
        table.setdefault(status_a, {})[status_b] = count
    return table
