"""The example pages: drawn anew they are the same, and each one still has what makes it worth having."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest
from PIL import Image, ImageChops, ImageOps

from tools.make_examples import EXAMPLE_PAGES, glyph, main, wrapped

if TYPE_CHECKING:
    from collections.abc import Iterator

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
PAGES = EXAMPLES / "pages"
NAMES = [example.name for example in EXAMPLE_PAGES]


@pytest.fixture(scope="module")
def redrawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("examples")
    assert main([str(directory)]) == 0
    return directory


@pytest.fixture
def page(request: pytest.FixtureRequest) -> Iterator[Image.Image]:
    with Image.open(PAGES / request.param) as image:
        yield image


def truth() -> dict[str, str]:
    texts: dict[str, str] = json.loads((EXAMPLES / "truth.json").read_text(encoding="utf-8"))
    return texts


def gray_extrema(page: Image.Image) -> tuple[float, float]:
    """Return the darkest and the lightest value; Pillow's types also know of a pair for each of several bands."""
    darkest, lightest = cast("tuple[float, float]", page.getextrema())
    return darkest, lightest


def test_the_committed_text_is_what_the_script_writes(redrawn: Path) -> None:
    assert (redrawn / "truth.json").read_bytes() == (EXAMPLES / "truth.json").read_bytes()


def test_every_page_has_its_text_and_every_text_its_page() -> None:
    assert sorted(path.name for path in PAGES.iterdir()) == sorted(truth()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_page_drawn_again_has_the_same_pixels(redrawn: Path, name: str) -> None:
    with Image.open(PAGES / name) as committed, Image.open(redrawn / "pages" / name) as drawn:
        assert (drawn.mode, drawn.size, drawn.format) == (committed.mode, committed.size, committed.format)
        assert drawn.tobytes() == committed.tobytes()


def test_all_pages_together_are_small() -> None:
    assert sum(path.stat().st_size for path in PAGES.iterdir()) < 2_500_000


@pytest.mark.parametrize("page", ["05-letter-sideways.jpg"], indirect=True)
def test_the_letter_lies_on_its_side_until_exif_is_applied(page: Image.Image) -> None:
    assert page.format == "JPEG"
    assert page.getexif()[0x0112] == 6
    assert page.width > page.height
    upright = ImageOps.exif_transpose(page)
    assert upright.width < upright.height


@pytest.mark.parametrize("page", ["06-transparent.png"], indirect=True)
def test_the_transparent_page_is_black_where_alpha_is_ignored(page: Image.Image) -> None:
    assert page.mode == "RGBA"
    assert page.convert("RGB").getextrema() == ((0, 0), (0, 0), (0, 0))
    assert page.getchannel("A").getextrema() == (0, 255)


@pytest.mark.parametrize("page", ["07-scan-16bit.png"], indirect=True)
def test_the_scan_uses_the_range_of_16_bits(page: Image.Image) -> None:
    assert page.mode == "I;16"
    darkest, lightest = gray_extrema(page)
    assert 256 < darkest < 10_000
    assert 50_000 < lightest < 65_535
    # More tones than 8 bits can hold: what is cut down to a byte by chance shows.
    assert len(set(page.tobytes()[::2])) > 100


@pytest.mark.parametrize("page", ["08-blank.jpg"], indirect=True)
def test_the_blank_page_has_grain_but_no_ink(page: Image.Image) -> None:
    assert truth()["08-blank.jpg"] == ""
    darkest, lightest = gray_extrema(page.convert("L"))
    assert darkest > 200
    assert darkest < lightest


@pytest.mark.parametrize("character", sorted({c for text in truth().values() for c in text if not c.isspace()}))
def test_every_character_of_the_texts_can_be_drawn(character: str) -> None:
    missing = glyph("\N{REPLACEMENT CHARACTER}", 40)
    drawn = glyph(character, 40)
    assert drawn.getbbox() is not None
    assert drawn.size != missing.size or ImageChops.difference(drawn, missing).getbbox() is not None


def test_an_accent_is_ink_over_the_letter() -> None:
    for plain, accented in ("eé", "aà", "oô", "nñ", "uü", "aå", "cç", "oø"):
        assert sum(glyph(accented, 40).tobytes()) > sum(glyph(plain, 40).tobytes())


def test_broken_lines_hold_all_words_in_order() -> None:
    text = "one two three four five six seven"
    assert " ".join(wrapped(text, 20, 90)) == text
    assert len(wrapped(text, 20, 90)) > 2
