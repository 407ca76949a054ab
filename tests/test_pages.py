"""Any cell becomes the right page, or a refusal that says why."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageChops, ImageDraw, ImageFilter, ImageFont, ImageOps

from src.ink import is_blank
from src.pages import Page, PageLimits, Refusal, data_url, make_page, target_size
from src.pixels import flatten
from tests.strategies import cells, image_files, mutated_files

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LIMITS = PageLimits(longest_edge_px=1540)
Color = float | tuple[int, ...]


def halves(mode: str, left: Color, right: Color, size: tuple[int, int] = (64, 48)) -> Image.Image:
    """An image of two colours: what becomes of each can be said exactly, and it isn't blank."""
    if mode.startswith("I;16"):  # Pillow's paste writes other numbers into these
        order, half = ">" if mode == "I;16B" else "<", size[0] // 2
        row = struct.pack(f"{order}{size[0]}H", *[left] * half, *[right] * (size[0] - half))
        return Image.frombytes(mode, size, row * size[1])
    image = Image.new(mode, size, left)
    image.paste(right, (size[0] // 2, 0, *size))
    return image


def encoded(image: Image.Image, file_format: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, file_format, **options)
    return buffer.getvalue()


def page_of(cell: object, limits: PageLimits = LIMITS) -> Page:
    page = make_page(cell, limits)
    assert isinstance(page, Page), page
    return page


def refusal_of(cell: object, limits: PageLimits = LIMITS) -> Refusal:
    refusal = make_page(cell, limits)
    assert isinstance(refusal, Refusal), refusal
    return refusal


def colors(image: Image.Image) -> tuple[str, Any, Any]:
    return image.mode, image.getpixel((3, 3)), image.getpixel((image.width - 4, image.height - 4))


def with_palette(indices: Image.Image, *palette: tuple[int, int, int]) -> Image.Image:
    image = Image.frombytes("P", indices.size, indices.tobytes())
    image.putpalette([value for entry in palette for value in entry])
    return image


INDICES = halves("L", 0, 1)
RED, BLUE = (200, 10, 20), (0, 30, 220)

# name, file, mode of the page, its left and right pixel
STORED: list[tuple[str, Callable[[], bytes], str, Any, Any]] = [
    ("1-bit PNG", lambda: encoded(halves("1", 0, 255), "PNG"), "L", 0, 255),
    ("fax TIFF", lambda: encoded(halves("1", 0, 255), "TIFF", compression="group4"), "L", 0, 255),
    ("1-bit PNG with a transparent black", lambda: encoded(halves("1", 0, 255), "PNG", transparency=0), "L", 255, 255),
    ("gray PNG", lambda: encoded(halves("L", 7, 201), "PNG"), "L", 7, 201),
    ("gray PNG with a transparent gray", lambda: encoded(halves("L", 7, 99), "PNG", transparency=7), "L", 255, 99),
    ("gray PNG with alpha", lambda: encoded(halves("LA", (0, 255), (0, 0)), "PNG"), "L", 0, 255),
    ("half transparent gray", lambda: encoded(halves("LA", (0, 255), (100, 102)), "PNG"), "L", 0, 193),
    ("colour palette", lambda: encoded(with_palette(INDICES, RED, BLUE), "PNG"), "RGB", RED, BLUE),
    ("gray palette", lambda: encoded(with_palette(INDICES, (9, 9, 9), (250,) * 3), "PNG"), "L", 9, 250),
    (
        "palette with a transparent index",
        lambda: encoded(with_palette(INDICES, RED, BLUE), "PNG", transparency=1),
        "RGB",
        RED,
        (255, 255, 255),
    ),
    (
        "palette with alpha for each entry",
        lambda: encoded(with_palette(INDICES, RED, (0, 0, 0)), "PNG", transparency=b"\xff\x66"),
        "RGB",
        RED,
        (153, 153, 153),
    ),
    (
        "GIF with a transparent index",
        lambda: encoded(with_palette(INDICES, RED, BLUE), "GIF", transparency=0),
        "RGB",
        (255, 255, 255),
        BLUE,
    ),
    ("RGB PNG", lambda: encoded(halves("RGB", RED, BLUE), "PNG"), "RGB", RED, BLUE),
    (
        "RGB PNG with a transparent colour",
        lambda: encoded(halves("RGB", RED, BLUE), "PNG", transparency=RED),
        "RGB",
        (255, 255, 255),
        BLUE,
    ),
    (
        "RGBA PNG",
        lambda: encoded(halves("RGBA", (*RED, 255), (0, 0, 0, 51)), "PNG"),
        "RGB",
        RED,
        (204, 204, 204),
    ),
    (
        "RGBA WEBP",
        lambda: encoded(halves("RGBA", (*RED, 255), (0, 0, 0, 0)), "WEBP", lossless=True, exact=True),
        "RGB",
        RED,
        (255, 255, 255),
    ),
    (
        "RGBA TIFF",
        lambda: encoded(halves("RGBA", (*RED, 255), (0, 0, 0, 0)), "TIFF"),
        "RGB",
        RED,
        (255, 255, 255),
    ),
    ("RGBX TIFF", lambda: encoded(halves("RGBX", (*RED, 0), (*BLUE, 0)), "TIFF"), "RGB", RED, BLUE),
    (
        "CMYK TIFF",
        lambda: encoded(halves("CMYK", (0, 0, 0, 0), (255, 0, 255, 0)), "TIFF"),
        "RGB",
        (255, 255, 255),
        (0, 255, 0),
    ),
    (
        "YCbCr TIFF",
        lambda: encoded(halves("YCbCr", (20, 128, 128), (240, 128, 128)), "TIFF"),
        "L",
        20,
        240,
    ),
    ("gray stored as RGB", lambda: encoded(halves("RGB", (9, 9, 9), (200, 200, 200)), "PNG"), "L", 9, 200),
    (
        "a touch of colour",
        lambda: encoded(halves("RGB", (9, 9, 9), (200, 200, 201)), "PNG"),
        "RGB",
        (9, 9, 9),
        (200, 200, 201),
    ),
    ("16-bit PNG", lambda: encoded(halves("I;16", 0, 65535), "PNG"), "L", 0, 255),
    ("16-bit PNG, mid-gray", lambda: encoded(halves("I;16", 32896, 65535), "PNG"), "L", 128, 255),
    ("16-bit PNG of an underexposed scan", lambda: encoded(halves("I;16", 257, 40000), "PNG"), "L", 1, 156),
    ("12 bits in a 16-bit PNG", lambda: encoded(halves("I;16", 16, 4095), "PNG"), "L", 1, 255),
    ("8 bits in a 16-bit PNG", lambda: encoded(halves("I;16", 7, 201), "PNG"), "L", 7, 201),
    ("16-bit TIFF", lambda: encoded(halves("I;16", 257, 65535), "TIFF"), "L", 1, 255),
    ("16-bit TIFF, big-endian", lambda: encoded(halves("I;16B", 257, 65535), "TIFF"), "L", 1, 255),
    (
        "16-bit TIFF, white is zero",
        lambda: encoded(halves("I;16", 0, 65535), "TIFF", tiffinfo={262: 0}),
        "L",
        255,
        0,
    ),
    ("32-bit TIFF", lambda: encoded(halves("I", 0, 2**31 - 1), "TIFF"), "L", 0, 255),
    ("signed TIFF", lambda: encoded(halves("I", -1000, 1000), "TIFF"), "L", 0, 255),
    ("float TIFF up to 1", lambda: encoded(halves("F", 0.2, 0.8), "TIFF"), "L", 51, 204),
    ("float TIFF up to 255", lambda: encoded(halves("F", 7.0, 201.0), "TIFF"), "L", 7, 201),
    ("float TIFF up to 65535", lambda: encoded(halves("F", 257.0, 65535.0), "TIFF"), "L", 1, 255),
    ("float TIFF below 0", lambda: encoded(halves("F", -1.0, 1.0), "TIFF"), "L", 0, 255),
    ("JPEG 2000", lambda: encoded(halves("RGB", RED, BLUE), "JPEG2000"), "RGB", RED, BLUE),
    ("BMP", lambda: encoded(halves("RGB", RED, BLUE), "BMP"), "RGB", RED, BLUE),
    ("gray BMP", lambda: encoded(halves("L", 7, 201), "BMP"), "L", 7, 201),
    ("GIF", lambda: encoded(with_palette(INDICES, RED, BLUE), "GIF"), "RGB", RED, BLUE),
    ("PPM", lambda: encoded(halves("RGB", RED, BLUE), "PPM"), "RGB", RED, BLUE),
    ("16-bit PGM", lambda: encoded(halves("I;16", 257, 65535), "PPM"), "L", 1, 255),
    ("LZW TIFF", lambda: encoded(halves("RGB", RED, BLUE), "TIFF", compression="tiff_lzw"), "RGB", RED, BLUE),
    ("deflated TIFF", lambda: encoded(halves("RGB", RED, BLUE), "TIFF", compression="tiff_deflate"), "RGB", RED, BLUE),
]


@pytest.mark.parametrize(("file", "mode", "left", "right"), [case[1:] for case in STORED], ids=[c[0] for c in STORED])
def test_every_way_of_storing_a_page_has_its_exact_pixels(
    file: Callable[[], bytes], mode: str, left: Any, right: Any
) -> None:
    page = make_page(file(), LIMITS)
    if left == right:  # nothing is left to see on a page whose ink is transparent
        assert page == Refusal("blank", "no ink on the page")
        return
    assert isinstance(page, Page), page
    assert colors(page.image) == (mode, left, right)
    assert page.original is None
    assert page.image.size == (64, 48)


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (halves("HSV", (0, 0, 0), (0, 0, 255)), ("RGB", (0, 0, 0), (255, 255, 255))),
        (halves("RGBa", (51, 0, 0, 51), (10, 20, 30, 255)), ("RGB", (255, 204, 204), (10, 20, 30))),
        (halves("La", (0, 51), (9, 255)), ("L", 204, 9)),
        (halves("I;16L", 0, 65535), ("L", 0, 255)),
        (halves("PA", (0, 0), (0, 255)), ("RGB", (255, 255, 255), (0, 0, 0))),
    ],
    ids=lambda value: getattr(value, "mode", ""),
)
def test_modes_that_few_files_have_are_flattened_too(image: Image.Image, expected: object) -> None:
    assert colors(flatten(image, white_is_zero=False, ink_as_it_is=False)) == expected


