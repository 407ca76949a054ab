# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "datasets>=5.2.0",
#     "huggingface_hub>=2.4.0",
#     "jiwer>=4.0.0",
#     "rapidfuzz>=3.14.6",
# ]
# ///
"""Compare two OCR results page by page: what is the same, how far the rest is apart, which is nearer the truth.

    uv run lighton-ocr-parity.py offline-result served-result --html parity.html
    uv run lighton-ocr-parity.py me/scans-v2 me/scans-v3@main --id-column page_id
    uv run lighton-ocr-parity.py me/both me/both --column-a markdown --column-b tesseract --truth transcript

A and B are each a Hub dataset id (`id` or `id@revision`), a folder of a dataset, a parquet file, or what save_to_disk
wrote. Only the columns of text are read: from the Hub too, the pictures stay where they are. Rows belong together by
their number, or by `--id-column`. The table goes to stdout, progress to stderr; nothing is written but `--json` and
`--html`.

A page without text (null) is an error row, not an empty page: it is counted apart and is not in the similarities;
against a truth it counts as empty text.
"""

# Built from src/parity.py and the rooms below by tools/build.py: edit those, not this file.
#
#   error_rates: How far texts are from the truth: edits, CER and WER, and the interval of a difference between two
#       sides.
#   normalise: What may be made equal before two texts are compared, by name.
#   compare: Two columns of text, page by page: which rows belong together, and how far they are apart.
#   errors: The errors that end a run, and the exit code of each.
#   findings: What a comparison found, as one object: the counts, distributions and rates that every report is made of.
#   visible: Text from anywhere, made harmless: on one line, and unable to steer a terminal.
#   diff: Where two texts part: as an excerpt of each, and as aligned lines with the changes marked.
#   parity_text: A comparison in words and numbers: as a table for a terminal, and as JSON.
#   parity_html: A comparison as one HTML page that needs nothing else.
#   parity_options: The command line of a comparison: two results, a truth, and what is reported.
#   splits: The splits of a dataset: which one is read, and the one that save_to_disk wrote.
#   parity_source: Reading one of two results: its columns of text, from the Hub or a disk, without its pictures.
#   parity_pages: The pages that two results have in common: their texts, some at a time, and those furthest apart.

from __future__ import annotations

import argparse
import difflib
import heapq
import html
import json
import math
import re
import sys
import tempfile
import textwrap
import time
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# ---- error_rates -----------------------------------------------------------------------------------------------------
# How far texts are from the truth: edits, CER and WER, and the interval of a difference between two sides.


FloatArray: TypeAlias = "NDArray[np.float64]"
IntArray: TypeAlias = "NDArray[np.int64]"

BOOTSTRAP_WORK = 300_000_000  # pages drawn in all: a few seconds; a million pages need no more than 1,000 resamples


def edit_distances(texts_a: Sequence[str], texts_b: Sequence[str]) -> IntArray:
    """The Levenshtein distance of each pair, in characters."""
    import numpy as np
    from rapidfuzz.distance import Levenshtein
    from rapidfuzz.process import cpdist

    if not texts_a:
        return np.zeros(0, dtype=np.int64)
    distances = cpdist(texts_a, texts_b, scorer=Levenshtein.distance, dtype=np.int64, workers=-1)
    return np.asarray(distances, dtype=np.int64)


@dataclass(frozen=True)
class SideErrors:
    """Edits from the truth, page by page. A page whose truth is empty has rate 0 if the text is empty, else 1."""

    character_edits: IntArray
    characters: IntArray
    word_edits: IntArray
    words: IntArray

    def cer(self) -> FloatArray:
        """Character error rate of each page."""
        return _rates(self.character_edits, self.characters)

    def wer(self) -> FloatArray:
        """Word error rate of each page."""
        return _rates(self.word_edits, self.words)


def _rates(edits: IntArray, totals: IntArray) -> FloatArray:
    import numpy as np

    return np.where(totals > 0, edits / np.maximum(totals, 1), (edits > 0).astype(np.float64))


def side_errors(truths: Sequence[str], texts: Sequence[str]) -> SideErrors:
    """Edits that lead from each truth to its text, in characters and in words."""
    import jiwer
    import numpy as np

    words = [truth.split() for truth in truths]
    word_edits = [0] * len(truths)
    differing = [index for index, truth in enumerate(truths) if words[index] != texts[index].split()]
    if differing:
        # jiwer splits at single spaces only
        references = [" ".join(words[index]) for index in differing]
        answers = [" ".join(texts[index].split()) for index in differing]
        for index, chunks in zip(differing, jiwer.process_words(references, answers).alignments, strict=True):
            word_edits[index] = sum(
                max(chunk.ref_end_idx - chunk.ref_start_idx, chunk.hyp_end_idx - chunk.hyp_start_idx)
                for chunk in chunks
                if chunk.type != "equal"
            )
    return SideErrors(
        character_edits=edit_distances(truths, texts),
        characters=np.array([len(truth) for truth in truths], dtype=np.int64),
        word_edits=np.array(word_edits, dtype=np.int64),
        words=np.array([len(split) for split in words], dtype=np.int64),
    )


@dataclass(frozen=True)
class Interval:
    """A 95 % interval of a mean, by resampling pages."""

    mean: float
    low: float
    high: float
    resamples: int


