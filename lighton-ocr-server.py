# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "datasets>=5.2.0",
#     "huggingface_hub>=2.4.0",
#     "openai>=3.57.0",
#     "pillow>=13.0.0",
#     "tqdm>=4.70.1",
# ]
#
# [tool.hf-jobs]
# image = "vllm/vllm-openai:v0.22.1"
# flavor = "l4x1"
# secrets = ["HF_TOKEN"]
# ///
"""Read the pages of a dataset with LightOnOCR: `vllm serve` beside it, or any server that speaks its API.

On a hosted GPU (the script is fetched by URL and runs alone):

    hf jobs uv run --image vllm/vllm-openai:v0.22.1 --flavor l4x1 -s HF_TOKEN --timeout 4h \\
        SCRIPT_URL namespace/scans namespace/scans-text

On a GPU of your own with vLLM installed, or against a server that runs (no GPU, no torch):

    uv run lighton-ocr-server.py scans/ out/
    uv run lighton-ocr-server.py scans/ out/ --server http://gpu-box:8000

OUTPUT gets the input's rows in their order, all columns as they were, and four more: `markdown` (the text),
`markdown_status` (ok, blank, truncated, repetition, error), `markdown_error`, `markdown_tokens`; `inference_info` says
how. It is written in blocks of rows, data/<split>-<block>.parquet: a run that was killed goes on with the same command.

Caveat: at the models' own temperatures two runs of a page may differ. Read `markdown_status` before trusting a text.
"""

# Built from src/server.py and the rooms below by tools/build.py: edit those, not this file.
#
#   errors: The errors that end a run, and the exit code of each.
#   ink: Whether anything is written on a page.
#   pixels: Pixels as they were stored, in whatever mode, → 8 bits a channel, gray ("L") or "RGB".
#   png: Pixels → a PNG file, in a quarter of the time that Pillow takes at its quickest, and no larger for a scan.
#   pages: A cell of a dataset → a page ready for the model, or a named refusal.
#   question: What is asked about a page: the same words, the same sampling and the same seed from every script.
#   result: What became of a page.
#   ask: A page → the request → the result: a vLLM endpoint asked through `AsyncOpenAI`, its errors sorted.
#   blocks: Blocks of rows: their names, how one is written, and what is there already.
#   report: What a run tells: progress lines on stderr, the last JSON line on stdout, and the exit code.
#   source: Rows of a dataset by address, undecoded.
#   flow: The flow of a run: rows → pages → an engine → blocks, with everything bounded.
#   interrupt: Ctrl-C, SIGTERM and SIGHUP: the first ends the run in order, the second at once.
#   models: The profiles: everything that differs between the LightOnOCR generations.
#   options: The command line: each option is spelled once, as a field of a frozen dataclass; the parser is made from
#       those.
#   publish: The output: where it goes, whether it may go there, its card, and the one commit that publishes it.
#   job: A run, from options to exit code: what every script that makes text does around its engine.
#   serve: The server: one that runs already, or `vllm serve` spawned here and ended with us.
#   driver: What the driver scripts share: their options for a server, and keeping it busy from a client without torch.

from __future__ import annotations

import argparse
import asyncio
import bisect
import contextlib
import datetime
import email.utils
import fcntl
import functools
import hashlib
import io
import ipaddress
import json
import math
import os
import random
import re
import secrets
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import types
import typing
import urllib.error
import urllib.parse
import urllib.request
import warnings
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TextIO, TypeVar, cast

if TYPE_CHECKING:
    import pyarrow as pa
    from openai import AsyncOpenAI
    from PIL import Image
    from tqdm import tqdm

# ---- errors ----------------------------------------------------------------------------------------------------------
# The errors that end a run, and the exit code of each.


class JobError(Exception):
    """Something that ends the run: the message says what, the value seen, and the next step."""

    exit_code = 1


class UsageError(JobError):
    """The command line, the input or the output does not fit: nothing was asked and nothing was written."""

    exit_code = 2


class EngineError(JobError):
    """The engine can't be started, can't be reached, refuses us, or serves something else. Closed blocks are kept."""


class SourceError(JobError):
    """The input stopped being readable in mid-run. Closed blocks are kept."""


class PublishError(JobError):
    """The blocks are all there, but the output could not be published. The same command publishes them."""


def network_errors() -> tuple[type[Exception], ...]:
    """Return what calls to the Hub raise where the network or the Hub fails: httpx's own errors are no `OSError`."""
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]

    return (OSError, httpx.HTTPError)


# ---- ink -------------------------------------------------------------------------------------------------------------
# Whether anything is written on a page.
#
# Not the mean counts but the contrast of each spot to its near surroundings, against the noise of the page. A shadow, a
# gradient, grain and a page that is dark all over are blank; one small line in a corner is not. In doubt a page isn't
# blank: that costs one request, the other way a page is lost.


# Contrasts to the surroundings, in gray levels. Beyond SURE_INK no noise explains it.
FAINTEST_INK, SURE_INK = 11, 40
NOISE_SIGMAS = 5.5
FEWEST_INK_PIXELS = 5


def is_blank(image: Image.Image) -> bool:
    """Whether no spot of an "L" or "RGB" page stands out from its surroundings by more than the page's noise."""
    if image.mode == "L":
        return not _has_ink(image)
    # Luminance first, which is enough for nearly all pages; then each band, for ink as bright as its paper.
    return not (_has_ink(image.convert("L")) or any(_has_ink(band) for band in image.split()))


def _has_ink(gray: Image.Image) -> bool:
    from PIL import ImageChops, ImageFilter

    small = gray.reduce(2) if max(gray.size) >= 800 else gray  # half the noise, and a thin stroke still shows
    contrast = ImageChops.difference(small, small.filter(ImageFilter.BoxBlur(8))).histogram()
    threshold = min(SURE_INK, max(FAINTEST_INK, round(NOISE_SIGMAS * _noise_sigma(contrast))))
    return sum(contrast[threshold:]) >= FEWEST_INK_PIXELS


def _noise_sigma(contrast: list[int]) -> float:
    """Noise where the page is quietest, as text may fill the rest: of normal noise, a quarter is within 0.319 sigma."""
    quarter = sum(contrast) / 4
    passed = 0
    for level, count in enumerate(contrast):
        if passed + count >= quarter:
            # Contrasts are rounded: level 0 stands for 0 to 0.5, level 1 for 0.5 to 1.5, and so on.
            part = (quarter - passed) / count
            return (part / 2 if level == 0 else level - 0.5 + part) / 0.319
        passed += count
    return 0.0


# ---- pixels ----------------------------------------------------------------------------------------------------------
# Pixels as they were stored, in whatever mode, → 8 bits a channel, gray ("L") or "RGB".


def flatten(image: Image.Image, white_is_zero: bool, ink_as_it_is: bool) -> Image.Image:
    """The same picture in 8 bits, "L" or "RGB". Colour profiles (issue 6) have their place here, before all else."""
    from PIL import ImageChops

    mode = image.mode
    if mode in {"L", "RGB"} and "transparency" not in image.info:
        return image
    if mode.startswith("I") or mode == "F":
        return _scale_to_8_bits(image, white_is_zero)
    if mode in {"LA", "La", "PA", "RGBA", "RGBa"} or "transparency" in image.info:
        return _over_white(image)
    if mode == "1":
        return image.convert("L")
    if mode == "LAB":
        return _lab_to_rgb(image)
    if mode == "CMYK" and ink_as_it_is:
        image = ImageChops.invert(image)
    return image.convert("RGB")