def test_lab_is_read_as_the_colours_it_means() -> None:
    white_and_red = halves("LAB", (255, 128, 128), (138, 209, 198))  # L* 54, a* 81, b* 70 is the red of sRGB
    mode, white, red = colors(page_of(encoded(white_and_red, "TIFF")).image)
    assert mode == "RGB"
    for found, meant in ((white, (255, 255, 255)), (red, (255, 0, 0))):
        assert max(abs(a - b) for a, b in zip(found, meant, strict=True)) <= 6


@pytest.mark.parametrize(
    ("compression", "mode"),
    [
        *[
            (name, "RGB")
            for name in ("raw", "tiff_lzw", "tiff_deflate", "tiff_adobe_deflate", "packbits", "zstd", "lzma")
        ],
        *[(name, "1") for name in ("tiff_ccitt", "group3", "group4", "packbits", "tiff_lzw")],
        *[("tiff_lzw", mode) for mode in ("L", "LA", "P", "RGBA", "CMYK", "I;16", "F")],
    ],
)
def test_every_compression_of_a_tiff_has_the_pixels_of_the_uncompressed_one(compression: str, mode: str) -> None:
    light, dark = {"1": (255, 0), "F": (1.0, 0.25), "I;16": (60000, 300)}.get(mode, (240, 30))
    image = halves("L" if mode in {"LA", "P", "RGB", "RGBA", "CMYK"} else mode, light, dark)
    image = image if image.mode == mode else image.convert(mode)
    packed, plain = (page_of(encoded(image, "TIFF", compression=name)).image for name in (compression, "raw"))
    assert (packed.mode, packed.tobytes()) == (plain.mode, plain.tobytes())
    assert colors(plain)[1] != colors(plain)[2]


