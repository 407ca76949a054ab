"""A row → its result: each frame of its picture prepared and asked about, again while the text is not sound."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

from .attempts import ASKED_AGAIN, better, next_attempt
from .loops import with_loop_found
from .pages import MOST_FRAMES, Page, PageLimits, Refusal, make_page
from .question import Attempt, Question, first_attempt
from .reading import TextRules, as_wanted, joined
from .report import Tally
from .result import PageResult, refused
from .threads import Threads, TooSlowError
from .window import Window

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
