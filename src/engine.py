"""A vLLM `LLM` in this process, fed without a barrier: a new page goes in as soon as another one is done.

All calls to the engine are made by one thread. Where vLLM has `enqueue_chat` each page is added by itself and the
engine is stepped between; where it has not, pages go in as chunks through `chat`. An exception that concerns pages is
narrowed down to the page that causes it; one that means that the engine is dead ends the run.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from .confidence import Confidence, page_confidence
from .errors import EngineError
from .pages import Page, Refusal
from .question import Attempt, Question, page_messages, page_sampling
from .result import PageResult, result_of_answer

ADDED_BETWEEN_STEPS = (
    4  # preparing one for the engine takes about as long as some steps: outputs must not wait for many
)


@dataclass
class Ticket:
    """A page on its way through the engine."""

    messages: list[dict[str, Any]]
    sampling: dict[str, Any]
    answer: Future[PageResult] = field(default_factory=Future)
    attempts: int = 0
    started: float = field(default_factory=time.monotonic)


class OfflineEngine:
    """Feeds an `LLM`. `batch_size` is how many pages a chunk has where the engine can't be fed page by page.

    `llm` needs `chat`, and for feeding page by page `enqueue_chat` and `llm_engine`; `make_sampling` turns the sampling
    parameters into the engine's own (`vllm.SamplingParams`).
    """

    def __init__(
        self,
        llm: Any,
        question: Question,
        make_sampling: Callable[..., Any],
        *,
        batch_size: int,
        is_death: Callable[[Exception], bool],
        is_gone: Callable[[], bool],
    ) -> None:
        self._llm = llm
        self._question = question
        self._make_sampling = make_sampling
        self._batch_size = batch_size
        self._is_death = is_death
        self._is_gone = is_gone
        self._waiting: queue.SimpleQueue[Ticket | None] = queue.SimpleQueue()
        self._running: dict[str, Ticket] = {}
        self._stopping = threading.Event()
        self._death: EngineError | None = None
        work = self._feed if hasattr(llm, "enqueue_chat") and hasattr(llm, "llm_engine") else self._feed_chunks
        self._thread = threading.Thread(target=self._until_stopped, args=(work,), name="engine", daemon=True)
        self._thread.start()

    def encode(self, page: Page, row: int, attempt: Attempt | None = None) -> Ticket:
        """Make the request for a page: the image itself, as the server would have decoded it."""
        image = page.image if page.image.mode == "RGB" else page.image.convert("RGB")
        part = {"type": "image_pil", "image_pil": image}
        return Ticket(page_messages(self._question, part), page_sampling(self._question, row, attempt))

    async def ask(self, request: Ticket, again: Callable[[], Awaitable[Ticket | Refusal]]) -> PageResult:
        """Wait for the answer; raise `EngineError` when the engine has died."""
        del again  # an engine in this process does not lose requests
        if self._death:
            raise self._death
        request.started = time.monotonic()
        self._waiting.put(request)
        return await asyncio.wrap_future(request.answer)

    async def watch(self) -> None:
        """Return never; raise when the engine has died.

        A killed engine process does not always make a waiting `step` return (vLLM 0.32.0): so it is looked at too.
        """
        while True:
            await asyncio.sleep(1.0)
            if self._death is None and self._is_gone():
                self._death = _dead("its process is gone")
            if self._death:
                raise self._death

    def stop(self) -> None:
        """Stop feeding; what is in the engine is given up."""
        self._stopping.set()
        self._waiting.put(None)
        if self._death is None:
            self._thread.join(timeout=30.0)

    def _until_stopped(self, work: Callable[[], None]) -> None:
        tickets: list[Ticket] = []
        try:
            while not self._stopping.is_set():
                work()
        except Exception as error:  # noqa: BLE001 - the thread's end: whoever waits must hear of it
            self._death = _dead(f"{type(error).__name__}: {error}")
            tickets = [*self._running.values(), *self._drain(block=False)]
        for ticket in tickets:
            if not ticket.answer.cancelled():
                ticket.answer.set_exception(self._death or _dead("it was stopped"))

    def _drain(self, *, block: bool, most: int | None = None) -> list[Ticket]:
        """Take waiting pages out of the queue, `most` at most; with `block`, wait for the first one."""
        taken: list[Ticket] = []
        while most is None or len(taken) < most:
            try:
                ticket = self._waiting.get(block=block and not taken)
            except queue.Empty:
                break
            if ticket is None:
                break
            if not ticket.answer.cancelled():
                taken.append(ticket)
        return taken

    # Page by page

    def _feed(self) -> None:
        for ticket in self._drain(block=not self._running, most=ADDED_BETWEEN_STEPS):
            self._add(ticket)
        if not self._running:
            return
        try:
            outputs = self._llm.llm_engine.step()
        except Exception as error:  # noqa: BLE001 - sorted here: a dead engine, or a page that breaks a step
            self._rescue(error)
            return
        for output in outputs:
            if output.finished and output.request_id in self._running:
                self._finish(self._running.pop(output.request_id), output)

    def _add(self, ticket: Ticket) -> None:
        ticket.attempts += 1
        try:
            added = self._llm.enqueue_chat(
                [ticket.messages],
                [self._make_sampling(**ticket.sampling)],
                use_tqdm=False,
                chat_template_kwargs=dict(self._question.chat_template_kwargs) or None,
            )
        except Exception as error:  # noqa: BLE001 - the page boundary
            self._fail(ticket, error)
            return
        self._running[_external_id(added[0])] = ticket

    def _rescue(self, error: Exception) -> None:
        """After a step that failed in an engine that lives: take all pages out and find the one that did it."""
        if self._is_death(error):
            raise error
        self._llm.llm_engine.abort_request(list(self._running))
        suspects = list(self._running.values())
        self._running.clear()
        self._answer_chunk(suspects)

    # In chunks

    def _feed_chunks(self) -> None:
        chunk = self._drain(block=True, most=self._batch_size)
        if chunk:
            self._answer_chunk(chunk)

    def _answer_chunk(self, chunk: Sequence[Ticket]) -> None:
        for ticket in chunk:
            ticket.attempts += 1
        try:
            outputs = self._llm.chat(
                [ticket.messages for ticket in chunk],
                [self._make_sampling(**ticket.sampling) for ticket in chunk],
                use_tqdm=False,
                chat_template_kwargs=dict(self._question.chat_template_kwargs) or None,
            )
        except Exception as error:
            if self._is_death(error):
                self._running.update({f"chunk-{id(ticket)}": ticket for ticket in chunk})
                raise
            if len(chunk) == 1:
                self._fail(chunk[0], error)
                return
            self._answer_chunk(chunk[: len(chunk) // 2])
            self._answer_chunk(chunk[len(chunk) // 2 :])
            return
        for ticket, output in zip(chunk, outputs, strict=True):
            self._finish(ticket, output)

    # Answers

    def _finish(self, ticket: Ticket, output: Any) -> None:
        completion = output.outputs[0]
        result = result_of_answer(
            completion.text,
            completion.finish_reason,
            tokens=len(completion.token_ids),
            prompt_tokens=len(output.prompt_token_ids or ()),
            attempts=ticket.attempts,
            latency_s=time.monotonic() - ticket.started,
            confidence=_confidence_of(completion),
        )
        if not ticket.answer.cancelled():
            ticket.answer.set_result(result)

    def _fail(self, ticket: Ticket, error: Exception) -> None:
        if self._is_death(error):
            self._running[f"failed-{id(ticket)}"] = ticket
            raise error
        reason = f"{type(error).__name__}: {error}"[:500]
        if not ticket.answer.cancelled():
            ticket.answer.set_result(PageResult(None, "error", error=reason, attempts=ticket.attempts))


def _confidence_of(completion: Any) -> Confidence | None:
    """Read the log probabilities of the chosen tokens, where the sampling asked for them."""
    steps = getattr(completion, "logprobs", None)
    if not steps:
        return None
    return page_confidence([step[token].logprob for step, token in zip(steps, completion.token_ids, strict=True)])


def _dead(how: str) -> EngineError:
    return EngineError(
        f"the engine has died: {how}. Its last words stand above; closed blocks are kept, the same command goes on"
    )


def _external_id(added: str) -> str:
    """Return the id under which outputs come back: newer engines add `-` and eight random characters to it inside."""
    return added.partition("-")[0]