@pytest.mark.parametrize("order", ["<", ">"])
def test_a_tiled_tiff_is_put_together_in_either_byte_order(order: str) -> None:
    page = upright_page().convert("L")  # 96x64, in tiles of 32x32
    tiles = [page.crop((x, y, x + 32, y + 32)).tobytes() for y in (0, 32) for x in (0, 32, 64)]
    tags = [(256, 96), (257, 64), (258, 8), (259, 1), (262, 1), (277, 1), (322, 32), (323, 32)]
    at = 8 + 2 + 12 * (len(tags) + 2) + 4  # where the two lists lie, and the tiles after them
    lists = [[at + 48 + number * 1024 for number in range(6)], [1024] * 6]
    file = (b"II" if order == "<" else b"MM") + struct.pack(f"{order}HIH", 42, 8, len(tags) + 2)
    file += b"".join(struct.pack(f"{order}HHII", tag, 4, 1, value) for tag, value in tags)
    file += b"".join(struct.pack(f"{order}HHII", 324 + number, 4, 6, at + 24 * number) for number in (0, 1))
    file += struct.pack(f"{order}I", 0) + struct.pack(f"{order}12I", *lists[0], *lists[1]) + b"".join(tiles)
    assert page_of(file).image.tobytes() == page.tobytes()


@pytest.mark.parametrize("file_format", ["JPEG", "WEBP", "AVIF"])
def test_lossy_formats_come_out_near_their_colours(file_format: str) -> None:
    page = page_of(encoded(halves("RGB", RED, BLUE), file_format, quality=95))
    for found, stored in zip(colors(page.image)[1:], (RED, BLUE), strict=True):
        assert max(abs(a - b) for a, b in zip(found, stored, strict=True)) <= 8


def without_adobe_marker(jpeg: bytes) -> bytes:
    start = jpeg.index(b"\xff\xee")
    return jpeg[:start] + jpeg[start + 2 + int.from_bytes(jpeg[start + 2 : start + 4], "big") :]


def test_cmyk_jpegs_are_right_with_adobes_inverted_ink_and_without() -> None:
    white_and_green = halves("CMYK", (0, 0, 0, 0), (255, 0, 255, 0))
    by_adobe = encoded(white_and_green, "JPEG", quality=95)  # Pillow writes the marker and inverts
    plain = without_adobe_marker(encoded(ImageChops.invert(white_and_green), "JPEG", quality=95))
    for file in (by_adobe, plain):
        mode, left, right = colors(page_of(file).image)
        assert mode == "RGB"
        assert min(left) > 245
        assert right[1] > 245
        assert max(right[0], right[2]) < 10


