# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "onnxruntime==1.32.0",
#     "pillow==13.0.0",
#     "rapidocr==3.10.0",
#     "starlette==1.10.0",
#     "uvicorn==0.54.0",
# ]
# ///
"""An OCR endpoint on the CPU that speaks vLLM's dialect of the OpenAI API, for trying the scripts where no GPU is.

    uv run rapidocr-server.py --port 8000
    uv run lighton-ocr-server.py PAGES OUT --server http://127.0.0.1:8000/v1 --model rapidocr

It answers on /v1/chat/completions (one image a request: a data URL, or file:// below --allowed-local-media-path),
/v1/models, /health, /version and /metrics, and writes nothing. With VLLM_API_KEY in its environment it asks for that
key on /v1.

This is not LightOnOCR. It reads with PP-OCRv6 small, whose weights lie inside the rapidocr wheel, so nothing is
downloaded; it calls itself `rapidocr` everywhere. What comes back is plain text in reading order: no Markdown, no
formulas, no grounding. Text beside the image and the sampling settings are ignored. Pages must stand upright (EXIF
orientation is applied). Columns are told from tables by their shape, which can be wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import binascii
import contextlib
import hashlib
import hmac
import io
import itertools
import json
import os
import queue
import re
import socket
import statistics
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from PIL import Image
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

MODEL_ID = "rapidocr"
DETECTION_FILE = "PP-OCRv6_det_small.onnx"
RECOGNITION_FILE = "PP-OCRv6_rec_small.onnx"
MODEL_NAME = "PP-OCRv6 small"
# There is no context to fill; clients compare their max_tokens with this number.
MAX_MODEL_LEN = 16384
MAX_BODY_BYTES = 64 * 1024 * 1024
MAX_IMAGE_PIXELS = 100_000_000
# The recogniser sees nothing finer than this, so larger pages are reduced while still in Pillow.
LONGEST_EDGE_PX = 2000
IMAGE_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "QOI", "TIFF", "WEBP")
API_KEY_VARIABLE = "VLLM_API_KEY"


# ---------------------------------------------------------------------------------------------------------------------
# Reading order: boxes of text → text
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """A piece of text and the rectangle it stands in, in pixels."""

    text: str
    left: float
    top: float
    right: float
    bottom: float

    @property
    def width(self) -> float:
        """How wide it is."""
        return self.right - self.left

    @property
    def height(self) -> float:
        """How high it is."""
        return self.bottom - self.top

    @property
    def middle(self) -> float:
        """Where its vertical centre is."""
        return (self.top + self.bottom) / 2


def reading_order(lines: Sequence[Line]) -> str:
    """Join the lines of a page: columns one after the other, cells of a row on one line, a blank line at a gap."""
    return "\n\n".join(block for block in _blocks(list(lines)) if block)


def _blocks(lines: list[Line]) -> list[str]:
    """Read a region: if it has columns, band by band and column by column; otherwise row by row."""
    gutter = _gutter(lines)
    if gutter is None:
        return [_paragraphs(_rows(lines))]
    blocks: list[str] = []
    for band in _bands(lines, gutter):
        left = [line for line in band if line.right <= gutter]
        right = [line for line in band if line.left >= gutter]
        if _are_columns(left, right):
            blocks += _blocks(left) + _blocks(right)
        else:
            blocks.append(_paragraphs(_rows(band)))
    return blocks


def _gutter(lines: list[Line]) -> float | None:
    """Find the x of the white gap between two columns, or None: of all that will do, the one fewest lines cross."""
    best: tuple[int, float] | None = None
    for x in sorted({line.right for line in lines}):
        crossing = sum(1 for line in lines if line.left < x < line.right)
        if best is not None and crossing >= best[0]:
            continue
        bands = _bands(lines, x)
        if any(_are_columns([ln for ln in b if ln.right <= x], [ln for ln in b if ln.left >= x]) for b in bands):
            best = (crossing, x)
    return None if best is None else best[1]


def _bands(lines: list[Line], gutter: float) -> list[list[Line]]:
    """Cut a region where lines cross the gutter (titles, for instance); the crossing lines are bands of their own."""
    bands: list[list[Line]] = []
    was_crossing: bool | None = None
    for line in sorted(lines, key=lambda line: line.middle):
        crosses = line.left < gutter < line.right
        if crosses != was_crossing:
            bands.append([])
            was_crossing = crosses
        bands[-1].append(line)
    return bands


def _are_columns(left: list[Line], right: list[Line]) -> bool:
    """Tell two columns of running text from a table: each side is a tall stack of single lines that fill its width."""
    if min(len(left), len(right)) < 4:
        return False
    gap = min(line.left for line in right) - max(line.right for line in left)
    height = statistics.median(line.height for line in left + right)
    widths = [_extent(side) for side in (left, right)]
    return (
        gap >= 0.7 * height
        and min(widths) >= 0.4 * max(widths)
        and min(widths) >= 6 * height
        and all(_fills(side, width) for side, width in zip((left, right), widths, strict=True))
    )


def _extent(lines: list[Line]) -> float:
    return max(line.right for line in lines) - min(line.left for line in lines)


def _fills(side: list[Line], width: float) -> bool:
    """Whether most rows of a column run over most of its width; a column of columns counts, a table's cells do not."""
    rows = _rows(side)
    covered = [sum(line.width for line in row) for row in rows]
    return statistics.median(covered) >= 0.6 * width


