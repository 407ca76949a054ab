"""A stand-in for `vllm serve` 0.32: a real HTTP server in a process of its own, with a time model and scripted faults.

    python tests/stub_vllm.py --port 0 --max-num-seqs 8 --seconds-per-page 0.05 --fault status=500,every=7

Tests hold it through `StubVllm` and assert what *it* counted (`GET /stub/stats`). No model is involved: the text is a
function of the image's SHA-256. Nothing here is copied from vLLM; the answers' shapes follow its 0.32.0 source.

A page is known by the SHA-256 of its image *file* bytes (the decoded base64 of a data URL, or the content of a `file://`
file). With `--read-tag` its top-left pixel is read too, as six hex digits: on pages that travel without loss
(PNG, BMP) a test can colour that pixel and so number its pages, or choose which of them fail.

A fault is `KIND[=VALUE][,key=value...]`, or a JSON object {"kind": ..., ...} where a value holds commas. Kinds:

    status=CODE       an error answer, in vLLM's JSON; `retry_after=S` and `message=TEXT` may go with it
    reset             the connection is reset (RST); half_close: half the answer, then the end of the stream
    garbage           200 with a body that is not JSON
    hang              this request is never answered (and keeps its slot)
    stall             for `seconds` (30) nothing completes; `hard=1` freezes the whole process, /health included
    slow              this request takes `seconds` more
    die               the process ends with exit code `code` (1)
    dead              the engine is dead from now on: /health 503, completions 500
    loop truncate repetition empty null surrogate long answer      what the text is instead; `text=` goes with `answer`

Which requests: `every=N`, `at=N` (or `at=3+7`), `first=N`, `after=N` count the requests that fit the page filters
`page=HASH_PREFIX` (or `pages=A+B`), `tag=RRGGBB`, `size=WxH`; `per=page` counts for each page by itself; `p=0.1,seed=3`
throws dice; `times=N` ends the fault after N firings (stall, die, dead: 1). All given conditions must hold. Each fault
counts every request that fits its filters; of several that are due, the first given is the request's. `late=1` lets
status, reset and garbage come after the page's time has passed.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import binascii
import collections
import contextlib
import dataclasses
import hashlib
import io
import json
import os
import random
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
import uuid
from collections import Counter
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from aiohttp import web
from PIL import Image

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence

DEFAULT_MODEL = "lightonai/LightOnOCR-2-1B"
PIXELS_PER_TOKEN = 28
CHARACTERS_PER_TOKEN = 4
WORDS = ("the", "ledger", "was", "written", "by", "hand", "and", "signed", "before", "council", "river", "grain")
FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")


# ---------------------------------------------------------------------------------------------------------------------
# Faults
# ---------------------------------------------------------------------------------------------------------------------

ERROR_KINDS = frozenset({"status", "reset", "garbage"})
TEXT_KINDS = frozenset({"loop", "truncate", "repetition", "empty", "null", "surrogate", "long", "answer"})
ENGINE_KINDS = frozenset({"half_close", "hang", "stall", "slow", "die", "dead"})
ONCE_KINDS = frozenset({"stall", "die", "dead"})


@dataclasses.dataclass
class Fault:
    """One scripted fault: what happens, to which requests, and how often it has happened."""

    kind: str
    code: int = 1
    retry_after: float | None = None
    message: str = ""
    text: str = ""
    seconds: float = 30.0
    hard: bool = False
    late: bool = False
    every: int | None = None
    at: tuple[int, ...] = ()
    first: int | None = None
    after: int | None = None
    per: str = ""
    p: float | None = None
    seed: int = 0
    times: int | None = None
    pages: tuple[str, ...] = ()
    tag: str = ""
    size: str = ""
    spec: str = ""
    seen: Counter[str] = dataclasses.field(default_factory=Counter)
    fired: int = 0
    dice: random.Random = dataclasses.field(default_factory=random.Random)

    def is_due(self, page: Page) -> bool:
        """Count this request where it fits the page filters, and say whether the fault is due at it."""
        if not self._concerns(page):
            return False
        key = page.digest if self.per == "page" else ""
        self.seen[key] += 1
        return self._is_turn(self.seen[key]) and (self.times is None or self.fired < self.times)

    def _concerns(self, page: Page) -> bool:
        if self.pages and not page.digest.startswith(self.pages):
            return False
        return self.tag in ("", page.tag) and self.size in ("", f"{page.width}x{page.height}")

    def _is_turn(self, number: int) -> bool:
        return (
            (self.every is None or number % self.every == 0)
            and (not self.at or number in self.at)
            and (self.first is None or number <= self.first)
            and (self.after is None or number > self.after)
            and (self.p is None or self.dice.random() < self.p)
        )


def parse_fault(spec: str) -> Fault:
    """Read one fault in the grammar of this module's docstring; ValueError names what is wrong."""
    fields = json.loads(spec) if spec.lstrip().startswith("{") else _parse_pairs(spec)
    fault = Fault(kind=fields.pop("kind", ""), spec=spec)
    if fault.kind not in ERROR_KINDS | TEXT_KINDS | ENGINE_KINDS:
        raise ValueError(f"unknown fault {fault.kind!r} in {spec!r}")
    for name, value in fields.items():
        read = _READERS.get(name)
        if read is None:
            raise ValueError(f"unknown key {name!r} in fault {spec!r}")
        setattr(fault, "pages" if name in ("page", "page_hash") else name, read(str(value)))
    if fault.times is None and fault.kind in ONCE_KINDS:
        fault.times = 1
    fault.dice.seed(fault.seed)
    return fault


