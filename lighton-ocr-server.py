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
# timeout = "4h"
# secrets = ["HF_TOKEN"]
# env = { HF_HUB_DISABLE_PROGRESS_BARS = "1" }
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
Blocks of a Hub dataset are collected on a branch of it while the run is under way, and published when all are there.

Caveat: at the models' own temperatures two runs of a page may differ. Read `markdown_status` before trusting a text.
"""

# Built from src/server.py and the rooms below by tools/build.py: edit those, not this file.
#
#   confidence: How sure the engine was of a page: from the log probabilities of its tokens.
#   errors: The errors that end a run, and the exit code of each.
#   cells: The bytes of a picture out of a dataset's cell; a path that stands there is never opened here.
#   ink: Whether anything is written on a page.
#   profiles: Colour profiles, honoured where they change what can be read.
#   pixels: Pixels as they were stored, in whatever mode, → 8 bits a channel, gray ("L") or "RGB".
#   png: Pixels → a PNG file, in a quarter of the time that Pillow takes at its quickest, and no larger for a scan.
#   pages: A cell of a dataset → a page ready for the model, or a named refusal.
#   question: What is asked about a page: the same words, the same sampling and the same seed from every script.
#   grounding: The text of a page with its layout: LightOnOCR-3's grounding markers read, taken out and put back.
#   result: What became of a page.
#   report: What a run tells: progress lines on stderr, the last JSON line on stdout, and the exit code.
#   startup: What a starting vLLM says of itself: from lines of its log to the phase it is in, and to why a start has
#       failed.
#   spawn: A server process of ours: in a process group of its own, its log in a file, and never alive after us.
#   transport: How a page travels to the engine: as a data URL, or to a server of our own as a file in shared memory.
#   ask: A page → the request → the result: a vLLM endpoint asked through `AsyncOpenAI`, its errors sorted.
#   deadline: The end of a job's time: where the pages will not be done by then, that is said once, and early.
#   block_files: What the file of a block says of itself: the settings it was made with, and the values in a column of
#       it.
#   blocks: Blocks of rows: their names, how one is written, and what is there already.
#   columns: The columns of a block: the input's own as they are, and those of the results beside them.
#   loops: Does a text end in a loop, as a decoder falls into one.
#   attempts: Which pages are asked again for a better text, how, and which of the texts is kept.
#   dollars: Escaped math delimiters repaired: `\$x\$` becomes `$x$`, while prices keep their `\$`.
#   reading: What becomes of the engine's words once the best answer is chosen: markers read, dollars repaired, frames
#       joined.
#   threads: Threads for work that can't be interrupted: one that takes too long is given up, and another thread takes
#       its place.
#   gauges: What a vLLM server says about itself: the gauges of its /metrics page, read every second.
#   window_rules: The rules of the window: what is remembered and what is seen make a decision that names its rule.
#   window: How many pages may be in flight: a window that grows on evidence.
#   reader: A row → its result: each frame of its picture prepared and asked about, again while the text is not sound.
#   beside: Pictures that lie beside a table, put into its cells: only those that really lie in the input's own folder.
#   hf_paths: Addresses on the Hub: `namespace/name`, `hf://datasets/…` at a revision, `hf://buckets/…`, and what lies
#       there.
#   patience: Patience with the network: what fails for a while is tried again, within bounds.
#   parquet_rows: Rows of parquet files, local or on the Hub, by address.
#   splits: The splits of a dataset: which one is read, and the one that save_to_disk wrote.
#   stream: Rows of a Hub dataset that is not parquet, streamed: what has passed is not kept, and nothing is downloaded
#       ahead.
#   unreadable: Why an input can't be read, in words that list what there is and end with the next step.
#   source: Rows of a dataset by address, undecoded.
#   flow: The flow of a run: rows → pages → an engine → blocks, with everything bounded.
#   card: The dataset card: the YAML that `load_dataset` needs, a section for each split of ours, and what people wrote.
#   interrupt: Ctrl-C, SIGTERM and SIGHUP: the first ends the run in order, the second at once.
#   uploads: Closed blocks on their way to the Hub, by a thread of their own: uploaded at once, committed rarely.
#   remote_blocks: Blocks of an output that lies on the Hub, by the verbs of a folder: some there, some here on their
#       way.
#   work_ref: Where blocks of a Hub dataset are collected until all are there: a branch of its own, or a draft of a pull
#       request.
#   publish: The output: where it goes, and the one commit that makes a finished split of a Hub dataset visible.
#   verify: What was published, looked at as a reader does: the files, their features, and a row of them.
#   bucket_blocks: Blocks of a bucket: collected in a folder that readers pass over, and moved from there when all are
#       there.
#   flavors: Hosted runners: the flavours of Hugging Face Jobs, what an hour of each costs, and how fast they were
#       measured.
#   hardware: What can be hired now, and for how much: the Hub's list of hardware, or the stored one where it can't be
#       asked.
#   memory: How much memory pages in flight may take: the container's or the host's limit, and what a page was seen to
#       take.
#   models: The profiles: everything that differs between the LightOnOCR generations.
#   machine: What machine this is, and which flags `vllm serve` gets because of it; the user's own flags win.
#   hosted: The machine that a run is paid for: inside a Hugging Face Job its flavour, its price, and when the job is
#       stopped.
#   commits: Blocks of a Hub dataset as they are uploaded and committed to the work ref.
#   hub_blocks: Blocks of a Hub dataset: found on the work ref by any machine, and published from there.
#   options: The command line: each option is spelled once, as a field of a frozen dataclass; the parser is made from
#       those.
#   quality: What the options ask of pages and texts, for the rooms that see to it.
#   way: How a run goes about its blocks: which are its own, what is asked again, and when the rest of the world sees
#       them.
#   job: A run: what the options ask for, and what then has to be done.
#   canary: The canary: a page of known text that an engine must read before it is trusted with the first real one.
#   budget: Whether the largest page and its text fit the context: a sum that costs nothing and saves a night of
#       refusals.
#   trust: What an engine must pass before its first page: the version gate, the budget, and the canary.
#   web: Plain HTTP to a server: addresses, and one request at a time without redirects; no client library is needed.
#   ask_canary: Asks a server about the canary page, before there is an event loop.
#   ready: Ready: a server lists the model, is no version known to be bad, holds the largest page, and has read the
#       canary.
#   serve: The server: one that runs already, or `vllm serve` spawned here and ended with us.
#   steering: Steering a run: twice a second the window is told what is seen, and each decision goes to the telemetry
#       file.
#   estimate: What a run as jobs will take: hours and dollars, from a speed that somebody measured, or none at all.
#   submission: What `--jobs` submits: which shards, with which words, labels, variables and secrets.
#   supervise: The watchdog of a server: notices that it died or froze, starts it again, has the lost pages asked again.
#   workers: Servers behind one address: a `vllm-router` names them, and their gauges count together.
#   driver: What the driver scripts share: their options for a server, and keeping it busy from a client without torch.
#   rights: What a token may do to a dataset of the Hub, read out of what `whoami` says of it.
#   room: Whether what a run will write fits on its disk: asked before any GPU time, and answered with the numbers.
#   preflight: What is checked before any GPU time, so that a run which can't end well does not begin.
#   ending: How a run ends: what is in the output is counted, the card written, the blocks published, the exit code
#       found.
#   jobs_plan: What jobs have to do: what is left of the run, which of its jobs run already, on what machine, and for
#       how long.
#   jobs: `--jobs N`: the run submitted as N Hugging Face Jobs of this very script, each with its shard, or only shown.

from __future__ import annotations

import argparse
import ast
import asyncio
import bisect
import contextlib
import dataclasses
import datetime
import email.utils
import fcntl
import functools
import hashlib
import io
import ipaddress
import itertools
import json
import math
import os
import queue
import random
import re
import secrets
import shlex
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
import types
import typing
import unicodedata
import urllib.error
import urllib.parse
import urllib.request
import warnings
import zlib
from abc import ABC, abstractmethod
from collections import Counter, defaultdict, deque
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import Field, dataclass, field, fields, replace
from itertools import accumulate, pairwise
from pathlib import Path, PurePath, PurePosixPath
from types import FrameType
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TextIO, TypeVar, cast

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa
    from huggingface_hub import HfApi, JobHardwareInfo, JobInfo
    from openai import AsyncOpenAI
    from PIL import Image
    from tqdm import tqdm

# ---- confidence ------------------------------------------------------------------------------------------------------
# How sure the engine was of a page: from the log probabilities of its tokens.


WINDOW_TOKENS = 16


@dataclass(frozen=True)
class Confidence:
    """Token probabilities of a page, 0 to 1: their mean, and the mean of the least sure window of neighbours.

    `lowest_at` is the index of that window's first token. A page may read well on the whole and have one bad line: the
    mean hides it, the window shows it. (On a page of few windows, `lowest` may lie above `mean`: the tokens at the ends
    stand in fewer windows.)
    """

    mean: float
    lowest: float
    lowest_at: int


def page_confidence(logprobs: Sequence[float | None], window: int = WINDOW_TOKENS) -> Confidence | None:
    """Return the confidence of a page whose tokens have these log probabilities; None where there is none.

    Fewer tokens than `window` are one window. What is no log probability is read cautiously: None and NaN count as
    probability 0, like vLLM's -9999 and -inf; a rounding error above 0 counts as 1.
    """
    if window < 1:
        raise ValueError(f"a window has at least one token, not {window}")
    chances = [_probability(logprob) for logprob in logprobs]
    if not chances:
        return None
    width = min(window, len(chances))
    sums = list(accumulate(chances, initial=0.0))
    means = [(sums[at + width] - sums[at]) / width for at in range(len(chances) - width + 1)]
    lowest_at = min(range(len(means)), key=means.__getitem__)
    mean = math.fsum(chances) / len(chances)
    lowest = math.fsum(chances[lowest_at : lowest_at + width]) / width
    return Confidence(mean=mean, lowest=lowest, lowest_at=lowest_at)


def _probability(logprob: float | None) -> float:
    if logprob is None or math.isnan(logprob):
        return 0.0
    return math.exp(min(logprob, 0.0))


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


class SubmitError(JobError):
    """Not all jobs could be submitted. Those that were run on; the same command submits the rest."""


def network_errors() -> tuple[type[Exception], ...]:
    """Return what calls to the Hub raise where the network or the Hub fails: httpx's own errors are no `OSError`."""
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]

    return (OSError, httpx.HTTPError)


# ---- cells -----------------------------------------------------------------------------------------------------------
# The bytes of a picture out of a dataset's cell; a path that stands there is never opened here.


class UnfitCellError(Exception):
    """The cell can't become a page; the message is the reason."""


def cell_bytes(cell: object) -> bytes:
    """Return the file in a cell: None, bytes, or an undecoded picture `{"bytes": …, "path": …}`.

    The bytes of pictures that lie beside the table are in their cells already (`src/beside.py`): a path that is left is
    one that must not be opened.
    """
    path: object = None
    if isinstance(cell, dict):
        fields = cast("dict[str, object]", cell)
        cell, path = fields.get("bytes"), fields.get("path")
    if cell is None and path is None:
        raise UnfitCellError("no picture in this row")
    if cell is None:
        raise UnfitCellError(
            f"the cell has a path and no bytes, and there is no such file in the input's own folder: {path!r}"
        )
    if not isinstance(cell, bytes | bytearray | memoryview):
        raise UnfitCellError(f"the cell holds no picture but {type(cell).__name__}")
    if len(cell) == 0:
        raise UnfitCellError("the picture has 0 bytes")
    return bytes(cell)


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


# ---- profiles --------------------------------------------------------------------------------------------------------
# Colour profiles, honoured where they change what can be read.
#
# Nearly every profile is sRGB or a shade of it, which no reader minds; the models were trained on pages whose profiles
# nobody looked at, and a JPEG with such a one still travels as it is. But gray that is stored linearly, inverted, or
# with its channels exchanged is another page: where a profile moves the lightness of any colour by more than
# `MOST_SHIFT`, it is applied. One that is broken, or of another kind of colour than the pixels, is none.


MOST_SHIFT = 40  # gray levels; gamma 1.8 taken for 2.2 is 20, Adobe RGB taken for sRGB less, linear light over 70
KINDS = {"L": "GRAY", "RGB": "RGB ", "CMYK": "CMYK"}  # mode → what an ICC profile calls it
STEPS = {"L": 52, "RGB": 6, "CMYK": 4}  # how many values of each channel are tried


def profiled(image: Image.Image, profile: object) -> Image.Image:
    """Return the picture ("L", "RGB" or "CMYK") as its profile means it: the same object where that is no matter."""
    if not isinstance(profile, bytes) or image.mode not in KINDS:
        return image
    meaning = _meaning(profile, image.mode)
    return meaning(image) if meaning else image


@functools.lru_cache(maxsize=16)
def _meaning(profile: bytes, mode: str) -> Callable[[Image.Image], Image.Image] | None:
    """Return what turns pixels of this profile into "L" or "RGB", or None where it would be no matter."""
    from PIL import Image, ImageCms

    def apply(image: Image.Image) -> Image.Image:
        converted = ImageCms.applyTransform(image, transform)
        assert converted is not None  # only inPlace gives None
        return converted.convert("L") if mode == "L" else converted

    try:
        opened = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        if opened.profile.xcolor_space != KINDS[mode]:
            return None
        transform = ImageCms.buildTransform(
            opened, ImageCms.createProfile("sRGB"), mode, "RGB", flags=ImageCms.Flags.NOCACHE
        )
        # All colours of a lattice, a pixel each.
        values = [round(step * 255 / (STEPS[mode] - 1)) for step in range(STEPS[mode])]
        colours = list(itertools.product(values, repeat=len(mode)))
        probe = Image.frombytes(mode, (len(colours), 1), bytes(itertools.chain.from_iterable(colours)))
        before, after = probe.convert("RGB").convert("L"), apply(probe).convert("L")
    except Exception:  # noqa: BLE001  a broken profile must not cost the page
        return None
    shift = max(abs(a - b) for a, b in zip(before.tobytes(), after.tobytes(), strict=True))
    return apply if shift > MOST_SHIFT else None


# ---- pixels ----------------------------------------------------------------------------------------------------------
# Pixels as they were stored, in whatever mode, → 8 bits a channel, gray ("L") or "RGB".


def flatten(image: Image.Image, white_is_zero: bool, ink_as_it_is: bool, colour_profile: object = None) -> Image.Image:
    """The same picture in 8 bits, "L" or "RGB", as its colour profile means it."""
    image = profiled(_in_8_bits(image, white_is_zero, ink_as_it_is), colour_profile)
    return image if image.mode in {"L", "RGB"} else image.convert("RGB")


def _in_8_bits(image: Image.Image, white_is_zero: bool, ink_as_it_is: bool) -> Image.Image:
    """The same picture in 8 bits, "L", "RGB" or "CMYK"."""
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
    if mode == "CMYK":
        return ImageChops.invert(image) if ink_as_it_is else image
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
# the pixels (whole files only, one frame), upright, flat (8 bits, "L" or "RGB", transparency over white, its colour
# profile), fitted, and not blank. Gray stays gray: the server makes RGB of it with the same pixels, and here it is a
# third of the work.


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


@dataclass(frozen=True)
class Attempt:
    """How a page is asked this time; `max_tokens` None: the server gives what is left of the context."""

    temperature: float
    seed: int
    max_tokens: int | None


def page_seed(seed: int, row: int, frame: int = 0, attempt: int = 0) -> int:
    """Derive the sampling seed (31 bits) of a page from the run's seed.

    `row` is the page's place in the split, `frame` its place in a picture of several; attempt 0 is its own question.
    """
    place = f"{seed}:{row}" + f"/{frame}" * bool(frame) + f":{attempt}" * bool(attempt)
    digest = hashlib.blake2b(place.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


def first_attempt(question: Question, row: int, frame: int = 0) -> Attempt:
    """Return the page's own question: the sampling of the run, and the page's seed."""
    return Attempt(question.temperature, page_seed(question.seed, row, frame), question.max_tokens)


def page_messages(question: Question, image_part: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the chat messages that ask about one image: the image, then the trained words where the mode has any."""
    content: list[dict[str, Any]] = [dict(image_part)]
    if question.words:
        content.append({"type": "text", "text": question.words})
    return [{"role": "user", "content": content}]


def page_sampling(question: Question, row: int, attempt: Attempt | None = None) -> dict[str, Any]:
    """Return the sampling of the page in `row`, by the names that vLLM's server and `SamplingParams` share.

    `attempt` says how it is asked where that is not the page's own question.
    """
    asked = attempt or first_attempt(question, row)
    sampling: dict[str, Any] = {"temperature": asked.temperature, "top_p": question.top_p, "seed": asked.seed}
    if asked.max_tokens is not None:
        sampling["max_tokens"] = asked.max_tokens
    return sampling


# ---- grounding -------------------------------------------------------------------------------------------------------
# The text of a page with its layout: LightOnOCR-3's grounding markers read, taken out and put back.
#
# Before every layout block stands a marker `![label](x1,y1,x2,y2)`: four whole numbers from 0 to 1000 whatever the size
# of the image; the block's text runs to the next marker. `text+` continues the block before it (grammar: FACTS §1).
#
# What looks like a marker and is none (an unknown label, another count of numbers, one beyond 1000, a box inside out,
# cut off at the end of the text) stays in the text and is counted. An ordinary picture, `![alt](figure.png)`, is text.


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


# ---- result ----------------------------------------------------------------------------------------------------------
# What became of a page.


SOUND = frozenset({"ok", "blank"})  # every other status counts as a failure
STATUSES = ("ok", "blank", "truncated", "repetition", "error")


@dataclass(frozen=True)
class PageResult:
    """What became of a page.

    `status` is one of `STATUSES`. `text` is what the engine read: for `blank` it is empty, for `error` it is None and
    `error` says why. `tokens` is what the engine generated, `prompt_tokens` what it was given. `attempts` counts the
    requests for this page; `latency_s` is that of the last one.

    `raw`, `blocks` and `confidence` are there where they were asked for; `malformed` counts grounding markers that were
    none.
    """

    text: str | None
    status: str
    error: str | None = None
    tokens: int | None = None
    prompt_tokens: int | None = None
    finish_reason: str | None = None
    attempts: int = 0
    latency_s: float = 0.0
    raw: str | None = None
    blocks: tuple[Block, ...] | None = None
    malformed: int = 0
    confidence: Confidence | None = None


def result_of_answer(
    text: str | None,
    finish_reason: str | None,
    *,
    tokens: int | None,
    prompt_tokens: int | None,
    attempts: int,
    latency_s: float,
    confidence: Confidence | None = None,
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
        confidence=confidence,
    )


def refused(status: str, reason: str) -> PageResult:
    """Return the result of a page that never reached the engine: blank, or a picture that can't be read."""
    return PageResult(
        text="" if status == "blank" else None, status=status, error=None if status == "blank" else reason
    )


# ---- report ----------------------------------------------------------------------------------------------------------
# What a run tells: progress lines on stderr, the last JSON line on stdout, and the exit code.


LINE_EVERY_S = 30.0


def say(text: str, stream: TextIO | None = None) -> None:
    """Print a line for people; that nobody reads it any more is no reason to stop."""
    target = stream or sys.stderr
    if target is None:  # closed by whoever started us
        return
    try:
        print(text, file=target, flush=True)
    except OSError:
        _silence(target)


def _silence(stream: TextIO) -> None:
    """Send a stream that can't be written any more nowhere, or Python fails once more when it flushes it at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def say_to_programs(line: str) -> None:
    """Write the last line, on stdout; where that can't be written, say so to people."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
    except OSError as error:
        say(f"the last line can't be written to stdout: {error}")
        _silence(sys.stdout)


@dataclass
class Tally:
    """What has happened so far. `rows_before` were in closed blocks when the run began."""

    rows: int
    rows_before: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    preparing: int = 0
    in_flight: int = 0
    blocks: int = 0
    requests: int = 0
    retries: int = 0
    restarts: int = 0
    asked_again: int = 0  # requests made because a text was cut off or looped
    malformed_markers: int = 0
    unread_frames: int = 0
    verbose: bool = False
    dollars_per_hour: float | None = None
    bounded_by: str = ""
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
        self.malformed_markers += result.malformed

    def left_out(self, result: PageResult) -> None:
        """Count what a text cost that is not kept, as a better one came back."""
        self.prompt_tokens += result.prompt_tokens or 0
        self.tokens += result.tokens or 0

    def frames_left_out(self, row: int, count: int) -> None:
        """Count the frames beside the first that nobody asks about, and say so once."""
        if not self.unread_frames:
            say(f"the picture in row {row} has {count} frames, and the first is read; --frames all reads them all")
        self.unread_frames += count - 1

    def retry(self, reason: str) -> None:
        """Count a request that will be made again."""
        self.retries += 1
        if self.verbose:
            say(f"asking again: {reason}")

    def restarted(self) -> None:
        """Count a start of a server that had died or frozen."""
        self.restarts += 1

    @property
    def done(self) -> int:
        """How many pages this run has finished."""
        return self.statuses.total()

    @property
    def failed(self) -> int:
        """How many pages this run could not get a sound text for."""
        return sum(count for status, count in self.statuses.items() if status not in SOUND)

    @property
    def rows_left(self) -> int:
        """How many rows nobody has begun with."""
        return max(0, self.rows - self.rows_before - self.done - self.in_flight - self.preparing)

    def pages_per_s(self) -> float:
        """Return the mean speed of this run."""
        return self.done / max(1e-9, time.monotonic() - self.started)

    def eta_s(self) -> float | None:
        """Return the seconds left at the mean speed so far; None before the first page."""
        return (self.rows - self.rows_before - self.done) / self.pages_per_s() if self.done else None

    def remarks(self) -> str:
        """Say what else happened that may need a look, each with a comma before it."""
        counts = {
            "requests for a better text": self.asked_again,
            "malformed markers kept as text": self.malformed_markers,
            "frames not read (--frames all)": self.unread_frames,
        }
        return "".join(f", {count} {what}" for what, count in counts.items() if count)

    def line(self) -> str:
        """Say where the run stands, in one plain line."""
        eta = self.eta_s()
        tokens_per_s = self.tokens / max(1e-9, time.monotonic() - self.started)
        return (
            f"{self.rows_before + self.done}/{self.rows} pages, {self.failed} failed, {self.in_flight} in flight, "
            f"{self.pages_per_s():.2f} pages/s, {tokens_per_s:.0f} tokens/s, "
            f"ETA {'?' if eta is None else duration(eta)}{self._bound_and_cost()}"
        )

    def _bound_and_cost(self) -> str:
        words = f", bounded by {self.bounded_by}" if self.bounded_by else ""
        dollars = self.dollars_per_thousand_pages()
        return words if dollars is None else f"{words}, ${dollars:.2f} per 1,000 pages"

    def dollars_per_thousand_pages(self) -> float | None:
        """Return what a thousand pages cost at the mean speed; None where no price is known."""
        if self.dollars_per_hour is None or not self.done:
            return None
        return dollars_per_thousand(self.dollars_per_hour, self.pages_per_s())


def dollars_per_thousand(dollars_per_hour: float, pages_per_s: float) -> float:
    """Return what a thousand pages cost on a machine of this price at this speed."""
    return 1000 * dollars_per_hour / 3600 / pages_per_s


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
    with beside(_report_progress(tally)):
        yield


@contextmanager
def beside(*work: Coroutine[Any, Any, None]) -> Iterator[None]:
    """Let coroutines run beside what is within, and end them after it; what they raise is not heard."""
    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(one) for one in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()


async def _report_progress(tally: Tally) -> None:
    if sys.stderr is not None and sys.stderr.isatty():
        with suppress(OSError):
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
    flavor: str | None = None

    def json_line(self) -> str:
        """Return the JSON line; its keys are frozen (CONTRACT.md)."""
        tally = self.tally or Tally(rows=0)
        price = tally.dollars_per_hour
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
                "restarts": tally.restarts,
                "asked_again": tally.asked_again,
                "malformed_markers": tally.malformed_markers,
                "unread_frames": tally.unread_frames,
                "prompt_tokens": tally.prompt_tokens,
                "tokens": tally.tokens,
                "seconds": round(self.seconds, 3),
                "pages_per_second": round(tally.pages_per_s(), 4) if tally.done else 0.0,
                "flavor": self.flavor,
                "dollars_per_hour": price,
                "dollars": rounded_dollars(None if price is None else self.seconds * price / 3600),
                "dollars_per_thousand_pages": rounded_dollars(tally.dollars_per_thousand_pages()),
            }
        )


def rounded_dollars(dollars: float | None) -> float | None:
    """Return an amount for programs; None stays None."""
    return None if dollars is None else round(dollars, 4)


# ---- startup ---------------------------------------------------------------------------------------------------------
# What a starting vLLM says of itself: from lines of its log to the phase it is in, and to why a start has failed.
#
# A start takes minutes in which nobody answers; only the log tells a download from a hang. A start that failed leaves a
# traceback of hundreds of lines, of which one tells what to do.


# A phase of the start → what stands in the log when it begins or goes on.
PHASES = {
    "download": r"Fetching \d+ files|Downloading|\.safetensors: +\d+%|Time spent downloading weights",
    "weights": r"Starting to load model|Loading (safetensors|pt) checkpoint shards|Loading weights took",
    "compile": r"torch\.compile|Dynamo bytecode transform|Compiling a graph|autotun|JIT compil|ninja: ",
    "graphs": r"Capturing CUDA graph|Graph capturing",
    "ready": r"Application startup complete|Uvicorn running on",
}
# What a server writes over and over while nothing moves, and what our own questions make it write.
NO_PROGRESS = re.compile(
    r"Waiting for \d+ local|No available shared memory broadcast block|\"GET /(v1/models|health|metrics|version)"
)


@dataclass(frozen=True)
class Cause:
    """Why a start failed: `pattern` is how the log says it, `what` how people do, `remedy` the next step."""

    name: str
    pattern: str
    what: str
    remedy: str


# In order: what stands further up explains what stands further down, where a log has both.
CAUSES = (
    Cause(
        "bad pair",
        r"cannot import name 'PixtralRotaryEmbedding'|PixtralRotaryEmbedding",
        "this vLLM and this transformers don't fit together: the Pixtral models can't be imported",
        "use the image {image}, or install transformers 5.16.1",
    ),
    Cause(
        "bad pair",
        r"cannot import name '\w+' from '(transformers|huggingface_hub|tokenizers)[.']"
        r"|ImportError: .*(transformers|huggingface[-_]hub|tokenizers)[><=!]=",
        "this vLLM and the installed transformers (or what it needs) don't fit together",
        "use the image {image}, whose versions were made for each other",
    ),
    Cause(
        "bad pair",
        r"undefined symbol|_C\.abi3\.so|ImportError: lib\w+\.so[.\d]*: cannot open shared object file",
        "this vLLM and this torch or CUDA don't fit together",
        "use the image {image}, or install vLLM anew in an environment of its own",
    ),
    Cause(
        "driver",
        r"NVIDIA driver on your system is too old|CUDA driver version is insufficient"
        r"|forward compatibility was attempted|unsupported display driver / cuda driver combination",
        "the NVIDIA driver of this machine is too old for this build of vLLM (CUDA 12.6 is the least)",
        "update the driver, or use a machine with a newer one (`nvidia-smi` shows both versions)",
    ),
    Cause(
        "no GPU",
        r"Found no NVIDIA driver|No CUDA GPUs are available|Failed to infer device type|no CUDA-capable device"
        r"|libcuda\.so\.1: cannot open",
        "vLLM finds no GPU on this machine",
        "use a machine that has one (`nvidia-smi` must list it), or --server URL",
    ),
    Cause(
        "nvcc",
        r"Could not find nvcc|nvcc: not found|No such file or directory: 'nvcc'|nvcc fatal|Ninja build failed"
        r"|ninja: build stopped|No such file or directory: 'ninja'|FlashInfer requires",
        "FlashInfer compiles its kernels at the start, for which this machine lacks a fitting nvcc",
        "set VLLM_USE_FLASHINFER_SAMPLER=0 (we do where it is not set), or use the image {image}",
    ),
    Cause(
        "memory taken",
        r"Free memory on device .*is less than desired GPU memory utilization",
        "another process holds memory of the GPU",
        "end it (`nvidia-smi` lists it), or give a lower --gpu-memory-utilization",
    ),
    Cause(
        "KV cache",
        r"KV cache is needed, which is larger than|No available memory for the cache blocks"
        r"|larger than the maximum number of tokens that can be stored in KV cache",
        "the memory that is left on the GPU does not hold one page of --max-model-len",
        "give a smaller --max-model-len, a higher --gpu-memory-utilization, or a GPU with more memory",
    ),
    Cause(
        "CUDA memory",
        r"CUDA out of memory|CUDA error: out of memory|torch\.(cuda\.)?OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED",
        "the GPU's memory is full",
        "give -- --max-num-seqs 64, a lower --gpu-memory-utilization, or a GPU with more memory",
    ),
    Cause(
        "architecture",
        r"are not supported for now|does not recognize this architecture|failed to be inspected"
        r"|has no vLLM implementation|Unrecognized (model|configuration class)",
        "this vLLM does not know the model's architecture: it is too old for it",
        "use the image {image}",
    ),
    Cause(
        "gated",
        r"gated repo|GatedRepoError|401 Client Error|403 Client Error|403 Forbidden",
        "the Hub refuses the model's weights to us: they are gated or private",
        "ask for access on the model's page, and set HF_TOKEN (`-s HF_TOKEN` on a hosted GPU)",
    ),
    Cause(
        "disk",
        r"No space left on device|os error 28|Disk quota exceeded|Not enough free disk space",
        "the disk is full",
        "free some space, or point HF_HOME to a larger disk",
    ),
    Cause(
        "weights",
        r"is not a valid model identifier|RepositoryNotFoundError|404 Client Error|RevisionNotFoundError"
        r"|Cannot find any model weights|LocalEntryNotFoundError|EntryNotFoundError|is not a local folder"
        r"|Can't load the configuration of|does not appear to have a file named config\.json|Invalid repository ID",
        "the model or its weights can't be found",
        "check --model and --model-revision, and that the Hub can be reached (HF_HUB_OFFLINE, HF_ENDPOINT, HF_TOKEN)",
    ),
    Cause(
        "port",
        r"[Aa]ddress already in use|\[Errno 98\]|EADDRINUSE",
        "the port is taken",
        "leave --port out, then a free one is taken; or use what runs there with --server",
    ),
    Cause(
        "argument",
        r"error: (unrecognized arguments|argument |ambiguous option|the following arguments are required)"
        r"|invalid choice: |unexpected keyword argument|greater than the derived max_model_len",
        "vLLM refuses one of its arguments",
        "see what stands after -- (and --max-model-len) and `vllm serve --help=all`",
    ),
    Cause(
        "shared memory",
        r"Bus error|out of shared memory|insufficient shared memory",
        "/dev/shm is too small",  # noqa: S108 - a message
        "give the container more (`docker run --ipc=host`, or --shm-size 8g)",
    ),
    Cause(
        "host memory",
        r"MemoryError|Cannot allocate memory|std::bad_alloc|oom-kill|Killed$",
        "the machine's own memory is full",
        "use a machine with more of it",
    ),
)


def phase_of(line: str) -> str | None:
    """Return the phase of the start that this line of the log tells of."""
    return next((phase for phase, pattern in PHASES.items() if re.search(pattern, line)), None)


def is_progress(line: str) -> bool:
    """Whether the line shows that something moves."""
    return bool(line.strip()) and not NO_PROGRESS.search(line)


def find_cause(log: str) -> Cause | None:
    """Return the reason that a log gives for a start that failed; None where none of the known ones is in it."""
    return next((cause for cause in CAUSES if re.search(cause.pattern, log, re.MULTILINE)), None)


def explanation(log: str, image: str, *, killed: bool = False) -> str:
    """Say why a start failed and what to do, as the log and the image to use tell; empty where nothing is known.

    `killed`: it ended by SIGKILL, which the kernel sends where memory has run out.
    """
    cause = find_cause(log)
    if cause:
        line = next(line for line in log.splitlines() if re.search(cause.pattern, line))
        remedy = cause.remedy.format(image=image or "that the model's page names")
        return f"{cause.what} ({_without_head(line)}): {remedy}"
    return "it was killed, most likely as the machine's memory is full: use one with more of it" if killed else ""


def _without_head(line: str) -> str:
    """Return the message of a log line, without process, time and place, at most 300 characters of it."""
    return re.sub(r"^(\([^)]*pid=\d+\) )*((INFO|WARNING|ERROR) [-\d]+ [:\d]+ (\[[^\]]+\])? ?)?", "", line).strip()[:300]


# ---- spawn -----------------------------------------------------------------------------------------------------------
# A server process of ours: in a process group of its own, its log in a file, and never alive after us.
#
# Beside the server, in its group and started before it, waits a shell that reads from a pipe which only we hold. When
# we die in whatever way, SIGKILL included, the pipe ends and the shell ends the group: the server and all it started.


LOG_LINES_SHOWN = 20
LOG_BYTES_READ = 512 * 1024
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where vLLM's processes share pages of memory
# Variables by which `uv run` points Python at our environment: the server has its own.
OURS_ALONE = ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "UV", "UV_RUN_RECURSION_DEPTH", "VIRTUAL_ENV_PROMPT")
GUARD = (
    "trap '' TERM INT HUP QUIT PIPE; read -r word; [ \"$word\" = release ] && exit 0; "
    'rm -rf -- "$@"; kill -TERM 0; sleep 8; kill -KILL 0'
)


class Spawned:
    """A server process of ours. `image` is the one to recommend where this machine's vLLM does not fit.

    `sweep` is what the guard removes when we die without having done so.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        image: str = "",
        sweep: Sequence[Path] = (),
    ) -> None:
        self.log = log
        self._image = image
        self._shared: set[Path] = set()
        say(f"starting {shlex.join(command)}\n  its log: {log}")
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", GUARD, "guard", *map(str, sweep)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )
        self.group = self._guard.pid
        try:
            with log.open("wb") as output:
                self._process = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    process_group=self.group,
                )
        except OSError as error:
            self._end_guard()
            raise EngineError(f"can't start {command[0]!r}: {error}; check --serve-command") from error

    def how_it_ended(self) -> str | None:
        """Say how and why the process has ended, with the end of its log; None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        why = explanation(self.log_text(), self._image, killed=code == -signal.SIGKILL)
        return f"the server ended by itself ({how}){': ' if why else ''}{why}. {self.log_words()}"

    def log_text(self) -> str:
        """Return the end of the log."""
        with self.log.open("rb") as log:
            log.seek(max(0, self.log.stat().st_size - LOG_BYTES_READ))
            return log.read().decode(errors="replace")

    def log_words(self) -> str:
        """Name the log and show its last lines."""
        lines = self.log_text().splitlines()[-LOG_LINES_SHOWN:]
        tail = "\n".join(f"  | {line}" for line in lines) or "  (it wrote nothing)"
        return f"The end of its log, {self.log}:\n{tail}"

    def note_shared_memory(self) -> None:
        """Remember what the group has in shared memory, to remove it should the group be killed."""
        self._shared |= shared_files(group_members(self.group))

    def end(self, patience_s: float = 10.0) -> None:
        """End the process and all that it started: asked first, then killed; nothing of it stays in shared memory."""
        self._send(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience_s)
            give_up_at = time.monotonic() + 3.0  # what tidies up after the server gets its time too
            while time.monotonic() < give_up_at and set(group_members(self.group)) - {self.group}:
                time.sleep(0.05)
        self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)
        self._end_guard()

    def kill(self) -> None:
        """Kill the process group at once, without waiting."""
        self.note_shared_memory()
        self._send(signal.SIGKILL)
        for file in self._shared:
            with contextlib.suppress(OSError):
                file.unlink()

    def release(self) -> None:
        """Let the server live on without us."""
        assert self._guard.stdin is not None
        self._guard.stdin.write(b"release\n")
        self._end_guard()
        self._process.returncode = 0  # ours no more: Popen would warn of a child that still runs

    def _send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.group, number)

    def _end_guard(self) -> None:
        assert self._guard.stdin is not None
        with contextlib.suppress(OSError):
            self._guard.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._guard.wait(1.0)
            return
        self._guard.kill()
        self._guard.wait()


class LogReader:
    """Reads a log that grows, line by line; what a progress bar writes over counts as lines too."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0

    def new_lines(self) -> Iterator[str]:
        """Give what was written since the last call."""
        with self._path.open("rb") as log:
            log.seek(self._read)
            new = log.read(LOG_BYTES_READ)
        self._read += len(new)
        yield from new.decode(errors="replace").replace("\r", "\n").splitlines()


def group_members(group: int) -> list[int]:
    """Return the processes of a group that run; none where there is no /proc."""
    members: list[int] = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, its_group = entry.read_text(errors="replace").rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                members.append(int(entry.parent.name))
    return members


def shared_files(processes: Sequence[int]) -> set[Path]:
    """Return the files in shared memory, of the user's own, that these processes have mapped."""
    found: set[Path] = set()
    for process in processes:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{process}/maps").read_text(errors="replace").splitlines():
                name = line.partition("/")[2]
                if name.startswith("dev/shm/") and not name.endswith(" (deleted)"):
                    found.add(Path(f"/{name}"))
    return {file for file in found if file.parent == SHARED_MEMORY and _is_ours(file)}


def _is_ours(file: Path) -> bool:
    try:
        return file.stat().st_uid == os.geteuid()
    except OSError:
        return False


def server_environment(key: str, program: str) -> dict[str, str]:
    """Return the environment of a spawned server: ours, without what `uv run` set for us, and the key.

    `program` is what will be started: where it does not lie among our own programs, those go from PATH, so that the
    server finds its Python and not ours.
    """
    environment = {name: value for name, value in os.environ.items() if name not in OURS_ALONE}
    ours = Path(sys.prefix, "bin")
    found = shutil.which(program)
    if sys.prefix != sys.base_prefix and found and Path(found).parent != ours:
        kept = [part for part in environment.get("PATH", "").split(os.pathsep) if Path(part) != ours]
        environment["PATH"] = os.pathsep.join(kept)
    # FlashInfer's sampler is compiled by nvcc, which the plain image lacks: engine start would crash.
    environment.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    return {**environment, "VLLM_API_KEY": key, "LLAMA_API_KEY": key}


# ---- transport -------------------------------------------------------------------------------------------------------
# How a page travels to the engine: as a data URL, or to a server of our own as a file in shared memory.
#
# A file costs neither compression nor base64 nor megabytes of JSON, on either side. The pixels are the same on every
# path.


FOLDER_PREFIX = "lighton-ocr-pages-"
SHARE_USED = 0.5  # of what is free there when we begin
LEAST_BYTES = 64 * 1024**2  # with less there is no room for the pages in flight


def _nothing() -> None:
    """Release nothing."""


@dataclass(frozen=True)
class Address:
    """The URL under which the engine finds a page; `release` gives back what it takes, once the page is answered."""

    url: bytes
    release: Callable[[], None] = field(default=_nothing, compare=False)


class Transport(Protocol):
    """Makes pages reachable for the engine. Called from many threads."""

    def address(self, page: Page) -> Address:
        """Return the address of a page."""


class DataUrls:
    """Pages travel in the request itself."""

    def address(self, page: Page) -> Address:
        """Return a data URL."""
        return Address(data_url(page).encode())


IN_REQUEST = DataUrls()


class SharedFiles:
    """Pages travel as files in shared memory, `most_bytes` at a time; what does not fit, as data URLs."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self.folder = folder
        self._most_bytes = most_bytes
        self._taken = 0
        self._written = 0
        self._lock = threading.Lock()

    def address(self, page: Page) -> Address:
        """Write the page to a file and return its address; a data URL where there is no room."""
        suffix = "bmp" if page.original is None else "jpg"
        size = len(page.original or b"") or page.image.width * page.image.height * len(page.image.getbands()) + 4096
        with self._lock:
            if self._taken + size > self._most_bytes:
                return IN_REQUEST.address(page)
            self._taken += size
            self._written += 1
            path = self.folder / f"{self._written}.{suffix}"
        try:
            if page.original is None:
                page.image.save(path, "BMP")
            else:
                path.write_bytes(page.original)
        except OSError:
            self._release(path, size)
            return IN_REQUEST.address(page)
        return Address(f"file://{path}".encode(), lambda: self._release(path, size))

    def _release(self, path: Path, size: int) -> None:
        path.unlink(missing_ok=True)
        with self._lock:
            self._taken -= size


@contextlib.contextmanager
def shared_folder(place: Path = SHARED_MEMORY) -> Iterator[SharedFiles | None]:
    """Make a private folder in shared memory and remove it at the end; None where there is no room for one.

    Folders that killed runs left behind are removed first: their name holds the process they belonged to.
    """
    files = _make_folder(place)
    try:
        yield files
    finally:
        if files:
            shutil.rmtree(files.folder, ignore_errors=True)


def _make_folder(place: Path) -> SharedFiles | None:
    try:
        remove_orphans(place)
        free = shutil.disk_usage(place).free
        if free * SHARE_USED < LEAST_BYTES:
            say(f"{place} has {free // 1024**2} MB free: pages travel in the requests (--shm-size sets it)")
            return None
        folder = Path(tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{os.getpid()}-", dir=place))
    except OSError:
        return None
    return SharedFiles(folder, int(free * SHARE_USED))


def remove_orphans(place: Path) -> None:
    """Remove the folders of runs that are no more."""
    for folder in place.glob(f"{FOLDER_PREFIX}*-*"):
        owner = folder.name.removeprefix(FOLDER_PREFIX).partition("-")[0]
        if owner.isdecimal() and not Path(f"/proc/{owner}").exists() and folder.stat().st_uid == os.getuid():
            shutil.rmtree(folder, ignore_errors=True)


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
    """Why a request failed: `kind` is `permanent`, `transient` or `systemic`; `retry_after_s` is the server's wish.

    `trouble` is what it says of a server: `refused` (it has too much to do), `timeout`, or `failed`.
    """

    kind: str
    reason: str
    retry_after_s: float = 0.0
    trouble: str = "failed"


@dataclass(eq=False)
class Visit:
    """A page on its way through the server. `life` is that of the server it was last asked of, `strikes` its deaths."""

    row: int
    strikes: int = 0
    life: int = 0
    quarantined: bool = False

    def reason(self) -> str:
        """Say why a quarantined page has no text."""
        return f"quarantined: the server died {self.strikes} times while it read this page, the last time with it alone"


class Guard(Protocol):
    """Who knows whether the server lives, and whose turn it is."""

    def visit(self, row: int) -> AbstractContextManager[Visit]:
        """Keep account of a page until it has its result."""

    async def turn(self, visit: Visit) -> None:
        """Wait until the page may be asked; look at `visit.quarantined` then."""

    def answered(self, latency_s: float) -> None:
        """Note that a page was answered."""

    async def is_lost(self, visit: Visit) -> bool:
        """Whether the server that the page was last asked of is gone."""

    def watch(self) -> Coroutine[Any, Any, None]:
        """Return never, or raise when the engine is gone for good."""


class Body:
    """The body of one request, given away piece by piece as it is sent: a page in flight holds no memory.

    `release` gives back what the page takes elsewhere, once it is answered.
    """

    def __init__(self, pieces: list[bytes], row: int, release: Callable[[], None]) -> None:
        self.row = row
        self.release = release
        self.num_bytes = sum(map(len, pieces))
        self._pieces = pieces[::-1]

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while self._pieces:
            piece = self._pieces.pop()
            for start in range(0, len(piece), SEND_BYTES):
                yield piece[start : start + SEND_BYTES]

    def whole(self) -> bytes:
        """Return all of it at once."""
        return b"".join(reversed(self._pieces))


def request_body(
    page: Page,
    row: int,
    question: Question,
    model: str,
    transport: Transport = IN_REQUEST,
    attempt: Attempt | None = None,
    more: Mapping[str, Any] | None = None,
) -> Body:
    """Return the JSON body of the chat completion that asks `question` about `page`.

    `attempt` says how it is asked where that is not the page's own question; `more` are fields of the request that this
    server knows.
    """
    address = transport.address(page)
    image = {"type": "image_url", "image_url": {"url": URL_PLACE}}
    request: dict[str, Any] = {
        "model": model,
        "messages": page_messages(question, image),
        **page_sampling(question, row, attempt),
        **(more or {}),
    }
    if question.chat_template_kwargs:
        request["chat_template_kwargs"] = dict(question.chat_template_kwargs)
    head, tail = json.dumps(request).split(json.dumps(URL_PLACE)[1:-1])
    return Body([head.encode(), address.url, tail.encode()], row, address.release)


class Asker:
    """Asks one endpoint about pages. `retry_for_s`: how long after its first failure a page is asked again."""

    def __init__(
        self,
        client: AsyncOpenAI,
        model: str,
        question: Question,
        *,
        retry_for_s: float,
        on_retry: Callable[[Failure], None],
        guard: Guard,
        transport: Transport = IN_REQUEST,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        self._more = more
        self._transport = transport
        self.watch = guard.watch
        self._guard = guard
        self._client = client
        self._model = model
        self._question = question
        self._retry_for_s = retry_for_s
        self._on_retry = on_retry
        self._last_answer = float("-inf")
        self._refusals_before_any_answer = 0

    def encode(self, page: Page, row: int, attempt: Attempt | None = None) -> Body:
        """Make the request for a page: work for a thread."""
        return request_body(page, row, self._question, self._model, self._transport, attempt, self._more)

    async def ask(self, body: Body, again: Callable[[], Awaitable[Body | Refusal]]) -> PageResult:
        """Ask until there is an answer, the page is refused, or its time is up; `again` makes the body anew.

        Raises `EngineError` where the fault is not the page's.
        """
        with self._guard.visit(body.row) as visit:
            return await self._ask(visit, body, again)

    async def _ask(self, visit: Visit, body: Body, again: Callable[[], Awaitable[Body | Refusal]]) -> PageResult:
        attempts = life = 0
        give_up_at = failed_at = float("inf")
        request: Body | Refusal = body
        while not isinstance(request, Refusal):
            await self._guard.turn(visit)
            if visit.quarantined:
                return PageResult(None, "error", error=visit.reason(), attempts=attempts)
            if life != visit.life:  # another server, another chance
                life, give_up_at, failed_at = visit.life, float("inf"), float("inf")
            attempts += 1
            started = time.monotonic()
            try:
                answer = await self._send(request)
                result = answered(answer, attempts, time.monotonic() - started)
            except Exception as error:  # noqa: BLE001 - the page boundary: sorted, counted, never swallowed
                failure = sort_error(error)
            else:
                self._last_answer = time.monotonic()
                self._guard.answered(result.latency_s)
                return result
            if failure.kind == "transient" and await self._guard.is_lost(visit):
                self._on_retry(failure)
                await self._guard.turn(visit)  # the page is made anew when it can be sent, not for the wait
                request = await again()
                continue
            now = time.monotonic()
            give_up_at = min(give_up_at, now + self._retry_for_s)
            if failure.kind == "transient" and now < give_up_at:
                failed_at = now
                self._on_retry(failure)
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
        try:
            return await self._client.post(
                "/chat/completions", cast_to=ChatCompletion, content=body, options={"headers": headers}
            )
        finally:
            body.release()

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
        confidence=_confidence_in(choice),
    )


def _confidence_in(choice: Any) -> Confidence | None:
    """Read the log probabilities, where the server was asked for them and gives them."""
    content = getattr(getattr(choice, "logprobs", None), "content", None)
    return page_confidence([token.logprob for token in content]) if content else None


def sort_error(error: Exception) -> Failure:
    """Sort what a request raised."""
    import openai

    if isinstance(error, openai.APITimeoutError):
        return Failure("transient", "the request timed out (--request-timeout)", trouble="timeout")
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
            trouble = {408: "timeout", 429: "refused", 503: "refused"}.get(error.status_code, "failed")
            return Failure("transient", reason, retry_after_s(error.response.headers.get("retry-after")), trouble)
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


# ---- deadline --------------------------------------------------------------------------------------------------------
# The end of a job's time: where the pages will not be done by then, that is said once, and early.


CHECK_EVERY_S = 0.5
JUDGE_AFTER_S = 60.0  # or after a tenth of the job's time: the first pages of a run are its slowest


async def watch_deadline(tally: Tally, ends_at: float | None) -> None:
    """Watch whether the run ends before `ends_at` (by `time.monotonic`), and say so once where it does not."""
    if ends_at is None:
        return
    begun = time.monotonic()
    judge_at = begun + min(JUDGE_AFTER_S, (ends_at - begun) / 10)
    while True:
        await asyncio.sleep(CHECK_EVERY_S)
        now = time.monotonic()
        words = overrun(tally, ends_at - now) if now >= judge_at else None
        if words:
            say(words)
            return


def overrun(tally: Tally, left_s: float) -> str | None:
    """Say that the pages will not be done in the time that is left; None where they will, or nobody knows."""
    needed_s = tally.eta_s()
    if needed_s is None or needed_s <= left_s:
        return None
    pages = round((needed_s - max(0.0, left_s)) * tally.pages_per_s())
    return (
        f"this job is stopped in {duration(max(0.0, left_s))}, but at {tally.pages_per_s():.2f} pages/s it needs "
        f"{duration(needed_s)}: about {pages} pages will be left. Closed blocks are kept and the same command goes on; "
        "more jobs (--jobs) or a longer --timeout end in one go"
    )


# ---- block_files -----------------------------------------------------------------------------------------------------
# What the file of a block says of itself: the settings it was made with, and the values in a column of it.


SETTINGS_KEY = b"lighton-ocr"  # where a block's parquet metadata holds the settings it was made with


def settings_in(file: Any) -> bytes | None:
    """Return what a block says of the settings it was made with; None if it says nothing."""
    import pyarrow.parquet as pq

    with whole_block(file):
        metadata: dict[bytes, bytes] = pq.read_schema(file).metadata or {}
    return metadata.get(SETTINGS_KEY)


@contextmanager
def whole_block(file: Any) -> Iterator[None]:
    """Say which file it is that is no block, cut short or from elsewhere."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowInvalid, KeyError) as error:
        name = getattr(file, "path", file)
        raise UsageError(f"{name} is no block of this output ({error}); remove it, and run again") from error


def count_values(source: Any, column: str) -> Counter[str]:
    """Count the values in a column of strings; of row groups in which all are the same, the footer alone is read."""
    import pyarrow.parquet as pq

    counts: Counter[str] = Counter()
    with whole_block(source), pq.ParquetFile(source) as file:
        for group in range(file.metadata.num_row_groups):
            value = _only_value(file.metadata.row_group(group), column)
            if value is None:
                counts.update(file.read_row_group(group, [column])[column].to_pylist())
            else:
                counts[value] += file.metadata.row_group(group).num_rows
    return counts


def _only_value(group: Any, column: str) -> str | None:
    """Return the value that all rows of a row group have in a column, where the statistics in the footer say so."""
    places = (group.column(place) for place in range(group.num_columns - 1, -1, -1))  # ours stand last
    statistics = next((place.statistics for place in places if place.path_in_schema == column), None)
    if statistics is None or not statistics.has_min_max or statistics.null_count or statistics.min != statistics.max:
        return None
    return str(statistics.min)


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


# ---- blocks ----------------------------------------------------------------------------------------------------------
# Blocks of rows: their names, how one is written, and what is there already.
#
# A split is cut into contiguous blocks of `block_rows` rows. A block is one parquet file, written once and whole, under
# a name that is a function of its target and number: the files that exist are the state from which a run resumes.


SETTINGS_READ = 64  # blocks whose settings are looked into when a run goes on
DEFAULT_CONFIG = "default"
DEFAULT_FOLDER = "data"
INFO_COLUMN = "inference_info"
ROW_COLUMN = "row_index"
COUNT_THREADS = 16  # blocks looked into at once: those of a Hub dataset are far away


@dataclass(frozen=True)
class Target:
    """Which split of which configuration of an output its blocks are."""

    split: str
    config: str = DEFAULT_CONFIG

    def __str__(self) -> str:
        return self.split if self.config == DEFAULT_CONFIG else f"{self.config}/{self.split}"

    @property
    def folder(self) -> str:
        """The folder of the configuration's blocks, relative to the output."""
        return DEFAULT_FOLDER if self.config == DEFAULT_CONFIG else self.config

    @property
    def pattern(self) -> str:
        """What the names of its blocks, and no others, match: as a card says it."""
        return f"{self.folder}/{self.split}-*.parquet"

    def block_name(self, number: int) -> str:
        """Return the name of a block's file, relative to the output."""
        return f"{self.folder}/{self.split}-{number:06d}.parquet"

    def block_number(self, name: str) -> int | None:
        """Return the number of the block in a file, named relative to the output; None if it is no block of ours."""
        match = re.fullmatch(rf"{re.escape(f'{self.folder}/{self.split}')}-(\d{{6}})\.parquet", name)
        return int(match[1]) if match else None


@dataclass(frozen=True)
class BlockPlan:
    """How a split of `num_rows` wanted rows is cut; one without rows is one block without rows."""

    target: Target
    num_rows: int
    block_rows: int

    def __len__(self) -> int:
        return max(1, -(-self.num_rows // self.block_rows))

    def positions(self, number: int) -> range:
        """Which of the wanted rows block `number` holds."""
        return range(number * self.block_rows, min(self.num_rows, (number + 1) * self.block_rows))


@dataclass(frozen=True)
class Shard:
    """One of several runs that share an output: its blocks are those whose number is `index` modulo `count`."""

    index: int = 0
    count: int = 1

    def holds(self, number: int) -> bool:
        """Whether block `number` is this shard's."""
        return number % self.count == self.index


WHOLE = Shard()


@dataclass(frozen=True)
class Whole:
    """A split of which all blocks are there, as its readers have to find it.

    `rows` are those that were counted; `card` makes the card out of the earlier one, and of when the last block was
    written where that has to stand there; `insists` says that it has to be written anew; `text_columns` are the small
    ones, of which a row is compared.
    """

    plan: BlockPlan
    rows: int
    schema: pa.Schema
    card: Callable[[str, str], str]
    text_columns: Sequence[str]
    insists: bool = False


class Blocks(Protocol):
    """The blocks of one split of an output, wherever they lie."""

    def closed(self) -> set[int]:
        """Return the numbers of the blocks that are there."""

    def where(self, number: int) -> str:
        """Say where block `number` is, or will be."""

    def read(self, number: int, columns: list[str]) -> pa.Table:
        """Read some columns of a block."""

    def count(self, number: int, column: str) -> Counter[str]:
        """Count the values in a column of a block."""

    def stored_settings(self) -> list[bytes | None]:
        """Return what blocks that are there say of the settings they were made with; None if one says nothing."""

    def unpublished(self) -> bool:
        """Whether closed blocks wait here for being published."""

    def remove_all(self) -> None:
        """Remove the blocks of this split, and nothing else."""

    def get_ready(self, *, to_write: bool) -> None:
        """Find out whether blocks can be written, where that is asked; go on with what an earlier run left behind."""

    def locked(self) -> AbstractContextManager[None]:
        """Keep a second run out of what this one writes, and leave nothing half done behind."""

    def write(self, number: int, table: pa.Table) -> None:
        """Write block `number`, whole or not at all."""

    def publish(self, whole: Whole) -> str | None:
        """Make a whole split visible to its readers; return where it is, or None where it was visible all along."""

    def collected(self) -> str:
        """Say where the blocks are that are there already."""


class BlockFolder:
    """The blocks of one split in a local folder; of a shard, other shards may be writing there too."""

    def __init__(self, root: Path, target: Target, shard: Shard = WHOLE) -> None:
        self.root = root
        self.target = target
        self._shard = shard
        self._folder = root / target.folder

    def closed(self) -> set[int]:
        """Return the numbers of the blocks that are there."""
        if not self._folder.is_dir():
            return set()
        numbers = (self._number(file.name) for file in self._folder.iterdir())
        return {number for number in numbers if number is not None}

    def _number(self, file_name: str) -> int | None:
        return self.target.block_number(f"{self.target.folder}/{file_name}")

    def path(self, number: int) -> Path:
        """Where block `number` is, or will be."""
        return self.root / self.target.block_name(number)

    def where(self, number: int) -> str:
        """Say where block `number` is, or will be."""
        return str(self.path(number))

    def read(self, number: int, columns: list[str]) -> pa.Table:
        """Read some columns of a block."""
        import pyarrow.parquet as pq

        return pq.read_table(self.path(number), columns=columns)

    def count(self, number: int, column: str) -> Counter[str]:
        """Count the values in a column of a block."""
        return count_values(self.path(number), column)

    def stored_settings(self) -> list[bytes | None]:
        """Return what blocks that are there say of the settings they were made with; None if one says nothing.

        Of very many, the first, the last and some between are looked into.
        """
        closed = sorted(self.closed())
        looked_into = {*closed[:: max(1, len(closed) // SETTINGS_READ)], *closed[-1:]}
        return list(dict.fromkeys(settings_in(self.path(number)) for number in sorted(looked_into)))

    def unpublished(self) -> bool:
        """Blocks of a folder have nowhere to go."""
        return False

    def remove_all(self) -> None:
        """Remove the blocks of this split, and nothing else."""
        for number in self.closed():
            self.path(number).unlink()

    def get_ready(self, *, to_write: bool) -> None:
        """Nothing is to be done: the lock has shown that blocks can be written."""

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep a second run out of this split; sweep up what a killed one left half-written."""
        split = self.target.split
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            lock = (self._folder / f".{split}-{self._shard.index}-of-{self._shard.count}.lock").open("w")
        except OSError as error:
            raise UsageError(f"output {str(self.root)!r} can't be written: {error.strerror}; name another") from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(
                    f"another run is writing split {split!r} of {self.root}; wait for it, or choose another output"
                ) from None
            for leftover in self._folder.glob(f".{split}-*.tmp"):
                number = self._number(leftover.name[1:].removesuffix(".tmp"))
                if number is not None and self._shard.holds(number):
                    leftover.unlink(missing_ok=True)
            yield

    def publish(self, whole: Whole) -> str | None:
        """Blocks of a folder were visible all along."""
        return None

    def collected(self) -> str:
        """Say where the blocks are."""
        return str(self.root)

    def write(self, number: int, table: pa.Table) -> None:
        """Write block `number`, whole or not at all."""
        import pyarrow.parquet as pq

        path = self.path(number)
        half = path.with_name(f".{path.name}.tmp")
        # Content-defined chunking lets the Hub store unchanged pictures once.
        with pq.ParquetWriter(half, table.schema, use_content_defined_chunking=True, write_page_index=True) as writer:
            if table.num_rows:  # `datasets` 5.2 can't read a row group without rows
                writer.write_table(table, row_group_size=100)  # what `datasets` takes for images
        with half.open("rb") as written:
            os.fsync(written.fileno())
        half.replace(path)


def count_statuses(blocks: Blocks, numbers: Iterable[int], output_column: str) -> Counter[str]:
    """Count the statuses of all rows in some closed blocks."""
    counts: Counter[str] = Counter()
    for block_counts in statuses_of(blocks, numbers, output_column).values():
        counts.update(block_counts)
    return counts


def statuses_of(blocks: Blocks, numbers: Iterable[int], output_column: str) -> dict[int, Counter[str]]:
    """Count the statuses in each of some closed blocks."""
    column = f"{output_column}_status"
    wanted = list(numbers)
    with ThreadPoolExecutor(COUNT_THREADS) as pool:
        return dict(zip(wanted, pool.map(lambda number: blocks.count(number, column), wanted), strict=True))


# ---- columns ---------------------------------------------------------------------------------------------------------
# The columns of a block: the input's own as they are, and those of the results beside them.
#
# Their names, their types, and how results become rows and rows become results again.


@dataclass(frozen=True)
class Extras:
    """Which columns are written beside those that always are."""

    blocks: bool = False
    raw: bool = False
    confidence: bool = False

    def names(self, output_column: str) -> tuple[str, ...]:
        """Name them."""
        wanted = {"blocks": self.blocks, "raw": self.raw, "confidence": self.confidence}
        return tuple(f"{output_column}_{name}" for name, is_wanted in wanted.items() if is_wanted)


NO_EXTRAS = Extras()


def new_columns(output_column: str, extras: Extras = NO_EXTRAS) -> tuple[str, ...]:
    """Name the columns that a run adds, but for `inference_info`, which it appends to; the extra ones stand last."""
    always = (output_column, f"{output_column}_status", f"{output_column}_error", f"{output_column}_tokens")
    return (*always, *extras.names(output_column))


def check_columns(
    schema: pa.Schema, output_column: str, *, results_only: bool = False, extras: Extras = NO_EXTRAS
) -> None:
    """Raise `UsageError` where the input has a column that the run would add."""
    if results_only and ROW_COLUMN in schema.names:
        raise UsageError(f"the input already has the column {ROW_COLUMN!r}, which --results-only adds; leave that out")
    clash = [column for column in new_columns(output_column, extras) if column in schema.names]
    if clash:
        raise UsageError(
            f"the input already has the column {', '.join(map(repr, clash))}; name another one with --output-column"
        )


def output_schema(
    schema: pa.Schema,
    output_column: str,
    settings: Mapping[str, Any],
    *,
    without: str | None = None,
    extras: Extras = NO_EXTRAS,
) -> pa.Schema:
    """Return the schema of the output: the input's columns as they are, the new ones after them, features kept.

    `without` names a column to leave out, the pictures; the row's place in the input's split stands there instead.
    """
    import datasets
    import pyarrow as pa

    text, status, error, tokens = new_columns(output_column)
    kept = [column for column in schema if column.name not in {INFO_COLUMN, without}]
    if without is not None:
        kept.append(pa.field(ROW_COLUMN, pa.int64()))
    strings = [pa.field(name, pa.string()) for name in (text, status, error)]
    added = [*strings, pa.field(tokens, pa.int32()), *_extra_fields(output_column, extras)]
    added.append(pa.field(INFO_COLUMN, pa.string()))
    features = datasets.Features.from_arrow_schema(schema)
    features = datasets.Features({column.name: features[column.name] for column in kept if column.name in features})
    others = pa.schema([column for column in [*kept, *added] if column.name not in features])
    features.update(datasets.Features.from_arrow_schema(others))
    metadata = {
        **(schema.metadata or {}),
        **features.arrow_schema.metadata,
        SETTINGS_KEY: json.dumps(settings, sort_keys=True).encode(),
    }
    return pa.schema([*kept, *added], metadata=metadata)


def _extra_fields(output_column: str, extras: Extras) -> list[pa.Field]:
    import pyarrow as pa

    block = pa.struct([("label", pa.string()), ("bbox", pa.list_(pa.int32())), ("text", pa.string())])
    types = {
        "blocks": pa.list_(block),
        "raw": pa.string(),
        "confidence": pa.struct([("mean", pa.float32()), ("lowest", pa.float32())]),
    }
    prefix = f"{output_column}_"
    return [pa.field(name, types[name.removeprefix(prefix)]) for name in extras.names(output_column)]


def block_table(
    rows: pa.Table,
    results: Sequence[PageResult],
    schema: pa.Schema,
    output_column: str,
    info: Mapping[str, Any],
    *,
    addresses: Sequence[int] = (),
    kept_info: Sequence[str | None] = (),
    extras: Extras = NO_EXTRAS,
) -> pa.Table:
    """Join rows and results, one each in the same order, to the table of a block.

    `addresses` are the rows' places in the input's split, wanted where the schema has `row_index`. `kept_info` has the
    `inference_info` of the rows whose results an earlier run left; None for those of this run.
    """
    import pyarrow as pa

    if len(results) != rows.num_rows:
        raise ValueError(f"{rows.num_rows} rows, but {len(results)} results")
    earlier = rows[INFO_COLUMN].to_pylist() if INFO_COLUMN in rows.schema.names else [None] * rows.num_rows
    values: dict[str, Any] = dict(
        zip(
            new_columns(output_column),
            (
                [_storable(result.text) for result in results],
                [result.status for result in results],
                [_storable(result.error) for result in results],
                [result.tokens for result in results],
            ),
            strict=True,
        )
    )
    for name in extras.names(output_column):
        values[name] = [_extra_values(result)[name.removeprefix(f"{output_column}_")] for result in results]
    values[INFO_COLUMN] = [
        kept or appended_info(before, info)
        for before, kept in zip(earlier, kept_info or [None] * rows.num_rows, strict=True)
    ]
    if ROW_COLUMN in schema.names and ROW_COLUMN not in rows.schema.names:  # the input may have one of its own
        values[ROW_COLUMN] = [int(address) for address in addresses]
    columns = [
        pa.chunked_array([pa.array(values[column.name], type=column.type)])
        if column.name in values
        else rows[column.name]
        for column in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def _extra_values(result: PageResult) -> dict[str, Any]:
    """Return what stands in the extra columns of a row."""
    blocks, sure = result.blocks, result.confidence
    return {
        "blocks": None
        if blocks is None
        else [{"label": one.label, "bbox": list(one.bbox), "text": storable(one.text)} for one in blocks],
        "raw": _storable(result.raw),
        "confidence": sure and {"mean": sure.mean, "lowest": sure.lowest},
    }


@dataclass(frozen=True)
class KeptRow:
    """What an earlier run left of a row: its result and its `inference_info`."""

    result: PageResult
    info: str | None


def kept_rows(blocks: Blocks, number: int, output_column: str, extras: Extras = NO_EXTRAS) -> list[KeptRow | None]:
    """Return what a closed block holds of each row; None for the rows that failed."""
    table = blocks.read(number, [*new_columns(output_column, extras), INFO_COLUMN])
    return [_kept_row(row, output_column) for row in table.to_pylist()]


def _kept_row(row: Mapping[str, Any], output_column: str) -> KeptRow | None:
    text, status, error, tokens = new_columns(output_column)
    if row[status] not in SOUND:
        return None
    blocks, sure = row.get(f"{output_column}_blocks"), row.get(f"{output_column}_confidence")
    result = PageResult(
        row[text],
        row[status],
        error=row[error],
        tokens=row[tokens],
        raw=row.get(f"{output_column}_raw"),
        blocks=None if blocks is None else tuple(_block_of(block) for block in blocks),
        confidence=sure and Confidence(sure["mean"], sure["lowest"], 0),
    )
    return KeptRow(result, row[INFO_COLUMN])


def _block_of(stored: Mapping[str, Any]) -> Block:
    return Block(stored["label"], cast("tuple[int, int, int, int]", tuple(stored["bbox"])), stored["text"])


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


def _storable(text: str | None) -> str | None:
    return None if text is None else storable(text)


# ---- loops -----------------------------------------------------------------------------------------------------------
# Does a text end in a loop, as a decoder falls into one.
#
# The measure is what a sheet of paper can hold. A school page of one word, a litany, a table of zeros or a row of
# dotted leaders repeats itself honestly, but within a page's rows and letters; a decoder in a loop goes on until it is
# stopped. So a text that was cut off by max_tokens is judged by `CUT_OFF`, one that ended by itself by the stricter
# `FINISHED`. Three finders look at the end of the text; what one of them finds must be more than the bar allows:
#
# 1. exact: the suffix has a period in characters (Z-function of the reversed tail).
# 2. counting: the same with every number taken for equal, where each number of the unit stays or counts up steadily.
#    Cut-off texts only: lists that count and end by themselves are honest.
# 3. nearly: most of the five-word sequences at the end were there shortly before. Running text only, and twice the bar.
#
# A loop that begins so late that it stays under the bar is missed; its page is `truncated`, and asked again all the
# same. Measured on `tests/loops/`: precision and recall stand in `tests/test_loops.py`.


SEARCHED_CHARACTERS = 32_000  # a period is looked for in so much of the end, and followed back from there
NGRAM = 5
STALE_SHARE = 0.85  # of the five-word sequences in a run that repeats nearly
STALE_WITHIN = 1_500  # words
STEADY_SHARE = 0.9  # of a counter's steps: dates and page numbers wrap
EXCERPT_CHARACTERS = 200
SHORT_LINE_LETTERS = 50
WIDE_LETTER = 3  # one Chinese or Japanese character says as much as so many letters

HTML_TAG = re.compile(r"</?[a-zA-Z][^<>]{0,200}>")
LATEX_WORD = re.compile(r"\\(?:begin|end)\{[a-z]+\*?\}(?:\{[^{}]{0,40}\})?|\\[a-zA-Z]+")
LETTERS_ONLY = re.compile(r"[^\W\d_]+")
WIDE_LETTERS = re.compile(r"[\u2e80-\ufaff]")
CELL_MARK = re.compile(r"\||</?t[dhr]\b|&|\t")
NUMBER_OR_CHARACTER = re.compile(r"[0-9]{1,9}|[^0-9]", re.DOTALL)
WORD = re.compile(r"[\u2e80-\ufaff]|[^\W\d_\u2e80-\ufaff]+|\d+|_+|[^\w\s]+|\n")
CLOSER = re.compile(r"(?:</[a-zA-Z]{1,12}>|\\end\{[a-z]{1,16}\*?\}|\\[\])]|[\s$`|.}])\Z")
LONGEST_CLOSER = 24


@dataclass(frozen=True)
class Loop:
    """Where a text begins to loop, the unit's length in characters, how often it is there, and its first characters."""

    start: int
    period: int
    repeats: int
    unit: str


@dataclass(frozen=True)
class Bar:
    """The repetition that a page can hold: what reaches this is a loop.

    Running text has to reach `letters`, and `lines` too where its lines are short; cells `table_letters`, or, like all
    that is mostly no letters, `rows` where there are rows, else both `repeats` and `characters` in the one row.
    """

    letters: int
    lines: int
    table_letters: int
    rows: int
    repeats: int
    characters: int

    def times(self, factor: int) -> Bar:
        """Return the bar for weaker evidence."""
        return Bar(
            factor * self.letters,
            factor * self.lines,
            factor * self.table_letters,
            factor * self.rows,
            factor * self.repeats,
            factor * self.characters,
        )


CUT_OFF = Bar(letters=1_000, lines=80, table_letters=5_000, rows=80, repeats=60, characters=400)
FINISHED = Bar(letters=4_000, lines=120, table_letters=10_000, rows=200, repeats=150, characters=1_000)


def find_loop(text: str, *, finished: bool | None) -> Loop | None:
    """Return the loop that `text` ends in, or None.

    `finished`: True where the model ended the text, False where max_tokens did, None where that is not known (which is
    judged like True). Time is linear in the length of the text.
    """
    bar = CUT_OFF if finished is False else FINISHED
    for end in _ends(text, cut_off=finished is False):
        exact = _exact_run(text, end)
        if exact and _is_beyond(exact, text, end, bar):
            return exact
    counting = _counting_run(text) if finished is False else None
    if counting and _is_beyond(counting, text, len(text), bar.times(2)):
        return counting
    nearly = _nearly_run(text) if len(text) > bar.times(2).letters else None
    if nearly and _is_running_text_beyond(nearly, text, bar.times(2)):
        return nearly
    return None


def with_loop_found(result: PageResult) -> PageResult:
    """Return the result with status `repetition` where its text ends in a loop; other statuses stay."""
    if result.status not in {"ok", "truncated"} or result.text is None:
        return result
    finished = {"stop": True, "length": False}.get(result.finish_reason or "")
    return replace(result, status="repetition") if find_loop(result.text, finished=finished) else result


# What a run amounts to


def _is_beyond(run: Loop, text: str, end: int, bar: Bar) -> bool:
    """Whether an exact or counting run is more than a page holds."""
    span, unit = text[run.start : end], text[end - run.period : end]
    letters, rows = count_letters(span), count_rows(span)
    if run.repeats < 3 and letters < 4 * bar.letters:
        return False  # forms come in two copies
    is_table = CELL_MARK.search(unit) is not None
    if is_table and letters >= bar.table_letters:
        return True
    if not is_table and letters >= bar.letters and (rows >= bar.lines or letters >= SHORT_LINE_LETTERS * rows):
        return True
    if letters > 0.4 * len(span) and not is_table:
        return False
    if rows >= run.repeats:
        return rows >= bar.rows
    return run.repeats >= bar.repeats and len(span) >= bar.characters


def _is_running_text_beyond(run: Loop, text: str, bar: Bar) -> bool:
    """Whether a run that repeats nearly is more running text than a page holds."""
    span = text[run.start :]
    letters = count_letters(span)
    if len(CELL_MARK.findall(span)) >= run.repeats:
        return letters >= bar.table_letters
    return letters >= bar.letters and letters > 0.4 * len(span)


def count_letters(text: str) -> int:
    """Count the letters outside of HTML tags and LaTeX commands; a Chinese or Japanese one counts three times."""
    bare = LATEX_WORD.sub(" ", HTML_TAG.sub(" ", text))
    return sum(map(len, LETTERS_ONLY.findall(bare))) + (WIDE_LETTER - 1) * len(WIDE_LETTERS.findall(bare))


def count_rows(text: str) -> int:
    r"""Count the rows that end in a text: by `</tr>`, else by LaTeX's `\\`, else by its lines, without blank ones."""
    if not text.strip():
        return 0
    return text.count("</tr>") or text.count("\\\\") or len(re.findall(r"\n\s*", text))


def _ends(text: str, *, cut_off: bool) -> Iterator[int]:
    """Where a loop may end: at the end; in a finished text also before what closes a table, or before a last row."""
    yield len(text)
    if cut_off:
        return
    searched = text[-SEARCHED_CHARACTERS:]
    bare = searched
    while closer := CLOSER.search(bare, max(0, len(bare) - LONGEST_CLOSER)):
        bare = bare[: closer.start()].rstrip()
    without_last_row = bare.rpartition("\n")[0].rstrip()
    for kept in (bare, without_last_row):
        yield len(text) - len(searched) + len(kept)


# The finders


def longest_repetition(items: Sequence[str]) -> tuple[int, int]:
    """Return (period, length) of the longest suffix that repeats with a period, twice at least; (0, 0) if none does.

    The Z-function: `reach[lag]` is how far the reversed items agree with themselves shifted by `lag`. Linear.
    """
    turned = items[::-1]
    size = len(turned)
    reach = [0] * size
    left = right = period = length = 0
    for lag in range(1, size):
        match = min(right - lag, reach[lag - left]) if lag < right else 0
        while lag + match < size and turned[match] == turned[lag + match]:
            match += 1
        reach[lag] = match
        if lag + match > right:
            left, right = lag, lag + match
        if match >= lag and lag + match > length:
            period, length = lag, lag + match
    return period, length


def _exact_run(text: str, end: int) -> Loop | None:
    first = max(0, end - SEARCHED_CHARACTERS)
    period, length = longest_repetition(text[first:end])
    if not period:
        return None
    start = end - length
    while start > 0 and text[start - 1] == text[start - 1 + period]:
        start -= 1
    return Loop(start, period, (end - start) // period, text[start : start + min(period, EXCERPT_CHARACTERS)])


def _counting_run(text: str) -> Loop | None:
    """Find a suffix that repeats but for numbers that count; positions are in characters again."""
    items = NUMBER_OR_CHARACTER.findall(text[-SEARCHED_CHARACTERS:])
    period, length = longest_repetition(["0" if item.isdigit() else item for item in items])
    run = items[len(items) - length :]
    if not period or not _counts_steadily(run, period):
        return None
    characters = sum(map(len, run))
    unit = "".join(run[:period])
    repeats = length // period
    return Loop(len(text) - characters, characters // repeats, repeats, unit[:EXCERPT_CHARACTERS])


def _counts_steadily(run: Sequence[str], period: int) -> bool:
    """Whether each number of the unit takes one step nearly always, and one of them does move."""
    steps = [0]
    for slot in range(period):
        if not run[slot].isdigit():
            continue
        numbers = [int(item) for item in run[slot::period]][1:-1]  # the first and the last may be cut
        differences = Counter(after - before for before, after in pairwise(numbers))
        if not differences:
            return False
        step, count = differences.most_common(1)[0]
        if count < STEADY_SHARE * differences.total():
            return False
        steps.append(step)
    return any(steps)


def _nearly_run(text: str) -> Loop | None:
    """Find the suffix that is made of five-word sequences which were there shortly before."""
    words = list(WORD.finditer(text))
    grams = [tuple(word[0] for word in words[at : at + NGRAM]) for at in range(len(words) - NGRAM + 1)]
    first = _stale_from(grams)
    places: dict[tuple[str, ...], list[int]] = {}
    for at in range(first, len(grams)):
        places.setdefault(grams[at], []).append(words[at].start())
    most = max(places.values(), key=len, default=[])
    if len(most) < 3:
        return None
    start = words[first].start()
    unit = text[most[-2] : min(most[-1], most[-2] + EXCERPT_CHARACTERS)]
    return Loop(start, (len(text) - start) // len(most), len(most), unit)


def _stale_from(grams: Sequence[tuple[str, ...]]) -> int:
    """Return from where on the sequences are stale: the suffix with the greatest excess over `STALE_SHARE`."""
    seen: dict[tuple[str, ...], int] = {}
    scores = []
    for at, gram in enumerate(grams):
        is_stale = at - seen.get(gram, -STALE_WITHIN - 1) <= STALE_WITHIN
        scores.append(1 - STALE_SHARE if is_stale else -STALE_SHARE)
        seen[gram] = at
    best = total = 0.0
    first = len(grams)
    for at in range(len(grams) - 1, -1, -1):
        total += scores[at]
        if total > best:
            best, first = total, at
    return first


# What the engine can do about it


def repetition_field(vllm_version: str | None) -> dict[str, dict[str, int]]:
    """Return the request field by which vLLM stops a loop itself, or {} where it is too old, or not known to be vLLM.

    Such a request ends with finish reason `repetition`. In the source of 0.32.0 (since about 0.17, FACTS §2) the field
    is `RepetitionDetectionParams(max_pattern_size=0, min_pattern_size=0, min_count=0)`: a maximum of 0 is off, a
    minimum of 0 means 1, a `min_count` below 2 is refused. After each token it stops where the last
    `size * min_count` tokens are `min_count` copies of one pattern of `size` tokens, for any size in the range. The
    offline engine's `SamplingParams` wants that object (`vllm.sampling_params`), not a mapping.

    The engine can't know whether a text would end by itself, and one count has to do for all sizes. So the count lies
    above the rows of a page: a table of equal rows is not stopped. A loop of one token is, after 128 of them, one of 16
    tokens after 2048; a longer one is cut off by max_tokens as before, and found here.
    """
    numbers = re.match(r"v?(\d+)\.(\d+)", vllm_version or "")
    if not numbers or (int(numbers[1]), int(numbers[2])) < (0, 17):
        return {}
    return {"repetition_detection": {"max_pattern_size": 32, "min_pattern_size": 1, "min_count": 128}}


# ---- attempts --------------------------------------------------------------------------------------------------------
# Which pages are asked again for a better text, how, and which of the texts is kept.


ASKED_AGAIN = frozenset({"truncated", "repetition"})
WARMER_EACH_TIME = 0.2
WARMEST = 0.8
BEST_FIRST = ("ok", "blank", "truncated", "repetition", "error")


def next_attempt(
    question: Question,
    row: int,
    attempt: int,
    last_status: str,
    context_left: int | None = None,
    frame: int = 0,
) -> Attempt:
    """Return how to ask about the page in `row` for the `attempt`-th time after the first, which was attempt 0.

    Another seed; a higher temperature, up to `WARMEST` (a question warmer than that stays as warm); after a truncation
    twice the tokens, four times, … as far as `context_left`, the context less the prompt, is known to allow. A function
    of its arguments alone, so that offline, served and resumed runs ask the same.
    """
    warmer = min(WARMEST, question.temperature + WARMER_EACH_TIME * attempt)
    most = question.max_tokens
    if last_status == "truncated" and most is not None and context_left is not None:
        most = max(most, min(most * 2**attempt, context_left))
    return Attempt(
        temperature=round(max(question.temperature, warmer), 4),
        seed=page_seed(question.seed, row, frame, attempt),
        max_tokens=most,
    )


def better(a: PageResult, b: PageResult) -> PageResult:
    """Return the better of two attempts at a page; the earlier one, `a`, where nothing speaks for `b`.

    By status: ok, truncated, repetition, error. Between two truncated texts the longer one; between two that loop the
    one that has more before the loop. Of two ok ones the earlier: its sampling is the nearer to the model's own.
    """
    return max(a, b, key=_merit)


def _merit(result: PageResult) -> tuple[int, int]:
    text = result.text or ""
    rank = -BEST_FIRST.index(result.status)
    if result.status == "truncated":
        return rank, len(text)
    if result.status == "repetition":
        loop = find_loop(text, finished=False)
        return rank, loop.start if loop else len(text)
    return rank, 0


# ---- dollars ---------------------------------------------------------------------------------------------------------
# Escaped math delimiters repaired: `\$x\$` becomes `$x$`, while prices keep their `\$`.
#
# A known quirk of the models (FACTS §1). Two escaped dollars are a pair of delimiters if all of this holds:
#
# 1. They stand on one line, no other dollar is between them, and none stands right beside them.
# 2. The first follows no Latin letter and no digit (`US\$`, `5\$`), the second precedes no digit (`\$5-\$10`), nor
#    white space and a digit if a digit follows the first (`\$5 = US\$ 7`).
# 3. What is between has no white space at its ends, or else at both ends and a math sign in it; then it loses that.
# 4. It does not end like half a sentence about prices: in an operator, an opening bracket, `:` or `;`, nor in `.` or
#    `,` after a number. Its braces are balanced. It holds no HTML tag, and in a row of a table no bar.
# 5. It reads as math: it has a LaTeX command, `^`, `_`, `=`, `<`, `>`, `+`, `|`, or is one number, numbers in brackets,
#    or names of at most three letters with brackets, numbers, commas and operators; from a number on, without white
#    space. Two plain words in a row are prose, whatever else is there, but for those inside of `\text{…}` and its like.
#
# `\$\$…\$\$` is a displayed formula under the same rules, but may span lines, no empty one, and needs a math sign:
# `\$\$` is also how restaurants are rated. An escaped dollar that belongs to no pair stays, and so does all that stands
# in code (fences, backticks, `<pre>`, `<code>`) or between dollars that are delimiters already.


# What is looked for from left to right. Code and formulas are stepped over; what is not closed is code up to the end.
CODE = (
    r"(?m:^[ \t]*(?P<fence>`{3,}|~{3,})[^\n]*\n(?:[^\n]*\n)*?(?:[ \t]*(?P=fence)[`~]*[ \t]*$|[^\n]*\Z))"
    r"|<(?P<tag>pre|code)\b[^>]*>(?s:.*?)(?:</(?P=tag)>|\Z)"
    r"|(?<![`\\])(?P<ticks>`{1,9})(?!`)(?:(?!\n[ \t]*\n)(?s:.))*?(?<!`)(?P=ticks)(?!`)"
)
MATH_ALREADY = (
    r"(?<![\\$])\$\$(?!\$)(?:(?!\n[ \t]*\n)(?s:.)){1,4000}?(?<!\\)\$\$(?!\$)"
    r"|(?<![\\$])\$(?![\s$])(?:\\.|[^\\$\n]){0,500}?(?<=[^\s\\])\$(?![\d$])"
)
ESCAPED = r"(?<![\\$])(?P<display>\\\$\\\$)(?!\\?\$)|(?<![\\$])(?P<inline>\\\$)(?!\\?\$)"
TOKEN = re.compile(f"{CODE}|{MATH_ALREADY}|{ESCAPED}")

INLINE_CLOSE = re.compile(r"(?:\\[^$\n]|[^\\$\n]){1,500}?(?=(?<!\\)\\\$(?!\\?\$))")
DISPLAY_CLOSE = re.compile(r"(?:(?!\n[ \t]*\n)(?:\\[^$]|[^\\$])){1,4000}?(?=(?<!\\)\\\$\\\$(?!\\?\$))")

MATH_SIGN = re.compile(r"\\[a-zA-Z]|[\^_=<>+|]|\\[{}|,;!]|[−×÷≤≥≠≈∈∞∑∫√±·→\u0391-\u03c9]")
HALF_A_SENTENCE = re.compile(r"(?:(?<![\^_{])[-+*/=<>–—−(\[:;&]|(?<=\d)[.,])\Z")
HTML_IN_MATH = re.compile(
    r"</?(?:td|tr|th|table|thead|tbody|br|p|div|span|b|i|u|em|strong|sup|sub|li|ul|ol|a)\b[^<>]*>"
)
WORDS_INSIDE = re.compile(
    r"\\(?:text|mathrm|operatorname|mbox|textbf|textit|mathbf|mathit|mathsf|begin|end)\*?\s*\{[^{}]*\}"
)
TWO_WORDS = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{2,}[,.]?\s+(?![a-zA-Z]\b)[a-zA-Z]{2,}")
SHORT_EXPRESSION = re.compile(r"(?:[\s\d.,%°'’!()\[\]/*:–-]|(?<![a-zA-Z])[a-zA-Z]{1,3}(?![a-zA-Z]))+")
NUMBERS_ALONE = re.compile(r"-?\d+(?:[.,]\d+)*%?|[(\[]-?[\d.]+(?:,\s*-?[\d.]+)*[)\]]")


def fix_dollars(text: str) -> str:
    """Return the text with its escaped math delimiters repaired, all else as it is."""
    if "\\$" not in text:
        return text
    parts: list[str] = []
    at = 0
    while match := TOKEN.search(text, at):
        opened = match["display"] or match["inline"]
        parts.append(text[at : match.start()])
        formula = _formula_at(text, match) if opened else None
        if formula is None:
            parts.append(match[0])
            at = match.end()
        else:
            inside, at = formula
            parts.append(inside)
    return "".join([*parts, text[at:]])


def _formula_at(text: str, opening: re.Match[str]) -> tuple[str, int] | None:
    """Return the formula that an escaped delimiter opens, repaired, and where it ends; None if it opens none."""
    is_display = opening["display"] is not None
    body = (DISPLAY_CLOSE if is_display else INLINE_CLOSE).match(text, opening.end())
    if not body:
        return None
    inside = body[0]
    end = body.end() + len(opening[0])
    if not _fits_around(text, opening.start(), end, inside, is_display=is_display):
        return None
    is_math = _is_display_math(inside) if is_display else _is_inline_math(inside)
    if not is_math or ("|" in inside and _is_table_row(text, opening.start())):
        return None
    dollars = "$$" if is_display else "$"
    return f"{dollars}{inside if is_display else inside.strip()}{dollars}", end


def _fits_around(text: str, start: int, end: int, inside: str, *, is_display: bool) -> bool:
    """Rules 2 and 3: what stands before, after and at the ends."""
    if re.match(r"[A-Za-z0-9]", text[start - 1 : start]):
        return False
    is_padded = inside[:1].isspace() and inside[-1:].isspace()
    if is_display:
        return not text[end : end + 1].isdigit()
    begins_like_a_price = is_padded or inside[0].isdigit()
    if re.match(r"\s?\d" if begins_like_a_price else r"\d", text[end : end + 2]):
        return False
    if is_padded:
        return MATH_SIGN.search(inside) is not None
    return not inside[:1].isspace() and not inside[-1:].isspace()


def _is_display_math(inside: str) -> bool:
    return MATH_SIGN.search(inside) is not None and _is_whole(inside) and not _is_prose(inside)


def _is_inline_math(inside: str) -> bool:
    """Rules 4 and 5."""
    bare = inside.strip()
    if not bare or not _is_whole(inside) or _is_prose(bare):
        return False
    if MATH_SIGN.search(bare) or NUMBERS_ALONE.fullmatch(bare):
        return True
    if bare[0].isdigit() and re.search(r"\s", bare):
        return False
    return any(map(str.isalpha, bare)) and SHORT_EXPRESSION.fullmatch(bare) is not None


def _is_whole(inside: str) -> bool:
    """Rule 4: no half of a sentence, of a group or of a table."""
    braces = re.sub(r"\\[{}]", "", inside)
    is_balanced = braces.count("{") == braces.count("}")
    return is_balanced and not HALF_A_SENTENCE.search(inside.strip()) and not HTML_IN_MATH.search(inside)


def _is_prose(inside: str) -> bool:
    return TWO_WORDS.search(WORDS_INSIDE.sub(" ", inside)) is not None


def _is_table_row(text: str, at: int) -> bool:
    """Whether the line there is a row of a Markdown table: it begins with a bar, or has one between spaces."""
    start = text.rfind("\n", 0, at) + 1
    end = text.find("\n", at)
    line = text[start : end if end >= 0 else len(text)]
    return line.lstrip().startswith("|") or " | " in line


# ---- reading ---------------------------------------------------------------------------------------------------------
# What becomes of the engine's words once the best answer is chosen: markers read, dollars repaired, frames joined.


FRAME_SEPARATOR = "\n\f\n"  # a form feed: where the next page begins, as in plain text from PDFs
PAGE_BREAK = "page_break"  # label of the block that stands between the blocks of two frames


@dataclass(frozen=True)
class TextRules:
    """What is wanted of a text. `drop_labels`: blocks of these labels are left out of it, in grounding mode."""

    grounding: bool = False
    drop_labels: frozenset[str] = frozenset()
    fix_dollars: bool = True
    keep_raw: bool = False


def as_wanted(result: PageResult, rules: TextRules) -> PageResult:
    """Return the result with its text as the rules want it; the status stays, even if no text is left."""
    if result.text is None:
        return result
    raw = result.text if rules.keep_raw else None
    repaired = fix_dollars if rules.fix_dollars else str
    if not rules.grounding:
        return replace(result, text=repaired(result.text), raw=raw)
    page = parse_grounding(result.text)
    blocks = tuple(
        block if block.label == "code" else replace(block, text=repaired(block.text)) for block in page.blocks
    )
    text = plain_text(replace(page, blocks=blocks, before=repaired(page.before)), rules.drop_labels)
    return replace(result, text=text, raw=raw, blocks=blocks, malformed=page.malformed)


def joined(frames: Sequence[PageResult]) -> PageResult:
    """Return one result for a picture of several frames: texts and blocks in order, the worst status, all tokens.

    Frames without ink spoil nothing: a picture is `blank` only if all of them are. Where a frame has no text there is
    none for the picture, as everywhere; `raw` has what was read all the same.
    """
    if len(frames) == 1:
        return frames[0]
    asked = [frame for frame in frames if frame.status != "blank"]
    status = max((frame.status for frame in asked), key=BEST_FIRST.index, default="blank")
    failed = [f"frame {at} of {len(frames)}: {one.error}" for at, one in enumerate(frames, 1) if one.status == "error"]
    has_raw = any(frame.raw is not None for frame in frames)
    return PageResult(
        text=None if failed else FRAME_SEPARATOR.join(frame.text or "" for frame in frames),
        status=status,
        error="; ".join(failed) or None,
        tokens=_sum([frame.tokens for frame in frames]),
        prompt_tokens=_sum([frame.prompt_tokens for frame in frames]),
        finish_reason=asked[-1].finish_reason if asked else None,
        attempts=sum(frame.attempts for frame in frames),
        latency_s=sum(frame.latency_s for frame in frames),
        raw=FRAME_SEPARATOR.join(frame.raw or "" for frame in frames) if has_raw else None,
        blocks=_joined_blocks(frames),
        malformed=sum(frame.malformed for frame in frames),
        confidence=_joined_confidence(frames),
    )


def _sum(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _joined_blocks(frames: Sequence[PageResult]) -> tuple[Block, ...] | None:
    if all(frame.blocks is None for frame in frames):
        return None
    blocks: list[Block] = []
    for number, frame in enumerate(frames):
        blocks += [Block(PAGE_BREAK, (0, 0, 0, 0), "")] if number else []
        blocks += frame.blocks or ()
    return tuple(blocks)


def _joined_confidence(frames: Sequence[PageResult]) -> Confidence | None:
    """Return the mean over all tokens, and the least sure window of any frame."""
    known = [(frame.confidence, frame.tokens or 1) for frame in frames if frame.confidence]
    if not known:
        return None
    mean = sum(one.mean * tokens for one, tokens in known) / sum(tokens for _, tokens in known)
    least = min((one for one, _ in known), key=lambda one: one.lowest)
    return Confidence(mean, least.lowest, least.lowest_at)


# ---- threads ---------------------------------------------------------------------------------------------------------
# Threads for work that can't be interrupted: one that takes too long is given up, and another thread takes its place.
#
# Pillow decodes a picture in one call, which nothing can stop. The thread of such a call is left to itself: it ends
# with the call, and the process does not wait for it. So a picture may take a core for a while, but never the run.


DoneT = TypeVar("DoneT")
MOST_STUCK = 16  # threads given up and still at work: each has a core and a picture's memory


class TooSlowError(Exception):
    """The work was given up."""


class _Worker:
    """A thread that does what is put in its inbox, until that is None."""

    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._work, name="prepare", daemon=True)
        self.thread.start()

    def _work(self) -> None:
        while (given := self.inbox.get()) is not None:
            work, future = given
            try:
                outcome = work()
            except BaseException as error:  # noqa: BLE001 - whoever waits must hear of it
                future.set_exception(error)
            else:
                future.set_result(outcome)
            del given, work, future  # or a picture would lie here until the next one
            outcome = None


class Threads:
    """So many threads, and `limit_s` seconds for each piece of work."""

    def __init__(self, count: int, limit_s: float) -> None:
        self._limit_s = limit_s
        self._places = asyncio.Semaphore(count)
        self._idle: list[_Worker] = []
        self._given_up: list[_Worker] = []

    async def run(self, work: Callable[[], DoneT]) -> DoneT:
        """Do the work in a thread, in the order of asking; raise `TooSlowError` where it takes longer than it may."""
        async with self._places:
            worker = self._idle.pop() if self._idle else _Worker()
            future: Future[DoneT] = Future()
            future.set_running_or_notify_cancel()  # from now on it can't be cancelled, only left alone
            worker.inbox.put((work, future))
            try:
                async with asyncio.timeout(self._limit_s):
                    result = await asyncio.shield(asyncio.wrap_future(future))
            except TimeoutError:
                if not future.done():
                    self._give_up(worker)
                    raise TooSlowError from None
                raise
            finally:
                (self._idle.append if future.done() else self._leave)(worker)
            return result

    def close(self) -> None:
        """End the threads that are idle; the others end with what they do."""
        while self._idle:
            self._idle.pop().inbox.put(None)

    def _leave(self, worker: _Worker) -> None:
        worker.inbox.put(None)

    def _give_up(self, worker: _Worker) -> None:
        self._given_up = [one for one in self._given_up if one.thread.is_alive()] + [worker]
        if len(self._given_up) > MOST_STUCK:
            raise JobError(
                f"{len(self._given_up)} pictures have each been decoding for over {self._limit_s:g} s, and still are. "
                "Look at the input; --page-timeout gives them more time, --max-pixels refuses large ones"
            )


# ---- gauges ----------------------------------------------------------------------------------------------------------
# What a vLLM server says about itself: the gauges of its /metrics page, read every second.


READ_EVERY_S = 1.0
READ_TIMEOUT_S = 2.0
STALE_S = 5.0  # older readings say nothing about now
TRIES = 3  # so many pages without a gauge, and there are none
SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(?P<labels>\{.*\})?\s+(?P<value>\S+)(\s+-?\d+)?\s*")


@dataclass(frozen=True)
class Gauges:
    """A reading, over all engines of the server; None where it does not say. The last four count from its start."""

    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None  # of the fullest engine, 0 to 1
    preemptions: float | None = None
    succeeded: float | None = None
    prompt_tokens: float | None = None
    made_tokens: float | None = None

    @property
    def known(self) -> bool:
        """Whether the server says how many requests run and wait."""
        return self.running is not None and self.waiting is not None


def parse_gauges(text: str) -> Gauges:
    """Read a page in Prometheus's text format; lines that are not understood are passed over."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for line in text.splitlines():
        sample = SAMPLE.fullmatch(line)
        if sample is None or not sample["name"].startswith("vllm:"):
            continue
        try:
            value = float(sample["value"])
        except ValueError:
            continue
        if math.isfinite(value):
            values[sample["name"].removeprefix("vllm:").removesuffix("_total")].append(value)

    def summed(name: str) -> float | None:
        return sum(values[name]) if name in values else None

    usage = values.get("kv_cache_usage_perc") or values.get("gpu_cache_usage_perc")  # the latter until 0.10
    return Gauges(
        running=summed("num_requests_running"),
        waiting=summed("num_requests_waiting"),
        kv_usage=max(usage) if usage else None,
        preemptions=summed("num_preemptions"),
        succeeded=summed("request_success"),
        prompt_tokens=summed("prompt_tokens"),
        made_tokens=summed("generation_tokens"),
    )


class GaugeReader:
    """Reads a server's gauges beside the run. `get` fetches a URL: its text, or None where there is no such page."""

    def __init__(
        self,
        base_url: str,
        get: Callable[[str], Awaitable[str | None]],
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.url = metrics_url(base_url)
        self._get = get
        self._say = say
        self._clock = clock
        self._last = Gauges()
        self._read_at = float("-inf")

    @property
    def latest(self) -> Gauges:
        """The last reading, or one that knows nothing where that is too old."""
        return self._last if self._clock() - self._read_at <= STALE_S else Gauges()

    async def read(self) -> bool:
        """Read once; return whether there were gauges. No error of the server's or the network's leaves this."""
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                text = await self._get(self.url)
        except Exception:  # noqa: BLE001 - gauges only help; a server that has none, or no time, is no reason to stop
            return False
        gauges = parse_gauges(text or "")
        if gauges.known:
            self._last, self._read_at = gauges, self._clock()
        return gauges.known

    async def run(self) -> None:
        """Read every second until cancelled; give up, and say so once, where the server has never shown any."""
        failures, seen = 0, False
        while seen or failures < TRIES:
            known = await self.read()
            seen = seen or known
            failures += not known
            await asyncio.sleep(READ_EVERY_S)
        self._say(f"{self.url} shows no vLLM gauges: the window goes by the answers alone")


def metrics_url(base_url: str) -> str:
    """Return where a server whose API is at `base_url` (with or without /v1) has its metrics."""
    return base_url.rstrip("/").removesuffix("/v1") + "/metrics"


# ---- window_rules ----------------------------------------------------------------------------------------------------
# The rules of the window: what is remembered and what is seen make a decision that names its rule.
#
# All of it is pure. Throughput is what counts; latency, the engine's gauges and its refusals are signs on the way.


ROUND_ANSWERS = 96  # throughput is compared over so many answers,
ROUND_S = 90.0  # or those of so long a time, where they are slower
PROBE_AFTER_S = 15.0
CROWDED = 6  # times the latency of the first pages: more in flight must bring much more than noise
PROBE_WAIT_S = 240.0  # the longest time between two probes
UNMEASURED_PAGE_BYTES = 8 * 1024**2  # a page in flight, until it is measured


@dataclass(frozen=True)
class Bounds:
    """What the window may be. Where a page takes longer than `longest_wait_s`, too many are in flight."""

    least: int = 1
    most: int = 512
    initial: int = 8
    longest_wait_s: float = 300.0

    def clamp(self, limit: float, memory_pages: int | None = None) -> int:
        """Return the limit within the bounds; the least is kept whatever the memory says."""
        highest = self.most if memory_pages is None else min(self.most, memory_pages)
        return max(self.least, min(int(limit), highest))


@dataclass(frozen=True)
class Observation:
    """What is seen at one tick. Answers, their time and tokens count from the start, troubles from the last tick."""

    now: float
    in_flight: int = 0
    ready: int = 0  # prepared pages that wait for a place
    full_share: float = 1.0  # of the time since the last tick in which every place was taken
    done: int = 0
    latency_sum_s: float = 0.0
    first_latency_s: float | None = None  # of the pages sent before the first answer, once nine in ten are answered
    tokens: int = 0
    refused: int = 0  # 429 and 503
    timeouts: int = 0
    failed: int = 0  # other 5xx, broken connections
    gauges: Gauges = field(default_factory=Gauges)
    memory_available: int | None = None  # bytes that pages may still take
    bytes_a_page: float | None = None
    preparing: int = 0  # pages in the hands of the threads that prepare, or waiting for one
    threads: int = 1
    rows_left: int | None = None  # rows that nobody has begun with

    @property
    def memory_pages(self) -> int | None:
        """How many pages in flight the host's memory has room for."""
        if self.memory_available is None:
            return None
        return self.in_flight + int(self.memory_available // max(1.0, self.bytes_a_page or UNMEASURED_PAGE_BYTES))

    @property
    def is_full(self) -> bool:
        """Whether the window is what bounds us: every place was taken for at least half of the time."""
        return self.full_share >= 0.5

    @property
    def queue_is_empty(self) -> bool:
        """Whether the gauges say that what we sent is running."""
        running = self.gauges.running
        return self.gauges.waiting == 0 and running is not None and running >= 0.85 * self.in_flight


@dataclass(frozen=True)
class WindowState:
    """What the rules remember. `phase`: start (the first pages are out), ramp (growing fast), steady, probe."""

    limit: int
    phase: str = "start"
    now: float | None = None
    # answers
    done: int = 0
    answers: int = 0  # at this tick
    answered_at: float = 0.0
    latency_sum_s: float = 0.0
    latency_s: float = 0.0  # of the last pages, some sixteen
    base_latency_s: float = 0.0  # when the ramp began
    first_latency_s: float = 0.0  # of the first pages: the engine without a crowd
    preemptions: float | None = None
    # opening and ramp: the last step
    started: float | None = None
    stepped_at: float = 0.0
    stepped_done: int = 0
    stepped_tokens: float = 0.0
    token_rate: float = 0.0
    step: float = 1.0
    # cuts
    quiet_until: float = 0.0
    refused_at: int | None = None  # pages were refused above it: the ramp ends there
    # the engine's queue
    queued_since: float | None = None
    dry_since: float | None = None  # nothing waits
    empty_since: float | None = None  # nothing waits, and what we sent is running
    queue_seen: bool = False  # the engine was full, and that bounds us, not a lack of throughput
    # the round under way, and the throughput of one that ended at this tick
    round_at: float = 0.0
    round_done: int = 0
    round_size: int = 0
    round_full_s: float = 0.0
    settling: bool = True  # it still answers pages sent under another limit
    rate: float | None = None
    # steady and probe
    settled: int = 0
    fresh: bool = True  # reached by growing, so that the knee may lie a little above
    overshot: bool = False  # fewer may be enough: a ramp was braked here, or a climb has ended
    climbed: bool = False  # a probe was confirmed since the last that failed
    baseline: float | None = None  # throughput at `settled`
    probe_at: float = 0.0
    probe_wait_s: float = PROBE_AFTER_S


@dataclass(frozen=True)
class Decision:
    """The new limit, the rule that set it, why, and what to remember."""

    limit: int
    rule: str
    reason: str
    state: WindowState


class Rules:
    """Decide the limit. The first rule that has something to say sets it and names itself.

    Cuts, and what forbids growth:

    1.  `fixed`: least = most, nothing to decide.
    2.  `refused`: pages came back with 429 or 503, timed out, or more than a tenth of them with other 5xx: cut by the
        share that did, at least a tenth, at most half; then no further cut for the time a page takes. The ramp back
        ends where it happened.
    3.  `preempted`: the engine threw running pages out of its KV cache: a tenth fewer than run.
    4.  `memory`: down to what the host has room for.
    5.  `silent`: no answer for 5 s and four times what a page takes: hold; it is no evidence of anything.
    6.  `drain`: more in flight than the limit: hold.
    7.  `starved`: the window was full for less than half of the time, so it isn't what bounds us: hold.
    8.  `late`: a page takes longer than `longest_wait_s`, or will when so many are in flight and no more are answered
        than now: cut in proportion.
    9.  `trim`: for 1.5 s more pages wait in the engine than an eighth of those running (or 4; 2 where the KV cache is
        97 % full): down to a queue of half of that.
    10. `queue`: pages wait in the engine, not too many: hold. When that lasted as long as a page takes, the engine is
        full, and no throughput need be measured.

    Growth, in a full window:

    11. `opening`: until nine tenths of the pages sent before the first answer are answered: one more for each answer.
        Where the gauges say that what we sent is running, double each time the age of the run doubles (1 s, 2 s,
        4 s …): the slower the pages, the less is lost by waiting. Where the engine counts tokens while it makes them, a
        doubling must have made a quarter more a second than the one before.
    12. `ramp`: two more for each answer, so that the window triples in the time a page takes (one more where that is a
        quarter of `longest_wait_s`: what is too much would be late). As many again at once where the gauges say that
        what we sent is running, half the time a page takes after the last step, and after answers for an eighth of the
        window. Its `brake`: pages take 1.5 times as long as when it began.
        When the queue of an engine that was full (10) runs empty, the ramp begins anew, by 1/32, 1/16, 1/8 …
    13. `confirm` or `revert`, the verdict on a probe. More in flight must bring a tenth of it, at least 5 %, as
        throughput (half of it, at least 10 %, where a page already takes six times as long as the first ones); then
        go on from there, by a ramp where a fifth more brought three fifths of that. Fewer must not cost 5 %. Else go
        back; where that place was reached by growing, a little above it, as far as the verdict can't see.
    14. `probe`: throughput at this limit is known: try 1/16 to 1/2 more. At once while that helps; after a failure in
        15 s, 30 s … 240 s; at once when throughput rose by a tenth by itself. After a brake first try 1.5 times what
        throughput needs at the latency of the ramp's beginning, if that is much less.
    15. `hold`: none of these.

    Throughput is that of a round: as many answers as there were pages in flight, at least 96 or those of 90 s. The
    first round after a change answers what was sent before it and is left out, as are rounds in which the window was
    not full. Without gauges, then, each generation of slow pages doubles the window: 512 slots of 120 s a page are
    full after 12 minutes.
    """

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self._rules = (
            *(self._fixed, self._refused, self._preempted, self._memory, self._silent, self._drain, self._starved),
            *(self._late, self._trim, self._queue, self._opening, self._ramp, self._verdict, self._probe, self._stay),
        )

    def start(self) -> WindowState:
        """Return the state before the first observation."""
        return WindowState(limit=self.bounds.clamp(self.bounds.initial))

    def decide(self, state: WindowState, seen: Observation) -> Decision:
        """Return what the first rule says that has something to say."""
        state = _with_round(_with_gauges(_with_answers(state, seen), seen), seen)
        return next(decision for rule in self._rules if (decision := rule(state, seen)))

    def _to(self, state: WindowState, seen: Observation, limit: float, rule: str, reason: str) -> Decision:
        """Return a decision for a limit, within all bounds; a limit that changes begins a new round."""
        new = self.bounds.clamp(limit, seen.memory_pages)
        if new != state.limit:
            state = replace(_new_round(state, seen), limit=new)
        return Decision(new, rule, reason, replace(state, preemptions=seen.gauges.preemptions))

    def _hold(self, state: WindowState, seen: Observation, rule: str, reason: str) -> Decision:
        """Stay, and begin the round anew: what happens now is no evidence."""
        return self._to(_new_round(state, seen), seen, state.limit, rule, reason)

    def _settle(self, state: WindowState, limit: float, probe_at: float, step: float = 0.25) -> WindowState:
        """Return the state of a window that has found its place, until the next probe."""
        state = replace(state, phase="steady", settled=self.bounds.clamp(limit), baseline=None, probe_at=probe_at)
        return replace(state, fresh=True, overshot=False, step=step)

    # --- cuts, and what forbids growth ---

    def _fixed(self, state: WindowState, seen: Observation) -> Decision | None:
        if self.bounds.least < self.bounds.most:
            return None
        return self._to(state, seen, state.limit, "fixed", "so many were asked for")

    def _refused(self, state: WindowState, seen: Observation) -> Decision | None:
        bad = seen.refused + seen.timeouts + (seen.failed if seen.failed > max(2, seen.in_flight / 10) else 0)
        if not bad:
            return None
        reason = f"{seen.refused} refused, {seen.timeouts} timed out, {seen.failed} failed"
        if seen.now < state.quiet_until:
            return self._hold(state, seen, "refused", f"{reason}; the last cut has yet to take effect")
        there = min(state.limit, max(1, seen.in_flight))
        few = bad <= there / 10
        goes_on = state.refused_at is not None and seen.now < state.quiet_until + 2 * _pause_s(state)
        state = replace(
            state,
            phase="start" if state.phase == "start" else "ramp",
            refused_at=there - bad if few else state.refused_at if goes_on else max(1, int(0.95 * there)),
            quiet_until=seen.now + _pause_s(state),
            queue_seen=False,
            step=1.0,
            probe_wait_s=min(PROBE_WAIT_S, 2 * state.probe_wait_s),
        )
        limit = there * (1 - min(0.5, max(0.1, bad / there)))
        return self._to(state, seen, min(state.limit, limit), "refused", reason)

    def _preempted(self, state: WindowState, seen: Observation) -> Decision | None:
        before, now = state.preemptions, seen.gauges.preemptions
        if before is None or now is None or now <= before:
            return None
        if seen.now < state.quiet_until:
            return self._hold(state, seen, "preempted", "again; the last cut has yet to take effect")
        limit = min(state.limit, 0.9 * (seen.gauges.running or seen.in_flight))
        state = self._settle(replace(state, quiet_until=seen.now + _pause_s(state)), limit, seen.now + 60)
        return self._to(state, seen, limit, "preempted", "the KV cache is too small for so many pages")

    def _memory(self, state: WindowState, seen: Observation) -> Decision | None:
        room = seen.memory_pages
        if room is None or state.limit <= max(self.bounds.least, room):
            return None
        if state.phase != "start":
            state = self._settle(state, room, seen.now + PROBE_AFTER_S)
        return self._to(state, seen, room, "memory", f"this host has room for {room} pages")

    def _silent(self, state: WindowState, seen: Observation) -> Decision | None:
        silence_s = seen.now - state.answered_at
        if not seen.done or silence_s <= max(5.0, 4 * state.latency_s):
            return None
        return self._hold(state, seen, "silent", f"no answer for {silence_s:.0f} s")

    def _drain(self, state: WindowState, seen: Observation) -> Decision | None:
        if seen.in_flight <= state.limit:
            return None
        return self._hold(state, seen, "drain", f"{seen.in_flight} in flight, {state.limit} wanted")

    def _starved(self, state: WindowState, seen: Observation) -> Decision | None:
        if seen.is_full:
            return None
        return self._hold(state, seen, "starved", f"{seen.in_flight} of {state.limit} places taken")

    def _late(self, state: WindowState, seen: Observation) -> Decision | None:
        took_s, answers = seen.now - state.round_at, seen.done - state.round_done
        if state.phase in {"start", "ramp"} and seen.now >= state.quiet_until:
            wait_s = state.latency_s
        elif answers >= 16 and took_s >= max(20.0, 1.2 * state.latency_s) and state.round_full_s >= 0.8 * took_s:
            wait_s = state.limit * took_s / answers
        else:
            wait_s = state.limit / state.rate if state.rate else 0.0
        if wait_s <= self.bounds.longest_wait_s:
            return None
        limit = 0.9 * state.limit * self.bounds.longest_wait_s / wait_s
        state = self._settle(state, limit, seen.now + 2 * wait_s)
        return self._to(state, seen, limit, "late", f"a page takes {wait_s:.0f} s")

    def _trim(self, state: WindowState, seen: Observation) -> Decision | None:
        if not seen.done or state.queued_since is None or seen.now - max(state.queued_since, state.round_at) < 1.5:
            return None
        most = 2.0 if (seen.gauges.kv_usage or 0) >= 0.97 else max(4.0, (seen.gauges.running or 0) / 8)
        waiting = seen.gauges.waiting or 0
        if waiting <= most:
            return None
        limit = state.limit - int(waiting - most / 2)
        state = replace(self._settle(state, limit, seen.now + PROBE_AFTER_S, step=1 / 32), queue_seen=True)
        return self._to(state, seen, limit, "trim", f"{waiting:.0f} pages wait in the engine")

    def _queue(self, state: WindowState, seen: Observation) -> Decision | None:
        if not seen.done or state.queued_since is None:
            return None
        if seen.now - state.queued_since >= max(2.0, state.latency_s):
            settled = self._settle(state, state.limit, seen.now + PROBE_AFTER_S, step=1 / 32)
            state = replace(settled, queue_seen=True, refused_at=None)
        return self._to(state, seen, state.limit, "queue", f"{seen.gauges.waiting or 0:.0f} pages wait in the engine")

    # --- growth ---

    def _opening(self, state: WindowState, seen: Observation) -> Decision | None:
        if state.phase != "start":
            return None
        age_s, since_s = seen.now - (state.started or seen.now), seen.now - state.stepped_at
        if seen.now < state.quiet_until:
            return self._to(state, seen, state.limit, "opening", "after a cut")
        if not seen.queue_is_empty or age_s < 1 or since_s < age_s / 2:
            more = min(state.limit, state.answers)
            return self._to(state, seen, state.limit + more, "opening", "the first pages are out")
        rate = ((seen.gauges.made_tokens or 0.0) - state.stepped_tokens) / since_s
        if rate and rate < 1.25 * state.token_rate:
            return self._to(state, seen, state.limit, "opening", "more pages don't make more tokens")
        state = replace(_stepped(state, seen), token_rate=rate)
        return self._to(state, seen, 2 * state.limit, "opening", "what we sent is running")

    def _ramp(self, state: WindowState, seen: Observation) -> Decision | None:
        if seen.now < state.quiet_until:
            return self._to(state, seen, state.limit, "hold", "after a cut")
        ran_empty = state.empty_since is not None and seen.now - state.empty_since >= 2
        if state.phase == "steady" and state.queue_seen and ran_empty:
            state = replace(state, phase="ramp", base_latency_s=max(state.latency_s, state.first_latency_s))
        if state.phase != "ramp":
            return None
        if state.refused_at is not None and state.limit >= state.refused_at:
            state = self._settle(state, state.limit, seen.now + state.probe_wait_s, step=1 / 16)
            return self._to(replace(state, refused_at=None), seen, state.limit, "brake", "more were refused")
        if state.refused_at is None and state.latency_s > 1.5 * state.base_latency_s:
            reason = f"a page takes {state.latency_s:.1f} s; {state.base_latency_s:.1f} s when the ramp began"
            state = replace(self._settle(state, state.limit, seen.now, step=0.5), overshot=True, queue_seen=False)
            return self._to(state, seen, state.limit, "brake", reason)
        most = state.refused_at or self.bounds.most
        running = seen.queue_is_empty and seen.done - state.stepped_done >= state.limit / 8
        if running and seen.now - state.stepped_at >= max(1.0, state.latency_s / 2):
            more = max(1, int(state.step * state.limit))
            state = replace(_stepped(state, seen), step=min(1.0, 2 * state.step))
            return self._to(state, seen, min(most, state.limit + more), "ramp", "what we sent is running")
        gain = 2 if state.latency_s < self.bounds.longest_wait_s / 4 else 1
        more = 0 if state.queue_seen else min(state.limit, gain * state.answers)
        return self._to(state, seen, min(most, state.limit + more), "ramp", f"{state.answers} answers")

    def _verdict(self, state: WindowState, seen: Observation) -> Decision | None:
        if state.phase != "probe" or state.rate is None or state.baseline is None:
            return None
        more, gain = state.limit / state.settled - 1, state.rate / state.baseline - 1
        reason = f"{100 * more:+.0f} % in flight, {100 * gain:+.0f} % throughput"
        needed = max(0.05, 0.1 * more) if more > 0 else -0.05
        if more > 0 and state.latency_s > CROWDED * state.first_latency_s:
            needed = max(0.1, 0.5 * more)
        if gain < needed:
            back = state.settled * (1 + max(0.05, 0.1 * more)) + 1 if more > 0 and state.fresh else state.settled
            return self._to(self._after_failure(state, seen, back, more), seen, back, "revert", reason)
        if more < 0:
            state = replace(self._settle(state, state.limit, seen.now + PROBE_AFTER_S), fresh=False)
        elif more < 0.2 or gain < 0.6 * more:
            state = replace(self._settle(state, state.limit, seen.now, min(0.5, 2 * state.step)), baseline=state.rate)
        else:
            state = replace(state, phase="ramp", base_latency_s=state.latency_s, step=1.0)
        state = replace(state, probe_wait_s=PROBE_AFTER_S, climbed=more > 0)
        return self._to(state, seen, state.limit, "confirm", reason)

    def _after_failure(self, state: WindowState, seen: Observation, back: float, more: float) -> WindowState:
        wait_s = max(state.probe_wait_s, 4 * state.latency_s)
        if more < 0:
            braked = state.step >= 0.5
            settled = self._settle(state, back, seen.now + (0 if braked else wait_s), state.step)
            return replace(settled, fresh=braked, climbed=False)
        settled = self._settle(state, back, seen.now + wait_s, step=max(1 / 16, state.step / 2))
        wait_s = min(PROBE_WAIT_S, 2 * state.probe_wait_s)
        return replace(settled, fresh=False, probe_wait_s=wait_s, overshot=state.climbed, climbed=False)

    def _probe(self, state: WindowState, seen: Observation) -> Decision | None:
        if state.phase != "steady" or state.queue_seen:
            return None
        if state.rate is not None and state.baseline is not None and state.rate > 1.1 * state.baseline:
            return self._to(
                replace(state, baseline=None, probe_at=seen.now), seen, state.limit, "hold", "it got faster"
            )
        state = replace(state, baseline=state.rate or state.baseline)
        if state.baseline is None or seen.now < state.probe_at:
            return self._to(state, seen, state.limit, "hold", "until the next probe")
        limit = self.bounds.clamp(max(state.limit + 1, state.limit * (1 + state.step)), seen.memory_pages)
        at_the_top = limit <= state.limit
        fewer = self.bounds.clamp(1 + 1.5 * state.baseline * state.first_latency_s)
        doubtful = state.overshot or (state.climbed and at_the_top)
        if doubtful and state.first_latency_s and fewer < 0.6 * state.limit:
            limit, question = fewer, "are fewer enough?"
        elif at_the_top:
            return None
        else:
            question = "is there more to be had?"
        return self._to(replace(state, phase="probe", overshot=False), seen, limit, "probe", question)

    def _stay(self, state: WindowState, seen: Observation) -> Decision:
        return self._to(state, seen, state.limit, "hold", "as it was")


# --- what is remembered ---


def _with_answers(state: WindowState, seen: Observation) -> WindowState:
    answers = seen.done - state.done
    if state.started is None and (seen.in_flight or seen.done):
        state = replace(state, started=seen.now, stepped_at=seen.now)
    if answers > 0:
        mean_s = (seen.latency_sum_s - state.latency_sum_s) / answers
        weight = answers / (answers + 16) if state.latency_s else 1.0
        latency_s = state.latency_s + weight * (mean_s - state.latency_s)
        state = replace(state, latency_s=latency_s, answered_at=seen.now)
    if state.phase == "start" and seen.first_latency_s:
        state = replace(state, phase="ramp", base_latency_s=seen.first_latency_s)
    if not state.first_latency_s and seen.first_latency_s:
        state = replace(state, first_latency_s=seen.first_latency_s)
    return replace(state, done=seen.done, latency_sum_s=seen.latency_sum_s, answers=max(0, answers))


def _with_gauges(state: WindowState, seen: Observation) -> WindowState:
    waiting = seen.gauges.waiting
    dry_since = (seen.now if state.dry_since is None else state.dry_since) if waiting == 0 else None
    dry_for_s = seen.now - dry_since if dry_since is not None else 0.0
    forgotten = waiting is None or dry_for_s > max(PROBE_AFTER_S, 2 * state.latency_s)
    return replace(
        state,
        queued_since=(state.queued_since or seen.now) if waiting else None,
        dry_since=dry_since,
        empty_since=(state.empty_since or seen.now) if seen.queue_is_empty else None,
        queue_seen=state.queue_seen and not forgotten,
    )


def _with_round(state: WindowState, seen: Observation) -> WindowState:
    """Go on with the round, or end it: its throughput is kept for this tick if it says something."""
    passed_s = seen.now - (seen.now if state.now is None else state.now)
    state = replace(state, now=seen.now, rate=None, round_full_s=state.round_full_s + passed_s * seen.full_share)
    took_s, answers = seen.now - state.round_at, seen.done - state.round_done
    if not state.round_size or took_s <= 0:
        return _new_round(state, seen)
    if answers < max(8, state.round_size) or (answers < ROUND_ANSWERS and took_s < ROUND_S):
        return state
    says_something = not state.settling and state.round_full_s >= 0.8 * took_s
    return replace(_new_round(state, seen), settling=False, rate=answers / took_s if says_something else None)


def _new_round(state: WindowState, seen: Observation) -> WindowState:
    return replace(
        state,
        round_at=seen.now,
        round_done=seen.done,
        round_size=max(1, seen.in_flight),
        round_full_s=0.0,
        settling=True,
        rate=None,
    )


def _stepped(state: WindowState, seen: Observation) -> WindowState:
    return replace(state, stepped_at=seen.now, stepped_done=seen.done, stepped_tokens=seen.gauges.made_tokens or 0.0)


def _pause_s(state: WindowState) -> float:
    return min(30.0, max(1.0, state.latency_s))


# --- what bounds us ---


def bounded_by(decision: Decision, seen: Observation, bounds: Bounds) -> str:
    """Say what keeps the run from being faster: `engine`, `preparation`, `source`, `memory` or `limit`.

    A window with free places is short of pages: of prepared ones while the threads that prepare have their hands full,
    else of rows; where no row is left, it is the engine that still has pages. A full one waits for the engine where the
    engine has a queue, refuses, or answers no faster when it is given more; else for memory, or for the window itself:
    its upper bound, or that it is still growing.
    """
    state = decision.state
    if not seen.is_full and seen.in_flight <= state.limit:
        if seen.preparing >= seen.threads:
            return "preparation"
        return "engine" if seen.rows_left == 0 else "source"
    at_the_top = decision.limit >= bounds.most
    slower = bool(state.first_latency_s) and state.latency_s > 1.5 * state.first_latency_s
    if seen.gauges.waiting or decision.rule in {"refused", "preempted", "silent", "late"} or slower:
        return "engine"
    if seen.memory_pages is not None and decision.limit >= seen.memory_pages:
        return "memory"
    return "limit" if at_the_top or state.phase in {"start", "ramp"} else "engine"


# ---- window ----------------------------------------------------------------------------------------------------------
# How many pages may be in flight: a window that grows on evidence.
#
# `Window` is what the flow holds: pages enter and leave it, and twice a second it is told what is seen, asks the rules,
# and changes its size.


TICK_S = 0.5  # how often `Window.observe` is meant to be called


class Gate:
    """So many places and no more, given in the order of asking. Fewer places take none from those inside."""

    def __init__(self, places: int) -> None:
        self.places = places
        self.taken = 0
        self._line: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        """How many stand in line."""
        return sum(not ticket.done() for ticket in self._line)

    def try_enter(self) -> bool:
        """Take a place if there is one and nobody stands in line."""
        if self.taken >= self.places or self.waiting:
            return False
        self.taken += 1
        return True

    async def enter(self) -> None:
        """Take a place, in the order of asking."""
        if self.try_enter():
            return
        ticket: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append(ticket)
        try:
            await ticket
        except asyncio.CancelledError:
            if ticket.done() and not ticket.cancelled():  # the place was given just before the cancellation
                self.leave()
            raise

    def leave(self) -> None:
        """Give a place back."""
        self.taken -= 1
        self._admit()

    def resize(self, places: int) -> None:
        """Change the number of places; those who can come in now do."""
        self.places = places
        self._admit()

    def _admit(self) -> None:
        while self._line and (self._line[0].done() or self.taken < self.places):
            ticket = self._line.popleft()
            if not ticket.done():
                self.taken += 1
                ticket.set_result(None)


class Window:
    """The pages in flight: `acquire` and `release` around each, `trouble` for each failed try, `observe` every tick.

    `ahead` is a second gate, for the pages that are prepared or in flight: as many as the window plus `ahead`.
    """

    def __init__(self, bounds: Bounds, ahead: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self.rules = Rules(bounds)
        self.seconds_bound: defaultdict[str, float] = defaultdict(float)  # what bounded the run, and for how long
        self._state = self.rules.start()
        self._gate = Gate(self._state.limit)
        self._ahead = ahead
        self.ahead = Gate(self._state.limit + ahead)
        self._clock = clock
        self._begun = self._looked_at = self._marked_at = clock()
        self._full_s = 0.0
        self._done = self._tokens = 0
        self._latency_sum_s = 0.0
        self._first = _FirstPages()
        self._troubles: Counter[str] = Counter()

    @property
    def limit(self) -> int:
        """How many pages may be in flight now."""
        return self._gate.places

    @property
    def in_flight(self) -> int:
        """How many are; more than the limit for a while after a cut."""
        return self._gate.taken

    async def acquire(self) -> float:
        """Wait for a place, in the order of asking; return the time, for `release`."""
        self._mark()
        await self._gate.enter()
        self._mark()
        return self._clock()

    def try_acquire(self) -> float | None:
        """Take a place at once, or return None."""
        self._mark()
        return self._clock() if self._gate.try_enter() else None

    def release(self, since: float, answered: bool = True, tokens: int = 0) -> None:
        """Give the place back that was got at `since`; `answered`: whether the engine worked for it."""
        self._mark()
        latency_s = self._clock() - since
        if answered:
            self._first.note_answer(since + latency_s, self._gate.taken)
            self._done += 1
            self._tokens += tokens
            self._latency_sum_s += latency_s
        self._first.note_end(since, latency_s)
        self._gate.leave()

    def trouble(self, kind: str) -> None:
        """Count a try that failed: `refused` (429, 503), `timeout` or `failed` (other 5xx, broken connections)."""
        self._troubles[kind] += 1

    def observe(
        self,
        gauges: Gauges | None = None,
        memory_available: int | None = None,
        bytes_a_page: float | None = None,
        preparing: int = 0,
        threads: int = 1,
        rows_left: int | None = None,
    ) -> dict[str, Any]:
        """Look, decide, and return the decision as telemetry for JSON."""
        self._mark()
        now = self._clock()
        passed_s = now - self._looked_at
        seen = Observation(
            now=now,
            in_flight=self._gate.taken,
            ready=self._gate.waiting,
            full_share=min(1.0, self._full_s / passed_s) if passed_s > 0 else 1.0,
            done=self._done,
            latency_sum_s=self._latency_sum_s,
            first_latency_s=self._first.latency_s,
            tokens=self._tokens,
            refused=self._troubles["refused"],
            timeouts=self._troubles["timeout"],
            failed=self._troubles["failed"],
            gauges=gauges or Gauges(),
            memory_available=memory_available,
            bytes_a_page=bytes_a_page,
            preparing=preparing,
            threads=threads,
            rows_left=rows_left,
        )
        decision = self.rules.decide(self._state, seen)
        bound = bounded_by(decision, seen, self.rules.bounds)
        self.seconds_bound[bound] += passed_s
        self._state, self._looked_at, self._full_s = decision.state, now, 0.0
        self._troubles.clear()
        self._gate.resize(decision.limit)
        self.ahead.resize(decision.limit + self._ahead)
        return telemetry(decision, seen, bound, now - self._begun)

    def _mark(self) -> None:
        """Add the time since the last change to that in which every place was taken."""
        now = self._clock()
        self._full_s += (now - self._marked_at) * (self._gate.taken >= self._gate.places)
        self._marked_at = now


class _FirstPages:
    """The pages sent before the first answer: how long they took says how fast the engine is without a crowd."""

    def __init__(self) -> None:
        self._answer_at: float | None = None
        self._sent = self._ended = 0
        self._latency_sum_s = 0.0

    def note_answer(self, now: float, in_flight: int) -> None:
        if self._answer_at is None:
            self._answer_at, self._sent = now, in_flight

    def note_end(self, since: float, latency_s: float) -> None:
        if self._answer_at is not None and since < self._answer_at:
            self._ended += 1
            self._latency_sum_s += latency_s

    @property
    def latency_s(self) -> float | None:
        """Their mean latency; None before nine in ten have ended."""
        return self._latency_sum_s / self._ended if self._ended and self._ended >= 0.9 * self._sent else None


def fixed_window(places: int, ahead: int = 0) -> Window:
    """Return a window that stays as it is."""
    return Window(Bounds(least=places, most=places, initial=places), ahead)


def telemetry(decision: Decision, seen: Observation, bound: str, age_s: float) -> dict[str, Any]:
    """Return a decision, what was seen, and what bounds the run, as one JSON line of the telemetry file."""
    return {
        "at_s": round(age_s, 2),
        "limit": decision.limit,
        "rule": decision.rule,
        "reason": decision.reason,
        "bounded_by": bound,
        "phase": decision.state.phase,
        "in_flight": seen.in_flight,
        "ready": seen.ready,
        "preparing": seen.preparing,
        "full_share": round(seen.full_share, 3),
        "done": seen.done,
        "tokens": seen.tokens,
        "latency_s": round(decision.state.latency_s, 3),
        "refused": seen.refused,
        "timeouts": seen.timeouts,
        "failed": seen.failed,
        "running": seen.gauges.running,
        "waiting": seen.gauges.waiting,
        "kv_usage": seen.gauges.kv_usage,
        "preemptions": seen.gauges.preemptions,
        "memory_pages": seen.memory_pages,
    }


# ---- reader ----------------------------------------------------------------------------------------------------------
# A row → its result: each frame of its picture prepared and asked about, again while the text is not sound.


RequestT = TypeVar("RequestT")


class Engine(Protocol[RequestT]):
    """What answers pages. `encode` is work for a thread, `ask` waits for the answer and asks again where that may help.

    `watch` runs beside the pages and raises `EngineError` when the engine is gone.
    """

    def encode(self, page: Page, row: int, attempt: Attempt | None = None) -> RequestT:
        """Make the request for a page of the picture in `row` of the split; None: its own question."""

    async def ask(self, request: RequestT, again: Callable[[], Awaitable[RequestT | Refusal]]) -> PageResult:
        """Return what became of the page."""

    def watch(self) -> Coroutine[Any, Any, None]:
        """Return never, or raise when the engine is gone."""


@dataclass(frozen=True)
class Reading:
    """How a picture is read.

    `retries_quality`: how often a page is asked again whose text was cut off or loops. `context_tokens`: what page and
    text may have together, where the engine says. `all_frames`: not the first alone. `page_timeout_s`: how long the
    preparation of a page may take.
    """

    limits: PageLimits
    question: Question
    text: TextRules = field(default_factory=TextRules)
    retries_quality: int = 0
    context_tokens: int | None = None
    all_frames: bool = False
    page_timeout_s: float = 120.0


@dataclass(frozen=True)
class Prepared(Generic[RequestT]):
    """A page ready to be asked about, or why not."""

    request: RequestT | Refusal
    frames: int
    has_ink: bool = True


@dataclass(frozen=True)
class _Sheet:
    """One frame of the picture in a row: `cell` reads it, `row` is its place in the split."""

    cell: Callable[[], object]
    row: int
    frame: int = 0


class Reader(Generic[RequestT]):
    """Reads pictures with an engine."""

    def __init__(
        self, reading: Reading, engine: Engine[RequestT], tally: Tally, window: Window, threads: Threads
    ) -> None:
        self._reading = reading
        self._engine = engine
        self._tally = tally
        self._window = window
        self._threads = threads

    async def read(self, cell: Callable[[], object], row: int) -> PageResult:
        """Return what became of the picture in `row` of the split."""
        first = _Sheet(cell, row)
        result, count = await self._sheet(first)
        if count == 1 or result.status == "error":
            return result
        if not self._reading.all_frames:
            self._tally.frames_left_out(row, count)
            return result
        return joined([result, *[(await self._sheet(replace(first, frame=at)))[0] for at in range(1, count)]])

    async def _sheet(self, sheet: _Sheet) -> tuple[PageResult, int]:
        """Return the best result for one frame, its text as it is wanted, and how many frames there are."""
        prepared = await self._prepare(sheet, None)
        last = best = await self._ask(sheet, prepared, None)
        attempt = 0
        while last.status in ASKED_AGAIN and attempt < self._reading.retries_quality:
            attempt += 1
            self._tally.asked_again += 1
            how = self._next(sheet, attempt, last)
            last = await self._ask(sheet, await self._prepare(sheet, how), how)
            kept = await asyncio.to_thread(better, best, last)
            self._tally.left_out(best if kept is last else last)
            best = replace(kept, attempts=best.attempts + last.attempts)
        if best.text is not None:
            best = await asyncio.to_thread(as_wanted, best, self._reading.text)
        return best, prepared.frames

    def _next(self, sheet: _Sheet, attempt: int, last: PageResult) -> Attempt:
        context = self._reading.context_tokens
        left = context - last.prompt_tokens if context and last.prompt_tokens else None
        return next_attempt(self._reading.question, sheet.row, attempt, last.status, left, sheet.frame)

    async def _ask(self, sheet: _Sheet, prepared: Prepared[RequestT], how: Attempt | None) -> PageResult:
        """Ask about a page that is prepared, once it has a place in the window; a refused one has its result."""
        if isinstance(prepared.request, Refusal):
            return refused(prepared.request.status, prepared.request.reason)

        async def again() -> RequestT | Refusal:
            return (await self._prepare(sheet, how)).request

        since = await self._window.acquire()
        result = None
        try:
            with self._tally.asking():
                result = await self._engine.ask(prepared.request, again)
        finally:
            answered = result is not None and result.status != "error"
            tokens = None if result is None else result.tokens
            self._window.release(since, answered, tokens or 0)
        if result.status == "error" and result.finish_reason == "stop" and not prepared.has_ink:
            return replace(result, status="blank", text="", error=None)  # no text on a page without ink is right
        return await asyncio.to_thread(with_loop_found, result) if result.text else result

    async def _prepare(self, sheet: _Sheet, how: Attempt | None) -> Prepared[RequestT]:
        self._tally.preparing += 1
        given_up = threading.Event()
        try:
            return await self._threads.run(functools.partial(self._make, sheet, how, given_up))
        except TooSlowError:
            reason = f"the picture was not decoded within {self._reading.page_timeout_s:g} s (--page-timeout)"
            return Prepared(Refusal("error", reason), 1)
        finally:
            given_up.set()
            self._tally.preparing -= 1

    def _make(self, sheet: _Sheet, how: Attempt | None, given_up: threading.Event) -> Prepared[RequestT]:
        reading = self._reading
        page = make_page(sheet.cell(), reading.limits, frame=sheet.frame)
        if given_up.is_set():  # nobody would release what the request takes
            return Prepared(Refusal("error", "too late"), 1)
        if reading.all_frames and page.frames > MOST_FRAMES:
            page = Refusal("error", f"the picture has {page.frames:,} frames, more than {MOST_FRAMES:,}")
        if isinstance(page, Refusal):
            return Prepared(page, page.frames)
        if sheet.frame and not how:
            how = first_attempt(reading.question, sheet.row, sheet.frame)
        return Prepared(self._engine.encode(page, sheet.row, how), page.frames, page.has_ink)


# ---- beside ----------------------------------------------------------------------------------------------------------
# Pictures that lie beside a table, put into its cells: only those that really lie in the input's own folder.


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
    for root in roots:
        try:
            real_root = root.resolve(strict=True)
            real = (real_root / path).resolve(strict=True)
        except (OSError, RuntimeError, ValueError):  # not there, a loop of links, a NUL in the name
            continue
        if real.is_relative_to(real_root) and real.is_file() and os.access(real, os.R_OK):
            return real
    return None


# ---- hf_paths --------------------------------------------------------------------------------------------------------
# Addresses on the Hub: `namespace/name`, `hf://datasets/…` at a revision, `hf://buckets/…`, and what lies there.
#
# A path in one may be a folder, a file, or a pattern. A dataset is read at one commit; a bucket has none, so that its
# files' own hashes stand for what is in it.


HUB_SCHEME = "hf://"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
BUCKETS = "buckets"
PARQUET_SUFFIXES = {"parquet", "pq"}


@dataclass(frozen=True)
class HubPath:
    """A place on the Hub: `kind` is `datasets` or `buckets`; `path` is empty for all of it."""

    kind: str
    repo_id: str
    revision: str | None = None
    path: str = ""

    @property
    def is_bucket(self) -> bool:
        """Whether it is in a bucket, which has no history."""
        return self.kind == BUCKETS

    @property
    def root(self) -> str:
        """The address of the whole dataset or bucket."""
        revision = f"@{self.revision.replace('/', '%2F')}" if self.revision else ""
        return f"{HUB_SCHEME}{self.kind}/{self.repo_id}{revision}"

    def __str__(self) -> str:
        return f"{self.root}/{self.path}" if self.path else self.root

    def overlaps(self, other: HubPath) -> bool:
        """Whether one of the two contains the other. Of a dataset all is one place: its card speaks of all of it."""
        if (self.kind, self.repo_id) != (other.kind, other.repo_id):
            return False
        here, there = self._fixed_parts(), other._fixed_parts()
        shorter = min(len(here), len(there))
        return not self.is_bucket or here[:shorter] == there[:shorter]

    def _fixed_parts(self) -> list[str]:
        """The folders down to the first pattern."""
        parts = self.path.split("/") if self.path else []
        patterns = [number for number, part in enumerate(parts) if is_pattern(part)]
        return parts[: patterns[0]] if patterns else parts


@dataclass(frozen=True)
class HubInput:
    """What was found at an address: at which commit, who may see it, and the files, where it names files itself."""

    at: HubPath
    fingerprint: str
    is_private: bool
    files: tuple[str, ...] | None = None

    @property
    def loader(self) -> dict[str, Any]:
        """The arguments with which `datasets` opens it."""
        if self.files is not None:
            return {"path": _builder_of(self.files), "data_files": {"train": list(self.files)}}
        if self.at.is_bucket:
            return {"path": str(self.at)}
        return {"path": self.at.repo_id, "revision": self.at.revision, "data_dir": self.at.path or None}

    def check_own(self, files: Iterable[str]) -> None:
        """Raise `UsageError` where a card names files that are not this input's: it could be ours that are private.

        `datasets` 5.2 looks at that for datasets, but not for buckets.
        """
        for file in files:
            if not file.startswith(f"{self.at.root}/") or ".." in file.split("/"):
                raise UsageError(f"the card of {self.at} names a file that lies elsewhere, {file!r}; correct the card")


def is_pattern(path: str) -> bool:
    """Whether a path stands for several files."""
    return any(letter in path for letter in "*?[")


def parse_hub_path(name: str, revision: str | None = None, what: str = "input") -> HubPath | None:
    """Read an address; None where `name` is neither a dataset's id nor an `hf://` address.

    Raises `UsageError` for what holds no dataset, and where `revision` is another than that in the address.
    """
    if not name.startswith(HUB_SCHEME):
        return HubPath("datasets", name, revision) if HUB_ID.fullmatch(name) else None
    from huggingface_hub.errors import HfUriError
    from huggingface_hub.utils import parse_hf_uri  # type: ignore[attr-defined]

    try:
        uri = parse_hf_uri(name)
    except HfUriError as error:
        raise UsageError(f"{what} {name!r}: {error.msg}") from error
    if uri.type not in ("dataset", "bucket"):
        raise UsageError(
            f"{what} {name!r} names a {uri.type}; give hf://datasets/namespace/name[@revision][/path] "
            "or hf://buckets/namespace/name[/path]"
        )
    if ".." in uri.path_in_repo.split("/"):
        raise UsageError(f"{what} {name!r}: '..' leads nowhere on the Hub; give the path itself")
    if revision is not None and uri.is_bucket:
        raise UsageError(f"{what} {name!r}: a bucket has no revisions; leave --revision {revision} out")
    if revision is not None and uri.revision not in (None, revision):
        raise UsageError(f"{what} {name!r} is at {uri.revision!r}, but --revision is {revision!r}; give one of them")
    return HubPath(f"{uri.type}s", uri.id, uri.revision or revision, uri.path_in_repo)


def look_at(at: HubPath) -> HubInput:
    """Find out what lies at an address, and pin it: a dataset to its commit, a bucket's files to their hashes."""
    from huggingface_hub import HfApi

    if at.is_bucket:
        is_private = bool(HfApi().bucket_info(at.repo_id).private)
        found = _files_at(at)
        return HubInput(at, f"bucket:{at}:{_digest(found)}", is_private, _named_files(at, found))
    info = HfApi().dataset_info(at.repo_id, revision=at.revision)
    at = dataclasses.replace(at, revision=str(info.sha))
    fingerprint = f"hub:{at.repo_id}@{info.sha}" + (f"/{at.path}" if at.path else "")
    return HubInput(at, fingerprint, bool(info.private), _named_files(at, _files_at(at)) if at.path else None)


def _files_at(at: HubPath) -> Mapping[str, Mapping[str, Any]]:
    """Return what the client says of each file at an address, by the file's path from the root. One listing."""
    from huggingface_hub import HfFileSystem

    files = HfFileSystem(skip_instance_cache=True)  # what another one listed earlier may be old
    where = str(at)
    list_files: Any = files.glob if is_pattern(at.path) else files.find
    found = list_files(where, detail=True)
    prefix = at.root.removeprefix(HUB_SCHEME) + "/"
    by_path = {name.removeprefix(prefix): about for name, about in found.items() if about["type"] == "file"}
    if not by_path:
        raise FileNotFoundError(f"there is no file at {where}")
    return dict(sorted(by_path.items()))


def _digest(found: Mapping[str, Mapping[str, Any]]) -> str:
    digest = hashlib.sha256()
    for path, about in found.items():
        digest.update(json.dumps([path, about["size"], about.get("xet_hash")]).encode())
    return digest.hexdigest()[:32]


def _named_files(at: HubPath, found: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return the addresses of the files that a path names, one by one or by a pattern; None for a folder."""
    if not is_pattern(at.path) and at.path not in found:
        return None
    names = [path for path in found if not path.rpartition("/")[2].startswith(".")]
    _check_one_kind(at, names)
    return tuple(f"{at.root}/{name}" for name in names)


def _check_one_kind(at: HubPath, names: Sequence[str]) -> None:
    kinds = {_suffix(name) for name in names}
    if kinds & PARQUET_SUFFIXES and kinds - PARQUET_SUFFIXES:
        raise UsageError(f"{at} names files of several kinds: {', '.join(sorted(kinds))}; name those of one kind")


def _builder_of(files: Sequence[str]) -> str:
    return "parquet" if _suffix(files[0]) in PARQUET_SUFFIXES else "imagefolder"


def _suffix(name: str) -> str:
    return name.rpartition("/")[2].rpartition(".")[2].lower()


# ---- patience --------------------------------------------------------------------------------------------------------
# Patience with the network: what fails for a while is tried again, within bounds.
#
# The Hub refuses for many reasons that pass: quotas, races of several writers, its own troubles. How long it wants to
# be left alone it says itself.


ValueT = TypeVar("ValueT")
PASSING = frozenset({408, 409, 412, 425, 429})  # refusals below 500 that may pass
FIRST_NETWORK_PAUSE_S = 1.0
XET_REFUSAL = re.compile(r"HTTP status client error \((\d{3})\b")  # hf_xet 1.8 has no other word for it


class Patience:
    """For how long something is tried again. `hurry` shortens it, from any thread: the run has to end."""

    def __init__(self, retry_for_s: float, longest_pause_s: float = 60.0) -> None:
        self._retry_for_s = retry_for_s
        self._longest_pause_s = longest_pause_s
        self._hurried = threading.Event()
        self._last_moment = math.inf

    @property
    def is_hurried(self) -> bool:
        """Whether the run has to end soon."""
        return self._hurried.is_set()

    def hurry(self, within_s: float) -> None:
        """Try nothing again after so many seconds, and end the pause of now."""
        self._last_moment = min(self._last_moment, time.monotonic() + within_s)
        self._hurried.set()

    def call(self, action: Callable[[], ValueT], what: str) -> ValueT:
        """Do something that may fail for a while; raise its last error where it fails for good."""
        give_up_at = time.monotonic() + self._retry_for_s
        pause_s = FIRST_NETWORK_PAUSE_S
        while True:
            try:
                return action()
            except network_errors() as error:
                wait_s = max(wished_pause_s(error), pause_s * random.uniform(0.5, 1.0))  # noqa: S311 - jitter
                if is_permanent(error) or time.monotonic() >= min(give_up_at, self._last_moment):
                    raise
                say(f"{what} fails for now ({_in_short(error)}); trying again in {wait_s:.0f} s")
                if self.is_hurried:
                    time.sleep(min(wait_s, FIRST_NETWORK_PAUSE_S))
                else:
                    self._hurried.wait(wait_s)
                pause_s = min(self._longest_pause_s, 2 * pause_s)


def is_permanent(error: Exception) -> bool:
    """Whether trying again can't help: the Hub said no, or a file is not there."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    refused = XET_REFUSAL.search(str(error)) if status is None else None
    if refused:
        status = int(refused[1])
    if status is None:
        return isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError | NotADirectoryError)
    return bool(status < 500 and status not in PASSING)


def wished_pause_s(error: Exception) -> float:
    """Return the seconds after which the Hub wants to be asked again; 0 where it does not say."""
    headers: Any = getattr(getattr(error, "response", None), "headers", None)
    if headers is None:
        return 0.0
    with contextlib.suppress(ValueError):
        return max(0.0, float(headers.get("retry-after") or ""))
    from huggingface_hub.utils import parse_ratelimit_headers  # type: ignore[attr-defined]

    limit = parse_ratelimit_headers(headers)
    return float(limit.reset_in_seconds) if limit and not limit.remaining else 0.0


def _in_short(error: Exception) -> str:
    words = f"{type(error).__name__}: {error}".strip()
    return words.splitlines()[0][:300]


# ---- parquet_rows ----------------------------------------------------------------------------------------------------
# Rows of parquet files, local or on the Hub, by address.
#
# Footers are read first: file → row groups → rows. Then batch by batch out of the row groups, so that memory is flat
# whatever the size of a row group, and a resumed run touches the row groups of its own rows only. What the Hub fails to
# give is asked for again from where it broke off, for a while.


FOOTER_THREADS = 16
MOST_READ_AHEAD_BYTES = 128 * 1024**2  # a larger row group is not fetched whole but piece by piece
PIECE_BYTES = 8 * 1024**2
REMOTE_AHEAD_BYTES = 256 * 1024  # fetched beyond what is asked for; a row group is asked for in one piece
READS_OF_DAMAGED = 3  # before what can't be decoded is called damaged
BATCH_ROWS = 64  # rows decoded at once out of a row group: what bounds memory when a row group is a whole file


@dataclass(frozen=True)
class RowGroup:
    """One row group of one parquet file, and the address of its first row."""

    file: str
    index: int
    start: int
    num_rows: int


class ParquetRows:
    """Rows of parquet files, local paths or `hf://` addresses, read through their row groups."""

    def __init__(self, files: Sequence[str], features: Any = None, patience: Patience | None = None) -> None:
        self._patience = patience or Patience(0.0)
        with ThreadPoolExecutor(FOOTER_THREADS) as pool:
            try:
                footers = list(pool.map(lambda file: _footer_of(file, self._patience), files))
            except BaseException:
                self._patience.hurry(0.0)  # the pool waits for its threads
                raise
        self._groups = list(_row_groups(files, [footer.counts for footer in footers]))
        self._starts = [group.start for group in self._groups]
        self.num_rows = sum(group.num_rows for group in self._groups)
        self.schema: pa.Schema = footers[0].schema
        self.column_bytes = sum((footer.column_bytes for footer in footers), Counter[str]())
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
        """Return (address of its first row, batch) of the batch that holds `address`, trying again where that helps."""
        import pyarrow as pa

        group = self._groups[bisect.bisect_right(self._starts, address) - 1]
        place = f"reading {group.file}, row group {group.index},"
        try:
            if "://" in group.file:
                damages = itertools.count(1)
                return self._patience.call(lambda: self._sought_from_afar(address, place, damages), place)
            return self._sought(address)
        except (*network_errors(), pa.ArrowInvalid) as error:
            raise SourceError(f"{place} failed: {error}; run again to resume") from error

    def _sought_from_afar(self, address: int, place: str, damages: Iterator[int]) -> tuple[int, pa.Table]:
        """Do as `_sought`. Bytes that pyarrow makes no sense of may have been cut on their way, but not every time."""
        try:
            return self._sought(address)
        except OSError as error:
            if type(error) is OSError and error.errno is None and next(damages) >= READS_OF_DAMAGED:
                raise SourceError(
                    f"{place} failed {READS_OF_DAMAGED} times: {error}; the file is damaged: upload it anew"
                ) from error
            raise

    def _sought(self, address: int) -> tuple[int, pa.Table]:
        """Go on in the open stream to the batch that holds `address`; a stream that breaks is opened anew next time."""
        if self._stream is None or not self._stream_reaches(address):
            group = self._groups[bisect.bisect_right(self._starts, address) - 1]
            self._stream = (group.start, self._open(group), self.schema.empty_table())
        start, batches, batch = self._stream
        self._stream = None
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
        import pyarrow.parquet as pq

        with _open_file(group.file) as handle, pq.ParquetFile(handle) as file:
            reader = file
            if file.metadata.row_group(group.index).total_byte_size > MOST_READ_AHEAD_BYTES:
                # by itself pyarrow fetches a row group whole, which costs three times its size
                reader = pq.ParquetFile(handle, metadata=file.metadata, pre_buffer=False, buffer_size=PIECE_BYTES)
            yield from reader.iter_batches(batch_size=BATCH_ROWS, row_groups=[group.index])

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
    from fsspec.core import url_to_fs

    filesystem, path = url_to_fs(file)
    return filesystem.open(path, "rb", block_size=REMOTE_AHEAD_BYTES)


@dataclass(frozen=True)
class Footer:
    """What a parquet file says of itself: the rows of each row group, and the bytes of each column, compressed."""

    counts: Sequence[int]
    schema: pa.Schema
    column_bytes: Counter[str]


def _footer_of(file: str, patience: Patience) -> Footer:
    return patience.call(lambda: _footer(file), f"reading {file}") if "://" in file else _footer(file)


def _footer(file: str) -> Footer:
    import pyarrow.parquet as pq

    sizes: Counter[str] = Counter()
    with _open_file(file) as handle, pq.ParquetFile(handle) as parquet:
        metadata = parquet.metadata
        groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
        for group in groups:
            for place in range(group.num_columns):
                chunk = group.column(place)
                sizes[chunk.path_in_schema.partition(".")[0]] += chunk.total_compressed_size
        return Footer([group.num_rows for group in groups], parquet.schema_arrow, sizes)


def _row_groups(files: Sequence[str], counts: Sequence[Sequence[int]]) -> Iterator[RowGroup]:
    start = 0
    for file, group_rows in zip(files, counts, strict=True):
        for index, num_rows in enumerate(group_rows):
            if num_rows:
                yield RowGroup(file, index, start, num_rows)
            start += num_rows


# ---- splits ----------------------------------------------------------------------------------------------------------
# The splits of a dataset: which one is read, and the one that save_to_disk wrote.


def choose_split(there: Sequence[str], wanted: str | None, where: str = "the input") -> str:
    """Return the wanted split; or, where none is named, the only one, or `train`."""
    if wanted is not None:
        if wanted in there:
            return wanted
        raise UsageError(f"no split {wanted!r} in {where}; --split takes one of: {', '.join(there) or '(none found)'}")
    if len(there) == 1:
        return there[0]
    if "train" in there:
        return "train"
    raise UsageError(f"which split? Name one of {where} with --split: {', '.join(there) or '(none found)'}")


def is_saved(path: Path) -> bool:
    """Whether save_to_disk wrote this folder: one split, or several."""
    return any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))


def open_saved(path: Path, wanted: str | None, where: str = "the input") -> tuple[Any, str]:
    """Return (the split as a `datasets.Dataset`, its name) out of a folder that save_to_disk wrote."""
    import datasets

    saved = datasets.load_from_disk(str(path))
    if isinstance(saved, datasets.DatasetDict):
        split = choose_split(list(saved), wanted, where)
        return saved[split], split
    return saved, choose_split([str(saved.split or "train")], wanted, where)


# ---- stream ----------------------------------------------------------------------------------------------------------
# Rows of a Hub dataset that is not parquet, streamed: what has passed is not kept, and nothing is downloaded ahead.
#
# A stream has no addresses. It is read forward; a row before the place where it stands, or a stream that broke, means
# opening it anew and passing over the rows before.


class StreamedRows:
    """Rows of a stream, read forward. `open_stream` opens it at a row; `num_rows` is how many there are.

    `home` is the address below which the dataset's files lie: a picture that is an address there is fetched, any other
    address or path stays what it is.
    """

    def __init__(
        self,
        open_stream: Callable[[int], Iterator[dict[str, Any]]],
        schema: pa.Schema,
        num_rows: int,
        home: str,
        patience: Patience,
    ) -> None:
        self.schema = schema
        self.num_rows = num_rows
        self._open_stream = open_stream
        self._home = home
        self._patience = patience
        self._stream: Iterator[dict[str, Any]] | None = None
        self._at = 0

    def read(self, addresses: Sequence[int]) -> pa.Table:
        """Read rows by address; cheapest is a range that goes on where the last read ended."""
        import pyarrow as pa

        wanted = [int(address) for address in addresses]
        found = {address: self._row(address) for address in sorted(set(wanted))}
        return pa.Table.from_pylist([found[address] for address in wanted], schema=self.schema)

    def _row(self, address: int) -> dict[str, Any]:
        place = f"reading row {address} of the input"
        try:
            row = self._patience.call(lambda: self._next(address), place)
            return self._patience.call(lambda: {name: self._fetched(cell) for name, cell in row.items()}, place)
        except StopIteration:
            raise SourceError(
                f"the input ended at row {self._at}, but has {self.num_rows} rows by its card; "
                f"give --max-samples {self._at}"
            ) from None
        except network_errors() as error:
            raise SourceError(f"{place} failed: {error}; run again to resume") from error

    def _next(self, address: int) -> dict[str, Any]:
        stream, self._stream = self._stream, None  # one that breaks is opened anew
        if stream is None or address < self._at:
            stream, self._at = self._open_stream(address), address
        while True:
            row = next(stream)
            self._at += 1
            if self._at > address:
                self._stream = stream
                return row

    def _fetched(self, cell: Any) -> Any:
        """Return a cell with the bytes in it of a picture that is an address of this dataset's own files."""
        if not isinstance(cell, dict) or set(cell) != {"bytes", "path"} or cell["bytes"] is not None:
            return cell
        address = str(cell["path"])
        if not address.startswith(self._home) or ".." in address.split("/"):
            return cell
        import fsspec

        with fsspec.open(address, "rb") as file:
            return {"bytes": file.read(), "path": address.rpartition("/")[2]}


def open_streamed(builder: Any, home: str, split: str, patience: Patience) -> StreamedRows | None:
    """Open a Hub dataset as a stream; None where that, or its number of rows, needs all of it to be downloaded.

    `home` is the address below which its files lie.
    """
    streamed = builder.as_streaming_dataset(split=split).decode(False)
    splits = builder.info.splits or {}
    is_folder = builder.name == "imagefolder"
    if is_folder and any(map(_is_packed, builder.config.data_files[split])):
        return None  # the addresses of its pictures are not those of files
    if split in splits and splits[split].num_examples:
        num_rows = int(splits[split].num_examples)
    elif is_folder:
        num_rows = sum(1 for _ in streamed)  # names only: no picture is fetched
    else:
        return None
    features = streamed.features or streamed._resolve_features().features
    return StreamedRows(
        lambda start: iter(streamed.skip(start) if start else streamed),
        features.arrow_schema,
        num_rows,
        home,
        patience,
    )


def _is_packed(file: str) -> bool:
    return str(file).lower().endswith((".zip", ".tar", ".gz", ".tgz", ".xz", ".bz2", ".zst", ".7z", ".rar"))


# ---- unreadable ------------------------------------------------------------------------------------------------------
# Why an input can't be read, in words that list what there is and end with the next step.


CONFIG_ERRORS = ("Config name is missing", "BuilderConfig '")


def unreadable(
    name: str, error: Exception, *, repo_id: str | None, config: str | None, revision: str | None
) -> UsageError:
    """Return what to say where the Hub or `datasets` refuse an input; `repo_id` is its dataset on the Hub, if any."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    causes = list(_causes(error))
    # `datasets` drops the cause of this one
    if repo_id and (_has(causes, GatedRepoError) or "is a gated dataset" in str(error)):
        return UsageError(f"input {name!r} is gated{_how_to_be_let_in(repo_id)}")
    if repo_id and _has(causes, RevisionNotFoundError):
        return UsageError(
            f"input {name!r} has no revision {revision!r}; --revision takes a commit, or one of: {_revisions(repo_id)}"
        )
    if repo_id and _has(causes, RepositoryNotFoundError):
        return UsageError(f"input {name!r}: no such dataset on the Hub, or a private one{_how_to_see_it()}")
    if str(error).startswith(CONFIG_ERRORS) and (there := re.search(r"\[.*\]", str(error))):
        names = ", ".join(map(str, ast.literal_eval(there[0])))
        what = "which configuration? Name one" if config is None else f"no configuration {config!r}; choose one"
        return UsageError(f"input {name!r}: {what} with --config: {names}")
    cause = error.__cause__ or error  # `datasets` wraps what says most
    return UsageError(
        f"input {name!r} can't be read as a dataset: {type(cause).__name__}: {cause}; "
        "check the path, --config and --split"
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _has(causes: Iterable[BaseException], kind: type[BaseException]) -> bool:
    return any(isinstance(cause, kind) for cause in causes)


def _how_to_be_let_in(repo_id: str) -> str:
    from huggingface_hub import HfApi

    page, asker = f"{HfApi().endpoint}/datasets/{repo_id}", _asker()
    if asker is None:
        return (
            f", and there is no token: ask for access at {page}, then set HF_TOKEN (in a job: -s HF_TOKEN) to a token "
            "of the account that was let in"
        )
    return (
        f", and {asker} was not let in, or has a token that may not read gated datasets: ask for access at {page}, or "
        "set HF_TOKEN to a token of the account that was let in"
    )


def _how_to_see_it() -> str:
    asker = _asker()
    if asker is None:
        return ", which nobody sees without a token: check the name, or set HF_TOKEN (in a job: -s HF_TOKEN)"
    return f" that {asker} can't see: check the name, and whose token HF_TOKEN is"


def _asker() -> str | None:
    """Name whose token it is that the Hub refuses; None where there is no token."""
    from huggingface_hub import HfApi, get_token

    if not get_token():
        return None
    with contextlib.suppress(*network_errors()):
        return repr(HfApi().whoami()["name"])
    return "the user of this token"


def _revisions(repo_id: str) -> str:
    from huggingface_hub import HfApi

    with contextlib.suppress(*network_errors()):
        refs = HfApi().list_repo_refs(repo_id, repo_type="dataset")
        return ", ".join(ref.name for ref in [*refs.branches, *refs.tags])
    return "main"


# ---- source ----------------------------------------------------------------------------------------------------------
# Rows of a dataset by address, undecoded.
#
# A source knows how many rows it has and reads any of them as an Arrow table, every column as it is stored. Parquet is
# read out of its row groups; anything else that `datasets` can load is streamed where that is asked for, or
# memory-mapped by it.


OPEN_RETRY_S = 30.0
SOURCE_RETRY_S = 600.0
LONGEST_SOURCE_PAUSE_S = 30.0


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
    `patience` is that with a Hub which fails to give the rows.
    """

    name: str
    split: str
    image_column: str
    rows: Rows
    order: Sequence[int]
    fingerprint: str
    is_private: bool
    roots: tuple[Path, ...] = ()
    patience: Patience = field(default_factory=lambda: Patience(SOURCE_RETRY_S, LONGEST_SOURCE_PAUSE_S))

    def read(self, positions: range) -> pa.Table:
        """Read the wanted rows at `positions` (0 ≤ position < len(order)); pictures beside the table are embedded."""
        if not positions:
            return self.rows.schema.empty_table()
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
    streaming: bool = False,
) -> Source:
    """Open a Hub dataset id, an `hf://` address, a folder of images, parquet, or what `save_to_disk` wrote.

    `streaming` says that a Hub dataset which is not parquet is to be streamed, where it can be, and not downloaded.
    Raises `UsageError` where the input, the configuration, the split or the column is not there: it lists what is.
    """
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    path = Path(name).expanduser()
    is_local = path.exists()
    patience = Patience(SOURCE_RETRY_S, LONGEST_SOURCE_PAUSE_S)
    at = None if is_local else parse_hub_path(name, revision)
    if not is_local and at is None:
        raise UsageError(
            f"input {name!r}: no such file or folder, and not a Hub dataset id (namespace/name) or hf:// address"
        )
    try:
        hub = Patience(OPEN_RETRY_S).call(functools.partial(look_at, at), f"looking at {name}") if at else None
        fingerprint, is_private = (hub.fingerprint, hub.is_private) if hub else (local_fingerprint(path), True)
        found = _open_rows(_Wanted(str(path) if is_local else name, config, split, hub, streaming, shuffle), patience)
    except (
        *network_errors(),
        ValueError,
        LookupError,
        RuntimeError,  # a dataset that is a script
        TypeError,  # what huggingface_hub 2.4 makes of a card that names files beside its bucket
        datasets.exceptions.DatasetsError,
    ) as error:
        repo_id = at.repo_id if at and not at.is_bucket else None
        raise unreadable(name, error, repo_id=repo_id, config=config, revision=at.revision if at else None) from error
    rows, split_name, paths_are_ours = found
    roots: tuple[Path, ...] = ()
    if is_local:
        roots = (path if path.is_dir() else path.parent,)
    elif hub and paths_are_ours:
        roots = _hub_roots(hub)
    return Source(
        name=name,
        split=split_name,
        image_column=choose_image_column(rows.schema, image_column),
        rows=rows,
        order=choose_rows(rows.num_rows, max_samples, shuffle, seed),
        fingerprint=fingerprint,
        is_private=is_private,
        roots=roots,
        patience=patience,
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
    may = [name for name in schema.names if _may_hold_pictures(schema.field(name).type)]
    if not may:
        columns = ", ".join(f"{field.name} ({field.type})" for field in schema)
        raise UsageError(
            f"the input has no column of pictures, only {columns or 'none at all'}; "
            "give a folder of images, or a dataset whose pages are pictures"
        )
    column = _find_image_column(schema, wanted, may)
    if column not in may:
        kind = schema.field(column).type
        raise UsageError(
            f"column {column!r} holds no pictures but {kind}; --image-column takes one of: {', '.join(may)}"
        )
    return column


def _may_hold_pictures(kind: pa.DataType) -> bool:
    import pyarrow as pa

    if pa.types.is_struct(kind):
        return any(field.name == "bytes" for field in kind)
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_null(kind))


def _find_image_column(schema: pa.Schema, wanted: str | None, may: Sequence[str]) -> str:
    import datasets

    if wanted is not None:
        if wanted in schema.names:
            return wanted
        raise UsageError(f"no column {wanted!r} in the input; --image-column takes one of: {', '.join(may)}")
    if "image" in schema.names:
        return "image"
    features = datasets.Features.from_arrow_schema(schema)
    images = [column for column, feature in features.items() if isinstance(feature, datasets.Image)]
    if len(images) == 1:
        return str(images[0])
    raise UsageError(f"which column holds the pages? Name it with --image-column: {', '.join(may)}")


def local_fingerprint(path: Path) -> str:
    """Fingerprint a local input by the names and sizes of its files: it moves with the data, not with the folder."""
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    digest = hashlib.sha256()
    for file in files:
        relative = file.name if file == path else str(file.relative_to(path))
        digest.update(json.dumps([relative, file.stat().st_size]).encode())
    return f"files:{digest.hexdigest()[:32]}"


def _hub_roots(hub: HubInput) -> tuple[Path, ...]:
    """Where `datasets` puts the files of a Hub dataset that is a folder of images; those of a bucket are streamed."""
    import datasets
    from huggingface_hub.constants import HF_HUB_CACHE

    return (
        Path(HF_HUB_CACHE) / f"datasets--{hub.at.repo_id.replace('/', '--')}",
        Path(datasets.config.EXTRACTED_DATASETS_PATH),
    )


@dataclass(frozen=True)
class _Wanted:
    """Which rows are to be opened, and how they will be read."""

    name: str
    config: str | None
    split: str | None
    hub: HubInput | None
    streaming: bool
    shuffled: bool

    @property
    def loader(self) -> dict[str, Any]:
        """The arguments with which `datasets` opens it."""
        return self.hub.loader if self.hub else {"path": self.name}


def _open_rows(wanted: _Wanted, patience: Patience) -> tuple[Rows, str, bool]:
    """Return (rows, split name, whether paths in the cells come from `datasets` itself and not from the data)."""
    import datasets

    name, split, hub = wanted.name, wanted.split, wanted.hub
    path = Path(name)
    if hub is None and is_saved(path):
        saved, chosen = open_saved(path, split)
        return MappedRows(saved), chosen, False
    if hub is None and path.is_file():
        if path.suffix.lower() not in {".parquet", ".pq"}:
            raise UsageError(f"input {name!r} is a file but not parquet; give a parquet file, or the folder it lies in")
        chosen = choose_split(["train"], split)
        return ParquetRows([name]), chosen, False
    builder = datasets.load_dataset_builder(name=wanted.config, **wanted.loader)
    files = builder.config.data_files or {}
    chosen = choose_split([str(key) for key in files], split)
    if hub:
        hub.check_own(str(file) for file in files[chosen])
    if builder.name == "parquet":
        return ParquetRows([str(file) for file in files[chosen]], builder.info.features, patience), chosen, False
    if hub and (wanted.streaming or hub.at.is_bucket):
        streamed = _open_stream(builder, hub, chosen, wanted, patience)
        if streamed:
            return streamed, chosen, False
    if hub is None:
        _refuse_line_breaks(path)
    anew = {}
    if hub and hub.at.is_bucket:  # of which `datasets` 5.2 keeps files by name alone: they would never change
        anew = {"download_mode": "force_redownload", "verification_mode": "no_checks"}
    loaded = datasets.load_dataset(name=wanted.config, split=chosen, **wanted.loader, **anew)
    return MappedRows(loaded), chosen, builder.name == "imagefolder"


def _open_stream(builder: Any, hub: HubInput, split: str, wanted: _Wanted, patience: Patience) -> Rows | None:
    """Open what is not parquet as a stream, where that can be done; else say that it is downloaded.

    A folder of images in a bucket is streamed in any order: `datasets` would keep the files under other names.
    """
    of_bucket = hub.at.is_bucket and builder.name == "imagefolder"
    if of_bucket or (wanted.streaming and not wanted.shuffled):
        streamed = open_streamed(builder, f"{hub.at.root}/", split, patience)
        if streamed:
            return streamed
    if of_bucket:
        raise UsageError(f"{wanted.name}: pictures in a bucket are read one by one; unpack them there")
    reason = (
        "--shuffle reads it in another order"
        if wanted.shuffled
        else "how many rows it has stands nowhere, or it is packed"
    )
    say(f"{wanted.name} can't be streamed, for {reason}: downloading it")
    return None


def _refuse_line_breaks(folder: Path) -> None:
    """Refuse file names that `datasets` passes over in silence: a page would be missing, and nobody told."""
    for file in folder.rglob("*"):
        if "\n" in file.name or "\r" in file.name:
            raise UsageError(f"{str(file)!r}: `datasets` can't read a name with a line break; rename the file")


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


# ---- flow ------------------------------------------------------------------------------------------------------------
# The flow of a run: rows → pages → an engine → blocks, with everything bounded.
#
# Preparation runs ahead of the engine in as many threads as there are cores; so many pages and no more are with the
# engine; so many blocks and no more are open. Memory does not grow with the dataset.


OPEN_BLOCK_BYTES = 2 * 1024**3  # beyond this no further block is opened while another is open


@dataclass(frozen=True)
class Job:
    """What a run has to do: from where, with what limits, to where.

    `todo` has the numbers of the blocks to write. One that is there already is written anew: its failed rows are asked
    about again, the others stay as they are.
    """

    source: Source
    plan: BlockPlan
    blocks: Blocks
    todo: Sequence[int]
    reading: Reading
    output_column: str
    settings: Mapping[str, Any]
    info: Mapping[str, Any]
    results_only: bool = False
    extras: Extras = NO_EXTRAS

    def schema(self) -> pa.Schema:
        """Return the schema of a block."""
        without = self.source.image_column if self.results_only else None
        schema = self.source.rows.schema
        return output_schema(schema, self.output_column, self.settings, without=without, extras=self.extras)


@dataclass
class OpenBlock:
    """A block whose pages are under way: `results` has one place a row, `missing` counts those still empty."""

    number: int
    addresses: Sequence[int]
    rows: pa.Table
    results: list[PageResult | None]
    kept_info: list[str | None]
    missing: int

    def put(self, index: int, result: PageResult) -> bool:
        """Put the result of a row in its place; return whether it was the last one."""
        self.results[index] = result
        self.missing -= 1
        return self.missing == 0


def count_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


async def run_job(job: Job, engine: Engine[RequestT], tally: Tally, window: Window) -> None:
    """Ask about every page of the job's blocks, as many at once as the window has places; return when all are written.

    Raises the first `JobError` of the engine, the source or the disk; blocks that were closed stay.
    """
    threads = Threads(count_cores(), job.reading.page_timeout_s)
    run = _Run(job, engine, tally, window, Reader(job.reading, engine, tally, window, threads))
    try:
        await run.to_the_end()
    except* JobError as group:
        raise _first(group) from None
    finally:
        threads.close()
        job.source.patience.hurry(0.0)  # or the end would wait for a Hub that is away


def _first(group: BaseExceptionGroup[JobError]) -> JobError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, JobError)
    return error


class _Run(Generic[RequestT]):
    """One run of a job: the tasks and what bounds them."""

    def __init__(
        self, job: Job, engine: Engine[RequestT], tally: Tally, window: Window, reader: Reader[RequestT]
    ) -> None:
        self._job = job
        self._engine = engine
        self._tally = tally
        self._reader = reader
        self._closed = job.blocks.closed()
        self._window = window
        self._open: dict[int, int] = {}  # block → bytes
        self._closed_one = asyncio.Event()

    async def to_the_end(self) -> None:
        """Run all pages beside the engine's watch."""
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(self._engine.watch())
            async with asyncio.TaskGroup() as pages:
                for number in self._job.todo:
                    await self._room_for_a_block()
                    await self._open_block(number, pages)
            watch.cancel()

    async def _room_for_a_block(self) -> None:
        # A slow page keeps its block open: three more than the pages in flight can span may be open beside it.
        block_rows = self._job.plan.block_rows
        while len(self._open) >= 3 + -(-self._window.limit // block_rows) or (
            self._open and sum(self._open.values()) > OPEN_BLOCK_BYTES
        ):
            self._closed_one.clear()
            with contextlib.suppress(TimeoutError):  # the window may have grown meanwhile
                async with asyncio.timeout(1.0):  # `wait_for` may swallow a cancellation before Python 3.12
                    await self._closed_one.wait()

    async def _open_block(self, number: int, pages: asyncio.TaskGroup) -> None:
        block = await asyncio.to_thread(self._read, number)
        self._open[number] = block.rows.nbytes
        if not block.missing:
            await self._close(block)
            return
        for index in [index for index, result in enumerate(block.results) if result is None]:
            await self._window.ahead.enter()
            await asyncio.sleep(0)  # a group that ends cancels us here, and not by an error of its own
            pages.create_task(self._page(block, index))

    def _read(self, number: int) -> OpenBlock:
        job = self._job
        positions = job.plan.positions(number)
        rows = job.source.read(positions)
        kept: Sequence[KeptRow | None] = [None] * rows.num_rows
        if number in self._closed:
            kept = kept_rows(job.blocks, number, job.output_column, job.extras)
        return OpenBlock(
            number,
            job.source.order[positions.start : positions.stop],
            rows,
            results=[row.result if row else None for row in kept],
            kept_info=[row.info if row else None for row in kept],
            missing=sum(row is None for row in kept),
        )

    async def _page(self, block: OpenBlock, index: int) -> None:
        def cell() -> object:
            return block.rows[self._job.source.image_column][index].as_py()

        try:
            result = await self._reader.read(cell, int(block.addresses[index]))
        finally:
            self._window.ahead.leave()
        self._tally.count(result)
        if block.put(index, result):
            await self._close(block)

    async def _close(self, block: OpenBlock) -> None:
        await asyncio.to_thread(write_block, self._job, block)
        self._tally.blocks += 1
        del self._open[block.number]
        self._closed_one.set()


def write_block(job: Job, block: OpenBlock) -> None:
    """Write a block of which all results are there."""
    results: Sequence[PageResult] = [result for result in block.results if result is not None]
    table = block_table(
        block.rows,
        results,
        job.schema(),
        job.output_column,
        job.info,
        addresses=block.addresses,
        kept_info=block.kept_info,
        extras=job.extras,
    )
    try:
        job.blocks.write(block.number, table)
    except OSError as error:
        raise JobError(f"writing {job.blocks.where(block.number)}: {error}; free some space and run again") from error


def write_without_pages(job: Job) -> None:
    """Write the one block of a split without rows: that needs no engine."""
    rows = job.source.read(range(0))
    write_block(job, OpenBlock(0, (), rows, results=[], kept_info=[], missing=0))


# ---- card ------------------------------------------------------------------------------------------------------------
# The dataset card: the YAML that `load_dataset` needs, a section for each split of ours, and what people wrote.


CARD_BEGIN = "<!-- lighton-ocr {target}, {rows} rows: written by the script from here -->"
CARD_END = "<!-- lighton-ocr {target}: to here; text outside is kept -->"
OUR_SECTION = re.compile(
    r"<!-- lighton-ocr (?P<target>\S+), (?P<rows>\d+) rows: written by the script from here -->.*?"
    r"<!-- lighton-ocr (?P=target): to here; text outside is kept -->",
    re.DOTALL,
)
SIZES = ("1K", "10K", "100K", "1M", "10M", "100M", "1B", "10B", "100B", "1T")
ASKED_FIRST = ("model", "model_revision", "engine", "flavor", "date", "speed", "cost")  # what people look for first


@dataclass(frozen=True)
class CardContents:
    """What a card says of one split: where it comes from, how far it is, how it was made."""

    input_name: str
    plan: BlockPlan
    statuses: Mapping[str, int]
    facts: Mapping[str, Any]
    command: str
    tags: Sequence[str] = field(default=())


def card_text(earlier: str, contents: CardContents, written: str = "") -> str:
    """Return the card: `earlier`, with what the split needs in its YAML and with its section.

    `written` says when the last block was written: `load_dataset` caches a local folder with a card by what the card
    says alone (datasets 5.2), so that without it a finished output would load as the unfinished one loaded before.
    """
    from huggingface_hub import DatasetCardData

    target = contents.plan.target
    data, text = _taken_apart(earlier)
    described_by_people = "size_categories" in data and not OUR_SECTION.search(text)
    configs = _with_split(_listed(data.get("configs")), target)
    if written:
        ours = next(config for config in configs if config["config_name"] == target.config)
        ours["description"] = f"{sum(contents.statuses.values())} rows of {target.split}, the last written {written}"
    data["configs"] = configs
    data["tags"] = sorted({*map(str, _listed(data.get("tags"))), "ocr", "uv-script", *contents.tags})
    _forget_features(data, target)
    body = _with_section(text, target, _section(contents))
    if not described_by_people:
        data["size_categories"] = [size_category(sum(int(found["rows"]) for found in OUR_SECTION.finditer(body)))]
    return f"---\n{DatasetCardData(**data).to_yaml()}\n---\n\n{body.strip()}\n"


def has_section(card: str, target: Target) -> bool:
    """Whether a card speaks of this split already."""
    return any(found["target"] == _in_markers(target) for found in OUR_SECTION.finditer(card))


def size_category(rows: int) -> str:
    """Return the size of a dataset, as cards have it."""
    if rows < 1000:
        return "n<1K"
    power = min(len(str(rows)) - 4, len(SIZES) - 2)
    return f"{SIZES[power]}<n<{SIZES[power + 1]}"


def _taken_apart(card: str) -> tuple[dict[str, Any], str]:
    """Return (YAML, text) of a card; YAML that nobody can read stays, as text."""
    import yaml
    from huggingface_hub import DatasetCard

    if not card.startswith("---"):
        return {}, card
    try:
        parsed = DatasetCard(card, ignore_metadata_errors=True)
    except (yaml.YAMLError, ValueError):
        return {}, card
    return dict(parsed.data.to_dict()), str(parsed.text)  # type: ignore[no-untyped-call]


def _listed(value: Any) -> list[Any]:
    """Return what people wrote as a list: one entry need not be in one."""
    return value if isinstance(value, list) else [] if value is None else [value]


def _with_split(configs: Iterable[Mapping[str, Any]], target: Target) -> list[dict[str, Any]]:
    """Return the card's configurations with the split in its own; `default` stands first."""
    all_of_them = {str(config.get("config_name", DEFAULT_CONFIG)): dict(config) for config in configs}
    ours = all_of_them.setdefault(target.config, {"config_name": target.config})
    said = _listed(ours.get("data_files"))
    files = [file for file in said if isinstance(file, Mapping)]
    paths = [file for file in said if isinstance(file, str)]  # which are of the split `train`, as `datasets` reads it
    others = [file for file in [*files, *_in_train(paths)] if file.get("split") != target.split]
    ours["data_files"] = [*others, {"split": target.split, "path": target.pattern}]
    return sorted(all_of_them.values(), key=lambda config: config["config_name"] != DEFAULT_CONFIG)


def _in_train(paths: Sequence[str]) -> list[dict[str, Any]]:
    return [{"split": "train", "path": [*paths]}] if paths else []


def _forget_features(data: dict[str, Any], target: Target) -> None:
    """Drop what is said of our configuration's features: they stand in the files, an older run's would be wrong."""
    infos = [info for info in _listed(data.pop("dataset_info", None)) if isinstance(info, Mapping)]
    kept = [info for info in infos if info.get("config_name", DEFAULT_CONFIG) != target.config]
    if kept:
        data["dataset_info"] = kept


def _with_section(text: str, target: Target, section: str) -> str:
    """Put our section where it was, or at the end."""
    for found in OUR_SECTION.finditer(text):
        if found["target"] == _in_markers(target):
            return f"{text[: found.start()]}{section}{text[found.end() :]}"
    return f"{text.strip()}\n\n{section}".strip()


def _in_markers(target: Target) -> str:
    return f"{target.config}/{target.split}"


def _section(contents: CardContents) -> str:
    plan = contents.plan
    done = sum(contents.statuses.values())
    counts = ", ".join(f"{contents.statuses.get(status, 0)} {status}" for status in STATUSES)
    unfinished = f"\n**Unfinished**: {done} of {plan.num_rows} rows; the same command goes on.\n"
    known = {key: value for key, value in contents.facts.items() if value not in (None, "", [])}
    facts = sorted(known.items(), key=lambda fact: fact[0] not in ASKED_FIRST)
    rows = "\n".join(f"| {key} | {_cell(value)} |" for key, value in facts)
    begin, end = CARD_BEGIN, CARD_END
    return (
        f"{begin.format(target=_in_markers(plan.target), rows=done)}\n"
        f"# Text of {contents.input_name}\n{'' if done == plan.num_rows else unfinished}\n"
        f"The rows of split `{plan.target}`, in their order, with the text that was read from each page. "
        f"Source dataset: `{contents.input_name}`.\n\n"
        f"{done} rows: {counts}.\n\n| what | value |\n|---|---|\n{rows}\n\n```bash\n{contents.command}\n```\n"
        f"{end.format(target=_in_markers(plan.target))}"
    )


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(_cell, value))
    return str(value).replace("|", "\\|").replace("\n", " ")


def write_card(folder: Path, contents: CardContents) -> None:
    """Write the card beside the blocks of a folder; an existing card's own text is kept."""
    path = folder / "README.md"
    earlier = path.read_text(encoding="utf-8") if path.exists() else ""
    blocks = BlockFolder(folder, contents.plan.target)
    newest = max(blocks.path(number).stat().st_mtime for number in blocks.closed())
    written = datetime.datetime.fromtimestamp(newest, datetime.UTC).isoformat()
    half = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # two shards may find that they were the last
    half.write_text(card_text(earlier, contents, written), encoding="utf-8")
    half.replace(path)


# ---- interrupt -------------------------------------------------------------------------------------------------------
# Ctrl-C, SIGTERM and SIGHUP: the first ends the run in order, the second at once.


ResultT = TypeVar("ResultT")
ECHO_S = 0.5  # `uv run`, `timeout` and schedulers pass on a signal that has reached us already
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
        self._since = 0.0
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
        if self.number == number and time.monotonic() - self._since < ECHO_S:
            return
        if self.number is not None:
            if self.last_will:
                self.last_will()
            os._exit(128 + number)
        self.number, self._since = number, time.monotonic()
        if self._cancel is None:
            raise Interrupted(number)
        self._cancel()


# ---- uploads ---------------------------------------------------------------------------------------------------------
# Closed blocks on their way to the Hub, by a thread of their own: uploaded at once, committed rarely.
#
# A closed block lies in a local folder first. It is uploaded, which nobody sees, and is there for other runs with the
# next commit: every `commit_every_s` seconds, and at the end, whatever the end is. What is committed leaves the local
# folder, so that the disk holds what is under way and no more. What could not be committed stays there, and the next
# run on the machine commits it. How a block is uploaded and committed is the carrier's.


MOST_AT_ONCE = 32  # blocks uploaded with one question where to put them
MOST_IN_A_COMMIT = 200
MOST_STAGED = 400  # blocks that wait for upload or commit; beyond it closing a block waits, and so does the engine
MOST_STAGED_BYTES = 32 * 1024**3  # the same for their bytes; where the disk has less than twice that, half of it
PUBLISH_RETRY_S = 1800.0
HURRY_S = 15.0  # what is tried again after a signal: whoever sends one kills soon


class Carrier(Protocol):
    """Brings blocks to where they belong. Its methods raise what the client raises."""

    def upload(self, files: Mapping[int, Path]) -> None:
        """Upload some blocks."""

    def commit(self, numbers: Collection[int]) -> None:
        """Let other runs find the blocks that were uploaded."""


class Uploads:
    """What is between a closed block and its commit. `on_commit` is told the blocks of each, with their sizes."""

    def __init__(
        self,
        place: str,
        local: BlockFolder,
        carrier: Carrier,
        *,
        commit_every_s: float,
        on_commit: Callable[[Mapping[int, int]], None],
    ) -> None:
        self._place = place
        self._local = local
        self._carrier = carrier
        self._commit_every_s = commit_every_s
        self._on_commit = on_commit
        self._patience = Patience(PUBLISH_RETRY_S)
        self._waiting: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._uploaded: list[int] = []
        self._last_commit = time.monotonic()
        self._staged: dict[int, int] = {}  # block → bytes, of those that wait for upload or commit
        self._room = threading.Condition()
        self._most_bytes = MOST_STAGED_BYTES
        self._failure: PublishError | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_hurried(self) -> bool:
        """Whether the run was told to end, and has little time left."""
        return self._patience.is_hurried

    def measure_disk(self) -> None:
        """Find out how many bytes may wait here."""
        self._most_bytes = min(MOST_STAGED_BYTES, shutil.disk_usage(self._local.root).free // 2)

    def wait_for_room(self) -> None:
        """Wait where too many blocks are under way."""
        with self._room:
            while len(self._staged) >= MOST_STAGED or sum(self._staged.values()) >= self._most_bytes > 0:
                self.raise_failure()
                self._room.wait(1.0)

    def send(self, number: int) -> None:
        """Send a block on its way."""
        with self._room:
            self._staged[number] = self._local.path(number).stat().st_size
        self._waiting.put(number)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="upload", daemon=True)
            self._thread.start()

    def end(self, first_error: BaseException | None) -> None:
        """Wait until all that is closed is committed. Raises `PublishError` where it could not be."""
        if isinstance(first_error, Interrupted):
            self._patience.hurry(HURRY_S)
        if self._thread is None:
            return
        self._waiting.put(None)
        try:
            self._thread.join()
        except Interrupted:
            self._patience.hurry(HURRY_S)
            self._thread.join()
            raise
        finally:
            self._thread = None
        if self._failure and isinstance(first_error, JobError) and first_error is not self._failure:
            raise PublishError(f"{first_error}\nAnd {self._failure}") from first_error
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise what ended the thread, if anything did."""
        if self._failure:
            raise self._failure

    # The thread

    def _run(self) -> None:
        try:
            goes_on = True
            while goes_on:
                numbers, goes_on = self._next_closed()
                if numbers:
                    self._send(numbers)
                if self._uploaded and self._is_due():
                    self._commit()
            self._commit()
        except Exception as error:  # noqa: BLE001 - the thread's end: the run must hear of it
            self._failure = PublishError(
                f"publishing to {self._place} failed: {type(error).__name__}: {error}. What is not there yet is kept "
                f"in {self._local.root}; the same command publishes it without asking about a page again"
            )
        finally:
            with self._room:
                self._room.notify_all()

    def _next_closed(self) -> tuple[list[int], bool]:
        """Wait for closed blocks, or until a commit is due; return them, and whether more may come."""
        wait_s = max(0.0, self._last_commit + self._commit_every_s - time.monotonic())
        most = max(1, min(MOST_AT_ONCE, MOST_IN_A_COMMIT - len(self._uploaded)))
        numbers: list[int] = []
        with contextlib.suppress(queue.Empty):
            number = self._waiting.get(timeout=wait_s if self._uploaded else None)
            while number is not None:
                numbers.append(number)
                if len(numbers) == most:
                    return numbers, True
                number = self._waiting.get_nowait()
            return numbers, False
        return numbers, True

    def _is_due(self) -> bool:
        since_s = time.monotonic() - self._last_commit
        return (
            since_s >= self._commit_every_s
            or (self._patience.is_hurried and since_s >= HURRY_S / 3)
            or len(self._uploaded) >= MOST_IN_A_COMMIT
            or 2 * sum(self._staged[number] for number in self._uploaded) >= self._most_bytes
        )

    def _send(self, numbers: list[int]) -> None:
        files = {number: self._local.path(number) for number in numbers}
        self._patience.call(lambda: self._carrier.upload(files), f"uploading to {self._place}")
        self._uploaded += numbers

    def _commit(self) -> None:
        if not self._uploaded:
            return
        self._patience.call(lambda: self._carrier.commit(self._uploaded), f"committing to {self._place}")
        committed, self._uploaded = self._uploaded, []
        self._last_commit = time.monotonic()
        self._on_commit({number: self._staged[number] for number in committed})
        for number in committed:
            self._local.path(number).unlink(missing_ok=True)
        with self._room:
            for number in committed:
                del self._staged[number]
            self._room.notify_all()


# ---- remote_blocks ---------------------------------------------------------------------------------------------------
# Blocks of an output that lies on the Hub, by the verbs of a folder: some there, some here on their way.
#
# Where they are there, how one is opened and how a split is published differs between datasets and buckets, and stands
# in rooms of their own.


LOOK_RETRY_S = 120.0
REMOTE_BLOCK_BYTES = 64 * 1024  # fetched at once of a block on the Hub: its footer, and the small columns of a block

LookedT = TypeVar("LookedT")


class RemoteBlocks(ABC):
    """The blocks of one split of an output on the Hub. `counted_column` is one whose values are counted as blocks are
    written: of these the Hub need not be asked. `name` is how people call the output."""

    def __init__(
        self,
        name: str,
        target: Target,
        staging: Path,
        carrier: Carrier,
        *,
        counted_column: str = "",
        shard: Shard = WHOLE,
        commit_every_s: float,
    ) -> None:
        self.target = target
        self._name = name
        self._shard = shard
        self._counted_column = counted_column
        self._counted: dict[int, Counter[str]] = {}
        self._local = BlockFolder(staging, target, shard)
        self._uploads = Uploads(name, self._local, carrier, commit_every_s=commit_every_s, on_commit=self._note_commit)
        self._begins_anew = False
        self._there: dict[int, int] | None = None  # block → bytes; replaced, never changed: two threads read it

    @abstractmethod
    def _listed(self) -> dict[int, int]:
        """Return the blocks that are on the Hub, with their sizes."""

    @abstractmethod
    def _opened(self, number: int) -> Any:
        """Open a block that is on the Hub."""

    def _bytes_of(self, number: int) -> int:
        """Return the size of a block that is on the Hub."""
        size = self._on_hub().get(number)
        if size is None:
            raise PublishError(f"{self.where(number)} was removed by somebody; run again to write it anew")
        return size

    @abstractmethod
    def _open_to_write(self) -> None:
        """Make ready what blocks are collected in; fail where we may not write there."""

    @abstractmethod
    def publish(self, whole: Whole) -> str | None:
        """Make a whole split visible to its readers; return where it is."""

    @abstractmethod
    def collected(self) -> str:
        """Say where the blocks are that are there already."""

    # What is there

    def closed(self) -> set[int]:
        """Return the numbers of the blocks that are on the Hub, or lie here on their way to it."""
        here = self._closed_here()  # before the others: a block goes from here to there
        return here | self._on_hub().keys()

    def _closed_here(self) -> set[int]:
        """Only this shard's: other shards of this machine share the folder, and publish their own."""
        return {number for number in self._local.closed() if self._shard.holds(number)}

    def _on_hub(self) -> dict[int, int]:
        if self._there is None:
            self._there = self._looked(self._listed, "listing its blocks")
        return self._there

    def _note_commit(self, committed: Mapping[int, int]) -> None:
        self._there = {**self._on_hub(), **committed}

    def _looked(self, look: Callable[[], LookedT], what: str) -> LookedT:
        retry_for_s = HURRY_S if self._uploads.is_hurried else LOOK_RETRY_S
        try:
            return Patience(retry_for_s).call(look, f"{self._name}: {what}")
        except network_errors() as error:
            raise PublishError(f"{self._name}: {what} failed: {error}; run again to go on") from error

    def where(self, number: int) -> str:
        """Say where block `number` is, or will be."""
        return f"{self._name}: {self.target.block_name(number)}"

    def read(self, number: int, columns: list[str]) -> pa.Table:
        """Read some columns of a block; from the Hub only their bytes are fetched."""
        import pyarrow.parquet as pq

        return self._with(number, lambda file: pq.read_table(file, columns=columns))

    def count(self, number: int, column: str) -> Counter[str]:
        """Count the values in a column of a block."""
        if column == self._counted_column and number in self._counted:
            return self._counted[number]
        return self._with(number, lambda file: count_values(file, column))

    def stored_settings(self) -> list[bytes | None]:
        """Return what the first block here, and the first on the Hub, say of the settings they were made with."""
        firsts = {min(numbers) for numbers in (self._closed_here(), self._on_hub()) if numbers}
        return [self._with(number, settings_in) for number in sorted(firsts)]

    def _with(self, number: int, look: Callable[[Any], LookedT]) -> LookedT:
        """Look into a block's file, here or on the Hub."""
        if number in self._closed_here():
            with contextlib.suppress(FileNotFoundError):  # committed in this moment, and so removed here
                return look(self._local.path(number))

        def look_once() -> LookedT:
            with self._opened(number) as file:
                return look(file)

        def look_there() -> LookedT:
            from huggingface_hub.errors import EntryNotFoundError, RevisionNotFoundError

            try:
                return look_once()
            except (EntryNotFoundError, RevisionNotFoundError):  # another shard published, and put away what it was in
                self._there = None
                return look_once()

        return self._looked(look_there, f"reading {self.target.block_name(number)}")

    # What is written

    def unpublished(self) -> bool:
        """Whether closed blocks wait here for their commit."""
        return bool(self._closed_here())

    def remove_all(self) -> None:
        """Forget the blocks of this split. On the Hub they go when the first new one is written, and for readers when
        all new ones are there."""
        for number in self._closed_here():
            self._local.path(number).unlink()
        self._begins_anew = True
        self._there = {}

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep a second run on this machine out of the staging folder, and upload what closes, until the end.

        Leaving, all that is closed is committed, whatever the way out is. Raises `PublishError` where that fails.
        """
        from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

        with self._local.locked():
            disable_progress_bars()  # those of uploads would break the lines that people read
            self._uploads.measure_disk()
            first_error = None
            try:
                yield
            except BaseException as error:
                first_error = error
                raise
            finally:
                self._uploads.end(first_error)
            self._there = None  # other shards have added theirs

    def get_ready(self, *, to_write: bool) -> None:
        """Open what blocks are collected in, where that is needed, and send on their way those that an earlier run
        left here. Opening it shows, before any GPU time, whether we may write there."""
        leftovers = sorted(self._closed_here())
        if to_write or leftovers:
            self._looked(self._open_to_write, "opening what blocks are collected in")
        for number in leftovers:
            self._uploads.send(number)

    def write(self, number: int, table: pa.Table) -> None:
        """Write a block here and send it on its way; waits where too many are under way."""
        self._uploads.wait_for_room()
        self._local.write(number, table)
        if self._counted_column in table.schema.names:
            self._counted[number] = Counter(table[self._counted_column].to_pylist())
        self._uploads.send(number)
        self._uploads.raise_failure()


# ---- work_ref --------------------------------------------------------------------------------------------------------
# Where blocks of a Hub dataset are collected until all are there: a branch of its own, or a draft of a pull request.
#
# Readers of the target branch see nothing of it. It is found again by its name, or by author and title: on any machine,
# by any script, for any shard.


MAIN = "main"
OPEN_STATES = frozenset({"draft", "open"})


@dataclass(frozen=True)
class Destination:
    """Where on the Hub a split goes: to which branch of which dataset, and whether by a pull request."""

    repo_id: str
    target: Target
    revision: str = MAIN
    private: bool = True
    create_pr: bool = False

    def __str__(self) -> str:
        return self.repo_id if self.revision == MAIN else f"{self.repo_id}@{self.revision}"


class WorkRef(Protocol):
    """A ref that blocks are collected on. Its methods raise what the client raises."""

    def find(self) -> str | None:
        """Return the revision of it; None where it is not there."""

    def open(self, *, anew: bool = False) -> str:
        """Return the revision of it, created where it is not there; `anew`: begun from the target branch again."""

    def publish_to(self) -> str:
        """Return the revision that the finished split is committed to, created where it is not there."""

    def close(self, published: str) -> None:
        """Put it away: what it held at the commit `published` is published. What came later stays for its run."""

    def address(self) -> str:
        """Return where people look at what was published."""


def work_ref(place: Destination) -> WorkRef:
    """Return the ref on which the blocks of a destination are collected."""
    return PullRequest(place) if place.create_pr else WorkBranch(place)


def branch_name(place: Destination) -> str:
    """Name the work branch of a destination: another for each split, configuration and target branch.

    A slash in the target's name becomes `--`, so that `a/b` and `a--b` share one; their blocks tell by their settings
    whether they may be mixed.
    """
    split = str(place.target).replace("/", "-")
    at = "" if place.revision == MAIN else f"--at--{place.revision.replace('/', '--')}"
    return f"unfinished-{split}{at}"


class WorkBranch:
    """A branch beside the target branch, removed when the split is published."""

    def __init__(self, place: Destination) -> None:
        self.place = place
        self.name = branch_name(place)

    def find(self) -> str | None:
        """Return its name; None where it is not there."""
        return self.name if self._has_branch(self.name) else None

    def open(self, *, anew: bool = False) -> str:
        """Return its name, created where it is not there."""
        api = _api()
        api.create_repo(self.place.repo_id, repo_type="dataset", private=self.place.private, exist_ok=True)
        if anew:
            self._remove()
        start = self.place.revision if self._has_branch(self.place.revision) else MAIN
        api.create_branch(self.place.repo_id, branch=self.name, revision=start, repo_type="dataset", exist_ok=True)
        return self.name

    def publish_to(self) -> str:
        """Return the target branch."""
        if self.place.revision != MAIN and not self._has_branch(self.place.revision):
            _api().create_branch(self.place.repo_id, branch=self.place.revision, repo_type="dataset", exist_ok=True)
        return self.place.revision

    def close(self, published: str) -> None:
        """Remove it, if nothing came later: a shard that asks again about failed rows publishes its own."""
        if head_of_branch(self.place.repo_id, self.name) == published:
            self._remove()

    def _remove(self) -> None:
        """Remove it; another run may have done so."""
        from huggingface_hub.errors import RevisionNotFoundError

        if self._has_branch(self.name):
            with contextlib.suppress(RevisionNotFoundError):
                _api().delete_branch(self.place.repo_id, branch=self.name, repo_type="dataset")

    def address(self) -> str:
        """Return the dataset's page."""
        api = _api()
        tree = "" if self.place.revision == MAIN else f"/tree/{self.place.revision}"
        return f"{api.endpoint}/datasets/{self.place.repo_id}{tree}"

    def _has_branch(self, name: str) -> bool:
        return has_branch(self.place.repo_id, name)


class PullRequest:
    """A pull request of ours, a draft until the split is whole: for those who may not write to the dataset itself."""

    def __init__(self, place: Destination) -> None:
        self.place = place
        self.title = f"Text of split {place.target}, read by LightOnOCR"
        self._author = ""

    def find(self) -> str | None:
        """Return its ref; None where there is none that is open."""
        ours = self._ours()
        return str(ours[0].git_reference) if ours else None

    def open(self, *, anew: bool = False) -> str:
        """Return its ref, opened as a draft where there is none."""
        found = self.find()
        if found:
            return found
        made = _api().create_pull_request(
            self.place.repo_id,
            self.title,
            description="Blocks come in while pages are read; it is marked as ready when all are there.",
            repo_type="dataset",
        )
        say(f"opened a draft of a pull request: {made.url}")
        first = self._ours()[0]  # two shards may have opened one each
        if made.num != first.num:
            _api().change_discussion_status(
                self.place.repo_id, made.num, "closed", comment=f"#{first.num} is there already", repo_type="dataset"
            )
        return str(first.git_reference)

    def publish_to(self) -> str:
        """Return its own ref: nothing is copied."""
        return self.open()

    def close(self, published: str) -> None:
        """Mark it as ready to be merged."""
        for one in self._ours()[:1]:
            if one.status == "draft":
                _api().change_discussion_status(self.place.repo_id, one.num, "open", repo_type="dataset")

    def address(self) -> str:
        """Return the page of the pull request; of the dataset where it was merged."""
        ours = self._ours()
        return str(ours[0].url) if ours else f"{_api().endpoint}/datasets/{self.place.repo_id}"

    @functools.cached_property
    def _author(self) -> str:
        """The token's user, asked for once: the Hub does not like that question."""
        return str(_api().whoami()["name"])

    def _ours(self) -> list[Any]:
        """Return our pull requests that are not closed, the oldest first."""
        from huggingface_hub.errors import RepositoryNotFoundError

        api = _api()
        self._author = self._author or str(api.whoami()["name"])  # asked once: the Hub counts these
        try:
            found = api.get_repo_discussions(
                self.place.repo_id,
                author=self._author,
                discussion_type="pull_request",
                repo_type="dataset",
            )
            ours = [one for one in found if one.title == self.title and one.status in OPEN_STATES]
        except RepositoryNotFoundError as error:
            raise UsageError(
                f"--create-pr: there is no dataset {self.place.repo_id!r} to open a pull request on, or the token may "
                "not see it; create it first, or leave --create-pr out"
            ) from error
        return sorted(ours, key=lambda one: int(one.num))


def has_branch(repo_id: str, name: str) -> bool:
    """Whether a Hub dataset has this branch; False where there is no such dataset."""
    return head_of_branch(repo_id, name) is not None


def head_of_branch(repo_id: str, name: str) -> str | None:
    """Return the last commit on a branch of a Hub dataset; None where there is no such branch or dataset."""
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        refs = _api().list_repo_refs(repo_id, repo_type="dataset")
    except RepositoryNotFoundError:
        return None
    return next((str(branch.target_commit) for branch in refs.branches if branch.name == name), None)


def _api() -> Any:
    from huggingface_hub import HfApi

    return HfApi()


# ---- publish ---------------------------------------------------------------------------------------------------------
# The output: where it goes, and the one commit that makes a finished split of a Hub dataset visible.


PUBLISH_FOR_S = 1800.0
REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
BRANCH = re.compile(r"(?!refs/|.*(//|\.\.|@\{|\.lock$|/$))[A-Za-z0-9_][\w./@+-]*")
COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Output:
    """Where a run writes: `folder` holds the blocks; `repo_id` is the Hub dataset they are published to, if any.

    Of that, `revision` is the branch they go to; `create_pr` asks for a pull request instead. `bucket` is the place in
    a bucket, if they go there.
    """

    folder: Path
    repo_id: str | None = None
    revision: str = MAIN
    create_pr: bool = False
    bucket: HubPath | None = None

    def __str__(self) -> str:
        return self.repo_id or str(self.bucket or self.folder)

    @property
    def on_hub(self) -> str | None:
        """The dataset or bucket that it goes to; None for a local folder."""
        return self.bucket.repo_id if self.bucket else self.repo_id


def choose_output(name: str, work_dir: str | None, revision: str | None = None, create_pr: bool = False) -> Output:
    """Tell a local folder from a Hub id: `namespace/name` is a Hub id unless a folder `namespace` is here."""
    path = Path(name).expanduser()
    if name.startswith(HUB_SCHEME):
        return _hub_output(name, work_dir, revision, create_pr)
    if REPO_ID.fullmatch(name) and not path.exists() and not path.parent.is_dir():
        _check_revision(revision, create_pr)
        at = "--pr" if create_pr else f"--at--{revision.replace('/', '--')}" if revision not in (None, MAIN) else ""
        return Output(_staging(work_dir, f"{name}{at}"), name, revision or MAIN, create_pr)
    if path.exists() and not path.is_dir():
        raise UsageError(f"output {name!r} is a file; name a folder, or a Hub dataset id (namespace/name)")
    for flag, given in {"--work-dir": work_dir, "--output-revision": revision, "--create-pr": create_pr}.items():
        if given:
            raise UsageError(f"{flag} is for Hub outputs; {name!r} is a local folder and holds its blocks itself")
    return Output(path)


def _staging(work_dir: str | None, name: str) -> Path:
    """Where blocks wait for their upload."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lighton-ocr"
    return Path(work_dir) if work_dir else cache / name.replace("/", "--")


def _hub_output(name: str, work_dir: str | None, revision: str | None, create_pr: bool) -> Output:
    """Read an `hf://` address of an output: a dataset, at a branch or not, or a folder of a bucket."""
    at = parse_hub_path(name, what="output")
    assert at is not None
    if not at.is_bucket:
        if at.path:
            raise UsageError(f"output {name!r}: blocks of a dataset lie where its card says; leave /{at.path} out")
        if revision is not None and at.revision not in (None, revision):
            raise UsageError(
                f"output {name!r} is at {at.revision!r}, but --output-revision is {revision!r}; give one of them"
            )
        return choose_output(at.repo_id, work_dir, at.revision or revision, create_pr)
    for flag, given in {"--output-revision": revision, "--create-pr": create_pr}.items():
        if given:
            raise UsageError(
                f"{flag}: a bucket has neither branches nor pull requests; leave it out, or name a dataset"
            )
    if is_pattern(at.path):
        raise UsageError(f"output {name!r} is a pattern; name a folder of the bucket")
    return Output(_staging(work_dir, str(at).removeprefix(HUB_SCHEME)), bucket=at)


def _check_revision(revision: str | None, create_pr: bool) -> None:
    if revision is None:
        return
    if create_pr:
        raise UsageError("--create-pr goes to main; leave --output-revision out")
    if COMMIT.fullmatch(revision) or not BRANCH.fullmatch(revision):
        raise UsageError(
            f"--output-revision {revision!r} is no name of a branch; name one (it is created from main if missing), or "
            "open a pull request with --create-pr"
        )


def check_output_is_apart(output: Output, input_name: str) -> None:
    """Raise `UsageError` where input and output are, or contain, each other: a run must never read what it writes."""
    if output.repo_id and output.repo_id == input_name:
        raise UsageError(f"input and output are both {input_name!r}; name another output")
    source = Path(input_name).expanduser()
    if not source.exists():
        read, written = parse_hub_path(input_name), output.bucket
        if output.repo_id:
            written = HubPath("datasets", output.repo_id)
        if read and written and read.overlaps(written):
            raise UsageError(f"input {input_name!r} and output '{output}' overlap; name another output")
        return
    here, there = output.folder.resolve(), source.resolve()
    if here == there or here.is_relative_to(there) or (there.is_relative_to(here) and there.is_dir()):
        raise UsageError(
            f"output {str(output.folder)!r} and input {input_name!r} overlap; name an output beside the input"
        )


@dataclass(frozen=True)
class RemoteBlock:
    """A block's file on the Hub: how many bytes, and the name of its content."""

    size: int
    oid: str


@dataclass(frozen=True)
class Published:
    """What readers see: at which commit, and the content of each block there; `source` is what that was copied of."""

    commit: str
    source: str
    oids: Mapping[int, str]


def blocks_at(place: Destination, revision: str) -> dict[int, RemoteBlock]:
    """Return the blocks of a split at a revision; none where there is no such dataset, revision or folder."""
    from huggingface_hub import HfApi, RepoFile
    from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

    found: dict[int, RemoteBlock] = {}
    try:
        tree = HfApi().list_repo_tree(place.repo_id, place.target.folder, revision=revision, repo_type="dataset")
        for entry in tree:
            number = place.target.block_number(entry.path)
            if number is not None and isinstance(entry, RepoFile):
                found[number] = RemoteBlock(entry.size, entry.lfs.sha256 if entry.lfs else entry.blob_id)
    except (RepositoryNotFoundError, RevisionNotFoundError, EntryNotFoundError):
        return {}
    return found


def card_at(repo_id: str, revision: str) -> str:
    """Return the card of a Hub dataset at a revision; nothing where there is none."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError, RemoteEntryNotFoundError

    try:
        path = hf_hub_download(repo_id, "README.md", repo_type="dataset", revision=revision)
    except RemoteEntryNotFoundError:
        return ""
    except LocalEntryNotFoundError as error:  # the Hub did not answer: that is no word about the card
        raise ConnectionError(f"the card of {repo_id} can't be read: {error.__cause__ or error}") from error
    return Path(path).read_text(encoding="utf-8")


def publish(place: Destination, work: WorkRef, whole: Whole, kept: str) -> Published:
    """Make the collected blocks, and the card, visible in one commit; return what readers then see.

    It is made upon the head that was looked at: where another run publishes in the same moment, another split or
    configuration, the Hub refuses it, and it is made anew upon that run's. Done already, it does nothing.
    """
    if whole.rows != whole.plan.num_rows:
        raise PublishError(
            f"the blocks of {place} hold {whole.rows} rows, and {whole.plan.num_rows} are wanted; nothing is "
            "published. Start anew with --overwrite"
        )
    try:
        return Patience(PUBLISH_FOR_S).call(lambda: _commit_what_is_new(place, work, whole), f"publishing to {place}")
    except network_errors() as error:
        raise PublishError(f"publishing to {place} failed: {error}. {kept}") from error


def _commit_what_is_new(place: Destination, work: WorkRef, whole: Whole) -> Published:
    from huggingface_hub.errors import EntryNotFoundError, RevisionNotFoundError

    try:
        return _commit_what_differs(place, work, whole)
    except (EntryNotFoundError, RevisionNotFoundError):  # another shard has just published, and put the work ref away
        return _commit_what_differs(place, work, whole)


def _commit_what_differs(place: Destination, work: WorkRef, whole: Whole) -> Published:
    from huggingface_hub import CommitOperationAdd, CommitOperationCopy, CommitOperationDelete, HfApi

    api = HfApi()
    collected, branch = work.find(), work.publish_to()
    head = str(api.dataset_info(place.repo_id, revision=branch).sha)
    there = blocks_at(place, head)
    # pinned, for a shard that asks again about failed rows may go on collecting
    source = str(api.dataset_info(place.repo_id, revision=collected).sha) if collected else head
    ours = there if source == head else blocks_at(place, source)
    numbers = range(len(whole.plan))
    missing = [number for number in numbers if number not in ours]
    if missing:
        raise PublishError(f"{place}: block {missing[0]} is gone; run again to write it anew")
    operations: list[Any] = []
    for number in numbers:
        name = place.target.block_name(number)
        if there.get(number) != ours[number]:
            operations.append(CommitOperationCopy(name, name, src_revision=source))
    operations += [CommitOperationDelete(place.target.block_name(number)) for number in there if number not in numbers]
    card = card_at(place.repo_id, head)
    if operations or whole.insists or not has_section(card, place.target):
        text = whole.card(card, "")
        if text != card:
            operations.append(CommitOperationAdd("README.md", text.encode()))
    commit = head
    if operations:
        made = api.create_commit(
            place.repo_id,
            operations,
            repo_type="dataset",
            revision=branch,
            commit_message=f"Text of split {place.target}",
            parent_commit=head,
        )
        commit = str(made.oid)
    return Published(commit, source, {number: ours[number].oid for number in numbers})


# ---- verify ----------------------------------------------------------------------------------------------------------
# What was published, looked at as a reader does: the files, their features, and a row of them.


VERIFY_RETRY_S = 120.0


def verify(
    place: Destination, published: Published, whole: Whole, first_rows: Sequence[Mapping[str, Any]], kept: str
) -> None:
    """Raise `PublishError` where a reader of the published revision would not find what is expected."""

    def other_blocks() -> list[int]:
        there = {number: block.oid for number, block in blocks_at(place, published.commit).items()}
        return numbers_that_differ(published.oids, there)

    load = {"path": place.repo_id, "revision": published.commit}
    check_as_reader(str(place), load, other_blocks, whole, first_rows, kept)


def check_as_reader(
    name: str,
    load: Mapping[str, Any],
    other_blocks: Callable[[], Sequence[int]],
    whole: Whole,
    first_rows: Sequence[Mapping[str, Any]],
    kept: str,
) -> None:
    """Raise `PublishError` where a reader, who loads it by `load`, would not find what is expected.

    `other_blocks` are those whose files are not as they were written; `first_rows` has the text columns of the first
    row, as it was written, and nothing where there is no row.
    """
    target = whole.plan.target

    def look() -> list[str]:
        others = [f"{target.block_name(number)} is missing, another, or too many" for number in other_blocks()[:5]]
        return [*others, *_other_features_and_rows(load, whole, first_rows)]

    try:
        differences = Patience(VERIFY_RETRY_S).call(look, f"looking at what is in {name}")
    except network_errors() as error:
        raise PublishError(f"{name} is published, but can't be looked at: {error}; {kept}") from error
    if differences:
        raise PublishError(
            f"{name} is published, but a reader of it does not find what was written:\n  "
            + "\n  ".join(differences)
            + f"\n{kept}"
        )


def numbers_that_differ(expected: Mapping[int, str], found: Mapping[int, str]) -> list[int]:
    """Return the blocks that are not there with the content that is expected, or not expected at all."""
    return sorted(number for number in {*found, *expected} if found.get(number) != expected.get(number))


def _other_features_and_rows(
    load: Mapping[str, Any], whole: Whole, first_rows: Sequence[Mapping[str, Any]]
) -> list[str]:
    import datasets

    expected, target = datasets.Features.from_arrow_schema(whole.schema), whole.plan.target
    try:
        stream = datasets.load_dataset(name=target.config, split=target.split, streaming=True, **load)
        features = stream.features or stream._resolve_features().features
        found = features_that_differ(expected, features or {})
        if found:
            return found
        rows = [
            {name: row.get(name) for name in whole.text_columns} for row in itertools.islice(stream.decode(False), 1)
        ]
    except network_errors():
        raise
    except Exception as error:  # noqa: BLE001 - whatever keeps a reader from reading it is what we look for
        return [f"load_dataset fails: {type(error).__name__}: {error}"]
    return [] if rows == list(first_rows) else [f"the first row is {rows}, and was written as {list(first_rows)}"]


def features_that_differ(expected: datasets.Features, found: Mapping[str, Any]) -> list[str]:
    """Say which columns a reader finds otherwise, or not at all."""
    return [
        f"column {name!r}: written as {expected.get(name)}, found as {found.get(name)}"
        for name in {**expected, **found}
        if expected.get(name) != found.get(name)
    ]


# ---- bucket_blocks ---------------------------------------------------------------------------------------------------
# Blocks of a bucket: collected in a folder that readers pass over, and moved from there when all are there.
#
# A bucket has neither commits nor branches. What is under way lies below `.unfinished/`, found there by any machine; a
# split is published by copies within the bucket, for which no byte travels, then by its card, and last the folder goes.
# Killed anywhere in between, the same command goes on.


WORK_FOLDER = ".unfinished"
BUCKET_PUBLISH_S = 1800.0
CARD_TRIES = 10
MARKERS = ("begun", "anew")
BEGUN = b"Blocks of a run that is under way. It moves them from here when all are there; until then leave them.\n"


@dataclass(frozen=True)
class BucketFolder:
    """Where an output lies in a bucket: its blocks for readers, and those that are collected."""

    at: HubPath
    target: Target

    def name(self, number: int, *, collected: bool) -> str:
        """Return the path of a block in the bucket."""
        return self._path(self.target.block_name(number), collected=collected)

    @property
    def card(self) -> str:
        """The path of the card in the bucket."""
        return self._path("README.md", collected=False)

    def marker(self, word: str) -> str:
        """Return the path of a file that says something of what is collected."""
        return self._path(f"{self.target.folder}/{self.target.split}-{word}", collected=True)

    def _path(self, name: str, *, collected: bool) -> str:
        return "/".join(part for part in (self.at.path, WORK_FOLDER if collected else "", name) if part)

    def files(self, *, collected: bool) -> dict[str, Any]:
        """List the files of this split, blocks and markers, by their names in the output; none where no bucket is."""
        from huggingface_hub import BucketFile, HfApi
        from huggingface_hub.errors import BucketNotFoundError

        prefix = self._path("", collected=collected)
        start = self._path(f"{self.target.folder}/{self.target.split}-", collected=collected)
        try:
            entries = list(HfApi().list_bucket_tree(self.at.repo_id, prefix=start, recursive=True))
        except BucketNotFoundError:
            return {}
        return {
            entry.path.removeprefix(f"{prefix}/" if prefix else ""): entry
            for entry in entries
            if isinstance(entry, BucketFile)
        }

    def read_card(self) -> str:
        """Return the card; nothing where there is none."""
        from huggingface_hub import HfApi, HfFileSystem

        found = list(HfApi().get_bucket_paths_info(self.at.repo_id, [self.card]))
        if not found:
            return ""
        address = f"{HUB_SCHEME}buckets/{self.at.repo_id}/{self.card}"
        with HfFileSystem(skip_instance_cache=True).open(address, "rb", size=found[0].size) as file:
            return bytes(file.read()).decode()


@dataclass(frozen=True)
class Collected:
    """The files of a split in a bucket, by the numbers of the blocks: for readers, and collected. `anew` says that what
    readers see is of an earlier run, and counts for nothing."""

    readable: Mapping[int, Any]
    collected: Mapping[int, Any]
    markers: Collection[str]
    anew: bool

    @property
    def there(self) -> dict[int, Any]:
        """The blocks of this run."""
        return {**({} if self.anew else self.readable), **self.collected}


class BucketCarrier:
    """Uploads blocks to where they are collected: other runs find them at once."""

    def __init__(self, folder: BucketFolder) -> None:
        self._folder = folder

    def upload(self, files: Mapping[int, Path]) -> None:
        """Upload some blocks."""
        from huggingface_hub import HfApi

        HfApi().batch_bucket_files(
            self._folder.at.repo_id,
            add=[(file, self._folder.name(number, collected=True)) for number, file in files.items()],
        )

    def commit(self, numbers: Collection[int]) -> None:
        """There are no commits."""


class BucketBlocks(RemoteBlocks):
    """The blocks of one split of an output in a bucket."""

    def __init__(
        self,
        at: HubPath,
        target: Target,
        staging: Path,
        *,
        private: bool,
        counted_column: str = "",
        shard: Shard = WHOLE,
    ) -> None:
        self.at = at
        self._folder = BucketFolder(at, target)
        self._private = private
        self._places: dict[int, bool] = {}  # block → whether it is among those that are collected
        super().__init__(
            str(at),
            target,
            staging,
            BucketCarrier(self._folder),
            counted_column=counted_column,
            shard=shard,
            commit_every_s=0.0,
        )

    def _look(self) -> Collected:
        files = self._folder.files(collected=True)
        markers = [self._folder.marker(word) for word in MARKERS]
        there = {file.path for file in files.values()} & set(markers)
        readable = self._numbered(self._folder.files(collected=False))
        return Collected(readable, self._numbered(files), sorted(there), anew=markers[1] in there)

    def _numbered(self, files: Mapping[str, Any]) -> dict[int, Any]:
        blocks = {self.target.block_number(name): file for name, file in files.items()}
        return {number: file for number, file in blocks.items() if number is not None}

    def _listed(self) -> dict[int, int]:
        found = self._look()
        self._places = {number: number in found.collected for number in found.there}
        return {number: int(file.size) for number, file in found.there.items()}

    def _opened(self, number: int) -> Any:
        from huggingface_hub import HfFileSystem

        size = self._bytes_of(number)
        name = self._folder.name(number, collected=self._places.get(number, True))
        return HfFileSystem().open(
            f"{HUB_SCHEME}buckets/{self.at.repo_id}/{name}", "rb", size=size, block_size=REMOTE_BLOCK_BYTES
        )

    def _open_to_write(self) -> None:
        """Create the bucket where it is missing, and write there that a run has begun: only so it shows that we may."""
        from huggingface_hub import HfApi

        api = HfApi()
        api.create_bucket(self.at.repo_id, private=self._private, exist_ok=True)
        markers = MARKERS if self._begins_anew else MARKERS[:1]
        old = [file.path for file in self._look().collected.values()] if self._begins_anew else []
        self._remove(old)
        api.batch_bucket_files(self.at.repo_id, add=[(BEGUN, self._folder.marker(word)) for word in markers])

    def publish(self, whole: Whole) -> str | None:
        """Let readers see the split: copies of what was collected, then the card; look at it as they do; tidy up.

        Raises `PublishError` where that fails, or where a reader would not find what is expected.
        """
        if whole.rows != whole.plan.num_rows:
            raise PublishError(
                f"the blocks of {self.at} hold {whole.rows} rows, and {whole.plan.num_rows} are wanted; nothing is "
                "published. Start anew with --overwrite"
            )
        kept = f"{self.collected()} keeps all blocks; the same command goes on"
        try:
            Patience(BUCKET_PUBLISH_S).call(lambda: self._publish(whole, kept), f"publishing to {self.at}")
        except network_errors() as error:
            raise PublishError(f"publishing to {self.at} failed: {error}. {kept}") from error
        from huggingface_hub import HfApi

        return f"{HfApi().endpoint}/buckets/{self.at.repo_id}" + (f"/tree/{self.at.path}" if self.at.path else "")

    def _publish(self, whole: Whole, kept: str) -> None:
        from huggingface_hub import HfApi

        api, found = HfApi(), self._look()
        numbers = range(len(whole.plan))
        missing = [number for number in numbers if number not in found.there]
        if missing:
            raise PublishError(f"{self.at}: block {missing[0]} is gone; run again to write it anew")
        if found.collected or found.markers or whole.insists or not has_section(self._folder.read_card(), self.target):
            ours = {number: found.there[number].xet_hash for number in numbers}
            seen = {number: file.xet_hash for number, file in found.readable.items()}
            copies = [
                ("bucket", self.at.repo_id, ours[number], self._folder.name(number, collected=False))
                for number in numbers
                if seen.get(number) != ours[number]
            ]
            surplus = [file.path for number, file in found.readable.items() if number not in numbers]
            api.batch_bucket_files(self.at.repo_id, copy=copies, delete=surplus)
            written = max(file.mtime.isoformat() for file in found.there.values() if file.mtime)
            self._write_card(whole, written)
            self._verify(whole, ours, kept)
            self._write_card(whole, written)  # another run may have written the one that it read before
        self._tidy_up(found)

    def _tidy_up(self, published: Collected) -> None:
        """Remove what was published from where it was collected; what another shard has put there since stays."""
        still = self._look()
        copied = [
            file.path
            for number, file in still.collected.items()
            if number in published.collected and file.xet_hash == published.collected[number].xet_hash
        ]
        # what readers see is of this run now, in any case
        stale = still.markers if len(copied) == len(still.collected) else [self._folder.marker("anew")]
        self._remove([*copied, *(marker for marker in stale if marker in still.markers)])

    def _write_card(self, whole: Whole, written: str) -> None:
        """Write the card, and look whether it is there: of two runs that write it at once the later one wins."""
        from huggingface_hub import HfApi

        for _ in range(CARD_TRIES):
            earlier = self._folder.read_card()
            text = whole.card(earlier, written)
            if text == earlier:
                return
            HfApi().batch_bucket_files(self.at.repo_id, add=[(text.encode(), self._folder.card)])
        raise PublishError(f"the card of {self.at} is written by somebody else as well; the same command writes it")

    def _verify(self, whole: Whole, ours: Mapping[int, str], kept: str) -> None:
        from huggingface_hub import HfFileSystem

        def other_blocks() -> list[int]:
            return numbers_that_differ(ours, {number: file.xet_hash for number, file in self._look().readable.items()})

        first = self.read(0, list(whole.text_columns)).slice(0, 1).to_pylist()
        HfFileSystem.clear_instance_cache()  # it keeps what it listed, and a bucket has no commits to tell old from new
        check_as_reader(str(self.at), {"path": str(self.at)}, other_blocks, whole, first, kept)

    def _remove(self, paths: Sequence[str]) -> None:
        """Remove files; another shard may have removed some of them."""
        from huggingface_hub import HfApi
        from huggingface_hub.errors import BucketBatchError

        api = HfApi()
        try:
            api.batch_bucket_files(self.at.repo_id, delete=list(paths))
        except BucketBatchError:
            if list(api.get_bucket_paths_info(self.at.repo_id, paths)):
                raise

    def collected(self) -> str:
        """Say where the blocks are that are there already."""
        return f"{self.at}/{WORK_FOLDER}"


# ---- flavors ---------------------------------------------------------------------------------------------------------
# Hosted runners: the flavours of Hugging Face Jobs, what an hour of each costs, and how fast they were measured.
#
# From the stored page of August 2026 and the measurements on record, a test holds both equal to models.json. What the
# Hub lists now (`hf jobs hardware`) goes before the stored prices.


PRICES_OF = "August 2026"


@dataclass(frozen=True)
class Flavor:
    """A machine for hire. `vram_gb` is that of its GPUs together."""

    name: str
    gpu: str | None
    gpus: int
    vram_gb: int | None
    vcpus: int
    ram_gb: int
    dollars_per_hour: float

    def __str__(self) -> str:
        gpus = f"{self.gpus} x {self.gpu}, {self.vram_gb} GB" if self.gpu else "no GPU"
        return f"{self.name} ({gpus}; {self.vcpus} vCPU, {self.ram_gb} GB; ${self.dollars_per_hour:.2f} an hour)"


FLAVORS = (
    Flavor("cpu-basic", None, 0, None, 2, 16, 0.01),
    Flavor("cpu-upgrade", None, 0, None, 8, 32, 0.03),
    Flavor("t4-small", "T4", 1, 16, 4, 15, 0.40),
    Flavor("t4-medium", "T4", 1, 16, 8, 30, 0.60),
    Flavor("l4x1", "L4", 1, 24, 8, 30, 0.80),
    Flavor("l4x4", "L4", 4, 96, 48, 186, 3.80),
    Flavor("a10g-small", "A10G", 1, 24, 4, 15, 1.00),
    Flavor("a10g-large", "A10G", 1, 24, 12, 46, 1.50),
    Flavor("l40sx1", "L40S", 1, 48, 8, 62, 1.80),
    Flavor("a100-large", "A100", 1, 80, 12, 142, 2.50),
    Flavor("rtx-pro-6000", "RTX PRO 6000", 1, 96, 23, 256, 2.75),
    Flavor("h200", "H200", 1, 141, 23, 256, 5.00),
)


@dataclass(frozen=True)
class Measured:
    """A speed on record: pages a second of one model on one flavour, offline or through a server."""

    model_id: str
    flavor: str
    shape: str  # "offline" or "server"
    pages_per_s: float
    conditions: str
    evidence: str

    def __str__(self) -> str:
        return f"{self.pages_per_s:g} pages/s ({self.evidence}: {self.conditions})"


ON_L4 = "100 historical scans, concurrency 32"
ON_600_PAGES = "600 pages, saturating driver"

MEASURED = (
    Measured("lightonai/LightOnOCR-2-1B", "l4x1", "offline", 0.33, ON_L4, "field"),
    Measured("lightonai/LightOnOCR-2-1B", "l4x1", "server", 0.59, ON_L4, "field"),
    Measured("lightonai/LightOnOCR-3-0.8B", "a10g-small", "offline", 0.90, ON_600_PAGES, "field"),
    Measured("lightonai/LightOnOCR-3-0.8B", "a10g-small", "server", 2.2, ON_600_PAGES, "field"),
    Measured("lightonai/LightOnOCR-3-0.8B", "a100-large", "offline", 1.27, ON_600_PAGES, "field"),
    Measured("lightonai/LightOnOCR-3-0.8B", "a100-large", "server", 7.2, ON_600_PAGES, "field"),
)


def find_flavor(flavors: Iterable[Flavor], name: str | None) -> Flavor | None:
    """Return the flavour of this name, or None."""
    return next((flavor for flavor in flavors if flavor.name == name), None)


def matching_flavor(
    flavors: Iterable[Flavor], vcpus: float | None, ram_gb: float | None, gpus: Iterable[str]
) -> Flavor | None:
    """Return the one flavour that has these cores, this memory and these GPUs; None where none or several do.

    Memory may differ by a tenth: a machine keeps some for itself, and GB are taken for GiB.
    """
    if vcpus is None or ram_gb is None:
        return None
    names = list(gpus)
    fits = [
        flavor
        for flavor in flavors
        if flavor.vcpus == vcpus
        and abs(flavor.ram_gb - ram_gb) <= 0.1 * flavor.ram_gb
        and len(names) == flavor.gpus
        and all(_is_named(flavor.gpu or "", name) for name in names)
    ]
    return fits[0] if len(fits) == 1 else None


def _is_named(gpu: str, name: str) -> bool:
    """Whether a GPU's full name (`NVIDIA L4`, `NVIDIA A100-SXM4-80GB`) has the words of a short one: L40S is no L4."""
    words = [" ".join(text.upper().replace("-", " ").split()) for text in (gpu, name)]
    return f" {words[0]} " in f" {words[1]} "


def measured_speed(model_id: str, flavor: str, shape: str) -> Measured | None:
    """Return the speed on record for a model on a flavour, or None: a speed is never taken from another one's."""
    found = [row for row in MEASURED if (row.model_id, row.flavor, row.shape) == (model_id, flavor, shape)]
    return found[0] if found else None


def measured_elsewhere(model_id: str, shape: str) -> list[Measured]:
    """Return the speeds on record for a model on other flavours, to be named beside an unknown one."""
    return [row for row in MEASURED if (row.model_id, row.shape) == (model_id, shape)]


# ---- hardware --------------------------------------------------------------------------------------------------------
# What can be hired now, and for how much: the Hub's list of hardware, or the stored one where it can't be asked.


UNITS_AN_HOUR = {"second": 3600, "minute": 60, "hour": 1}


@dataclass(frozen=True)
class PriceList:
    """Flavours with their prices, and from when these are: "today", or the date of the stored page."""

    flavors: tuple[Flavor, ...]
    prices_of: str

    def find(self, name: str | None) -> Flavor | None:
        """Return the flavour of this name, or None."""
        return find_flavor(self.flavors, name)


STORED_PRICES = PriceList(FLAVORS, PRICES_OF)


def read_price_list() -> PriceList:
    """Ask the Hub what can be hired; no token is needed. Without an answer that can be read, what is stored counts."""
    from huggingface_hub import HfApi

    try:
        listed = tuple(_read_flavor(item) for item in HfApi().list_jobs_hardware())
    except no_answer():
        return STORED_PRICES
    return PriceList(listed, "today") if listed else STORED_PRICES


def no_answer() -> tuple[type[Exception], ...]:
    """Return what is raised where the Hub does not answer, refuses, or answers something else than expected."""
    return (*network_errors(), LookupError, TypeError, ValueError)


def _read_flavor(item: JobHardwareInfo) -> Flavor:
    """Read one entry: `8 vCPU`, `30 GB`, micro-dollars a minute."""
    gpu = item.accelerator
    return Flavor(
        name=item.name,
        gpu=gpu.model if gpu else None,
        gpus=int(read_number(gpu.quantity)) if gpu else 0,
        vram_gb=int(read_number(gpu.vram)) if gpu else None,
        vcpus=int(read_number(item.cpu)),
        ram_gb=int(read_number(item.ram)),
        dollars_per_hour=round(item.unit_cost_micro_usd * UNITS_AN_HOUR[item.unit_label] / 1e6, 3),
    )


def read_number(text: str) -> float:
    """Return the number that a text begins with; `ValueError` where it begins with none."""
    found = re.match(r"\s*(\d+(?:\.\d+)?)", text)
    if found is None:
        raise ValueError(f"{text!r} begins with no number")
    return float(found[1])


# ---- memory ----------------------------------------------------------------------------------------------------------
# How much memory pages in flight may take: the container's or the host's limit, and what a page was seen to take.
#
# A container's limit is that of its control group and of each group around it; file cache that the kernel would give
# back does not count as used.


RESERVE_SHARE = 0.1  # of the limit, kept free for all that is not a page in flight
MOST_RESERVED = 2 * 1024**3
NO_LIMIT = 2**60  # cgroup v1 says "no limit" with a number like this


@dataclass(frozen=True)
class HostMemory:
    """The limit that comes first, in bytes, and what is left below it."""

    limit: int
    available: int

    @property
    def for_pages(self) -> int:
        """The bytes that pages may still take; negative where the reserve is touched already."""
        return self.available - min(MOST_RESERVED, int(RESERVE_SHARE * self.limit))


def read_memory(root: Path = Path("/")) -> HostMemory | None:
    """Return the tightest of the host's and the control groups' memory; None where the system does not say."""
    found = [_meminfo(root), *(_group_v2(group) for group in _groups(root, "")), *_groups_v1(root)]
    known = [memory for memory in found if memory]
    return min(known, key=lambda memory: memory.for_pages) if known else None


def own_rss(root: Path = Path("/")) -> int | None:
    """Return the bytes of memory that this process holds."""
    statm = _text(root / "proc/self/statm").split()
    return int(statm[1]) * os.sysconf("SC_PAGE_SIZE") if len(statm) > 1 and statm[1].isdecimal() else None


def _meminfo(root: Path) -> HostMemory | None:
    lines = (line.split() for line in _text(root / "proc/meminfo").splitlines())
    kib = {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) > 1 and words[1].isdecimal()}
    total = kib.get("MemTotal")
    available = kib.get("MemAvailable", kib.get("MemFree"))
    return HostMemory(total * 1024, available * 1024) if total and available is not None else None


def _groups(root: Path, controller: str) -> list[Path]:
    """Return the folders of our control group and of those around it, innermost first; "" is version 2."""
    mount = root / "sys/fs/cgroup" / controller
    if not controller and not (mount / "cgroup.controllers").exists():
        mount = root / "sys/fs/cgroup/unified"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, names, where = [*line.split(":", 2), "", ""][:3]
        if controller in names.split(","):
            inner = PurePosixPath(where.lstrip("/"))
            # in a container the path may be the host's, and only the mount's top is there
            return [mount / group for group in (inner, *inner.parents) if (mount / group).is_dir()]
    return [mount] if mount.is_dir() else []


def _group_v2(group: Path) -> HostMemory | None:
    return _group_memory(group, "memory.max", "memory.current", "inactive_file")


def _groups_v1(root: Path) -> list[HostMemory | None]:
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    return [_group_memory(group, *names) for group in _groups(root, "memory")]


def _group_memory(group: Path, limit_name: str, usage_name: str, cache_name: str) -> HostMemory | None:
    limit, usage = _number(group / limit_name), _number(group / usage_name)
    if limit is None or usage is None or limit >= NO_LIMIT:
        return None
    stat = dict(line.split()[:2] for line in _text(group / "memory.stat").splitlines() if len(line.split()) == 2)
    cache = stat.get(cache_name, "0")
    used = max(0, usage - (int(cache) if cache.isdecimal() else 0))
    return HostMemory(limit, limit - used)


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None  # "max" is no limit


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


class PageMeasure:
    """What a page in flight takes: how this process's memory grew while more and more pages were in flight.

    Only looks at which more pages were in flight than ever before are kept: memory that pages gave back often stays
    with the process, so what is seen afterwards says little. The median slope over all pairs of these looks is robust
    against one that caught a garbage collection or a block being written. Less than `least` is not believed.
    """

    def __init__(self, least: int = 256 * 1024) -> None:
        self._least = least
        self._records: list[tuple[int, int]] = []

    def note(self, in_flight: int, rss: int | None) -> None:
        """Take a look."""
        if rss is not None and (not self._records or in_flight > self._records[-1][0]):
            self._records.append((in_flight, rss))

    def bytes_a_page(self) -> float | None:
        """Return the bytes a page in flight takes; None before enough was seen to say that."""
        records = self._records[:: max(1, len(self._records) // 24)]
        if len(records) < 4:
            return None
        pairs = itertools.combinations(records, 2)
        slopes = [(more[1] - fewer[1]) / (more[0] - fewer[0]) for fewer, more in pairs]
        return max(float(self._least), statistics.median(slopes))


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


# ---- machine ---------------------------------------------------------------------------------------------------------
# What machine this is, and which flags `vllm serve` gets because of it; the user's own flags win.
#
# Asked without torch: GPUs of `nvidia-smi`, cores and memory of the control group. Only what was measured becomes a
# flag. One API server decodes images for about 12 pages/s, and takes two to three cores for it; so where there are
# cores and memory for more of them, there are up to four (field: +9 to +16 % on a100-large, rtx-pro-6000, a10g-large).


CORES_AN_API_SERVER = 3
MEMORY_AN_API_SERVER = 7 * 1024**3
MOST_API_SERVERS = 4
GIB = 1024**3


@dataclass(frozen=True)
class Gpu:
    """A GPU, as `nvidia-smi` names it; memory in MiB."""

    name: str
    memory_mib: int
    driver: str


@dataclass(frozen=True)
class Machine:
    """What there is to run on. `memory_bytes` is the limit of the control group or the host."""

    gpus: tuple[Gpu, ...]
    cores: float
    memory_bytes: int | None

    def __str__(self) -> str:
        memory = f"{self.memory_bytes / GIB:.0f} GiB of memory" if self.memory_bytes else "an unknown amount of memory"
        gpus = ", ".join(f"{gpu.name} ({gpu.memory_mib / 1024:.0f} GiB, driver {gpu.driver})" for gpu in self.gpus)
        return f"{gpus or 'no GPU'}; {self.cores:g} cores, {memory}"


@dataclass(frozen=True)
class Choice:
    """A flag that the machine suggests, and why."""

    words: tuple[str, ...]
    why: str


def look_around(root: Path = Path("/")) -> Machine:
    """Return what this machine has."""
    memory = read_memory(root)
    return Machine(find_gpus(), usable_cores(root), memory.limit if memory else None)


def find_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that `nvidia-smi` lists; none where it is not there or fails."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return read_gpus(done.stdout)


def read_gpus(listing: str) -> tuple[Gpu, ...]:
    """Read what `nvidia-smi` lists, one GPU a line; a line that is none is passed over."""
    gpus: list[Gpu] = []
    for line in listing.splitlines():
        name, memory, driver = [*(part.strip() for part in line.rsplit(",", 2)), "", ""][:3]
        if memory.isdecimal():
            gpus.append(Gpu(name, int(memory), driver))
    return tuple(gpus)


def usable_cores(root: Path = Path("/")) -> float:
    """Return how many cores we may use: those we are bound to, and no more than the control group's share."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    group = root / "sys/fs/cgroup"
    v2 = _numbers(group / "cpu.max")
    v1 = _numbers(group / "cpu/cpu.cfs_quota_us") + _numbers(group / "cpu/cpu.cfs_period_us")
    for quota in (v2, v1):
        if len(quota) == 2 and quota[0] > 0 and quota[1] > 0:
            return min(float(bound), round(quota[0] / quota[1], 2))
    return float(bound)


def _numbers(path: Path) -> list[int]:
    try:
        words = path.read_text().split()
    except OSError:
        return []
    return [int(word) for word in words if word.isdecimal()]


def choose_flags(machine: Machine, profile: ModelProfile, users: Sequence[str]) -> list[Choice]:
    """Return the flags that fit the machine, without those that the user or the profile has chosen."""
    choices: list[Choice] = []
    servers = _api_servers(machine)
    if servers > 1 and not _is_given("--api-server-count", users) and not serve_option(profile, "--api-server-count"):
        why = f"one API server prepares about 12 pages/s, and {machine.cores:g} cores are enough for {servers}"
        choices.append(Choice(("--api-server-count", str(servers)), why))
    return choices


def _api_servers(machine: Machine) -> int:
    if not machine.gpus:
        return 1
    by_memory = (machine.memory_bytes or 0) // MEMORY_AN_API_SERVER
    return int(max(1, min(MOST_API_SERVERS, machine.cores // CORES_AN_API_SERVER, by_memory)))


def _is_given(flag: str, words: Sequence[str]) -> bool:
    spelled = {flag, flag.replace("-", "_").replace("__", "--", 1)}
    return any(word.split("=", 1)[0] in spelled for word in words)


def machine_line(machine: Machine, choices: Sequence[Choice]) -> str:
    """Say in one line what there is, and what we chose because of it."""
    chosen = "; ".join(f"{' '.join(choice.words)} as {choice.why}" for choice in choices)
    return f"machine: {machine} → {chosen or 'no flag of ours'}"


# ---- hosted ----------------------------------------------------------------------------------------------------------
# The machine that a run is paid for: inside a Hugging Face Job its flavour, its price, and when the job is stopped.
#
# The flavour is what the submission says (`--jobs` sets `LIGHTON_OCR_FLAVOR` and `LIGHTON_OCR_TIMEOUT_S`); else what
# `ACCELERATOR` says, if that is one (it was seen as only `cpu` or `gpu`); else what the Hub tells about the job, if the
# token may ask; else the one flavour with these cores, this memory and these GPUs. Where that is none, none is guessed.


FLAVOR_VARIABLE = "LIGHTON_OCR_FLAVOR"
TIMEOUT_VARIABLE = "LIGHTON_OCR_TIMEOUT_S"


@dataclass(frozen=True)
class Runner:
    """What is known of the machine. `ends_at` is when it is taken away, by `time.monotonic`."""

    flavor: str | None = None
    dollars_per_hour: float | None = None
    prices_of: str | None = None
    ends_at: float | None = None

    def __str__(self) -> str:
        price = "" if self.dollars_per_hour is None else f"${self.dollars_per_hour:.2f} an hour"
        dated = f"{price}, prices of {self.prices_of}" if price and self.prices_of else price
        return ", ".join(word for word in (self.flavor, dated) if word)

    def cost(self, pages_per_s: float) -> str | None:
        """Say what a thousand pages cost at this speed; None where no price is known."""
        if self.dollars_per_hour is None or not pages_per_s:
            return None
        return f"${dollars_per_thousand(self.dollars_per_hour, pages_per_s):.2f} per 1,000 pages ({self})"


def find_runner(environment: Mapping[str, str], dollars_per_hour: float | None, started: float) -> Runner:
    """Find out where we run, inside of a job; elsewhere the user's price is all there is.

    `started` is when the run began: the job's time is counted from there.
    """
    if "JOB_ID" not in environment:
        return Runner(dollars_per_hour=dollars_per_hour)
    prices = read_price_list()
    found = _find_flavor(environment, prices)
    limit_s = environment.get(TIMEOUT_VARIABLE, "")
    ends_at = started + float(limit_s) if limit_s.isdecimal() else None
    if dollars_per_hour is not None:
        return Runner(found.name if found else None, dollars_per_hour, None, ends_at)
    if found is None:
        return Runner(ends_at=ends_at)
    return Runner(found.name, found.dollars_per_hour, prices.prices_of, ends_at)


def _find_flavor(environment: Mapping[str, str], prices: PriceList) -> Flavor | None:
    for variable in (FLAVOR_VARIABLE, "ACCELERATOR"):
        named = prices.find(environment.get(variable))
        if named:
            return named
    return prices.find(_flavor_of_job(environment["JOB_ID"])) or _flavor_by_shape(environment, prices)


def _flavor_of_job(job_id: str) -> str | None:
    """Ask the Hub about the job that we are; None where the token may not, or there is none."""
    from huggingface_hub import HfApi

    try:
        flavor = HfApi().inspect_job(job_id=job_id).flavor
    except no_answer():
        return None
    return str(getattr(flavor, "value", flavor))


def _flavor_by_shape(environment: Mapping[str, str], prices: PriceList) -> Flavor | None:
    try:
        vcpus, ram_gb = read_number(environment["CPU_CORES"]), read_number(environment["MEMORY"])
    except (KeyError, ValueError):
        return None
    gpus = [gpu.name for gpu in find_gpus()]
    if environment.get("ACCELERATOR") == "gpu" and not gpus:  # one that can't be seen makes no CPU flavour
        return None
    return matching_flavor(prices.flavors, vcpus, ram_gb, gpus)


# ---- commits ---------------------------------------------------------------------------------------------------------
# Blocks of a Hub dataset as they are uploaded and committed to the work ref.


class Committer:
    """Uploads blocks as large files, and commits them to the work ref. `revision` is that ref's, once it is open."""

    def __init__(self, repo_id: str, target: Target, work: WorkRef) -> None:
        self.revision = ""
        self._repo_id = repo_id
        self._target = target
        self._work = work
        self._additions: dict[int, Any] = {}

    def upload(self, files: Mapping[int, Path]) -> None:
        """Upload some blocks, which nobody sees yet."""
        from huggingface_hub import CommitOperationAdd

        additions = {
            number: CommitOperationAdd(self._target.block_name(number), file) for number, file in files.items()
        }
        self._on_work_ref(lambda revision: upload_files(self._repo_id, list(additions.values()), revision))
        self._additions.update(additions)

    def commit(self, numbers: Collection[int]) -> None:
        """Commit the blocks that were uploaded."""
        from huggingface_hub import HfApi

        self._on_work_ref(
            lambda revision: HfApi().create_commit(
                self._repo_id,
                [self._additions[number] for number in numbers],
                repo_type="dataset",
                revision=revision,
                commit_message=f"Blocks of split {self._target}: {len(numbers)}",
            )
        )
        for number in numbers:
            del self._additions[number]

    def _on_work_ref(self, act: Callable[[str], object]) -> None:
        """Do something at the work ref, opened again where another shard has found all blocks there and published."""
        from huggingface_hub.errors import RevisionNotFoundError

        try:
            act(self.revision)
        except RevisionNotFoundError:
            self.revision = self._work.open()
            act(self.revision)


def upload_files(repo_id: str, additions: Sequence[Any], revision: str) -> None:
    """Upload files, which nobody sees before they are committed. Raises what the client does, but for `RuntimeError`:
    so it wraps whatever went wrong with one file, an address to upload to that has expired for one. Another try is
    given new addresses."""
    from huggingface_hub import HfApi

    try:
        HfApi().preupload_lfs_files(repo_id, additions, repo_type="dataset", revision=revision)
    except RuntimeError as error:
        cause = error.__cause__ or error
        if isinstance(cause, FileNotFoundError | PermissionError):
            raise cause from error
        status = getattr(getattr(cause, "response", None), "status_code", "no answer")
        raise ConnectionError(f"{error} ({type(cause).__name__}, {status})") from error


# ---- hub_blocks ------------------------------------------------------------------------------------------------------
# Blocks of a Hub dataset: found on the work ref by any machine, and published from there.
#
# Where there is no work ref, the blocks on the target branch are those that are there.


class HubBlocks(RemoteBlocks):
    """The blocks of one split of a Hub dataset."""

    def __init__(
        self,
        place: Destination,
        staging: Path,
        *,
        counted_column: str = "",
        shard: Shard = WHOLE,
        commit_every_s: float = 600.0,
    ) -> None:
        self.place = place
        self._work = work_ref(place)
        self._at = place.revision
        self._committer = Committer(place.repo_id, place.target, self._work)
        super().__init__(
            str(place),
            place.target,
            staging,
            self._committer,
            counted_column=counted_column,
            shard=shard,
            commit_every_s=commit_every_s,
        )

    def _listed(self) -> dict[int, int]:
        self._at = self._work.find() or self.place.revision
        return {number: block.size for number, block in blocks_at(self.place, self._at).items()}

    def _opened(self, number: int) -> Any:
        from huggingface_hub import HfFileSystem

        # Told the size, it lists no folder: that would cost as many requests as there are thousands of blocks, and go
        # stale.
        return HfFileSystem().open(
            f"datasets/{self.place.repo_id}/{self.place.target.block_name(number)}",
            "rb",
            revision=self._at,
            size=self._bytes_of(number),
            block_size=REMOTE_BLOCK_BYTES,
        )

    def _open_to_write(self) -> None:
        repo_id, revision = self.place.repo_id, self.place.revision
        starts_empty = self._begins_anew or (self._work.find() is None and not has_branch(repo_id, revision))
        self._at = self._committer.revision = self._work.open(anew=self._begins_anew)
        if starts_empty:
            self._remove_inherited()

    def _remove_inherited(self) -> None:
        """Remove the blocks that the work ref has from where it began."""
        from huggingface_hub import CommitOperationDelete, HfApi

        inherited = [self.place.target.block_name(number) for number in sorted(blocks_at(self.place, self._at))]
        if inherited:
            HfApi().create_commit(
                self.place.repo_id,
                [CommitOperationDelete(name) for name in inherited],
                repo_type="dataset",
                revision=self._at,
                commit_message=f"Start split {self.place.target} anew",
            )

    def publish(self, whole: Whole) -> str | None:
        """Make the split visible to readers, in one commit, and look at it as they do; return its address.

        Raises `PublishError` where that fails, or where a reader would not find what is expected.
        """
        collected = self._looked(self._work.find, "looking for what is collected")
        if collected or whole.insists:
            kept = f"{place_of(self.place, collected)} keeps all blocks; the same command goes on"
            published = publish(self.place, self._work, whole, kept)
            self._at = published.commit  # the work ref goes, by our hand or another shard's
            first = self.read(0, list(whole.text_columns)).slice(0, 1).to_pylist()
            verify(self.place, published, whole, first, kept)
            self._looked(
                lambda: self._work.close(published.source), "putting away the ref that blocks were collected on"
            )
        return self._looked(self._work.address, "asking for its address")

    def collected(self) -> str:
        """Say where the blocks are that are there already."""
        return place_of(self.place, None if self._at == self.place.revision else self._at)


def place_of(place: Destination, collected: str | None) -> str:
    """Name the ref of a dataset on which blocks are."""
    return f"{place.repo_id}@{collected}" if collected else str(place)


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
        "Hub dataset id, hf://datasets/… or hf://buckets/… (a folder, file or pattern there), folder of images, "
        "parquet file or folder, or a folder that save_to_disk wrote"
    )
    output: str = argument(
        "local folder, Hub dataset id (namespace/name) to publish to, hf://datasets/…@branch, or hf://buckets/…"
    )

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

    frames: str = option(
        "first",
        "input",
        "frames of a picture that has several (TIFF, GIF …): the first, or all, their texts joined by a form feed",
        choices=("first", "all"),
    )
    max_pixels: int = option(
        178_956_970, "input", "pixels a picture may have before it is decoded", metavar="N", minimum=1
    )
    page_timeout: float = option(
        120.0, "input", "seconds one picture may take to be decoded and scaled", metavar="S", minimum=0.001
    )
    allow_truncated: bool = option(False, "input", "read pictures whose file breaks off, as far as they go")
    skip_blank: bool = option(True, "input", "pages without ink are `blank` and not asked about")

    output_column: str = option(
        "markdown",
        "output",
        "column for the text; _status, _error and _tokens columns are named after it",
        metavar="NAME",
    )
    output_config: str | None = option(
        None,
        "output",
        "configuration of the output, in a folder of that name (default: default, in data/)",
        metavar="NAME",
    )
    output_split: str | None = option(None, "output", "split of the output (default: the input's name)", metavar="NAME")
    output_revision: str | None = option(
        None, "output", "branch of the Hub output, created from main where it is missing (default: main)", metavar="REV"
    )
    create_pr: bool = option(
        False, "output", "publish by a pull request: a draft while blocks come in, marked as ready when all are there"
    )
    results_only: bool = option(
        False, "output", "leave the pictures out; row_index says which row of the input a text belongs to"
    )
    block_rows: int = option(
        256,
        "output",
        "rows a block file; a killed run asks again at most for the blocks that were open",
        metavar="N",
        minimum=1,
    )
    drop_labels: str | None = option(
        None,
        "output",
        "with --mode grounding: blocks to leave out of the text, such as header,footer,page_number",
        metavar="LABELS",
    )
    fix_dollars: bool = option(True, "output", r"repair escaped math delimiters (`\$x\$`) and leave prices alone")
    keep_raw: bool = option(False, "output", "keep the text as the engine gave it, in a _raw column")
    confidence: bool = option(
        False, "output", "mean and lowest token probability of a page, in a _confidence column; engines with logprobs"
    )
    overwrite: bool = option(False, "output", "remove the blocks that are there and start anew")
    resume: bool = option(False, "output", "go on where a run with the same settings stopped; this is the default")
    retry_failed: bool = option(False, "output", "ask again about the rows that failed, and write their blocks anew")
    finish: bool = option(False, "output", "ask about nothing: check that all blocks are there, and publish them")
    commit_minutes: float | None = option(
        None,
        "output",
        "minutes between two commits to a Hub output (default: 10; with shards 5 for each of them, if that is more)",
        metavar="M",
        minimum=0.0,
    )
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

    mode: str = option(
        "text",
        "model",
        "text, or grounding: the layout too, in a _blocks column (LightOnOCR-3)",
        choices=("text", "grounding"),
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
    retries_quality: int = option(
        2,
        "sampling",
        "how often a page is asked again, warmer, whose text was cut off or loops; the best text is kept",
        metavar="N",
        minimum=0,
    )

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

    allow_bad_engine: bool = option(False, "engine", "go on with a vLLM version that is known to be bad for the model")
    no_canary: bool = option(
        False, "engine", "trust the engine without having it read a page of known text before the first real one"
    )
    canary_page: str | None = option(
        None, "engine", "picture to use as that page, with --canary-text (default: we draw one)", metavar="FILE"
    )
    canary_text: str | None = option(None, "engine", "file with the text on --canary-page", metavar="FILE")

    max_failure_rate: float = option(
        0.05,
        "run",
        "share of pages, 0 to 1, that may fail before the exit code is 1",
        metavar="SHARE",
        minimum=0.0,
        maximum=1.0,
    )
    num_shards: int | None = option(
        None, "run", "how many runs share the output (default: SLURM_ARRAY_TASK_COUNT, or 1)", metavar="N", minimum=1
    )
    shard_index: int | None = option(
        None, "run", "number of this one, from 0 (default: from SLURM_ARRAY_TASK_ID, or 0)", metavar="I", minimum=0
    )
    show: int = option(0, "run", "print the text of the first N pages at the end", metavar="N", minimum=0)
    verbose: bool = option(False, "run", "say why requests are made again, and more")
    dollars_per_hour: float | None = option(
        None, "run", "price of an hour of this machine (default: of the job's flavour)", metavar="D", minimum=0.0
    )

    jobs: int | None = option(
        None, "jobs", "submit this run as N Hugging Face Jobs that share the output, and end", metavar="N", minimum=1
    )
    flavor: str | None = option(
        None, "jobs", "hardware of a job, as `hf jobs hardware` names it (default: the script's own)", metavar="NAME"
    )
    timeout: str | None = option(
        None, "jobs", "when a job is stopped: 90m, 4h, 2d (default: from the estimate, or 4h)", metavar="TIME"
    )
    attempts: int | None = option(
        None,
        "jobs",
        "how often a job is started in all, where it is stopped or fails (default: 3)",
        metavar="N",
        minimum=1,
    )
    jobs_namespace: str | None = option(
        None, "jobs", "user or organisation that the jobs run for (default: the token's user)", metavar="NS"
    )
    pages_per_second: float | None = option(
        None, "jobs", "speed of one job, for the estimate (default: a stored figure)", metavar="X", minimum=1e-9
    )
    dry_run: bool = option(False, "jobs", "print what --jobs would submit, and submit nothing")

    vllm_args: tuple[str, ...] = ()


OptionsT = TypeVar("OptionsT", bound=CommonOptions)


def make_parser(
    options_type: type[OptionsT], *, prog: str, description: str, epilog: str = ""
) -> argparse.ArgumentParser:
    """Make the parser of an options dataclass."""
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} [OPTIONS] INPUT OUTPUT [-- WORDS FOR THE ENGINE]",
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
        if kind is bool and item.default:
            group.add_argument(
                flag, default=True, action=argparse.BooleanOptionalAction, help=f"{meta['help']} (default: yes)"
            )
        elif kind is bool:
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


# ---- quality ---------------------------------------------------------------------------------------------------------
# What the options ask of pages and texts, for the rooms that see to it.


def text_rules(options: CommonOptions) -> TextRules:
    """Say what is wanted of the texts; raise `UsageError` where the options make no sense together."""
    is_grounding = options.mode == "grounding"
    dropped = frozenset(label.strip() for label in (options.drop_labels or "").split(",") if label.strip())
    if dropped and not is_grounding:
        raise UsageError("--drop-labels goes with --mode grounding: without it a text has no labels")
    if unknown := sorted(dropped - GROUNDING_LABELS):
        labels = ", ".join(sorted(GROUNDING_LABELS))
        raise UsageError(f"--drop-labels: {', '.join(unknown)} is no label of a block; there are {labels}")
    return TextRules(is_grounding, dropped, options.fix_dollars, options.keep_raw)


def reading_of(
    options: CommonOptions, profile: ModelProfile, question: Question, context_tokens: int | None
) -> Reading:
    """Say how the pictures of a run are read; `context_tokens` is what the engine says its --max-model-len is."""
    limits = PageLimits(
        profile.longest_edge_px,
        options.max_pixels,
        allow_truncated=options.allow_truncated,
        skip_blank=options.skip_blank,
    )
    return Reading(
        limits,
        question,
        text_rules(options),
        retries_quality=options.retries_quality,
        context_tokens=context_tokens,
        all_frames=options.frames == "all",
        page_timeout_s=options.page_timeout,
    )


def extra_columns(options: CommonOptions) -> Extras:
    """Say which columns are written beside those that always are."""
    return Extras(blocks=options.mode == "grounding", raw=options.keep_raw, confidence=options.confidence)


def quality_settings(options: CommonOptions) -> dict[str, Any]:
    """Return what decides, beside the question, which text a page gets."""
    return {
        "mode": options.mode,
        "drop_labels": sorted(text_rules(options).drop_labels),
        "fix_dollars": options.fix_dollars,
        "keep_raw": options.keep_raw,
        "confidence": options.confidence,
        "retries_quality": options.retries_quality,
        "frames": options.frames,
        "max_pixels": options.max_pixels,
        "allow_truncated": options.allow_truncated,
        "skip_blank": options.skip_blank,
    }


# ---- way -------------------------------------------------------------------------------------------------------------
# How a run goes about its blocks: which are its own, what is asked again, and when the rest of the world sees them.


COMMIT_EVERY_S = 600.0
SHARD_COMMITS_EVERY_S = 300.0  # times the number of shards: all of them together commit twelve times an hour
SPLIT_NAME = re.compile(r"\w+(\.\w+)*")  # as `datasets` has it
CONFIG_NAME = re.compile(r"(?!.*(--|\.\.))[A-Za-z0-9][\w.-]*")  # the name of a folder, and a part of a branch's name


@dataclass(frozen=True)
class Way:
    """How a run goes about its blocks.

    `finishes`: no page is asked about; all blocks have to be there. `split` and `config` are those of the output, where
    they are named. Blocks of a Hub output are committed every `commit_every_s` seconds.
    """

    shard: Shard = WHOLE
    commit_every_s: float = COMMIT_EVERY_S
    results_only: bool = False
    retry_failed: bool = False
    finishes: bool = False
    split: str | None = None
    config: str = DEFAULT_CONFIG

    def target(self, split: str) -> Target:
        """Return what is written of this split of the input."""
        return Target(self.split or split, self.config)


def way_of(options: CommonOptions, environment: Mapping[str, str]) -> Way:
    """Say how the run goes about its blocks. Raises `UsageError` where options exclude each other."""
    chosen = [flag for flag in ("overwrite", "retry_failed", "finish") if getattr(options, flag)]
    if len(chosen) > 1:
        flags = " and ".join(f"--{flag.replace('_', '-')}" for flag in chosen)
        raise UsageError(f"{flags} exclude each other; give one of them")
    shard = shard_of(options.num_shards, options.shard_index, environment)
    if options.overwrite and shard.count > 1:
        raise UsageError("--overwrite would remove the blocks of other shards; run it once without shards first")
    _check_name("--output-split", options.output_split, SPLIT_NAME)
    _check_name("--output-config", options.output_config, CONFIG_NAME)
    if options.output_config == DEFAULT_FOLDER:
        raise UsageError(
            f"--output-config {DEFAULT_FOLDER}: the default configuration lies in that folder; choose another name"
        )
    return Way(
        shard=shard,
        commit_every_s=commit_every_s(options.commit_minutes, shard),
        results_only=options.results_only,
        retry_failed=options.retry_failed,
        finishes=options.finish,
        split=options.output_split,
        config=options.output_config or DEFAULT_CONFIG,
    )


def commit_every_s(minutes: float | None, shard: Shard) -> float:
    """Return the seconds between two commits: as asked for, or so that all shards together make twelve an hour."""
    if minutes is not None:
        return 60 * minutes
    return max(COMMIT_EVERY_S, SHARD_COMMITS_EVERY_S * shard.count)


def _check_name(flag: str, name: str | None, allowed: re.Pattern[str]) -> None:
    if name is not None and not allowed.fullmatch(name):
        raise UsageError(
            f"{flag} {name!r} can't be the name of files on the Hub; use letters, digits, _ and . (a configuration: "
            "single - too)"
        )


def shard_of(count: int | None, index: int | None, environment: Mapping[str, str]) -> Shard:
    """Return this run's shard: as the options say, or a Slurm array; one alone where neither does."""
    if index is None and "SLURM_ARRAY_TASK_ID" in environment:
        count, index = _slurm_shard(count, environment)
        say(f"shard {index} of {count}, as the Slurm array says")
    if (count is None) != (index is None):
        raise UsageError("--num-shards and --shard-index go together; give both")
    shard = Shard(index or 0, count or 1)
    if shard.index >= shard.count:
        raise UsageError(f"--shard-index {shard.index} is not below --num-shards {shard.count}; shards count from 0")
    return shard


def _slurm_shard(count: int | None, environment: Mapping[str, str]) -> tuple[int, int]:
    """Return (shards, index) of a Slurm array's task.

    Where --num-shards is given the task's number is the index: so a few tasks of an array can be run again.
    """
    try:
        task = int(environment["SLURM_ARRAY_TASK_ID"])
        if count is not None:
            return count, task
        first = int(environment.get("SLURM_ARRAY_TASK_MIN", "0"))
        step = int(environment.get("SLURM_ARRAY_TASK_STEP", "1"))
        return int(environment["SLURM_ARRAY_TASK_COUNT"]), (task - first) // step
    except (KeyError, ValueError, ZeroDivisionError) as error:
        raise UsageError(
            f"the variables of the Slurm array make no shard ({error!r}); give --num-shards and --shard-index"
        ) from error


# ---- job -------------------------------------------------------------------------------------------------------------
# A run: what the options ask for, and what then has to be done.


@dataclass(frozen=True)
class Opened:
    """What preflight found: the input, how it is cut into blocks, and where these lie."""

    source: Source
    plan: BlockPlan
    blocks: Blocks


@dataclass
class Run:
    """One run of a script: what is known of it so far, for its last words.

    `streams`: rows of a Hub input that is not parquet are streamed, where they can be.
    """

    script: str
    options: CommonOptions
    argv: Sequence[str]
    profile: ModelProfile
    question: Question
    output: Output
    way: Way = field(default_factory=Way)
    streams: bool = False
    engine: str | None = None
    context_tokens: int | None = None  # what the engine says its --max-model-len is
    opened: Opened | None = None
    tally: Tally | None = None
    statuses: Counter[str] = field(default_factory=Counter)
    missing_blocks: Sequence[int] = ()  # of all shards, at the end
    runner: Runner = field(default_factory=Runner)
    rows_again: int = 0  # rows of closed blocks that are asked about again
    started: float = field(default_factory=time.monotonic)

    @property
    def at(self) -> Opened:
        """What preflight opened."""
        assert self.opened is not None, "preflight comes first"
        return self.opened

    def todo(self) -> list[int]:
        """Return the numbers of the blocks to write: this run's that are missing; where asked, those with failures."""
        closed = self.at.blocks.closed()
        ours = [number for number in range(len(self.at.plan)) if self.way.shard.holds(number)]
        failed: dict[int, int] = {}
        if self.way.retry_failed:
            there = [number for number in ours if number in closed]
            for number, counts in statuses_of(self.at.blocks, there, self.options.output_column).items():
                failed[number] = sum(count for status, count in counts.items() if status not in SOUND)
        self.rows_again = sum(failed.values())
        return [number for number in ours if number not in closed or failed.get(number)]

    def surely_asks(self) -> bool:
        """Whether an engine is needed for all that can be told before anything is opened: no block is here yet."""
        blocks = self.output.folder / (self.options.output_config or DEFAULT_FOLDER)
        some_are_here = any(blocks.glob("*.parquet"))
        return self.options.overwrite or not (self.way.finishes or some_are_here)

    def missing(self) -> list[int]:
        """Return the numbers of the blocks that are not there, those of other shards too."""
        closed = self.at.blocks.closed()
        return [number for number in range(len(self.at.plan)) if number not in closed]

    def command(self) -> str:
        """Return the command line, as people type it."""
        return shlex.join(["uv", "run", self.script, *self.argv])


def begin(script: str, options: CommonOptions, argv: Sequence[str], *, streams: bool = False) -> Run:
    """Check the options against each other and the model; nothing is opened yet."""
    if options.private and options.public:
        raise UsageError("--private and --public exclude each other; give one of them")
    if options.overwrite and options.resume:
        raise UsageError("--overwrite and --resume exclude each other; give one of them")
    way = way_of(options, os.environ)
    _refuse_secrets(options)
    text_rules(options)
    match = find_profile(options.model)
    profile = match.profile
    if match.how != "catalogue":
        say(f"{options.model}: {match}")
    sampling = profile.sampling
    question = Question(
        words=prompt_words(profile, options.mode),
        temperature=sampling.temperature if options.temperature is None else options.temperature,
        top_p=sampling.top_p if options.top_p is None else options.top_p,
        max_tokens=options.max_tokens or sampling.max_tokens,
        seed=options.seed,
        chat_template_kwargs=dict(profile.chat_template_kwargs),
    )
    output = choose_output(options.output, options.work_dir, options.output_revision, options.create_pr)
    check_output_is_apart(output, options.input)
    return Run(script, options, argv, profile, question, output, way, streams)


def _refuse_secrets(options: CommonOptions) -> None:
    """Keys in the command line would end up in process lists, logs and the card."""
    for word in options.vllm_args:
        if word.split("=")[0] in {"--api-key", "--hf-token"}:
            raise UsageError(
                f"{word.split('=')[0]} does not belong on a command line: set HF_TOKEN in the environment; "
                "a server that we start is given a key of its own there"
            )


def blocks_of(run: Run, source: Source, plan: BlockPlan) -> Blocks:
    """Return the blocks of the output, wherever they lie."""
    output, way = run.output, run.way
    if output.repo_id:
        place = Destination(output.repo_id, plan.target, output.revision, is_private(run, source), output.create_pr)
        return HubBlocks(
            place,
            output.folder,
            counted_column=f"{run.options.output_column}_status",
            shard=way.shard,
            commit_every_s=way.commit_every_s,
        )
    if output.bucket:
        return BucketBlocks(
            output.bucket,
            plan.target,
            output.folder,
            private=is_private(run, source),
            counted_column=f"{run.options.output_column}_status",
            shard=way.shard,
        )
    return BlockFolder(output.folder, plan.target, way.shard)


def input_name(run: Run, source: Source) -> str:
    """Name the input for others: a local path says nothing to them."""
    return Path(run.options.input).name if source.roots else run.options.input


def is_private(run: Run, source: Source) -> bool:
    """Whether a new dataset or bucket is to be private: as the input, unless the user says otherwise."""
    return run.options.private or (source.is_private and not run.options.public)


def run_settings(run: Run) -> dict[str, Any]:
    """Return all that decides what the blocks hold: a resumed run must have the same."""
    options, question, source, plan = run.options, run.question, run.at.source, run.at.plan
    return {
        "input": source.fingerprint,
        "config": options.config,
        "split": source.split,
        "image_column": source.image_column,
        "rows": plan.num_rows,
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
        "results_only": run.way.results_only,
        **quality_settings(options),
    }


def schema_of(run: Run) -> pa.Schema:
    """Return the schema of the output."""
    without = run.at.source.image_column if run.way.results_only else None
    return output_schema(
        run.at.source.rows.schema,
        run.options.output_column,
        run_settings(run),
        without=without,
        extras=extra_columns(run.options),
    )


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
        **quality_settings(options),
        "flavor": run.runner.flavor or os.environ.get("ACCELERATOR"),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def hosted_command(run: Run, image: str, otherwise: str) -> str:
    """Return how to run the same on hosted GPUs, one or several, and `otherwise` what else could be done."""
    words = ["hf", "jobs", "uv", "run", "--image", image, "--flavor", "l4x1", "-s", "HF_TOKEN", "--timeout", "4h"]
    return (
        f"On a hosted GPU:\n\n    {shlex.join([*words, 'SCRIPT_URL', *run.argv])}\n\n"
        f"(SCRIPT_URL: the address of {run.script}, or its path here; input and output must be Hub datasets there.)\n"
        "On several at once: this command with --jobs 4 (and --dry-run, to see first what that takes).\n"
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


def start_counting(run: Run, todo: Sequence[int]) -> None:
    """Count from now on what this run does, beside what is done already."""
    at = run.at
    ours = [number for number in range(len(at.plan)) if run.way.shard.holds(number)]
    missing = set(todo) - at.blocks.closed()
    rows = sum(len(at.plan.positions(number)) for number in ours)
    rows_before = rows - sum(len(at.plan.positions(number)) for number in missing) - run.rows_again
    run.tally = Tally(rows, rows_before, verbose=run.options.verbose, dollars_per_hour=run.runner.dollars_per_hour)


def make_job(run: Run, todo: Sequence[int]) -> Job:
    """Return what has to be done, and start counting."""
    at = run.at
    start_counting(run, todo)
    assert run.tally is not None
    if run.tally.rows_before:
        say(f"{run.tally.rows_before} of {run.tally.rows} rows are done already; blocks to be written: {len(todo)}")
    return Job(
        source=at.source,
        plan=at.plan,
        blocks=at.blocks,
        todo=todo,
        reading=reading_of(run.options, run.profile, run.question, run.context_tokens),
        output_column=run.options.output_column,
        settings=run_settings(run),
        info=run_info(run),
        results_only=run.way.results_only,
        extras=extra_columns(run.options),
    )


# ---- canary ----------------------------------------------------------------------------------------------------------
# The canary: a page of known text that an engine must read before it is trusted with the first real one.
#
# An engine with the wrong version, image or weights answers quickly, keeps the GPU busy and writes nonsense. No gauge
# shows that; only a page whose text is known does.


CANARY_LINES = (
    "Harbour Office, 14 March 1897",
    "Received of the ship Aurora forty sacks",
    "of grain and nine barrels of salted fish,",
    "all in good order and well counted.",
    "The balance of 362 crowns is to be paid",
    "before the end of the month.",
)
CANARY_SIZE_PX = (980, 560)
CANARY_FONT_PX = 36
MOST_ERRORS = 0.25  # characters wrong; a working engine has under 0.02, a degenerate one over 0.8
LONGEST_ANSWER = 3  # times the text: what is longer was made up
CANARY_ROWS = (-1, -2)  # the rows whose seeds the two tries are asked with: no page has them


@dataclass(frozen=True)
class Canary:
    """A page and the text that stands on it."""

    page: Page
    text: str

    @property
    def max_tokens(self) -> int:
        """How long an answer may be: no tokenizer needs more than one a character."""
        return max(64, LONGEST_ANSWER * len(self.text))


def make_canary(page_file: str | None, text_file: str | None, limits: PageLimits) -> Canary:
    """Draw the canary page, or take the picture and the text of the user's own."""
    if (page_file is None) != (text_file is None):
        raise UsageError("--canary-page and --canary-text go together: a picture, and a file with the text on it")
    if page_file is None or text_file is None:
        return Canary(Page(draw_canary(), None), "\n".join(CANARY_LINES))
    try:
        cell, text = Path(page_file).read_bytes(), Path(text_file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the canary page can't be read: {error}; check --canary-page and --canary-text") from error
    page = make_page(cell, limits)
    if isinstance(page, Refusal):
        raise UsageError(f"--canary-page {page_file}: {page.reason}")
    if not plain(text):
        raise UsageError(f"--canary-text {text_file} holds no letters")
    return Canary(page, text)


def draw_canary() -> Image.Image:
    """Draw `CANARY_LINES` as a scanned letter has them: dark on light, in the font that Pillow brings."""
    from PIL import Image, ImageDraw, ImageFont

    page = Image.new("L", CANARY_SIZE_PX, 250)
    draw, font = ImageDraw.Draw(page), ImageFont.load_default(CANARY_FONT_PX)
    for number, line in enumerate(CANARY_LINES):
        draw.text((64, 56 + number * 76), line, font=font, fill=20)
    return page


def what_is_wrong(canary: Canary, result: PageResult) -> str | None:
    """Return why the answer to the canary page shows that the engine can't be trusted; None where it is readable."""
    answer = plain_text(parse_grounding(result.text or ""))  # a text without markers is as it was
    seen = f"{answer[:120]!r}{'…' if len(answer) > 120 else ''}"
    if result.status == "error" and result.text is None:
        return result.error or "no answer"
    if re.search(r"</?think(ing)?>", answer):
        return f"it thinks aloud, which must be off: {seen}"
    if result.status == "repetition" or ends_in_a_loop(answer):
        return f"it repeats itself: {seen}"
    if not plain(answer):
        return f"it read no letter: {seen}"
    rate = error_rate(canary.text, answer)
    if result.status == "truncated" or len(plain(answer)) > LONGEST_ANSWER * len(plain(canary.text)):
        return f"it does not stop ({result.tokens} tokens for {len(canary.text)} characters): {seen}"
    if rate > MOST_ERRORS:
        return f"{rate:.0%} of the characters are wrong ({MOST_ERRORS:.0%} is the most): {seen}"
    return None


def plain(text: str) -> str:
    """Return the letters and digits of a text, in one case: markup, spaces and line ends are matters of taste."""
    return "".join(c for c in unicodedata.normalize("NFKC", text).casefold() if c.isalnum())


def error_rate(truth: str, answer: str) -> float:
    """Return the edits from the answer to the truth, a character of the truth, by letters and digits alone."""
    wanted, got = plain(truth), plain(answer)[: 4 * len(plain(truth)) + 64]
    row = list(range(len(got) + 1))
    for number, letter in enumerate(wanted, 1):
        diagonal, row[0] = row[0], number
        for place, other in enumerate(got, 1):
            diagonal, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, diagonal + (letter != other))
    return row[-1] / max(1, len(wanted))


def ends_in_a_loop(text: str) -> bool:
    """Whether a text ends in one piece over and over: six times or more, and more than 40 characters in all."""
    found = re.search(r"(.{1,80}?)\1{5,}\s*\Z", text[-2000:], re.DOTALL)
    return found is not None and len(found[0]) > 40


# ---- budget ----------------------------------------------------------------------------------------------------------
# Whether the largest page and its text fit the context: a sum that costs nothing and saves a night of refusals.


# The chat template, the marks around the image and the trained word: measured 19 on a LightOnOCR-2 page.
TEMPLATE_TOKENS = 64


def image_tokens(width: int, height: int, pixels_per_token_side: int) -> int:
    """Return what a picture costs: a token for each started square; these models put none between the rows."""
    return -(-width // pixels_per_token_side) * -(-height // pixels_per_token_side)


def check_budget(profile: ModelProfile, question: Question, max_model_len: int | None) -> None:
    """Raise `UsageError`, with the sum, where a square page at the longest edge and its text would not fit.

    `max_model_len` is what the engine says it has; None, where it does not say, passes.
    """
    if max_model_len is None:
        return
    edge, side = profile.longest_edge_px, profile.pixels_per_token_side
    page = image_tokens(edge, edge, side)
    answer = question.max_tokens or 1
    needed = page + TEMPLATE_TOKENS + answer
    if needed <= max_model_len:
        return
    text = f"{question.max_tokens} of text (--max-tokens)" if question.max_tokens else "at least 1 of text"
    most = max_model_len - page - TEMPLATE_TOKENS
    lower = f"at most --max-tokens {most}, or " if question.max_tokens and most > 0 else ""
    raise UsageError(
        f"the largest page does not fit the engine's context: {edge}x{edge} px are {page} tokens "
        f"(one a {side}x{side} px), + {TEMPLATE_TOKENS} of the prompt + {text} = {needed}, "
        f"and --max-model-len is {max_model_len}; give {lower}--max-model-len {needed} or more"
    )


# ---- trust -----------------------------------------------------------------------------------------------------------
# What an engine must pass before its first page: the version gate, the budget, and the canary.


@dataclass(frozen=True)
class Trust:
    """What is required of an engine. `canary` None: no page is asked about; `patience_s`: how long an answer may take.

    `allow_bad_engine`: versions known to be bad are taken all the same.
    """

    profile: ModelProfile
    question: Question
    canary: Canary | None
    allow_bad_engine: bool = False
    patience_s: float = 600.0


def required(profile: ModelProfile, question: Question, options: CommonOptions, patience_s: float = 600.0) -> Trust:
    """Say what the options require of an engine; raise `UsageError` where the canary page they name is none."""
    canary = make_canary(options.canary_page, options.canary_text, PageLimits(profile.longest_edge_px))
    return Trust(profile, question, None if options.no_canary else canary, options.allow_bad_engine, patience_s)


def check_version(trust: Trust, vllm: str, transformers: str | None = None, *, serves: bool = False) -> None:
    """Raise `EngineError` where the catalogue warns of this vLLM, or of this pair of it and transformers.

    `serves`: it serves the model already, so that it can't be a pair with which the model does not start.
    """
    bad = known_bad_engine(trust.profile, vllm, transformers)
    if bad is None or trust.allow_bad_engine or (bad.transformers and (serves or transformers is None)):
        return
    pair = f"vLLM {vllm}" + (f" with transformers {transformers}" if bad.transformers else "")
    raise EngineError(
        f"{pair} is known to be bad for {trust.profile.model_id}: {bad.reason}. "
        f"Use another version, such as the image {trust.profile.image}, or insist with --allow-bad-engine"
    )


def installed_versions(program: str, environment: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the versions of vLLM and transformers behind a `vllm` command, asked of its own Python; None if unknown.

    It takes a blink, where `vllm --version` takes the seconds of its imports.
    """
    found = shutil.which(program)
    try:
        with Path(found or "").open("rb") as script:
            first = script.readline(500).decode(errors="replace")
        if not first.startswith("#!") or "python" not in first:
            return None
        ask = "from importlib.metadata import version as v; print(v('vllm'), v('transformers'))"
        command = [*first[2:].split(), "-c", ask]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=20, check=True)
        vllm, transformers = done.stdout.split()
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return vllm, transformers


def check_context(trust: Trust, max_model_len: object) -> None:
    """Raise `UsageError` where the largest page does not fit what the engine says its context is."""
    check_budget(trust.profile, trust.question, max_model_len if isinstance(max_model_len, int) else None)


def check_canary(trust: Trust, ask: Callable[[Canary, int], PageResult], engine: str) -> float:
    """Have the canary page read, twice where the first answer is not readable; return the seconds an answer took.

    `ask` gets the canary and the row for its seed. Raises `EngineError` where the engine can't be trusted.
    """
    if trust.canary is None:
        return 0.0
    wrong: str | None = "it was not asked"
    for row in CANARY_ROWS:
        started = time.monotonic()
        wrong = what_is_wrong(trust.canary, ask(trust.canary, row))
        if wrong is None:
            took_s = time.monotonic() - started
            say(f"the canary page was read in {took_s:.1f} s")
            return took_s
    raise EngineError(
        f"{engine} can't be trusted with {trust.profile.model_id}: a page of known text (the canary) came back "
        f"unreadable: {wrong}. Most likely its version does not fit the model: use the image {trust.profile.image}. "
        "Another test page: --canary-page and --canary-text; none: --no-canary"
    )


# ---- web -------------------------------------------------------------------------------------------------------------
# Plain HTTP to a server: addresses, and one request at a time without redirects; no client library is needed.


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


def fetch(url: str, key: str, body: bytes | None = None, timeout_s: float = 5.0) -> tuple[int, bytes]:
    """GET an address, or POST a JSON body to it; return (status, body). Raises `OSError` where nothing answers."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, body, headers)  # noqa: S310 - http(s) only
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


# ---- ask_canary ------------------------------------------------------------------------------------------------------
# Asks a server about the canary page, before there is an event loop.


CANARY_PAUSE_S = 1.0


def ask_server_about(
    endpoint: Endpoint, trust: Trust, canary: Canary, row: int, check_alive: Callable[[], None]
) -> PageResult:
    """Ask a server about the canary page, again and again while it says that it is not ready.

    `check_alive` raises where there is no sense in asking on.
    """
    question = replace(trust.question, max_tokens=canary.max_tokens)
    body = request_body(canary.page, row, question, endpoint.model).whole()
    give_up_at = time.monotonic() + trust.patience_s
    while True:
        check_alive()
        left_s = max(0.1, give_up_at - time.monotonic())
        try:
            status, answer = fetch(f"{endpoint.base_url}/chat/completions", endpoint.api_key, body, left_s)
        except (OSError, ValueError) as error:
            status, answer = 0, str(getattr(error, "reason", error)).encode()
        if status == 200:
            return _read_answer(answer)
        words = f"HTTP {status}: " * bool(status) + answer.decode(errors="replace")[:300]
        if status not in {0, 408, 409, 425, 429} and status < 500:
            raise EngineError(f"the server refuses the canary page: {words}; check --server and --model")
        if time.monotonic() + CANARY_PAUSE_S > give_up_at:
            check_alive()
            raise EngineError(f"the server did not answer the canary page in {trust.patience_s:.0f} s: {words}")
        time.sleep(CANARY_PAUSE_S)


def _read_answer(body: bytes) -> PageResult:
    try:
        completion = json.loads(body)
        choice = completion["choices"][0]
        usage = completion.get("usage") or {}
        return result_of_answer(
            choice["message"]["content"],
            choice.get("finish_reason"),
            tokens=usage.get("completion_tokens"),
            prompt_tokens=usage.get("prompt_tokens"),
            attempts=1,
            latency_s=0.0,
        )
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise EngineError(
            f"no chat completion came back from the server, but {body[:200]!r}; check --server"
        ) from error


# ---- ready -----------------------------------------------------------------------------------------------------------
# Ready: a server lists the model, is no version known to be bad, holds the largest page, and has read the canary.


POLL_S = 0.1
VERSION_TRIES = 3  # a router passes the question on, also to a server that is gone


class Child(Protocol):
    """The process of a server of ours."""

    @property
    def log(self) -> Path:
        """Where it writes."""

    def log_words(self) -> str:
        """Name the log and show its last lines."""

    def check_alive(self) -> None:
        """Raise `EngineError` where there is no sense in waiting on."""


@dataclass(frozen=True)
class Ready:
    """A server that can be trusted: where, what it says it is, and how long the canary page took it."""

    endpoint: Endpoint
    engine: str
    canary_s: float
    context_tokens: int | None  # what page and text may have together, where it says


def get_ready(
    model: str, trust: Trust, url: str, key: str, startup_timeout_s: float, child: Child | None = None
) -> Ready:
    """Wait until the server at `url` lists its models; return it once it has passed all that is required of it."""
    models = _wait_for_models(url, key, startup_timeout_s, child)
    endpoint = Endpoint(f"{url}/v1", key, served_id(models, model, url))
    engine = engine_name(url, models)
    owner, _, version = engine.partition(" ")
    if owner == "vllm" and version:
        check_version(trust, version, serves=True)
    card = next(card for card in models if card["id"] == endpoint.model)
    context = card.get("max_model_len")
    check_context(trust, context)
    alive: Callable[[], None] = child.check_alive if child else lambda: None
    canary_s = check_canary(trust, lambda canary, row: ask_server_about(endpoint, trust, canary, row, alive), engine)
    return Ready(endpoint, engine, canary_s, context if isinstance(context, int) else None)


def is_up(url: str, key: str) -> bool:
    """Whether anything answers HTTP at the URL."""
    try:
        fetch(f"{url}/v1/models", key)
    except (OSError, ValueError):
        return False
    return True


def _wait_for_models(url: str, key: str, startup_timeout_s: float, child: Child | None) -> list[dict[str, Any]]:
    """Wait until the server lists its models. Patience is measured by progress, where its log tells of any."""
    started = last_sign = time.monotonic()
    log = LogReader(child.log) if child else None
    phase, last_error = "start", "nothing answered"
    while True:
        if child:
            child.check_alive()
        for line in log.new_lines() if log else ():
            if is_progress(line):
                last_sign = time.monotonic()
            if (now_in := phase_of(line)) and now_in != phase:
                phase = now_in
                say(f"  after {duration(time.monotonic() - started)}: {phase}")
        try:
            status, body = fetch(f"{url}/v1/models", key)
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
            tail = f", in the phase {phase!r}. {child.log_words()}" if child else ""
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
    version = next(filter(None, (_version(url) for _ in range(VERSION_TRIES))), "")
    return f"{owner} {version}".strip()


def _version(url: str) -> str:
    try:
        status, body = fetch(f"{url}/version", "")
        return str(json.loads(body)["version"]) if status == 200 else ""
    except (OSError, ValueError, LookupError, TypeError):
        return ""


# ---- serve -----------------------------------------------------------------------------------------------------------
# The server: one that runs already, or `vllm serve` spawned here and ended with us.
#
# A server that we spawn listens on loopback only, with a random key that it is given by environment.


MEDIA_FLAG = "--allowed-local-media-path"
STOPPED = "the run was stopped while its server was starting"


@dataclass(frozen=True)
class Wanted:
    """Which server is wanted: `url` that of a running one or None; `command` what to spawn instead of `vllm serve`."""

    model: str
    trust: Trust
    url: str | None = None
    command: str | None = None
    port: int | None = None
    api_key: str | None = None
    vllm_args: Sequence[str] = ()
    own_words: Sequence[str] = ()  # what the user gave for `vllm serve`
    suggest: Callable[[], Sequence[str]] = (
        tuple  # asked for more of them before `vllm serve` is spawned: they come first
    )
    startup_timeout_s: float = 900.0
    keep: bool = False  # leave a server that we spawned running
    hint: str = ""  # the command to show where no server can be had here


@dataclass(frozen=True)
class Server:
    """A server that can be trusted; `keeper` starts it anew if it is ours."""

    ready: Ready
    keeper: Keeper | None = None

    @property
    def endpoint(self) -> Endpoint:
        """Where it answers."""
        return self.ready.endpoint

    @property
    def engine(self) -> str:
        """What it says it is, such as `vllm 0.32.0`."""
        return self.ready.engine

    @property
    def context_tokens(self) -> int | None:
        """What page and text may have together, where it says."""
        return self.ready.context_tokens


class Keeper:
    """Keeps a server of ours: starts it, ends it, and starts it again at the same address. Its calls block."""

    def __init__(self, wanted: Wanted, host: str, port: int, pages: SharedFiles | None = None) -> None:
        self.spawned: Spawned | None = None
        self.pages = pages
        self._wanted = wanted
        self._host, self._port = host, port
        self._url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._key = secrets.token_urlsafe(24)
        self._command = server_command(wanted, host, port)
        self._environment = server_environment(self._key, self._command[0])
        self._folder = Path(tempfile.mkdtemp(prefix="lighton-ocr-"))
        self._starts = 0
        self._given_up = threading.Event()

    def start(self) -> Server:
        """Start the server and wait until it can be trusted; raise `EngineError` where it can't."""
        if self._given_up.is_set():
            raise EngineError(STOPPED)
        self._starts += 1
        log = self._folder / ("server.log" if self._starts == 1 else f"server-{self._starts}.log")
        if self._wanted.command is None and (versions := installed_versions(self._command[0], self._environment)):
            check_version(self._wanted.trust, *versions)
        sweep = [self.pages.folder] if self.pages else []
        self.spawned = Spawned(self._command, self._environment, log, self._wanted.trust.profile.image, sweep)
        wanted = self._wanted
        ready = get_ready(wanted.model, wanted.trust, self._url, self._key, wanted.startup_timeout_s, self)
        self.spawned.note_shared_memory()
        return Server(ready, self)

    @property
    def log(self) -> Path:
        """Where the server that was started last writes."""
        assert self.spawned is not None
        return self.spawned.log

    def log_words(self) -> str:
        """Name its log and show its last lines."""
        return self.spawned.log_words() if self.spawned else ""

    def check_alive(self) -> None:
        """Raise `EngineError` where the process has ended, or the run wants no server any more."""
        assert self.spawned is not None
        ended = self.spawned.how_it_ended()
        if self._given_up.is_set():
            raise EngineError(STOPPED)
        if ended:
            raise EngineError(ended)

    def end(self) -> None:
        """End the server and all that it started."""
        if self.spawned:
            self.spawned.end()

    def restart(self, pause_s: float) -> Server:
        """End what is left of a server that died or froze, and start it again."""
        if self.spawned:
            self.spawned.end(patience_s=3.0)
        self._given_up.wait(pause_s)
        return self.start()

    def kill(self) -> None:
        """Kill it at once, without waiting: the last thing done."""
        if self.spawned:
            self.spawned.kill()
        if self.pages:
            shutil.rmtree(self.pages.folder, ignore_errors=True)

    def give_up(self) -> None:
        """Make a start that is under way in another thread fail at once."""
        self._given_up.set()
        self.kill()

    def leave_running(self) -> None:
        """Let the server live on, and say how to use and how to end it."""
        assert self.spawned is not None
        key_file = self._folder / "api-key"
        key_file.touch(mode=0o600)
        key_file.write_text(self._key)
        self.spawned.release()
        say(
            f"the server is left running (--keep-server); use it with\n"
            f'  VLLM_API_KEY="$(cat {key_file})" … --server {self._url}\n'
            f"  its log: {self.spawned.log}\n  end it with: kill -- -{self.spawned.group}"
        )


def check_possible(wanted: Wanted) -> None:
    """Raise at once where no server is named and none can be spawned: no `vllm`, or a command that is none."""
    url = base_url(wanted.url) if wanted.url is not None else None
    if wanted.command is not None:
        command_words(wanted.command)
    _refuse_lost_words(wanted, url)
    if wanted.url is None and wanted.command is None and shutil.which("vllm") is None:
        raise EngineError(f"no `vllm` command on this machine, and no --server to use.\n{wanted.hint}")


def _refuse_lost_words(wanted: Wanted, url: str | None) -> None:
    """Raise `UsageError` where words for `vllm serve` were given, and none will be started by us."""
    words = shlex.join(wanted.own_words)
    if words and wanted.command is not None:
        raise UsageError(f"what stands after -- is for `vllm serve`: put {words} into the --serve-command itself")
    if words and url and _is_used_as_it_is(wanted, url):
        raise UsageError(
            f"{url} runs already, and what stands after -- is for one that we start: "
            f"leave {words} out, or start that server with it"
        )


def _is_used_as_it_is(wanted: Wanted, url: str) -> bool:
    """Whether the server at the URL is not ours to start: it is on another machine, or it answers."""
    return not is_local(url) or is_up(url, wanted.api_key or "EMPTY")


@contextlib.contextmanager
def running_server(wanted: Wanted) -> Iterator[Server]:
    """Use the server at `wanted.url`, or spawn one; a spawned one is ended on leaving.

    A local URL where nothing answers is where we spawn; a remote one is waited for and never shadowed.
    """
    check_possible(wanted)
    url = base_url(wanted.url) if wanted.url else None
    if url and _is_used_as_it_is(wanted, url):
        key = wanted.api_key or "EMPTY"
        yield Server(get_ready(wanted.model, wanted.trust, url, key, wanted.startup_timeout_s))
        return
    host, port = _address(url, wanted.port)
    check_port_is_free(host, port)
    with _shared_pages(wanted) as pages:
        if pages:
            flags = (MEDIA_FLAG, str(pages.folder))
            wanted = replace(wanted, vllm_args=(*wanted.vllm_args, *flags))
        keeper = Keeper(wanted, host, port, pages)
        try:
            yield keeper.start()
        except BaseException:
            keeper.end()
            raise
        if wanted.keep:
            keeper.leave_running()
        else:
            keeper.end()


def _shared_pages(wanted: Wanted) -> AbstractContextManager[SharedFiles | None]:
    """Make a folder through which pages reach the vLLM that we start; none where it is not vLLM or has another one."""
    has_another = any(word.partition("=")[0] == MEDIA_FLAG for word in wanted.vllm_args)
    return contextlib.nullcontext() if wanted.command is not None or has_another else shared_folder()


def server_command(wanted: Wanted, host: str, port: int) -> list[str]:
    """Return the words that start the server: `vllm serve`, or the command that the user gave.

    In a command of the user's `{host}`, `{port}` and `{model}` are filled in; where it has no `{port}`, `--host` and
    `--port` go at its end, which vLLM, llama-server and rapidocr-server.py all take.
    """
    if wanted.command is None:
        if shutil.which("vllm") is None:
            raise EngineError(
                f"nothing answers at {wanted.url}, and there is no `vllm` command on this machine to start at "
                f"{host}:{port}. Is the server that you mean still starting? Wait until {host}:{port}/health answers.\n"
                f"{wanted.hint}"
            )
        return [
            "vllm",
            "serve",
            wanted.model,
            "--host",
            host,
            "--port",
            str(port),
            *wanted.suggest(),
            *wanted.vllm_args,
        ]
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


# ---- steering --------------------------------------------------------------------------------------------------------
# Steering a run: twice a second the window is told what is seen, and each decision goes to the telemetry file.
#
# At the end it says what bounded the run, and what to change.


# What to change, by what bounded the run.
ADVICE = {
    "engine": "the engine is the limit: a faster GPU, more of them (data parallel), or more shards",
    "preparation": "preparing the pages is the limit: a flavour with more cores, or more shards",
    "source": "reading the input is the limit: a faster disk or network, or several shards on several machines",
    "memory": "this machine's memory is the limit: a flavour with more of it, or a lower --max-in-flight elsewhere",
    "limit": "the window was still growing, or stood at --max-in-flight: a longer run, or a higher bound",
}


@dataclass
class Steering:
    """What moves a window: gauges of the engine, memory of the host, pages being prepared."""

    window: Window
    tally: Tally
    gauges: Callable[[], Gauges]
    threads: int
    telemetry: TextIO | None = None
    measure: PageMeasure = field(default_factory=PageMeasure)

    async def steer(self) -> None:
        """Observe and decide until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            self.tick()

    def tick(self) -> dict[str, Any]:
        """Observe and decide once; return the decision as it stands in the telemetry file."""
        memory = read_memory()
        self.measure.note(self.window.in_flight, own_rss())
        line = self.window.observe(
            gauges=self.gauges(),
            memory_available=memory.for_pages if memory else None,
            bytes_a_page=self.measure.bytes_a_page(),
            preparing=self.tally.preparing,
            threads=self.threads,
            rows_left=self.tally.rows_left,
        )
        self.tally.bounded_by = line["bounded_by"]
        if self.telemetry:
            self._keep(line, self.telemetry)
        return line

    def _keep(self, line: dict[str, Any], telemetry: TextIO) -> None:
        """Write a decision down; a full disk there is no reason to stop steering."""
        try:
            telemetry.write(json.dumps(line) + "\n")
            telemetry.flush()
        except OSError as error:
            self.telemetry = None
            say(f"--telemetry can't be written any more: {error.strerror}; the run goes on without it")


@contextmanager
def telemetry_file(path: str | None) -> Iterator[TextIO | None]:
    """Open the file for telemetry, to go on in it; None where none is wanted."""
    if path is None:
        yield None
        return
    try:
        file = Path(path).open("a", encoding="utf-8")  # noqa: SIM115 - closed below
    except OSError as error:
        raise UsageError(f"--telemetry {path!r} can't be written: {error.strerror}; name another file") from error
    try:
        yield file
    finally:
        with suppress(OSError):  # said when it was written
            file.close()


def verdict(seconds_bound: dict[str, float]) -> str:
    """Say what bounded the run for most of its time, and what to change."""
    total = sum(seconds_bound.values())
    if total <= 0:
        return "too short to say what bounded it"
    shares = sorted(seconds_bound.items(), key=lambda item: -item[1])
    words = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in shares if seconds / total >= 0.05)
    return f"bounded by {words}; {ADVICE[shares[0][0]]}"


# ---- estimate --------------------------------------------------------------------------------------------------------
# What a run as jobs will take: hours and dollars, from a speed that somebody measured, or none at all.


UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
TIMEOUT_WITHOUT_ESTIMATE_S = 4 * 3600


@dataclass(frozen=True)
class Speed:
    """Pages a second of one job, and who says so."""

    pages_per_s: float
    basis: str


@dataclass(frozen=True)
class Estimate:
    """Time and money of a run as jobs. `pages` are those left to read, `longest_pages` those of the job with most."""

    pages: int
    longest_pages: int
    jobs: int
    speed: Speed
    dollars_per_hour: float | None

    @property
    def longest_s(self) -> float:
        """Seconds of the job with most pages, without those in which the engine starts."""
        return self.longest_pages / self.speed.pages_per_s

    @property
    def job_hours(self) -> float:
        """Hours of all jobs together."""
        return self.pages / self.speed.pages_per_s / 3600

    @property
    def dollars(self) -> float | None:
        """What all jobs cost together."""
        return None if self.dollars_per_hour is None else self.job_hours * self.dollars_per_hour

    @property
    def dollars_per_thousand_pages(self) -> float | None:
        """What a thousand pages cost."""
        price = self.dollars_per_hour
        return None if price is None else dollars_per_thousand(price, self.speed.pages_per_s)

    def __str__(self) -> str:
        money = ""
        if self.dollars is not None:
            money = f", ${self.dollars:.2f} in all, ${self.dollars_per_thousand_pages:.2f} per 1,000 pages"
        return (
            f"estimate: {self.pages} pages at {self.speed.pages_per_s:g} pages/s a job ({self.speed.basis}): "
            f"{duration(self.longest_s)} for the longest of {self.jobs}, {self.job_hours:.2f} job-hours{money}; "
            "the minutes in which engines start are not counted"
        )

    def as_json(self) -> dict[str, Any]:
        """Return the figures for programs (CONTRACT §4.2)."""
        return {
            "pages": self.pages,
            "pages_per_second": self.speed.pages_per_s,
            "basis": self.speed.basis,
            "longest_job_seconds": round(self.longest_s, 1),
            "job_hours": round(self.job_hours, 4),
            "dollars_per_hour": self.dollars_per_hour,
            "dollars": rounded_dollars(self.dollars),
            "dollars_per_thousand_pages": rounded_dollars(self.dollars_per_thousand_pages),
        }


def speed_of(model_id: str, flavor: str, shape: str, pages_per_second: float | None) -> Speed | None:
    """Return the user's figure, or the one on record for this very model, flavour and shape, or None."""
    if pages_per_second is not None:
        return Speed(pages_per_second, "--pages-per-second")
    stored = measured_speed(model_id, flavor, shape)
    return Speed(stored.pages_per_s, f"{stored.evidence}: {stored.conditions}") if stored else None


def no_speed(model_id: str, flavor: str, shape: str) -> str:
    """Say that no estimate is made, and what is on record."""
    elsewhere = "; ".join(f"on {row.flavor} {row}" for row in measured_elsewhere(model_id, shape))
    return (
        f"no estimate: no speed of {model_id} on {flavor} is on record, and none is invented; give --pages-per-second, "
        f"for instance of a run with --max-samples 500{f' (on record: {elsewhere})' if elsewhere else ''}"
    )


def timeout_for(estimate: Estimate | None) -> int:
    """Return after how many seconds to stop a job: half again what it needs and half an hour, in full hours."""
    if estimate is None:
        return TIMEOUT_WITHOUT_ESTIMATE_S
    return 3600 * math.ceil((1.5 * estimate.longest_s + 1800) / 3600)


def read_timeout(text: str) -> int:
    """Return the seconds of a time as `hf jobs` takes it: 5400, 90m, 4h, 2d."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    seconds = int(float(found[1]) * UNIT_S[found[2] or "s"]) if found else 0
    if seconds < 1:
        raise UsageError(f"--timeout {text!r} is no time; give it as 90m, 4h or 2d")
    return seconds


def timeout_words(seconds: int) -> str:
    """Return the seconds as people type them: 4h, 90m."""
    for unit in ("h", "m"):
        if seconds % UNIT_S[unit] == 0:
            return f"{seconds // UNIT_S[unit]}{unit}"
    return f"{seconds}s"


# ---- submission ------------------------------------------------------------------------------------------------------
# What `--jobs` submits: which shards, with which words, labels, variables and secrets. Nothing is sent from here.


JOBS_GROUP = "jobs"
DEFAULT_ATTEMPTS = 3
LONGEST_LABEL = 100
TRAVEL = ("--canary-page", "--canary-text")  # options whose files are meant to come along
READ_AS_FILES = (".py", ".sh", ".yaml", ".yml", ".toml")  # `run_uv_job` insists that such words are files here


@dataclass(frozen=True)
class Hosting:
    """What a script knows of itself as a job. `shape` is "server" or "offline", "" where no stored speed fits.

    `image` is None where the plain one of `uv` will do. `key_variables` name secrets beside the token.
    """

    image: str | None
    flavor: str
    shape: str
    needs_gpu: bool = True
    key_variables: tuple[str, ...] = ()


@dataclass(frozen=True)
class ShardJob:
    """One job: its shard, the pages that are left in it, and the words after the script."""

    index: int
    count: int
    pages: int
    words: tuple[str, ...]

    @property
    def label(self) -> str:
        """The shard, as a label says it."""
        return f"{self.index}-of-{self.count}"


@dataclass(frozen=True)
class Submission:
    """All that is submitted. `secrets` are values, never shown; `jobs` are neither done nor among the `running`."""

    script: Path
    name: str
    image: str | None
    flavor: Flavor
    timeout_s: int
    attempts: int
    namespace: str | None
    labels: Mapping[str, str]
    secrets: Mapping[str, str] = field(repr=False)
    shape: str
    jobs: tuple[ShardJob, ...]
    running: Mapping[int, JobInfo]  # by shard
    estimate: Estimate | None

    @property
    def environment(self) -> dict[str, str]:
        """What a job is told about itself: its flavour, and when it is stopped; bars would fill its log."""
        return {
            FLAVOR_VARIABLE: self.flavor.name,
            TIMEOUT_VARIABLE: str(self.timeout_s),
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        }

    def labels_of(self, job: ShardJob) -> dict[str, str]:
        """Return the labels of one job."""
        return {**self.labels, "shard": job.label}

    def lines(self) -> list[str]:
        """Say to people what is submitted."""
        return [
            f"{plural(len(self.jobs), 'job')} named {self.name}, image {self.image or 'of uv'}, on {self.flavor}",
            f"each is stopped after {timeout_words(self.timeout_s)} and started {self.attempts} times at most; "
            f"secrets: {', '.join(self.secrets) or 'none'}",
            f"labels: {', '.join(f'{key}={value}' for key, value in self.labels.items())}",
            *(
                f"  shard {job.index} of {job.count}, {plural(job.pages, 'page')}: "
                f"{shlex.join(['uv', 'run', self.script.name, *job.words])}"
                for job in self.jobs
            ),
        ]


def plural(count: int, noun: str) -> str:
    """Return `1 job`, `4 jobs`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def own_words(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the user's words without the options of --jobs: those before `--`, and those from there on."""
    words = list(argv)
    place = words.index("--") if "--" in words else len(words)
    own = iter(words[:place])
    kinds = {f"--{item.name.replace('_', '-')}": item.type for item in _jobs_options()}
    kept: list[str] = []
    for word in own:
        flag, equals, _ = word.partition("=")
        if flag not in kinds:
            kept.append(word)
        elif not equals and kinds[flag] != "bool":
            next(own, None)  # its value
    return kept, words[place:]


def stray_options(options: CommonOptions) -> list[str]:
    """Return the options that were given and mean nothing without --jobs."""
    given = [item.name for item in _jobs_options() if item.name != "jobs" and getattr(options, item.name)]
    return [f"--{name.replace('_', '-')}" for name in given]


def _jobs_options() -> list[Field[Any]]:
    return [item for item in fields(CommonOptions) if item.metadata.get("group") == JOBS_GROUP]


def words_of_shard(argv: Sequence[str], index: int, count: int) -> tuple[str, ...]:
    """Return the words of one job: the user's own, and which shard it is."""
    own, rest = own_words(argv)
    shard = ["--num-shards", str(count), "--shard-index", str(index)] if count > 1 else []
    return (*own, *shard, *rest)


def check_words(words: Sequence[str], here: Path) -> None:
    """Refuse words that `run_uv_job` would take for files: it uploads them, and puts other paths in their place."""
    before = ""
    for word in words:
        is_file = _is_file(here / word)
        if is_file and before not in TRAVEL:
            raise UsageError(
                f"--jobs: {word!r} is also a file here, and would be uploaded and replaced by its path there; "
                f"run the command from another folder, or write {before or '--option'}={word}"
            )
        if not is_file and PurePath(word).suffix in READ_AS_FILES:
            raise UsageError(
                f"--jobs: {word!r} looks like a file, and there is none: a job has only the script itself and the "
                "files of --canary-page and --canary-text; leave it out, or start that job with `hf jobs uv run`"
            )
        before = word


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError as error:  # a word longer than the name of a file may be
        raise UsageError(
            f"--jobs: {path.name[:40]!r}… can't be handed to a job: {error.strerror}; leave it out, or make it shorter"
        ) from error


def job_name(script: str, words: Sequence[str], count: int) -> str:
    """Name a command's jobs: the same for the same command, so that those that run are found again."""
    digest = hashlib.sha256("\0".join([script, str(count), *words]).encode()).hexdigest()[:8]
    return f"{label_text(PurePath(script).stem)}-{digest}"


def label_text(text: str) -> str:
    """Return the text as a label may hold it: letters, digits, dashes and underscores, a hundred at most."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", text)[:LONGEST_LABEL]


# ---- supervise -------------------------------------------------------------------------------------------------------
# The watchdog of a server: notices that it died or froze, starts it again, has the lost pages asked again.
#
# 1. gone: its process has ended, or it says itself that its engine is dead. Noticed at once.
# 2. frozen: for `stall_timeout_s` no token was generated and no page answered while pages were in flight, or its API
#    did not answer at all. Where tokens can't be counted, patience is three times the slowest answer, if that is more.
# 3. restart: the process group is killed, and after a pause the server is started at the same address, at most
#    `max_restarts` times in a run; it must pass the canary again.
# 4. strike: every page that was asked of the server that died and had no result gets one.
# 5. alone: pages with two strikes are then asked one by one, with nothing else in flight.
# 6. quarantine: a page with which the server dies even then becomes an error row.
#
# A server that is not ours is only watched: it is named when it freezes, and waited for.


LOOK_EVERY_S = 0.5
PROBE_EVERY_S = 5.0
STRIKES_BEFORE_ALONE = 2
LONGEST_BACKOFF_S = 60.0


@dataclass(frozen=True)
class Vigilance:
    """How the watchdog is set."""

    stall_timeout_s: float = 50.0  # with the time that a look may take, noticed within a minute
    max_restarts: int = 10
    first_backoff_s: float = 1.0


class Supervisor:
    """Watches a server for the pages that are asked of it."""

    def __init__(self, server: Server, vigilance: Vigilance, on_restart: Callable[[], None]) -> None:
        self._server = server
        self._vigilance = vigilance
        self._on_restart = on_restart
        self._life = 1  # counts the servers of this run, the first one too
        self._is_up = True
        self._visits: set[Visit] = set()
        self._alone: list[Visit] = []  # whose turn it is stands first
        self._changed = asyncio.Condition()
        self._nudge, self._looked = asyncio.Event(), asyncio.Event()
        self._restarts = 0
        self._failures = 0  # starts since the last answer
        self._answers_at_restart = self._answers = 0
        self._slowest_s = server.ready.canary_s
        self._last_sign = self._last_probe = time.monotonic()
        self._last_question = float("-inf")
        self._counted: float | None = None
        self._was_named = False

    # What the pages call

    @contextlib.contextmanager
    def visit(self, row: int) -> Iterator[Visit]:
        """Keep account of a page until it has its result."""
        visit = Visit(row)
        self._visits.add(visit)
        try:
            yield visit
        finally:
            self._visits.discard(visit)
            if visit in self._alone:
                self._alone.remove(visit)
                self._wake()

    async def turn(self, visit: Visit) -> None:
        """Wait until the page may be asked; look at `visit.quarantined` then."""
        if not self._may_go(visit):
            async with self._changed:
                await self._changed.wait_for(lambda: self._may_go(visit))
        if not any(other.life == self._life for other in self._visits):
            self._last_sign = time.monotonic()  # nothing was in flight: the engine was idle, not frozen
        visit.life = self._life

    def _may_go(self, visit: Visit) -> bool:
        return visit.quarantined or (self._is_up and (not self._alone or self._alone[0] is visit))

    def answered(self, latency_s: float) -> None:
        """Note that a page was answered."""
        self._answers += 1
        self._slowest_s = max(self._slowest_s, latency_s)
        self._last_sign = time.monotonic()

    async def is_lost(self, visit: Visit) -> bool:
        """Whether the server that the page was last asked of is gone; looks anew."""
        if visit.life == self._life and self._is_up and self._server.keeper:
            self._looked.clear()
            self._nudge.set()
            await self._looked.wait()
        return visit.life != self._life or not self._is_up

    # The watch

    async def watch(self) -> None:
        """Keep the server up; return never. Raises `EngineError` when it can't be kept up."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_EVERY_S):  # `wait_for` may swallow a cancellation before Python 3.12
                    await self._nudge.wait()
            a_page_failed = self._nudge.is_set()
            self._nudge.clear()
            trouble = await self._trouble(a_page_failed)
            if trouble:
                self._is_up = False
            self._looked.set()
            if trouble:
                await self._recover(trouble)

    def _asked(self) -> list[Visit]:
        """Return the pages that the server now has, or had when it died."""
        return [visit for visit in self._visits if visit.life == self._life]

    async def _trouble(self, a_page_failed: bool) -> str | None:
        """Look: is it gone, is it frozen? Says what is wrong."""
        keeper, now = self._server.keeper, time.monotonic()
        if keeper and keeper.spawned:
            if ended := keeper.spawned.how_it_ended():
                return ended
            if a_page_failed and now - self._last_question >= LOOK_EVERY_S and await self._says_it_is_dead():
                return f"the server says that its engine is dead. {keeper.spawned.log_words()}"
        if not self._asked():
            self._last_sign = now
            return None
        answers = True
        if now - self._last_probe >= min(PROBE_EVERY_S, self._vigilance.stall_timeout_s / 4):
            answers = await self._probe()
            self._last_probe = time.monotonic()
        silent_s = time.monotonic() - self._last_sign
        if silent_s <= self._patience_s():
            self._was_named = False
            return None
        how = "no token and no page came from it" if answers else "its API does not answer"
        trouble = f"the server is frozen: {how} for {duration(silent_s)}, with {len(self._asked())} pages in flight"
        if keeper and keeper.spawned:
            return f"{trouble}. {keeper.spawned.log_words()}"
        if not self._was_named:
            self._was_named = True
            say(f"{trouble}; it is not ours to restart, so we wait")
        return None

    def _patience_s(self) -> float:
        known = self._vigilance.stall_timeout_s
        return known if self._counted is not None else max(known, 3 * self._slowest_s)

    async def _says_it_is_dead(self) -> bool:
        self._last_question = time.monotonic()
        endpoint = self._server.endpoint
        url = f"{endpoint.base_url.removesuffix('/v1')}/health"
        try:
            status, _ = await asyncio.to_thread(fetch, url, endpoint.api_key)
        except (OSError, ValueError):
            return False
        return status == 503

    async def _probe(self) -> bool:
        """Count the server's tokens where it tells; whether it answered at all."""
        endpoint = self._server.endpoint
        try:
            status, body = await asyncio.to_thread(fetch, metrics_url(endpoint.base_url), endpoint.api_key)
        except (OSError, ValueError):
            return False
        gauges = parse_gauges(body.decode(errors="replace") if status == 200 else "")
        counts = [gauges.made_tokens, gauges.prompt_tokens, gauges.succeeded]
        counted = sum(count or 0 for count in counts) if gauges.made_tokens is not None else None
        if counted is not None and counted != self._counted:
            self._last_sign = time.monotonic()
        self._counted = counted
        return True

    async def _recover(self, trouble: str) -> None:
        keeper, lost = self._server.keeper, self._asked()
        assert keeper is not None
        self._judge(lost)
        while True:
            if self._restarts >= self._vigilance.max_restarts:
                raise EngineError(
                    trouble
                    if not self._restarts
                    else f"the server was started again {self._restarts} times (--max-restarts), and in vain. {trouble}"
                )
            self._restarts += 1
            self._on_restart()
            say(
                f"{trouble}\nstarting it again ({self._restarts} of at most {self._vigilance.max_restarts}); "
                f"{len(lost)} pages that were in flight are asked again"
            )
            try:
                self._server = await self._in_thread(functools.partial(keeper.restart, self._backoff_s()))
                break
            except EngineError as error:
                trouble = str(error)
        self._life += 1
        self._last_sign, self._counted, self._is_up = time.monotonic(), None, True
        self._wake()

    def _judge(self, lost: list[Visit]) -> None:
        """Give strikes to the pages that were with a server that died; quarantine one that was with it alone."""
        for visit in lost:
            visit.strikes += 1
        if self._alone and self._alone[0] in lost:
            culprit = self._alone.pop(0)
            culprit.quarantined = True
            say(f"row {culprit.row} is {culprit.reason()}")
        suspects = [visit for visit in lost if visit.strikes >= STRIKES_BEFORE_ALONE and not visit.quarantined]
        self._alone += [visit for visit in suspects if visit not in self._alone]

    def _backoff_s(self) -> float:
        """Return the pause before a start: longer each time that no page was answered in between."""
        self._failures = 1 if self._answers > self._answers_at_restart else self._failures + 1
        self._answers_at_restart = self._answers
        return min(LONGEST_BACKOFF_S, self._vigilance.first_backoff_s * 2.0 ** (self._failures - 1))

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        """Do what blocks in a thread; when we are cancelled meanwhile, have it end at once."""
        assert self._server.keeper is not None
        try:
            return await asyncio.to_thread(work)
        except asyncio.CancelledError:
            self._server.keeper.give_up()
            raise

    def _wake(self) -> None:
        """Let those who wait for their turn look again."""

        async def notify() -> None:
            async with self._changed:
                self._changed.notify_all()

        self._waking = asyncio.get_running_loop().create_task(notify())


# ---- workers ---------------------------------------------------------------------------------------------------------
# Servers behind one address: a `vllm-router` names them, and their gauges count together.
#
# The router itself has none of vLLM's gauges. It hands /metrics and /version on to one server after the other, so that
# what comes back is another server's each time.


def workers_behind(base_url: str) -> tuple[str, ...]:
    """Return the servers that the router at `base_url` sends requests to; none where that is a server itself."""
    try:
        status, body = fetch(f"{base_url.rstrip('/').removesuffix('/v1')}/workers", "")
        workers = json.loads(body)["workers"] if status == 200 else []
        # "@3" at the end is the rank within a data-parallel server
        urls = [re.sub(r"@\d+$", "", str(worker["url"])) for worker in workers]
    except (OSError, ValueError, LookupError, TypeError):
        return ()
    return tuple(dict.fromkeys(url for url in urls if url.startswith(("http://", "https://"))))


async def metrics_text(key: str, workers: Sequence[str], url: str) -> str | None:
    """Fetch the metrics at `url`, or those of all `workers` where there are any; None where no server shows its own.

    A server that does not answer runs nothing that we know of. Workers are not told our key, for metrics need none; and
    what another machine's router calls loopback is not ours.
    """
    if not workers:
        return await _page(url, key)
    reachable = [metrics_url(worker) for worker in workers if is_local(url) or not is_local(worker)]
    pages = await asyncio.gather(*(_page(worker, "") for worker in reachable), return_exceptions=True)
    return "\n".join(page for page in pages if isinstance(page, str)) or None


async def _page(url: str, key: str) -> str | None:
    """Fetch a page in a thread: its text, or None where it is not there."""
    status, body = await asyncio.to_thread(fetch, url, key)
    return body.decode(errors="replace") if status == 200 else None


# ---- driver ----------------------------------------------------------------------------------------------------------
# What the driver scripts share: their options for a server, and keeping it busy from a client without torch.


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
    stall_timeout: float = option(
        50.0,
        "engine",
        "seconds without a token and without a page, while pages are in flight, after which our server is started anew",
        metavar="S",
        minimum=0.1,
    )
    max_restarts: int = option(
        10, "engine", "how often a server of ours that died or froze is started again in a run", metavar="N", minimum=0
    )
    keep_server: bool = option(
        False, "engine", "leave the server that we start running when the run has ended well, and say how to use it"
    )


def driver_hosting(run: Run, options: DriverOptions, flavor: str) -> Hosting:
    """Say what a driver script needs as a job: a GPU and the model's image, unless others serve the model."""
    if options.server and not is_local(options.server):
        return Hosting(None, "cpu-upgrade", "", needs_gpu=False, key_variables=(options.api_key_env,))
    shape = "" if options.serve_command else "server"
    return Hosting(run.profile.image, flavor, shape, needs_gpu=options.serve_command is None)


def other_ways(environment: Mapping[str, str]) -> str:
    """Say what else could be done here. uv need not be on PATH: `uv run` tells in UV where it is."""
    uv = "uv" if shutil.which("uv") else shlex.quote(environment.get("UV") or "uv")
    return (
        "Here: install vLLM, or give --server URL, or try without a GPU: "
        f'--serve-command "{uv} run rapidocr-server.py" --model rapidocr'
    )


def wanted_server(run: Run, options: DriverOptions) -> Wanted:
    """Say which server is wanted, and how to get a machine that has one."""
    return Wanted(
        model=options.model,
        trust=required(run.profile, run.question, options, min(options.request_timeout, options.startup_timeout)),
        url=options.server,
        command=options.serve_command,
        port=options.port,
        api_key=os.environ.get(options.api_key_env),
        vllm_args=engine_args(run),
        own_words=options.vllm_args,
        suggest=functools.partial(suggested_flags, run),
        startup_timeout_s=options.startup_timeout,
        keep=options.keep_server,
        hint=hosted_command(run, run.profile.image, other_ways(os.environ)),
    )


def import_client_ahead() -> None:
    """Import the client of the API in a thread, so that this is done when the server has come up."""

    def import_client() -> None:
        with contextlib.suppress(ImportError):  # said where it is used
            import openai  # noqa: F401

    threading.Thread(target=import_client, daemon=True).start()


def suggested_flags(run: Run) -> tuple[str, ...]:
    """Return the flags that fit this machine, and say so."""
    machine = look_around()
    choices = choose_flags(machine, run.profile, run.options.vllm_args)
    say(machine_line(machine, choices))
    return tuple(word for choice in choices for word in choice.words)


async def drive(
    job: Job, run: Run, options: DriverOptions, server: Server, window: Window, telemetry: TextIO | None = None
) -> None:
    """Keep the server busy with the pages of the job, as many as the window has places, and show how it goes."""
    import openai

    tally = run.tally
    assert tally is not None
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

        def note_retry(failure: Failure) -> None:
            tally.retry(failure.reason)
            window.trouble(failure.trouble)

        vigilance = Vigilance(options.stall_timeout, options.max_restarts)
        asker = Asker(
            client,
            server.endpoint.model,
            run.question,
            retry_for_s=options.retry_for,
            on_retry=note_retry,
            guard=Supervisor(server, vigilance, tally.restarted),
            transport=(server.keeper and server.keeper.pages) or IN_REQUEST,
            more=more_fields(server.engine, confidence=options.confidence),
        )
        workers = await asyncio.to_thread(workers_behind, url)
        if workers:
            say(f"{url} is a router before {len(workers)} servers: {', '.join(workers)}")
        gauges = GaugeReader(url, functools.partial(metrics_text, server.endpoint.api_key, workers), say)
        steering = Steering(window, tally, lambda: gauges.latest, count_cores(), telemetry)
        with beside(gauges.run(), steering.steer(), watch_deadline(tally, run.runner.ends_at)), progress_shown(tally):
            await run_job(job, asker, tally, window)


def more_fields(engine: str, *, confidence: bool) -> dict[str, Any]:
    """Return the fields of a request beyond the question: those that stop loops, and those that ask for confidence."""
    owner, _, version = engine.partition(" ")
    more: dict[str, Any] = dict(repetition_field(version)) if owner == "vllm" else {}
    return {**more, "logprobs": True, "top_logprobs": 0} if confidence else more


# ---- rights ----------------------------------------------------------------------------------------------------------
# What a token may do to a dataset of the Hub, read out of what `whoami` says of it.
#
# What it does not say is left open: the Hub itself refuses in the end, and a field that changes must lock nobody out.


WRITING = frozenset({"repo.write", "repo.content.write"})
CREATING = "repo.write"
PROPOSING = "discussion.write"
ROLES_THAT_READ = frozenset({"read", "no_access"})


@dataclass(frozen=True)
class Rights:
    """What a token may do to one dataset: write to it, create it, propose changes in a pull request.

    `lacks` says what stands in the way, and `advice` what to do about it.
    """

    writes: bool = True
    creates: bool = True
    proposes: bool = True
    lacks: str = ""
    advice: str = ""


def rights_of(user: Mapping[str, Any], repo_id: str) -> Rights:
    """Return what the token of `user` (the answer of `whoami`) may do to a dataset."""
    token = _mapping(_mapping(user.get("auth")).get("accessToken"))
    owner, name = repo_id.split("/")[0], user.get("name")
    match token.get("role"):
        case "read":
            lacks, advice = f"the token of {name!r} can only read", f"use one that can write to {owner!r}"
            return Rights(writes=False, creates=False, proposes=False, lacks=lacks, advice=advice)
        case "fineGrained":
            given = _permissions(token, owner, repo_id)
            return _rights_of_scopes(given, str(name), repo_id) if given else Rights()
        case _:
            lacks = _standing(user, owner)
            advice = f"name an output of your own, or ask to be let into {owner!r}"
            return Rights(writes=False, creates=False, lacks=lacks, advice=advice) if lacks else Rights()


def _rights_of_scopes(given: _Given, name: str, repo_id: str) -> Rights:
    owner = repo_id.split("/")[0]
    if CREATING in given.of_owner:
        return Rights()
    if WRITING & given.here:
        return Rights(
            creates=False,
            lacks=f"the token of {name!r} can write to {repo_id!r} alone, and create nothing",
            advice=f"create the dataset by hand, or give the token write access to all repositories of {owner!r}",
        )
    has = ", ".join(sorted(given.here)) or "none"
    return Rights(
        writes=False,
        creates=False,
        proposes=PROPOSING in given.here,
        lacks=f"the token of {name!r} may not write to {repo_id!r} (its permissions there: {has})",
        advice=f"give it write access to the contents of the repositories of {owner!r}",
    )


@dataclass(frozen=True)
class _Given:
    """A fine-grained token's permissions: for the dataset, and for all that its owner has."""

    here: frozenset[str]
    of_owner: frozenset[str]


def _permissions(token: Mapping[str, Any], owner: str, repo_id: str) -> _Given | None:
    """Return what a fine-grained token carries; None where it says so in words that are not known here."""
    fine = token.get("fineGrained")
    if not isinstance(fine, Mapping) or not isinstance(fine.get("scoped"), list):
        return None
    everywhere = frozenset(_words(fine.get("global")))
    of_owner, here = set(everywhere), set(everywhere)
    for scope in fine["scoped"]:
        entity = _mapping(_mapping(scope).get("entity"))
        if not entity.get("name"):
            return None
        permissions = _words(scope.get("permissions"))
        if entity.get("type") in {"user", "org"} and _same(entity["name"], owner):
            of_owner |= permissions
            here |= permissions
        elif entity.get("type") == "dataset" and _same(entity["name"], repo_id):
            here |= permissions
    return _Given(frozenset(here), frozenset(of_owner))


def _standing(user: Mapping[str, Any], owner: str) -> str:
    """Say why this user can't write in a namespace; nothing where nothing is known against it."""
    name, orgs = str(user.get("name")), user.get("orgs")
    if _same(name, owner) or not isinstance(orgs, list):
        return ""
    known = {str(org.get("name")): org.get("roleInOrg") for org in orgs if isinstance(org, Mapping)}
    ours = next((org for org in known if _same(org, owner)), None)
    if ours is None:
        return f"the token is of {name!r}, who is no member of {owner!r} (but of: {', '.join([name, *known])})"
    return f"{name!r} can only read in {owner!r} (role: {known[ours]})" if known[ours] in ROLES_THAT_READ else ""


def _same(name: object, other: str) -> bool:
    return str(name).lower() == other.lower()


def _words(value: object) -> set[str]:
    return set(map(str, value)) if isinstance(value, list) else set()


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


# ---- room ------------------------------------------------------------------------------------------------------------
# Whether what a run will write fits on its disk: asked before any GPU time, and answered with the numbers.
#
# How much that is follows from the input: from what parquet files say of their columns, or from a few rows. Of a stream
# nothing is known beforehand.


TEXT_BYTES = 4096  # of a page's text and what stands beside it
STAGED_BLOCKS = 4  # of a Hub output: one is written while others wait for upload and commit
SAMPLED_ROWS = 16


def bytes_of_row(source: Source, without: str | None = None) -> float | None:
    """Return about how many bytes a row takes in a block, leaving out one column; None where nothing is known."""
    rows = source.rows
    if not len(source.order):
        return 0.0
    if isinstance(rows, ParquetRows):
        kept = sum(size for name, size in rows.column_bytes.items() if name != without)
        return kept / rows.num_rows + TEXT_BYTES
    if not isinstance(rows, MappedRows):
        return None
    step = max(1, len(source.order) // SAMPLED_ROWS)
    places = range(0, len(source.order), step)[:SAMPLED_ROWS]
    sampled = [source.read(range(place, place + 1)) for place in places]
    sizes = [int(table.drop_columns([without] if without else []).nbytes) for table in sampled]
    return sum(sizes) / len(sizes) + TEXT_BYTES


def check_room(folder: Path, rows: int, row_bytes: float, advice: str, freed: int = 0) -> None:
    """Raise `UsageError` where `rows` more rows do not fit on the disk of `folder`; `freed` bytes are to be removed."""
    needed = rows * row_bytes
    disk = shutil.disk_usage(_existing(folder))
    free = disk.free + freed
    if needed > free and disk.total:  # what has no size, such as /proc, is no disk: writing there says why it fails
        raise UsageError(
            f"{rows} rows need about {_in_gigabytes(needed)} in {str(folder)!r}, and {_in_gigabytes(free)} are free on "
            f"its disk; free some, or {advice}"
        )


def _in_gigabytes(size: float) -> str:
    """Write a number of bytes for people."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _existing(folder: Path) -> Path:
    """Return the folder, or the first above it that is there."""
    return next(path for path in [folder.absolute(), *folder.absolute().parents] if path.exists())


# ---- preflight -------------------------------------------------------------------------------------------------------
# What is checked before any GPU time, so that a run which can't end well does not begin.
#
# The checks, in order, from the cheapest: the token, the input, its columns, what is in the output, the disk. None of
# them creates anything: a name with a typo leaves no empty dataset behind.


ASK_FOR_S = 30.0
MOST_FILES_IN_A_FOLDER = 10_000


def preflight(run: Run) -> None:
    """Open the input and check the output before any GPU time; raise `UsageError` where the run could not end well."""
    if run.output.on_hub and not _only_looks(run):
        is_bucket = run.output.bucket is not None
        check_token(run.output.on_hub, create_pr=run.output.create_pr, proposable=not is_bucket)
    source = _open_input(run)
    check_columns(
        source.rows.schema,
        run.options.output_column,
        results_only=run.way.results_only,
        extras=extra_columns(run.options),
    )
    plan = BlockPlan(run.way.target(source.split), len(source.order), run.options.block_rows)
    run.opened = Opened(source, plan, blocks_of(run, source, plan))
    if not run.options.overwrite:
        check_output_is_ours(run)
    if run.options.jobs is None:  # which are written elsewhere
        check_disk(run)
    if run.output.on_hub and len(plan) > MOST_FILES_IN_A_FOLDER:
        say(
            f"{len(plan)} block files are more than the Hub likes in a folder ({MOST_FILES_IN_A_FOLDER}); "
            f"--block-rows {-(-plan.num_rows // MOST_FILES_IN_A_FOLDER)} or more makes fewer"
        )
    say(f"{run.options.input}: {plan.num_rows} rows of split {source.split!r} → {run.output}")


def _only_looks(run: Run) -> bool:
    """Whether this is only a look at what a run would take, which needs no token."""
    from huggingface_hub import get_token

    return run.options.dry_run and get_token() is None


def _open_input(run: Run) -> Source:
    options = run.options
    return open_source(
        options.input,
        config=options.config,
        split=options.split,
        revision=options.revision,
        image_column=options.image_column,
        max_samples=options.max_samples,
        shuffle=options.shuffle,
        seed=options.seed,
        streaming=run.streams,
    )


def check_token(repo_id: str, *, create_pr: bool = False, proposable: bool = True) -> None:
    """Raise `UsageError` where there is no token that may write to the output, or propose changes to it.

    To a bucket no changes can be proposed.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise UsageError(f"output {repo_id!r} can't be the name of a dataset: {error}") from error
    if not get_token():
        raise UsageError(
            f"output {repo_id!r} needs a token that can write, and there is none. "
            "Set HF_TOKEN (in a job: -s HF_TOKEN), or `hf auth login`"
        )
    try:
        user = Patience(ASK_FOR_S).call(HfApi().whoami, "asking the Hub whose the token is")
    except network_errors() as error:
        raise UsageError(
            f"output {repo_id!r} needs a token that can write, and this one is of no use: {error}; "
            "set HF_TOKEN (in a job: -s HF_TOKEN), or `hf auth login`"
        ) from error
    rights = rights_of(user, repo_id)
    if not (rights.proposes if create_pr else rights.writes):
        otherwise = ", or open a pull request with --create-pr" if rights.proposes and proposable else ""
        raise UsageError(f"output {repo_id!r}: {rights.lacks}; {rights.advice}{otherwise}")


def check_output_is_ours(run: Run) -> None:
    """Raise `UsageError` where the output holds blocks that are not of this run."""
    settings, plan, blocks = run_settings(run), run.at.plan, run.at.blocks
    beyond = sorted(number for number in blocks.closed() if number >= len(plan))
    for stored in blocks.stored_settings():
        check_settings_are_ours(str(run.output), stored, settings)
    if beyond:
        raise UsageError(
            f"{blocks.where(beyond[0])} lies beyond this output's last block, {len(plan) - 1}; "
            "remove it, choose another output, or --overwrite"
        )


def check_disk(run: Run) -> None:
    """Raise `UsageError` where what is missing of the output does not fit on its disk: of a Hub output, what waits."""
    source, plan, blocks = run.at.source, run.at.plan, run.at.blocks
    row_bytes = bytes_of_row(source, source.image_column if run.way.results_only else None)
    if row_bytes is None or run.way.finishes:
        return
    closed = blocks.closed()
    rows = rows_missing(plan, run.way.shard, set() if run.options.overwrite else closed)
    if isinstance(blocks, BlockFolder):
        freed = sum(blocks.path(number).stat().st_size for number in closed) if run.options.overwrite else 0
        check_room(run.output.folder, rows, row_bytes, "name an output on another disk", freed)
    else:
        staged = min(rows, STAGED_BLOCKS * plan.block_rows)
        advice = "give a folder on another disk with --work-dir, or fewer rows a block with --block-rows"
        check_room(run.output.folder, staged, row_bytes, advice)


def rows_missing(plan: BlockPlan, shard: Shard, closed: set[int]) -> int:
    """Return how many rows a shard has yet to write."""
    missing = (number for number in range(len(plan)) if shard.holds(number) and number not in closed)
    return sum(len(plan.positions(number)) for number in missing)


# ---- ending ----------------------------------------------------------------------------------------------------------
# How a run ends: what is in the output is counted, the card written, the blocks published, the exit code found.


AskAll = Callable[[Run, Sequence[int], ExitStack, Interrupts], None]


def carry_out(run: Run, ask_all: AskAll) -> int:
    """Check, ask about every page, take stock, publish; whatever happens, say so and return the exit code.

    `ask_all` writes the blocks whose numbers it is given. It gets a stack to put its engine on: what is on it is closed
    on every way out.
    """
    # A corrupt EXIF block is worth no line on stderr; a picture that can't be read is refused by name.
    warnings.filterwarnings("ignore", module="PIL")
    interrupts = Interrupts()
    message, code = "done", 0
    with interrupts.caught():
        try:
            preflight(run)
            try:
                _write_blocks(run, ask_all, interrupts)
            finally:
                take_stock(run)
            finish(run)
        except Interrupted as stop:
            message, code = f"{stop}; closed blocks are kept, the same command goes on", stop.exit_code
        except JobError as error:
            message, code = str(error), error.exit_code
            if interrupts.number:  # what else went wrong then is its consequence
                message, code = f"{Interrupted(interrupts.number)}; {error}", 128 + interrupts.number
        except ModuleNotFoundError as error:
            return refuse(run.script, run.options, no_module(error, run.script))
        except Exception as error:
            say_end(run, 1, f"{type(error).__name__}: {error}")
            raise
        if code and run.options.overwrite:
            message += " (without --overwrite, which starts anew)"
        if code:
            say(f"{run.script}: {message}")
        say_end(run, code, message)
    return code


def _write_blocks(run: Run, ask_all: AskAll, interrupts: Interrupts) -> None:
    with run.at.blocks.locked():
        if run.options.overwrite:
            run.at.blocks.remove_all()
        todo = [] if run.way.finishes else run.todo()
        if todo:
            run.runner = find_runner(os.environ, run.options.dollars_per_hour, run.started)
        start_counting(run, todo)
        run.at.blocks.get_ready(to_write=bool(todo))
        if not todo and not run.way.finishes:
            say("nothing is left to ask: all blocks are there (--overwrite starts anew)")
        if todo and not run.at.plan.num_rows:
            write_without_pages(make_job(run, todo))
        elif todo:
            with ExitStack() as stack:
                ask_all(run, todo, stack, interrupts)
    missing = run.missing() if run.way.finishes else []
    if missing:
        few = ", ".join(map(str, missing[:5])) + (", …" if len(missing) > 5 else "")
        raise UsageError(
            f"--finish: {len(missing)} of {len(run.at.plan)} blocks are not there ({few}); run without it first"
        )


def take_stock(run: Run) -> None:
    """Count what the closed blocks hold, whatever the end was, and write the card of a local output.

    Of an output on the Hub, or of a run that is one shard of several, that is done once all blocks are there; until
    then its own pages are counted.
    """
    at = run.at
    on_hub = run.output.on_hub is not None
    if on_hub or run.way.shard.count > 1 or run.way.finishes:
        run.missing_blocks = run.missing()
        if at.blocks.unpublished() or run.missing_blocks:
            run.statuses = Counter(run.tally.statuses if run.tally else {})
            return
    closed = at.blocks.closed()
    if not closed:
        return
    run.statuses = count_statuses(at.blocks, sorted(closed), run.options.output_column)
    if not on_hub:
        write_card(run.output.folder, card_contents(run))


def card_contents(run: Run) -> CardContents:
    """Return what the card says of this run."""
    counted = run.tally if run.tally and run.tally.done else None
    info = {key: value for key, value in run_info(run).items() if key not in {"column", "script"}}
    speed = f"{counted.pages_per_s():.2f} pages/s in the last run" if counted else None
    cost = run.runner.cost(counted.pages_per_s()) if counted else None
    return CardContents(
        input_name(run, run.at.source),
        run.at.plan,
        run.statuses,
        {**info, "speed": speed, "cost": cost},
        run.command(),
        tags=[Path(run.options.model).name, *(["hf-jobs"] if "JOB_ID" in os.environ else [])],
    )


def finish(run: Run) -> None:
    """Publish where that is asked for; show pages; raise `JobError` where too many pages failed."""
    publish_whole(run)
    for title, text in first_texts(run, run.options.show):
        say(f"\n── {title} ──\n{text}")
    column = run.options.output_column
    failed = sum(count for status, count in run.statuses.items() if status not in SOUND)
    share = failed / max(1, run.statuses.total())
    if share > run.options.max_failure_rate:
        raise JobError(
            f"{failed} of {run.statuses.total()} pages failed ({share:.1%}; --max-failure-rate is "
            f"{run.options.max_failure_rate:.1%}). All rows are written: see {column}_status and {column}_error"
        )


def publish_whole(run: Run) -> None:
    """Publish the split where all its blocks are there; else say where they are collected."""
    blocks, plan = run.at.blocks, run.at.plan
    if run.missing_blocks:
        say(
            f"{len(run.missing_blocks)} of {len(plan)} blocks are not there yet; the others are collected in "
            f"{blocks.collected()}, and whoever closes the last one publishes all"
        )
        return
    contents = card_contents(run)
    whole = Whole(
        plan,
        run.statuses.total(),
        schema_of(run),
        card=lambda earlier, written: card_text(earlier, contents, written),
        text_columns=new_columns(run.options.output_column),
        insists=run.way.finishes or bool(run.tally and run.tally.done),
    )
    where = blocks.publish(whole)
    if where:
        say(f"published: {where}")


def first_texts(run: Run, count: int) -> list[tuple[str, str]]:
    """Return (title, text) of the first `count` pages of the output."""
    text, status, error, _ = new_columns(run.options.output_column)
    image = None if run.way.results_only else run.at.source.image_column
    shown: list[tuple[str, str]] = []
    for number in sorted(run.at.blocks.closed()):
        if len(shown) >= count:
            break
        table = run.at.blocks.read(number, [text, status, error, *([image] if image else [])])
        for row in table.slice(0, count - len(shown)).to_pylist():
            cell = row.get(image)
            name = (cell.get("path") if isinstance(cell, dict) else None) or f"page {len(shown)}"
            shown.append((f"{name} ({row[status]})", row[text] or row[error] or ""))
    return shown


def no_module(error: ModuleNotFoundError, script: str) -> UsageError:
    """Say what to do where the script runs without what its header names."""
    return UsageError(f"there is no module {error.name!r} here; `uv run {script} …` brings what the script needs")


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
    say_to_programs(outcome.json_line())
    return error.exit_code


def say_end(run: Run, code: int, message: str) -> None:
    """Write the last line for people, and the JSON line for programs."""
    if run.tally and run.tally.done:
        counts = ", ".join(f"{count} {status}" for status, count in sorted(run.statuses.items()))
        took = duration(time.monotonic() - run.started)
        say(f"{run.tally.line()}; after {took}; in the output: {counts or 'nothing yet'}{run.tally.remarks()}")
    outcome = Outcome(
        input=run.options.input,
        output=str(run.output),
        split=run.opened.source.split if run.opened else None,
        model=run.options.model,
        engine=run.engine,
        exit_code=code,
        message=message,
        seconds=time.monotonic() - run.started,
        tally=run.tally,
        statuses=run.statuses,
        flavor=run.runner.flavor,
    )
    say_to_programs(outcome.json_line())


# ---- jobs_plan -------------------------------------------------------------------------------------------------------
# What jobs have to do: what is left of the run, which of its jobs run already, on what machine, and for how long.


LIVE = ["RUNNING", "SCHEDULING"]
REFUSALS = {
    401: "the token does not work: set HF_TOKEN, or `hf auth login`",
    402: "jobs are paid in advance: add credit, or take another --flavor",
    403: "the token, or the account, may not run jobs there: take one that may, or --jobs-namespace ORGANISATION",
}


def check_possible_there(run: Run) -> None:
    """Refuse what a job could not read or write: it sees the Hub, and nothing of this machine."""
    name = run.options.input
    if Path(name).expanduser().exists():
        raise UsageError(
            f"--jobs: the input {name!r} is here, where no job can read it; upload it first, "
            f"`hf upload NAMESPACE/NAME {shlex.quote(name)} --repo-type dataset`, and give that name as the input"
        )
    if run.output.on_hub is None:
        raise UsageError(
            f"--jobs: the output {str(run.output)!r} is a folder, and a job's disk goes with the job; "
            "name a Hub dataset, NAMESPACE/NAME, or hf://buckets/NAMESPACE/NAME"
        )
    if not Path(sys.argv[0]).is_file():
        raise UsageError(f"--jobs: the script must be a file to be submitted, and {sys.argv[0]!r} is none")
    own, rest = own_words(run.argv)
    check_words([*own, *rest], Path.cwd())


def plan_submission(run: Run, hosting: Hosting) -> Submission:
    """Find out what is left for jobs to do, on what, for how long, and what that costs."""
    options = run.options
    count = options.jobs or 1
    own, rest = own_words(run.argv)
    name = job_name(run.script, [*own, *rest], count)
    labels = {
        "script": label_text(Path(run.script).stem),
        "model": label_text(options.model),
        "output": label_text(_destination(run)),
        "split": label_text(str(run.at.plan.target)),
    }
    namespace = find_namespace(options.jobs_namespace)
    running = running_jobs(name, labels, namespace) if namespace else {}
    jobs = tuple(job for job in shard_jobs(run, count) if job.index not in running)
    prices = read_price_list()
    flavor = choose_flavor(prices, options.flavor or hosting.flavor, hosting)
    estimate = make_estimate(run, hosting, flavor, jobs)
    return Submission(
        script=Path(sys.argv[0]),
        name=name,
        image=hosting.image,
        flavor=flavor,
        timeout_s=read_timeout(options.timeout) if options.timeout else timeout_for(estimate),
        attempts=options.attempts or DEFAULT_ATTEMPTS,
        namespace=namespace,
        labels=labels,
        secrets=_secrets(hosting),
        shape=hosting.shape,
        jobs=jobs,
        running=running,
        estimate=estimate,
    )


def _destination(run: Run) -> str:
    """Name what the jobs write to: two branches of one dataset are two things."""
    at = "pull-request" if run.output.create_pr else run.output.revision
    return str(run.output) if at == MAIN else f"{run.output}@{at}"


def shard_jobs(run: Run, count: int) -> list[ShardJob]:
    """Return a job for each shard that has pages left to read."""
    found: list[ShardJob] = []
    for index in range(count):
        run.way = replace(run.way, shard=Shard(index, count))
        missing = set(run.todo()) - run.at.blocks.closed()
        pages = sum(len(run.at.plan.positions(number)) for number in missing) + run.rows_again
        if pages or missing:
            found.append(ShardJob(index, count, pages, words_of_shard(run.argv, index, count)))
    run.way = replace(run.way, shard=WHOLE)
    return found


def find_namespace(given: str | None) -> str | None:
    """Return for whom the jobs run: as the user says, or the token's user; None without a token."""
    from huggingface_hub import HfApi

    if not hub_token():
        return None
    try:
        return given or str(HfApi().whoami()["name"])
    except network_errors() as error:
        raise UsageError(f"the Hub does not say whose the token is: {refusal(error)}") from error


def running_jobs(name: str, labels: dict[str, str], namespace: str) -> dict[int, JobInfo]:
    """Return the jobs of this command that run already, by shard; refuse to meddle with those of another one."""
    from huggingface_hub import HfApi

    wanted = {key: labels[key] for key in ("output", "split")}
    try:
        live = list(HfApi().list_jobs(status=list(LIVE), labels=wanted, namespace=namespace))
    except network_errors() as error:
        raise UsageError(f"the jobs that run already can't be listed: {refusal(error)}") from error
    ours = [info for info in live if info.labels and info.labels.get("name") == name and "shard" in info.labels]
    others = [info for info in live if info not in ours]
    if others:
        raise UsageError(
            f"{plural(len(others), 'job')} of another command write to this output now; wait for them, "
            f"`hf jobs wait {references(others)}`, or cancel them, `hf jobs cancel …`"
        )
    return {int((info.labels or {})["shard"].partition("-")[0]): info for info in ours}


def choose_flavor(prices: PriceList, name: str, hosting: Hosting) -> Flavor:
    """Return the flavour of this name; refuse one that is not offered, or has no GPU where one is needed."""
    flavor = prices.find(name)
    if flavor is None:
        names = ", ".join(flavor.name for flavor in prices.flavors if flavor.gpu or not hosting.needs_gpu)
        raise UsageError(f"--flavor {name!r} is not offered; there are {names} (`hf jobs hardware`)")
    if hosting.needs_gpu and not flavor.gpu:
        raise UsageError(f"--flavor {name!r} has no GPU, and the engine needs one; see `hf jobs hardware`")
    return flavor


def make_estimate(run: Run, hosting: Hosting, flavor: Flavor, jobs: Sequence[ShardJob]) -> Estimate | None:
    """Return what the jobs will take, or None where nobody has measured that."""
    speed = speed_of(run.options.model, flavor.name, hosting.shape, run.options.pages_per_second)
    if speed is None or not jobs:
        return None
    pages = [job.pages for job in jobs]
    return Estimate(sum(pages), max(pages), len(jobs), speed, flavor.dollars_per_hour)


def hub_token() -> str | None:
    """Return the token of this machine, if there is one."""
    from huggingface_hub import get_token

    token: str | None = get_token()
    return token


def _secrets(hosting: Hosting) -> dict[str, str]:
    values = {"HF_TOKEN": hub_token(), **{name: os.environ.get(name) for name in hosting.key_variables}}
    return {name: value for name, value in values.items() if value}


def refusal(error: Exception) -> str:
    """Say why the Hub refused, and what to do about it."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    advice = REFUSALS.get(status or 0)
    told = getattr(error, "server_message", None) or str(error).strip().splitlines()[0]
    words = f"{type(error).__name__}{f' {status}' if status else ''}: {told}"
    return f"{words} ({advice})" if advice else words


def reference(info: JobInfo) -> str:
    """Name a job as the commands of `hf jobs` take it, whoever's it is."""
    return f"{info.owner.name}/{info.id}"


def references(infos: Sequence[JobInfo]) -> str:
    """Name several jobs."""
    return " ".join(reference(info) for info in infos)


# ---- jobs ------------------------------------------------------------------------------------------------------------
# `--jobs N`: the run submitted as N Hugging Face Jobs of this very script, each with its shard, or only shown.
#
# What is left to do is looked up first, so that the same command given again submits what is missing: shards whose
# blocks are all there and shards whose job runs still are left alone.


@dataclass
class Handout:
    """What became of a command with --jobs, for its last words."""

    run: Run
    submission: Submission | None = None
    started: dict[int, JobInfo] = field(default_factory=dict)  # by shard

    def json_line(self, exit_code: int, message: str) -> str:
        """Return the JSON line; its keys are frozen (CONTRACT §4.2)."""
        run, order = self.run, self.submission
        opened = run.opened
        return json.dumps(
            {
                "version": 1,
                "exit_code": exit_code,
                "message": message,
                "input": run.options.input,
                "output": str(run.output),
                "split": opened.source.split if opened else None,
                "model": run.options.model,
                "rows": opened.plan.num_rows if opened else 0,
                "dry_run": run.options.dry_run,
                "name": order.name if order else None,
                "image": order.image if order else None,
                "flavor": order.flavor.name if order else None,
                "timeout_seconds": order.timeout_s if order else None,
                "attempts": order.attempts if order else None,
                "jobs": [self._entry(job) for job in order.jobs] if order else [],
                "running": [_described(index, info) for index, info in sorted(order.running.items())] if order else [],
                "estimate": order.estimate.as_json() if order and order.estimate else None,
            }
        )

    def _entry(self, job: ShardJob) -> dict[str, Any]:
        return {**_described(job.index, self.started.get(job.index)), "pages": job.pages, "arguments": list(job.words)}


def _described(index: int, info: JobInfo | None) -> dict[str, Any]:
    return {"shard": index, "id": reference(info) if info else None, "url": info.url if info else None}


def wants_jobs(options: CommonOptions) -> bool:
    """Whether the run is to be submitted as jobs; `UsageError` where its options do not fit that."""
    if options.jobs is None:
        stray = stray_options(options)
        if stray:
            raise UsageError(f"{', '.join(stray)}: of no use without --jobs N; give it too, or leave them out")
        return False
    if options.num_shards is not None or options.shard_index is not None:
        raise UsageError("--jobs gives each job its --num-shards and --shard-index; leave them out")
    if options.finish:
        raise UsageError("--finish asks no engine and needs no job; give it without --jobs")
    if options.overwrite:
        raise UsageError(
            "--overwrite in a job would start anew whenever the job is started again; choose another output or "
            "--output-config, or remove the old blocks first"
        )
    return True


def hand_out(run: Run, hosting: Hosting) -> int:
    """Submit the run as jobs, or show what would be; say so to people and to programs, and return the exit code."""
    handout, message, code = Handout(run), "done", 0
    run.way = replace(run.way, shard=WHOLE)
    try:
        check_possible_there(run)
        preflight(run)
        handout.submission = plan_submission(run, hosting)
        show(handout)
        if run.options.dry_run:
            say("nothing was submitted: --dry-run")
        else:
            submit(handout)
    except KeyboardInterrupt:
        message, code = f"interrupted; {_what_runs(handout)}", 130
    except JobError as error:
        message, code = str(error), error.exit_code
    except Exception as error:
        say_to_programs(handout.json_line(1, f"{type(error).__name__}: {error}"))
        raise
    if code:
        say(f"{run.script}: {message}")
    say_to_programs(handout.json_line(code, message))
    return code


def show(handout: Handout) -> None:
    """Say to people what is submitted, what it takes, and what of it may not do."""
    order, options = handout.submission, handout.run.options
    assert order is not None
    for index, info in sorted(order.running.items()):
        say(f"shard {index} runs already and is left alone: {reference(info)}")
    if not order.jobs and not order.running:
        say("nothing is left to ask: all blocks are there (--finish publishes what is not published yet)")
    if not order.jobs:
        return
    idle = (options.jobs or 1) - len(order.jobs) - len(order.running)
    if idle:
        blocks = plural(len(handout.run.at.plan), "block")
        say(f"{plural(idle, 'shard')} of {options.jobs} need no job: of {blocks} in all, none is left to them")
    for line in order.lines():
        say(line)
    if order.estimate is None:
        say(no_speed(options.model, order.flavor.name, order.shape))
    else:
        say(str(order.estimate))
        if order.estimate.longest_s > order.timeout_s:
            say(
                f"--timeout {timeout_words(order.timeout_s)} is too short for {duration(order.estimate.longest_s)} a "
                f"job: --timeout {timeout_words(timeout_for(order.estimate))} would do, or more jobs. What is done "
                "by then is kept, and the same command goes on"
            )
    gpus = order.flavor.gpus
    if gpus > 1 and not any("parallel-size" in word for word in options.vllm_args):
        remedy = f"; `-- --data-parallel-size {gpus}` uses all" if order.shape == "server" else ""
        say(f"{order.flavor.name} has {gpus} GPUs, of which the engine uses one{remedy}")


def submit(handout: Handout) -> None:
    """Submit the jobs, one after the other, and say how to follow them."""
    from huggingface_hub import HfApi

    order = handout.submission
    assert order is not None
    api = HfApi()
    # hf_xet, which takes a local script to the Hub, raises `RuntimeError` where the network fails
    failures: tuple[type[Exception], ...] = (*network_errors(), ValueError, RuntimeError)
    for job in order.jobs:
        try:
            info = _submit_one(api, order, job)
        except failures as error:
            raise SubmitError(
                f"shard {job.index} was not submitted: {refusal(error)}. {_what_runs(handout)}"
            ) from error
        handout.started[job.index] = info
        say(f"shard {job.index} of {job.count}: {reference(info)} {info.url}")
    infos = {**order.running, **handout.started}
    if not infos:
        return
    refs = references(list(infos.values()))
    namespace = handout.run.options.jobs_namespace
    where = f" --namespace {namespace}" if namespace else ""
    say(
        f"follow one:  hf jobs logs -f {reference(next(iter(infos.values())))}\n"
        f"see all:     hf jobs ps --all --name {order.name}{where}\n"
        f"wait:        hf jobs wait {refs}\n"
        f"stop one:    hf jobs cancel {reference(next(iter(infos.values())))}\n"
        "go on:       this command again: jobs that run are left alone, pages that are done are not asked again"
    )


def _submit_one(api: HfApi, order: Submission, job: ShardJob) -> JobInfo:
    with contextlib.redirect_stdout(sys.stderr), _without_experimental_warning():  # stdout is for the JSON line
        info: JobInfo = api.run_uv_job(
            str(order.script),
            script_args=list(job.words),
            image=order.image,
            env=order.environment,
            secrets=dict(order.secrets),
            flavor=order.flavor.name,
            timeout=order.timeout_s,
            attempts=order.attempts,
            name=order.name,
            labels=order.labels_of(job),
            namespace=order.namespace,
        )
    return info


@contextlib.contextmanager
def _without_experimental_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*experimental.*")
        yield


def _what_runs(handout: Handout) -> str:
    """Say which jobs of the command run now, and what can be done."""
    running = handout.submission.running if handout.submission else {}
    infos = [*running.values(), *handout.started.values()]
    if not infos:
        return "No job runs; the same command submits them"
    return (
        f"These run: {references(infos)}. The same command submits the rest and leaves them alone; "
        f"`hf jobs cancel {reference(infos[0])}` ends one"
    )


# ---- server ----------------------------------------------------------------------------------------------------------
# The script itself.


SCRIPT = "lighton-ocr-server.py"
FLAVOR = "l4x1"


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
        if wants_jobs(options):
            return hand_out(run, driver_hosting(run, options, FLAVOR))
        wanted = wanted_server(run, options)
        if run.surely_asks():
            check_possible(wanted)
    except JobError as error:
        return refuse(SCRIPT, options, error)
    except ModuleNotFoundError as error:
        return refuse(SCRIPT, options, no_module(error, SCRIPT))
    return carry_out(run, functools.partial(ask_server, options, wanted))


def ask_server(
    options: ServerOptions, wanted: Wanted, run: Run, todo: Sequence[int], stack: ExitStack, interrupts: Interrupts
) -> None:
    """Get a server and have it read the pages of the blocks `todo`."""
    import_client_ahead()
    server = stack.enter_context(running_server(wanted))
    if server.keeper:
        interrupts.last_will = server.keeper.kill
    run.engine, run.context_tokens = server.engine, server.context_tokens
    say(f"{server.engine} serves {server.endpoint.model} at {server.endpoint.base_url}")
    window = fixed_window(options.concurrency, ahead=2 * count_cores())
    interrupts.run(drive(make_job(run, todo), run, options, server, window))


if __name__ == "__main__":
    sys.exit(main())