# --- upright ---------------------------------------------------------------------------------------------------------


def upright_page() -> Image.Image:
    image = Image.new("RGB", (96, 64), "white")
    draw = ImageDraw.Draw(image)
    draw.rectangle((0, 0, 31, 15), fill="black")
    draw.rectangle((0, 16, 15, 63), fill=(200, 0, 0))
    return image


# How a camera held in each way stores the upright page.
STORED_TURNED = {
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


@pytest.mark.parametrize("orientation", STORED_TURNED)
@pytest.mark.parametrize("file_format", ["PNG", "TIFF", "TIFF LZW", "WEBP", "JPEG", "AVIF"])
def test_a_turned_page_is_set_upright_in_each_of_the_eight_ways(orientation: int, file_format: str) -> None:
    turn = STORED_TURNED[orientation]
    stored = upright_page() if turn is None else upright_page().transpose(turn)
    exif = Image.Exif()
    exif[0x0112] = orientation
    kind, _, compression = file_format.partition(" ")
    options_of: dict[str, dict[str, Any]] = {"WEBP": {"lossless": True}, "JPEG": {"quality": 95}}
    options = {"compression": "tiff_lzw"} if compression else options_of.get(kind, {})
    file = encoded(stored, kind, exif=exif, **options)
    page = page_of(file)
    assert page.image.size == (96, 64)
    difference = ImageChops.difference(page.image, upright_page()).convert("L").filter(ImageFilter.MedianFilter(5))
    assert max(difference.tobytes()) <= (0 if kind in {"PNG", "TIFF", "WEBP"} else 24)
    assert (page.original is not None) == (kind == "JPEG" and orientation == 1)
    reference = ImageOps.exif_transpose(Image.open(io.BytesIO(file)))
    assert page.image.convert("RGB").tobytes() == reference.convert("RGB").tobytes()


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_broken_metadata_does_not_cost_the_page() -> None:
    for exif in (b"Exif\0\0garbage", b"Exif\0\0MM\0*\0\0\0\x08\xff\xff", b"Exif\0\0II*\0\xff\xff\xff\xff"):
        assert page_of(encoded(upright_page(), "JPEG", exif=exif)).image.size == (96, 64)
    exif_of_9 = Image.Exif()
    exif_of_9[0x0112] = 9
    assert page_of(encoded(upright_page(), "PNG", exif=exif_of_9)).image.size == (96, 64)


# --- size ------------------------------------------------------------------------------------------------------------


@given(st.tuples(st.integers(1, 20000), st.integers(1, 20000)), st.integers(1, 4096))
def test_the_target_is_never_larger_and_keeps_the_aspect_within_a_pixel(size: tuple[int, int], edge: int) -> None:
    width, height = target_size(size, edge)
    if max(size) <= edge:
        assert (width, height) == size
        return
    assert max(width, height) == edge
    assert min(width, height) >= 1
    exact_width, exact_height = size[0] * edge / max(size), size[1] * edge / max(size)
    assert abs(width - max(1, exact_width)) <= 0.5 + 1e-6
    assert abs(height - max(1, exact_height)) <= 0.5 + 1e-6


def test_a_page_of_200_dpi_gets_the_size_the_vendors_client_gives_it() -> None:
    assert target_size((1654, 2339), 1540) == (1089, 1540)
    assert target_size((1540, 1540), 1540) == (1540, 1540)
    assert target_size((100, 90), 1540) == (100, 90)


def test_a_large_page_is_scaled_with_lanczos_and_a_small_one_is_left_alone() -> None:
    large = halves("L", 0, 255, (400, 300))
    page = page_of(encoded(large, "PNG"), PageLimits(128))
    assert page.image.tobytes() == large.resize((128, 96), Image.Resampling.LANCZOS).tobytes()
    assert page_of(encoded(large, "PNG"), PageLimits(400)).image.tobytes() == large.tobytes()


def test_gray_kept_gray_gives_the_pixels_that_rgb_would() -> None:
    noise = Image.effect_noise((300, 200), 90)
    as_rgb = noise.convert("RGB").resize((128, 85), Image.Resampling.LANCZOS)
    for stored in (noise, noise.convert("RGB")):
        page = page_of(encoded(stored, "PNG"), PageLimits(128))
        assert page.image.mode == "L"
        assert page.image.convert("RGB").tobytes() == as_rgb.tobytes()


def test_one_coloured_pixel_keeps_a_page_in_colour() -> None:
    page = Image.effect_noise((300, 200), 90).convert("RGB")
    page.putpixel((101, 103), (10, 10, 60))
    assert page_of(encoded(page, "PNG")).image.tobytes() == page.tobytes()


# --- refusals --------------------------------------------------------------------------------------------------------


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and has no pixels."""
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + body + struct.pack(">I", zlib.crc32(body)) + b"\0\0\0\4IDAT"


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        (None, "no picture in this row"),
        ({"bytes": None, "path": None}, "no picture in this row"),
        ({}, "no picture in this row"),
        (b"", "0 bytes"),
        ({"bytes": b"", "path": "a.png"}, "0 bytes"),
        (7, "no picture but int"),
        ({"bytes": "text"}, "no picture but str"),
        ({"bytes": None, "path": 7}, "the cell has a path and no bytes"),
        (b"hello, I am a text", "starts with b'hello, I'"),
        (b"%PDF-1.7 and so on", "a PDF, not a picture"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "pillow-heif"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 90 90\n", "not a picture"),
        (b"\xd7\xcd\xc6\x9a\0\0" + b"\0" * 60, "not a picture"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not a picture"),
        (png_header(20000, 10000), "20000x10000 is 200,000,000 pixels, more than the limit of 178,956,970"),
        (png_header(12000, 10000), "can't be decoded"),  # between Pillow's two limits: no warning may leak
        (png_header(500, 27), "500x27 is too small: a side has under 28 px"),
        (png_header(5601, 28), "over 200 times"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_cell_that_is_no_page_is_refused_by_name(cell: object, words: str) -> None:
    refusal = refusal_of(cell)
    assert refusal.status == "error"
    assert words in refusal.reason


def test_the_pixel_limit_can_be_set_beyond_pillows_own() -> None:
    words = "400,000,000 pixels, more than the limit of 300,000,000"
    assert words in refusal_of(png_header(20000, 20000), PageLimits(1540, max_pixels=300_000_000)).reason
    limit_is_no_obstacle = refusal_of(png_header(20000, 20000), PageLimits(1540, max_pixels=500_000_000)).reason
    assert "can't be decoded" in limit_is_no_obstacle
    assert refusal_of(encoded(upright_page(), "PNG"), PageLimits(1540, max_pixels=96 * 64 - 1)).status == "error"
    assert page_of(encoded(upright_page(), "PNG"), PageLimits(1540, max_pixels=96 * 64)).image.size == (96, 64)


@pytest.mark.parametrize("file_format", ["PNG", "JPEG", "TIFF", "WEBP", "GIF", "BMP", "JPEG2000", "AVIF", "PPM"])
def test_a_truncated_file_is_refused(file_format: str) -> None:
    noise = Image.effect_noise((200, 200), 90)
    file = encoded(noise.convert("RGB"), file_format)
    assert isinstance(make_page(file, LIMITS), Page)
    assert refusal_of(file[: len(file) // 2]).status == "error"


@pytest.mark.parametrize("file_format", ["PNG", "JPEG", "TIFF", "WEBP", "BMP"])
def test_a_truncated_file_is_read_as_far_as_it_goes_where_that_is_allowed(file_format: str) -> None:
    noise = Image.effect_noise((200, 200), 90).convert("RGB")
    file = encoded(noise, file_format)
    half = file[: len(file) // 2]
    lenient = PageLimits(1540, allow_truncated=True)
    if file_format == "WEBP":  # its decoder gives nothing back
        assert isinstance(make_page(half, lenient), Refusal)
        return
    whole, page = page_of(file), page_of(half, lenient)
    upper = (0, 0, 200, 60)
    lower = (0, 140, 200, 200)
    if file_format == "BMP":  # stored from the bottom up
        upper, lower = lower, upper
    assert page.image.size == (200, 200)
    assert page.image.convert("L").crop(upper).tobytes() == whole.image.convert("L").crop(upper).tobytes()
    assert page.image.convert("L").crop(lower).tobytes() != whole.image.convert("L").crop(lower).tobytes()
    assert page.original is None  # a server would refuse the file
    assert isinstance(make_page(half, LIMITS), Refusal)  # and afterwards it is not allowed again


def test_a_page_without_ink_is_a_page_where_that_is_wanted() -> None:
    empty = encoded(Image.new("RGB", (100, 140), "white"), "PNG")
    assert page_of(empty, PageLimits(1540, skip_blank=False)).has_ink is False
    assert page_of(encoded(upright_page(), "PNG"), PageLimits(1540, skip_blank=False)).has_ink is True


def test_floats_that_are_no_numbers_are_refused() -> None:
    for value in (float("inf"), float("nan"), float("-inf")):
        assert "no numbers" in refusal_of(encoded(halves("F", value, 1.0), "TIFF")).reason


def test_too_little_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("src.pages.target_size", fail)
    assert refusal_of(encoded(upright_page(), "PNG")) == Refusal("error", "not enough memory to decode the picture")


@pytest.mark.parametrize("file_format", ["TIFF", "PNG", "GIF", "WEBP"])
def test_of_many_frames_the_first_is_taken_or_the_one_asked_for(file_format: str) -> None:
    first, second, third = halves("RGB", RED, BLUE), halves("RGB", BLUE, RED), halves("RGB", BLUE, BLUE)
    options: dict[str, Any] = {"lossless": True} if file_format == "WEBP" else {}
    file = encoded(first, file_format, save_all=True, append_images=[second, third], **options)
    assert page_of(file).frames == 3
    assert colors(page_of(file).image)[1:] == (RED, BLUE)
    frame = make_page(file, LIMITS, frame=1)
    assert isinstance(frame, Page)
    assert colors(frame.image)[1:] == (BLUE, RED)
    assert make_page(file, LIMITS, frame=2) == Refusal("blank", "no ink on the page", frames=3)
    assert isinstance(make_page(file, LIMITS, frame=3), Refusal)


def test_the_frames_of_a_cameras_jpeg_are_one_photo() -> None:
    page = page_of(encoded(halves("RGB", RED, BLUE), "MPO", save_all=True, append_images=[halves("RGB", BLUE, RED)]))
    assert (page.original, page.frames) == (None, 1)


def test_a_large_frame_behind_a_small_one_is_refused_before_it_is_decoded() -> None:
    small, large = halves("RGB", RED, BLUE), halves("RGB", RED, BLUE, (400, 300))
    file = encoded(small, "TIFF", save_all=True, append_images=[large])
    limits = PageLimits(1540, max_pixels=100_000)
    assert isinstance(make_page(file, limits), Page)
    refusal = make_page(file, limits, frame=1)
    assert isinstance(refusal, Refusal)
    assert "400x300 is 120,000 pixels, more than the limit of 100,000" in refusal.reason


# --- colour profiles -------------------------------------------------------------------------------------------------


def icc_profile(space: bytes, tags: dict[bytes, bytes]) -> bytes:
    """A colour profile of version 2 with these tags."""
    at, table, data = 132 + 12 * len(tags), b"", b""
    for name, value in tags.items():
        table += name + struct.pack(">II", at + len(data), len(value))
        data += value + b"\0" * (-len(value) % 4)
    body = struct.pack(">I", len(tags)) + table + data
    head = struct.pack(
        ">I4sI4s4s4s12s4s", 128 + len(body), b"none", 0x02400000, b"mntr", space, b"XYZ ", b"\0" * 12, b"acsp"
    )
    white = struct.pack(">3i", 63190, 65536, 54061)  # D50
    return head.ljust(68, b"\0") + white + b"\0" * 48 + body


def xyz(x: float, y: float, z: float) -> bytes:
    return b"XYZ \0\0\0\0" + struct.pack(">3i", *(round(value * 65536) for value in (x, y, z)))


def curve(*points: int) -> bytes:
    """A tone curve: no point is linear light, one is a gamma (256ths), several are from black to white."""
    return b"curv\0\0\0\0" + struct.pack(f">I{len(points)}H", len(points), *points)


WHITE = {b"wtpt": xyz(0.9642, 1.0, 0.8249)}
REDS, GREENS, BLUES = (0.4361, 0.2225, 0.0139), (0.3851, 0.7169, 0.0971), (0.1431, 0.0606, 0.7141)  # of sRGB
TONES = {name: curve(round(2.2 * 256)) for name in (b"rTRC", b"gTRC", b"bTRC")}
LINEAR_GRAY = icc_profile(b"GRAY", {**WHITE, b"kTRC": curve()})
INVERTED_GRAY = icc_profile(b"GRAY", {**WHITE, b"kTRC": curve(65535, 0)})
GAMMA_18_GRAY = icc_profile(b"GRAY", {**WHITE, b"kTRC": curve(round(1.8 * 256))})
NEARLY_SRGB = icc_profile(b"RGB ", {**WHITE, b"rXYZ": xyz(*REDS), b"gXYZ": xyz(*GREENS), b"bXYZ": xyz(*BLUES), **TONES})
EXCHANGED = icc_profile(b"RGB ", {**WHITE, b"rXYZ": xyz(*GREENS), b"gXYZ": xyz(*REDS), b"bXYZ": xyz(*BLUES), **TONES})


@pytest.mark.parametrize(
    ("profile", "image", "expected"),
    [
        (LINEAR_GRAY, halves("L", 55, 255), (128, 255)),  # 55/255 of the light is sRGB's 128
        (INVERTED_GRAY, halves("L", 0, 255), (255, 0)),
        (EXCHANGED, halves("RGB", (255, 0, 0), (0, 255, 0)), ((0, 255, 0), (255, 0, 0))),
        (GAMMA_18_GRAY, halves("L", 128, 255), (128, 255)),
        (NEARLY_SRGB, halves("RGB", RED, BLUE), (RED, BLUE)),
        (EXCHANGED, halves("L", 7, 201), (7, 201)),  # of another kind than the pixels
        (b"no profile", halves("RGB", RED, BLUE), (RED, BLUE)),
        (EXCHANGED[:200], halves("RGB", RED, BLUE), (RED, BLUE)),
    ],
)
def test_a_colour_profile_counts_where_it_changes_what_is_read(
    profile: bytes, image: Image.Image, expected: object
) -> None:
    for file_format in ("PNG", "TIFF"):
        pixels = colors(page_of(encoded(image, file_format, icc_profile=profile)).image)[1:]
        for got, wanted in zip(pixels, expected, strict=True):  # type: ignore[call-overload]
            assert got == pytest.approx(wanted, abs=3)


def test_a_jpeg_travels_as_it_was_unless_its_profile_counts() -> None:
    noise = Image.effect_noise((200, 200), 90)
    usual, other = (encoded(noise, "JPEG", icc_profile=profile) for profile in (GAMMA_18_GRAY, LINEAR_GRAY))
    assert page_of(usual).original == usual
    assert page_of(other).original is None


# --- paths -----------------------------------------------------------------------------------------------------------


def test_a_path_in_a_cell_is_never_opened(tmp_path: Path) -> None:
    there = tmp_path / "1.png"
    there.write_bytes(encoded(upright_page(), "PNG"))
    for path in (str(there), "../1.png", "/etc/passwd", "", "\ud800", 7):
        reason = refusal_of({"bytes": None, "path": path}).reason
        assert reason == (
            f"the cell has a path and no bytes, and there is no such file in the input's own folder: {path!r}"
        )
    with_bytes = {"bytes": there.read_bytes(), "path": "/etc/passwd"}
    assert isinstance(make_page(with_bytes, LIMITS), Page)


# --- on its way ------------------------------------------------------------------------------------------------------


def decoded(url: str) -> Image.Image:
    kind, _, body = url.partition(",")
    assert kind in {"data:image/png;base64", "data:image/jpeg;base64"}
    image = Image.open(io.BytesIO(base64.b64decode(body, validate=True)))
    image.load()
    assert kind == f"data:image/{(image.format or '').lower()};base64"
    return image


@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("progressive", [False, True])
def test_a_jpeg_that_needs_no_change_travels_as_it_was(mode: str, progressive: bool) -> None:
    file = encoded(upright_page().convert(mode), "JPEG", progressive=progressive)
    page = page_of({"bytes": file, "path": None})
    assert page.original == file
    assert base64.b64decode(data_url(page).partition(",")[2]) == file
    assert decoded(data_url(page)).tobytes() == page.image.tobytes()


def test_a_jpeg_that_needs_a_change_travels_as_the_changed_page() -> None:
    noise = encoded(Image.effect_noise((300, 200), 90), "JPEG")
    assert page_of(noise, PageLimits(299)).original is None
    assert page_of(noise, PageLimits(300)).original == noise
    with_a_novel_in_it = encoded(upright_page(), "JPEG", comment=b"it was a dark and stormy night " * 2000)
    assert page_of(with_a_novel_in_it).original is None


def test_nothing_but_pixels_travels_in_the_png() -> None:
    profile = b"not a profile, but in the file"
    file = encoded(halves("L", 7, 201), "PNG", transparency=99, icc_profile=profile, dpi=(300, 300))
    sent = decoded(data_url(page_of(file)))
    assert sent.mode == "L"
    assert not {"transparency", "icc_profile", "dpi"} & set(sent.info)


@given(image_files(), st.integers(28, 100))
@settings(deadline=None)
def test_any_picture_becomes_a_page_within_the_limits_that_arrives_as_it_is(file: bytes, edge: int) -> None:
    page = make_page(file, PageLimits(edge))
    size = Image.open(io.BytesIO(file)).size
    if isinstance(page, Refusal):
        assert min(size) < 28 or page.status == "blank"
        return
    assert page.image.mode in {"L", "RGB"}
    assert page.image.size == target_size(size, edge)
    assert max(page.image.size) <= edge
    assert type(page.image) is Image.Image
    sent = decoded(data_url(page))
    assert (sent.mode, sent.size, sent.tobytes()) == (page.image.mode, page.image.size, page.image.tobytes())


@given(st.one_of(cells, mutated_files()))
@settings(max_examples=300, deadline=None)
def test_whatever_is_in_a_cell_nothing_is_raised(cell: object) -> None:
    page = make_page(cell, PageLimits(60, max_pixels=1_000_000))
    if isinstance(page, Refusal):
        assert page.status in {"error", "blank"}
        assert page.reason
    else:
        assert page.image.mode in {"L", "RGB"}
        assert max(page.image.size) <= 60


def test_many_threads_make_the_same_pages() -> None:
    files = [file() for _, file, *_ in STORED] * 4
    alone = [make_page(file, PageLimits(40)) for file in files]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda file: make_page(file, PageLimits(40)), files))
    for one, other in zip(alone, together, strict=True):
        if isinstance(one, Refusal):
            assert one == other
        else:
            assert isinstance(other, Page)
            assert one.image.tobytes() == other.image.tobytes()


# --- blank or not ----------------------------------------------------------------------------------------------------

SIZE = (1090, 1540)


def paper(gray: int) -> Image.Image:
    return Image.new("L", SIZE, gray)


def grainy(image: Image.Image, sigma: float) -> Image.Image:
    return ImageChops.add(image, Image.effect_noise(image.size, sigma), 1, -128)


def jpeg(image: Image.Image, quality: int) -> Image.Image:
    return Image.open(io.BytesIO(encoded(image, "JPEG", quality=quality)))


def vignette() -> Image.Image:
    return ImageChops.invert(Image.radial_gradient("L").resize(SIZE)).point([80 + v * 6 // 10 for v in range(256)])


def gradient() -> Image.Image:
    return Image.linear_gradient("L").resize(SIZE)


def written(image: Image.Image, text: str, ink: Color, at: tuple[int, int] = (900, 1480), px: int = 14) -> Image.Image:
    image = image.copy()
    ImageDraw.Draw(image).text(at, text, fill=ink, font=ImageFont.load_default(px))
    return image


BLANK: dict[str, Callable[[], Image.Image]] = {
    "white": lambda: paper(255),
    "black": lambda: paper(0),
    "a dark scan of nothing": lambda: grainy(paper(20), 6),
    "fine grain": lambda: grainy(paper(235), 3),
    "grain": lambda: grainy(paper(235), 8),
    "coarse grain": lambda: grainy(paper(200), 15),
    "soft grain": lambda: grainy(paper(210), 30).filter(ImageFilter.GaussianBlur(1.5)),
    "JPEG of grain": lambda: jpeg(grainy(paper(235), 4), 75),
    "poor JPEG of fine grain": lambda: jpeg(grainy(paper(235), 3), 30),
    "gradient": gradient,
    "vignette": vignette,
    "JPEG of a vignette": lambda: jpeg(vignette(), 30),
    "yellow paper": lambda: Image.new("RGB", SIZE, (240, 230, 200)),
    "grainy yellow paper": lambda: Image.merge("RGB", [grainy(paper(gray), 8) for gray in (235, 220, 190)]),
    "small white": lambda: Image.new("L", (28, 28), 255),
    "small grain": lambda: grainy(Image.new("L", (200, 150), 200), 5),
}


def filled() -> Image.Image:
    page = paper(255)
    for y in range(0, SIZE[1], 12):
        page = written(page, "the quick brown fox jumps over the lazy dog " * 5, 0, (0, y), 11)
    return page


INKED: dict[str, Callable[[], Image.Image]] = {
    "a line in the corner": lambda: written(paper(255), "Page 12 of the minutes", 30),
    "a line of tiny print": lambda: written(paper(255), "Page 12 of the minutes", 30, px=9),
    "a page number": lambda: written(paper(255), "7", 30, px=12),
    "a faint line": lambda: written(paper(255), "Page 12 of the minutes", 225),
    "a faint page number": lambda: written(paper(255), "12", 215, px=12),
    "white on black": lambda: written(paper(0), "Page 12 of the minutes", 255),
    "dark on dark": lambda: written(paper(60), "Page 12 of the minutes", 30),
    "a line on grain": lambda: grainy(written(paper(235), "Page 12 of the minutes", 30), 8),
    "a line on coarse grain": lambda: grainy(written(paper(200), "Page 12 of the minutes", 30), 15),
    "a page number on grain": lambda: grainy(written(paper(235), "12", 30, px=12), 8),
    "pencil on grain": lambda: grainy(written(paper(225), "small faint pencil", 185), 8),
    "faint pencil on fine grain": lambda: grainy(written(paper(225), "small faint pencil", 195), 4),
    "a line in a poor JPEG": lambda: jpeg(written(paper(235), "Page 12 of the minutes", 30), 10),
    "a line on a vignette": lambda: written(vignette(), "Page 12 of the minutes", 30, (500, 700)),
    "a line on a gradient": lambda: written(gradient(), "Page 12 of the minutes", 30, (100, 700)),
    "text from edge to edge": filled,
    "noisy text from edge to edge": lambda: grainy(filled(), 20),
    "ink as bright as its paper": lambda: written(Image.new("RGB", SIZE, (200, 120, 120)), "minutes", (90, 170, 150)),
    "yellow on white": lambda: written(Image.new("RGB", SIZE, "white"), "Page 12 of the minutes", (255, 255, 0)),
    "a letter on a stamp": lambda: written(Image.new("L", (60, 30), 255), "A", 0, (10, 5)),
    "an upper half that is black": lambda: halves("L", 0, 255, (300, 300)),
}


@pytest.mark.parametrize("name", BLANK)
def test_a_page_without_ink_is_blank(name: str) -> None:
    assert is_blank(BLANK[name]())
    assert refusal_of(encoded(BLANK[name](), "PNG")) == Refusal("blank", "no ink on the page")


@pytest.mark.parametrize("name", INKED)
def test_a_page_with_a_little_ink_is_not_blank(name: str) -> None:
    image = INKED[name]()
    assert not is_blank(image)
    assert not is_blank(ImageOps.invert(image))
