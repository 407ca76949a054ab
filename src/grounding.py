"""The text of a page with its layout: LightOnOCR-3's grounding markers read, taken out and put back.

Before every layout block stands a marker `![label](x1,y1,x2,y2)`: four whole numbers from 0 to 1000 whatever the size
of the image; the block's text runs to the next marker. `text+` continues the block before it (grammar: FACTS §1).

What looks like a marker and is none (an unknown label, another count of numbers, one beyond 1000, a box inside out,
cut off at the end of the text) stays in the text and is counted. An ordinary picture, `![alt](figure.png)`, is text.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

CONTINUATION = "text+"
RUNNING_LABELS = frozenset({"title", "section", "text", "list", "caption", "footnote", "aside_text"})
GROUNDING_LABELS = RUNNING_LABELS | {"header", "footer", "page_number", "table", "chart", "formula", "code", "image"}

# In the parentheses nothing but numbers: no address of a picture looks like that. A cut-off text may lack the last one.
MARKER_LIKE = re.compile(r"!\[([^\[\]\n]*)\]\((?=[^()\n]*[0-9])([-+0-9.,; \t]*)(\)|\Z)")
FOUR_NUMBERS = re.compile(r"([0-9]{1,4}),[ \t]*([0-9]{1,4}),[ \t]*([0-9]{1,4}),[ \t]*([0-9]{1,4})")

Box = tuple[int, int, int, int]


@dataclass(frozen=True)
class Block:
    """A part of the page: its label, its box (x1, y1, x2, y2 in thousandths of the page), its text.

    In normal form, which `parse_grounding` gives, the label is one of `GROUNDING_LABELS`, the box lies within the page
    and is not inside out, and the text has no white space at its ends and no marker in it.
    """

    label: str
    bbox: Box
    text: str


@dataclass(frozen=True)
class Grounded:
    """A page in blocks; `before` is text in front of the first marker, `malformed` counts what was nearly a marker."""

    blocks: tuple[Block, ...]
    malformed: int = 0
    before: str = ""


@dataclass(frozen=True)
class _Marker:
    label: str
    bbox: Box
    start: int
    end: int


def parse_grounding(text: str) -> Grounded:
    """Read the markers of a page. No text is lost, and none is invented."""
    markers: list[_Marker] = []
    malformed = 0
    for match in MARKER_LIKE.finditer(text):
        marker = _read_marker(match)
        if marker:
            markers.append(marker)
        else:
            malformed += 1
    blocks: list[Block] = []
    starts = [*(marker.start for marker in markers), len(text)]
    for marker, end in zip(markers, starts[1:], strict=True):
        _add(blocks, Block(marker.label, marker.bbox, text[marker.end : end].strip()))
    return Grounded(tuple(blocks), malformed, text[: starts[0]].strip())


def _read_marker(match: re.Match[str]) -> _Marker | None:
    numbers = FOUR_NUMBERS.fullmatch(match[2].strip(" \t"))
    if match[1] not in GROUNDING_LABELS | {CONTINUATION} or not numbers or not match[3]:
        return None
    x1, y1, x2, y2 = (int(number) for number in numbers.groups())
    if not (x1 <= x2 <= 1000 and y1 <= y2 <= 1000):
        return None
    return _Marker(match[1], (x1, y1, x2, y2), match.start(), match.end())


def _add(blocks: list[Block], block: Block) -> None:
    """Append a block, or join it to the last one if it continues that.

    The box of both is the one around both. Only running text is continued: a `text+` on top of the page, or after a
    footer or a picture, is a block of its own, so that to drop footers drops no text.
    """
    if block.label != CONTINUATION:
        blocks.append(block)
    elif blocks and blocks[-1].label in RUNNING_LABELS:
        last = blocks[-1]
        joined = "\n".join(part for part in (last.text, block.text) if part)
        blocks[-1] = Block(last.label, _around(last.bbox, block.bbox), joined)
    else:
        blocks.append(Block("text", block.bbox, block.text))


def _around(a: Box, b: Box) -> Box:
    return min(a[0], b[0]), min(a[1], b[1]), max(a[2], b[2]), max(a[3], b[3])


def render_grounding(blocks: Iterable[Block], before: str = "") -> str:
    """Write blocks with their markers: `parse_grounding` reads the same blocks again, if they are in normal form."""
    parts = [before] if before else []
    for block in blocks:
        marker = f"![{block.label}]({','.join(map(str, block.bbox))})"
        parts.append(f"{marker}\n{block.text}" if block.text else marker)
    return "\n\n".join(parts)


def plain_text(page: Grounded, drop_labels: Collection[str] = ()) -> str:
    """Return the text without markers, blocks apart by an empty line; whole blocks of `drop_labels` left out."""
    kept = [block.text for block in page.blocks if block.label not in drop_labels]
    return "\n\n".join(part for part in (page.before, *kept) if part)