def _rows(lines: list[Line]) -> list[list[Line]]:
    """Group what stands at the same height, from top to bottom, each row from left to right."""
    rows: list[list[Line]] = []
    for line in sorted(lines, key=lambda line: line.middle):
        if rows and abs(line.middle - rows[-1][-1].middle) < 0.5 * min(line.height, rows[-1][-1].height):
            rows[-1].append(line)
        else:
            rows.append([line])
    return [sorted(row, key=lambda line: line.left) for row in rows]


def _paragraphs(rows: list[list[Line]]) -> str:
    """Write rows as lines, with a blank line where one paragraph ends and the next begins."""
    if not rows:
        return ""
    middles = [statistics.fmean(line.middle for line in row) for row in rows]
    pitches = [below - above for above, below in itertools.pairwise(middles)]
    text = _row_text(rows[0])
    for index, (above, below) in enumerate(itertools.pairwise(rows)):
        usual = min(pitches[max(0, index - 2) : index + 3])
        text += ("\n\n" if _is_break(above, below, pitches[index], usual) else "\n") + _row_text(below)
    return text


def _is_break(above: list[Line], below: list[Line], pitch: float, usual: float) -> bool:
    """Whether the gap is wider than its neighbours or the letters change in size; the rows of a table stay together."""
    if len(above) > 1 and len(below) > 1:
        return False
    small, large = sorted(statistics.median(line.height for line in row) for row in (above, below))
    return pitch > 1.35 * max(usual, small) or large > 1.4 * small


def _row_text(row: list[Line]) -> str:
    return " ".join(line.text for line in row)


# ---------------------------------------------------------------------------------------------------------------------
# Requests: the body of a chat completion → an image
# ---------------------------------------------------------------------------------------------------------------------


class RequestError(Exception):
    """A request that is refused, in the words and with the status that the client gets."""

    def __init__(self, message: str, status: HTTPStatus = HTTPStatus.BAD_REQUEST, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param


@dataclass(frozen=True)
class Page:
    """What was read on one image, and what it is counted as."""

    text: str
    prompt_tokens: int
    completion_tokens: int


def image_url(body: object) -> str:
    """Check a chat completion request and return the URL of its one image."""
    if not isinstance(body, dict):
        raise RequestError("The request body must be a JSON object.")
    model = body.get("model")
    if model and model != MODEL_ID:
        raise RequestError(f"The model `{model}` does not exist.", HTTPStatus.NOT_FOUND, "model")
    if body.get("n") not in (None, 1):
        raise RequestError("This server gives one answer: leave `n` out.", param="n")
    urls = [url for part in _content_parts(body.get("messages")) if (url := _part_url(part)) is not None]
    if not urls:
        raise RequestError("No image in the request: one message must hold an `image_url` part.", param="messages")
    if len(urls) > 1:
        raise RequestError("At most 1 image(s) may be provided in one prompt.", param="messages")
    return urls[0]


def _content_parts(messages: object) -> list[object]:
    """Flatten the content of all messages; text instead of a list of parts holds no image."""
    if not isinstance(messages, list) or not messages:
        raise RequestError("`messages` must be a list with at least one message.", param="messages")
    parts: list[object] = []
    for message in messages:
        if not isinstance(message, dict):
            raise RequestError("Each of `messages` must be an object.", param="messages")
        content = message.get("content")
        parts += content if isinstance(content, list) else []
    return parts


def _part_url(part: object) -> str | None:
    if not isinstance(part, dict) or part.get("type") != "image_url":
        return None
    image = part.get("image_url")
    url = image.get("url") if isinstance(image, dict) else image
    if not isinstance(url, str):
        raise RequestError("An `image_url` part must have a `url` that is a string.", param="messages")
    return url


def image_source(url: str, media_path: Path | None) -> io.BytesIO | Path:
    """Turn an image URL into something to open: the bytes of a data URL, or a file below the allowed directory."""
    scheme = url.split(":", 1)[0].lower()
    if scheme == "data":
        return io.BytesIO(_data_bytes(url))
    if scheme == "file":
        return _local_file(url, media_path)
    raise RequestError(
        f"Images come as data URLs or file:// URLs, this one as {url[:40]!r}: this server fetches nothing."
    )


def _data_bytes(url: str) -> bytes:
    header, comma, payload = url.partition(",")
    if not comma or not header.endswith(";base64"):
        raise RequestError("A data URL must look like data:image/png;base64,…")
    try:
        return base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"The data URL is not valid base64: {error}.") from error


