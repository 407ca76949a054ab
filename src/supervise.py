"""The watchdog of a server: notices that it died or froze, starts it again, has the lost pages asked again.

1. gone: its process has ended, or it says itself that its engine is dead. Noticed at once.
2. frozen: for `stall_timeout_s` no token was generated and no page answered while pages were in flight, or its API
   did not answer at all. Where tokens can't be counted, patience is three times the slowest answer, if that is more.
3. restart: the process group is killed, and after a pause the server is started at the same address, at most
   `max_restarts` times in a run; it must pass the canary again.
4. strike: every page that was asked of the server that died and had no result gets one.
5. alone: pages with two strikes are then asked one by one, with nothing else in flight.
6. quarantine: a page with which the server dies even then becomes an error row.

A server that is not ours is only watched: it is named when it freezes, and waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .ask import Visit
from .errors import EngineError
from .gauges import metrics_url, parse_gauges
from .report import duration, say
from .serve import Server
from .web import fetch

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
