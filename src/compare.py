"""Two columns of text, page by page: which rows belong together, how far they are apart, which is nearer the truth."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FloatArray: TypeAlias = "NDArray[np.float64]"
IntArray: TypeAlias = "NDArray[np.int64]"
BoolArray: TypeAlias = "NDArray[np.bool_]"
Normaliser: TypeAlias = Callable[[str], str]

# --- normalisations ---------------------------------------------------------------------------------------------------

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


def edit_distances(texts_a: Sequence[str], texts_b: Sequence[str]) -> IntArray:
    """The Levenshtein distance of each pair, in characters."""
    import numpy as np
    from rapidfuzz.distance import Levenshtein
    from rapidfuzz.process import cpdist

    if not texts_a:
        return np.zeros(0, dtype=np.int64)
    distances = cpdist(texts_a, texts_b, scorer=Levenshtein.distance, dtype=np.int64, workers=-1)
    return np.asarray(distances, dtype=np.int64)


def similarity(text_a: str, text_b: str) -> float:
    """1 for the same text, 0 for no character in common: 1 - edits / length of the longer text."""
    longer = max(len(text_a), len(text_b))
    return 1.0 - int(edit_distances([text_a], [text_b])[0]) / longer if longer else 1.0


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


def _rates(edits: IntArray, totals: IntArray) -> FloatArray:
    import numpy as np

    return np.where(totals > 0, edits / np.maximum(totals, 1), (edits > 0).astype(np.float64))


# --- statistics -------------------------------------------------------------------------------------------------------

# A distance of 0, then up to each edge, then beyond the last: OCR runs differ by little or by everything.
DISTANCE_EDGES = (0.001, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
BOOTSTRAP_WORK = 300_000_000  # pages drawn in all: a few seconds; a million pages need no more than 1,000 resamples


def distance_histogram(distances: FloatArray) -> tuple[int, ...]:
    """How many pages lie at 0, and in each step between the edges."""
    import numpy as np

    bins = np.searchsorted(np.array((0.0, *DISTANCE_EDGES)), distances, side="left")
    return tuple(int(count) for count in np.bincount(bins, minlength=len(DISTANCE_EDGES) + 2))


def worst_decile_mean(distances: FloatArray) -> float:
    """The mean distance of the tenth of the pages (at least one) that is furthest apart."""
    import numpy as np

    return float(np.sort(distances)[-max(1, -(-len(distances) // 10)) :].mean())


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


def first_difference(text_a: str, text_b: str) -> int:
    """The index of the first character in which the texts differ; their length where they don't."""
    pairs = enumerate(zip(text_a, text_b, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(text_a), len(text_b)))