def _local_file(url: str, media_path: Path | None) -> Path:
    if media_path is None:
        raise RequestError("Cannot load local files without `--allowed-local-media-path`.")
    try:
        parts = urlsplit(url)
        path = Path(unquote(parts.path)).resolve()
        # Judged after links are followed, so that neither `..` nor a link leads out.
        inside = media_path in path.parents
        is_file = inside and path.is_file()
    except (OSError, ValueError, RuntimeError) as error:
        raise RequestError(f"The file:// URL names no file: {error}.") from error
    if parts.netloc not in ("", "localhost"):
        raise RequestError(f"A file:// URL names a local file, this one a file on {parts.netloc!r}.")
    if not inside:
        raise RequestError(f"The file of {url[:200]!r} is not below `--allowed-local-media-path {media_path}`.")
    if not is_file:
        raise RequestError(f"There is no file at {url[:200]!r}.")
    return path


def open_image(source: io.BytesIO | Path) -> Image.Image:
    """Decode an image to upright 8-bit RGB, no larger than is of use."""
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None  # the limit below has its own message
    try:
        with Image.open(source, formats=IMAGE_FORMATS) as image:
            pixels = image.width * image.height
            if pixels > MAX_IMAGE_PIXELS:
                raise RequestError(
                    f"The image has {image.width} x {image.height} pixels; this server takes at most "
                    f"{MAX_IMAGE_PIXELS / 1e6:.0f} megapixels."
                )
            image.draft(None, (LONGEST_EDGE_PX, LONGEST_EDGE_PX))
            page = _rgb(image)
    except RequestError:
        raise
    except Exception as error:  # a decoder may raise anything on bytes from outside
        raise RequestError(f"Failed to load image: {type(error).__name__}: {error}") from error
    page.thumbnail((LONGEST_EDGE_PX, LONGEST_EDGE_PX), Image.Resampling.LANCZOS)
    return page


def _rgb(image: Image.Image) -> Image.Image:
    """Apply EXIF orientation, scale 16 bits to 8, and put transparent pictures on white paper."""
    from PIL import Image, ImageOps

    page = ImageOps.exif_transpose(image)
    if page.mode.startswith("I"):
        return page.convert("I").point(lambda value: value / 257).convert("L").convert("RGB")
    if page.has_transparency_data:
        page = page.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", page.size, "white"), page).convert("RGB")
    return page.convert("RGB")


# ---------------------------------------------------------------------------------------------------------------------
# The engine: images → text, in a bounded pool of threads
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Gauges:
    """What /metrics tells; changed from the event loop and the threads, so under a lock."""

    running: int = 0
    waiting: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: dict[str, int] = field(default_factory=lambda: {"stop": 0, "length": 0, "abort": 0, "error": 0})
    lock: threading.Lock = field(default_factory=threading.Lock)

    def change(self, *, running: int = 0, waiting: int = 0) -> None:
        """Add to the number of requests running or waiting."""
        with self.lock:
            self.running += running
            self.waiting += waiting

    def finish(self, reason: str, page: Page | None = None) -> None:
        """Count a request that has ended, with what it read."""
        with self.lock:
            self.finished[reason] += 1
            self.prompt_tokens += page.prompt_tokens if page else 0
            self.generation_tokens += page.completion_tokens if page else 0


