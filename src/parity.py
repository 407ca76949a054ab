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

import argparse
import heapq
import json
import math
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from .compare import NORMALISATIONS, PageBatch, PageScores, RowMatch, match_ids, measure, normaliser
from .errors import JobError, SourceError, UsageError
from .parity_report import (
    ComparedSide,
    Comparison,
    WorstPage,
    cross_table,
    difference_excerpts,
    summarise_match,
    summarise_texts,
    summarise_truth,
    to_html,
    to_json,
    to_text,
    visible,
)

PROG = "lighton-ocr-parity.py"
BATCH_ROWS = 500
PROGRESS_S = 5.0

# --- options ----------------------------------------------------------------------------------------------------------


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


# --- reading a side ---------------------------------------------------------------------------------------------------

FILE_FORMATS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv", ".arrow": "arrow"}
HUB_ID = re.compile(r"(?P<id>[\w.-]+(?:/[\w.-]+)?)(?:@(?P<revision>[\w./-]+))?")
MADE_BY_SHOWN = 3
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
        if _is_saved(Path(options.source)):
            rows, split = _open_saved(options, where)
            columns = _choose_columns(rows.features, options, wanted, companions, where)
            made_by = _made_by(rows.select_columns(["inference_info"]) if "inference_info" in rows.features else None)
            return LoadedSide(options, split, rows.select_columns(columns), made_by)
        return _spool(options, wanted, companions, where, folder, report)
    except (OSError, ValueError) as error:  # datasets and huggingface_hub raise subclasses of these two
        reason = str(error).strip().split("\n")[0]
        raise UsageError(f"can't read {where}: {reason} Check the name, --config and --split") from error


def _is_saved(path: Path) -> bool:
    return any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))


def _open_saved(options: SideOptions, where: str) -> tuple[Any, str]:
    from datasets import DatasetDict, load_from_disk

    saved = load_from_disk(options.source)
    if isinstance(saved, DatasetDict):
        split = choose_split(list(saved), options.split, where)
        return saved[split], split
    return saved, choose_split([str(saved.split or "train")], options.split, where)


def choose_split(splits: Sequence[str], asked: str | None, where: str) -> str:
    """The split that is asked for; else the only one; else train."""
    if asked in splits:
        return str(asked)
    if asked is None and (len(splits) == 1 or "train" in splits):
        return splits[0] if len(splits) == 1 else "train"
    what = "no --split given" if asked is None else f"no split {asked!r}"
    raise UsageError(f"{where}: {what}. Choose --split from: {', '.join(splits)}")


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
    if match is None or source.startswith(".") or path.suffix in FILE_FORMATS:
        raise UsageError(
            f"{source}: no such file or folder, and not a Hub dataset id (namespace/name or name@revision)"
        )
    return {"path": match["id"], "revision": match["revision"]}


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
    split = choose_split(list(streams), options.split, where)
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
    except (OSError, ValueError) as error:
        raise SourceError(f"{where} stopped being readable: {error} The same command starts again") from error
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
    return " ".join(words)[:160]


# --- comparing --------------------------------------------------------------------------------------------------------


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


# --- the script -------------------------------------------------------------------------------------------------------


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


if __name__ == "__main__":
    sys.exit(main())
