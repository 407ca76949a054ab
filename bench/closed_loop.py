"""Requests at a fixed concurrency: each of N clients asks, waits for its answer, and asks again; what came of each.

The load stays at N until a level has enough; what is in flight then is waited for and counted too: no slow answer is
left out. Throughput is counted up to the last answer that came while the load was whole.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import deque
from collections.abc import AsyncIterable, Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Self

from src.ask import Body, request_body
from src.pages import Page
from src.question import Question
from src.transport import Address
from src.web import is_local

PAUSE_AFTER_FAILURE_S = 0.2  # a client whose connection is refused would ask thousands of times a second
LEAST_FAILURES_OF_DEATH = 20
EVENTS_KEPT = 3  # of a stream: the reason why it ended, the usage, and an error all stand at its end


class RequestFailedError(Exception):
    """A request that brought no text; the message is the kind, as it is counted."""


@dataclass(frozen=True)
class Answer:
    """What a request brought."""

    first_token_at: float | None  # by the clock of the level
    finish_reason: str | None
    prompt_tokens: int | None
    tokens: int | None


@dataclass(frozen=True)
class Sample:
    """One request; times are seconds since the level began. `error`: why it brought nothing, None where it did."""

    started_s: float
    ended_s: float
    error: str | None = None
    answer: Answer | None = None
    first_token_s: float | None = None  # since the request was started


@dataclass(frozen=True)
class Level:
    """What came of one concurrency. `stopped_s`: when the first client stopped, and the load was whole no more."""

    concurrency: int
    samples: list[Sample]
    stopped_s: float
    wall_s: float
    client_cpu_s: float
    died: bool  # nothing but failures in a row at its end


@dataclass(frozen=True)
class Enough:
    """When a level has enough: so many requests were answered or failed, or so many seconds have passed."""

    requests: int | None = None
    seconds: float | None = None

    def reached(self, ended: int, elapsed_s: float) -> bool:
        """Whether no further request is to be started."""
        return (self.requests is not None and ended >= self.requests) or (
            self.seconds is not None and elapsed_s >= self.seconds
        )


Ask = Callable[[], Awaitable[Answer]]


async def run_level(ask: Ask, concurrency: int, enough: Enough) -> Level:
    """Have `concurrency` clients ask until it is enough, or until the endpoint is dead."""
    began, cpu_began = time.monotonic(), time.process_time()
    samples: list[Sample] = []
    stops: list[float] = []
    deadly, failures = max(LEAST_FAILURES_OF_DEATH, 2 * concurrency), 0

    async def one_client() -> None:
        nonlocal failures
        while not enough.reached(len(samples), time.monotonic() - began) and failures < deadly:
            sample = await _sample(ask, began)
            samples.append(sample)
            failures = failures + 1 if sample.error else 0
            if sample.error:
                await asyncio.sleep(PAUSE_AFTER_FAILURE_S)
        stops.append(time.monotonic() - began)

    await asyncio.gather(*(one_client() for _ in range(concurrency)))
    return Level(
        concurrency=concurrency,
        samples=samples,
        stopped_s=min(stops),
        wall_s=time.monotonic() - began,
        client_cpu_s=time.process_time() - cpu_began,
        died=failures >= deadly,
    )


async def _sample(ask: Ask, began: float) -> Sample:
    started = time.monotonic()
    try:
        answer = await ask()
    except RequestFailedError as failure:
        return Sample(started - began, time.monotonic() - began, error=str(failure))
    first_token_s = None if answer.first_token_at is None else answer.first_token_at - started
    return Sample(started - began, time.monotonic() - began, answer=answer, first_token_s=first_token_s)


@dataclass(frozen=True)
class Questions:
    """What is asked, over and over: the pages, encoded before the clock runs, each time with another seed."""

    model: str
    question: Question
    pages: list[EncodedPage]
    stream: bool = True

    def body(self, number: int) -> Body:
        """Return the body of request `number`."""
        page = self.pages[number % len(self.pages)]
        more = {"stream": True, "stream_options": {"include_usage": True}} if self.stream else {}
        return request_body(page.page, number, self.question, self.model, page, more=more)


@dataclass(frozen=True)
class EncodedPage:
    """A page, and the transport that has it at hand."""

    page: Page
    url: bytes

    def address(self, _: Page) -> Address:
        """Return its data URL."""
        return Address(self.url)


class Endpoint:
    """Asks one endpoint, over as many connections as there are requests in flight; use it as `async with`."""

    def __init__(self, base_url: str, key: str, questions: Questions, timeout_s: float) -> None:
        import aiohttp

        self._url = f"{base_url}/v1/chat/completions"
        self._headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        self._questions = questions
        self._numbers = itertools.count()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            trust_env=not is_local(base_url),  # a proxy named in the environment is not for loopback
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._session.close()

    async def ask(self) -> Answer:
        """Ask the next question; raise `RequestFailedError` where no whole answer comes."""
        import aiohttp

        body = self._questions.body(next(self._numbers))
        headers = {**self._headers, "Content-Length": str(body.num_bytes)}
        try:
            async with self._session.post(self._url, data=body, headers=headers, allow_redirects=False) as response:
                if response.status != HTTPStatus.OK:
                    raise RequestFailedError(f"HTTP {response.status}")
                if response.content_type == "text/event-stream":
                    return await read_stream(response.content.iter_any())
                return read_completion(await response.read())
        except TimeoutError:
            raise RequestFailedError("timeout") from None
        except aiohttp.ClientPayloadError:
            raise RequestFailedError("broken off") from None
        except (aiohttp.ClientError, OSError):
            raise RequestFailedError("connection") from None


def read_completion(content: bytes) -> Answer:
    """Read a chat completion that came at once."""
    try:
        completion = json.loads(content)
        usage = completion.get("usage") or {}
        reason = completion["choices"][0]["finish_reason"]
        return Answer(None, reason, usage.get("prompt_tokens"), usage.get("completion_tokens"))
    except (ValueError, LookupError, TypeError, AttributeError):
        raise RequestFailedError("no completion") from None


async def read_stream(chunks: AsyncIterable[bytes], clock: Callable[[], float] = time.monotonic) -> Answer:
    """Read a stream of events, and note when the first of its text came.

    Of the events after that only the last are parsed: a fast endpoint sends thousands a second.
    """
    first_token_at: float | None = None
    kept: deque[bytes] = deque(maxlen=EVENTS_KEPT)
    rest, is_whole = b"", False
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            event = line.removeprefix(b"data:").strip()
            if event == b"[DONE]":
                is_whole = True
            elif line.startswith(b"data:"):
                kept.append(event)
                if first_token_at is None and _has_text(event):
                    first_token_at = clock()
    if not is_whole:
        raise RequestFailedError("broken off")
    return _read_end([_parsed(event) for event in kept], first_token_at)


def _read_end(events: list[dict[str, Any]], first_token_at: float | None) -> Answer:
    if any("error" in event for event in events):
        raise RequestFailedError("error in the stream")
    reasons = [choice.get("finish_reason") for event in events for choice in event.get("choices") or ()]
    usage: dict[str, Any] = next((event["usage"] for event in reversed(events) if event.get("usage")), {})
    reason = next(filter(None, reasons), None)
    return Answer(first_token_at, reason, usage.get("prompt_tokens"), usage.get("completion_tokens"))


def _has_text(event: bytes) -> bool:
    choices = _parsed(event).get("choices") or ()
    return any((choice.get("delta") or {}).get("content") for choice in choices)


def _parsed(event: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(event)
    except ValueError:
        raise RequestFailedError("no completion") from None
    if not isinstance(parsed, dict):
        raise RequestFailedError("no completion")
    return parsed
