"""Two columns of text, page by page: which rows belong together, and how far they are apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from .error_rates import FloatArray, IntArray, SideErrors, edit_distances, side_errors
from .normalise import Normaliser

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

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
