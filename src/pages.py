"""A cell of a dataset → a page ready for the model, or a named refusal.

`make_page` is the whole of it: pure, the same in every script, called from many threads at once, and it never raises.
In order: the bytes (a path only inside the dataset's own folder), the header (known raster formats, sides, pixels),
the pixels (whole files only, the first frame), upright, flat (8 bits, "L" or "RGB", transparency over white), fitted,
and not blank. Gray stays gray: the server makes RGB of it with the same pixels, and here it is a third of the work.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from .ink import is_blank
from .pixels import flatten, gray_if_it_is
from .png import png_file

if TYPE_CHECKING:
    from pathlib import Path

    from PIL import Image

# Raster formats only: nothing here runs a program (EPS), draws (WMF) or fetches. MPO, a camera's JPEG, comes with JPEG.
PAGE_FORMATS = ("JPEG", "PNG", "TIFF", "WEBP", "JPEG2000", "BMP", "GIF", "AVIF", "PPM")
SMALLEST_SIDE_PX = 28  # one image token
LARGEST_ASPECT = 200


@dataclass(frozen=True)
class PageLimits:
    """What a page may be: the longest edge the model was trained on, and how many pixels are decoded at all."""

    longest_edge_px: int
    max_pixels: int = 178_956_970  # vLLM's own limit (VLLM_MAX_IMAGE_PIXELS), twice Pillow's default


@dataclass(frozen=True)
class Page:
    """A page as the model gets it."""

    image: Image.Image  # mode "L" or "RGB", upright, longest side ≤ the limit, never upscaled
    original: bytes | None  # the JPEG file itself, where it needs no change: decoding it gives `image`


@dataclass(frozen=True)
class Refusal:
    """Why a cell becomes no page."""

    status: str  # "error" or "blank"
    reason: str


class _UnfitCellError(Exception):
    """The cell can't become a page; the message is the reason."""


def make_page(cell: object, limits: PageLimits, root: Path | None = None) -> Page | Refusal:
    """Make a page of a cell: None, bytes, or an undecoded picture `{"bytes": …, "path": …}`.

    A path is opened only if `root`, the folder of a local dataset, is given and the file really lies inside it.
    """
    try:
        data = _cell_bytes(cell, root)
        page = _prepare_page(data, limits)
        return Refusal("blank", "no ink on the page") if is_blank(page.image) else page
    except _UnfitCellError as error:
        return Refusal("error", str(error))
    except MemoryError:
        return Refusal("error", "not enough memory to decode the picture")
    except Exception as error:  # noqa: BLE001  the page boundary: whatever a broken file does, it is one row
        return Refusal("error", f"the picture can't be decoded: {type(error).__name__}: {error}")


def target_size(size: tuple[int, int], longest_edge_px: int) -> tuple[int, int]:
    """Size a page is scaled to: its own, or with the longest edge at the limit.

    Rounded, not cut off, and at least 1 px: the vendor's client does the same (`fit` in lightonocr/render.py), and
    `int` would make other pages (1088x1539 where this makes 1089x1540).
    """
    scale = longest_edge_px / max(size)
    if scale >= 1:
        return size
    width, height = size
    return max(1, round(width * scale)), max(1, round(height * scale))


# --- the bytes -------------------------------------------------------------------------------------------------------


def _cell_bytes(cell: object, root: Path | None) -> bytes:
    path: object = None
    if isinstance(cell, dict):
        fields = cast("dict[str, object]", cell)
        cell, path = fields.get("bytes"), fields.get("path")
    if cell is None and path is None:
        raise _UnfitCellError("no picture in this row")
    if cell is None:
        return _file_bytes(path, root)
    if not isinstance(cell, bytes | bytearray | memoryview):
        raise _UnfitCellError(f"the cell holds no picture but {type(cell).__name__}")
    if len(cell) == 0:
        raise _UnfitCellError("the picture has 0 bytes")
    return bytes(cell)


def _file_bytes(path: object, root: Path | None) -> bytes:
    """Read a file named by the dataset, which must not make us read files of this machine that aren't its own."""
    if not isinstance(path, str):
        raise _UnfitCellError(f"the cell's path is no text but {type(path).__name__}")
    if root is None:
        raise _UnfitCellError(f"the cell has a path and no bytes; a path is opened only in a local dataset: {path!r}")
    try:
        inside = root.resolve(strict=True)
        real = (inside / path).resolve(strict=True)
    except (OSError, ValueError, RuntimeError) as error:  # not there, a NUL in the name, a loop of links
        raise _UnfitCellError(f"the picture's file can't be found: {path!r} ({type(error).__name__})") from error
    if not real.is_relative_to(inside):
        raise _UnfitCellError(f"the picture's file lies outside the dataset's folder and is not opened: {path!r}")
    if not real.is_file():
        raise _UnfitCellError(f"the picture's path is no regular file: {path!r}")
    return real.read_bytes()