def _parse_pairs(spec: str) -> dict[str, str]:
    head, *rest = spec.split(",")
    kind, _, code = head.partition("=")
    fields = {"kind": kind.strip()} | ({"code": code} if code else {})
    for pair in rest:
        name, _, value = pair.partition("=")
        fields[name.strip()] = value
    return fields


def _read_flag(value: str) -> bool:
    return value.lower() not in ("0", "false", "")


def _read_numbers(value: str) -> tuple[int, ...]:
    return tuple(int(part) for part in value.split("+"))


def _read_names(value: str) -> tuple[str, ...]:
    return tuple(value.split("+"))


_READERS: dict[str, Callable[[str], object]] = {
    **dict.fromkeys(("code", "every", "first", "after", "seed", "times"), int),
    **dict.fromkeys(("retry_after", "seconds", "p"), float),
    **dict.fromkeys(("message", "text", "per", "tag", "size"), str),
    **dict.fromkeys(("page", "pages", "page_hash"), _read_names),
    **dict.fromkeys(("hard", "late"), _read_flag),
    "at": _read_numbers,
}


# ---------------------------------------------------------------------------------------------------------------------
# Errors and answers, in vLLM's shapes
# ---------------------------------------------------------------------------------------------------------------------


class RefusalError(Exception):
    """A request that is answered with an error, as vLLM words it."""

    def __init__(self, status: int, message: str, kind: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": status}}


def bad_request(message: str, param: str | None = None) -> RefusalError:
    """What vLLM's engine refuses."""
    return RefusalError(400, message, "BadRequestError", param)


def invalid_body(detail: Mapping[str, object], param: str) -> RefusalError:
    """What vLLM's request validation refuses, before the engine sees it."""
    return RefusalError(400, f"1 validation error:\n  {dict(detail)}", "Bad Request", param)


def scripted_error(fault: Fault) -> RefusalError:
    """The error answer that a `status` fault stands for."""
    names = {400: "BadRequestError", 404: "NotFoundError", 422: "UnprocessableEntityError", 500: "InternalServerError"}
    phrase = HTTPStatus(fault.code).phrase
    return RefusalError(fault.code, fault.message or f"scripted: {phrase}", names.get(fault.code, phrase))


def engine_dead() -> RefusalError:
    """What vLLM answers once its engine process is gone."""
    message = "EngineCore encountered an issue. See stack trace (above) for the root cause."
    return RefusalError(500, message, "InternalServerError")


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a request comes back with."""

    text: str | None
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int

    def usage(self) -> dict[str, object]:
        """The `usage` object, as vLLM emits it."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens": self.completion_tokens,
            "prompt_tokens_details": None,
            "completion_tokens_details": None,
        }


def token_logprobs(answer: Answer, top: int) -> dict[str, object]:
    """The `logprobs` object: a token each four characters, all nearly sure but the last one."""
    pieces = [(answer.text or "")[at : at + CHARACTERS_PER_TOKEN] for at in range(answer.completion_tokens)]
    sure = [-0.1] * (len(pieces) - 1) + [-2.0]
    content = [
        {"token": piece, "logprob": logprob, "bytes": list(piece.encode("utf-8", "replace")), "top_logprobs": []}
        for piece, logprob in zip(pieces, sure, strict=True)
    ]
    assert top == 0, "the stub knows no other tokens"
    return {"content": content}


def completion_body(answer: Answer, model: str, fingerprint: str, top_logprobs: int | None = None) -> dict[str, object]:
    """A whole `chat.completion`, with the fields that vLLM emits."""
    message = {
        "role": "assistant",
        "content": answer.text,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "reasoning": None,
    }
    choice = {
        "index": 0,
        "message": message,
        "logprobs": None if top_logprobs is None else token_logprobs(answer, top_logprobs),
        "finish_reason": answer.finish_reason,
        "stop_reason": None,
        "token_ids": None,
        "routed_experts": None,
    }
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "service_tier": None,
        "system_fingerprint": fingerprint,
        "usage": answer.usage(),
        "prompt_logprobs": None,
        "prompt_token_ids": None,
        "prompt_text": None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
    }


def completion_chunks(answer: Answer, model: str, with_usage: bool) -> Iterator[dict[str, object]]:
    """The same answer as the chunks of a stream."""
    head = {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion.chunk",
        "created": int(time.time()),
        "model": model,
    }

    def chunk(delta: dict[str, object], finish_reason: str | None = None) -> dict[str, object]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return head | {"choices": [choice]}

    yield chunk({"role": "assistant", "content": ""})
    for line in (answer.text or "").splitlines(keepends=True):
        yield chunk({"content": line})
    yield chunk({"content": ""}, answer.finish_reason)
    if with_usage:
        yield head | {"choices": [], "usage": answer.usage()}