def gray_if_it_is(image: Image.Image) -> Image.Image:
    """A gray page stored in colour, as scanners and PDF renderers do, as gray: the same pixels for half the work."""
    from PIL import Image, ImageChops

    if image.mode != "RGB":
        return image
    sample = image.resize((max(1, image.width // 16), max(1, image.height // 16)), Image.Resampling.NEAREST)
    for looked_at in (sample, image):  # most pages in colour are known by the sample
        red, green, blue = looked_at.split()
        if ImageChops.difference(red, green).getbbox() or ImageChops.difference(red, blue).getbbox():
            return image
    return image.getchannel("R")


def _over_white(image: Image.Image) -> Image.Image:
    from PIL import Image

    gray = image.mode in {"1", "L", "LA", "La"}
    layered = image.convert("LA" if gray else "RGBA")
    page = Image.new("L" if gray else "RGB", image.size, "white")
    page.paste(layered.convert(page.mode), mask=layered.getchannel("A"))
    return page


def _scale_to_8_bits(image: Image.Image, white_is_zero: bool) -> Image.Image:
    """Scale integers of up to 32 bits and floats to 0…255 by their range, never cut off.

    The range is what as many bits hold as the largest value needs, 8 at least: 65535 for a 16-bit scan, but 4095 for
    a 12-bit scan in 16-bit words, which would come out nearly black otherwise: the largest value is always 128 or more.
    Floats up to 1 are taken as 0…1. With negative values, the range is from the smallest to the largest.
    """
    exact = image if image.mode == "F" else image.convert("I")  # Pillow has no extrema of I;16B
    low, high = cast("tuple[float, float]", exact.getextrema())
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError("it has values that are no numbers (NaN or infinite)")
    if low < 0:
        base, full = low, (high - low) or 1.0
    elif image.mode == "F" and high <= 1:
        base, full = 0.0, 1.0
    else:
        base, full = 0.0, float((1 << max(8, math.ceil(high).bit_length())) - 1)
    scale, offset = 255 / full, -base * 255 / full
    if white_is_zero:
        scale, offset = -scale, 255 - offset
    values = exact.convert("F")
    return values.point(lambda value: value * scale + (offset + 0.5)).convert("L")  # the conversion cuts off decimals


def _lab_to_rgb(image: Image.Image) -> Image.Image:
    from PIL import ImageCms

    lab, rgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
    converted = ImageCms.profileToProfile(image, lab, rgb, outputMode="RGB")
    assert converted is not None  # only inPlace gives None
    return converted


# ---- png -------------------------------------------------------------------------------------------------------------
# Pixels → a PNG file, in a quarter of the time that Pillow takes at its quickest, and no larger for a scan.
#
# Pillow tries five filters on every row; for pages one of them, the difference to the row above, does as well. Of zlib
# only run lengths and Huffman codes are used: in the grain of paper there is nothing to be found again.


PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
PNG_COLOUR_TYPES = {"L": 0, "RGB": 2}
FILTER_UP = 2


def png_file(image: Image.Image) -> bytes:
    """Return an "L" or "RGB" image as a PNG file of exactly its pixels, and nothing else in it."""
    import numpy as np

    width, height = image.size
    pixels = np.frombuffer(image.tobytes(), np.uint8).reshape(height, -1)
    rows = np.empty((height, 1 + pixels.shape[1]), np.uint8)
    rows[:, 0] = FILTER_UP
    rows[0, 1:] = pixels[0]
    np.subtract(pixels[1:], pixels[:-1], out=rows[1:, 1:])  # modulo 256
    packer = zlib.compressobj(1, zlib.DEFLATED, 15, 9, zlib.Z_RLE)
    packed = packer.compress(rows.data) + packer.flush()
    header = struct.pack(">IIBBBBB", width, height, 8, PNG_COLOUR_TYPES[image.mode], 0, 0, 0)
    chunks = (_png_chunk(b"IHDR", header), _png_chunk(b"IDAT", packed), _png_chunk(b"IEND", b""))
    return b"".join((PNG_SIGNATURE, *chunks))


def _png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(data, zlib.crc32(kind)))


# ---- pages -----------------------------------------------------------------------------------------------------------
# A cell of a dataset → a page ready for the model, or a named refusal.
#
# `make_page` is the whole of it: pure, the same in every script, called from many threads at once, and it never raises.
# In order: the bytes (a path only inside the dataset's own folder), the header (known raster formats, sides, pixels),
# the pixels (whole files only, the first frame), upright, flat (8 bits, "L" or "RGB", transparency over white), fitted,
# and not blank. Gray stays gray: the server makes RGB of it with the same pixels, and here it is a third of the work.


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


# ---- question --------------------------------------------------------------------------------------------------------
# What is asked about a page: the same words, the same sampling and the same seed from every script.
#
# Offline, served, asked again or resumed: the question about a page is a function of the options and the page's row.


@dataclass(frozen=True)
class Question:
    """What is asked about every page of a run; `words` is the trained prompt beside the image, empty for most modes."""

    words: str
    temperature: float
    top_p: float
    max_tokens: int | None
    seed: int
    chat_template_kwargs: Mapping[str, Any]


def page_seed(seed: int, row: int) -> int:
    """Derive the sampling seed (31 bits) of the page in `row` of the split from the run's seed."""
    digest = hashlib.blake2b(f"{seed}:{row}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


def page_messages(question: Question, image_part: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the chat messages that ask about one image: the image, then the trained words where the mode has any."""
    content: list[dict[str, Any]] = [dict(image_part)]
    if question.words:
        content.append({"type": "text", "text": question.words})
    return [{"role": "user", "content": content}]


def page_sampling(question: Question, row: int) -> dict[str, Any]:
    """Return the sampling of the page in `row`, by the names that vLLM's server and `SamplingParams` share."""
    sampling: dict[str, Any] = {
        "temperature": question.temperature,
        "top_p": question.top_p,
        "seed": page_seed(question.seed, row),
    }
    if question.max_tokens is not None:
        sampling["max_tokens"] = question.max_tokens
    return sampling


# ---- result ----------------------------------------------------------------------------------------------------------
# What became of a page.


STATUSES = ("ok", "blank", "truncated", "repetition", "error")


@dataclass(frozen=True)
class PageResult:
    """What became of a page.

    `status` is one of `STATUSES`. `text` is what the engine read: for `blank` it is empty, for `error` it is None and
    `error` says why. `tokens` is what the engine generated, `prompt_tokens` what it was given. `attempts` counts the
    requests for this page; `latency_s` is that of the last one.
    """

    text: str | None
    status: str
    error: str | None = None
    tokens: int | None = None
    prompt_tokens: int | None = None
    finish_reason: str | None = None
    attempts: int = 0
    latency_s: float = 0.0


def result_of_answer(
    text: str | None,
    finish_reason: str | None,
    *,
    tokens: int | None,
    prompt_tokens: int | None,
    attempts: int,
    latency_s: float,
) -> PageResult:
    """Sort an engine's answer by its finish reason; an answer without text is an error, for the page had ink."""
    status = {"length": "truncated", "repetition": "repetition"}.get(finish_reason or "", "ok")
    error = None
    if not (text or "").strip():
        status, error = "error", f"the engine returned no text (finish_reason {finish_reason!r})"
    return PageResult(
        text=None if status == "error" else text,
        status=status,
        error=error,
        tokens=tokens,
        prompt_tokens=prompt_tokens,
        finish_reason=finish_reason,
        attempts=attempts,
        latency_s=latency_s,
    )


def refused(status: str, reason: str) -> PageResult:
    """Return the result of a page that never reached the engine: blank, or a picture that can't be read."""
    return PageResult(
        text="" if status == "blank" else None, status=status, error=None if status == "blank" else reason
    )


# ---- ask -------------------------------------------------------------------------------------------------------------
# A page → the request → the result: a vLLM endpoint asked through `AsyncOpenAI`, its errors sorted.
#
# Errors are of three kinds. Permanent: this page can't be asked; it becomes an error row. Transient: asked again after
# a pause, longer each time, until the page's time is up. Systemic: every page would fail the same way; the run stops
# and nothing is lost.


FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
REFUSALS_THAT_STOP = 50  # so many refused pages and not one answered: it is not the pages
PROBE_TOKENS = 16
SEND_BYTES = 256 * 1024
URL_PLACE = "\0page\0"  # stands in the JSON of a request where the page goes: no JSON text holds it unescaped


@dataclass(frozen=True)
class Endpoint:
    """Where the engine answers: `base_url` ends in `/v1`, `model` is the id that it serves the model under."""

    base_url: str
    api_key: str
    model: str


@dataclass(frozen=True)
class Failure:
    """Why a request failed: `kind` is `permanent`, `transient` or `systemic`; `retry_after_s` is the server's wish."""

    kind: str
    reason: str
    retry_after_s: float = 0.0


class Body:
    """The body of one request, given away piece by piece as it is sent: a page in flight holds no memory."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.num_bytes = sum(map(len, pieces))
        self._pieces = pieces[::-1]

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while self._pieces:
            piece = self._pieces.pop()
            for start in range(0, len(piece), SEND_BYTES):
                yield piece[start : start + SEND_BYTES]


def request_body(page: Page, row: int, question: Question, model: str) -> Body:
    """Return the JSON body of the chat completion that asks `question` about `page`."""
    image = {"type": "image_url", "image_url": {"url": URL_PLACE}}
    request: dict[str, Any] = {
        "model": model,
        "messages": page_messages(question, image),
        **page_sampling(question, row),
    }
    if question.chat_template_kwargs:
        request["chat_template_kwargs"] = dict(question.chat_template_kwargs)
    head, tail = json.dumps(request).split(json.dumps(URL_PLACE)[1:-1])
    return Body([head.encode(), data_url(page).encode(), tail.encode()])


class Asker:
    """Asks one endpoint about pages. `retry_for_s`: how long after its first failure a page is asked again."""

    def __init__(
        self,
        client: AsyncOpenAI,
        model: str,
        question: Question,
        *,
        retry_for_s: float,
        on_retry: Callable[[str], None],
        watch: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        self.watch = watch
        self._client = client
        self._model = model
        self._question = question
        self._retry_for_s = retry_for_s
        self._on_retry = on_retry
        self._last_answer = float("-inf")
        self._refusals_before_any_answer = 0

    def encode(self, page: Page, row: int) -> Body:
        """Make the request for a page: work for a thread."""
        return request_body(page, row, self._question, self._model)

    async def ask(self, body: Body, again: Callable[[], Awaitable[Body | Refusal]]) -> PageResult:
        """Ask until there is an answer, the page is refused, or its time is up; `again` makes the body anew.

        Raises `EngineError` where the fault is not the page's.
        """
        attempts = 0
        give_up_at = failed_at = float("inf")
        request: Body | Refusal = body
        while not isinstance(request, Refusal):
            attempts += 1
            started = time.monotonic()
            try:
                answer = await self._send(request)
                result = answered(answer, attempts, time.monotonic() - started)
            except Exception as error:  # noqa: BLE001 - the page boundary: sorted, counted, never swallowed
                failure = sort_error(error)
            else:
                self._last_answer = time.monotonic()
                return result
            now = time.monotonic()
            give_up_at = min(give_up_at, now + self._retry_for_s)
            if failure.kind == "transient" and now < give_up_at:
                failed_at = now
                self._on_retry(failure.reason)
                await asyncio.sleep(pause_s(attempts, failure.retry_after_s, give_up_at - now))
                request = await again()
                continue
            await self._stop_if_systemic(failure, since=min(failed_at, started))
            return PageResult(None, "error", error=f"{failure.reason} (attempt {attempts})", attempts=attempts)
        return refused(request.status, request.reason)

    async def _is_answering(self) -> bool:
        """Whether the engine answers a small page of ours."""
        question = replace(self._question, max_tokens=PROBE_TOKENS)
        try:
            answered(await self._send(request_body(probe_page(), 0, question, self._model)), 1, 0.0)
        except Exception:  # noqa: BLE001 - whatever it was, it is no answer
            return False
        return True

    async def _send(self, body: Body) -> Any:
        from openai.types.chat import ChatCompletion

        headers = {"Content-Type": "application/json", "Content-Length": str(body.num_bytes)}
        return await self._client.post(
            "/chat/completions", cast_to=ChatCompletion, content=body, options={"headers": headers}
        )

    async def _stop_if_systemic(self, failure: Failure, since: float) -> None:
        """Raise `EngineError` where the fault is not the page's: `since` is when its last attempt but one failed."""
        if failure.kind == "systemic":
            raise EngineError(failure.reason)
        # The last page of a run has no others beside it to show that the engine answers.
        if failure.kind == "transient" and self._last_answer < since and not await self._is_answering():
            raise EngineError(
                f"no page was answered for {self._retry_for_s:.0f} s; the last error was: {failure.reason}. "
                "Look at the server; the same command goes on where this run stopped"
            )
        if failure.kind == "permanent" and self._last_answer == float("-inf"):
            self._refusals_before_any_answer += 1
            if self._refusals_before_any_answer >= REFUSALS_THAT_STOP:
                raise EngineError(
                    f"the first {REFUSALS_THAT_STOP} pages were all refused, the last with: {failure.reason}. "
                    "Check the model, --max-tokens and the server's --max-model-len"
                )


def probe_page() -> Page:
    """Draw a small page that any engine that works can read."""
    from PIL import Image, ImageDraw

    image = Image.new("L", (280, 84), "white")
    ImageDraw.Draw(image).text((20, 30), "page", fill="black")
    return Page(image, original=None)


def answered(answer: Any, attempts: int, latency_s: float) -> PageResult:
    """Read a chat completion; raise `ValueError` where something else came back with status 200, as from a proxy."""
    if not getattr(answer, "choices", None):
        raise ValueError(repr(answer)[:200])
    choice = answer.choices[0]
    usage = answer.usage
    return result_of_answer(
        choice.message.content,
        choice.finish_reason,
        tokens=usage.completion_tokens if usage else None,
        prompt_tokens=usage.prompt_tokens if usage else None,
        attempts=attempts,
        latency_s=latency_s,
    )


def sort_error(error: Exception) -> Failure:
    """Sort what a request raised."""
    import openai

    if isinstance(error, openai.APITimeoutError):
        return Failure("transient", "the request timed out (--request-timeout)")
    if isinstance(error, openai.APIConnectionError):
        return Failure("transient", f"connection failed: {_root_cause(error)}")
    if isinstance(error, openai.APIStatusError):
        reason = f"HTTP {error.status_code}: {_server_words(error)}"
        if error.status_code in {401, 403}:
            return Failure(
                "systemic", f"{reason}. The server refuses our key: set the variable that --api-key-env names"
            )
        if error.status_code == 404:
            return Failure("systemic", f"{reason}. Check --server and --model")
        if error.status_code in {408, 409, 425, 429} or error.status_code >= 500:
            return Failure("transient", reason, retry_after_s(error.response.headers.get("retry-after")))
        return Failure("permanent", reason)
    return Failure("transient", f"no chat completion came back: {type(error).__name__}: {error}")


def _server_words(error: Any) -> str:
    body = error.body
    words = body.get("message") if isinstance(body, dict) else body
    return str(words or error.message)[:500]


def _root_cause(error: BaseException) -> str:
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__ or error
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def retry_after_s(header: str | None) -> float:
    """Read a Retry-After header, seconds or a date; 0 where there is none or it is unreadable."""
    if not header:
        return 0.0
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(header).timestamp() - time.time())
    except ValueError:
        return 0.0


def pause_s(attempts: int, wished_s: float, left_s: float) -> float:
    """Return how long to wait before the next attempt: exponential with full jitter, no shorter than the server's wish.

    Never longer than what is left of the page's time.
    """
    ceiling = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(attempts - 1, 10))
    return min(left_s, wished_s + random.uniform(0, ceiling))  # noqa: S311 - jitter, not a secret


# ---- blocks ----------------------------------------------------------------------------------------------------------
# Blocks of rows: their names, how one is written, and what is there already.
#
# A split is cut into contiguous blocks of `block_rows` rows. A block is one parquet file, written once and whole, under
# a name that is a function of split and number: the files that exist are the state from which a run resumes.


SETTINGS_KEY = b"lighton-ocr"  # where a block's parquet metadata holds the settings it was made with
LAYOUT_VERSION = 1
INFO_COLUMN = "inference_info"


@dataclass(frozen=True)
class BlockPlan:
    """How a split of `num_rows` wanted rows is cut."""

    split: str
    num_rows: int
    block_rows: int

    def __len__(self) -> int:
        return -(-self.num_rows // self.block_rows)

    def positions(self, number: int) -> range:
        """Which of the wanted rows block `number` holds."""
        return range(number * self.block_rows, min(self.num_rows, (number + 1) * self.block_rows))

    def file_name(self, number: int) -> str:
        """Return the name of block `number`, relative to the output."""
        return f"data/{self.split}-{number:06d}.parquet"


def block_number(split: str, file_name: str) -> int | None:
    """Return the number of the block that `data/`'s `file_name` holds, or None if it is no block of this split."""
    match = re.fullmatch(rf"{re.escape(split)}-(\d{{6}})\.parquet", file_name)
    return int(match[1]) if match else None


class BlockFolder:
    """The blocks of one split in a local folder."""

    def __init__(self, root: Path, split: str) -> None:
        self.root = root
        self.split = split
        self._data = root / "data"

    def closed(self) -> set[int]:
        """Return the numbers of the blocks that are there."""
        if not self._data.is_dir():
            return set()
        numbers = (block_number(self.split, file.name) for file in self._data.iterdir())
        return {number for number in numbers if number is not None}

    def path(self, number: int) -> Path:
        """Where block `number` is, or will be."""
        return self._data / f"{self.split}-{number:06d}.parquet"

    def stored_settings(self) -> bytes | None:
        """Return what the first block that is there says of the settings it was made with; None if it says nothing."""
        import pyarrow.parquet as pq

        metadata: dict[bytes, bytes] = pq.read_schema(self.path(min(self.closed()))).metadata or {}
        return metadata.get(SETTINGS_KEY)

    def remove_all(self) -> None:
        """Remove the blocks of this split, and nothing else."""
        for number in self.closed():
            self.path(number).unlink()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep a second run out of this split; sweep up what a killed one left half-written."""
        try:
            self._data.mkdir(parents=True, exist_ok=True)
            lock = (self._data / f".{self.split}.lock").open("w")
        except OSError as error:
            raise UsageError(f"output {str(self.root)!r} can't be written: {error.strerror}; name another") from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(
                    f"another run is writing split {self.split!r} of {self.root}; wait for it, or choose another output"
                ) from None
            for leftover in self._data.glob(f".{self.split}-*.tmp"):
                leftover.unlink(missing_ok=True)
            yield

    def write(self, number: int, table: pa.Table) -> None:
        """Write block `number`, whole or not at all."""
        import pyarrow.parquet as pq

        path = self.path(number)
        half = path.with_name(f".{path.name}.tmp")
        # Content-defined chunking lets the Hub store unchanged pictures once; 100 rows a group is what `datasets` takes
        # for images.
        pq.write_table(table, half, row_group_size=100, use_content_defined_chunking=True, write_page_index=True)
        with half.open("rb") as written:
            os.fsync(written.fileno())
        half.replace(path)


def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """List the settings that differ, one line each."""
    return [
        f"{key}: was {json.dumps(was.get(key))}, now {json.dumps(now.get(key))}"
        for key in sorted({*was, *now})
        if was.get(key) != now.get(key)
    ]


def check_settings_are_ours(where: str, stored: bytes | None, settings: Mapping[str, Any]) -> None:
    """Raise `UsageError` with the differences where the blocks in `where` were made with other settings than these."""
    if stored is None:
        raise UsageError(
            f"{where} holds blocks that this script did not write; choose another output, or --overwrite them"
        )
    lines = differences(json.loads(stored), settings)
    if lines:
        raise UsageError(
            f"{where} holds blocks of a run with other settings:\n  "
            + "\n  ".join(lines)
            + "\nGive the same settings to resume it, choose another output, or --overwrite to start anew."
        )


def new_columns(output_column: str) -> tuple[str, ...]:
    """Name the columns that a run adds, but for `inference_info`, which it appends to."""
    return (output_column, f"{output_column}_status", f"{output_column}_error", f"{output_column}_tokens")


def check_columns(schema: pa.Schema, output_column: str) -> None:
    """Raise `UsageError` where the input has a column that the run would add."""
    clash = [column for column in new_columns(output_column) if column in schema.names]
    if clash:
        raise UsageError(
            f"the input already has the column {', '.join(map(repr, clash))}; name another one with --output-column"
        )


def output_schema(schema: pa.Schema, output_column: str, settings: Mapping[str, Any]) -> pa.Schema:
    """Return the schema of the output: the input's columns as they are, the new ones after them, features kept."""
    import datasets
    import pyarrow as pa

    text, status, error, tokens = new_columns(output_column)
    kept = [column for column in schema if column.name != INFO_COLUMN]
    strings = [pa.field(name, pa.string()) for name in (text, status, error)]
    added = [*strings, pa.field(tokens, pa.int32()), pa.field(INFO_COLUMN, pa.string())]
    features = datasets.Features.from_arrow_schema(schema)
    features.pop(INFO_COLUMN, None)
    for column in added:
        features[column.name] = datasets.Value(str(column.type))
    metadata = {
        **(schema.metadata or {}),
        **features.arrow_schema.metadata,
        SETTINGS_KEY: json.dumps(settings, sort_keys=True).encode(),
    }
    return pa.schema([*kept, *added], metadata=metadata)


def block_table(
    rows: pa.Table, results: Sequence[PageResult], schema: pa.Schema, output_column: str, info: Mapping[str, Any]
) -> pa.Table:
    """Join rows and results, one each in the same order, to the table of a block."""
    import pyarrow as pa

    if len(results) != rows.num_rows:
        raise ValueError(f"{rows.num_rows} rows, but {len(results)} results")
    earlier = rows[INFO_COLUMN].to_pylist() if INFO_COLUMN in rows.schema.names else [None] * rows.num_rows
    values: dict[str, Any] = dict(
        zip(
            new_columns(output_column),
            (
                [None if result.text is None else storable(result.text) for result in results],
                [result.status for result in results],
                [None if result.error is None else storable(result.error) for result in results],
                [result.tokens for result in results],
            ),
            strict=True,
        )
    )
    values[INFO_COLUMN] = [appended_info(before, info) for before in earlier]
    columns = [
        pa.chunked_array([pa.array(values[column.name], type=column.type)])
        if column.name in values
        else rows[column.name]
        for column in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def appended_info(before: str | None, info: Mapping[str, Any]) -> str:
    """Append this run's entry to a row's `inference_info`, a JSON list; what was no list is kept as its first entry."""
    try:
        entries = json.loads(before) if before else []
    except ValueError:
        entries = [before]
    return json.dumps([*(entries if isinstance(entries, list) else [entries]), dict(info)])


def storable(text: str) -> str:
    """Return text that UTF-8 can hold: halves of a surrogate pair joined, a half without its other one made U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


# ---- report ----------------------------------------------------------------------------------------------------------
# What a run tells: progress lines on stderr, the last JSON line on stdout, and the exit code.


LINE_EVERY_S = 30.0


def say(text: str, stream: TextIO | None = None) -> None:
    """Print a line for people."""
    print(text, file=stream or sys.stderr, flush=True)


@dataclass
class Tally:
    """What has happened so far. `rows_before` were in closed blocks when the run began."""

    rows: int
    rows_before: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    in_flight: int = 0
    blocks: int = 0
    requests: int = 0
    retries: int = 0
    verbose: bool = False
    prompt_tokens: int = 0
    tokens: int = 0
    started: float = field(default_factory=time.monotonic)

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Count a page as in flight."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    def count(self, result: PageResult) -> None:
        """Count a page that is done."""
        self.statuses[result.status] += 1
        self.requests += result.attempts
        self.prompt_tokens += result.prompt_tokens or 0
        self.tokens += result.tokens or 0

    def retry(self, reason: str) -> None:
        """Count a request that will be made again."""
        self.retries += 1
        if self.verbose:
            say(f"asking again: {reason}")

    @property
    def done(self) -> int:
        """How many pages this run has finished."""
        return self.statuses.total()

    @property
    def failed(self) -> int:
        """How many pages this run could not get a sound text for."""
        return self.done - self.statuses["ok"] - self.statuses["blank"]

    def pages_per_s(self) -> float:
        """Return the mean speed of this run."""
        return self.done / max(1e-9, time.monotonic() - self.started)

    def eta_s(self) -> float | None:
        """Return the seconds left at the mean speed so far; None before the first page."""
        return (self.rows - self.rows_before - self.done) / self.pages_per_s() if self.done else None

    def line(self) -> str:
        """Say where the run stands, in one plain line."""
        eta = self.eta_s()
        tokens_per_s = self.tokens / max(1e-9, time.monotonic() - self.started)
        return (
            f"{self.rows_before + self.done}/{self.rows} pages, {self.failed} failed, {self.in_flight} in flight, "
            f"{self.pages_per_s():.2f} pages/s, {tokens_per_s:.0f} tokens/s, "
            f"ETA {'?' if eta is None else duration(eta)}"
        )


def duration(seconds: float) -> str:
    """Say a duration as people do: 42s, 3m10s, 2h05m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


@contextmanager
def progress_shown(tally: Tally) -> Iterator[None]:
    """Show progress while the event loop works within: a bar on a terminal, a plain line every 30 s elsewhere."""
    task = asyncio.get_running_loop().create_task(_report_progress(tally))
    try:
        yield
    finally:
        task.cancel()


async def _report_progress(tally: Tally) -> None:
    if sys.stderr.isatty():
        await _show_bar(tally)
    while True:
        await asyncio.sleep(LINE_EVERY_S)
        say(tally.line())


async def _show_bar(tally: Tally) -> None:
    from tqdm import tqdm

    bar: tqdm[Any]
    with tqdm(total=tally.rows, initial=tally.rows_before, unit="page", file=sys.stderr, dynamic_ncols=True) as bar:
        try:
            while True:
                _move_bar(bar, tally)
                await asyncio.sleep(0.25)
        finally:
            _move_bar(bar, tally)


def _move_bar(bar: tqdm[Any], tally: Tally) -> None:
    bar.set_postfix_str(f"{tally.failed} failed, {tally.in_flight} in flight", refresh=False)
    bar.update(tally.rows_before + tally.done - bar.n)


@dataclass(frozen=True)
class Outcome:
    """How a run ended: what the last line on stdout says."""

    input: str
    output: str
    split: str | None
    model: str
    engine: str | None
    exit_code: int
    message: str
    seconds: float
    tally: Tally | None
    statuses: Mapping[str, int]

    def json_line(self) -> str:
        """Return the JSON line; its keys are frozen (CONTRACT.md)."""
        tally = self.tally or Tally(rows=0)
        return json.dumps(
            {
                "version": 1,
                "exit_code": self.exit_code,
                "message": self.message,
                "input": self.input,
                "output": self.output,
                "split": self.split,
                "model": self.model,
                "engine": self.engine,
                "rows": tally.rows,
                "rows_before": tally.rows_before,
                "rows_done": tally.done,
                "statuses": {status: self.statuses.get(status, 0) for status in STATUSES},
                "requests": tally.requests,
                "retries": tally.retries,
                "prompt_tokens": tally.prompt_tokens,
                "tokens": tally.tokens,
                "seconds": round(self.seconds, 3),
                "pages_per_second": round(tally.pages_per_s(), 4) if tally.done else 0.0,
            }
        )


# ---- source ----------------------------------------------------------------------------------------------------------
# Rows of a dataset by address, undecoded.
#
# A source knows how many rows it has and reads any of them as an Arrow table, every column as it is stored. Parquet,
# local or on the Hub, is read batch by batch out of its row groups (footers first: file → row groups → rows), so memory
# is flat whatever the size of a row group, and a resumed run touches the row groups of its own rows only. Anything else
# that `datasets` can load is memory-mapped by it.


BATCH_ROWS = 64  # rows decoded at once out of a row group: what bounds memory when a row group is a whole file
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


class Rows(Protocol):
    """Rows by address. `read` gives the rows at `addresses`, in that order, with every column as it is stored."""

    schema: pa.Schema
    num_rows: int

    def read(self, addresses: Sequence[int]) -> pa.Table:
        """Read the rows at `addresses` (0 ≤ address < num_rows)."""


@dataclass(frozen=True)
class Source:
    """A split of a dataset, and which of its rows are wanted, in which order.

    `fingerprint` changes when the data changes (Hub: the commit; local: names and sizes of the files).
    `roots` are the folders in which a path that stands in a cell may be opened: none for data from elsewhere.
    """

    name: str
    split: str
    image_column: str
    rows: Rows
    order: Sequence[int]
    fingerprint: str
    is_private: bool
    roots: tuple[Path, ...] = ()

    def read(self, positions: range) -> pa.Table:
        """Read the wanted rows at `positions` (0 ≤ position < len(order)); pictures beside the table are embedded."""
        table = self.rows.read(self.order[positions.start : positions.stop])
        return embed_pictures(table, self.image_column, self.roots) if self.roots else table


def open_source(
    name: str,
    *,
    config: str | None = None,
    split: str | None = None,
    revision: str | None = None,
    image_column: str | None = None,
    max_samples: int | None = None,
    shuffle: bool = False,
    seed: int = 0,
) -> Source:
    """Open a Hub dataset id, a folder of images, a parquet file or folder, or a `save_to_disk` folder.

    Raises `UsageError` where the input, the configuration, the split or the column is not there: it lists what is.
    """
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    path = Path(name).expanduser()
    is_local = path.exists()
    if not is_local and not HUB_ID.fullmatch(name):
        raise UsageError(f"input {name!r}: no such file or folder, and not a Hub dataset id (namespace/name)")
    try:
        if is_local:
            fingerprint, is_private, pinned = local_fingerprint(path), True, None
        else:
            fingerprint, is_private, pinned = hub_fingerprint(name, revision)
        found = _open_rows(str(path) if is_local else name, config, split, pinned, is_local)
    except (*network_errors(), ValueError, LookupError, datasets.exceptions.DatasetsError) as error:
        raise UsageError(f"input {name!r} can't be read as a dataset: {type(error).__name__}: {error}") from error
    rows, split_name, paths_are_ours = found
    if not rows.num_rows:
        raise UsageError(f"input {name!r}: split {split_name!r} has no rows; choose another with --split")
    roots: tuple[Path, ...] = ()
    if is_local:
        roots = (path if path.is_dir() else path.parent,)
    elif paths_are_ours:
        roots = _hub_roots(name)
    return Source(
        name=name,
        split=split_name,
        image_column=choose_image_column(rows.schema, image_column),
        rows=rows,
        order=choose_rows(rows.num_rows, max_samples, shuffle, seed),
        fingerprint=fingerprint,
        is_private=is_private,
        roots=roots,
    )


def choose_rows(num_rows: int, max_samples: int | None, shuffle: bool, seed: int) -> Sequence[int]:
    """Which rows are wanted, in which order: addresses into a split of `num_rows` rows."""
    count = num_rows if max_samples is None else min(max_samples, num_rows)
    if not shuffle:
        return range(count)
    import numpy as np

    chosen: Sequence[int] = np.random.default_rng(seed).permutation(num_rows)[:count]  # type: ignore[assignment]
    return chosen


def choose_image_column(schema: pa.Schema, wanted: str | None) -> str:
    """Return the wanted column; or, where none is named, `image`, or the only column of images."""
    column = _find_image_column(schema, wanted)
    kind = schema.field(column).type
    if not _may_hold_pictures(kind):
        raise UsageError(
            f"column {column!r} holds no pictures but {kind}; --image-column takes one of: {', '.join(schema.names)}"
        )
    return column


def _may_hold_pictures(kind: pa.DataType) -> bool:
    import pyarrow as pa

    if pa.types.is_struct(kind):
        return any(field.name == "bytes" for field in kind)
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_null(kind))


def _find_image_column(schema: pa.Schema, wanted: str | None) -> str:
    import datasets

    if wanted is not None:
        if wanted in schema.names:
            return wanted
        raise UsageError(f"no column {wanted!r} in the input; --image-column takes one of: {', '.join(schema.names)}")
    if "image" in schema.names:
        return "image"
    features = datasets.Features.from_arrow_schema(schema)
    images = [column for column, feature in features.items() if isinstance(feature, datasets.Image)]
    if len(images) == 1:
        return str(images[0])
    raise UsageError(f"which column holds the pages? Name it with --image-column: {', '.join(schema.names)}")


def local_fingerprint(path: Path) -> str:
    """Fingerprint a local input by the names and sizes of its files: it moves with the data, not with the folder."""
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    digest = hashlib.sha256()
    for file in files:
        relative = file.name if file == path else str(file.relative_to(path))
        digest.update(json.dumps([relative, file.stat().st_size]).encode())
    return f"files:{digest.hexdigest()[:32]}"


def hub_fingerprint(repo_id: str, revision: str | None) -> tuple[str, bool, str]:
    """Return (fingerprint, whether the dataset is private, commit) of a Hub dataset at `revision`."""
    from huggingface_hub import HfApi

    info = HfApi().dataset_info(repo_id, revision=revision)
    return f"hub:{repo_id}@{info.sha}", bool(info.private), str(info.sha)


def _hub_roots(repo_id: str) -> tuple[Path, ...]:
    """Where `datasets` puts the files of a Hub dataset that is a folder of images."""
    import datasets
    from huggingface_hub.constants import HF_HUB_CACHE

    return (
        Path(HF_HUB_CACHE) / f"datasets--{repo_id.replace('/', '--')}",
        Path(datasets.config.EXTRACTED_DATASETS_PATH),
    )


def _open_rows(
    name: str, config: str | None, split: str | None, revision: str | None, is_local: bool
) -> tuple[Rows, str, bool]:
    """Return (rows, split name, whether paths in the cells come from `datasets` itself and not from the data)."""
    import datasets

    path = Path(name)
    if is_local and (path / "dataset_dict.json").exists():
        splits = datasets.load_from_disk(name)
        chosen = choose_split(list(splits), split)
        return MappedRows(splits[chosen]), chosen, False
    if is_local and (path / "state.json").exists():
        saved = datasets.load_from_disk(name)
        return MappedRows(saved), choose_split([str(saved.split or "train")], split), False
    if is_local and path.is_file():
        if path.suffix.lower() not in {".parquet", ".pq"}:
            raise UsageError(f"input {name!r} is a file but not parquet; give a parquet file, or the folder it lies in")
        chosen = choose_split(["train"], split)
        return ParquetRows([name]), chosen, False
    builder = datasets.load_dataset_builder(name, name=config, revision=revision)
    files = builder.config.data_files or {}
    chosen = choose_split([str(key) for key in files], split)
    if builder.name == "parquet":
        return ParquetRows([str(file) for file in files[chosen]], builder.info.features), chosen, False
    loaded = datasets.load_dataset(name, name=config, revision=revision, split=chosen)
    return MappedRows(loaded), chosen, builder.name == "imagefolder"


def choose_split(there: list[str], wanted: str | None) -> str:
    """Return the wanted split; or, where none is named, the only one, or `train`."""
    if wanted is not None:
        if wanted in there:
            return wanted
        raise UsageError(
            f"no split {wanted!r} in the input; --split takes one of: {', '.join(there) or '(none found)'}"
        )
    if len(there) == 1:
        return there[0]
    if "train" in there:
        return "train"
    raise UsageError(f"which split? Name it with --split: {', '.join(there) or '(none found)'}")


@dataclass(frozen=True)
class RowGroup:
    """One row group of one parquet file, and the address of its first row."""

    file: str
    index: int
    start: int
    num_rows: int


class ParquetRows:
    """Rows of parquet files, local paths or `hf://` addresses, read through their row groups."""

    def __init__(self, files: Sequence[str], features: Any = None) -> None:

        with ThreadPoolExecutor(8) as pool:
            footers = list(pool.map(_footer, files))
        self._groups = list(_row_groups(files, [footer[0] for footer in footers]))
        self._starts = [group.start for group in self._groups]
        self.num_rows = sum(group.num_rows for group in self._groups)
        self.schema: pa.Schema = footers[0][1]
        if features is not None:  # a card's `dataset_info` says more than a file without metadata
            self.schema = self.schema.with_metadata({**(self.schema.metadata or {}), **features.arrow_schema.metadata})
        self._lock = threading.Lock()
        self._stream: tuple[int, Iterator[pa.RecordBatch], pa.Table] | None = None

    def read(self, addresses: Sequence[int]) -> pa.Table:
        """Read rows by address; cheapest is a range that goes on where the last read ended."""
        import pyarrow as pa

        with self._lock:
            if isinstance(addresses, range):
                return pa.concat_tables(self._run(addresses.start, addresses.stop))
            wanted = [int(address) for address in addresses]
            found: dict[int, pa.Table] = {}
            for address in sorted(set(wanted)):
                # a copy, for a slice would keep the whole batch in memory
                found[address] = pa.concat_tables(self._run(address, address + 1)).take([0])
            return pa.concat_tables([found[address] for address in wanted])

    def _run(self, start: int, stop: int) -> Iterator[pa.Table]:
        while start < stop:
            batch_start, batch = self._batch_at(start)
            part = batch.slice(start - batch_start, min(stop, batch_start + batch.num_rows) - start)
            yield part
            start += part.num_rows

    def _batch_at(self, address: int) -> tuple[int, pa.Table]:
        """Return (address of its first row, batch) of the batch that holds `address`, going on in the open stream."""
        if self._stream is None or not self._stream_reaches(address):
            group = self._groups[bisect.bisect_right(self._starts, address) - 1]
            self._stream = (group.start, self._open(group), self.schema.empty_table())
        start, batches, batch = self._stream
        while address >= start + batch.num_rows:
            start += batch.num_rows
            batch = self._fit(next(batches))
            self._stream = (start, batches, batch)
        return start, batch

    def _stream_reaches(self, address: int) -> bool:
        assert self._stream is not None
        group = self._groups[bisect.bisect_right(self._starts, address) - 1]
        return group.start <= self._stream[0] <= address and self._stream[0] < group.start + group.num_rows

    def _open(self, group: RowGroup) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            with _open_file(group.file) as handle, pq.ParquetFile(handle) as file:
                yield from file.iter_batches(batch_size=BATCH_ROWS, row_groups=[group.index])
        except (*network_errors(), pa.ArrowInvalid) as error:
            raise SourceError(f"reading {group.file}, row group {group.index}: {error}; run again to resume") from error

    def _fit(self, batch: pa.RecordBatch) -> pa.Table:
        """Give a batch the schema of the first file: later files may order or widen their columns differently."""
        import pyarrow as pa

        table = pa.Table.from_batches([batch])
        if table.schema.equals(self.schema, check_metadata=True):
            return table
        return table.select(self.schema.names).cast(self.schema.remove_metadata()).cast(self.schema)


def _open_file(file: str) -> Any:
    if "://" not in file:
        return Path(file).open("rb")
    import fsspec

    return fsspec.open(file, "rb").open()


def _footer(file: str) -> tuple[list[int], pa.Schema]:
    """Return (rows of each row group, schema) of a parquet file."""
    import pyarrow.parquet as pq

    with _open_file(file) as handle, pq.ParquetFile(handle) as parquet:
        metadata = parquet.metadata
        counts = [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)]
        return counts, parquet.schema_arrow


def _row_groups(files: Sequence[str], counts: Sequence[Sequence[int]]) -> Iterator[RowGroup]:
    start = 0
    for file, group_rows in zip(files, counts, strict=True):
        for index, num_rows in enumerate(group_rows):
            if num_rows:
                yield RowGroup(file, index, start, num_rows)
            start += num_rows


class MappedRows:
    """Rows of a `datasets.Dataset`, memory-mapped and not decoded."""

    def __init__(self, dataset: Any) -> None:
        self._table = dataset.with_format("arrow")
        self.num_rows: int = dataset.num_rows
        self.schema: pa.Schema = dataset.features.arrow_schema

    def read(self, addresses: Sequence[int]) -> pa.Table:
        """Read rows by address."""
        import pyarrow as pa

        if isinstance(addresses, range):
            table = self._table[addresses.start : addresses.stop]
        else:
            table = pa.concat_tables([self._table[int(address) : int(address) + 1] for address in addresses])
        return table.cast(self.schema)


def embed_pictures(table: pa.Table, column: str, roots: Sequence[Path]) -> pa.Table:
    """Put the bytes of pictures that lie beside the table into its cells; a path outside `roots` stays a path.

    As `datasets` does when it pushes: the cell then holds the bytes and the bare name of the file.
    """
    import pyarrow as pa

    field = table.schema.field(column)
    if not pa.types.is_struct(field.type) or {child.name for child in field.type} != {"bytes", "path"}:
        return table
    if not any(cell["bytes"].as_py() is None and cell["path"].is_valid for cell in table[column] if cell.is_valid):
        return table
    chunks = [pa.array([_embedded(cell.as_py(), roots)], type=field.type) for cell in table[column]]
    return table.set_column(table.schema.names.index(column), field, pa.chunked_array(chunks, type=field.type))


def _embedded(cell: dict[str, Any] | None, roots: Sequence[Path]) -> dict[str, Any] | None:
    if cell is None or cell["bytes"] is not None or not cell["path"]:
        return cell
    inside = path_inside(cell["path"], roots)
    if inside is None:
        return cell
    try:
        return {"bytes": inside.read_bytes(), "path": Path(cell["path"]).name}
    except OSError:
        return cell


def path_inside(path: str, roots: Sequence[Path]) -> Path | None:
    """Return the real file behind `path` if it lies inside one of `roots`, symbolic links followed; else None."""
    if "\0" in path:
        return None
    for root in roots:
        try:
            real_root = root.resolve(strict=True)
            real = (real_root / path).resolve(strict=True)
        except (OSError, RuntimeError):
            continue
        if real.is_relative_to(real_root) and real.is_file() and os.access(real, os.R_OK):
            return real
    return None


# ---- flow ------------------------------------------------------------------------------------------------------------
# The flow of a run: rows → pages → an engine → blocks, with everything bounded.
#
# Preparation runs ahead of the engine in as many threads as there are cores; so many pages and no more are with the
# engine; so many blocks and no more are open. Memory does not grow with the dataset.


RequestT = TypeVar("RequestT")
OPEN_BLOCK_BYTES = 2 * 1024**3  # beyond this no further block is opened while another is open


class Engine(Protocol[RequestT]):
    """What answers pages. `encode` is work for a thread, `ask` waits for the answer and asks again where that may help.

    `watch` runs beside the pages and raises `EngineError` when the engine is gone.
    """

    def encode(self, page: Page, row: int) -> RequestT:
        """Make the request for the page in `row` of the split."""

    async def ask(self, request: RequestT, again: Callable[[], Awaitable[RequestT | Refusal]]) -> PageResult:
        """Return what became of the page."""

    def watch(self) -> Coroutine[Any, Any, None]:
        """Return never, or raise when the engine is gone."""


@dataclass(frozen=True)
class Job:
    """What a run has to do: from where, with what limits, to where."""

    source: Source
    plan: BlockPlan
    folder: BlockFolder
    limits: PageLimits
    output_column: str
    settings: Mapping[str, Any]
    info: Mapping[str, Any]
    concurrency: int

    def todo(self) -> list[int]:
        """Return the numbers of the blocks that are not there yet."""
        closed = self.folder.closed()
        return [number for number in range(len(self.plan)) if number not in closed]


@dataclass
class OpenBlock:
    """A block whose pages are under way."""

    number: int
    rows: pa.Table
    results: list[PageResult | None] = field(default_factory=list)

    def is_complete(self) -> bool:
        """Whether every row has its result."""
        return all(result is not None for result in self.results)


def count_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


async def run_job(job: Job, engine: Engine[RequestT], tally: Tally) -> None:
    """Ask about every page of every block that is not there yet; return when all blocks are written.

    Raises the first `JobError` of the engine, the source or the disk; blocks that were closed stay.
    """
    with ThreadPoolExecutor(count_cores(), thread_name_prefix="prepare") as pool:
        run = _Run(job, engine, tally, pool)
        try:
            await run.to_the_end()
        except* JobError as group:
            raise _first(group) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _first(group: BaseExceptionGroup[JobError]) -> JobError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, JobError)
    return error


class _Run(Generic[RequestT]):
    """One run of a job: the tasks and what bounds them."""

    def __init__(self, job: Job, engine: Engine[RequestT], tally: Tally, pool: ThreadPoolExecutor) -> None:
        self._job = job
        self._engine = engine
        self._tally = tally
        self._pool = pool
        self._schema = output_schema(job.source.rows.schema, job.output_column, job.settings)
        # A page holds its prepared form until it is sent: beside those in flight, two a core are ready or nearly so.
        self._rows_ahead = asyncio.Semaphore(job.concurrency + 2 * count_cores())
        self._in_flight = asyncio.Semaphore(job.concurrency)
        # A slow page keeps its block open: three more than the pages in flight can span may be open beside it.
        self._most_open = 3 + -(-job.concurrency // job.plan.block_rows)
        self._open: dict[int, int] = {}  # block → bytes
        self._closed_one = asyncio.Event()

    async def to_the_end(self) -> None:
        """Run all pages beside the engine's watch."""
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(self._engine.watch())
            async with asyncio.TaskGroup() as pages:
                for number in self._job.todo():
                    await self._room_for_a_block()
                    await self._open_block(number, pages)
            watch.cancel()

    async def _room_for_a_block(self) -> None:
        while len(self._open) >= self._most_open or (self._open and sum(self._open.values()) > OPEN_BLOCK_BYTES):
            self._closed_one.clear()
            await self._closed_one.wait()

    async def _open_block(self, number: int, pages: asyncio.TaskGroup) -> None:
        positions = self._job.plan.positions(number)
        rows = await asyncio.to_thread(self._job.source.read, positions)
        block = OpenBlock(number, rows, [None] * rows.num_rows)
        self._open[number] = rows.nbytes
        for index in range(rows.num_rows):
            await self._rows_ahead.acquire()
            pages.create_task(self._page(block, index, int(self._job.source.order[positions[index]])))

    async def _page(self, block: OpenBlock, index: int, row: int) -> None:
        async def prepare() -> RequestT | Refusal:
            return await asyncio.get_running_loop().run_in_executor(self._pool, self._prepare, block, index, row)

        try:
            request = await prepare()
            if isinstance(request, Refusal):
                result = refused(request.status, request.reason)
            else:
                async with self._in_flight:
                    with self._tally.asking():
                        result = await self._engine.ask(request, prepare)
        finally:
            self._rows_ahead.release()
        block.results[index] = result
        self._tally.count(result)
        if block.is_complete():
            await self._close(block)

    def _prepare(self, block: OpenBlock, index: int, row: int) -> RequestT | Refusal:
        cell = block.rows[self._job.source.image_column][index].as_py()
        page = make_page(cell, self._job.limits)
        return page if isinstance(page, Refusal) else self._engine.encode(page, row)

    async def _close(self, block: OpenBlock) -> None:
        await asyncio.to_thread(self._write, block)
        self._tally.blocks += 1
        del self._open[block.number]
        self._closed_one.set()

    def _write(self, block: OpenBlock) -> None:
        job = self._job
        results: Sequence[PageResult] = [result for result in block.results if result is not None]
        table = block_table(block.rows, results, self._schema, job.output_column, job.info)
        try:
            job.folder.write(block.number, table)
        except OSError as error:
            raise JobError(
                f"writing {job.folder.path(block.number)}: {error}; free some space and run again"
            ) from error


# ---- interrupt -------------------------------------------------------------------------------------------------------
# Ctrl-C, SIGTERM and SIGHUP: the first ends the run in order, the second at once.


ResultT = TypeVar("ResultT")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """A signal asked us to stop; the exit code is 128 + its number, as shells have it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number
        self.exit_code = 128 + number

    def __str__(self) -> str:
        return f"stopped by {signal.Signals(self.number).name}"


class Interrupts:
    """Turns signals into `Interrupted`, raised where the main thread is; a second one ends the process at once.

    `last_will` runs before such an end: it must be quick and must not raise.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self.last_will: Callable[[], None] | None = None
        self._cancel: Callable[[], object] | None = None

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Catch the signals within."""
        # a hangup that `nohup` has us ignore stays ignored
        ours = [n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
        before = {number: signal.signal(number, self._on_signal) for number in ours}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def run(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Run a coroutine; a signal cancels it, and `Interrupted` is raised when it has tidied up."""

        async def cancellable() -> ResultT:
            loop, task = asyncio.get_running_loop(), asyncio.current_task()
            assert task is not None
            self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)
            try:
                return await work
            finally:
                self._cancel = None

        try:
            return asyncio.run(cancellable())
        except asyncio.CancelledError:
            if self.number is None:
                raise
            raise Interrupted(self.number) from None

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.number is not None:
            if self.last_will:
                self.last_will()
            os._exit(128 + number)
        self.number = number
        if self._cancel is None:
            raise Interrupted(number)
        self._cancel()


# ---- models ----------------------------------------------------------------------------------------------------------
# The profiles: everything that differs between the LightOnOCR generations.
#
# | family           | generation | built on | modes           | longest edge | a token is | context | answer at most |
# |------------------|------------|----------|-----------------|--------------|------------|---------|----------------|
# | LightOnOCR-1B    | 1          | pixtral  | text            | 1540 px      | 28 x 28 px | 8192    | 4096           |
# | LightOnOCR-2-1B  | 2          | pixtral  | text            | 1540 px      | 28 x 28 px | 16384   | 4096           |
# | LightOnOCR-3-1B  | 3          | pixtral  | text, grounding | 1540 px      | 28 x 28 px | 16384   | what is left   |
# | LightOnOCR-3-0.8B, -4B | 3    | qwen3.5  | text, grounding | 2048 px      | 32 x 32 px | 18000   | what is left   |
#
# The evidence for each value stands in models.json, which a test holds equal to this room.


DEFAULT_MODEL_ID = "lightonai/LightOnOCR-2-1B"

# The trained prompts: a mode → the words beside the image. Anything else is out of distribution.
PROMPT_WORDS = {"text": "", "grounding": "grounding"}


@dataclass(frozen=True)
class Sampling:
    """How the model is sampled. Greedy decoding loops on hard pages, so no profile has temperature 0."""

    temperature: float
    top_p: float
    max_tokens: int | None  # None: the server gives what is left of the context


@dataclass(frozen=True)
class KnownBad:
    """An engine that starts and serves this model wrongly, or can't start it."""

    vllm: str
    transformers: str  # "": with any transformers
    reason: str


@dataclass(frozen=True)
class ModelProfile:
    """What the scripts have to know of one model."""

    model_id: str
    about: str  # what sets a variant apart from the model it is named after; "" for that model itself
    generation: int
    architecture: str  # "pixtral" or "qwen3.5"
    longest_edge_px: int
    pixels_per_token_side: int
    modes: tuple[str, ...]
    sampling: Sampling
    serve_args: tuple[str, ...]  # argv words after `vllm serve MODEL`
    chat_template_kwargs: tuple[tuple[str, bool], ...]  # for each request; dict() of it is the JSON object
    image_tag: str  # of vllm/vllm-openai
    known_bad_engines: tuple[KnownBad, ...]
    licence: str
    languages: tuple[str, ...]  # ISO 639-1, as stated by the vendor; () where nothing is stated

    @property
    def image(self) -> str:
        """The container image to run this model in."""
        return f"vllm/vllm-openai:{self.image_tag}"


@dataclass(frozen=True)
class ProfileMatch:
    """A profile and how it was found, for the log."""

    requested: str
    profile: ModelProfile
    how: Literal["catalogue", "by name", "default"]

    def __str__(self) -> str:
        if self.how == "catalogue":
            return f"profile {self.profile.model_id}"
        if self.how == "by name":
            return f"profile {self.profile.model_id}, taken by the name of {self.requested}"
        return f"profile {self.profile.model_id}, the default: {self.requested} names no model of the catalogue"


# 0.27.1 answers, and the GPU looks busy as usual: only the text shows it. Hence the canary page.
LOOPS_ON_0_27_1 = KnownBad(
    "0.27.1", "", "every LightOnOCR model loops in compiled mode, while the GPU looks normally busy"
)
NO_PIXTRAL_ON_0_30_0 = KnownBad(
    "0.30.0", "5.17", "PixtralRotaryEmbedding can't be imported, so no Pixtral-based 1B model starts; 5.16.1 works"
)

# One page a request, said in advance: no memory is set aside for more (JSON is the only spelling since vLLM 0.10).
ONE_IMAGE = ("--limit-mm-per-prompt", '{"image": 1}')
# Pages never repeat, so both caches only cost memory; and a processor cache under concurrency has killed engines
# ("Expected a cached item for mm_hash").
NO_CACHES = ("--mm-processor-cache-gb", "0", "--no-enable-prefix-caching")
# The Qwen3.5 models were trained without thinking; also sent with each request, for servers started by others.
NO_THINKING = (("enable_thinking", False),)
NO_THINKING_ARGS = ("--default-chat-template-kwargs", '{"enable_thinking": false}')

LIGHTONOCR_1B = ModelProfile(
    model_id="lightonai/LightOnOCR-1B-1025",
    about="",
    generation=1,
    architecture="pixtral",
    longest_edge_px=1540,
    pixels_per_token_side=28,
    modes=("text",),
    # 4096 of the 4096 to 6500 in use: with a page of 55 x 55 image tokens, 6500 would not fit the 8192 below.
    sampling=Sampling(temperature=0.2, top_p=0.9, max_tokens=4096),
    serve_args=("--max-model-len", "8192", *ONE_IMAGE, *NO_CACHES),
    chat_template_kwargs=(),
    image_tag="v0.22.1",
    known_bad_engines=(LOOPS_ON_0_27_1, NO_PIXTRAL_ON_0_30_0),
    licence="apache-2.0",
    languages=("en", "fr", "de", "es", "it", "nl", "pt", "sv", "da"),
)

LIGHTONOCR_2_1B = replace(
    LIGHTONOCR_1B,
    model_id="lightonai/LightOnOCR-2-1B",
    generation=2,
    # 8192 fits a page and its 4096 tokens; 16384 leaves room to ask a truncated page again for more.
    serve_args=("--max-model-len", "16384", *ONE_IMAGE, *NO_CACHES),
    languages=(*LIGHTONOCR_1B.languages, "zh", "ja"),
)

LIGHTONOCR_3_1B = replace(
    LIGHTONOCR_2_1B,
    model_id="lightonai/LightOnOCR-3-1B",
    generation=3,
    modes=("text", "grounding"),
    # The vendor's tip and its example request say 0.1 (its client defaults to 0.2): the steadier of the two.
    sampling=Sampling(temperature=0.1, top_p=1.0, max_tokens=None),
    image_tag="v0.32.0",  # the image of v0.30.0 ships the transformers that breaks this architecture
    languages=(),
)

LIGHTONOCR_3_08B = replace(
    LIGHTONOCR_3_1B,
    model_id="lightonai/LightOnOCR-3-0.8B",
    architecture="qwen3.5",
    longest_edge_px=2048,
    pixels_per_token_side=32,
    serve_args=("--max-model-len", "18000", *ONE_IMAGE, *NO_CACHES, *NO_THINKING_ARGS),
    chat_template_kwargs=NO_THINKING,
    image_tag="v0.30.0",
    known_bad_engines=(LOOPS_ON_0_27_1,),
)

LIGHTONOCR_3_4B = replace(LIGHTONOCR_3_08B, model_id="lightonai/LightOnOCR-3-4B")


@functools.cache
def catalogue() -> tuple[ModelProfile, ...]:
    """Every model known, a family's own model before its variants."""
    return (
        LIGHTONOCR_1B,
        replace(LIGHTONOCR_1B, model_id="lightonai/LightOnOCR-0.9B-32k-1025"),
        replace(LIGHTONOCR_1B, model_id="lightonai/LightOnOCR-0.9B-16k-1025"),
        LIGHTONOCR_2_1B,
        *(
            replace(LIGHTONOCR_2_1B, model_id=f"{LIGHTONOCR_2_1B.model_id}-{suffix}", about=about)
            for suffix, about in (
                ("base", "before reinforcement learning"),
                ("bbox", "also boxes embedded figures"),
                ("bbox-base", "also boxes embedded figures; before reinforcement learning"),
                ("ocr-soup", "a merge"),
                ("bbox-soup", "a merge; also boxes embedded figures"),
            )
        ),
        LIGHTONOCR_3_08B,
        LIGHTONOCR_3_1B,
        LIGHTONOCR_3_4B,
    )


def find_profile(model_id: str) -> ProfileMatch:
    """The profile of a model: by its exact id, else by the model named in it, else the default one.

    A name is looked for in the last part of a path first, then in the whole, without regard to case and punctuation:
    `me/LightOnOCR-2-1B-letters`, `/models/lightonocr-3-4b/` and a snapshot folder of the Hub's cache are all found.
    """
    by_id = {profile.model_id: profile for profile in catalogue()}
    if model_id in by_id:
        return ProfileMatch(model_id, by_id[model_id], "catalogue")
    last_part = re.split(r"[/\\]", model_id.rstrip("/\\"))[-1]
    for text in (_letters_and_digits(last_part), _letters_and_digits(model_id)):
        named = [profile for profile in catalogue() if _name_key(profile) in text]
        if named:
            # The longest name wins: LightOnOCR-2-1B stands in LightOnOCR-2-1B-bbox too.
            return ProfileMatch(model_id, max(named, key=lambda profile: len(_name_key(profile))), "by name")
    return ProfileMatch(model_id, by_id[DEFAULT_MODEL_ID], "default")


def _letters_and_digits(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def _name_key(profile: ModelProfile) -> str:
    name = profile.model_id.partition("/")[2]
    return _letters_and_digits(name.removesuffix("-1025"))


def prompt_words(profile: ModelProfile, mode: str) -> str:
    """The words beside the image in this mode ("" for none); a mode the model was not trained on is refused."""
    if mode not in profile.modes:
        raise UsageError(
            f"{profile.model_id} has no mode {mode!r}, only {', '.join(profile.modes)}: "
            f"leave the mode out, or choose a model that has it"
            + (" (grounding came with LightOnOCR-3)" if mode == "grounding" else "")
        )
    return PROMPT_WORDS[mode]


def serve_option(profile: ModelProfile, name: str) -> str | None:
    """The value of one of the profile's serve_args, such as `--max-model-len`; None if it isn't among them."""
    if name not in profile.serve_args:
        return None
    return profile.serve_args[profile.serve_args.index(name) + 1]


def known_bad_engine(profile: ModelProfile, vllm: str, transformers: str | None = None) -> KnownBad | None:
    """The entry that warns of this engine, if there is one.

    Where an entry depends on the transformers version and ours is unknown (a remote server does not tell), the entry is
    returned, and its `transformers` says what to check.
    """
    for bad in profile.known_bad_engines:
        transformers_fits = not bad.transformers or transformers is None or _is_release(transformers, bad.transformers)
        if _is_release(vllm, bad.vllm) and transformers_fits:
            return bad
    return None


def _is_release(version: str, release: str) -> bool:
    """Whether a version is that release or a build of it: 0.27.1+cu129 is of 0.27.1, 5.17.2 of 5.17, 0.27.10 is not."""
    return re.match(re.escape(release) + r"(?!\d)", version.strip().removeprefix("v")) is not None


# ---- options ---------------------------------------------------------------------------------------------------------
# The command line: each option is spelled once, as a field of a frozen dataclass; the parser is made from those.


def argument(help_text: str) -> Any:
    """Declare a positional argument."""
    return field(metadata={"help": help_text, "group": None})


def option(
    default: Any,
    group: str,
    help_text: str,
    *,
    metavar: str | None = None,
    choices: Sequence[str] | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
) -> Any:
    """Declare an option; its flag is the field's name in kebab-case, its type the field's."""
    return field(
        default=default,
        metadata={
            "help": help_text,
            "group": group,
            "metavar": metavar,
            "choices": choices,
            "minimum": minimum,
            "maximum": maximum,
        },
    )


@dataclass(frozen=True, kw_only=True)
class CommonOptions:
    """What every script takes that turns a dataset of pages into a dataset with text."""

    input: str = argument(
        "Hub dataset id, folder of images, parquet file or folder, or a folder that save_to_disk wrote"
    )
    output: str = argument("local folder, or Hub dataset id (namespace/name) to publish to")

    config: str | None = option(None, "input", "dataset configuration (default: the only one)", metavar="NAME")
    split: str | None = option(None, "input", "split to read (default: the only one, or train)", metavar="NAME")
    revision: str | None = option(
        None, "input", "branch, tag or commit of the input dataset (default: main)", metavar="REV"
    )
    image_column: str | None = option(
        None, "input", "column that holds the pages (default: image, or the only column of images)", metavar="NAME"
    )
    max_samples: int | None = option(None, "input", "take this many rows (default: all)", metavar="N", minimum=1)
    shuffle: bool = option(
        False, "input", "take the rows in an order drawn by --seed, which is then the output's order"
    )

    output_column: str = option(
        "markdown",
        "output",
        "column for the text; _status, _error and _tokens columns are named after it",
        metavar="NAME",
    )
    block_rows: int = option(
        256,
        "output",
        "rows a block file; a killed run asks again at most for the blocks that were open",
        metavar="N",
        minimum=1,
    )
    overwrite: bool = option(False, "output", "remove the blocks that are there and start anew")
    resume: bool = option(False, "output", "go on where a run with the same settings stopped; this is the default")
    private: bool = option(
        False, "output", "make a new Hub dataset private (default: as the input; private for local input)"
    )
    public: bool = option(False, "output", "make a new Hub dataset public")
    work_dir: str | None = option(
        None,
        "output",
        "where blocks lie until they are published (default: a folder of the user's cache)",
        metavar="DIR",
    )

    model: str = option("", "model", "model id or local checkpoint", metavar="ID")
    model_revision: str | None = option(
        None, "model", "branch, tag or commit of the model (default: main)", metavar="REV"
    )

    temperature: float | None = option(
        None, "sampling", "sampling temperature (default: the model's own)", metavar="T", minimum=0.0, maximum=2.0
    )
    top_p: float | None = option(
        None, "sampling", "nucleus sampling (default: the model's own)", metavar="P", minimum=1e-9, maximum=1.0
    )
    max_tokens: int | None = option(
        None, "sampling", "most tokens generated a page (default: the model's own)", metavar="N", minimum=1
    )
    seed: int = option(0, "sampling", "seed from which each page's own is derived", metavar="N", minimum=0)

    max_model_len: int | None = option(
        None, "engine", "most tokens of a page and its text together (default: the model's own)", metavar="N", minimum=1
    )
    gpu_memory_utilization: float | None = option(
        None,
        "engine",
        "share of the GPU's memory for the engine, 0 to 1 (default: vLLM's)",
        metavar="SHARE",
        maximum=1.0,
    )

    max_failure_rate: float = option(
        0.05,
        "run",
        "share of pages, 0 to 1, that may fail before the exit code is 1",
        metavar="SHARE",
        minimum=0.0,
        maximum=1.0,
    )
    show: int = option(0, "run", "print the text of the first N pages at the end", metavar="N", minimum=0)
    verbose: bool = option(False, "run", "say why requests are made again, and more")

    vllm_args: tuple[str, ...] = ()


OptionsT = TypeVar("OptionsT", bound=CommonOptions)


def make_parser(
    options_type: type[OptionsT], *, prog: str, description: str, epilog: str = ""
) -> argparse.ArgumentParser:
    """Make the parser of an options dataclass."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description=description,
        epilog=epilog,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    hints = typing.get_type_hints(options_type)
    groups: dict[str, Any] = {}
    for item in fields(options_type):
        if not item.metadata:
            continue
        meta, kind = item.metadata, _scalar(hints[item.name])
        if meta["group"] is None:
            parser.add_argument(item.name, metavar=item.name.upper(), help=meta["help"])
            continue
        group = groups.setdefault(meta["group"], None) or parser.add_argument_group(meta["group"])
        groups[meta["group"]] = group
        flag = f"--{item.name.replace('_', '-')}"
        if kind is bool:
            group.add_argument(flag, action="store_true", help=meta["help"])
        else:
            group.add_argument(
                flag,
                default=item.default,
                type=_converter(kind, meta["minimum"], meta["maximum"]),
                metavar=meta["metavar"],
                choices=meta["choices"],
                help=meta["help"] + _default_words(item.default, meta["help"]),
            )
    return parser


def parse_options(parser: argparse.ArgumentParser, options_type: type[OptionsT], argv: Sequence[str]) -> OptionsT:
    """Parse the command line; what follows `--` is for `vllm serve`, unchanged."""
    own, vllm_args = _split_at_dashes(argv)
    return options_type(**vars(parser.parse_args(own)), vllm_args=vllm_args)


def _split_at_dashes(argv: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    words = list(argv)
    place = words.index("--") if "--" in words else len(words)
    return words[:place], tuple(words[place + 1 :])


def _scalar(hint: Any) -> type:
    """Return `int` for `int | None`, and so on."""
    if isinstance(hint, types.UnionType):
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    return typing.cast("type", hint)


def _converter(kind: type, minimum: float | None, maximum: float | None) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no {'whole number' if kind is int else 'number'}") from None
        # not (a <= b), so that nan is refused too
        if minimum is not None and not value >= minimum:
            raise argparse.ArgumentTypeError(f"{text} is too small: {minimum:g} is the least")
        if maximum is not None and not value <= maximum:
            raise argparse.ArgumentTypeError(f"{text} is too large: {maximum:g} is the most")
        return value

    return convert


def _default_words(default: Any, help_text: str) -> str:
    return "" if default in (None, "") or "default:" in help_text else f" (default: {default})"


# ---- publish ---------------------------------------------------------------------------------------------------------
# The output: where it goes, whether it may go there, its card, and the one commit that publishes it.


CARD_BEGIN = "<!-- lighton-ocr: written by the script from here -->"
CARD_END = "<!-- lighton-ocr: to here; text outside is kept -->"
REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True)
class Output:
    """Where a run writes: `folder` holds the blocks; `repo_id` is the Hub dataset they are published to, if any."""

    folder: Path
    repo_id: str | None = None

    def __str__(self) -> str:
        return self.repo_id or str(self.folder)


def choose_output(name: str, work_dir: str | None) -> Output:
    """Tell a local folder from a Hub id: `namespace/name` is a Hub id unless a folder `namespace` is here."""
    path = Path(name).expanduser()
    if REPO_ID.fullmatch(name) and not path.exists() and not path.parent.is_dir():
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lighton-ocr"
        return Output(Path(work_dir) if work_dir else cache / name.replace("/", "--"), repo_id=name)
    if path.exists() and not path.is_dir():
        raise UsageError(f"output {name!r} is a file; name a folder, or a Hub dataset id (namespace/name)")
    if work_dir:
        raise UsageError(f"--work-dir is for Hub outputs; {name!r} is a local folder and holds its blocks itself")
    return Output(path)


def check_output_is_apart(output: Output, input_name: str) -> None:
    """Raise `UsageError` where input and output are, or contain, each other: a run must never read what it writes."""
    if output.repo_id and output.repo_id == input_name:
        raise UsageError(f"input and output are both {input_name!r}; name another output")
    source = Path(input_name).expanduser()
    if not source.exists():
        return
    here, there = output.folder.resolve(), source.resolve()
    if here == there or here.is_relative_to(there) or (there.is_relative_to(here) and there.is_dir()):
        raise UsageError(
            f"output {str(output.folder)!r} and input {input_name!r} overlap; name an output beside the input"
        )


def check_hub(output: Output, split: str, settings: Mapping[str, Any], *, overwrite: bool) -> None:
    """Raise `UsageError` before any GPU time where the Hub output could not be published in the end."""
    if output.repo_id is None:
        return
    import pyarrow.parquet as pq
    from huggingface_hub import HfApi, HfFileSystem
    from huggingface_hub.errors import RepositoryNotFoundError

    api = HfApi()
    try:
        user = api.whoami()
    except network_errors() as error:
        raise UsageError(
            f"output {output.repo_id!r} needs a token that can write, and there is none that works: {error}. "
            "Set HF_TOKEN (in a job: -s HF_TOKEN), or `hf auth login`"
        ) from error
    if user.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise UsageError(f"the token can only read; publishing to {output.repo_id!r} needs one that can write")
    try:
        files = api.list_repo_files(output.repo_id, repo_type="dataset")
    except RepositoryNotFoundError:
        return
    except network_errors() as error:
        raise UsageError(f"output {output.repo_id!r} can't be looked at: {error}; try again") from error
    blocks = [file for file in files if block_number(split, file.removeprefix("data/")) is not None]
    if blocks and not overwrite:
        with HfFileSystem().open(f"datasets/{output.repo_id}/{min(blocks)}", "rb") as block:
            stored = (pq.read_schema(block).metadata or {}).get(SETTINGS_KEY)
        check_settings_are_ours(f"the Hub dataset {output.repo_id}", stored, settings)


def count_statuses(folder: BlockFolder, output_column: str) -> Counter[str]:
    """Count the statuses of all rows in closed blocks."""
    import pyarrow.parquet as pq

    column = new_columns(output_column)[1]
    counts: Counter[str] = Counter()
    for number in sorted(folder.closed()):
        counts.update(pq.read_table(folder.path(number), columns=[column])[column].to_pylist())
    return counts


def card_text(
    earlier: str,
    *,
    input_name: str,
    plan: BlockPlan,
    statuses: Mapping[str, int],
    facts: Mapping[str, Any],
    command: str,
    written: str = "",
) -> str:
    """Return the dataset card: the YAML that `load_dataset` needs, what happened, and what people wrote before.

    `written` says when the last block was written: `load_dataset` caches a local folder with a card by what the card
    says alone (datasets 5.2), so that without it a finished output would load as the unfinished one loaded before.
    """
    from huggingface_hub import DatasetCard, DatasetCardData

    data: dict[str, Any] = {}
    people_wrote = earlier
    if earlier.startswith("---"):
        card = DatasetCard(earlier, ignore_metadata_errors=True)
        data, people_wrote = dict(card.data.to_dict()), card.text  # type: ignore[no-untyped-call]
    data["configs"] = _with_split(data.get("configs") or [], plan.split)
    if written:
        data["configs"][0]["description"] = f"{sum(statuses.values())} rows of {plan.split}, the last written {written}"
    data["tags"] = sorted({*(data.get("tags") or []), "ocr", "uv-script"})
    data.pop("dataset_info", None)  # the features stand in the parquet files; an older run's would be wrong
    body = _with_section(people_wrote, _section(input_name, plan, statuses, facts, command))
    return f"---\n{DatasetCardData(**data).to_yaml()}\n---\n\n{body.strip()}\n"


def _with_split(configs: Iterable[Mapping[str, Any]], split: str) -> list[dict[str, Any]]:
    """Return the card's configurations with the split in `default`."""
    others = [dict(config) for config in configs if config.get("config_name") != "default"]
    ours = [dict(config) for config in configs if config.get("config_name") == "default"]
    default: dict[str, Any] = ours[0] if ours else {"config_name": "default"}
    files = [file for file in default.get("data_files") or [] if isinstance(file, dict) and file.get("split") != split]
    default["data_files"] = [*files, {"split": split, "path": f"data/{split}-*.parquet"}]
    return [default, *others]


def _with_section(text: str, section: str) -> str:
    """Put our section where it was, or at the end."""
    before, begin, rest = text.partition(CARD_BEGIN)
    after = rest.partition(CARD_END)[2] if begin else ""
    return f"{before.strip()}\n\n{section}\n\n{after.strip()}".strip()


def _section(
    input_name: str, plan: BlockPlan, statuses: Mapping[str, int], facts: Mapping[str, Any], command: str
) -> str:
    done = sum(statuses.values())
    counts = ", ".join(f"{statuses.get(status, 0)} {status}" for status in STATUSES)
    state = (
        ""
        if done == plan.num_rows
        else f"\n**Unfinished**: {done} of {plan.num_rows} rows; the same command goes on.\n"
    )
    rows = "\n".join(f"| {key} | {_cell(value)} |" for key, value in facts.items() if value not in (None, ""))
    return (
        f"{CARD_BEGIN}\n# Text of {input_name}\n{state}\n"
        f"The rows of split `{plan.split}`, in their order, with the text that was read from each page.\n\n"
        f"{done} rows: {counts}.\n\n| | |\n|---|---|\n{rows}\n\n```bash\n{command}\n```\n{CARD_END}"
    )


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def write_card(output: Output, **contents: Any) -> None:
    """Write the card beside the blocks; an existing card's own text is kept."""
    path = output.folder / "README.md"
    earlier = path.read_text(encoding="utf-8") if path.exists() else ""
    folder = BlockFolder(output.folder, contents["plan"].split)
    newest = max(folder.path(number).stat().st_mtime for number in folder.closed())
    written = datetime.datetime.fromtimestamp(newest, datetime.UTC).isoformat()
    path.write_text(card_text(earlier, written=written, **contents), encoding="utf-8")


def publish(output: Output, split: str, *, private: bool, overwrite: bool) -> str:
    """Publish blocks and card to the Hub in one commit; return the address. Run again, it goes on where it failed."""
    assert output.repo_id is not None
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        api.create_repo(output.repo_id, repo_type="dataset", private=private, exist_ok=True)
        api.upload_folder(
            repo_id=output.repo_id,
            repo_type="dataset",
            folder_path=output.folder,
            allow_patterns=["README.md", f"data/{split}-*.parquet"],
            delete_patterns=[f"data/{split}-*.parquet"] if overwrite else None,
            commit_message=f"Text of split {split}",
        )
    except network_errors() as error:
        raise PublishError(
            f"publishing to {output.repo_id} failed: {error}. All blocks are kept in {output.folder}; "
            "the same command publishes them without asking about a page again"
        ) from error
    return f"{api.endpoint}/datasets/{output.repo_id}"


# ---- job -------------------------------------------------------------------------------------------------------------
# A run, from options to exit code: what every script that makes text does around its engine.


@dataclass
class Run:
    """One run of a script: what is known of it so far, for its last words."""

    script: str
    options: CommonOptions
    argv: Sequence[str]
    profile: ModelProfile
    question: Question
    output: Output
    engine: str | None = None
    source: Source | None = None
    plan: BlockPlan | None = None
    tally: Tally | None = None
    statuses: Counter[str] = field(default_factory=Counter)
    started: float = field(default_factory=time.monotonic)

    @property
    def folder(self) -> BlockFolder:
        """The blocks of this run's split."""
        assert self.plan is not None
        return BlockFolder(self.output.folder, self.plan.split)

    def command(self) -> str:
        """Return the command line, as people type it."""
        return shlex.join(["uv", "run", self.script, *self.argv])


def begin(script: str, options: CommonOptions, argv: Sequence[str], mode: str = "text") -> Run:
    """Check the options against each other and the model; nothing is opened yet."""
    if options.private and options.public:
        raise UsageError("--private and --public exclude each other; give one of them")
    if options.overwrite and options.resume:
        raise UsageError("--overwrite and --resume exclude each other; give one of them")
    _refuse_secrets(options)
    match = find_profile(options.model)
    profile = match.profile
    if match.how != "catalogue":
        say(f"{options.model}: {match}")
    sampling = profile.sampling
    question = Question(
        words=prompt_words(profile, mode),
        temperature=sampling.temperature if options.temperature is None else options.temperature,
        top_p=sampling.top_p if options.top_p is None else options.top_p,
        max_tokens=options.max_tokens or sampling.max_tokens,
        seed=options.seed,
        chat_template_kwargs=dict(profile.chat_template_kwargs),
    )
    output = choose_output(options.output, options.work_dir)
    check_output_is_apart(output, options.input)
    return Run(script, options, argv, profile, question, output)


def _refuse_secrets(options: CommonOptions) -> None:
    """Keys in the command line would end up in process lists, logs and the card."""
    for word in options.vllm_args:
        if word.split("=")[0] in {"--api-key", "--hf-token"}:
            raise UsageError(
                f"{word.split('=')[0]} does not belong on a command line: set HF_TOKEN in the environment; "
                "a server that we start is given a key of its own there"
            )


def preflight(run: Run) -> None:
    """Open the input and check the output before any GPU time; raise `UsageError` where the run could not end well."""
    options = run.options
    run.source = open_source(
        options.input,
        config=options.config,
        split=options.split,
        revision=options.revision,
        image_column=options.image_column,
        max_samples=options.max_samples,
        shuffle=options.shuffle,
        seed=options.seed,
    )
    run.plan = BlockPlan(run.source.split, len(run.source.order), options.block_rows)
    check_columns(run.source.rows.schema, options.output_column)
    settings = run_settings(run)
    if run.folder.closed() and not options.overwrite:
        check_settings_are_ours(str(run.output.folder), run.folder.stored_settings(), settings)
    check_hub(run.output, run.plan.split, settings, overwrite=options.overwrite)
    say(f"{options.input}: {run.plan.num_rows} rows of split {run.plan.split!r} → {run.output}")


def run_settings(run: Run) -> dict[str, Any]:
    """Return all that decides what the blocks hold: a resumed run must have the same."""
    assert run.source is not None
    assert run.plan is not None
    options, question = run.options, run.question
    return {
        "input": run.source.fingerprint,
        "config": options.config,
        "split": run.plan.split,
        "image_column": run.source.image_column,
        "rows": run.plan.num_rows,
        "shuffle_seed": options.seed if options.shuffle else None,
        "block_rows": options.block_rows,
        "output_column": options.output_column,
        "model": options.model,
        "model_revision": options.model_revision,
        "prompt": question.words,
        "temperature": question.temperature,
        "top_p": question.top_p,
        "max_tokens": question.max_tokens,
        "seed": question.seed,
        "longest_edge_px": run.profile.longest_edge_px,
    }


def run_info(run: Run) -> dict[str, Any]:
    """Return this run's entry in `inference_info`."""
    options, question = run.options, run.question
    return {
        "column": options.output_column,
        "model": options.model,
        "model_revision": options.model_revision,
        "engine": run.engine,
        "script": run.script,
        "prompt": question.words,
        "temperature": question.temperature,
        "top_p": question.top_p,
        "max_tokens": question.max_tokens,
        "seed": question.seed,
        "longest_edge_px": run.profile.longest_edge_px,
        "flavor": os.environ.get("ACCELERATOR"),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def hosted_command(run: Run, image: str, otherwise: str) -> str:
    """Return how to run the same job on a hosted GPU, and `otherwise` what else could be done."""
    words = ["hf", "jobs", "uv", "run", "--image", image, "--flavor", "l4x1", "-s", "HF_TOKEN", "--timeout", "4h"]
    return (
        f"On a hosted GPU:\n\n    {shlex.join([*words, 'SCRIPT_URL', *run.argv])}\n\n"
        f"(SCRIPT_URL: the address of {run.script}, or its path here; input and output must be Hub datasets there.)\n"
        f"{otherwise}"
    )


def engine_args(run: Run) -> tuple[str, ...]:
    """Return the engine's arguments, as `vllm serve` takes them: the profile's, then the user's; the last one wins."""
    options = run.options
    named = {
        "--revision": options.model_revision,
        "--max-model-len": options.max_model_len,
        "--gpu-memory-utilization": options.gpu_memory_utilization,
    }
    words = [word for flag, value in named.items() if value is not None for word in (flag, str(value))]
    return (*run.profile.serve_args, *words, *options.vllm_args)


def make_job(run: Run, concurrency: int) -> Job:
    """Return what has to be done, and start counting."""
    assert run.source is not None
    assert run.plan is not None
    job = Job(
        source=run.source,
        plan=run.plan,
        folder=run.folder,
        limits=PageLimits(run.profile.longest_edge_px),
        output_column=run.options.output_column,
        settings=run_settings(run),
        info=run_info(run),
        concurrency=concurrency,
    )
    todo = job.todo()
    rows_before = run.plan.num_rows - sum(len(run.plan.positions(number)) for number in todo)
    run.tally = Tally(run.plan.num_rows, rows_before, verbose=run.options.verbose)
    if rows_before:
        say(f"{rows_before} rows are in closed blocks already; {len(todo)} of {len(run.plan)} blocks are left")
    return job


def is_complete(run: Run) -> bool:
    """Whether every block is there."""
    assert run.plan is not None
    return len(run.folder.closed()) >= len(run.plan)


def take_stock(run: Run) -> None:
    """Count what the closed blocks hold and write the card: at the end, whatever the end was."""
    if run.plan is None or not run.folder.closed():
        return
    run.statuses = count_statuses(run.folder, run.options.output_column)
    speed = f"{run.tally.pages_per_s():.2f} pages/s in the last run" if run.tally and run.tally.done else None
    info = {key: value for key, value in run_info(run).items() if key not in {"column", "script"}}
    write_card(
        run.output,
        # a local path says nothing to others
        input_name=Path(run.options.input).name if run.source and run.source.roots else run.options.input,
        plan=run.plan,
        statuses=run.statuses,
        facts={**info, "speed": speed},
        command=run.command(),
    )


def finish(run: Run) -> None:
    """Publish where that is asked for; show pages; raise `JobError` where too many pages failed."""
    assert run.plan is not None
    assert run.source is not None
    if run.output.repo_id:
        private = run.options.private or (run.source.is_private and not run.options.public)
        where = publish(run.output, run.plan.split, private=private, overwrite=run.options.overwrite)
        say(f"published: {where}")
    for title, text in first_texts(run, run.options.show):
        say(f"\n── {title} ──\n{text}")
    column = run.options.output_column
    failed = sum(count for status, count in run.statuses.items() if status not in {"ok", "blank"})
    share = failed / run.plan.num_rows
    if share > run.options.max_failure_rate:
        raise JobError(
            f"{failed} of {run.plan.num_rows} pages failed ({share:.1%}; --max-failure-rate is "
            f"{run.options.max_failure_rate:.1%}). All rows are written: see {column}_status and {column}_error"
        )


def first_texts(run: Run, count: int) -> list[tuple[str, str]]:
    """Return (title, text) of the first `count` pages of the output."""
    import pyarrow.parquet as pq

    assert run.source is not None
    text, status, error, _ = new_columns(run.options.output_column)
    shown: list[tuple[str, str]] = []
    for number in sorted(run.folder.closed()):
        if len(shown) >= count:
            break
        table = pq.read_table(run.folder.path(number), columns=[run.source.image_column, text, status, error])
        for row in table.slice(0, count - len(shown)).to_pylist():
            cell = row[run.source.image_column]
            name = (cell.get("path") if isinstance(cell, dict) else None) or f"page {len(shown)}"
            shown.append((f"{name} ({row[status]})", row[text] or row[error] or ""))
    return shown


def carry_out(run: Run, ask_all: Callable[[Run, ExitStack, Interrupts], None]) -> int:
    """Check, ask about every page, take stock, publish; whatever happens, say so and return the exit code.

    `ask_all` writes the blocks that are missing. It gets a stack to put its engine on: what is on it is closed on every
    way out.
    """
    # A corrupt EXIF block is worth no line on stderr; a picture that can't be read is refused by name.
    warnings.filterwarnings("ignore", module="PIL")
    interrupts = Interrupts()
    message, code = "done", 0
    with interrupts.caught():
        try:
            preflight(run)
            with run.folder.locked():
                if run.options.overwrite:
                    run.folder.remove_all()
                try:
                    if not is_complete(run):
                        with ExitStack() as stack:
                            ask_all(run, stack, interrupts)
                finally:
                    take_stock(run)
                finish(run)
        except Interrupted as stop:
            message, code = f"{stop}; closed blocks are kept, the same command goes on", stop.exit_code
        except JobError as error:
            message, code = str(error), error.exit_code
            if interrupts.number:  # what else went wrong then is its consequence
                message, code = f"{Interrupted(interrupts.number)}; {error}", 128 + interrupts.number
        except Exception as error:
            say_end(run, 1, f"{type(error).__name__}: {error}")
            raise
        if code:
            say(f"{run.script}: {message}")
        say_end(run, code, message)
    return code


def refuse(script: str, options: CommonOptions, error: JobError) -> int:
    """Say, to people and to programs, why a run did not begin; return the exit code."""
    say(f"{script}: {error}")
    outcome = Outcome(
        input=options.input,
        output=options.output,
        split=None,
        model=options.model,
        engine=None,
        exit_code=error.exit_code,
        message=str(error),
        seconds=0.0,
        tally=None,
        statuses={},
    )
    sys.stdout.write(outcome.json_line() + "\n")
    sys.stdout.flush()
    return error.exit_code


def say_end(run: Run, code: int, message: str) -> None:
    """Write the last line for people, and the JSON line for programs."""
    if run.tally and run.tally.done:
        counts = ", ".join(f"{count} {status}" for status, count in sorted(run.statuses.items()))
        took = duration(time.monotonic() - run.started)
        say(f"{run.tally.line()}; after {took}; in the output: {counts or 'nothing yet'}")
    outcome = Outcome(
        input=run.options.input,
        output=str(run.output),
        split=run.plan.split if run.plan else None,
        model=run.options.model,
        engine=run.engine,
        exit_code=code,
        message=message,
        seconds=time.monotonic() - run.started,
        tally=run.tally,
        statuses=run.statuses,
    )
    sys.stdout.write(outcome.json_line() + "\n")
    sys.stdout.flush()


# ---- serve -----------------------------------------------------------------------------------------------------------
# The server: one that runs already, or `vllm serve` spawned here and ended with us.
#
# A server that we spawn listens on loopback only, with a random key that it is given by environment, in a process group
# of its own, its log in a file whose last lines stand in every error.


LOG_LINES_SHOWN = 20
POLL_S = 0.5
# Waits until our end of its stdin closes, as it does however we end, by SIGKILL too; then ends the group named in $0.
GUARD = 'read -r _; kill -TERM "-$0"; sleep 10; kill -KILL "-$0"'
# Variables by which `uv run` points Python at our environment: the server has its own.
OURS_ALONE = ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "UV", "UV_RUN_RECURSION_DEPTH", "VIRTUAL_ENV_PROMPT")


@dataclass(frozen=True)
class Wanted:
    """Which server is wanted: `url` that of a running one or None; `command` what to spawn instead of `vllm serve`."""

    model: str
    url: str | None = None
    command: str | None = None
    port: int | None = None
    api_key: str | None = None
    vllm_args: Sequence[str] = ()
    startup_timeout_s: float = 900.0
    hint: str = ""  # the command to show where no server can be had here


@dataclass(frozen=True)
class Server:
    """A server that answers. `engine` is what it says it is; `spawned` is the process if it is ours."""

    endpoint: Endpoint
    engine: str
    spawned: Spawned | None = None

    async def watch(self) -> None:
        """Return never; raise `EngineError` when the process that we spawned has ended."""
        while True:
            await asyncio.sleep(1.0)
            if self.spawned:
                self.spawned.check_alive()


class Spawned:
    """A server process of ours, in a process group of its own."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.log = Path(tempfile.mkdtemp(prefix="lighton-ocr-")) / "server.log"
        say(f"starting {shlex.join(command)}\n  its log: {self.log}")
        with self.log.open("wb") as log:
            try:
                self._process = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise EngineError(f"can't start {command[0]!r}: {error}; check --serve-command") from error
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", GUARD, str(self._process.pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def check_alive(self) -> None:
        """Raise `EngineError` with the end of its log if the process has ended."""
        code = self._process.poll()
        if code is not None:
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            raise EngineError(f"the server ended by itself ({how}). The end of its log, {self.log}:\n{self.log_tail()}")

    def log_tail(self) -> str:
        """Return the last lines of the log, indented."""
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:]
        return "\n".join(f"  | {line}" for line in lines) or "  (it wrote nothing)"

    def end(self, patience_s: float = 10.0) -> None:
        """End the process and all that it started: asked first, then killed."""
        for number, wait_s in ((signal.SIGTERM, patience_s), (signal.SIGKILL, 5.0)):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(wait_s)
        self._process.poll()
        self._guard.kill()
        self._guard.communicate()

    def kill(self) -> None:
        """Kill the process group at once, without waiting."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


def check_possible(wanted: Wanted) -> None:
    """Raise at once where no server is named and none can be spawned: no `vllm`, or a command that is none."""
    if wanted.url is not None:
        base_url(wanted.url)
    if wanted.command is not None:
        command_words(wanted.command)
    if wanted.url is None and wanted.command is None and shutil.which("vllm") is None:
        raise EngineError(f"no `vllm` command on this machine, and no --server to use.\n{wanted.hint}")


@contextlib.contextmanager
def running_server(wanted: Wanted) -> Iterator[Server]:
    """Use the server at `wanted.url`, or spawn one; a spawned one is ended on leaving.

    A local URL where nothing answers is where we spawn; a remote one is waited for and never shadowed.
    """
    check_possible(wanted)
    url = base_url(wanted.url) if wanted.url else None
    key = wanted.api_key or "EMPTY"
    if url and (is_up(url, key) or not is_local(url)):
        models = _wait_for_models(url, key, wanted.startup_timeout_s)
        yield Server(Endpoint(f"{url}/v1", key, served_id(models, wanted.model, url)), engine_name(url, models))
        return
    host, port = _address(url, wanted.port)
    check_port_is_free(host, port)
    key = secrets.token_urlsafe(24)
    command = server_command(wanted, host, port)
    # In a thread, where no signal can come between the start of the process and our knowing of it.
    starter = ThreadPoolExecutor(1)
    starting = starter.submit(Spawned, command, server_environment(key))
    try:
        spawned = starting.result()
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        models = _wait_for_models(url, key, wanted.startup_timeout_s, spawned)
        yield Server(
            Endpoint(f"{url}/v1", key, served_id(models, wanted.model, url)), engine_name(url, models), spawned
        )
    finally:
        starter.shutdown()
        starting.result().end()


def server_command(wanted: Wanted, host: str, port: int) -> list[str]:
    """Return the words that start the server: `vllm serve`, or the command that the user gave.

    In a command of the user's `{host}`, `{port}` and `{model}` are filled in; where it has no `{port}`, `--host` and
    `--port` go at its end, which vLLM, llama-server and rapidocr-server.py all take.
    """
    if wanted.command is None:
        if shutil.which("vllm") is None:
            raise EngineError(f"no `vllm` command on this machine to start at {host}:{port}.\n{wanted.hint}")
        return ["vllm", "serve", wanted.model, "--host", host, "--port", str(port), *wanted.vllm_args]
    words = command_words(wanted.command)
    filled = [_fill(word, {"host": host, "port": str(port), "model": wanted.model}) for word in words]
    if not any("{port}" in word for word in words):
        filled += ["--host", host, "--port", str(port)]
    return filled


def command_words(command: str) -> list[str]:
    """Split the user's command as a shell does."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UsageError(f"--serve-command {command!r} can't be read: {error}") from error
    if not words:
        raise UsageError("--serve-command is empty; give the command that starts the server")
    return words


def _fill(word: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        word = word.replace(f"{{{name}}}", value)
    return word


def server_environment(key: str) -> dict[str, str]:
    """Return the environment of a spawned server: ours, without what `uv run` set for us, and the key."""
    environment = {name: value for name, value in os.environ.items() if name not in OURS_ALONE}
    # FlashInfer's sampler is compiled by nvcc, which the plain image lacks: engine start would crash.
    environment.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    return {**environment, "VLLM_API_KEY": key, "LLAMA_API_KEY": key}


def base_url(url: str) -> str:
    """Return `scheme://host:port/path` without a trailing `/v1`."""
    parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise UsageError(f"--server {url!r} is no URL; give one like http://127.0.0.1:8000")
    if parts.username or parts.password:
        raise UsageError(
            "--server holds a user name or password; give the key in the variable that --api-key-env names"
        )
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"


def is_local(url: str) -> bool:
    """Whether the URL names this machine's loopback."""
    host = urllib.parse.urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _address(url: str | None, port: int | None) -> tuple[str, int]:
    """Return where to spawn: the host and port of a local URL; else loopback and `port`, or a free one."""
    if url:
        parts = urllib.parse.urlsplit(url)
        return parts.hostname or "127.0.0.1", port or parts.port or 80
    if port:
        return "127.0.0.1", port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return "127.0.0.1", int(probe.getsockname()[1])


def check_port_is_free(host: str, port: int) -> None:
    """Raise `UsageError` where something listens on the port already."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UsageError(
                f"port {port} of {host} can't be used: {error.strerror}. "
                f"Use what runs there with --server http://{host}:{port}, or choose another --port"
            ) from error


def _get(url: str, key: str, timeout_s: float = 5.0) -> tuple[int, bytes]:
    """GET an address; return (status, body). Raises `OSError` where nothing answers."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"})  # noqa: S310 - http(s) only
    # a proxy named in the environment is not for loopback
    proxies = urllib.request.ProxyHandler({} if is_local(url) else None)
    opener = urllib.request.build_opener(_NoRedirect, proxies)
    try:
        with opener.open(request, timeout=timeout_s) as response:
            return int(response.status), response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: the key is for this server alone."""

    def redirect_request(self, *_: Any) -> None:
        """Refuse."""
        return


def is_up(url: str, key: str) -> bool:
    """Whether anything answers HTTP at the URL."""
    try:
        _get(f"{url}/v1/models", key)
    except (OSError, ValueError):
        return False
    return True


def _wait_for_models(
    url: str, key: str, startup_timeout_s: float, spawned: Spawned | None = None
) -> list[dict[str, Any]]:
    """Wait until the server lists its models. Patience is measured by progress: growth of the log, where it is ours."""
    last_sign, log_size, last_error = time.monotonic(), -1, "nothing answered"
    while True:
        if spawned:
            spawned.check_alive()
            size = spawned.log.stat().st_size
            if size != log_size:
                log_size, last_sign = size, time.monotonic()
        try:
            status, body = _get(f"{url}/v1/models", key)
            if status == 200:
                return _listed_models(body, url)
            if status in {401, 403}:
                raise EngineError(f"{url} refuses our key (HTTP {status}); set the variable that --api-key-env names")
            if status < 500:
                raise EngineError(f"{url}/v1/models answers HTTP {status}: no OpenAI-compatible server; check --server")
            last_error = f"HTTP {status}"
        except OSError as error:
            last_error = str(getattr(error, "reason", error))
        waited = time.monotonic() - last_sign
        if waited > startup_timeout_s:
            tail = f". The end of its log, {spawned.log}:\n{spawned.log_tail()}" if spawned else ""
            raise EngineError(
                f"{url} is not ready: {duration(waited)} without a sign of progress (--startup-timeout); "
                f"the last try: {last_error}{tail}"
            )
        time.sleep(POLL_S)


def _listed_models(body: bytes, url: str) -> list[dict[str, Any]]:
    try:
        models = json.loads(body)["data"]
        return [dict(model) for model in models if model["id"]]
    except (ValueError, LookupError, TypeError) as error:
        raise EngineError(f"{url}/v1/models is no list of models: {body[:200]!r}; check --server") from error


def served_id(models: Sequence[Mapping[str, Any]], wanted: str, url: str) -> str:
    """Return the id under which the wanted model is served; a server that speaks only others is refused."""
    for key in ("id", "root"):
        for model in models:
            if model.get(key) == wanted:
                return str(model["id"])
    served = ", ".join(str(model["id"]) for model in models) or "nothing"
    raise EngineError(f"{url} serves {served}, not {wanted}; to use what it serves give --model {served}")


def engine_name(url: str, models: Sequence[Mapping[str, Any]]) -> str:
    """Return what serves, as it names itself: owner and version, such as `vllm 0.32.0`."""
    owner = str(models[0].get("owned_by") or "unknown")
    try:
        status, body = _get(f"{url}/version", "")
        version = str(json.loads(body)["version"]) if status == 200 else ""
    except (OSError, ValueError, LookupError, TypeError):
        version = ""
    return f"{owner} {version}".strip()


# ---- driver ----------------------------------------------------------------------------------------------------------
# What the driver scripts share: their options for a server, and keeping it busy from a client without torch.


OTHERWISE = (
    "Here: install vLLM, or give --server URL, or try without a GPU: "
    '--serve-command "uv run rapidocr-server.py" --model rapidocr'
)


@dataclass(frozen=True, kw_only=True)
class DriverOptions(CommonOptions):
    """What a driver script takes beside the common options: which server, and how patiently it is asked."""

    server: str | None = option(
        None,
        "engine",
        "server to use; where a local URL does not answer, vllm is started there (default: start one on a free port)",
        metavar="URL",
    )
    serve_command: str | None = option(
        None,
        "engine",
        "start this instead of `vllm serve`; {model}, {host} and {port} are filled in, or --host and --port added",
        metavar="CMD",
    )
    port: int | None = option(
        None, "engine", "port for the server we start (default: a free one)", metavar="N", minimum=1, maximum=65535
    )
    api_key_env: str = option("VLLM_API_KEY", "engine", "variable that holds the key of --server", metavar="VAR")
    startup_timeout: float = option(
        900.0, "engine", "seconds to wait for a server that shows no sign of progress", metavar="S", minimum=0.1
    )
    request_timeout: float = option(600.0, "engine", "seconds one request may take", metavar="S", minimum=0.1)
    retry_for: float = option(
        600.0, "engine", "seconds from its first failure on in which a page is asked again", metavar="S", minimum=0.0
    )


def wanted_server(run: Run, options: DriverOptions) -> Wanted:
    """Say which server is wanted, and how to get a machine that has one."""
    return Wanted(
        model=options.model,
        url=options.server,
        command=options.serve_command,
        port=options.port,
        api_key=os.environ.get(options.api_key_env),
        vllm_args=engine_args(run),
        startup_timeout_s=options.startup_timeout,
        hint=hosted_command(run, run.profile.image, OTHERWISE),
    )


async def drive(job: Job, run: Run, options: DriverOptions, server: Server) -> None:
    """Keep the server busy with the pages of the job, and show how it goes."""
    import openai

    assert run.tally is not None
    timeout = openai.Timeout(options.request_timeout, connect=min(10.0, options.request_timeout))
    url = server.endpoint.base_url
    async with openai.AsyncOpenAI(
        base_url=url,
        api_key=server.endpoint.api_key,
        max_retries=0,
        timeout=timeout,
        # a proxy named in the environment is not for loopback
        http_client=openai.DefaultAsyncHttpxClient(trust_env=not is_local(url), timeout=timeout),
    ) as client:
        asker = Asker(
            client,
            server.endpoint.model,
            run.question,
            retry_for_s=options.retry_for,
            on_retry=run.tally.retry,
            watch=server.watch,
        )
        with progress_shown(run.tally):
            await run_job(job, asker, run.tally)


# ---- server ----------------------------------------------------------------------------------------------------------
# The script itself.


SCRIPT = "lighton-ocr-server.py"


@dataclass(frozen=True, kw_only=True)
class ServerOptions(DriverOptions):
    """The options of lighton-ocr-server.py."""

    model: str = option(DEFAULT_MODEL_ID, "model", "model id or local checkpoint", metavar="ID")

    concurrency: int = option(64, "run", "pages in flight", metavar="N", minimum=1, maximum=1000)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script; return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    assert __doc__ is not None
    parser = make_parser(
        ServerOptions, prog=SCRIPT, description=__doc__, epilog="Everything after -- goes to `vllm serve` unchanged."
    )
    options = parse_options(parser, ServerOptions, words)
    try:
        run = begin(SCRIPT, options, words)
        wanted = wanted_server(run, options)
        check_possible(wanted)
    except JobError as error:
        return refuse(SCRIPT, options, error)
    return carry_out(run, functools.partial(ask_server, options, wanted))


def ask_server(options: ServerOptions, wanted: Wanted, run: Run, stack: ExitStack, interrupts: Interrupts) -> None:
    """Get a server and have it read every page that has no result yet."""
    server = stack.enter_context(running_server(wanted))
    if server.spawned:
        interrupts.last_will = server.spawned.kill
    run.engine = server.engine
    say(f"{server.engine} serves {server.endpoint.model} at {server.endpoint.base_url}")
    interrupts.run(drive(make_job(run, options.concurrency), run, options, server))


if __name__ == "__main__":
    sys.exit(main())
