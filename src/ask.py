"""A page → the request → the result: a vLLM endpoint asked through `AsyncOpenAI`, its errors sorted.

Errors are of three kinds. Permanent: this page can't be asked; it becomes an error row. Transient: asked again after
a pause, longer each time, until the page's time is up. Systemic: every page would fail the same way; the run stops
and nothing is lost.
"""

from __future__ import annotations

import asyncio
import email.utils
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from .confidence import Confidence, page_confidence
from .errors import EngineError
from .pages import Page, Refusal
from .question import Attempt, Question, page_messages, page_sampling
from .result import PageResult, refused, result_of_answer
from .transport import IN_REQUEST, Transport

if TYPE_CHECKING:
    from openai import AsyncOpenAI

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
