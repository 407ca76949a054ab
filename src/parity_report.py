"""What a comparison found, as one object, and that object as a text table, as JSON and as one HTML page."""

from __future__ import annotations

import html
import json
import re
import textwrap
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from .compare import (
    DISTANCE_EDGES,
    FloatArray,
    Interval,
    PageScores,
    RowMatch,
    SideErrors,
    distance_histogram,
    first_difference,
    paired_bootstrap,
    worst_decile_mean,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

# --- what was found ---------------------------------------------------------------------------------------------------


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


def to_json(comparison: Comparison) -> str:
    """The comparison without the texts."""
    record: dict[str, Any] = {"version": 1, **asdict(comparison)}
    for page in record["worst"]:
        del page["text_a"], page["text_b"]
    return json.dumps(record, ensure_ascii=False, allow_nan=False, indent=2) + "\n"


# --- words for numbers, and harmless text -----------------------------------------------------------------------------

CONTROL_PICTURES: Mapping[int, int | str] = {
    **{code: 0x2400 + code for code in range(32)},
    **dict.fromkeys((*range(0x7F, 0xA0), 0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A)), 0xFFFD),
    0x09: "⇥",
    0x0A: "⏎",
}


def visible(text: str) -> str:
    """Text on one line that can't steer a terminal: control and direction characters become pictures."""
    return text.translate(CONTROL_PICTURES)


def _number(value: float | None, digits: int = 4) -> str:
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
            f"mean {_number(texts.similarity_mean)} · median {_number(texts.similarity_median)} · "
            f"worst decile {_number(texts.similarity_worst_decile_mean)}",
        ),
    ]
    if texts.no_text_a or texts.no_text_b:
        rows.append(("… a lone text as 0", f"mean {_number(texts.similarity_mean_missing_as_0)}"))
    rows += [
        ("characters", f"A {texts.characters_a:,} · B {texts.characters_b:,}"),
        (
            "length B/A",
            f"median {_number(texts.length_ratio_median, 3)} · p5 {_number(texts.length_ratio_p5, 3)} · "
            f"p95 {_number(texts.length_ratio_p95, 3)} · beyond 2x: {texts.length_beyond_2x:,} pages",
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


# --- text -------------------------------------------------------------------------------------------------------------

BAR_WIDTH = 40


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


def status_columns(statuses: Mapping[str, Mapping[str, int]]) -> list[str]:
    """B's statuses, in the order of the alphabet."""
    return sorted({status for row in statuses.values() for status in row})


def worst_page_facts(page: WorstPage) -> list[str]:
    """What one line says about a page."""
    facts = [f"similarity {_number(page.similarity)}" if page.similarity is not None else "a text on one side only"]
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


# --- a readable difference --------------------------------------------------------------------------------------------

DIFF_TOKEN = re.compile(r"\n|[^\S\n]+|[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|\w+?(?=[\u3040-\u9fff])|\w+|[^\w\s]")
DIFF_TOKENS = 8_000  # of each side: the alignment of two texts of this length takes a few milliseconds
DIFF_ROWS = 60
DIFF_EQUAL_CHARACTERS = 240
DIFF_CHANGED_CHARACTERS = 1_000


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


# --- HTML -------------------------------------------------------------------------------------------------------------

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
        (_number(texts.similarity_mean), "mean similarity"),
        (_number(texts.similarity_worst_decile_mean), "worst decile"),
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
