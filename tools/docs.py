"""Write what the docs say twice: tables in README.md and SERVING.md from models.json, OPTIONS.md from the parsers.

    .venv/bin/python tools/docs.py            write the regions and OPTIONS.md
    .venv/bin/python tools/docs.py --check    write nothing; exit 1 with the difference where something is out of date

A region of a page stands between `<!-- generated: NAME -->` and `<!-- /generated -->`, each alone on its line; NAME is
one of `--list`. Everything else on a page is written by hand, and its numbers are looked up: see tools/doc_numbers.py.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # run by its path, it finds tools/ and src/ all the same

from tools.doc_numbers import known_numbers, unknown_numbers  # noqa: E402
from tools.doc_options import options_page  # noqa: E402
from tools.doc_tables import make_tables  # noqa: E402

PAGES = ("README.md", "SERVING.md")
OPTIONS_PAGE = "OPTIONS.md"
OPENED = re.compile(r"<!-- generated: (.*?) -->")
CLOSED = "<!-- /generated -->"


class DocsError(Exception):
    """A page can't be generated or says what nothing vouches for: file, line, what, and the next step."""


@dataclass(frozen=True)
class Region:
    """A generated part of a page: the lines between its two markers, counted from 0."""

    name: str
    start: int
    end: int


def find_regions(path: str, text: str) -> list[Region]:
    """The regions of a page in their order. Raises `DocsError` for one that is not closed, or closed twice."""
    regions: list[Region] = []
    opened: tuple[str, int] | None = None
    for number, line in enumerate(text.splitlines()):
        if match := OPENED.fullmatch(line.strip()):
            if opened:
                raise DocsError(f"{path}:{number + 1}: a region begins inside of {opened[0]!r}. {_close_it(opened[1])}")
            opened = match[1], number + 1
        elif line.strip() == CLOSED:
            if not opened:
                raise DocsError(f"{path}:{number + 1}: a region ends that was not opened. Remove the line.")
            regions.append(Region(*opened, end=number))
            opened = None
        elif "<!-- generated" in line or "<!-- /generated" in line:
            raise DocsError(f"{path}:{number + 1}: a marker of a region must stand alone, as {CLOSED} does.")
    if opened:
        raise DocsError(f"{path}:{opened[1]}: the region {opened[0]!r} is not closed. {_close_it(opened[1])}")
    return regions


def _close_it(line: int) -> str:
    return f"Put {CLOSED} after the table that line {line} opens."


def fill_regions(path: str, text: str, tables: Mapping[str, str]) -> str:
    """The page with what its regions should hold. Raises `DocsError` for a name that there is not."""
    lines = text.splitlines()
    for region in reversed(find_regions(path, text)):
        if region.name not in tables:
            close = difflib.get_close_matches(region.name, tables, n=1)
            hint = f"Is {close[0]!r} meant? " if close else ""
            raise DocsError(
                f"{path}:{region.start}: no table is called {region.name!r}. "
                f"{hint}`python tools/docs.py --list` names them all."
            )
        lines[region.start : region.end] = ["", *tables[region.name].splitlines(), ""]
    return "\n".join(lines) + "\n"


def hand_written(path: str, text: str) -> str:
    """The page without its regions, its line numbers kept."""
    lines = text.splitlines()
    for region in find_regions(path, text):
        lines[region.start : region.end] = [""] * (region.end - region.start)
    return "\n".join(lines) + "\n"


def make_pages(root: Path, catalogue: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Each page → what it says and what it should say."""
    tables = make_tables(catalogue)
    texts = {path.name: path.read_text(encoding="utf-8") for path in root.glob("*.md")}
    pages = {name: (texts[name], fill_regions(name, texts[name], tables)) for name in PAGES}
    pages[OPTIONS_PAGE] = texts.get(OPTIONS_PAGE, ""), options_page(tables["scripts-in-and-out"])
    return pages


def stray_numbers(pages: Mapping[str, tuple[str, str]], catalogue: Mapping[str, Any]) -> list[str]:
    """A message for each number in hand-written prose that models.json does not have."""
    known = known_numbers(catalogue)
    return [
        f"{name}:{number.line}: models.json has no {number}. Correct it, write a small count as a word, or put the "
        "fact into models.json with its evidence (tools/doc_numbers.py has the rule)."
        for name, (text, _) in pages.items()
        if name in PAGES
        for number in unknown_numbers(hand_written(name, text), known)
    ]


def difference(name: str, text: str, wanted: str) -> str:
    """The head of the difference between a page and what it should be, each place with its line."""
    before, after = text.splitlines(), wanted.splitlines()
    shown: list[str] = []
    # Tables repeat lines, which difflib's ready-made differences would take for junk.
    for tag, start, end, first, last in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if tag != "equal":
            shown += [f"{name}:{start + 1}:", *(f"-{line}" for line in before[start:end])]
            shown += [f"+{line}" for line in after[first:last]]
    return "\n".join(shown[:40])


def main(argv: list[str] | None = None) -> int:
    """Write or check the docs; 1 if something is out of date, refused or vouched for by nothing."""
    parser = argparse.ArgumentParser(prog="tools/docs.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare with what is there, write nothing")
    parser.add_argument("--list", action="store_true", help="print the names of the tables, write nothing")
    parser.add_argument(
        "--root", type=Path, default=ROOT, help="the folder of the pages and models.json (default: here)"
    )
    options = parser.parse_args(argv)
    catalogue = json.loads((options.root / "models.json").read_text(encoding="utf-8"))
    if options.list:
        print("\n".join(make_tables(catalogue)))
        return 0
    try:
        pages = make_pages(options.root, catalogue)
        problems = stray_numbers(pages, catalogue)
    except DocsError as error:
        print(error, file=sys.stderr)
        return 1
    for name, (text, wanted) in pages.items():
        if text != wanted and options.check:
            problems.append(f"{difference(name, text, wanted)}\n{name} is out of date: run `python tools/docs.py`")
        elif text != wanted:
            (options.root / name).write_text(wanted, encoding="utf-8", newline="\n")
            print(f"{name}: written")
    for problem in problems:
        print(problem, file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
