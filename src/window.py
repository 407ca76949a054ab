"""How many pages may be in flight: a window that grows on evidence, and what bounds a run.

`Rules.decide` is pure: what was known before (`State`), what is seen now (`Observation`) → a `Decision` that names its
rule. `Window` is what the flow holds: pages enter and leave it one by one, and twice a second it is told what is seen.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

TICK_S = 0.5  # how often `Window.observe` is meant to be called
FEWEST_IN_A_ROUND = 64  # answers by which throughput is compared, or those of a minute where they are slower
BYTES_A_PAGE = 8 * 1024**2  # a page in flight, until it is measured
FULL = 0.5  # a window that was full for a smaller share of the time is not what bounds us


@dataclass(frozen=True)
class Bounds:
    """What the window may be. `longest_wait_s`: pages that take longer than this are too many at once."""

    least: int = 1
    most: int = 512
    initial: int = 8
    longest_wait_s: float = 300.0

    def clamp(self, limit: float, memory_pages: int | None = None) -> int:
        """Return the limit within the bounds; the least is kept whatever the memory says."""
        highest = self.most if memory_pages is None else min(self.most, memory_pages)
        return max(self.least, min(int(limit), highest))


@dataclass(frozen=True)
class Observation:
    """What is seen at one tick. `done` and `latency_sum_s` count from the start, failures since the last tick."""

    now: float
    in_flight: int = 0
    ready: int = 0  # prepared pages that wait for a place
    full_share: float = 1.0  # of the time since the last tick in which every place was taken
    done: int = 0
    latency_sum_s: float = 0.0
    tokens: int = 0
    refused: int = 0  # 429 and 503
    timeouts: int = 0
    failed: int = 0  # other 5xx, broken connections
    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None
    preemptions: float | None = None  # counts from the engine's start, as `engine_tokens` does
    engine_tokens: float | None = None
    memory_available: int | None = None  # bytes that pages may still take
    bytes_a_page: float | None = None
    preparing: int = 0  # pages that are being prepared or wait for a thread
    threads: int = 1

    @property
    def memory_pages(self) -> int | None:
        """How many pages in flight the host's memory has room for."""
        if self.memory_available is None:
            return None
        return self.in_flight + int(self.memory_available // max(1.0, self.bytes_a_page or BYTES_A_PAGE))

    @property
    def queue_is_empty(self) -> bool:
        """Whether the gauges say that all we sent is running."""
        return self.waiting == 0 and self.running is not None and self.running >= 0.85 * self.in_flight

    def queue_beyond(self, limit: int) -> float:
        """Return how many pages will wait in the engine once those in flight above the limit are gone."""
        return (self.waiting or 0) - max(0, self.in_flight - limit)


@dataclass(frozen=True)
class State:
    """What the rules remember. `phase`: start (no answer yet), ramp (growing fast), steady, probe (trying more)."""

    limit: int
    phase: str = "start"
    now: float | None = None
    done: int = 0
    latency_sum_s: float = 0.0
    preemptions: float | None = None
    answers: int = 0  # at this tick
    answered_at: float = 0.0  # the last answer
    latency_s: float = 0.0  # of the last two dozen pages
    base_latency_s: float = 0.0  # where the ramp began; 0: not known yet
    first_batch: int = 0
    recent: tuple[tuple[float, int], ...] = ()  # when how many were done, for as long back as a page takes
    # the opening and the ramp
    started: float = 0.0
    stepped_at: float = 0.0
    stepped_done: int = 0
    step: float = 1.0
    token_rate: float = 0.0
    stepped_tokens: float = 0.0
    refused_at: int | None = None  # where the ramp ends, after pages were refused
    quiet_until: float = 0.0
    # the engine's queue
    queued_since: float | None = None
    empty_since: float | None = None
    queue_seen: bool = False
    # the round: as many answers as there were pages in flight at its beginning
    round_at: float = 0.0
    round_done: int = 0
    round_size: int = 0
    round_full_s: float = 0.0
    settling: bool = True  # the round under way still answers pages sent under another limit
    rate: float | None = None  # of the round that ended at this tick
    # steady and probe
    baseline: float | None = None
    settled: int = 0
    fresh: bool = True  # `settled` was reached by growing, so the true knee may be a little above it
    probe_at: float = 0.0
    probe_wait_s: float = 15.0


@dataclass(frozen=True)
class Decision:
    """The new limit, the rule that set it, why, and what to remember."""

    limit: int
    rule: str
    reason: str
    state: State


class Rules:
    """Decide the limit. The first rule that has something to say sets it and names itself.

    Cuts, and what forbids growth:

    1.  `fixed`: least = most; nothing to decide.
    2.  `refused`: pages came back with 429 or 503, timed out, or more than a tenth failed with other 5xx: cut by the
        share of pages concerned, at least a tenth, at most half; then nothing for the time a page takes. The ramp
        back ends at 95 % of where it happened.
    3.  `preempted`: the engine threw running pages out of its KV cache: a tenth fewer than run.
    4.  `memory`: the host has no room for so many pages: down to what it has room for.
    5.  `late`: a page takes longer than `longest_wait_s`: cut in proportion, once in the time that a page takes.
    6.  `silent`: nothing was answered for 5 s and four times what a page takes: hold; it is no evidence of anything.
    7.  `drain`: more in flight than the limit: hold.
    8.  `starved`: the window was full for less than half of the time, so it is not what bounds us: hold.
    9.  `trim`: more than an eighth of the running pages (and 4; 2 when the KV cache is 97 % full) wait in the
        engine for 1.5 s: down to a queue of half of that.
    10. `queue`: pages wait in the engine, but not too many: hold. When that has lasted as long as a page takes, the
        engine is full, and no throughput needs to be measured.

    Growth, while the window is full:

    11. `opening`: no answer yet. Where the gauges say that all we sent is running and nothing waits, double each time
        the age of the run doubles (1 s, 2 s, 4 s …): the slower the pages, the less is lost by waiting. Where the
        engine counts tokens as it makes them, it must make a quarter more a second than before the last doubling.
        Without gauges: wait.
    12. `ramp`: one more for each answer (which doubles the window in the time that a page takes); twice as much at once
        where the gauges say that nothing waits, after half the time a page takes and answers for an eighth of the
        window. It ends (`brake`) when pages take 1.4 times as long as when it began.
        After the engine was full (10) and its queue ran empty, the ramp begins again, with a step of 1/32 that doubles.
    13. `confirm`, `revert`: the verdict on a probe. More in flight paid when a fifth of it arrived as throughput;
        then go on from there, and fall back into the ramp where three fifths arrived. Else go back, to a quarter of
        the step above the place it began from if that was reached by growing: what lies between was not seen.
    14. `probe`: throughput at this limit is known: try 1/8 to double as many. At once while climbing; after a failed
        one in 15 s, 30 s … 240 s; at once when throughput rose by a tenth by itself.
    15. `hold`.

    Throughput is compared over rounds: as many answers as there are pages in flight, at least 32 or a minute long; the
    first round after a change answers what was sent before it, and is left out, as is a round in which the window was
    not full.
    """

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self._rules = (
            *(self._fixed, self._refused, self._preempted, self._memory, self._late, self._silent, self._drain),
            *(self._starved, self._trim, self._queue),
            *(self._opening, self._ramp, self._verdict, self._probe),
        )

    def start(self) -> State:
        """Return the state before the first observation."""
        return State(limit=self.bounds.clamp(self.bounds.initial))

    def decide(self, state: State, seen: Observation) -> Decision:
        """Return what the first rule says that has something to say."""
        state = self._noted(state, seen)
        decisions = (rule(state, seen) for rule in self._rules)
        return next((d for d in decisions if d), None) or self._to(state, seen, state.limit, "hold", "as it was")

    # --- what is remembered ---

    def _noted(self, state: State, seen: Observation) -> State:
        """Take in what is seen, before anything is decided."""
        first = state.now is None
        last = seen.now if state.now is None else state.now
        answers = seen.done - state.done
        if first or (state.phase == "start" and not seen.done and not state.started and seen.in_flight):
            state = replace(state, started=seen.now, stepped_at=seen.now, answered_at=seen.now)
        if answers > 0:
            mean_s = (seen.latency_sum_s - state.latency_sum_s) / answers
            weight = answers / (answers + 16) if state.latency_s else 1.0
            state = replace(
                state, latency_s=state.latency_s + weight * (mean_s - state.latency_s), answered_at=seen.now
            )
        if state.phase == "start" and seen.done:
            state = replace(state, phase="ramp", first_batch=max(1, seen.in_flight), step=1.0)
        if not state.base_latency_s and state.first_batch and seen.done >= state.first_batch:
            state = replace(state, base_latency_s=seen.latency_sum_s / seen.done)
        state = replace(
            state,
            now=seen.now,
            done=seen.done,
            answers=answers,
            recent=_pruned(state.recent, seen, max(2.0, state.base_latency_s)),
            latency_sum_s=seen.latency_sum_s,
            queued_since=(state.queued_since or seen.now) if seen.waiting else None,
            empty_since=(state.empty_since or seen.now) if seen.queue_is_empty else None,
            round_full_s=state.round_full_s + (seen.now - last) * seen.full_share,
        )
        return self._round(state, seen)

    def _round(self, state: State, seen: Observation) -> State:
        """End the round if it is complete; `rate` is that of a round that ended just now and says something."""
        took = seen.now - state.round_at
        answers = seen.done - state.round_done
        if not state.round_size or took <= 0:
            return _new_round(state, seen)
        if answers < max(state.round_size, 8) or (answers < FEWEST_IN_A_ROUND and took < 90):
            return replace(state, rate=None)
        counts = not state.settling and state.round_full_s >= 0.8 * took
        rate = answers / took if counts else None
        return replace(_new_round(state, seen, settling=False), rate=rate)

    # --- the rules ---

    def _to(self, state: State, seen: Observation, limit: float, rule: str, reason: str) -> Decision:
        """Return a decision for a limit, kept within all bounds; a limit that changes begins a new round."""
        new = self.bounds.clamp(limit, seen.memory_pages)
        if new != state.limit:
            state = replace(_new_round(state, seen), limit=new)
        return Decision(new, rule, reason, replace(state, preemptions=seen.preemptions))

    def _hold(self, state: State, seen: Observation, rule: str, reason: str) -> Decision:
        """Stay, and let the round begin anew: what happens now is no evidence."""
        return self._to(_new_round(state, seen), seen, state.limit, rule, reason)

    def _fixed(self, state: State, seen: Observation) -> Decision | None:
        if self.bounds.least < self.bounds.most:
            return None
        return self._to(state, replace(seen, memory_available=None), self.bounds.least, "fixed", "the window is fixed")

    def _refused(self, state: State, seen: Observation) -> Decision | None:
        answers = seen.refused + seen.timeouts + seen.failed + max(1, seen.in_flight) // 2
        bad = seen.refused + seen.timeouts + (seen.failed if seen.failed > max(2, answers / 10) else 0)
        if not bad:
            return None
        if seen.now < state.quiet_until:
            return self._hold(state, seen, "refused", f"{bad} more pages refused; the cut has yet to take effect")
        there = min(state.limit, max(1, seen.in_flight))
        share = min(0.5, max(0.1, bad / max(1, seen.in_flight)))
        storm = state.refused_at is not None and seen.now < state.quiet_until + 2 * _pause_s(state)
        state = replace(
            state,
            phase="start" if state.phase == "start" else "ramp",
            step=1.0,
            refused_at=state.refused_at if storm else max(1, int(0.95 * there)),
            quiet_until=seen.now + _pause_s(state),
            queue_seen=False,
            probe_wait_s=min(240.0, 2 * state.probe_wait_s),
        )
        what = f"{seen.refused} refused, {seen.timeouts} timed out, {seen.failed} failed"
        return self._to(state, seen, min(state.limit, int(there * (1 - share))), "refused", what)

    def _preempted(self, state: State, seen: Observation) -> Decision | None:
        if seen.preemptions is None or state.preemptions is None or seen.preemptions <= state.preemptions:
            return None
        if seen.now < state.quiet_until:
            return self._hold(state, seen, "preempted", "preempted again; the cut has yet to take effect")
        limit = min(state.limit, int(0.9 * (seen.running or seen.in_flight)))
        state = replace(self._settle(state, limit, seen.now + 60), quiet_until=seen.now + _pause_s(state))
        return self._to(state, seen, limit, "preempted", "the KV cache is too small for so many pages")

    def _memory(self, state: State, seen: Observation) -> Decision | None:
        if seen.memory_pages is None or state.limit <= max(self.bounds.least, seen.memory_pages):
            return None
        return self._to(state, seen, seen.memory_pages, "memory", f"room for {seen.memory_pages} pages on this host")

    def _late(self, state: State, seen: Observation) -> Decision | None:
        if state.latency_s <= self.bounds.longest_wait_s or seen.now < state.quiet_until:
            return None
        limit = 0.9 * state.limit * self.bounds.longest_wait_s / state.latency_s
        state = replace(
            self._settle(state, int(limit), seen.now + state.latency_s), quiet_until=seen.now + state.latency_s
        )
        return self._to(state, seen, limit, "late", f"a page takes {state.latency_s:.0f} s")

    def _silent(self, state: State, seen: Observation) -> Decision | None:
        silence_s = seen.now - state.answered_at
        if state.phase == "start" or silence_s <= max(5.0, 4 * state.latency_s):
            return None
        return self._hold(state, seen, "silent", f"no answer for {silence_s:.0f} s")

    def _drain(self, state: State, seen: Observation) -> Decision | None:
        if seen.in_flight <= state.limit:
            return None
        return self._hold(state, seen, "drain", f"{seen.in_flight} in flight, {state.limit} wanted")

    def _starved(self, state: State, seen: Observation) -> Decision | None:
        if seen.full_share >= FULL:
            return None
        return self._hold(state, seen, "starved", f"{seen.in_flight} of {state.limit} places taken")

    def _trim(self, state: State, seen: Observation) -> Decision | None:
        if state.phase == "start" or not seen.waiting or seen.now - (state.queued_since or seen.now) < 1.5:
            return None
        most = 2.0 if (seen.kv_usage or 0) >= 0.97 else max(4.0, (seen.running or 0) / 8)
        queue = seen.queue_beyond(state.limit)
        if queue <= most:
            return None
        limit = state.limit - int(queue - most / 2)
        state = replace(self._settle(state, limit, seen.now + 15), queue_seen=True, step=1 / 32)
        return self._to(state, seen, limit, "trim", f"{queue:.0f} pages wait in the engine")

    def _queue(self, state: State, seen: Observation) -> Decision | None:
        if state.phase == "start" or not seen.waiting:
            return None
        if seen.now - (state.queued_since or seen.now) >= max(2.0, state.latency_s):
            state = replace(self._settle(state, state.limit, seen.now + 15), queue_seen=True, step=1 / 32)
        return self._to(state, seen, state.limit, "queue", f"{seen.waiting:.0f} pages wait in the engine")

    def _opening(self, state: State, seen: Observation) -> Decision | None:
        if state.phase != "start":
            return None
        age_s, since_s = seen.now - state.started, seen.now - state.stepped_at
        if not seen.queue_is_empty or age_s < 1 or since_s < age_s / 2:
            return self._to(state, seen, state.limit, "opening", "no page was answered yet")
        made = (seen.engine_tokens or 0.0) - state.stepped_tokens
        if made and made / since_s < 1.25 * state.token_rate:
            return self._to(state, seen, state.limit, "opening", "more pages do not make more tokens")
        state = replace(state, token_rate=made / since_s, stepped_tokens=seen.engine_tokens or 0.0)
        return self._to(_stepped(state, seen), seen, 2 * state.limit, "opening", "all pages run, none waits")

    def _ramp(self, state: State, seen: Observation) -> Decision | None:
        emptied = state.queue_seen and state.empty_since is not None and seen.now - state.empty_since >= 2
        if state.phase == "steady" and emptied and seen.now >= state.quiet_until:
            state = replace(state, phase="ramp", base_latency_s=state.latency_s)
        if state.phase != "ramp":
            return None
        if state.base_latency_s and state.latency_s > 1.5 * state.base_latency_s and len(state.recent) > 1:
            reason = f"a page takes {state.latency_s:.1f} s, {state.base_latency_s:.1f} s when the ramp began"
            (then, done), *_ = state.recent
            needed = 1.5 * state.base_latency_s * (seen.done - done) / (seen.now - then)
            limit = min(state.limit, 1 + int(needed))
            return self._to(self._settle(state, limit, seen.now, step=0.5), seen, limit, "brake", reason)
        if state.refused_at is not None and state.limit >= state.refused_at:
            state = self._settle(state, state.limit, seen.now + state.probe_wait_s)
            return self._to(
                replace(state, refused_at=None), seen, state.limit, "brake", "pages were refused above this"
            )
        if seen.now < state.quiet_until:
            return self._to(state, seen, state.limit, "hold", "after a cut")
        limit, reason = self._grown(state, seen)
        if limit > state.limit and reason == "none waits":
            state = _stepped(replace(state, step=min(1.0, 2 * state.step)), seen)
        return self._to(state, seen, min(limit, state.refused_at or limit), "ramp", reason)

    def _grown(self, state: State, seen: Observation) -> tuple[int, str]:
        since_s = seen.now - state.stepped_at
        answers = seen.done - state.stepped_done
        if seen.queue_is_empty and since_s >= max(1.0, state.latency_s / 2) and answers >= state.limit / 8:
            return state.limit + max(1, int(state.step * state.limit)), "none waits"
        if state.queue_seen:
            return state.limit, "the queue was full a while ago"
        more = state.answers * (2 if state.base_latency_s else 1)
        return state.limit + min(state.limit, more), "answers"

    def _verdict(self, state: State, seen: Observation) -> Decision | None:
        if state.phase != "probe" or state.rate is None or state.baseline is None:
            return None
        more = state.limit / state.settled - 1
        gain = state.rate / state.baseline - 1
        reason = f"{100 * more:.0f} % more in flight, {100 * gain:.0f} % more throughput"
        needed = max(0.05, 0.2 * more)
        if gain >= needed:
            grown = replace(
                self._settle(state, state.limit, seen.now, step=min(1.0, 2 * state.step)),
                baseline=state.rate,
                probe_wait_s=15.0,
            )
            if gain >= 0.6 * more:
                grown = replace(grown, phase="ramp", base_latency_s=state.latency_s, step=1.0)
            return self._to(grown, seen, state.limit, "confirm", reason)
        back = int(state.settled * (1 + needed) + 1) if state.fresh else state.settled
        wait_s = max(state.probe_wait_s, 4 * state.latency_s)
        state = self._settle(state, back, seen.now + wait_s, step=max(0.125, state.step / 2))
        state = replace(state, fresh=False, probe_wait_s=min(240.0, 2 * state.probe_wait_s))
        return self._to(state, seen, back, "revert", reason)

    def _probe(self, state: State, seen: Observation) -> Decision | None:
        if state.phase != "steady":
            return None
        if state.rate is not None:
            jumped = state.baseline is not None and state.rate > 1.1 * state.baseline
            state = replace(state, baseline=state.rate, probe_at=seen.now if jumped else state.probe_at)
        limit = self.bounds.clamp(max(state.limit + 1, state.limit * (1 + state.step)), seen.memory_pages)
        if state.baseline is None or seen.now < state.probe_at or limit <= state.limit or state.queue_seen:
            return self._to(state, seen, state.limit, "hold", "throughput does not grow with more in flight")
        return self._to(replace(state, phase="probe"), seen, limit, "probe", "is there more to be had?")

    def _settle(self, state: State, limit: int, probe_at: float, step: float = 0.25) -> State:
        """Return the state of a window that has found its place, until the next probe."""
        settled = self.bounds.clamp(limit)
        return replace(state, phase="steady", settled=settled, fresh=True, baseline=None, step=step, probe_at=probe_at)


def _new_round(state: State, seen: Observation, settling: bool = True) -> State:
    return replace(
        state,
        round_at=seen.now,
        round_done=seen.done,
        round_size=max(1, seen.in_flight),
        round_full_s=0.0,
        settling=settling,
        rate=None,
    )


def _pruned(recent: tuple[tuple[float, int], ...], seen: Observation, span_s: float) -> tuple[tuple[float, int], ...]:
    recent = (*recent, (seen.now, seen.done))
    while len(recent) > 2 and recent[1][0] <= seen.now - span_s:
        recent = recent[1:]
    return recent


def _stepped(state: State, seen: Observation) -> State:
    return replace(state, stepped_at=seen.now, stepped_done=seen.done)


def _pause_s(state: State) -> float:
    return min(30.0, max(1.0, state.latency_s))


class Gate:
    """So many places and no more, given in the order of asking. Fewer places take none away from those inside."""

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
        if self.taken >= self.places or any(not ticket.done() for ticket in self._line):
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
            if ticket.done() and not ticket.cancelled():  # the place was given at the moment of the cancellation
                self.leave()
            raise

    def leave(self) -> None:
        """Give a place back."""
        self.taken -= 1
        self._admit()

    def resize(self, places: int) -> None:
        """Change the number of places; who can come in does so at once."""
        self.places = places
        self._admit()

    def _admit(self) -> None:
        while self._line and (self._line[0].done() or self.taken < self.places):
            ticket = self._line.popleft()
            if not ticket.done():
                self.taken += 1
                ticket.set_result(None)


class Window:
    """The pages in flight: `acquire` and `release` around each, `observe` twice a second, `trouble` where one fails."""

    def __init__(self, bounds: Bounds, clock: Callable[[], float] = time.monotonic) -> None:
        self.rules = Rules(bounds)
        self.state = self.rules.start()
        self.gate = Gate(self.state.limit)
        self._clock = clock
        self._done = self._tokens = 0
        self._latency_sum_s = 0.0
        self._trouble: Counter[str] = Counter()
        self._looked_at = self._full_since = clock()
        self._full_s = 0.0

    @property
    def limit(self) -> int:
        return self.gate.places

    @property
    def in_flight(self) -> int:
        return self.gate.taken

    def try_acquire(self) -> float | None:
        self._mark()
        return self._clock() if self.gate.try_enter() else None

    def release(self, since: float, answered: bool = True, tokens: int = 0) -> None:
        self._mark()
        if answered:
            self._done += 1
            self._tokens += tokens
            self._latency_sum_s += self._clock() - since
        self.gate.leave()

    def trouble(self, kind: str) -> None:
        self._trouble[kind] += 1

    def _mark(self) -> None:
        now = self._clock()
        if self.gate.taken >= self.gate.places:
            self._full_s += now - self._full_since
        self._full_since = now

    def observe(self, **more):
        self._mark()
        now = self._clock()
        took = now - self._looked_at
        seen = Observation(
            now=now,
            in_flight=self.gate.taken,
            ready=self.gate.waiting,
            full_share=self._full_s / took if took > 0 else 1.0,
            done=self._done,
            latency_sum_s=self._latency_sum_s,
            tokens=self._tokens,
            refused=self._trouble["refused"],
            timeouts=self._trouble["timeout"],
            failed=self._trouble["failed"],
            **more,
        )
        self._looked_at, self._full_s = now, 0.0
        self._trouble.clear()
        d = self.rules.decide(self.state, seen)
        self.state = d.state
        self.gate.resize(d.limit)
        return d
