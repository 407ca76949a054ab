"""How a picture is read, in process: how often it is asked about, and that nobody asks about what came too late."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from src.attempts import ASKED_AGAIN, BEST_FIRST
from src.pages import Page, PageLimits, Refusal, make_page
from src.question import Attempt, Question
from src.reader import Reader, Reading
from src.report import Tally
from src.result import PageResult
from src.threads import Threads
from src.window import fixed_window
from tests.stub_vllm import tagged_png

QUESTION = Question("", 0.2, 0.9, 100, 7, {})
PNG = tagged_png(1)


@dataclass
class Scripted:
    """Answers the n-th request with the n-th status; `asked` has the attempts as they came."""

    statuses: Sequence[str] = ("ok",)
    asked: list[Attempt | None] = field(default_factory=list)

    def encode(self, page: Page, row: int, attempt: Attempt | None = None) -> Attempt | None:
        self.asked.append(attempt)
        return attempt

    async def ask(self, request: Attempt | None, again: Callable[[], Awaitable[Any]]) -> PageResult:
        number = len(self.asked) - 1
        status = self.statuses[number]
        finish = {"truncated": "length", "repetition": "repetition"}.get(status, "stop")
        text = None if status == "error" else f"text {number}"
        return PageResult(
            text, status, tokens=10, prompt_tokens=1000, attempts=1, finish_reason=finish if text else None
        )

    async def watch(self) -> None:
        await asyncio.Event().wait()


def read(
    engine: Scripted, retries: int = 2, context: int | None = None, timeout_s: float = 60.0
) -> tuple[PageResult, Tally]:
    """Have the engine read one page."""

    async def read_it() -> tuple[PageResult, Tally]:
        tally, threads = Tally(1), Threads(2, timeout_s)
        reading = Reading(
            PageLimits(1540), QUESTION, retries_quality=retries, context_tokens=context, page_timeout_s=timeout_s
        )
        reader = Reader(reading, engine, tally, fixed_window(1), threads)
        try:
            result = await reader.read(lambda: PNG, 5)
        finally:
            threads.close()
        tally.count(result)
        return result, tally

    return asyncio.run(read_it())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["ok", "truncated", "repetition", "error"]), min_size=5, max_size=5), st.integers(0, 4))
def test_a_page_is_asked_again_while_its_last_text_is_not_sound_and_the_best_is_kept(
    statuses: list[str], retries: int
) -> None:
    engine = Scripted(statuses)
    result, tally = read(engine, retries)
    asked = 1
    while statuses[asked - 1] in ASKED_AGAIN and asked <= retries:
        asked += 1
    assert len(engine.asked) == result.attempts == tally.requests == asked
    assert tally.asked_again == asked - 1
    assert tally.tokens == 10 * asked
    assert result.status == min(statuses[:asked], key=BEST_FIRST.index)


def test_a_truncated_page_may_say_more_where_the_context_is_known() -> None:
    engine = Scripted(["truncated", "truncated", "ok"])
    read(engine, context=1250)
    first, *others = engine.asked
    assert first is None
    assert [attempt and attempt.max_tokens for attempt in others] == [200, 250]


def test_what_is_prepared_too_late_is_made_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    release, done = threading.Event(), threading.Event()

    def make_slowly(*words: Any, **more: Any) -> Page | Refusal:
        release.wait(60)
        try:
            return make_page(*words, **more)
        finally:
            done.set()

    monkeypatch.setattr("src.reader.make_page", make_slowly)
    engine = Scripted()
    before = set(threading.enumerate())
    result, _ = read(engine, timeout_s=0.05)
    assert (result.status, result.attempts) == ("error", 0)
    release.set()
    assert done.wait(60)
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
    assert engine.asked == []