def paired_bootstrap(differences: FloatArray, resamples: int, seed: int) -> Interval:
    """The mean of per-page differences and where it would lie had other pages been drawn."""
    import numpy as np

    pages = len(differences)
    resamples = min(resamples, max(1000, BOOTSTRAP_WORK // pages))
    random = np.random.default_rng(seed)
    at_once = max(1, 1_000_000 // pages)
    means = np.concatenate(
        [
            differences[random.integers(0, pages, size=(min(at_once, resamples - done), pages))].mean(axis=1)
            for done in range(0, resamples, at_once)
        ]
    )
    low, high = np.quantile(means, (0.025, 0.975))
    return Interval(mean=float(differences.mean()), low=float(low), high=float(high), resamples=resamples)


# ---- normalise -------------------------------------------------------------------------------------------------------
# What may be made equal before two texts are compared, by name.


Normaliser: TypeAlias = Callable[[str], str]
MARKDOWN_MARKS = re.compile(r"(?<!\w)(?:\*{1,3}|_{1,3}|~~)(?=\S)|(?<=\S)(?:\*{1,3}|_{1,3}|~~)(?!\w)|`+")
MARKDOWN_BREAK = re.compile(r"<br ?/?>")
MARKDOWN_LINK = re.compile(r"!?\[([^\[\]\n]*)\]\([^()\s]*\)")
MARKDOWN_LINE_START = re.compile(r"^[ \t]*(?:#{1,6} +|> ?|[-*+] +)")
MARKDOWN_ESCAPE = re.compile(r"\\([\\`*_{}\[\]()#+\-.!|$~<>])")
QUOTES = str.maketrans(
    dict.fromkeys("\u2018\u2019\u201a\u201b\u2032\u2039\u203a\u0060\u00b4", "'")
    | dict.fromkeys("\u201c\u201d\u201e\u201f\u2033\u00ab\u00bb", '"')
)
DASHES = str.maketrans(dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212", "-"))


def strip_markdown(text: str) -> str:
    """The words of a Markdown page without its marks."""
    lines = []
    for line in text.split("\n"):
        bare = line.strip()
        if bare.startswith(("```", "~~~")) or (bare and "-" in bare and not bare.strip("|:- \t")):
            continue  # a code fence, a table's rule, a horizontal rule
        if bare.startswith("|"):
            line = line.replace("\\|", "\0").replace("|", " ").replace("\0", "|")
        lines.append(MARKDOWN_LINE_START.sub("", line))
    text = MARKDOWN_LINK.sub(r"\1", MARKDOWN_BREAK.sub(" ", "\n".join(lines)))
    return MARKDOWN_ESCAPE.sub(r"\1", MARKDOWN_MARKS.sub("", text))


def compose_unicode(text: str) -> str:
    """Unicode NFC."""
    return unicodedata.normalize("NFC", text)


def fold_compatible(text: str) -> str:
    """Unicode NFKC."""
    return unicodedata.normalize("NFKC", text)


def straighten_quotes(text: str) -> str:
    """Every quotation mark is ' or "."""
    return text.translate(QUOTES)


def straighten_dashes(text: str) -> str:
    """Every dash is a hyphen-minus."""
    return text.translate(DASHES)


def collapse_whitespace(text: str) -> str:
    """One space where there is white space, none at the ends."""
    return " ".join(text.split())


# In the order in which they are applied, whatever order they are asked for in.
NORMALISATIONS: Mapping[str, tuple[Normaliser, str]] = {
    "nfc": (compose_unicode, "composed characters (Unicode NFC)"),
    "nfkc": (fold_compatible, "compatible characters too: ligatures, full width, superscripts (Unicode NFKC)"),
    "markdown": (strip_markdown, "Markdown marks dropped: headings, lists, emphasis, tables, links, fences, escapes"),
    "quotes": (straighten_quotes, "curly, low and angle quotes and primes become ' and \""),
    "dashes": (straighten_dashes, "hyphens, dashes and the minus sign become -"),
    "case": (str.casefold, "upper and lower case are one"),
    "whitespace": (collapse_whitespace, "runs of white space, line breaks too, become one space; ends stripped"),
}


def normaliser(names: Sequence[str]) -> Normaliser:
    """The named normalisations as one function."""
    steps = [step for name, (step, _) in NORMALISATIONS.items() if name in names]

    def apply(text: str) -> str:
        for step in steps:
            text = step(text)
        return text

    return apply


# ---- compare ---------------------------------------------------------------------------------------------------------
# Two columns of text, page by page: which rows belong together, and how far they are apart.


BoolArray: TypeAlias = "NDArray[np.bool_]"


# --- which rows belong together ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowMatch:
    """The rows of A and B that are one page, in A's order, and the ids that found no partner."""

    rows_a: Sequence[int]
    rows_b: Sequence[int]
    only_a: Sequence[str] = ()
    only_b: Sequence[str] = ()
    duplicates_a: Sequence[str] = ()
    duplicates_b: Sequence[str] = ()
    null_ids_a: int = 0
    null_ids_b: int = 0


def match_ids(ids_a: Sequence[object], ids_b: Sequence[object]) -> RowMatch:
    """Rows with one id. An id that one side has twice names no page: it is reported and not compared."""
    rows_a, duplicates_a, nulls_a = _rows_by_id(ids_a)
    rows_b, duplicates_b, nulls_b = _rows_by_id(ids_b)
    ambiguous = duplicates_a.keys() | duplicates_b.keys()
    both = [key for key in rows_a if key in rows_b and key not in ambiguous]
    return RowMatch(
        rows_a=[rows_a[key] for key in both],
        rows_b=[rows_b[key] for key in both],
        only_a=[key for key in rows_a if key not in rows_b and key not in ambiguous],
        only_b=[key for key in rows_b if key not in rows_a and key not in ambiguous],
        duplicates_a=list(duplicates_a),
        duplicates_b=list(duplicates_b),
        null_ids_a=nulls_a,
        null_ids_b=nulls_b,
    )


def _rows_by_id(ids: Sequence[object]) -> tuple[dict[str, int], dict[str, None], int]:
    rows: dict[str, int] = {}
    duplicates: dict[str, None] = {}
    nulls = 0
    for row, value in enumerate(ids):
        if value is None:
            nulls += 1
        elif (key := str(value)) in rows:
            duplicates[key] = None
        else:
            rows[key] = row
    return rows, duplicates, nulls


# --- distances --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PageBatch:
    """Some pages' texts; `truths` is None where no truth was asked for, a single None where a page has none."""

    texts_a: Sequence[str | None]
    texts_b: Sequence[str | None]
    truths: Sequence[str | None] | None = None
    statuses_a: Sequence[str | None] | None = None
    statuses_b: Sequence[str | None] | None = None


@dataclass(frozen=True)
class PageScores:
    """What was measured, one entry a page; a length of -1 is a text that is null, and its `distance` is NaN."""

    distance: FloatArray
    length_a: IntArray
    length_b: IntArray
    identical: BoolArray
    equal_normalised: BoolArray
    has_truth: BoolArray
    errors_a: SideErrors
    errors_b: SideErrors
    statuses: Mapping[tuple[str, str], int]

    def penalty(self) -> FloatArray:
        """The distance, or 1 where only one side has a text; NaN where neither has."""
        import numpy as np

        missing = (self.length_a < 0) != (self.length_b < 0)
        return np.where(missing, 1.0, self.distance)


def measure(
    batches: Iterable[PageBatch], normalise: Normaliser, progress: Callable[[int], None] = lambda pages: None
) -> PageScores:
    """Everything about every page, a batch at a time: no text is kept."""
    import numpy as np

    parts = []
    statuses: Counter[tuple[str, str]] = Counter()
    pages = 0
    for batch in batches:
        parts.append(_measure_batch(batch, normalise))
        if batch.statuses_a is not None and batch.statuses_b is not None:
            pairs = zip(batch.statuses_a, batch.statuses_b, strict=True)
            statuses.update((a or "(none)", b or "(none)") for a, b in pairs)
        pages += len(batch.texts_a)
        progress(pages)
    parts = parts or [_measure_batch(PageBatch([], []), normalise)]

    def join_errors(sides: Sequence[SideErrors]) -> SideErrors:
        return SideErrors(
            np.concatenate([side.character_edits for side in sides]),
            np.concatenate([side.characters for side in sides]),
            np.concatenate([side.word_edits for side in sides]),
            np.concatenate([side.words for side in sides]),
        )

    return PageScores(
        distance=np.concatenate([part.distance for part in parts]),
        length_a=np.concatenate([part.length_a for part in parts]),
        length_b=np.concatenate([part.length_b for part in parts]),
        identical=np.concatenate([part.identical for part in parts]),
        equal_normalised=np.concatenate([part.equal_normalised for part in parts]),
        has_truth=np.concatenate([part.has_truth for part in parts]),
        errors_a=join_errors([part.errors_a for part in parts]),
        errors_b=join_errors([part.errors_b for part in parts]),
        statuses=dict(statuses),
    )


def _measure_batch(batch: PageBatch, normalise: Normaliser) -> PageScores:
    import numpy as np

    texts_a = [text or "" for text in batch.texts_a]
    texts_b = [text or "" for text in batch.texts_b]
    length_a = np.array([-1 if text is None else len(text) for text in batch.texts_a], dtype=np.int64)
    length_b = np.array([-1 if text is None else len(text) for text in batch.texts_b], dtype=np.int64)
    both = (length_a >= 0) & (length_b >= 0)
    distance = edit_distances(texts_a, texts_b) / np.maximum(np.maximum(length_a, length_b), 1)
    distance[~both] = np.nan
    plain_a = [normalise(text) for text in texts_a]
    plain_b = [
        plain if text_b == text_a else normalise(text_b)
        for text_a, text_b, plain in zip(texts_a, texts_b, plain_a, strict=True)
    ]
    truths = batch.truths if batch.truths is not None else [None] * len(texts_a)
    known = [index for index, truth in enumerate(truths) if truth is not None]
    plain_truths = [normalise(truth) for truth in truths if truth is not None]
    return PageScores(
        distance=distance,
        length_a=length_a,
        length_b=length_b,
        identical=both & (distance == 0),
        equal_normalised=both & np.array([a == b for a, b in zip(plain_a, plain_b, strict=True)], dtype=bool),
        has_truth=np.array([truth is not None for truth in truths], dtype=bool),
        errors_a=side_errors(plain_truths, [plain_a[index] for index in known]),
        errors_b=side_errors(plain_truths, [plain_b[index] for index in known]),
        statuses={},
    )


# --- statistics -------------------------------------------------------------------------------------------------------

# A distance of 0, then up to each edge, then beyond the last: OCR runs differ by little or by everything.
DISTANCE_EDGES = (0.001, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)


def distance_histogram(distances: FloatArray) -> tuple[int, ...]:
    """How many pages lie at 0, and in each step between the edges."""
    import numpy as np

    bins = np.searchsorted(np.array((0.0, *DISTANCE_EDGES)), distances, side="left")
    return tuple(int(count) for count in np.bincount(bins, minlength=len(DISTANCE_EDGES) + 2))


def worst_decile_mean(distances: FloatArray) -> float:
    """The mean distance of the tenth of the pages (at least one) that is furthest apart."""
    import numpy as np

    return float(np.sort(distances)[-max(1, -(-len(distances) // 10)) :].mean())


# ---- errors ----------------------------------------------------------------------------------------------------------
# The errors that end a run, and the exit code of each.


class JobError(Exception):
    """Something that ends the run: the message says what, the value seen, and the next step."""

    exit_code = 1


class UsageError(JobError):
    """The command line, the input or the output does not fit: nothing was asked and nothing was written."""

    exit_code = 2


class EngineError(JobError):
    """The engine can't be started, can't be reached, refuses us, or serves something else. Closed blocks are kept."""


class SourceError(JobError):
    """The input stopped being readable in mid-run. Closed blocks are kept."""


class PublishError(JobError):
    """The blocks are all there, but the output could not be published. The same command publishes them."""


class SubmitError(JobError):
    """Not all jobs could be submitted. Those that were run on; the same command submits the rest."""


def network_errors() -> tuple[type[Exception], ...]:
    """Return what calls to the Hub raise where the network or the Hub fails: httpx's own errors are no `OSError`."""
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]

    return (OSError, httpx.HTTPError)


# ---- findings --------------------------------------------------------------------------------------------------------
# What a comparison found, as one object: the counts, distributions and rates that every report is made of.


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


# ---- visible ---------------------------------------------------------------------------------------------------------
# Text from anywhere, made harmless: on one line, and unable to steer a terminal.


CONTROL_PICTURES: Mapping[int, int | str] = {
    **{code: 0x2400 + code for code in range(32)},
    **dict.fromkeys((*range(0x7F, 0xA0), 0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A)), 0xFFFD),
    0x09: "⇥",
    0x0A: "⏎",
}


def visible(text: str) -> str:
    """Text on one line that can't steer a terminal: control and direction characters become pictures."""
    return text.translate(CONTROL_PICTURES)


# ---- diff ------------------------------------------------------------------------------------------------------------
# Where two texts part: as an excerpt of each, and as aligned lines with the changes marked.


DIFF_TOKEN = re.compile(r"\n|[^\S\n]+|[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|\w+?(?=[\u3040-\u9fff])|\w+|[^\w\s]")
DIFF_TOKENS = 8_000  # of each side: the alignment of two texts of this length takes a few milliseconds
DIFF_ROWS = 60
DIFF_EQUAL_CHARACTERS = 240
DIFF_CHANGED_CHARACTERS = 1_000


def first_difference(text_a: str, text_b: str) -> int:
    """The index of the first character in which the texts differ; their length where they don't."""
    pairs = enumerate(zip(text_a, text_b, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(text_a), len(text_b)))


def difference_excerpts(text_a: str | None, text_b: str | None, width: int = 64) -> tuple[int | None, str, str]:
    """Where the texts part, and both around that place, on one line each."""
    if text_a is None or text_b is None:
        at, start = None, 0
    else:
        at = first_difference(text_a, text_b)
        start = max(0, at - width // 3)

    def excerpt(text: str | None) -> str:
        if text is None:
            return "(no text)"
        cut = text[start : start + width]
        return visible(("…" if start else "") + cut + ("…" if start + width < len(text) else ""))

    return at, excerpt(text_a), excerpt(text_b)


@dataclass(frozen=True)
class DiffStretch:
    """What the alignment found: equal text, or text of A that became text of B."""

    text_a: str
    text_b: str
    changed: bool


@dataclass(frozen=True)
class DiffSegment:
    """A stretch of one side of a row."""

    text: str
    changed: bool


@dataclass(frozen=True)
class DiffRow:
    """A line of A beside the line of B that it became; or, with `skipped`, that many equal lines left out."""

    left: Sequence[DiffSegment] = ()
    right: Sequence[DiffSegment] = ()
    skipped: int = 0

    @property
    def changed(self) -> bool:
        """Whether the two lines differ."""
        return any(segment.changed for segment in (*self.left, *self.right))


def diff_rows(text_a: str, text_b: str) -> list[DiffRow]:
    """Two texts as aligned lines, words as the unit; equal lines away from a change are folded."""
    # Bit-parallel Levenshtein, not difflib, which takes minutes where a page loops over the same few words.
    from rapidfuzz.distance import Levenshtein

    tokens_a, tokens_b = DIFF_TOKEN.findall(text_a)[:DIFF_TOKENS], DIFF_TOKEN.findall(text_b)[:DIFF_TOKENS]
    stretches = [
        DiffStretch(
            "".join(tokens_a[code.src_start : code.src_end]),
            "".join(tokens_b[code.dest_start : code.dest_end]),
            changed=code.tag != "equal",
        )
        for code in Levenshtein.opcodes(tokens_a, tokens_b)
    ]
    rows: list[DiffRow] = []
    left: list[DiffSegment] = []
    right: list[DiffSegment] = []
    for index, stretch in enumerate(stretches):
        if stretch.changed or _is_accident(stretches[max(0, index - 1) : index + 2], stretch):
            _append_segment(left, stretch.text_a, changed=True)
            _append_segment(right, stretch.text_b, changed=True)
            continue
        for number, line in enumerate(stretch.text_a.split("\n")):
            if number:
                rows.append(DiffRow(tuple(left), tuple(right)))
                left, right = [], []
            _append_segment(left, line, changed=False)
            _append_segment(right, line, changed=False)
    rows.append(DiffRow(tuple(left), tuple(right)))
    return _fold_equal_rows(rows)


def _is_accident(around: Sequence[DiffStretch], stretch: DiffStretch) -> bool:
    """Whether an equal stretch is a blank or a short word that two long changes happen to share."""
    if len(around) < 3 or "\n" in stretch.text_a:
        return False
    shorter = min(max(len(side.text_a), len(side.text_b)) for side in (around[0], around[2]))
    return not stretch.text_a.strip() or len(stretch.text_a) * 2 < shorter


def _append_segment(segments: list[DiffSegment], text: str, changed: bool) -> None:
    if text and segments and segments[-1].changed == changed:
        text = segments.pop().text + text
    if text:
        segments.append(DiffSegment(text, changed))


def _fold_equal_rows(rows: Sequence[DiffRow]) -> list[DiffRow]:
    near = [any(row.changed for row in rows[max(0, index - 1) : index + 2]) for index in range(len(rows))]
    folded: list[DiffRow] = []
    for row, shown in zip(rows, near, strict=True):
        if shown:
            folded.append(row)
        elif folded and folded[-1].skipped:
            folded[-1] = DiffRow(skipped=folded[-1].skipped + 1)
        else:
            folded.append(DiffRow(skipped=1))
    return folded


def clip_segment(segment: DiffSegment) -> str:
    """The segment's text, its middle left out if it is long; changed line breaks and controls made visible."""
    limit = DIFF_CHANGED_CHARACTERS if segment.changed else DIFF_EQUAL_CHARACTERS
    text = segment.text
    if len(text) > limit:
        head, tail = text[: limit * 3 // 5], text[-limit // 5 :]
        text = f"{head} [… {len(text) - len(head) - len(tail):,} more characters …] {tail}"
    if segment.changed:
        return visible(text).replace("⏎", "⏎\n")
    return "\n".join(visible(line) for line in text.split("\n"))


# ---- parity_text -----------------------------------------------------------------------------------------------------
# A comparison in words and numbers: as a table for a terminal, and as JSON.


BAR_WIDTH = 40


def to_json(comparison: Comparison) -> str:
    """The comparison without the texts."""
    record: dict[str, Any] = {"version": 1, **asdict(comparison)}
    for page in record["worst"]:
        del page["text_a"], page["text_b"]
    return json.dumps(record, ensure_ascii=False, allow_nan=False, indent=2) + "\n"


def to_text(comparison: Comparison) -> str:
    """The table for a terminal, 100 columns at most where the names allow it."""
    lines: list[str] = []
    for name, side in (("A", comparison.a), ("B", comparison.b)):
        lines.append(
            f"{name}  {visible(side.source)}  split {visible(side.split)}  column {visible(side.column)}  "
            f"{side.rows:,} rows"
        )
        for made in side.made_by:
            lines += textwrap.wrap(visible(made), 97, initial_indent="   ", subsequent_indent="   ")
    lines += ["", *(f"{name:<20}{value}" for name, value in fact_rows(comparison))]
    histogram = comparison.texts.distance_histogram
    lines += ["", "similarity          pages", *_text_bars(histogram_labels(similarity=True), histogram)]
    if comparison.truth:
        truth = comparison.truth
        normalised = ", ".join(comparison.normalisations) or "nothing"
        lines += ["", f"against the truth   {visible(truth.source)}: {truth.pages:,} pages, after {normalised}"]
        lines += [f"{'':<20}{'CER mean':>10}{'median':>10}{'micro':>10}{'WER mean':>12}{'median':>10}{'micro':>10}"]
        for name, cer, wer in (("A", truth.cer_a, truth.wer_a), ("B", truth.cer_b, truth.wer_b)):
            first = "".join(f"{value:>10.4f}" for value in (cer.mean, cer.median, cer.micro))
            lines.append(f"{name:<20}{first}{wer.mean:>12.4f}{wer.median:>10.4f}{wer.micro:>10.4f}")
        lines += [f"{name:<20}{value}" for name, value in truth_rows(truth)]
    if comparison.statuses:
        columns = status_columns(comparison.statuses)
        lines += ["", f"{'status A / B':<20}" + "".join(f"{visible(name):>13}" for name in columns)]
        lines += [
            f"{visible(status):<20}" + "".join(f"{row.get(name, 0) or '·':>13}" for name in columns)
            for status, row in comparison.statuses.items()
        ]
    if comparison.worst:
        lines += ["", "the pages furthest apart"]
    for page in comparison.worst:
        lines.append(f"  {visible(page.page)}  {' · '.join(worst_page_facts(page))}")
        lines += [f"      error in {error}" for error in worst_page_errors(page)]
        lines += [f"      A {page.excerpt_a}", f"      B {page.excerpt_b}"]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _text_bars(labels: Sequence[str], counts: Sequence[int]) -> Iterator[str]:
    most = max(*counts, 1)
    for label, count in zip(labels, counts, strict=True):
        bar = "█" * max(round(BAR_WIDTH * count / most), 1 if count else 0)
        yield f"  {label:<14}{count:>9,}  {bar}"


# --- words for numbers, on the page too -------------------------------------------------------------------------------


def rounded(value: float | None, digits: int = 4) -> str:
    """A number with so many decimals; a dash where there is none."""
    return "–" if value is None else f"{value:.{digits}f}"


def _share(part: int, whole: int) -> str:
    return f"{part:,} ({100 * part / whole:.1f} %)" if whole else f"{part:,}"


def histogram_labels(similarity: bool) -> list[str]:
    """What each bar of `distance_histogram` stands for, as similarities or as error rates."""
    if similarity:
        edges = [f"{1 - edge:.3f}".rstrip("0") for edge in DISTANCE_EDGES]
        return ["identical", *(f"≥ {edge}" for edge in edges), f"< {edges[-1]}"]
    edges = [f"{100 * edge:g} %" for edge in DISTANCE_EDGES]
    return ["0", *(f"≤ {edge}" for edge in edges), f"> {edges[-1]}"]


def fact_rows(comparison: Comparison) -> list[tuple[str, str]]:
    """The summary as (name, value) lines, for both the text table and the page."""
    match, texts = comparison.match, comparison.texts
    together = f"{texts.no_text_a:,} in A only · {texts.no_text_b:,} in B only · {texts.no_text_both:,} in both"
    rows = [
        ("rows", f"{match.both:,} in both · {match.only_a:,} only in A · {match.only_b:,} only in B"),
        ("matched by", visible(match.by)),
    ]
    if match.duplicate_ids_a or match.duplicate_ids_b:
        rows.append(("ids twice, left out", f"{match.duplicate_ids_a:,} in A · {match.duplicate_ids_b:,} in B"))
    if match.null_ids_a or match.null_ids_b:
        rows.append(("rows without an id", f"{match.null_ids_a:,} in A · {match.null_ids_b:,} in B"))
    rows += [
        (f"e.g. {name.replace('_', ' ')}", visible(", ".join(str(key) for key in ids))[:70])
        for name, ids in match.examples.items()
    ]
    rows += [
        ("no text (null)", together),
        ("byte-identical", f"{_share(texts.identical, texts.pages)} of {texts.pages:,} pages with text on both sides"),
        (
            "equal normalised",
            f"{_share(texts.equal_normalised, texts.pages)} after {', '.join(comparison.normalisations) or 'nothing'}",
        ),
        (
            "similarity",
            f"mean {rounded(texts.similarity_mean)} · median {rounded(texts.similarity_median)} · "
            f"worst decile {rounded(texts.similarity_worst_decile_mean)}",
        ),
    ]
    if texts.no_text_a or texts.no_text_b:
        rows.append(("… a lone text as 0", f"mean {rounded(texts.similarity_mean_missing_as_0)}"))
    rows += [
        ("characters", f"A {texts.characters_a:,} · B {texts.characters_b:,}"),
        (
            "length B/A",
            f"median {rounded(texts.length_ratio_median, 3)} · p5 {rounded(texts.length_ratio_p5, 3)} · "
            f"p95 {rounded(texts.length_ratio_p95, 3)} · beyond 2x: {texts.length_beyond_2x:,} pages",
        ),
    ]
    if comparison.a.tokens is not None or comparison.b.tokens is not None:
        tokens = ["–" if side.tokens is None else f"{side.tokens:,}" for side in (comparison.a, comparison.b)]
        rows.append(("tokens", f"A {tokens[0]} · B {tokens[1]}"))
    return rows


def truth_rows(truth: TruthSummary) -> list[tuple[str, str]]:
    """What the truth says, apart from the table of rates."""
    gap = truth.cer_difference
    verdict = "A has fewer errors" if gap.high < 0 else "B has fewer errors" if gap.low > 0 else "no difference shown"
    rows = [
        ("mean CER, A - B", f"{gap.mean:+.5f}   95 % interval {gap.low:+.5f} to {gap.high:+.5f}: {verdict}"),
        ("", f"paired bootstrap, {gap.resamples:,} resamples of {truth.pages:,} pages"),
        ("page by page", f"A nearer {truth.better_a:,} · B nearer {truth.better_b:,} · equal {truth.equal:,}"),
        ("counted as", "a null text is an empty one (CER 1); an empty truth gives 0, or 1 with any text"),
    ]
    if truth.pages_without_truth or truth.pages_with_empty_truth:
        left_out = f"{truth.pages_without_truth:,} null, left out · {truth.pages_with_empty_truth:,} empty"
        rows.append(("truths", left_out))
    return rows


def status_columns(statuses: Mapping[str, Mapping[str, int]]) -> list[str]:
    """B's statuses, in the order of the alphabet."""
    return sorted({status for row in statuses.values() for status in row})


def worst_page_facts(page: WorstPage) -> list[str]:
    """What one line says about a page."""
    facts = [f"similarity {rounded(page.similarity)}" if page.similarity is not None else "a text on one side only"]
    lengths = ["no text" if length is None else f"{length:,}" for length in (page.length_a, page.length_b)]
    facts.append(f"characters {lengths[0]} / {lengths[1]}")
    if page.cer_a is not None and page.cer_b is not None:
        facts.append(f"CER {page.cer_a:.4f} / {page.cer_b:.4f}")
    if page.status_a or page.status_b:
        facts.append(f"{visible(page.status_a or '–')} / {visible(page.status_b or '–')}")
    if page.first_difference is not None:
        facts.append(f"from character {page.first_difference:,}")
    return facts


def worst_page_errors(page: WorstPage) -> list[str]:
    """The reasons of a page without text."""
    errors = (("A", page.error_a), ("B", page.error_b))
    return [f"{name}: {visible(error)[:90]}" for name, error in errors if error]


# ---- parity_html -----------------------------------------------------------------------------------------------------
# A comparison as one HTML page that needs nothing else.


STYLE = """
:root { color-scheme: light dark; --paper: #fbfaf7; --card: #fff; --ink: #1d2430; --soft: #667085; --line: #e3e1da;
  --a: #b4530a; --b: #1f6f8b; --gone: #fde2cf; --come: #cfeaf2; --bar: #4d7c5a; --track: #f0eee8; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171c; --card: #1c2027; --ink: #e6e8ec; --soft: #98a1b0;
  --line: #2f3540; --a: #f0a060; --b: #6cc3df; --gone: #5a3316; --come: #17485a; --bar: #7fb38d; --track: #262b34; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.55 system-ui, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 40px 24px 80px; }
h1 { font-size: 28px; line-height: 1.2; margin: 0 0 20px; letter-spacing: -.01em; }
h2 { font-size: 18px; margin: 44px 0 12px; }
h2 small, .soft { color: var(--soft); font-weight: 400; font-size: 13px; }
.grid { display: grid; gap: 16px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr)); }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 16px 18px; min-width: 0;
  overflow-wrap: anywhere; }
.side { border-left: 4px solid var(--a); } .side.b { border-left-color: var(--b); }
.side b { color: var(--a); margin-right: 6px; } .side.b b { color: var(--b); }
.figures { display: grid; gap: 16px; grid-template-columns: repeat(4, 1fr); margin-top: 16px; }
.figures.six { grid-template-columns: repeat(3, 1fr); }
.figure strong { display: block; font-size: 26px; line-height: 1.2; letter-spacing: -.02em; overflow-wrap: normal;
  font-variant-numeric: tabular-nums; }
.figure span { color: var(--soft); font-size: 13px; }
svg { width: 100%; height: auto; display: block; font: 13px system-ui, sans-serif; font-variant-numeric: tabular-nums; }
svg text { fill: var(--ink); } svg .soft { fill: var(--soft); } svg .track { fill: var(--track); }
svg .bar { fill: var(--bar); } svg .a { fill: var(--a); } svg .b { fill: var(--b); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 6px 16px 6px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child > * { border-bottom: 0; }
th { font-weight: 500; color: var(--soft); white-space: nowrap; }
th:first-child { width: 180px; } table + table { margin-top: 20px; }
.numbers { table-layout: fixed; min-width: 640px; } .numbers td { white-space: nowrap; }
.numbers th:first-child { width: 120px; }
.numbers th + th, .numbers td { text-align: right; padding: 6px 0 6px 16px; }
.same { color: var(--soft); } .apart { font-weight: 700; }
details { background: var(--card); border: 1px solid var(--line); border-radius: 10px; margin: 12px 0;
  overflow: hidden; }
summary { padding: 12px 18px; cursor: pointer; overflow-wrap: anywhere; }
summary b { margin-right: 10px; } summary span { color: var(--soft); font-size: 13px; margin-right: 12px; }
.diff { border-top: 1px solid var(--line); max-height: 620px; overflow-y: auto;
  font: 13px/1.6 ui-monospace, Menlo, Consolas, monospace; }
.row { display: grid; grid-template-columns: 1fr 1fr; }
.row > div { padding: 1px 14px; white-space: pre-wrap; overflow-wrap: anywhere; min-width: 0; min-height: 1.6em;
  unicode-bidi: isolate; }
.row > div + div { border-left: 1px solid var(--line); }
.equal { color: var(--soft); }
.head { font: 600 13px system-ui, sans-serif; border-bottom: 1px solid var(--line); }
.head > div { padding: 6px 14px; } .head .a { color: var(--a); } .head .b { color: var(--b); }
.skip { padding: 3px 14px; color: var(--soft); background: var(--track); font-size: 12px; text-align: center; }
del, ins { text-decoration: none; border-radius: 3px; padding: 1px 0; }
del { background: var(--gone); } ins { background: var(--come); }
.none { color: var(--soft); font-style: italic; }
@media (max-width: 700px) {
  main { padding: 24px 14px 60px; } .row { grid-template-columns: 1fr; } .row > div + div { border-left: 0; }
  .row.equal > div + div, .head { display: none; }
  .row.changed > div { border-left: 3px solid var(--a); margin-top: 4px; }
  .row.changed > div + div { border-left: 3px solid var(--b); margin: 0 0 4px; }
  .figures, .figures.six { grid-template-columns: 1fr 1fr; gap: 10px; } .figure strong { font-size: 20px; }
  th:first-child { width: 112px; white-space: normal; } svg { font-size: 15px; }
}
@media print { .diff { max-height: none; } }
"""


def to_html(comparison: Comparison) -> str:
    """One page that needs nothing else: no script, no font, no picture from anywhere."""
    texts, truth = comparison.texts, comparison.truth
    parts = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        f"<title>OCR parity: {_escape(comparison.a.source)} and {_escape(comparison.b.source)}</title>",
        f"<style>{STYLE}</style>\n</head>\n<body>\n<main>\n<h1>Two OCR results, page by page</h1>",
        f'<div class="grid">{_side_card("A", comparison.a)}{_side_card("B", comparison.b)}</div>',
        f'<div class="figures{" six" if truth else ""}">{"".join(_figures(comparison))}</div>',
        '<div class="grid"><section>',
        f"<h2>Similarity <small>{texts.pages:,} pages with text on both sides</small></h2>",
        f'<div class="card">{bar_chart("Similarity", histogram_labels(similarity=True), [texts.distance_histogram])}',
        "</div></section>",
    ]
    if truth:
        bars = [truth.cer_histogram_a, truth.cer_histogram_b]
        parts += [
            '<section><h2>Character error rate <small><span style="color:var(--a)">■ A</span> '
            f'<span style="color:var(--b)">■ B</span> {truth.pages:,} pages with a truth</small></h2>',
            f'<div class="card">{bar_chart("Character error rate", histogram_labels(similarity=False), bars)}</div>',
            "</section>",
        ]
    parts.append("</div>")
    if truth:
        parts += [
            f"<h2>Against the truth <small>{_escape(truth.source)}, after "
            f"{_escape(', '.join(comparison.normalisations) or 'nothing')}</small></h2>",
            f'<div class="card scroll">{_truth_table(truth)}{_fact_table(truth_rows(truth))}</div>',
        ]
    parts.append(f'<h2>In numbers</h2><div class="card scroll">{_fact_table(fact_rows(comparison))}</div>')
    if comparison.statuses:
        parts.append(f'<h2>Status</h2><div class="card scroll">{_status_table(comparison.statuses)}</div>')
    if comparison.worst:
        parts.append(
            "<h2>The pages furthest apart <small>"
            "<del>only in A</del> <ins>only in B</ins> ⏎ a line break that only one has</small></h2>"
        )
        parts += [_worst_page(page, opened=index < 3) for index, page in enumerate(comparison.worst)]
    return "\n".join([*parts, "</main>\n</body>\n</html>\n"])


def _escape(text: str) -> str:
    return html.escape(visible(text))


def _side_card(name: str, side: ComparedSide) -> str:
    made = "".join(f'<div class="soft">{_escape(line)}</div>' for line in side.made_by)
    where = f"split {side.split}, column {side.column}, {side.rows:,} rows"
    return (
        f'<div class="card side {name.lower()}"><b>{name}</b>{_escape(side.source)}'
        f'<div class="soft">{_escape(where)}</div>{made}</div>'
    )


def _figures(comparison: Comparison) -> Iterator[str]:
    texts, truth = comparison.texts, comparison.truth
    figures = [
        (f"{100 * texts.identical / texts.pages:.1f} %" if texts.pages else "–", "byte-identical"),
        (rounded(texts.similarity_mean), "mean similarity"),
        (rounded(texts.similarity_worst_decile_mean), "worst decile"),
        (f"{texts.no_text_a:,} / {texts.no_text_b:,}", "text missing only in A / only in B"),
    ]
    if truth:
        gap = truth.cer_difference
        figures.append((f"{100 * truth.cer_a.mean:.2f} / {100 * truth.cer_b.mean:.2f} %", "mean CER, A / B"))
        figures.append(
            (
                f"{100 * gap.mean:+.2f}",
                f"CER points A - B (95 %: {100 * gap.low:+.2f} to {100 * gap.high:+.2f})",
            )
        )
    for value, caption in figures:
        yield f'<div class="card figure"><strong>{_escape(value)}</strong><span>{_escape(caption)}</span></div>'


def bar_chart(title: str, labels: Sequence[str], series: Sequence[Sequence[int]]) -> str:
    """Horizontal bars as SVG: one colour for one series, A's and B's colours for two."""
    left, right, width, thick = 92, 64, 480, 18 if len(series) == 1 else 14
    step = thick * len(series) + 10
    most = max(1, *(max(counts) for counts in series))
    looks = ["bar"] if len(series) == 1 else ["a", "b"]
    marks = [f'<svg viewBox="0 0 {width} {step * len(labels)}" role="img"><title>{_escape(title)}</title>']
    for index, label in enumerate(labels):
        top = index * step + 5
        middle = top + thick * len(series) / 2
        marks.append(
            f'<text x="{left - 10}" y="{middle:g}" text-anchor="end" dominant-baseline="central">'
            f"{_escape(label)}</text>"
        )
        for count, look, y in zip((row[index] for row in series), looks, (top, top + thick), strict=False):
            length = max((width - left - right) * count / most, 2 if count else 0)
            marks.append(
                f'<rect class="track" x="{left}" y="{y}" width="{width - left - right}" height="{thick - 1}"/>'
                f'<rect class="{look}" x="{left}" y="{y}" width="{length:.1f}" height="{thick - 1}"/>'
                f'<text class="{"" if count else "soft"}" x="{width - right + 8}" y="{y + thick / 2:g}" '
                f'dominant-baseline="central">{count:,}</text>'
            )
    return "".join([*marks, "</svg>"])


def _fact_table(rows: Sequence[tuple[str, str]]) -> str:
    cells = "".join(f"<tr><th>{_escape(name)}</th><td>{_escape(value)}</td></tr>" for name, value in rows)
    return f"<table>{cells}</table>"


def _truth_table(truth: TruthSummary) -> str:
    heads = ("", "CER mean", "median", "micro", "WER mean", "median", "micro")
    rows = ["<tr>" + "".join(f"<th>{head}</th>" for head in heads) + "</tr>"]
    for name, cer, wer in (("A", truth.cer_a, truth.wer_a), ("B", truth.cer_b, truth.wer_b)):
        values = (cer.mean, cer.median, cer.micro, wer.mean, wer.median, wer.micro)
        rows.append(f"<tr><th>{name}</th>" + "".join(f"<td>{value:.4f}</td>" for value in values) + "</tr>")
    return f'<table class="numbers">{"".join(rows)}</table>'


def _status_table(statuses: Mapping[str, Mapping[str, int]]) -> str:
    columns = status_columns(statuses)
    rows = ["<tr><th>A, then B →</th>" + "".join(f"<th>{_escape(name)}</th>" for name in columns) + "</tr>"]
    for status, row in statuses.items():
        cells = [
            f'<td class="{"same" if name == status else "apart"}">{row[name]:,}</td>' if row.get(name) else "<td>·</td>"
            for name in columns
        ]
        rows.append(f"<tr><th>{_escape(status)}</th>{''.join(cells)}</tr>")
    return f'<table class="numbers">{"".join(rows)}</table>'


def _worst_page(page: WorstPage, opened: bool) -> str:
    facts = "".join(f"<span>{_escape(fact)}</span>" for fact in (*worst_page_facts(page), *worst_page_errors(page)))
    head = '<div class="row head"><div class="a">A</div><div class="b">B</div></div>'
    if page.text_a is None or page.text_b is None:
        cells = "".join(_lone_text(text) for text in (page.text_a, page.text_b))
        body = f'<div class="row changed">{cells}</div>'
    else:
        rows = diff_rows(page.text_a, page.text_b)
        body = "".join(_diff_row(row) for row in rows[:DIFF_ROWS])
        if len(rows) > DIFF_ROWS:
            body += f'<div class="skip">{len(rows) - DIFF_ROWS:,} more rows</div>'
        body += '<div class="skip">the rest of this long page is not shown</div>' if _is_cut(page) else ""
    return (
        f"<details{' open' if opened else ''}><summary><b>{_escape(page.page)}</b>{facts}</summary>"
        f'<div class="diff">{head}{body}</div></details>'
    )


def _is_cut(page: WorstPage) -> bool:
    return any(len(DIFF_TOKEN.findall(text or "")) > DIFF_TOKENS for text in (page.text_a, page.text_b))


def _lone_text(text: str | None) -> str:
    if text is None:
        return '<div class="none">no text</div>'
    return f'<div dir="auto">{html.escape(clip_segment(DiffSegment(text, changed=True)).replace("⏎", ""))}</div>'


def _diff_row(row: DiffRow) -> str:
    if row.skipped:
        lines = "1 equal line" if row.skipped == 1 else f"{row.skipped:,} equal lines"
        return f'<div class="skip">{lines}</div>'
    sides = []
    for segments, mark in ((row.left, "del"), (row.right, "ins")):
        marked = ((html.escape(clip_segment(segment)), segment.changed) for segment in segments)
        cell = "".join(f"<{mark}>{text}</{mark}>" if changed else text for text, changed in marked)
        sides.append(f'<div dir="auto">{cell}</div>')
    return f'<div class="row {"changed" if row.changed else "equal"}">{"".join(sides)}</div>'


# ---- parity_options --------------------------------------------------------------------------------------------------
# The command line of a comparison: two results, a truth, and what is reported.


PROG = "lighton-ocr-parity.py"


@dataclass(frozen=True)
class SideOptions:
    """Where one of the two results lies."""

    name: str
    source: str
    config: str | None
    split: str | None
    column: str


@dataclass(frozen=True)
class ParityOptions:
    """The command line."""

    a: SideOptions
    b: SideOptions
    id_column: str | None
    truth: str | None
    truth_file: Path | None
    normalisations: tuple[str, ...]
    bootstrap: int
    seed: int
    worst: int
    json: str | None
    html: Path | None
    fail_below: float | None
    fail_cer_diff: float | None


def build_parity_parser() -> argparse.ArgumentParser:
    """The options, each with its default and unit."""
    parser = argparse.ArgumentParser(
        prog=PROG,
        usage=f"{PROG} [OPTIONS] A B",
        allow_abbrev=False,
        description="Compare two OCR results page by page.",
        epilog="exit codes: 0 compared · 1 a result unreadable half-way, or past a --fail limit · 2 usage or input",
    )
    parser.add_argument(
        "a", metavar="A", help="Hub dataset id (id or id@revision), folder, parquet file, saved dataset"
    )
    parser.add_argument("b", metavar="B", help="the same; may be A again, with another --column-b")

    group = parser.add_argument_group("input")
    for word, default, what in (
        ("column", "markdown", "column of text"),
        ("config", None, "dataset configuration"),
        ("split", None, "split"),
    ):
        told = f"default: {default}" if default else "default: the only one"
        told += ", or train" if word == "split" else ""
        group.add_argument(f"--{word}", metavar="NAME", default=default, help=f"{what} in A and B ({told})")
        for side in "ab":
            group.add_argument(
                f"--{word}-{side}", metavar="NAME", help=f"{what} in {side.upper()} (default: that of --{word})"
            )
    group.add_argument(
        "--id-column", metavar="NAME", help="match rows that have one value in this column (default: by row number)"
    )

    group = parser.add_argument_group("truth")
    group.add_argument(
        "--truth", metavar="COLUMN", help="column of A with the true text: adds CER and WER (default: none)"
    )
    group.add_argument(
        "--truth-file",
        metavar="JSON",
        type=Path,
        help="the truth as a JSON object, id to text; row number (from 0) to text without --id-column (default: none)",
    )
    group.add_argument(
        "--normalise",
        metavar="LIST",
        default="nfc,whitespace",
        help="what is made equal before CER and WER, by comma, or none (default: nfc,whitespace): "
        + "; ".join(f"{name} - {meaning}" for name, (_, meaning) in NORMALISATIONS.items()),
    )
    group.add_argument(
        "--bootstrap", metavar="N", type=int, default=10_000, help="resamples for the 95 %% interval (default: 10000)"
    )
    group.add_argument("--seed", metavar="N", type=int, default=0, help="seed of the resamples (default: 0)")

    group = parser.add_argument_group("output")
    group.add_argument(
        "--worst", metavar="N", type=int, default=10, help="show this many of the pages furthest apart (default: 10)"
    )
    group.add_argument(
        "--json",
        metavar="PATH",
        nargs="?",
        const="-",
        help="write the numbers as JSON; without PATH or with -, to stdout, and the table to stderr (default: no)",
    )
    group.add_argument(
        "--html", metavar="PATH", type=Path, help="write a page with plots and differences (default: no)"
    )
    group.add_argument(
        "--fail-below",
        metavar="SIMILARITY",
        type=float,
        help="exit 1 if the mean similarity, 0 to 1, a text on one side only counting as 0, is below (default: never)",
    )
    group.add_argument(
        "--fail-cer-diff",
        metavar="CER",
        type=float,
        help="exit 1 if B's mean CER, as a fraction, is more than this above A's (default: never)",
    )
    return parser


def parse_parity_options(argv: Sequence[str] | None) -> ParityOptions:
    """Parse and check the command line, before anything is read."""
    parser = build_parity_parser()
    given = parser.parse_args(argv)
    names = tuple(name.strip() for name in given.normalise.split(",") if name.strip() not in ("", "none"))
    if unknown := [name for name in names if name not in NORMALISATIONS]:
        parser.error(f"--normalise: no {unknown[0]!r}; choose from {', '.join(NORMALISATIONS)}, or none")
    if given.truth and given.truth_file:
        parser.error("--truth and --truth-file: give one")
    if given.fail_cer_diff is not None and not (given.truth or given.truth_file):
        parser.error("--fail-cer-diff needs --truth or --truth-file")
    if given.bootstrap < 1 or given.worst < 0 or given.seed < 0:
        parser.error("--bootstrap must be at least 1, --worst and --seed at least 0")
    for path in (given.html, Path(given.json) if given.json not in (None, "-") else None):
        if path is not None and not path.absolute().parent.is_dir():
            parser.error(f"can't write {path}: no folder {path.absolute().parent}")

    def side(name: str) -> SideOptions:
        chosen = {
            word: getattr(given, f"{word}_{name}") or getattr(given, word) for word in ("column", "config", "split")
        }
        return SideOptions(name=name.upper(), source=getattr(given, name), **chosen)

    return ParityOptions(
        a=side("a"),
        b=side("b"),
        id_column=given.id_column,
        truth=given.truth,
        truth_file=given.truth_file,
        normalisations=names,
        bootstrap=given.bootstrap,
        seed=given.seed,
        worst=given.worst,
        json=given.json,
        html=given.html,
        fail_below=given.fail_below,
        fail_cer_diff=given.fail_cer_diff,
    )


# ---- splits ----------------------------------------------------------------------------------------------------------
# The splits of a dataset: which one is read, and the one that save_to_disk wrote.


def choose_split(there: Sequence[str], wanted: str | None, where: str = "the input") -> str:
    """Return the wanted split; or, where none is named, the only one, or `train`."""
    if wanted is not None:
        if wanted in there:
            return wanted
        raise UsageError(f"no split {wanted!r} in {where}; --split takes one of: {', '.join(there) or '(none found)'}")
    if len(there) == 1:
        return there[0]
    if "train" in there:
        return "train"
    raise UsageError(f"which split? Name one of {where} with --split: {', '.join(there) or '(none found)'}")


def is_saved(path: Path) -> bool:
    """Whether save_to_disk wrote this folder: one split, or several."""
    return any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))


def open_saved(path: Path, wanted: str | None, where: str = "the input") -> tuple[Any, str]:
    """Return (the split as a `datasets.Dataset`, its name) out of a folder that save_to_disk wrote."""
    import datasets

    saved = datasets.load_from_disk(str(path))
    if isinstance(saved, datasets.DatasetDict):
        split = choose_split(list(saved), wanted, where)
        return saved[split], split
    return saved, choose_split([str(saved.split or "train")], wanted, where)


# ---- parity_source ---------------------------------------------------------------------------------------------------
# Reading one of two results: its columns of text, from the Hub or a disk, without its pictures.


FILE_FORMATS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv", ".arrow": "arrow"}
HUB_ID = re.compile(r"(?P<id>[\w.-]+(?:/[\w.-]+)?)(?:@(?P<revision>[\w./-]+))?")
MADE_BY_SHOWN = 3
MADE_BY_LETTERS = 160
ALIKE = 0.8  # names that are so much alike may be mistyped
HUB_READ_AHEAD_BYTES = 256 * 1024  # the default, 5 MB beyond every column of every row group, would be pictures

Report: TypeAlias = Callable[[str], None]


@dataclass(frozen=True)
class LoadedSide:
    """A side's columns of text as a memory-mapped `datasets.Dataset`, and what is known of it."""

    options: SideOptions
    split: str
    rows: Any
    made_by: tuple[str, ...]

    def has(self, column: str) -> bool:
        """Whether the column was there to be read."""
        return column in self.rows.column_names

    def values(self, column: str | None, rows: Sequence[int]) -> list[Any] | None:
        """The column's values at these rows; None if there is no such column."""
        if column is None or not self.has(column) or not rows:
            return None if column is None or not self.has(column) else []
        first, last = rows[0], rows[-1]
        in_order = last - first + 1 == len(rows) and all(row == first + index for index, row in enumerate(rows))
        part = self.rows[first : last + 1] if in_order else self.rows[list(rows)]
        return list(part[column])


def load_side(options: SideOptions, wanted: Sequence[str], folder: Path, report: Report) -> LoadedSide:
    """Read the text column with its companions and the `wanted` columns; pictures are never touched."""
    companions = [options.column + suffix for suffix in ("_status", "_error", "_tokens")]
    where = f"{options.name} ({options.source})"
    try:
        if is_saved(path := Path(options.source).expanduser()):
            rows, split = open_saved(path, options.split, where)
            columns = _choose_columns(rows.features, options, wanted, companions, where)
            made_by = _made_by(rows.select_columns(["inference_info"]) if "inference_info" in rows.features else None)
            return LoadedSide(options, split, rows.select_columns(columns), made_by)
        return _spool(options, wanted, companions, where, folder, report)
    except reading_errors() as error:
        raise UsageError(f"can't read {where}: {_in_words(error)}. Check the name, --config and --split") from error


def reading_errors() -> tuple[type[Exception], ...]:
    """What `datasets` raises where a source can't be read: it is not there, does not answer, or is damaged."""
    return (*network_errors(), ValueError)


def locate(source: str) -> dict[str, Any]:
    """The arguments of `load_dataset` for a path that exists, or else for a Hub id."""
    path = Path(source).expanduser()
    if path.is_dir():
        return {"path": str(path)}
    if path.is_file():
        if path.suffix not in FILE_FORMATS:
            raise UsageError(f"{source}: not one of {', '.join(FILE_FORMATS)}. Give the folder or a parquet file")
        return {"path": FILE_FORMATS[path.suffix], "data_files": str(path)}
    match = HUB_ID.fullmatch(source)
    if match is None or path.suffix in FILE_FORMATS or not _may_be_hub_id(match["id"]):
        raise UsageError(
            f"{source}: no such file or folder, and not a Hub dataset id (namespace/name or name@revision)"
            + _did_you_mean(path)
        )
    if match["revision"] is None and (meant := _did_you_mean(path)):
        raise UsageError(f"{source}: no such file or folder{meant} If a Hub dataset is meant: {source}@main")
    return {"path": match["id"], "revision": match["revision"]}


def _may_be_hub_id(name: str) -> bool:
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except ValueError:
        return False
    return True


def _did_you_mean(path: Path) -> str:
    """Name the neighbours of a path that is not there whose names are much like its own; empty where none are."""
    try:
        beside = [neighbour.name for neighbour in path.absolute().parent.iterdir()]
    except OSError:
        return ""
    close = difflib.get_close_matches(path.name, beside, cutoff=ALIKE)
    return f". Did you mean {' or '.join(str(path.parent / name) for name in close)}?" if close else ""


def _choose_columns(
    features: Any, options: SideOptions, wanted: Sequence[str], companions: Sequence[str], where: str
) -> list[str]:
    texts = [
        name for name, kind in features.items() if getattr(kind, "dtype", "") in ("string", "large_string", "null")
    ]
    for column in (options.column, *wanted):
        if column not in features or (column == options.column and column not in texts):
            problem = "is not text" if column in features else "is not there"
            raise UsageError(f"{where}: column {column!r} {problem}. Columns of text: {', '.join(texts) or 'none'}")
    return list(dict.fromkeys([options.column, *wanted, *(name for name in companions if name in features)]))


def _spool(
    options: SideOptions, wanted: Sequence[str], companions: Sequence[str], where: str, folder: Path, report: Report
) -> LoadedSide:
    """Stream the columns into an Arrow file of our own: any row can then be had, and memory stays flat."""
    from datasets import Dataset, Features, load_dataset_builder

    ahead = {"hf": {"block_size": HUB_READ_AHEAD_BYTES}}
    place = {**locate(options.source), "name": options.config, "storage_options": ahead}
    builder = load_dataset_builder(**place)
    streams = builder.as_streaming_dataset()
    split = choose_split([str(name) for name in streams], options.split, where)
    stream = streams[split]
    features = stream.features
    if features is None:  # JSON and CSV tell their columns only by their first rows
        features = Features.from_arrow_schema(next(iter(stream.with_format("arrow").iter(batch_size=1000))).schema)
    columns = _choose_columns(features, options, wanted, companions, where)
    read = [*columns, "inference_info"] if "inference_info" in features else columns
    if hasattr(builder.config, "columns"):  # parquet: the other columns are not even fetched
        stream = load_dataset_builder(**place, columns=read).as_streaming_dataset(split=split)
    stream, schema = stream.select_columns(read), Features({name: features[name] for name in read}).arrow_schema

    path = folder / f"{options.name}.arrow"
    made_by: dict[str, None] = {}
    try:
        rows = _write_stream(
            stream, schema, columns, path, made_by, lambda done: report(f"read {done:,} rows of {where}")
        )
    except reading_errors() as error:
        raise SourceError(
            f"{where} stopped being readable: {_in_words(error)}. The same command starts again"
        ) from error
    if rows == 0:
        raise UsageError(f"{where}: split {split!r} has no rows")
    return LoadedSide(options, split, Dataset.from_file(str(path)), tuple(made_by))


def _write_stream(
    stream: Any,
    schema: Any,
    columns: Sequence[str],
    path: Path,
    made_by: dict[str, None],
    progress: Callable[[int], None],
) -> int:
    import pyarrow as pa

    rows = 0
    kept = pa.schema([schema.field(column) for column in columns])
    with path.open("wb") as sink, pa.ipc.new_stream(sink, kept) as writer:
        for table in stream.with_format("arrow").iter(batch_size=1000):
            writer.write_table(table.select(columns).cast(kept))
            if "inference_info" in table.column_names:
                _note_makers(made_by, table["inference_info"].unique().to_pylist())
            rows += table.num_rows
            progress(rows)
    return rows


def _in_words(error: Exception) -> str:
    first = f"{type(error).__name__}: {error}".strip().split("\n")[0]
    return first.rstrip(".: ")


def _made_by(infos: Any) -> tuple[str, ...]:
    made_by: dict[str, None] = {}
    if infos is not None:
        for table in infos.with_format("arrow").iter(batch_size=1000):
            _note_makers(made_by, table["inference_info"].unique().to_pylist())
    return tuple(made_by)


def _note_makers(made_by: dict[str, None], infos: Sequence[object]) -> None:
    for info in infos:
        if len(made_by) < MADE_BY_SHOWN and (line := describe_inference(info)):
            made_by[line] = None


def describe_inference(info: object) -> str:
    """The last entry of an `inference_info` cell as `name=value` words; empty if it can't be read."""
    try:
        entries = json.loads(info) if isinstance(info, str) else None
    except ValueError:
        return ""
    entry = entries[-1] if isinstance(entries, list) and entries else entries
    if not isinstance(entry, dict):
        return ""
    words = [f"{key}={value}" for key, value in entry.items() if isinstance(value, str | int | float)]
    return textwrap.shorten(" ".join(words), MADE_BY_LETTERS, placeholder=" …")


# ---- parity_pages ----------------------------------------------------------------------------------------------------
# The pages that two results have in common: their texts, some at a time, and those furthest apart.


BATCH_ROWS = 500


def match_sides(a: LoadedSide, b: LoadedSide, id_column: str | None) -> RowMatch:
    """Which rows are one page."""
    if id_column is not None:
        match = match_ids(a.rows[id_column][:], b.rows[id_column][:])
        if not match.rows_a:
            raise UsageError(f"--id-column {id_column}: A and B have no id in common. Check the column")
        return match
    if len(a.rows) != len(b.rows):
        raise UsageError(
            f"A has {len(a.rows):,} rows and B {len(b.rows):,}: row numbers don't say which belong together. "
            "Give --id-column NAME, a column that names the page in both"
        )
    return RowMatch(rows_a=range(len(a.rows)), rows_b=range(len(b.rows)))


def read_truth_file(path: Path) -> dict[str, str]:
    """Id to text."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--truth-file {path}: {error}") from error
    if not isinstance(record, dict) or not all(isinstance(text, str) for text in record.values()):
        raise UsageError(f"--truth-file {path}: not a JSON object of texts, like {{'page-1': 'text'}}")
    return record


@dataclass(frozen=True)
class MatchedPages:
    """Two sides and the rows of each that are one page."""

    a: LoadedSide
    b: LoadedSide
    match: RowMatch
    id_column: str | None
    truth_column: str | None
    truths: Mapping[str, str] | None

    def names(self, pages: Sequence[int]) -> list[str]:
        """What the pages are called: by id, or by row number."""
        rows = [self.match.rows_a[page] for page in pages]
        ids = self.a.values(self.id_column, rows)
        return [str(row) for row in rows] if ids is None else [str(name) for name in ids]

    def batches(self) -> Iterator[PageBatch]:
        """The texts, some pages at a time."""
        for start in range(0, len(self.match.rows_a), BATCH_ROWS):
            rows_a = self.match.rows_a[start : start + BATCH_ROWS]
            rows_b = self.match.rows_b[start : start + BATCH_ROWS]
            truths = self.a.values(self.truth_column, rows_a)
            if self.truths is not None:
                truths = [self.truths.get(name) for name in self.names(range(start, start + len(rows_a)))]
            yield PageBatch(
                texts_a=self.a.values(self.a.options.column, rows_a) or [],
                texts_b=self.b.values(self.b.options.column, rows_b) or [],
                truths=truths,
                statuses_a=self.a.values(f"{self.a.options.column}_status", rows_a),
                statuses_b=self.b.values(f"{self.b.options.column}_status", rows_b),
            )

    def worst(self, scores: PageScores, count: int) -> list[WorstPage]:
        """The pages furthest apart, those with a text on one side only first."""
        import numpy as np

        penalty = scores.penalty()
        differing = np.flatnonzero(penalty > 0)
        pages = heapq.nsmallest(
            count, differing.tolist(), key=lambda page: (not math.isnan(scores.distance[page]), -penalty[page], page)
        )
        place = np.cumsum(scores.has_truth) - 1  # the error rates hold the pages with a truth only
        cers = scores.errors_a.cer(), scores.errors_b.cer()
        return [
            self._worst_page(
                page, scores, [float(cer[place[page]]) if scores.has_truth[page] else None for cer in cers]
            )
            for page in pages
        ]

    def _worst_page(self, page: int, scores: PageScores, cers: Sequence[float | None]) -> WorstPage:
        def cell(side: LoadedSide, row: int, suffix: str) -> str | None:
            values = side.values(side.options.column + suffix, [row])
            return values[0] if values else None

        row_a, row_b = self.match.rows_a[page], self.match.rows_b[page]
        text_a, text_b = cell(self.a, row_a, ""), cell(self.b, row_b, "")
        at, excerpt_a, excerpt_b = difference_excerpts(text_a, text_b)
        name = self.names([page])[0]
        return WorstPage(
            page=name if self.id_column else f"row {name}",
            similarity=None if text_a is None or text_b is None else 1 - float(scores.distance[page]),
            length_a=None if text_a is None else len(text_a),
            length_b=None if text_b is None else len(text_b),
            status_a=cell(self.a, row_a, "_status"),
            status_b=cell(self.b, row_b, "_status"),
            error_a=cell(self.a, row_a, "_error"),
            error_b=cell(self.b, row_b, "_error"),
            first_difference=at,
            excerpt_a=excerpt_a,
            excerpt_b=excerpt_b,
            text_a=text_a,
            text_b=text_b,
            cer_a=cers[0],
            cer_b=cers[1],
        )


def describe_side(side: LoadedSide, rows: Sequence[int]) -> ComparedSide:
    """What the report says of a side; the tokens are those of the compared pages."""
    tokens = None
    if side.has(f"{side.options.column}_tokens"):
        parts = (
            side.values(f"{side.options.column}_tokens", rows[start : start + 10_000])
            for start in range(0, len(rows), 10_000)
        )
        tokens = sum(int(count) for part in parts for count in part or [] if count is not None)
    return ComparedSide(
        source=side.options.source,
        split=side.split,
        column=side.options.column,
        rows=len(side.rows),
        tokens=tokens,
        made_by=side.made_by,
    )


# ---- parity ----------------------------------------------------------------------------------------------------------
# The script itself.


PROGRESS_S = 5.0


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, report, and say by the exit code whether a limit was passed."""
    options = parse_parity_options(argv)
    try:
        import datasets

        datasets.disable_progress_bars()
        datasets.logging.set_verbosity_error()
        with tempfile.TemporaryDirectory(prefix="lighton-ocr-parity-") as folder:
            comparison = compare_sides(options, Path(folder), progress_reporter())
        write_reports(comparison, options)
    except JobError as error:
        sys.stderr.write(f"{PROG}: {visible(str(error))}\n")
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    failed = failed_limits(comparison, options)
    sys.stderr.writelines(f"{PROG}: {line}\n" for line in failed)
    return 1 if failed else 0


def compare_sides(options: ParityOptions, folder: Path, report: Report) -> Comparison:
    """Read both, match, measure, summarise."""
    truths = read_truth_file(options.truth_file) if options.truth_file else None
    ids = [options.id_column] if options.id_column else []
    a = load_side(options.a, [*ids, *([options.truth] if options.truth else [])], folder, report)
    b = load_side(options.b, ids, folder, report)
    match = match_sides(a, b, options.id_column)
    pages = MatchedPages(a, b, match, options.id_column, options.truth, truths)
    total = len(match.rows_a)
    scores = measure(
        pages.batches(),
        normaliser(options.normalisations),
        lambda done: report(f"compared {done:,} of {total:,} pages"),
    )
    truth = None
    if options.truth or truths is not None:
        source = options.truth or str(options.truth_file)
        if not scores.has_truth.any():
            raise UsageError(f"truth {source}: no page has one. Check the column, or the ids of the file")
        truth = summarise_truth(scores, source, options.bootstrap, options.seed)
    return Comparison(
        a=describe_side(a, match.rows_a),
        b=describe_side(b, match.rows_b),
        normalisations=options.normalisations,
        match=summarise_match(match, f"column {options.id_column}" if options.id_column else "row number"),
        texts=summarise_texts(scores),
        statuses=cross_table(scores.statuses),
        truth=truth,
        worst=pages.worst(scores, options.worst),
    )


def progress_reporter() -> Report:
    """A line on stderr now and then."""
    last = time.monotonic()

    def report(line: str) -> None:
        nonlocal last
        if time.monotonic() - last >= PROGRESS_S:
            last = time.monotonic()
            sys.stderr.write(f"{PROG}: {visible(line)}\n")

    return report


def write_reports(comparison: Comparison, options: ParityOptions) -> None:
    """The table and the files."""
    (sys.stderr if options.json == "-" else sys.stdout).write(to_text(comparison))
    try:
        if options.json == "-":
            sys.stdout.write(to_json(comparison))
        elif options.json:
            Path(options.json).write_text(to_json(comparison), encoding="utf-8")
        if options.html:
            options.html.write_text(to_html(comparison), encoding="utf-8")
    except OSError as error:
        raise JobError(f"can't write the report: {error}") from error


def failed_limits(comparison: Comparison, options: ParityOptions) -> list[str]:
    """The --fail limits that the comparison is past."""
    failed = []
    mean = comparison.texts.similarity_mean_missing_as_0
    if options.fail_below is not None and mean is not None and mean < options.fail_below:
        failed.append(f"mean similarity {mean:.4f} is below {options.fail_below:g}")
    if options.fail_cer_diff is not None and comparison.truth is not None:
        worse = -comparison.truth.cer_difference.mean
        if worse > options.fail_cer_diff:
            failed.append(f"B's mean CER is {worse:.4f} above A's, more than {options.fail_cer_diff:g}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
