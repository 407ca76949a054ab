"""Where two texts part: as an excerpt of each, and as aligned lines with the changes marked."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from .visible import visible

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