class Reader:
    """Reads pages in `threads` threads, each with an engine to itself, as rapidocr keeps state while it works."""

    def __init__(self, threads: int, gauges: Gauges) -> None:
        self._gauges = gauges
        self.threads = threads
        self.engine_threads = max(1, cores() // threads)
        self._engines: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for _ in range(threads):
            self._engines.put(load_engine(self.engine_threads))
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="ocr")

    async def read(self, url: str, media_path: Path | None) -> Page:
        """Read the image at a URL; a request given up while it waits is never started."""
        self._gauges.change(waiting=1)

        def work() -> Page:
            self._gauges.change(waiting=-1, running=1)
            try:
                return self._read(url, media_path)
            finally:
                self._gauges.change(running=-1)

        job = self._pool.submit(work)
        try:
            return await asyncio.wrap_future(job)
        finally:
            if job.cancelled():
                self._gauges.change(waiting=-1)

    def _read(self, url: str, media_path: Path | None) -> Page:
        image = open_image(image_source(url, media_path))
        engine = self._engines.get()
        try:
            text = reading_order(find_lines(engine, image))
        finally:
            self._engines.put(engine)
        # No tokenizer here: an image costs one token per 28 x 28 pixels, an answer one per word or punctuation mark.
        prompt_tokens = -(-image.width // 28) * -(-image.height // 28)
        return Page(text, prompt_tokens, len(re.findall(r"\w+|[^\w\s]", text)) + 1)

    def close(self) -> None:
        """Start nothing more; a page that is being read is not waited for."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def cores() -> int:
    """Count the CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def load_engine(threads: int) -> Any:
    """Load the two models that are in the wheel, by path: a name would let rapidocr download what it lacks."""
    import cv2
    import rapidocr

    cv2.setNumThreads(1)
    models = Path(rapidocr.__file__).parent / "models"
    engine = rapidocr.RapidOCR(
        params={
            "Global.log_level": "critical",
            "Global.use_cls": False,
            "Global.max_side_len": LONGEST_EDGE_PX,
            "EngineConfig.onnxruntime.intra_op_num_threads": threads,
            "EngineConfig.onnxruntime.inter_op_num_threads": 1,
            "Det.model_path": str(models / DETECTION_FILE),
            "Rec.model_path": str(models / RECOGNITION_FILE),
        }
    )
    _warm_up(engine)
    return engine


def _warm_up(engine: Any) -> None:
    """Read a word, because rapidocr loads its models at the first page, and 'ready' should mean ready."""
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (400, 120), "white")
    ImageDraw.Draw(image).text((40, 40), "ready", fill="black", font=ImageFont.load_default(40))
    if "ready" not in reading_order(find_lines(engine, image)):
        raise RuntimeError("the engine cannot read a test image")


def find_lines(engine: Any, image: Image.Image) -> list[Line]:
    """Run the engine on an RGB image."""
    import numpy as np

    found = engine(np.ascontiguousarray(np.asarray(image)[:, :, ::-1]))
    if found.txts is None:
        return []
    return [
        Line(text.strip(), *map(float, box.min(axis=0)), *map(float, box.max(axis=0)))
        for text, box in zip(found.txts, found.boxes, strict=True)
        if text.strip()
    ]


