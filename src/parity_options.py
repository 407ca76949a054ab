"""The command line of a comparison: two results, a truth, and what is reported."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .normalise import NORMALISATIONS

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
