"""Threads for work that can't be interrupted: one that takes too long is given up, and another thread takes its place.

Pillow decodes a picture in one call, which nothing can stop. The thread of such a call is left to itself: it ends
with the call, and the process does not wait for it. So a picture may take a core for a while, but never the run.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from .errors import JobError

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
