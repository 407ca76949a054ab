"""A cell of a dataset → a page ready for the model, or a named refusal.

`make_page` is the whole of it: pure, the same in every script, called from many threads at once, and it never raises.
In order: the bytes (a path only inside the dataset's own folder), the header (known raster formats, sides, pixels),
the pixels (whole files only, one frame), upright, flat (8 bits, "L" or "RGB", transparency over white, its colour
profile), fitted, and not blank. Gray stays gray: the server makes RGB of it with the same pixels, and here it is a
third of the work.
"""

from __future__ import annotations

import io
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .cells import UnfitCellError, cell_bytes
from .ink import is_blank
from .pixels import flatten, gray_if_it_is
from .png import png_file

if TYPE_CHECKING:
    from PIL import Image

# Raster formats only: nothing here runs a program (EPS), draws (WMF) or fetches. MPO, a camera's JPEG, comes with JPEG.
PAGE_FORMATS = ("JPEG", "PNG", "TIFF", "WEBP", "JPEG2000", "BMP", "GIF", "AVIF", "PPM")
SMALLEST_SIDE_PX = 28  # one image token
LARGEST_ASPECT = 200
MANY_FRAMES = frozenset({"TIFF", "GIF", "WEBP", "PNG", "AVIF"})  # not MPO: its other frames are the same photo
MOST_FRAMES = 1_000  # asked about; each costs a request, and a GIF's frame n costs n decodings


@dataclass(frozen=True)
class PageLimits:
    """What a page may be: the longest edge the model was trained on, and how many pixels are decoded at all.

    `allow_truncated`: a file that breaks off is read as far as it goes. `skip_blank`: a page without ink is no page.
    """

    longest_edge_px: int
    max_pixels: int = 178_956_970  # vLLM's own limit (VLLM_MAX_IMAGE_PIXELS), twice Pillow's default
    allow_truncated: bool = False
    skip_blank: bool = True


@dataclass(frozen=True)
class Page:
    """A page as the model gets it."""

    image: Image.Image  # mode "L" or "RGB", upright, longest side ≤ the limit, never upscaled
    original: bytes | None  # the JPEG file itself, where it needs no change: decoding it gives `image`
    frames: int = 1  # in the picture
    has_ink: bool = True


@dataclass(frozen=True)
class Refusal:
    """Why a cell becomes no page."""

    status: str  # "error" or "blank"
    reason: str
    frames: int = 1


def make_page(cell: object, limits: PageLimits, frame: int = 0) -> Page | Refusal:
    """Make a page of one frame in a cell: None, bytes, or an undecoded picture `{"bytes": …, "path": …}`."""
    try:
        data = cell_bytes(cell)
        page = _prepare_page(data, limits, frame)
        if not is_blank(page.image):
            return page
        return (
            Refusal("blank", "no ink on the page", page.frames) if limits.skip_blank else replace(page, has_ink=False)
        )
    except UnfitCellError as error:
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


# --- the picture -----------------------------------------------------------------------------------------------------


def _prepare_page(data: bytes, limits: PageLimits, frame: int) -> Page:
    from PIL import Image, ImageFile

    opened = _open_picture(data)
    _check_size(opened.size, limits)
    frames = _count_frames(data) if opened.format in MANY_FRAMES else 1
    if frame:
        opened.seek(frame)
        _check_size(opened.size, limits)
    # Pillow has this switch alone; all pages of a run set it to the same.
    ImageFile.LOAD_TRUNCATED_IMAGES = limits.allow_truncated
    # Not `draft`, JPEG decoded at a reduced scale: it costs a third, but on real scans it moves pixels by 1.2 gray
    # levels (RMS, at most 27) where the scale is twice the target's, by 7 (59) below; another filter, by 0.6 and 2.8.
    opened.load()  # a truncated file raises here
    orientation = _orientation(opened)
    upright = opened if orientation == 1 else opened.transpose(Image.Transpose(_TURNS[orientation]))
    image = flatten(
        upright,
        # Pillow turns white-is-zero around for 8 bits, not for 16 bits and floats; tag 262 says how light is stored.
        white_is_zero=getattr(opened, "tag_v2", {}).get(262) == 0,
        # Only Adobe stores ink inverted; Pillow takes it for granted.
        ink_as_it_is=opened.format == "JPEG" and "adobe" not in opened.info,
        colour_profile=opened.info.get("icc_profile"),
    )
    size = target_size(image.size, limits.longest_edge_px)
    # Metadata can make a small picture a large file, then its pixels are the cheaper way.
    is_small_enough = len(data) <= size[0] * size[1] * len(image.getbands())
    is_whole = not limits.allow_truncated  # a server would refuse a file that breaks off
    if image is opened and size == image.size and opened.format == "JPEG" and is_small_enough and is_whole:
        return Page(_bare(image), data)
    image = gray_if_it_is(image)
    if size != image.size:
        image = image.resize(size, Image.Resampling.LANCZOS)
    return Page(_bare(image), None, frames)


def _count_frames(data: bytes) -> int:
    """Count the frames of a picture, without decoding them; one where the file is too broken to say."""
    try:
        return max(1, int(getattr(_open_picture(data), "n_frames", 1)))
    except Exception:  # noqa: BLE001  the first frame may be whole all the same
        return 1


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
        raise UnfitCellError(_unknown_format(data)) from None


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
        raise UnfitCellError(
            f"{width}x{height} is {width * height:,} pixels, more than the limit of {limits.max_pixels:,}"
        )
    if min(size) < SMALLEST_SIDE_PX:
        raise UnfitCellError(f"{width}x{height} is too small: a side has under {SMALLEST_SIDE_PX} px")
    if max(size) > LARGEST_ASPECT * min(size):
        raise UnfitCellError(f"{width}x{height} is no page: one side is over {LARGEST_ASPECT} times the other")


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