# ---------------------------------------------------------------------------------------------------------------------
# Pages
# ---------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Page:
    """What the stub knows of a request's image."""

    digest: str
    width: int
    height: int
    image_format: str
    scheme: str
    tag: str = ""

    @property
    def tokens(self) -> int:
        """Prompt tokens: one for each started 28x28 pixels."""
        return -(-self.width // PIXELS_PER_TOKEN) * -(-self.height // PIXELS_PER_TOKEN)


NO_PAGE = Page("", 0, 0, "", "none")


def read_page(url: str, allowed_dir: Path | None, read_tag: bool) -> Page:
    """Take an image URL to a page: only the header is decoded, unless the tag is wanted."""
    scheme, content = _fetch(url, allowed_dir)
    try:
        with Image.open(io.BytesIO(content)) as image:
            tag = "{:02x}{:02x}{:02x}".format(*_corner(image)) if read_tag else ""
            return Page(hashlib.sha256(content).hexdigest(), *image.size, image.format or "", scheme, tag)
    except OSError as error:
        raise bad_request(f"Failed to load image: {error}") from error


def _corner(image: Any) -> tuple[int, int, int]:
    red, green, blue = image.convert("RGB").getpixel((0, 0))
    return red, green, blue


def _fetch(url: str, allowed_dir: Path | None) -> tuple[str, bytes]:
    scheme, _, rest = url.partition(":")
    if scheme == "data":
        return scheme, _decode_data_url(rest)
    if scheme == "file":
        return scheme, _read_local(urllib.parse.urlsplit(url), allowed_dir)
    raise bad_request("The URL must be either a HTTP, data or file URL.")


def _decode_data_url(rest: str) -> bytes:
    head, comma, payload = rest.partition(",")
    if not comma or not head.endswith(";base64"):
        raise RefusalError(501, "Only base64 data URLs are supported for now.", "NotImplementedError")
    try:
        return binascii.a2b_base64(payload)
    except binascii.Error as error:
        raise bad_request(str(error)) from error


def _read_local(parts: urllib.parse.SplitResult, allowed_dir: Path | None) -> bytes:
    if allowed_dir is None:
        message = "Cannot load local files without `--allowed-local-media-path`."
        raise RefusalError(500, message, "InternalServerError")
    path = Path(urllib.request.url2pathname(parts.netloc + parts.path))
    if allowed_dir not in path.resolve().parents:
        raise bad_request(f"The file path {path} must be a subpath of `--allowed-local-media-path {allowed_dir}`.")
    try:
        return path.read_bytes()
    except OSError as error:
        raise bad_request(f"Failed to load image: {error}") from error


def page_text(page: Page, seed: object = None, lines: int = 5) -> str:
    """What the stub reads on a page: a name, its measures, and words that follow from the hash."""
    words = random.Random(page.digest)
    head = [f"page {page.digest[:12]}", f"{page.width} x {page.height}"]
    head += [f"tag {page.tag}"] if page.tag else []
    head += [f"seed {seed}"] if seed is not None else []
    return "\n".join(head + [" ".join(words.choices(WORDS, k=9)).capitalize() + "." for _ in range(lines)])


def answer_for(page: Page, fault: Fault | None, prompt_tokens: int, max_tokens: int, seed: object = None) -> Answer:
    """The answer to a page, changed by the fault where there is one, and cut at `max_tokens`."""
    text: str | None = page_text(page, seed)
    reason = "stop"
    match fault.kind if fault else "":
        case "loop":
            text = "and the and the " * max(1, min(max_tokens, 4096) * CHARACTERS_PER_TOKEN // 16)
            reason = "length"
        case "truncate":
            text, reason = str(text)[: len(str(text)) // 2], "length"
        case "repetition":
            text, reason = "the same line again\n" * 12, "repetition"
        case "empty":
            text = ""
        case "null":
            text = None
        case "surrogate":
            text = f"{text}\nlone \ud800 and \udfff, and a NUL \x00."
        case "long":
            text = ("x" * 99 + "\n") * 2000
        case "answer":
            assert fault is not None
            text = fault.text
        case _:
            if _count_tokens(text) > max_tokens:
                text, reason = str(text)[: (max_tokens - 1) * CHARACTERS_PER_TOKEN], "length"
    return Answer(text, reason, prompt_tokens, _count_tokens(text))


def _count_tokens(text: str | None) -> int:
    return len(text or "") // CHARACTERS_PER_TOKEN + 1


# ---------------------------------------------------------------------------------------------------------------------
# The time model
# ---------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Settings:
    """What `POST /stub/config` can change while the server runs."""

    max_num_seqs: int = 256
    seconds_per_page: float = 0.0
    jitter: float = 0.0
    ceiling: float = 0.0
    kv_cache_usage: float | None = None
    health_status: int = 200
    version: str = "0.32.0"
    metrics: bool = True


class Engine:
    """Sequences running, sequences waiting in order of arrival, and completions no faster than the ceiling."""

    def __init__(self, settings: Settings, seed: int = 0) -> None:
        self.settings = settings
        self.running = 0
        self.max_running = 0
        self._queue: collections.deque[asyncio.Future[None]] = collections.deque()
        self._next_completion_at = 0.0
        self._thaw_at = 0.0
        self._dice = random.Random(seed)

    @property
    def waiting(self) -> int:
        """How many sequences wait for a slot."""
        return sum(not ticket.done() for ticket in self._queue)

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for one of the `max_num_seqs` slots, and hold it."""
        ticket: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(ticket)
        self.admit()
        try:
            await ticket
            yield
        finally:
            if ticket.done() and not ticket.cancelled():
                self.running -= 1
            self.admit()

    def admit(self) -> None:
        """Give free slots to those who wait longest."""
        while self._queue and (self._queue[0].done() or self.running < self.settings.max_num_seqs):
            ticket = self._queue.popleft()
            if not ticket.done():
                ticket.set_result(None)
                self.running += 1
                self.max_running = max(self.max_running, self.running)

    async def run(self, extra_s: float = 0.0) -> None:
        """Let one page's time pass, inside a slot."""
        spread = 1 + self.settings.jitter * self._dice.uniform(-1, 1)
        await asyncio.sleep(self.settings.seconds_per_page * spread + extra_s)
        await self._turn()
        await asyncio.sleep(max(0.0, self._thaw_at - time.monotonic()))

    def freeze(self, seconds: float) -> None:
        """Let nothing complete for a while."""
        self._thaw_at = max(self._thaw_at, time.monotonic() + seconds)

    async def _turn(self) -> None:
        if not self.settings.ceiling:
            return
        now = time.monotonic()
        mine = max(now, self._next_completion_at)
        self._next_completion_at = mine + 1 / self.settings.ceiling
        await asyncio.sleep(mine - now)


# ---------------------------------------------------------------------------------------------------------------------
# What was seen
# ---------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Stats:
    """What the server saw; `GET /stub/stats` gives it, `POST /stub/reset` starts anew."""

    requests: int = 0
    completions: int = 0
    cancelled: int = 0
    resets: int = 0
    in_flight: int = 0
    max_in_flight: int = 0
    bytes_in: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    first_request_at: float | None = None
    last_request_at: float | None = None
    last_completion_at: float | None = None
    statuses: Counter[str] = dataclasses.field(default_factory=Counter)
    finish_reasons: Counter[str] = dataclasses.field(default_factory=Counter)
    asks: Counter[str] = dataclasses.field(default_factory=Counter)
    answered: Counter[str] = dataclasses.field(default_factory=Counter)
    tags: Counter[str] = dataclasses.field(default_factory=Counter)
    sizes: Counter[str] = dataclasses.field(default_factory=Counter)
    formats: Counter[str] = dataclasses.field(default_factory=Counter)
    schemes: Counter[str] = dataclasses.field(default_factory=Counter)
    models: Counter[str] = dataclasses.field(default_factory=Counter)
    seeds: dict[str, list[object]] = dataclasses.field(default_factory=dict)
    paths: Counter[str] = dataclasses.field(default_factory=Counter)
    last_request: dict[str, object] | None = None

    def arrived(self) -> None:
        """A completion request came in."""
        self.requests += 1
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        self.last_request_at = time.time()
        self.first_request_at = self.first_request_at or self.last_request_at

    def asked(self, page: Page, body: Mapping[str, Any]) -> None:
        """Its body was read and holds this page."""
        self.asks[page.digest] += 1
        self.sizes[f"{page.width}x{page.height}"] += 1
        self.formats[page.image_format] += 1
        self.schemes[page.scheme] += 1
        if page.tag:
            self.tags[page.tag] += 1
        self.seeds.setdefault(page.digest, []).append(body.get("seed"))
        self.last_request = without_images(body)

    def completed(self, page: Page, answer: Answer) -> None:
        """It was answered with a text."""
        self.completions += 1
        self.answered[page.digest] += 1
        self.finish_reasons[answer.finish_reason] += 1
        self.prompt_tokens += answer.prompt_tokens
        self.generation_tokens += answer.completion_tokens
        self.last_completion_at = time.time()


def without_images(value: Any) -> Any:
    """A request's body with each data URL shortened to its head."""
    if isinstance(value, dict):
        return {key: without_images(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_images(item) for item in value]
    return value[:40] if isinstance(value, str) and value.startswith("data:") else value


def metrics_text(engine: Engine, stats: Stats, model: str) -> str:
    """The Prometheus page, with vLLM's names and labels."""
    labels = f'engine="0",model_name="{model}"'
    settings = engine.settings
    usage = settings.kv_cache_usage
    gauges = {
        "num_requests_running": engine.running,
        "num_requests_waiting": engine.waiting,
        "kv_cache_usage_perc": min(1.0, engine.running / settings.max_num_seqs) if usage is None else usage,
    }
    counters = {"prompt_tokens": stats.prompt_tokens, "generation_tokens": stats.generation_tokens}
    lines = []
    for name, value in gauges.items():
        lines += [f"# TYPE vllm:{name} gauge", f"vllm:{name}{{{labels}}} {float(value)}"]
    for name, value in counters.items():
        lines += [f"# TYPE vllm:{name}_total counter", f"vllm:{name}_total{{{labels}}} {float(value)}"]
    lines.append("# TYPE vllm:request_success_total counter")
    for reason in FINISH_REASONS:
        named = f'engine="0",finished_reason="{reason}",model_name="{model}"'
        lines.append(f"vllm:request_success_total{{{named}}} {float(stats.finish_reasons[reason])}")
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------------------------------------------------------------
# The server
# ---------------------------------------------------------------------------------------------------------------------


class Stub:
    """The HTTP side: routes, the way of one request, and the switches under /stub/."""

    def __init__(self, options: argparse.Namespace, extras: Sequence[str]) -> None:
        self.options = options
        self.extras = list(extras)
        names = [field.name for field in dataclasses.fields(Settings)]
        self.settings = Settings(**{name: getattr(options, name) for name in names})
        self.engine = Engine(self.settings, options.seed)
        self.stats = Stats()
        self.faults = [parse_fault(spec) for spec in options.fault]
        self.names: list[str] = options.served_model_name or [options.model]
        self.fingerprint = f"vllm-{options.version}-0000stub"
        self.api_key: str = options.api_key or os.environ.get("VLLM_API_KEY", "")
        self.allowed_dir = (
            Path(options.allowed_local_media_path).resolve() if options.allowed_local_media_path else None
        )
        self.ready_at = time.monotonic() + options.health_before_ready
        self.total_completions = 0

    def application(self) -> web.Application:
        """The aiohttp application with all routes."""
        app = web.Application(client_max_size=1 << 30, middlewares=[self._guard()])
        app.router.add_get("/health", self.health)
        app.router.add_get("/ping", self.health)
        app.router.add_get("/version", self.version)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_get("/stub/stats", self.show_stats)
        app.router.add_post("/stub/config", self.configure)
        app.router.add_post("/stub/reset", self.reset)
        return app

    def _guard(self) -> Any:
        @web.middleware
        async def guard(request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
            self.stats.paths[request.path] += 1
            try:
                if request.path.startswith(("/v1", "/v2")) and not self._is_authorised(request):
                    response: web.StreamResponse = json_answer({"error": "Unauthorized"}, status=401)
                else:
                    response = await handler(request)
            except web.HTTPException as error:
                refusal = RefusalError(error.status, error.reason, error.reason)
                response = json_answer(refusal.body, status=error.status)
            log(f'{request.remote} - "{request.method} {request.path} HTTP/1.1" {response.status}')
            return response

        return guard

    def _is_authorised(self, request: web.Request) -> bool:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        return not self.api_key or (scheme.lower() == "bearer" and key == self.api_key)

    # -- what vLLM answers

    async def health(self, request: web.Request) -> web.Response:
        """200 with an empty body, or what the configuration says."""
        return web.Response(status=self.settings.health_status)

    async def version(self, request: web.Request) -> web.Response:
        """The engine's version."""
        return json_answer({"version": self.settings.version})

    async def metrics(self, request: web.Request) -> web.Response:
        """The gauges and counters; 404 where they are switched off."""
        if not self.settings.metrics:
            raise web.HTTPNotFound
        text = metrics_text(self.engine, self.stats, self.names[0])
        return web.Response(text=text, content_type="text/plain", charset="utf-8")

    async def models(self, request: web.Request) -> web.Response:
        """The models served."""
        return json_answer({"object": "list", "data": [self._model_card(name) for name in self.names]})

    def _model_card(self, name: str) -> dict[str, object]:
        created = int(time.time())
        permission = {
            "id": f"modelperm-{uuid.uuid4().hex[:16]}",
            "object": "model_permission",
            "created": created,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "vllm",
            "root": self.options.root or self.options.model,
            "parent": None,
            "max_model_len": self.options.max_model_len,
            "permission": [permission],
        }

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """One completion, from arrival to answer; whatever its end, it is counted."""
        self.stats.arrived()
        page, outcome = NO_PAGE, "cancelled"
        try:
            body = self._parse(request, await request.read())
            page = self._page_of(body)
            self.stats.asked(page, body)
            if self.options.arrivals:
                append_line(
                    self.options.arrivals, json.dumps({"pid": os.getpid(), "time": time.time(), "tag": page.tag})
                )
            response = await self._answer(request, body, page)
            outcome = "reset" if request.transport is None or request.transport.is_closing() else str(response.status)
        except RefusalError as refusal:
            response, outcome = json_answer(refusal.body, status=refusal.status), str(refusal.status)
        except asyncio.CancelledError:
            self.stats.cancelled += 1
            raise
        finally:
            self.stats.in_flight -= 1
            self._record(page, outcome, request.get("answer"))
        self._maybe_die()
        return response

    def _record(self, page: Page, outcome: str, answer: Answer | None) -> None:
        if outcome.isdigit():
            self.stats.statuses[outcome] += 1
        elif outcome == "reset":
            self.stats.resets += 1
        if self.options.journal:
            entry = {"pid": os.getpid(), "time": time.time(), "outcome": outcome, "page": page.digest, "tag": page.tag}
            if answer:
                entry |= {"finish": answer.finish_reason, "tokens": answer.completion_tokens, "text": answer.text}
            append_line(self.options.journal, json.dumps(entry))

    def _parse(self, request: web.Request, raw: bytes) -> dict[str, Any]:
        self.stats.bytes_in += len(raw)
        if request.content_type != "application/json":
            message = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
            raise RefusalError(400, message, "Bad Request")
        try:
            body = json.loads(raw)
        except ValueError as error:
            detail = {"type": "json_invalid", "loc": "body", "msg": "JSON decode error", "ctx": {"error": str(error)}}
            raise invalid_body(detail, "body") from error
        if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
            raise invalid_body({"type": "missing", "loc": "body.messages", "msg": "Field required"}, "body.messages")
        self._check_model(body.get("model"))
        temperature = body.get("temperature")
        if isinstance(temperature, int | float) and temperature < 0:
            message = f"temperature must be non-negative, got {float(temperature)}. "
            raise bad_request(f"{message}(parameter=temperature, value={float(temperature)})", "temperature")
        return body

    def _check_model(self, model: object) -> None:
        self.stats.models[str(model)] += 1
        if model and model not in self.names:
            valid = ", ".join(self.names)
            message = f"The model `{model}` does not exist. Valid aliases: {valid}."
            raise RefusalError(404, message, "NotFoundError", "model")

    def _page_of(self, body: Mapping[str, Any]) -> Page:
        urls = [part["image_url"]["url"] for part in _parts(body) if part.get("type") == "image_url"]
        if len(urls) > self.options.images_per_prompt:
            limit = self.options.images_per_prompt
            raise bad_request(f"At most {limit} image(s) may be provided in one prompt.", "image")
        read_tag = self.options.read_tag or any(fault.tag for fault in self.faults)
        return read_page(urls[0], self.allowed_dir, read_tag) if urls else NO_PAGE

    def _budget(self, body: Mapping[str, Any], page: Page) -> tuple[int, int]:
        """Prompt tokens and the tokens left to write, or vLLM's refusal of a prompt that doesn't fit."""
        characters = sum(len(part.get("text", "")) for part in _parts(body))
        prompt = page.tokens + characters // CHARACTERS_PER_TOKEN + 8
        asked = body.get("max_completion_tokens") or body.get("max_tokens")
        length: int = self.options.max_model_len
        if asked and asked > length:
            message = (
                f"max_tokens={asked} cannot be greater than max_model_len={length}. Please request fewer output tokens."
            )
            raise bad_request(message, "max_tokens")
        if prompt > length - (asked or 1):
            message = (
                f"This model's maximum context length is {length} tokens. However, your prompt contains {prompt} "
                "input tokens, which exceeds this limit even without any output tokens. "
                "Please reduce the length of the input prompt."
            )
            raise bad_request(message, "input_tokens")
        return prompt, asked or length - prompt

    async def _answer(self, request: web.Request, body: dict[str, Any], page: Page) -> web.StreamResponse:
        prompt_tokens, max_tokens = self._budget(body, page)
        if time.monotonic() < self.ready_at:
            raise RefusalError(503, "The engine is not ready yet.", "Service Unavailable")
        if self.settings.health_status == HTTPStatus.SERVICE_UNAVAILABLE:
            raise engine_dead()
        fault = self._strike(page)
        if fault and fault.kind in ERROR_KINDS and not fault.late:
            return self._fail(request, fault)
        await self._serve(fault)
        if fault and fault.kind in ERROR_KINDS:
            return self._fail(request, fault)
        seed = body.get("seed") if self.options.seeded_text else None
        answer = request["answer"] = answer_for(page, fault, prompt_tokens, max_tokens, seed)
        if fault and fault.kind == "half_close":
            return await self._half_close(request, completion_body(answer, self.names[0], self.fingerprint))
        response = await self._send(request, body, answer)
        self.stats.completed(page, answer)
        self.total_completions += 1
        return response

    def _strike(self, page: Page) -> Fault | None:
        due = [fault for fault in self.faults if fault.is_due(page)]
        if not due:
            return None
        due[0].fired += 1
        return due[0]

    async def _serve(self, fault: Fault | None) -> None:
        """Let the page's time pass, with what the fault does to it."""
        kind = fault.kind if fault else ""
        if fault and kind == "die":
            log(f"scripted death, exit code {fault.code}")
            os._exit(fault.code)
        if kind == "dead":
            self.settings.health_status = HTTPStatus.SERVICE_UNAVAILABLE
            raise engine_dead()
        if fault and kind == "stall":
            self._stall(fault)
        async with self.engine.slot():
            if kind == "hang":
                await asyncio.Event().wait()
            await self.engine.run(extra_s=fault.seconds if fault and kind == "slow" else 0.0)

    def _stall(self, fault: Fault) -> None:
        if fault.hard:
            time.sleep(fault.seconds)
        else:
            self.engine.freeze(fault.seconds)

    def _fail(self, request: web.Request, fault: Fault) -> web.StreamResponse:
        if fault.kind == "reset":
            reset_connection(request)
            return web.Response(status=500)
        if fault.kind == "garbage":
            return web.Response(body=b"<html>upstream is busy</html>\x00\xff", content_type="text/html")
        headers = {"Retry-After": f"{fault.retry_after:g}"} if fault.retry_after is not None else {}
        return json_answer(scripted_error(fault).body, status=fault.code, headers=headers)

    async def _half_close(self, request: web.Request, body: dict[str, object]) -> web.StreamResponse:
        content = json.dumps(body).encode()
        response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": str(len(content))})
        await response.prepare(request)
        await response.write(content[: len(content) // 2])
        assert request.transport is not None
        request.transport.close()
        return response

    async def _send(self, request: web.Request, body: Mapping[str, Any], answer: Answer) -> web.StreamResponse:
        model = str(body.get("model") or self.names[0])
        if not body.get("stream"):
            top = int(body.get("top_logprobs") or 0) if body.get("logprobs") else None
            return json_answer(completion_body(answer, model, self.fingerprint, top))
        with_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for chunk in completion_chunks(answer, model, with_usage):
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    def _maybe_die(self) -> None:
        if self.options.die_after and self.total_completions >= self.options.die_after:
            # the last answer still goes out: what follows it dies
            log(f"scripted death after {self.total_completions} completions")
            asyncio.get_running_loop().call_later(0.01, os._exit, 1)

    # -- the switches of the tests

    async def show_stats(self, request: web.Request) -> web.Response:
        """Everything counted."""
        counted = vars(self.stats) | {
            "distinct_pages": len([digest for digest in self.stats.asks if digest]),
            "max_running": self.engine.max_running,
            "running": self.engine.running,
            "waiting": self.engine.waiting,
            "faults": {fault.spec: fault.fired for fault in self.faults},
            "extras": self.extras,
            "argv": sys.argv[1:],
            "pid": os.getpid(),
            "settings": dataclasses.asdict(self.settings),
        }
        return json_answer(counted)

    async def configure(self, request: web.Request) -> web.Response:
        """Change settings (the fields of `Settings`), and the whole list of faults (`faults`)."""
        changes: dict[str, Any] = await request.json()
        try:
            specs = changes.pop("faults", None)
            faults = self.faults if specs is None else [parse_fault(spec) for spec in specs]
            settings = dataclasses.replace(self.settings, **changes)
        except (TypeError, ValueError) as error:
            raise web.HTTPBadRequest(reason=str(error)) from error
        self.faults = faults
        for name in changes:
            setattr(self.settings, name, getattr(settings, name))
        self.engine.admit()
        return json_answer({"settings": dataclasses.asdict(settings), "faults": [f.spec for f in faults]})

    async def reset(self, request: web.Request) -> web.Response:
        """Count anew; requests in flight stay counted as in flight."""
        in_flight = self.stats.in_flight
        self.stats = Stats(in_flight=in_flight, max_in_flight=in_flight)
        self.engine.max_running = self.engine.running
        return json_answer({})


def _parts(body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for message in body["messages"]:
        content = message.get("content")
        yield from content if isinstance(content, list) else [{"type": "text", "text": content or ""}]


def json_answer(data: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """A JSON body as vLLM sends it: its type says nothing of a charset."""
    named = {"Content-Type": "application/json", **(headers or {})}
    content = json.dumps(data, separators=(",", ":")).encode()
    return web.Response(body=content, status=status, headers=named)


def reset_connection(request: web.Request) -> None:
    """End the connection with a TCP reset: SO_LINGER 0, then close."""
    transport = request.transport
    assert transport is not None
    linger = struct.pack("ii", 1, 0)
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    transport.abort()


def append_line(path: str, line: str) -> None:
    """Add one line to a file that several processes may be writing."""
    with Path(path).open("ab") as file:
        file.write(line.encode() + b"\n")


def log(line: str) -> None:
    """One log line, looking like the real server's."""
    print(f"INFO:     {line}", file=sys.stderr, flush=True)


# ---------------------------------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------------------------------


def build_parser() -> argparse.ArgumentParser:
    """All options; others are ignored and recorded, as tests spawn this in vLLM's place."""
    parser = argparse.ArgumentParser(prog="stub_vllm.py", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--version-string", dest="version", default="0.32.0", help="what /version says")
    server = parser.add_argument_group("server, as in vLLM")
    server.add_argument("--host", default="127.0.0.1")
    server.add_argument("--port", type=int, default=8000, help="0: a free one")
    server.add_argument("--model", default=DEFAULT_MODEL)
    server.add_argument("--served-model-name", nargs="+")
    server.add_argument("--root", help="the `root` of /v1/models, default: --model")
    server.add_argument("--max-model-len", type=int, default=16384)
    server.add_argument("--api-key", default="", help="default: VLLM_API_KEY")
    server.add_argument("--allowed-local-media-path", default="")
    server.add_argument("--images-per-prompt", type=int, default=1)
    timing = parser.add_argument_group("time model")
    timing.add_argument("--max-num-seqs", type=int, default=256, help="sequences running at once")
    timing.add_argument("--seconds-per-page", type=float, default=0.0)
    timing.add_argument("--jitter", type=float, default=0.0, help="0.2: service times within ±20 %%")
    timing.add_argument("--ceiling", type=float, default=0.0, help="completions per second in all, 0: none")
    timing.add_argument("--kv-cache-usage", type=float, help="the gauge, default: running / max-num-seqs")
    timing.add_argument("--seed", type=int, default=0, help="of the jitter")
    text = parser.add_argument_group("pages and texts")
    text.add_argument("--read-tag", action="store_true", help="read the top-left pixel, name it in text and stats")
    text.add_argument("--seeded-text", action="store_true", help="the request's seed is part of the text")
    faults = parser.add_argument_group("faults")
    faults.add_argument("--fault", action="append", default=[], metavar="SPEC", help="see above; may be repeated")
    faults.add_argument("--slow-start", type=float, default=0.0, metavar="S", help="listen only after S seconds")
    faults.add_argument(
        "--health-before-ready", type=float, default=0.0, metavar="S", help="503 to completions until S"
    )
    faults.add_argument("--health-status", type=int, default=200)
    faults.add_argument("--no-metrics", dest="metrics", action="store_false", help="/metrics answers 404")
    faults.add_argument("--die-after", type=int, default=0, metavar="N", help="exit 1 after N completions")
    faults.add_argument("--die-at-start", default="", metavar="TEXT", help="TEXT to stderr, exit 1")
    faults.add_argument("--ignore-sigterm", action="store_true", help="only SIGKILL ends it")
    faults.add_argument("--journal", default="", metavar="FILE", help="append one JSON line per completion request")
    faults.add_argument("--arrivals", default="", metavar="FILE", help="append one JSON line as a request arrives")
    return parser


async def serve(stub: Stub, options: argparse.Namespace) -> None:
    """Listen, say where on stdout, and run until killed."""
    runner = web.AppRunner(stub.application(), access_log=None, handler_cancellation=True)
    await runner.setup()
    await asyncio.sleep(options.slow_start)
    site = web.TCPSite(runner, options.host, options.port, backlog=1024)
    await site.start()
    port = runner.addresses[0][1]
    log(f"Uvicorn running on http://{options.host}:{port} (Press CTRL+C to quit)")
    print(json.dumps({"url": f"http://{options.host}:{port}", "pid": os.getpid()}), flush=True)
    await asyncio.Event().wait()


def end_at_once(signum: int, frame: object) -> None:
    """Leave without waiting for requests in flight, even where the loop is frozen."""
    os.write(2, b"INFO:     Shutting down\n")
    os._exit(0)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stub; returns only where it does not start."""
    options, extras = build_parser().parse_known_args(argv)
    if "--version" in extras:
        print(options.version)
        return 0
    if extras[:1] == ["serve"] and len(extras) > 1:
        options.model = extras[1]
    if options.die_at_start:
        print(options.die_at_start, file=sys.stderr, flush=True)
        return 1
    signal.signal(signal.SIGTERM, signal.SIG_IGN if options.ignore_sigterm else end_at_once)
    signal.signal(signal.SIGINT, end_at_once)
    asyncio.run(serve(Stub(options, extras), options))
    return 0


# ---------------------------------------------------------------------------------------------------------------------
# For tests
# ---------------------------------------------------------------------------------------------------------------------


class StubVllm:
    """The stub in a process of its own, for the length of a `with` block.

    with StubVllm("--max-num-seqs", "4", "--fault", "status=500,every=7") as stub:
        ... stub.url, stub.v1, stub.stats()["requests"] ...
    """

    def __init__(self, *options: str, port: int = 0, env: Mapping[str, str] | None = None) -> None:
        self.options = options
        self.port = port
        self.env = os.environ | {"VLLM_API_KEY": ""} | dict(env or {})
        self.url = ""
        self.process: subprocess.Popen[str] | None = None
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in close()

    @property
    def v1(self) -> str:
        """The base URL for OpenAI clients."""
        return f"{self.url}/v1"

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self._running().pid

    def start(self) -> Self:
        """Spawn the server and wait until it listens; RuntimeError, with its log, where it ends before that."""
        command = [sys.executable, str(Path(__file__).resolve()), "--port", str(self.port), *self.options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._log, text=True, env=self.env)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            code, log_text = self.wait(), self.log_text()
            self.close()
            raise RuntimeError(f"the stub ended at start with exit code {code}:\n{log_text}")
        self.url = json.loads(line)["url"]
        return self

    def stats(self) -> dict[str, Any]:
        """What the server counted."""
        return self._call("/stub/stats")

    def configure(self, **changes: object) -> dict[str, Any]:
        """Change settings (`Settings`) and `faults` (a list of specs) while it runs."""
        return self._call("/stub/config", changes)

    def reset(self) -> None:
        """Count anew."""
        self._call("/stub/reset", {})

    def log_text(self) -> str:
        """Its stderr so far."""
        return os.pread(self._log.fileno(), 1 << 24, 0).decode(errors="replace")

    def kill(self) -> None:
        """SIGKILL."""
        self._running().kill()

    def terminate(self) -> None:
        """SIGTERM."""
        self._running().terminate()

    def wait(self, timeout_s: float = 10.0) -> int:
        """Wait for its end; the exit code."""
        return self._running().wait(timeout_s)

    def close(self) -> None:
        """End it, if it still runs, and give everything back."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            assert self.process.stdout is not None
            self.process.stdout.close()
        self._log.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _running(self) -> subprocess.Popen[str]:
        if self.process is None:
            raise RuntimeError("the stub was not started")
        return self.process

    def _call(self, path: str, body: object = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(self.url + path, data=data), timeout=30) as response:
            result: dict[str, Any] = json.load(response)
        return result


def read_journal(path: Path) -> list[dict[str, Any]]:
    """The lines that `--journal` left, over all processes that wrote it."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def install_fake_vllm(directory: Path, *options: str) -> Path:
    """Put a `vllm` command into `directory` that starts the stub with `options`: for PATH in tests of spawning."""
    script = directory / "vllm"
    command = " ".join(map(_quote, (sys.executable, str(Path(__file__).resolve()), *options)))
    script.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script


def _quote(word: str) -> str:
    return "'" + word.replace("'", "'\\''") + "'"


def data_url(content: bytes, media_type: str = "image/png") -> str:
    """Image bytes as a data URL."""
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


def tagged_png(tag: int, width: int = 56, height: int = 28) -> bytes:
    """A small page whose top-left pixel, and so `--read-tag`, gives this number (as six hex digits)."""
    image = Image.new("RGB", (width, height), "white")
    image.putpixel((0, 0), (tag >> 16 & 255, tag >> 8 & 255, tag & 255))
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


if __name__ == "__main__":
    sys.exit(main())