# ---------------------------------------------------------------------------------------------------------------------
# HTTP
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Server:
    """All that the routes need."""

    reader: Reader
    gauges: Gauges
    media_path: Path | None
    api_key: str | None
    root: str
    created: int

    def permits(self, header: str | None) -> bool:
        """Compare a request's Authorization header with the key, in constant time."""
        scheme, _, key = (header or "").partition(" ")
        digests = [hashlib.sha256(value.encode()).digest() for value in (key, self.api_key or "")]
        return self.api_key is None or (scheme.lower() == "bearer" and hmac.compare_digest(*digests))

    async def chat_completions(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        from starlette.responses import JSONResponse, Response

        try:
            body = await _json(request)
            url = image_url(body)
            page = await _unless_client_leaves(request, self.reader.read(url, self.media_path))
        except asyncio.CancelledError:
            # Told to stop: uvicorn gives requests a second, then cancels them.
            self.gauges.finish("abort")
            status = HTTPStatus.SERVICE_UNAVAILABLE
            return JSONResponse(error_body("The server is shutting down.", status), status)
        except RequestError:
            raise
        except Exception:
            self.gauges.finish("error")
            raise
        if page is None:
            self.gauges.finish("abort")
            return Response(status_code=499)
        self.gauges.finish("stop", page)
        if isinstance(body, dict) and body.get("stream"):
            return Response(events(completion(page)), media_type="text/event-stream")
        return JSONResponse(completion(page))

    async def models(self, _: Request) -> Response:
        """GET /v1/models."""
        from starlette.responses import JSONResponse

        return JSONResponse({"object": "list", "data": [model_card(self.root, self.created)]})

    async def health(self, _: Request) -> Response:
        """GET /health: the engines were loaded and tried before the port was opened."""
        from starlette.responses import Response

        return Response()

    async def version(self, _: Request) -> Response:
        """GET /version."""
        from starlette.responses import JSONResponse

        return JSONResponse({"version": self.root})

    async def metrics(self, _: Request) -> Response:
        """GET /metrics."""
        from starlette.responses import PlainTextResponse

        return PlainTextResponse(metrics_text(self.gauges), media_type="text/plain; version=0.0.4")


async def _json(request: Request) -> object:
    """Parse the body; one that is too large is read to its end and dropped, or the client would see a reset."""
    body = bytearray()
    total = 0
    async for chunk in request.stream():
        total += len(chunk)
        if total <= MAX_BODY_BYTES:
            body += chunk
    if total > MAX_BODY_BYTES:
        status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
        raise RequestError(f"The request body has {total} bytes; this server takes {MAX_BODY_BYTES}.", status)
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"The request body is not JSON: {error}.") from error


