"""The pages that two results have in common: their texts, some at a time, and those furthest apart."""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .compare import PageBatch, PageScores, RowMatch, match_ids
from .diff import difference_excerpts
from .errors import UsageError
from .findings import ComparedSide, WorstPage
from .parity_source import LoadedSide

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
