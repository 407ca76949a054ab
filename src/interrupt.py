"""Ctrl-C, SIGTERM and SIGHUP: the first ends the run in order, the second at once."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

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
