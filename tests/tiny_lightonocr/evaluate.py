"""Measures a tiny LightOnOCR through the real server: error rate, exact pages, distinct answers.

python -m tests.tiny_lightonocr.evaluate --checkpoint tests/tiny_lightonocr/checkpoint
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from rapidfuzz.distance import Levenshtein

from tests.tiny_lightonocr.drawn import DrawnPage, drawn_pages
from tests.vllm_cpu import CHECKPOINT, TinyServer, read_pages, serve_tiny


def error_rate(pages: list[DrawnPage], answers: list[str]) -> float:
    """Edits over characters, all pages together."""
    edits = sum(Levenshtein.distance(answer, page.text) for page, answer in zip(pages, answers, strict=True))
    return edits / sum(len(page.text) for page in pages)


def describe(pages: list[DrawnPage], answers: list[str]) -> str:
    """The figures of one reading."""
    exact = sum(answer == page.text for page, answer in zip(pages, answers, strict=True))
    return (
        f"CER {error_rate(pages, answers):.2%}, exact {exact}/{len(pages)}, distinct {len(set(answers))}/{len(pages)}"
    )


def by_rows(pages: list[DrawnPage], answers: list[str]) -> str:
    """The error rate for each number of rows."""
    pairs = list(zip(pages, answers, strict=True))
    rates = []
    for rows in sorted({page.text.count("\n") + 1 for page in pages}):
        some = [(page, answer) for page, answer in pairs if page.text.count("\n") + 1 == rows]
        rates.append(f"{rows}: {error_rate([page for page, _ in some], [answer for _, answer in some]):.2%}")
    return "CER by rows " + ", ".join(rates)


def measure(server: TinyServer, pages: list[DrawnPage]) -> None:
    """Asks for all pages at both temperatures and prints what came back."""
    images = [page.encoded() for page in pages]
    read_pages(server, images[:16])  # the first requests are slower
    started = time.monotonic()
    greedy = read_pages(server, images)
    pages_per_s = len(pages) / (time.monotonic() - started)
    again = read_pages(server, images)
    sampled = read_pages(server, images, temperature=0.2, top_p=0.9, seed=0)
    print(f"temperature 0: {describe(pages, greedy)}, {pages_per_s:.1f} pages/s")
    print(f"  {by_rows(pages, greedy)}")
    print(f"  asked again: {sum(a == b for a, b in zip(greedy, again, strict=True))}/{len(pages)} the same")
    print(f"temperature 0.2, top_p 0.9: {describe(pages, sampled)}")


def main() -> None:
    """Serves a checkpoint and measures it on fresh pages."""
    parser = argparse.ArgumentParser(prog="evaluate", description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT, help="folder (default: the committed one)")
    parser.add_argument("--pages", type=int, default=400, help="number of pages (default 400)")
    parser.add_argument("--most-rows", type=int, default=8, help="longest page, in rows (default 8)")
    parser.add_argument("--seed", type=int, default=2026, help="of the pages (default 2026)")
    options = parser.parse_args()
    pages = drawn_pages(options.pages, seed=options.seed, most_rows=options.most_rows)
    with (
        tempfile.TemporaryDirectory() as folder,
        serve_tiny(Path(folder) / "serve.log", checkpoint=options.checkpoint) as server,
    ):
        measure(server, pages)


if __name__ == "__main__":
    main()