async def _unless_client_leaves(request: Request, work: Any) -> Page | None:
    """Await a page, or None if the client hangs up first: nobody would read the answer, and others are waiting."""

    async def hang_up() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    reading, leaving = asyncio.ensure_future(work), asyncio.ensure_future(hang_up())
    try:
        await asyncio.wait({reading, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return reading.result() if reading.done() else None
    finally:
        for task in (reading, leaving):
            task.cancel()


def completion(page: Page) -> dict[str, Any]:
    """Answer as vLLM does to a chat completion request."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": page.text, "refusal": None, "tool_calls": []},
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
    }
    usage = {
        "prompt_tokens": page.prompt_tokens,
        "completion_tokens": page.completion_tokens,
        "total_tokens": page.prompt_tokens + page.completion_tokens,
    }
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL_ID,
        "choices": [choice],
        "usage": usage,
    }


def events(answer: dict[str, Any]) -> str:
    """Say a completion as the events of a stream: a page is read as a whole, so its text is one of them."""
    choice, usage = answer["choices"][0], answer["usage"]
    deltas = [
        {"index": 0, "delta": {"role": "assistant", "content": choice["message"]["content"]}, "finish_reason": None},
        {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]},
    ]
    head = {**answer, "object": "chat.completion.chunk", "usage": None}
    chunks = [*({**head, "choices": [delta]} for delta in deltas), {**head, "choices": [], "usage": usage}]
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def model_card(root: str, created: int) -> dict[str, Any]:
    """Describe the model as /v1/models does, and say which it is not."""
    return {
        "id": MODEL_ID,
        "object": "model",
        "created": created,
        "owned_by": "rapidocr (not LightOnOCR)",
        "root": root,
        "parent": None,
        "max_model_len": MAX_MODEL_LEN,
        "permission": [],
    }


def error_body(message: str, status: int, param: str | None = None) -> dict[str, Any]:
    """Describe an error as vLLM does."""
    names = {
        400: "BadRequestError",
        404: "NotFoundError",
        500: "InternalServerError",
        503: "ServiceUnavailableError",
    }
    kind = names.get(status, HTTPStatus(status).phrase)
    # What is quoted from a request may hold half a surrogate pair, which UTF-8 can't.
    message = message.encode("utf-8", "replace").decode()
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def metrics_text(gauges: Gauges) -> str:
    """Write the gauges in Prometheus's text format, under vLLM's names."""
    labels = f'engine="0",model_name="{MODEL_ID}"'
    with gauges.lock:
        single = [
            ("num_requests_running", "gauge", "Number of requests being read.", float(gauges.running)),
            ("num_requests_waiting", "gauge", "Number of requests waiting for a thread.", float(gauges.waiting)),
            ("kv_cache_usage_perc", "gauge", "Always 0: there is no KV cache.", 0.0),
            ("prompt_tokens_total", "counter", "28 x 28 pixel patches.", float(gauges.prompt_tokens)),
            ("generation_tokens_total", "counter", "Words and marks read.", float(gauges.generation_tokens)),
        ]
        finished = dict(gauges.finished)
    rows = []
    for name, kind, meaning, value in single:
        rows += [f"# HELP vllm:{name} {meaning}", f"# TYPE vllm:{name} {kind}", f"vllm:{name}{{{labels}}} {value}"]
    rows += ["# HELP vllm:request_success_total Requests that ended, by reason."]
    rows += ["# TYPE vllm:request_success_total counter"]
    rows += [
        f'vllm:request_success_total{{engine="0",finished_reason="{reason}",model_name="{MODEL_ID}"}} {float(count)}'
        for reason, count in finished.items()
    ]
    return "\n".join(rows) + "\n"


def make_app(server: Server) -> Starlette:
    """Put the routes, the key and the errors together."""
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    async def refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        return JSONResponse(error_body(str(error), error.status, error.param), error.status)

    async def http_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return JSONResponse(error_body(error.detail, error.status_code), error.status_code)

    async def failed(_: Request, error: Exception) -> Response:
        return JSONResponse(error_body(f"{type(error).__name__}: {error}", 500), 500)

    routes = [
        Route("/v1/chat/completions", server.chat_completions, methods=["POST"]),
        Route("/v1/models", server.models),
        Route("/health", server.health),
        Route("/version", server.version),
        Route("/metrics", server.metrics),
    ]
    return Starlette(
        routes=routes,
        middleware=[Middleware(_key_checker(server.permits))],
        exception_handlers={RequestError: refused, HTTPException: http_error, Exception: failed},
    )


def _key_checker(permits: Callable[[str | None], bool]) -> Any:
    """Make the ASGI layer that answers 401 to whatever comes to /v1 without the key."""
    from starlette.datastructures import Headers
    from starlette.responses import JSONResponse

    def layer(app: Any) -> Any:
        async def checked(scope: Any, receive: Any, send: Any) -> None:
            guarded = scope["type"] == "http" and scope["path"].startswith("/v1")
            if guarded and not permits(Headers(scope=scope).get("authorization")):
                await JSONResponse({"error": "Unauthorized"}, 401)(scope, receive, send)
            else:
                await app(scope, receive, send)

        return checked

    return layer


# ---------------------------------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------------------------------


def make_parser() -> argparse.ArgumentParser:
    """Define the options."""
    parser = argparse.ArgumentParser(
        prog="rapidocr-server.py",
        description=f"OCR on the CPU with {MODEL_NAME} behind vLLM's API. This is not LightOnOCR.",
        epilog=f"Environment: {API_KEY_VARIABLE}, a key that clients must send (default: none is asked for).",
        allow_abbrev=False,
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on, 0 for a free one (default: 8000)")
    parser.add_argument(
        "--threads",
        type=_positive,
        default=min(4, cores()),
        help="pages read at the same time; they share the cores (default: 4, or the cores where they are fewer)",
    )
    parser.add_argument(
        "--allowed-local-media-path",
        type=_directory,
        metavar="DIR",
        help="directory below which file:// images may be read (default: none may)",
    )
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, is {value}")
    return value


def _directory(text: str) -> Path:
    path = Path(text).resolve()
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is not a directory")
    return path


def bind(host: str, port: int) -> socket.socket:
    """Take the port before the models are loaded, so that a port in use shows at once; listening comes later."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(address)
    return listener


def say(message: str) -> None:
    """Tell the person at the terminal."""
    sys.stderr.write(f"rapidocr-server: {message}\n")
    sys.stderr.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until told to stop."""
    args = make_parser().parse_args(argv)
    try:
        listener = bind(args.host, args.port)
    except OSError as error:
        say(f"cannot listen on {args.host} port {args.port}: {error}. Choose another --port.")
        return 1
    import uvicorn
    from rapidocr._version import version

    gauges = Gauges()
    reader = Reader(args.threads, gauges)
    root = f"rapidocr {version} {MODEL_NAME}"
    key = os.environ.get(API_KEY_VARIABLE) or None
    app = make_app(Server(reader, gauges, args.allowed_local_media_path, key, root, int(time.time())))
    host, port = listener.getsockname()[:2]
    say(f"{root} on the CPU, {reader.threads} pages at a time, {reader.engine_threads} threads each.")
    say("This is not LightOnOCR: it is for trying things out, and its text is plain.")
    listener.listen(socket.SOMAXCONN)
    say(f"listening on http://{f'[{host}]' if ':' in host else host}:{port}/v1, model `{MODEL_ID}`.")
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1)
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listener])
    reader.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
