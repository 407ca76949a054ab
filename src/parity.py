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

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from .compare import measure
from .errors import JobError, UsageError
from .findings import Comparison, cross_table, summarise_match, summarise_texts, summarise_truth
from .normalise import normaliser
from .parity_html import to_html
from .parity_options import PROG, ParityOptions, parse_parity_options
from .parity_pages import MatchedPages, describe_side, match_sides, read_truth_file
from .parity_source import Report, load_side
from .parity_text import to_json, to_text
from .visible import visible

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
