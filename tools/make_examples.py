"""Draw the example pages, examples/pages/*, and write their true text, examples/truth.json.

    uv run python tools/make_examples.py [DIRECTORY]

Eight pages, each with one thing that goes wrong easily: two columns, a table, accents, EXIF orientation, transparency,
16 bits a pixel, nothing on it at all. The only font is the one inside Pillow, so that every machine draws the same
pages; it has no accented letters, which are therefore put together from letters and marks, as typewriters did.
"""

from __future__ import annotations

import argparse
import json
import random
import struct
import sys
import unicodedata
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image, ImageChops, ImageDraw, ImageFilter, ImageFont, ImageOps

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
# A4 at 150 dpi.
PAGE_SIZE = (1240, 1754)
MARGIN_PX = 130
BODY_PX = 28
# Lines are drawn this many times larger and reduced, so that marks scaled to a letter have smooth edges.
OVERSAMPLING = 4
INK = 28
PAPER = 252


# ---------------------------------------------------------------------------------------------------------------------
# Letters
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mark:
    """A diacritic made from a character of the font, with sizes in parts of the letter's."""

    character: str
    scale: float
    gap: float = 0.06
    above: bool = True


MARKS = {
    "\N{COMBINING ACUTE ACCENT}": Mark("\N{ACUTE ACCENT}", 1.0),
    "\N{COMBINING GRAVE ACCENT}": Mark("`", 1.0),
    "\N{COMBINING CIRCUMFLEX ACCENT}": Mark("^", 0.66),
    "\N{COMBINING TILDE}": Mark("~", 0.76, gap=0.08),
    "\N{COMBINING DIAERESIS}": Mark("..", 1.0, gap=0.08),
    "\N{COMBINING RING ABOVE}": Mark("°", 0.8, gap=0.03),
    "\N{COMBINING CEDILLA}": Mark(",", 0.9, gap=-0.03, above=False),
}


@lru_cache(maxsize=32)
def font(size: int) -> ImageFont.FreeTypeFont:
    """Load the font inside Pillow, laid out by Pillow itself: shaping libraries differ between machines."""
    loaded = ImageFont.load_default(size)
    assert isinstance(loaded, ImageFont.FreeTypeFont), "this Pillow was built without FreeType"
    return loaded.font_variant(layout_engine=ImageFont.Layout.BASIC)


@lru_cache(maxsize=512)
def glyph(character: str, size: int) -> Image.Image:
    """Draw one letter as a mask; the mask is as wide as the letter's advance, its baseline `size` below its top."""
    if character == "æ":
        return _ligature(size)
    if character == "ø":
        return _struck_through("o", size)
    if character == "ß":
        return _sharp_s(size)
    if character == "¿":
        return _turned("?", size)
    decomposed = unicodedata.normalize("NFD", character)
    letter = decomposed[0]
    mask = _plain(letter, size)
    for mark in decomposed[1:]:
        mask = _marked(mask, letter, MARKS[mark], size)
    return mask


