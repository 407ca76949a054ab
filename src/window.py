"""How many pages may be in flight: a window that grows on evidence.

`Window` is what the flow holds: pages enter and leave it, and twice a second it is told what is seen, asks the rules,
and changes its size.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from typing import Any

from .gauges import Gauges
from .window_rules import Bounds, Decision, Observation, Rules, bounded_by

TICK_S = 0.5  # how often `Window.observe` is meant to be called


class Gate:
    """So many places and no more, given in the order of asking. Fewer places take none from those inside."""

    def __init__(self, places: int) -> None:
        self.places = places
        self.taken = 0
        self._line: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        """How many stand in line."""
        return sum(not ticket.done() for ticket in self._line)

    def try_enter(self) -> bool:
        """Take a place if there is one and nobody stands in line."""
        if self.taken >= self.places or self.waiting:
            return False
        self.taken += 1
        return True

    async def enter(self) -> None:
        """Take a place, in the order of asking."""
        if self.try_enter():
            return
        ticket: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append(ticket)
        try:
            await ticket
        except asyncio.CancelledError:
            if ticket.done() and not ticket.cancelled():  # the place was given just before the cancellation
                self.leave()
            raise

    def leave(self) -> None:
        """Give a place back."""
        self.taken -= 1
        self._admit()

    def resize(self, places: int) -> None:
        """Change the number of places; those who can come in now do."""
        self.places = places
        self._admit()

    def _admit(self) -> None:
        while self._line and (self._line[0].done() or self.taken < self.places):
            ticket = self._line.popleft()
            if not ticket.done():
                self.taken += 1
                ticket.set_result(None)


class Window:
    """The pages in flight: `acquire` and `release` around each, `trouble` for each failed try, `observe` every tick.

    `ahead` is a second gate, for the pages that are prepared or in flight: as many as the window plus `ahead`.
    """

    def __init__(self, bounds: Bounds, ahead: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self.rules = Rules(bounds)
        self.seconds_bound: defaultdict[str, float] = defaultdict(float)  # what bounded the run, and for how long
        self._state = self.rules.start()
        self._gate = Gate(self._state.limit)
        self._ahead = ahead
        self.ahead = Gate(self._state.limit + ahead)
        self._clock = clock
        self._begun = self._looked_at = self._marked_at = clock()
        self._full_s = 0.0
        self._done = self._tokens = 0
        self._latency_sum_s = 0.0
        self._first = _FirstPages()
        self._troubles: Counter[str] = Counter()

    @property
    def limit(self) -> int:
        """How many pages may be in flight now."""
        return self._gate.places

    @property
    def in_flight(self) -> int:
        """How many are; more than the limit for a while after a cut."""
        return self._gate.taken

    async def acquire(self) -> float:
        """Wait for a place, in the order of asking; return the time, for `release`."""
        self._mark()
        await self._gate.enter()
        self._mark()
        return self._clock()

    def try_acquire(self) -> float | None:
        """Take a place at once, or return None."""
        self._mark()
        return self._clock() if self._gate.try_enter() else None

    def release(self, since: float, answered: bool = True, tokens: int = 0) -> None:
        """Give the place back that was got at `since`; `answered`: whether the engine worked for it."""
        self._mark()
        latency_s = self._clock() - since
        if answered:
            self._first.note_answer(since + latency_s, self._gate.taken)
            self._done += 1
            self._tokens += tokens
            self._latency_sum_s += latency_s
        self._first.note_end(since, latency_s)
        self._gate.leave()

    def trouble(self, kind: str) -> None:
        """Count a try that failed: `refused` (429, 503), `timeout` or `failed` (other 5xx, broken connections)."""
        self._troubles[kind] += 1

    def observe(
        self,
        gauges: Gauges | None = None,
        memory_available: int | None = None,
        bytes_a_page: float | None = None,
        preparing: int = 0,
        threads: int = 1,
        rows_left: int | None = None,
    ) -> dict[str, Any]:
        """Look, decide, and return the decision as telemetry for JSON."""
        self._mark()
        now = self._clock()
        passed_s = now - self._looked_at
        seen = Observation(
            now=now,
            in_flight=self._gate.taken,
            ready=self._gate.waiting,
            full_share=min(1.0, self._full_s / passed_s) if passed_s > 0 else 1.0,
            done=self._done,
            latency_sum_s=self._latency_sum_s,
            first_latency_s=self._first.latency_s,
            tokens=self._tokens,
            refused=self._troubles["refused"],
            timeouts=self._troubles["timeout"],
            failed=self._troubles["failed"],
            gauges=gauges or Gauges(),
            memory_available=memory_available,
            bytes_a_page=bytes_a_page,
            preparing=preparing,
            threads=threads,
            rows_left=rows_left,
        )
        decision = self.rules.decide(self._state, seen)
        bound = bounded_by(decision, seen, self.rules.bounds)
        self.seconds_bound[bound] += passed_s
        self._state, self._looked_at, self._full_s = decision.state, now, 0.0
        self._troubles.clear()
        self._gate.resize(decision.limit)
        self.ahead.resize(decision.limit + self._ahead)
        return telemetry(decision, seen, bound, now - self._begun)

    def _mark(self) -> None:
        """Add the time since the last change to that in which every place was taken."""
        now = self._clock()
        self._full_s += (now - self._marked_at) * (self._gate.taken >= self._gate.places)
        self._marked_at = now


class _FirstPages:
    """The pages sent before the first answer: how long they took says how fast the engine is without a crowd."""

    def __init__(self) -> None:
        self._answer_at: float | None = None
        self._sent = self._ended = 0
        self._latency_sum_s = 0.0

    def note_answer(self, now: float, in_flight: int) -> None:
        if self._answer_at is None:
            self._answer_at, self._sent = now, in_flight

    def note_end(self, since: float, latency_s: float) -> None:
        if self._answer_at is not None and since < self._answer_at:
            self._ended += 1
            self._latency_sum_s += latency_s

    @property
    def latency_s(self) -> float | None:
        """Their mean latency; None before nine in ten have ended."""
        return self._latency_sum_s / self._ended if self._ended and self._ended >= 0.9 * self._sent else None


def fixed_window(places: int, ahead: int = 0) -> Window:
    """Return a window that stays as it is."""
    return Window(Bounds(least=places, most=places, initial=places), ahead)


def telemetry(decision: Decision, seen: Observation, bound: str, age_s: float) -> dict[str, Any]:
    """Return a decision, what was seen, and what bounds the run, as one JSON line of the telemetry file."""
    return {
        "at_s": round(age_s, 2),
        "limit": decision.limit,
        "rule": decision.rule,
        "reason": decision.reason,
        "bounded_by": bound,
        "phase": decision.state.phase,
        "in_flight": seen.in_flight,
        "ready": seen.ready,
        "preparing": seen.preparing,
        "full_share": round(seen.full_share, 3),
        "done": seen.done,
        "tokens": seen.tokens,
        "latency_s": round(decision.state.latency_s, 3),
        "refused": seen.refused,
        "timeouts": seen.timeouts,
        "failed": seen.failed,
        "running": seen.gauges.running,
        "waiting": seen.gauges.waiting,
        "kv_usage": seen.gauges.kv_usage,
        "preemptions": seen.gauges.preemptions,
        "memory_pages": seen.memory_pages,
    }
