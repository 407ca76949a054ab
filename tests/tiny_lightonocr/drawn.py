"""Draws pages whose text is known, in the one way that the tiny LightOnOCR can read.

One monospaced character per cell of 28 × 28 pixels, because such a cell is one image token: patches of 14 pixels,
merged 2 × 2. Training and tests draw with the same functions. What changes the pitch of 28 pixels, scaling most of all,
can't be read, so a pipeline that resizes or moves pages shows at once.
"""

from __future__ import annotations

import functools
import importlib.util
import io
import random
import string
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

CELL_PX = 28
MOST_ROWS, MOST_COLUMNS = 8, 16
ALPHABET = string.ascii_uppercase + string.ascii_lowercase + string.digits + ".,:;-!?()'/%"

_FONT_PACKAGE = "rinoh_typeface_dejavusansmono"
_MARGIN_PX = 8  # a glyph may reach over the edge of its cell
_WORD_LENGTHS = (1, 2, 2, 3, 3, 3, 4, 4, 4, 5, 5, 6, 7, 8)


@dataclass(frozen=True)
class Look:
    """How a page is drawn: font size, shift of the whole page, jitter of each character, gray of ink and paper."""

    font_px: int = 23
    shift_px: tuple[int, int] = (0, 0)
    jitter_px: int = 0
    ink: int = 0
    paper: int = 255


PLAIN = Look()


@dataclass(frozen=True)
class DrawnPage:
    """A page and the text that stands on it."""

    text: str
    image: Image.Image

    def encoded(self, image_format: str = "PNG") -> bytes:
        """The page as the bytes of an image file."""
        buffer = io.BytesIO()
        self.image.save(buffer, image_format)
        return buffer.getvalue()


def drawn_pages(count: int, *, seed: int = 0, most_rows: int = 6) -> list[DrawnPage]:
    """Makes `count` different pages of different sizes; page i is the same whatever `count` is."""
    return [drawn_page(seed * 1_000_003 + index, most_rows=most_rows) for index in range(count)]


def drawn_page(seed: int, *, most_rows: int = 6) -> DrawnPage:
    """Makes one page of random words, with a random look and the size that its text needs."""
    rng = random.Random(seed)
    columns = rng.randint(10, MOST_COLUMNS)
    lines = [random_line(rng, columns) for _ in range(rng.randint(2, most_rows))]
    return DrawnPage("\n".join(lines), draw(lines, len(lines), columns, random_look(rng), rng).convert("RGB"))


def page_with(text: str, look: Look = PLAIN) -> DrawnPage:
    """Draws a given text: up to 8 lines of up to 15 characters of the alphabet."""
    lines = text.split("\n")
    columns = max(len(line) for line in lines) + 1
    if len(lines) > MOST_ROWS or columns > MOST_COLUMNS or set(text) - set(ALPHABET + " \n"):
        raise ValueError(f"not a text that the tiny model was trained to read: {text!r}")
    return DrawnPage(text, draw(lines, len(lines), max(columns, 8), look).convert("RGB"))


def draw(
    lines: list[str], rows: int, columns: int, look: Look = PLAIN, rng: random.Random | None = None
) -> Image.Image:
    """Draws lines into a gray page of rows × columns cells."""
    rng = rng or random.Random(0)
    page = Image.new("L", (columns * CELL_PX, rows * CELL_PX), look.paper)
    for row, line in enumerate(lines):
        for column, character in enumerate(line):
            if character == " ":
                continue
            jitter_x, jitter_y = (rng.randint(-look.jitter_px, look.jitter_px) for _ in range(2))
            left = column * CELL_PX - _MARGIN_PX + look.shift_px[0] + jitter_x
            top = row * CELL_PX - _MARGIN_PX + look.shift_px[1] + jitter_y
            page.paste(look.ink, (left, top), _glyph(look.font_px, character))
    return page


def random_look(rng: random.Random) -> Look:
    """Draws a look from the range that the model was trained on."""
    return Look(
        font_px=rng.choice((19, 20, 21, 22, 22, 23, 23, 23, 24, 24, 25)),
        shift_px=(rng.randint(-3, 3), rng.randint(-2, 2)),
        jitter_px=1 if rng.random() < 0.6 else 0,
        ink=rng.randint(0, 70) if rng.random() < 0.6 else 0,
        paper=rng.randint(225, 255) if rng.random() < 0.6 else 255,
    )


def random_line(rng: random.Random, columns: int) -> str:
    """Makes a line of words, or now and then of bare characters, that leaves the last column empty."""
    length = rng.randint(max(2, columns // 2), columns - 1)
    if rng.random() < 0.2:
        return _characters(rng, ALPHABET, length)
    line = _random_word(rng, length)
    while length - len(line) >= 2:
        line += " " + _random_word(rng, length - len(line) - 1)
    return line


def _random_word(rng: random.Random, longest: int) -> str:
    length = min(longest, rng.choice(_WORD_LENGTHS))
    kind = rng.random()
    if kind < 0.55:
        word = _characters(rng, string.ascii_lowercase, length)
    elif kind < 0.70:
        word = _characters(rng, string.ascii_uppercase, 1) + _characters(rng, string.ascii_lowercase, length - 1)
    elif kind < 0.82:
        word = _characters(rng, string.ascii_uppercase, length)
    elif kind < 0.94:
        word = _characters(rng, string.digits, length)
    else:
        word = _characters(rng, ALPHABET, length)
    if length < longest and rng.random() < 0.15:
        word += rng.choice(".,:;-!?()'/%")
    return word


def _characters(rng: random.Random, alphabet: str, length: int) -> str:
    return "".join(rng.choice(alphabet) for _ in range(length))


@functools.cache
def _glyph(font_px: int, character: str) -> Image.Image:
    side_px = CELL_PX + 2 * _MARGIN_PX
    glyph = Image.new("L", (side_px, side_px), 0)
    baseline = (_MARGIN_PX + CELL_PX // 2, _MARGIN_PX + 21)
    ImageDraw.Draw(glyph).text(baseline, character, font=_font(font_px), fill=255, anchor="ms")
    return glyph


@functools.cache
def _font(font_px: int) -> ImageFont.FreeTypeFont:
    """Opens DejaVu Sans Mono from a package, since a bare machine has no fonts."""
    spec = importlib.util.find_spec(_FONT_PACKAGE)  # not imported: importing it would want all of rinohtype
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError(f"The font package {_FONT_PACKAGE.replace('_', '-')} is not installed.")
    return ImageFont.truetype(str(Path(spec.submodule_search_locations[0]) / "DejaVuSansMono.ttf"), font_px)
