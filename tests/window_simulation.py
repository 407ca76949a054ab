"""An engine, its client and a clock, simulated: the real `Window` decides, and no time passes.

An engine has slots; the pages in them progress at a speed that depends on how many they are; a page that is finished
leaves its slot no faster than the ceiling allows. Pages beyond the slots wait, in order. Faults are functions of time.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from src.gauges import Gauges
from src.window import TICK_S, Window
from src.window_rules import Bounds

GAUGES_EVERY_S = 1.0


@dataclass
class Model:
    """An engine. `ceiling` is in pages/s, 0 for none.

    Above `knee` pages at once, they share what `knee` pages have; with `half`, so many pages halve each other's speed.
    `spread` is that of a page's work. `refuses` names the trouble that every request meets, `refuse_above` how many
    requests the server holds before it refuses; what it refused is asked again.
    """

    slots: int
    seconds_a_page: float
    ceiling: float = 0.0
    knee: float = 0.0
    half: float = 0.0
    spread: float = 0.2
    tokens_a_page: float = 0.0
    refuse_above: int = 0
    delay_s: float = 0.03
    frozen: bool = False
    refuses: str = ""
    gauges: bool = True
    preemptions: float | None = None

    def speed(self, running: int) -> float:
        """Return how fast one of so many running pages progresses, 1 being alone."""
        if self.frozen:
            return 0.0
        shared = min(1.0, self.knee / running) if self.knee and running else 1.0
        return shared / (1 + running / self.half) if self.half else shared

    def most_per_s(self) -> float:
        """Return the pages a second it makes when there is always one waiting."""
        by_slots = self.slots * self.speed(self.slots) / self.seconds_a_page
        return min(by_slots, self.ceiling) if self.ceiling else by_slots


@dataclass
class Course:
    """What happened in a simulated run."""

    finished: list[float] = field(default_factory=list)
    limits: list[tuple[float, int]] = field(default_factory=list)
    decisions: list[dict[str, Any]] = field(default_factory=list)
    first_s: float = 0.0
    most_waiting: int = 0

    def rate(self, since_s: float, until_s: float) -> float:
        """Return the pages a second delivered in a stretch of time."""
        return sum(since_s <= at < until_s for at in self.finished) / (until_s - since_s)

    def seconds_to(self, rate: float, over_s: float) -> float:
        """Return how long after the first answer `rate` was delivered over a stretch of `over_s`."""
        window: deque[float] = deque()
        for at in self.finished:
            window.append(at)
            while window[0] <= at - over_s:
                window.popleft()
            if len(window) >= rate * over_s:
                return max(0.0, at - self.finished[0])
        return float("inf")

    def limits_in(self, since_s: float, until_s: float) -> list[int]:
        """Return the limits of a stretch of time."""
        return [limit for at, limit in self.limits if since_s <= at < until_s]

    def amplitude(self, since_s: float, until_s: float) -> float:
        """Return how far the limit moved, relative to its mean."""
        limits = self.limits_in(since_s, until_s)
        return (max(limits) - min(limits)) / (sum(limits) / len(limits))

    def rules(self, since_s: float = 0.0, until_s: float = float("inf")) -> set[str]:
        """Return which rules decided."""
        return {d["rule"] for (at, _), d in zip(self.limits, self.decisions, strict=True) if since_s <= at < until_s}


class Simulation:
    """A run: `supply` pages a second are prepared, at most `ahead` of them ahead; `script` changes the engine."""

    def __init__(
        self,
        model: Model,
        bounds: Bounds | None = None,
        *,
        supply: float = 0.0,
        ahead: int = 4,
        script: tuple[tuple[float, Callable[[Model], None]], ...] = (),
        memory: Callable[[int], int] | None = None,
        seed: int = 0,
    ) -> None:
        self.now = 0.0
        self.model = model
        self.window = Window(bounds or Bounds(), clock=lambda: self.now)
        self.course = Course()
        self._supply = supply
        self._ahead = ahead
        self._memory = memory
        self._dice = random.Random(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._running: list[tuple[float, int, float]] = []  # (attained service at its end, number, acquired at)
        self._waiting: deque[float] = deque()
        self._leaving = 0
        self._attained = 0.0
        self._attained_at = 0.0
        self._next_turn = 0.0
        self._finish_plan = 0
        self._ready = 0.0
        self._read_at = float("-inf")
        self._read: Gauges | None = None
        self._tokens = 0.0
        for at, change in script:
            self._later(at, lambda change=change: self._change(change))  # type: ignore[misc]

    # --- the clock ---

    def _later(self, at: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at, next(self._numbers), what))

    def run(self, seconds: float) -> Course:
        """Let the time pass."""
        if not self._supply:
            self._send()
        else:
            self._later(1 / self._supply, self._prepared)
        self._later(TICK_S, self._tick)
        while self._events and self._events[0][0] <= seconds:
            self.now, _, what = heapq.heappop(self._events)
            what()
        return self.course

    # --- the client ---

    def _prepared(self) -> None:
        self._ready = min(self._ahead, self._ready + 1)
        self._send()
        self._later(self.now + 1 / self._supply, self._prepared)

    def _send(self) -> None:
        while not self._supply or self._ready >= 1:
            since = self.window.try_acquire()
            if since is None:
                return
            self._ready -= 1 if self._supply else 0
            self._ask(since)

    def _ask(self, since: float) -> None:
        self._later(self.now + self.model.delay_s, lambda: self._arrive(since))

    def _tick(self) -> None:
        if self.model.gauges and self.now - self._read_at >= GAUGES_EVERY_S - 1e-6:
            self._read_at = self.now
            self._progress()
            running = len(self._running) + self._leaving
            self._read = Gauges(
                running=running,
                waiting=len(self._waiting),
                kv_usage=running / self.model.slots,
                preemptions=self.model.preemptions,
                made_tokens=self._tokens if self.model.tokens_a_page else None,
            )
        elif not self.model.gauges:
            self._read = None
        room = self._memory(self.window.in_flight) if self._memory else None
        self.course.decisions.append(self.window.observe(self._read, room, bytes_a_page=1.0))
        self.course.limits.append((self.now, self.window.limit))
        self._send()
        self._later(self.now + TICK_S, self._tick)

    # --- the engine ---

    def _change(self, change: Callable[[Model], None]) -> None:
        self._progress()
        change(self.model)
        self._admit()

    def _arrive(self, since: float) -> None:
        above = self.model.refuse_above
        if self.model.refuses or (above and len(self._running) + self._leaving + len(self._waiting) >= above):
            self.window.trouble(self.model.refuses or "refused")
            self._later(self.now + self._dice.uniform(0.2, 1.0), lambda: self._ask(since))
            return
        self._waiting.append(since)
        self._admit()

    def _progress(self) -> None:
        speed = self.model.speed(len(self._running))
        gained = (self.now - self._attained_at) * speed
        self._attained += gained
        self._tokens += gained * len(self._running) * self.model.tokens_a_page / self.model.seconds_a_page
        self._attained_at = self.now

    def _admit(self) -> None:
        self._progress()
        while self._waiting and len(self._running) + self._leaving < self.model.slots:
            work = self.model.seconds_a_page * self._share_of_work()
            heapq.heappush(self._running, (self._attained + work, next(self._numbers), self._waiting.popleft()))
        self.course.most_waiting = max(self.course.most_waiting, len(self._waiting))
        self._plan()

    def _share_of_work(self) -> float:
        """Return how long a page is, the mean being 1: up to 0.5 of spread evenly, beyond that with a long tail."""
        spread = self.model.spread
        if spread <= 0.5:
            return 1 + spread * self._dice.uniform(-1, 1)
        return self._dice.gammavariate(1 / spread**2, spread**2)

    def _plan(self) -> None:
        """Say when the next running page ends, at the speed of now."""
        self._finish_plan += 1
        speed = self.model.speed(len(self._running))
        if self._running and speed:
            plan = self._finish_plan
            at = self.now + max(0.0, self._running[0][0] - self._attained) / speed
            self._later(at, lambda: self._end(plan))

    def _end(self, plan: int) -> None:
        if plan != self._finish_plan:
            return
        self._progress()
        _, _, since = heapq.heappop(self._running)
        if self.model.ceiling:
            self._leaving += 1
            turn = max(self.now, self._next_turn)
            self._next_turn = turn + 1 / self.model.ceiling
            self._later(turn, lambda: self._left(since))
        else:
            self._answer(since)
        self._admit()

    def _left(self, since: float) -> None:
        self._leaving -= 1
        self._answer(since)
        self._admit()

    def _answer(self, since: float) -> None:
        self.course.finished.append(self.now)
        self.window.release(since)
        self._send()


def becomes(**changes: Any) -> Callable[[Model], None]:
    """Return a line of a script: from then on the engine has these values."""

    def change(model: Model) -> None:
        for name, value in changes.items():
            assert hasattr(model, name), name
            setattr(model, name, value)

    return change
