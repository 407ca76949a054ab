"""A comparison in words and numbers: as a table for a terminal, and as JSON."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from .compare import DISTANCE_EDGES
from .findings import Comparison, TruthSummary, WorstPage
from .visible import visible

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