def _plain(letter: str, size: int) -> Image.Image:
    mask = Image.new("L", (max(1, round(font(size).getlength(letter))), size * 3 // 2))
    ImageDraw.Draw(mask).text((0, size), letter, fill=255, font=font(size), anchor="ls")
    return mask


def _ink_box(letter: str, size: int) -> tuple[int, int, int, int]:
    box = _plain(letter, size).getbbox()
    assert box is not None, f"the font has no {letter!r}"
    return box


def _marked(mask: Image.Image, letter: str, mark: Mark, size: int) -> Image.Image:
    """Set a mark over the middle of a letter, or under its foot."""
    mark_size = round(size * mark.scale)
    shape = _plain(mark.character, mark_size).crop(_ink_box(mark.character, mark_size))
    left, top, right, bottom = _ink_box(letter, size)
    if letter == "i":
        # The font has no i without a dot: the dot goes, and the mark takes its place.
        top = _ink_box("x", size)[1]
        mask = mask.copy()
        mask.paste(0, (0, 0, mask.width, top - size // 40))
    x = (left + right - shape.width) // 2
    y = top - shape.height - round(size * mark.gap) if mark.above else bottom + round(size * mark.gap)
    # A mark wider than an i needs some room beside it.
    room = max(0, -x)
    wide = Image.new("L", (mask.width + 2 * room, mask.height))
    wide.paste(mask, (room, 0))
    return _over(wide, shape, x + room, y)


def _over(mask: Image.Image, shape: Image.Image, x: int, y: int) -> Image.Image:
    layer = Image.new("L", mask.size)
    layer.paste(shape, (x, y))
    return ImageChops.lighter(mask, layer)


def _ligature(size: int) -> Image.Image:
    """Draw æ: the stem of the a and the back of the e share their place."""
    stem = size // 11
    x = _ink_box("a", size)[2] - _ink_box("e", size)[0] - stem
    over = _plain("e", size)
    wide = Image.new("L", (x + over.width, over.height))
    wide.paste(_plain("a", size), (0, 0))
    return _over(wide, over, x, 0)


def _struck_through(letter: str, size: int) -> Image.Image:
    mask = _plain(letter, size)
    left, top, right, bottom = _ink_box(letter, size)
    ends = [(left - size // 50, bottom + size // 50), (right + size // 50, top - size // 50)]
    ImageDraw.Draw(mask).line(ends, fill=255, width=size // 14)
    return mask


def _sharp_s(size: int) -> Image.Image:
    """Draw ß with a pen: up the stem, over the top, down two bows."""
    mask = Image.new("L", (round(0.6 * size), size * 3 // 2))
    pen = ImageDraw.Draw(mask)
    stroke = round(0.082 * size)
    left, right = round(0.08 * size), round(0.53 * size)
    top, waist, bottom = size - _ink_box("l", size)[3] + _ink_box("l", size)[1], round(0.61 * size), size
    shoulder = round(0.47 * size)
    radius = (shoulder - left) // 2
    pen.arc((left, top, shoulder, top + 2 * radius), 180, 360, fill=255, width=stroke)
    pen.rectangle((left, top + radius, left + stroke - 1, bottom), fill=255)
    pen.arc((left + radius // 2, top, shoulder, waist + stroke // 2), 330, 90, fill=255, width=stroke)
    pen.arc((left + radius // 2, waist - stroke // 2, right, bottom + size // 60), 270, 110, fill=255, width=stroke)
    return mask


def _turned(letter: str, size: int) -> Image.Image:
    """Turn a mark upside down, and let it hang below the line."""
    shape = _plain(letter, size).crop(_ink_box(letter, size)).transpose(Image.Transpose.ROTATE_180)
    return _over(Image.new("L", _plain(letter, size).size), shape, _ink_box(letter, size)[0], _ink_box("x", size)[1])


def text_mask(text: str, size: int, bold: bool = False) -> Image.Image:
    """Draw a line of text as a mask; the baseline lies `size` below its top."""
    large = size * OVERSAMPLING
    glyphs = [glyph(character, large) for character in text]
    line = Image.new("L", (sum(g.width for g in glyphs) + OVERSAMPLING, large * 3 // 2))
    x = 0
    for shape in glyphs:
        line.paste(ImageChops.lighter(shape, line.crop((x, 0, x + shape.width, line.height))), (x, 0))
        x += shape.width
    if bold:
        line = line.filter(ImageFilter.MaxFilter(2 * (large // 50) + 1))
    return line.reduce(OVERSAMPLING)


def text_width(text: str, size: int) -> float:
    """Measure a line of text in pixels."""
    return sum(glyph(character, size * OVERSAMPLING).width for character in text) / OVERSAMPLING


# ---------------------------------------------------------------------------------------------------------------------
# Pages
# ---------------------------------------------------------------------------------------------------------------------


class Sheet:
    """A sheet of ink (white on black, a mask) that text is written on from the top down."""

    def __init__(self, size: tuple[int, int] = PAGE_SIZE, margin: int = MARGIN_PX) -> None:
        self.ink = Image.new("L", size)
        self.margin = margin
        self.y = margin

    def line(self, text: str, x: float, size: int = BODY_PX, bold: bool = False) -> None:
        """Write a line at the current height, without moving on."""
        mask = text_mask(text, size, bold)
        box = (round(x), self.y, round(x) + mask.width, self.y + mask.height)
        self.ink.paste(ImageChops.lighter(mask, self.ink.crop(box)), box[:2])

    def centred(self, text: str, size: int, bold: bool = False) -> None:
        """Write a line in the middle of the sheet and move below it."""
        self.line(text, (self.ink.width - text_width(text, size)) / 2, size, bold)
        self.y += round(1.5 * size)

    def paragraph(self, text: str, x: float | None = None, width: float | None = None, size: int = BODY_PX) -> None:
        """Write running text, broken into lines, and move below it."""
        x = self.margin if x is None else x
        for row in wrapped(text, size, width or self.ink.width - 2 * self.margin):
            self.line(row, x, size)
            self.y += round(1.5 * size)
        self.y += round(0.9 * size)

    def rule(self, x0: float, x1: float, width: int = 2) -> None:
        """Draw a horizontal rule at the current height."""
        ImageDraw.Draw(self.ink).line([(x0, self.y), (x1, self.y)], fill=255, width=width)

    def gray(self, ink: int = INK, paper: int = PAPER) -> Image.Image:
        """Show the sheet as dark ink on light paper."""
        return self.ink.point([round(paper + (ink - paper) * value / 255) for value in range(256)])

    def save(self, path: Path) -> None:
        """Save it as a gray PNG."""
        self.gray().save(path, optimize=True, dpi=(150, 150))


def wrapped(text: str, size: int, width: float) -> list[str]:
    """Break text into lines no wider than `width`."""
    rows: list[str] = []
    for word in text.split():
        longer = f"{rows[-1]} {word}" if rows else word
        if rows and text_width(longer, size) <= width:
            rows[-1] = longer
        else:
            rows.append(word)
    return rows


def noise(size: tuple[int, int], levels: int, seed: int) -> Image.Image:
    """Make an even grain of values from 0 to levels - 1, the same on every machine."""
    raw = random.Random(seed).randbytes(size[0] * size[1])
    return Image.frombytes("L", size, raw).point([value * levels // 256 for value in range(256)])


@dataclass(frozen=True)
class Example:
    """One example page: how it is drawn into a file, and what stands on it."""

    name: str
    draw: Callable[[Path], None]
    text: str


TITLE = "The Night Catalogue"
TITLE_PARAGRAPHS = (
    "When the reading room closes, the catalogue goes on working. Drawers that no hand has opened since spring slide "
    "out a finger's breadth and back again, as if to check that every card is still in its place.",
    "The archivist explains it by the heating. Warm air rises through the old shafts, she says, and the wood gives a "
    "little. Nobody contradicts her, for she has kept these rooms in order for thirty-one years.",
    "Still, on the first Monday of each month she finds one card lying on the long table: a title that a reader had "
    "asked for in vain, with the shelf mark corrected in pencil. In 1987 it was a harbour map. Last winter it was a "
    "book of songs that everybody had believed lost in the flood.",
    "Who puts it there, the archivist has never tried to find out. One does not set traps, she says, for a colleague "
    "who works at night and asks for no pay.",
    "She thanks the empty room, puts the kettle on, and carries the card to the front desk before the doors open.",
)


def draw_title(path: Path) -> None:
    """Draw a title over paragraphs."""
    sheet = Sheet()
    sheet.y += 30
    sheet.centred(TITLE, 72, bold=True)
    sheet.y += 50
    for paragraph in TITLE_PARAGRAPHS:
        sheet.paragraph(paragraph, size=36)
    sheet.save(path)


COLUMNS_TITLE = "News from the Map Room"
COLUMNS = (
    (
        "A parcel from the coast arrived in June. It held nineteen sea charts, rolled in oilcloth and tied with tarred "
        "string, and a short note: for whoever still sails by paper.",
        "The charts are hand coloured. Depths are given in fathoms, and the sandbanks are dotted in a brown ink that "
        "has kept its strength. Two of them show a lighthouse that was never built.",
        "They are being flattened under glass, a week for each, and will be scanned before the autumn.",
        "Whoever recognises the handwriting of the note is asked to speak to the porter. There is cake in it.",
    ),
    (
        "Visitors ask most often for the town plan of 1864. It is easy to see why. Every garden is drawn with its own "
        "trees, and the baker's dog can be found asleep at the corner of Mill Lane.",
        "From now on the plan may be studied on the large screen by the window. The paper sheet rests in its drawer, "
        "where the light cannot reach it.",
        "A second copy, it is said, hung in the mill until the fire. Should a photograph of it survive in some "
        "family album, we would gladly come and look.",
        "The map room is open from ten to four. Pencils are welcome, and so are questions.",
    ),
)


def draw_columns(path: Path) -> None:
    """Draw two columns under one title."""
    sheet = Sheet(margin=105)
    sheet.centred(COLUMNS_TITLE, 56, bold=True)
    sheet.y += 10
    sheet.rule(sheet.margin, sheet.ink.width - sheet.margin, 3)
    sheet.y += 50
    top, gap = sheet.y, 70
    width = (sheet.ink.width - 2 * sheet.margin - gap) / 2
    for number, paragraphs in enumerate(COLUMNS):
        sheet.y = top
        for paragraph in paragraphs:
            sheet.paragraph(paragraph, x=sheet.margin + number * (width + gap), width=width, size=32)
    sheet.save(path)


TABLE_TITLE = "Loans by Department, 1911"
TABLE_LEAD = "Volumes lent to readers in each quarter, counted from the slips in the day books."
TABLE = (
    ("Department", "Spring", "Summer", "Autumn", "Winter"),
    ("History", "412", "285", "530", "618"),
    ("Natural science", "197", "164", "241", "229"),
    ("Travel and maps", "356", "498", "310", "274"),
    ("Poetry", "138", "152", "126", "203"),
    ("Music", "94", "71", "117", "145"),
    ("Law", "260", "219", "287", "251"),
    ("Children", "703", "846", "655", "790"),
    ("Total", "2160", "2235", "2266", "2510"),
)
TABLE_NOTE = "Not counted are 36 volumes that came back late from the mountain school, because of the snow."


def draw_table(path: Path) -> None:
    """Draw a ruled table with its title, a sentence over it and one under it."""
    sheet = Sheet()
    sheet.y += 20
    sheet.centred(TABLE_TITLE, 54, bold=True)
    sheet.y += 40
    sheet.paragraph(TABLE_LEAD, size=34)
    left, right = sheet.margin, sheet.ink.width - sheet.margin
    ends = [right - 12 - 155 * column for column in (3, 2, 1, 0)]
    for number, row in enumerate(TABLE):
        if number in (0, 1, len(TABLE) - 1, len(TABLE)):
            sheet.rule(left, right, 3)
        sheet.y += 25
        sheet.line(row[0], left + 12, 34, bold=number == 0)
        for cell, end in zip(row[1:], ends, strict=True):
            sheet.line(cell, end - text_width(cell, 34), 34, bold=number == 0)
        sheet.y += 70
    sheet.rule(left, right, 3)
    sheet.y += 60
    sheet.paragraph(TABLE_NOTE, size=34)
    sheet.save(path)


ACCENTS_TITLE = "One Library, Seven Languages"
ACCENTS = (
    "Français : la bibliothécaire a retrouvé le cahier où un élève avait noté, à côté d'une tache d'encre, la date "
    "de son départ pour l'île.",
    "Deutsch: Über den Büchern hängt ein Schild: Bitte nur mit sauberen Händen blättern. Die Öffnungszeiten ändern "
    "sich im März, weiß der Pförtner.",
    "Español: ¿Quién guardó el álbum del niño? Está en el último cajón, según la señora que limpió el salón "
    "esta mañana.",
    "Português: as coleções de canções estão à disposição do público; não é preciso marcar a visita com antecedência.",
    "Italiano: la città è più bella vista dalla torre, perché lassù c'è una biblioteca di viaggi.",
    "Dansk: på øen står en gammel skole, hvor børnene læser højt for hinanden, når sneen dækker vejen.",
    "Svenska: kartan över sjön är större än bordet, så vi måste hänga den på väggen.",
)


def draw_accents(path: Path) -> None:
    """Draw a sentence in each of seven languages."""
    sheet = Sheet()
    sheet.centred(ACCENTS_TITLE, 56, bold=True)
    sheet.y += 40
    for paragraph in ACCENTS:
        sheet.paragraph(paragraph, size=36)
    sheet.save(path)


LETTER = (
    "Hill House, 4 October 1903",
    "Dear Miss Alder,",
    "Your parcel reached us safely, and the children have hardly left it alone since. The atlas is a wonder. We have "
    "already found our own valley in it, no larger than a thumbnail, with the river drawn as fine as a hair.",
    "I am returning the two volumes of the encyclopaedia that you were kind enough to lend us. The third, I am sorry "
    "to say, is still with the doctor, who reads it by candlelight and promises to be finished before the frost.",
    "If the carrier can manage it, we should be grateful for anything on bees. My brother has bought four hives and "
    "knows nothing at all about them.",
    "With kind regards from all of us,",
    "Edith Marlow",
)


def draw_letter(path: Path) -> None:
    """Draw a letter as a camera held sideways keeps it: the pixels lie on their side, and EXIF says so."""
    sheet = Sheet(margin=150)
    sheet.line(LETTER[0], sheet.ink.width - sheet.margin - text_width(LETTER[0], 34), 34)
    sheet.y += 120
    for paragraph in LETTER[1:]:
        sheet.paragraph(paragraph, size=34)
    paper = sheet.gray(ink=52, paper=236).filter(ImageFilter.GaussianBlur(0.6))
    photo = ImageChops.subtract(_lit(paper), noise(paper.size, 6, seed=5))
    # Warm paper: the blue channel is darker, the ink hardly.
    tones = [photo, photo.point([v * 97 // 100 for v in range(256)]), photo.point([v * 89 // 100 for v in range(256)])]
    exif = Image.Exif()
    exif[0x0112] = 6  # to be shown turned by 90 degrees clockwise
    exif[0x010F] = "Example camera"
    sideways = Image.merge("RGB", tones).transpose(Image.Transpose.ROTATE_90)
    sideways.save(path, quality=80, exif=exif, dpi=(150, 150))


def _lit(paper: Image.Image) -> Image.Image:
    """Darken a page towards a corner, as a lamp on the other side does."""
    width, height = paper.size
    down = Image.linear_gradient("L").resize((width, height))
    across = Image.linear_gradient("L").transpose(Image.Transpose.ROTATE_90).resize((width, height))
    shade = ImageChops.add(down, across, scale=2).point([255 - value * 60 // 255 for value in range(256)])
    return ImageChops.multiply(paper, shade)


TRANSPARENT = (
    "Notice",
    "The east staircase is closed while the painters are at work. Please use the lift beside the newspaper room, or "
    "the small stairs behind the globe.",
    "Books that were ordered before noon lie ready at the issue desk from three o'clock. They are kept for you until "
    "Saturday.",
    "Umbrellas stay in the stand by the door. Should yours have gone home with somebody else, take the oldest one that "
    "is left: it belongs to the library, and has been round the world twice.",
    "The Librarian",
)


def draw_transparent(path: Path) -> None:
    """Draw text on nothing: black everywhere, and the letters only in the alpha channel."""
    sheet = Sheet((1240, 1240), margin=120)
    sheet.centred(TRANSPARENT[0], 64, bold=True)
    sheet.y += 30
    for paragraph in TRANSPARENT[1:]:
        sheet.paragraph(paragraph, size=38)
    page = Image.new("RGBA", sheet.ink.size, (0, 0, 0, 0))
    page.putalpha(sheet.ink)
    page.save(path, optimize=True, dpi=(150, 150))


SCAN_TITLE = "Accession Book, Page 212"
SCAN = (
    "No. 4071. A herbal with 88 woodcuts, lacking the last leaf. Bought from the estate of a country doctor for two "
    "pounds and ten shillings.",
    "No. 4072. Sixteen letters of a ship's surgeon, 1798 to 1804, in one wrapper. Given by his great-niece, who asks "
    "that they be read aloud now and then.",
    "No. 4073. A school globe, dented near Iceland. The brass ring is missing.",
    "No. 4074. Three volumes of sermons, uncut, and between the pages of the second a recipe for quince jelly, which "
    "has been entered as No. 4075.",
    "No. 4076. Weather diary of a lock keeper, kept without a gap for 22 years. The ink is pale but can be read.",
)


def draw_scan(path: Path) -> None:
    """Draw a scan with 16 bits a pixel: its paper lies near 52,000, its ink near 7,000, as a scanner measures them."""
    sheet = Sheet((1050, 1240), margin=100)
    sheet.centred(SCAN_TITLE, 46, bold=True)
    sheet.y += 30
    for paragraph in SCAN:
        sheet.paragraph(paragraph, size=32)
    shape = sheet.ink.filter(ImageFilter.GaussianBlur(0.7))
    grain = noise(shape.size, 4, seed=7)
    values = [
        52_000 - 45_000 * ink // 255 - 160 * dust for ink, dust in zip(shape.tobytes(), grain.tobytes(), strict=True)
    ]
    scan = Image.frombytes("I;16", shape.size, struct.pack(f"<{len(values)}H", *values))
    scan.save(path, optimize=True, dpi=(150, 150))


def draw_blank(path: Path) -> None:
    """Draw the back of a page: paper with its grain, and no ink."""
    paper = Image.new("L", (1000, 1414), 244)
    grain = noise(paper.size, 10, seed=8).filter(ImageFilter.GaussianBlur(1.2))
    ImageOps.colorize(ImageChops.subtract(paper, grain), "black", (255, 251, 240)).save(
        path, quality=75, dpi=(120, 120)
    )


def _pages(*paragraphs: str) -> str:
    return "\n\n".join(paragraphs)


EXAMPLE_PAGES = (
    Example("01-title.png", draw_title, _pages(TITLE, *TITLE_PARAGRAPHS)),
    Example("02-columns.png", draw_columns, _pages(COLUMNS_TITLE, *COLUMNS[0], *COLUMNS[1])),
    Example(
        "03-table.png",
        draw_table,
        _pages(TABLE_TITLE, TABLE_LEAD, "\n".join(" ".join(row) for row in TABLE), TABLE_NOTE),
    ),
    Example("04-accents.png", draw_accents, _pages(ACCENTS_TITLE, *ACCENTS)),
    Example("05-letter-sideways.jpg", draw_letter, _pages(*LETTER)),
    Example("06-transparent.png", draw_transparent, _pages(*TRANSPARENT)),
    Example("07-scan-16bit.png", draw_scan, _pages(SCAN_TITLE, *SCAN)),
    Example("08-blank.jpg", draw_blank, ""),
)


def make_examples(directory: Path) -> None:
    """Write all pages and their text below a directory."""
    pages = directory / "pages"
    pages.mkdir(parents=True, exist_ok=True)
    for example in EXAMPLE_PAGES:
        example.draw(pages / example.name)
    truth = {example.name: example.text for example in EXAMPLE_PAGES}
    (directory / "truth.json").write_text(json.dumps(truth, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the example pages."""
    parser = argparse.ArgumentParser(prog="make_examples.py", description="Draw the example pages.", allow_abbrev=False)
    parser.add_argument("directory", nargs="?", type=Path, default=EXAMPLES, help="default: examples/ of this checkout")
    make_examples(parser.parse_args(argv).directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