# --- the picture -----------------------------------------------------------------------------------------------------


def _prepare_page(data: bytes, limits: PageLimits) -> Page:
    from PIL import Image

    opened = _open_picture(data)
    _check_size(opened.size, limits)
    opened.load()  # a truncated file raises here
    orientation = _orientation(opened)
    upright = opened if orientation == 1 else opened.transpose(Image.Transpose(_TURNS[orientation]))
    image = flatten(
        upright,
        # Pillow turns white-is-zero around for 8 bits, not for 16 bits and floats; tag 262 says how light is stored.
        white_is_zero=getattr(opened, "tag_v2", {}).get(262) == 0,
        # Only Adobe stores ink inverted; Pillow takes it for granted.
        ink_as_it_is=opened.format == "JPEG" and "adobe" not in opened.info,
    )
    size = target_size(image.size, limits.longest_edge_px)
    # Metadata can make a small picture a large file, then its pixels are the cheaper way.
    is_small_enough = len(data) <= size[0] * size[1] * len(image.getbands())
    if image is opened and size == image.size and opened.format == "JPEG" and is_small_enough:
        return Page(_bare(image), data)
    image = gray_if_it_is(image)
    if size != image.size:
        image = image.resize(size, Image.Resampling.LANCZOS)
    return Page(_bare(image), None)


def _bare(image: Image.Image) -> Image.Image:
    """Pixels only: a transparency or profile left on it would be written into the PNG, and the server act on it."""
    from PIL import ImageFile

    if isinstance(image, ImageFile.ImageFile):
        image = image.copy()  # without the file behind it
    image.info = {}
    return image


def _open_picture(data: bytes) -> Image.Image:
    from PIL import Image, UnidentifiedImageError

    # Pillow's limit warns or raises, by the process's warning filters, before ours can be asked. `_check_size` sees the
    # header's size before a pixel is decoded, in this same thread.
    Image.MAX_IMAGE_PIXELS = None
    try:
        return Image.open(io.BytesIO(data), formats=PAGE_FORMATS)
    except UnidentifiedImageError:
        raise _UnfitCellError(_unknown_format(data)) from None


def _unknown_format(data: bytes) -> str:
    if data[4:8] == b"ftyp" and data[8:12] in {b"heic", b"heix", b"heim", b"heis", b"hevc", b"mif1", b"msf1"}:
        return "HEIC is not read here: convert the pictures first, with pillow-heif for example"
    if data.lstrip()[:5] == b"%PDF-":
        return "a PDF, not a picture: render its pages first"
    return (
        f"not a picture, or a broken one, or of none of the kinds {', '.join(PAGE_FORMATS)}; starts with {data[:8]!r}"
    )


def _check_size(size: tuple[int, int], limits: PageLimits) -> None:
    width, height = size
    if width * height > limits.max_pixels:
        raise _UnfitCellError(
            f"{width}x{height} is {width * height:,} pixels, more than the limit of {limits.max_pixels:,}"
        )
    if min(size) < SMALLEST_SIDE_PX:
        raise _UnfitCellError(f"{width}x{height} is too small: a side has under {SMALLEST_SIDE_PX} px")
    if max(size) > LARGEST_ASPECT * min(size):
        raise _UnfitCellError(f"{width}x{height} is no page: one side is over {LARGEST_ASPECT} times the other")


# EXIF orientation → Image.Transpose: 2 FLIP_LEFT_RIGHT, 3 ROTATE_180, 4 FLIP_TOP_BOTTOM, 5 TRANSPOSE, 6 ROTATE_270,
# 7 TRANSVERSE, 8 ROTATE_90
_TURNS = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}


def _orientation(image: Image.Image) -> int:
    """The EXIF or XMP orientation, 1 where there is none (Pillow turns a TIFF itself, as it is loaded)."""
    try:
        orientation = image.getexif().get(0x0112)
    except Exception:  # noqa: BLE001  broken metadata must not cost the page
        return 1
    return orientation if orientation in _TURNS else 1


# --- on its way ------------------------------------------------------------------------------------------------------


def data_url(page: Page) -> str:
    """The page as a data URL: the JPEG file as it was where it is kept, else a PNG of exactly these pixels."""
    import base64

    if page.original is not None:
        return "data:image/jpeg;base64," + base64.b64encode(page.original).decode("ascii")
    return "data:image/png;base64," + base64.b64encode(png_file(page.image)).decode("ascii")
