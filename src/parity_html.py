"""A comparison as one HTML page that needs nothing else."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence

from .diff import DIFF_ROWS, DIFF_TOKEN, DIFF_TOKENS, DiffRow, DiffSegment, clip_segment, diff_rows
from .findings import ComparedSide, Comparison, TruthSummary, WorstPage
from .parity_text import (
    fact_rows,
    histogram_labels,
    rounded,
    status_columns,
    truth_rows,
    worst_page_errors,
    worst_page_facts,
)
from .visible import visible

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
