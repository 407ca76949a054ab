"""The rules of the window: what is remembered and what is seen make a decision that names its rule.

All of it is pure. Throughput is what counts; latency, the engine's gauges and its refusals are signs on the way.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from .gauges import Gauges

ROUND_ANSWERS = 96  # throughput is compared over so many answers,
ROUND_S = 90.0  # or those of so long a time, where they are slower
PROBE_AFTER_S = 15.0
CROWDED = 6  # times the latency of the first pages: more in flight must bring much more than noise
PROBE_WAIT_S = 240.0  # the longest time between two probes
UNMEASURED_PAGE_BYTES = 8 * 1024**2  # a page in flight, until it is measured


@dataclass(frozen=True)
class Bounds:
    """What the window may be. Where a page takes longer than `longest_wait_s`, too many are in flight."""

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
    """What is seen at one tick. Answers, their time and tokens count from the start, troubles from the last tick."""

    now: float
    in_flight: int = 0
    ready: int = 0  # prepared pages that wait for a place
    full_share: float = 1.0  # of the time since the last tick in which every place was taken
    done: int = 0
    latency_sum_s: float = 0.0
    first_latency_s: float | None = None  # of the pages sent before the first answer, once nine in ten are answered
    tokens: int = 0
    refused: int = 0  # 429 and 503
    timeouts: int = 0
    failed: int = 0  # other 5xx, broken connections
    gauges: Gauges = field(default_factory=Gauges)
    memory_available: int | None = None  # bytes that pages may still take
    bytes_a_page: float | None = None
    preparing: int = 0  # pages in the hands of the threads that prepare, or waiting for one
    threads: int = 1
    rows_left: int | None = None  # rows that nobody has begun with

    @property
    def memory_pages(self) -> int | None:
        """How many pages in flight the host's memory has room for."""
        if self.memory_available is None:
            return None
        return self.in_flight + int(self.memory_available // max(1.0, self.bytes_a_page or UNMEASURED_PAGE_BYTES))

    @property
    def is_full(self) -> bool:
        """Whether the window is what bounds us: every place was taken for at least half of the time."""
        return self.full_share >= 0.5

    @property
    def queue_is_empty(self) -> bool:
        """Whether the gauges say that what we sent is running."""
        running = self.gauges.running
        return self.gauges.waiting == 0 and running is not None and running >= 0.85 * self.in_flight


@dataclass(frozen=True)
class WindowState:
    """What the rules remember. `phase`: start (the first pages are out), ramp (growing fast), steady, probe."""

    limit: int
    phase: str = "start"
    now: float | None = None
    # answers
    done: int = 0
    answers: int = 0  # at this tick
    answered_at: float = 0.0
    latency_sum_s: float = 0.0
    latency_s: float = 0.0  # of the last pages, some sixteen
    base_latency_s: float = 0.0  # when the ramp began
    first_latency_s: float = 0.0  # of the first pages: the engine without a crowd
    preemptions: float | None = None
    # opening and ramp: the last step
    started: float | None = None
    stepped_at: float = 0.0
    stepped_done: int = 0
    stepped_tokens: float = 0.0
    token_rate: float = 0.0
    step: float = 1.0
    # cuts
    quiet_until: float = 0.0
    refused_at: int | None = None  # pages were refused above it: the ramp ends there
    # the engine's queue
    queued_since: float | None = None
    dry_since: float | None = None  # nothing waits
    empty_since: float | None = None  # nothing waits, and what we sent is running
    queue_seen: bool = False  # the engine was full, and that bounds us, not a lack of throughput
    # the round under way, and the throughput of one that ended at this tick
    round_at: float = 0.0
    round_done: int = 0
    round_size: int = 0
    round_full_s: float = 0.0
    settling: bool = True  # it still answers pages sent under another limit
    rate: float | None = None
    # steady and probe
    settled: int = 0
    fresh: bool = True  # reached by growing, so that the knee may lie a little above
    overshot: bool = False  # fewer may be enough: a ramp was braked here, or a climb has ended
    climbed: bool = False  # a probe was confirmed since the last that failed
    baseline: float | None = None  # throughput at `settled`
    probe_at: float = 0.0
    probe_wait_s: float = PROBE_AFTER_S


@dataclass(frozen=True)
class Decision:
    """The new limit, the rule that set it, why, and what to remember."""

    limit: int
    rule: str
    reason: str
    state: WindowState


class Rules:
    """Decide the limit. The first rule that has something to say sets it and names itself.

    Cuts, and what forbids growth:

    1.  `fixed`: least = most, nothing to decide.
    2.  `refused`: pages came back with 429 or 503, timed out, or more than a tenth of them with other 5xx: cut by the
        share that did, at least a tenth, at most half; then no further cut for the time a page takes. The ramp back
        ends where it happened.
    3.  `preempted`: the engine threw running pages out of its KV cache: a tenth fewer than run.
    4.  `memory`: down to what the host has room for.
    5.  `silent`: no answer for 5 s and four times what a page takes: hold; it is no evidence of anything.
    6.  `drain`: more in flight than the limit: hold.
    7.  `starved`: the window was full for less than half of the time, so it isn't what bounds us: hold.
    8.  `late`: a page takes longer than `longest_wait_s`, or will when so many are in flight and no more are answered
        than now: cut in proportion.
    9.  `trim`: for 1.5 s more pages wait in the engine than an eighth of those running (or 4; 2 where the KV cache is
        97 % full): down to a queue of half of that.
    10. `queue`: pages wait in the engine, not too many: hold. When that lasted as long as a page takes, the engine is
        full, and no throughput need be measured.

    Growth, in a full window:

    11. `opening`: until nine tenths of the pages sent before the first answer are answered: one more for each answer.
        Where the gauges say that what we sent is running, double each time the age of the run doubles (1 s, 2 s,
        4 s …): the slower the pages, the less is lost by waiting. Where the engine counts tokens while it makes them, a
        doubling must have made a quarter more a second than the one before.
    12. `ramp`: two more for each answer, so that the window triples in the time a page takes (one more where that is a
        quarter of `longest_wait_s`: what is too much would be late). As many again at once where the gauges say that
        what we sent is running, half the time a page takes after the last step, and after answers for an eighth of the
        window. Its `brake`: pages take 1.5 times as long as when it began.
        When the queue of an engine that was full (10) runs empty, the ramp begins anew, by 1/32, 1/16, 1/8 …
    13. `confirm` or `revert`, the verdict on a probe. More in flight must bring a tenth of it, at least 5 %, as
        throughput (half of it, at least 10 %, where a page already takes six times as long as the first ones); then
        go on from there, by a ramp where a fifth more brought three fifths of that. Fewer must not cost 5 %. Else go
        back; where that place was reached by growing, a little above it, as far as the verdict can't see.
    14. `probe`: throughput at this limit is known: try 1/16 to 1/2 more. At once while that helps; after a failure in
        15 s, 30 s … 240 s; at once when throughput rose by a tenth by itself. After a brake first try 1.5 times what
        throughput needs at the latency of the ramp's beginning, if that is much less.
    15. `hold`: none of these.

    Throughput is that of a round: as many answers as there were pages in flight, at least 96 or those of 90 s. The
    first round after a change answers what was sent before it and is left out, as are rounds in which the window was
    not full. Without gauges, then, each generation of slow pages doubles the window: 512 slots of 120 s a page are
    full after 12 minutes.
    """

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self._rules = (
            *(self._fixed, self._refused, self._preempted, self._memory, self._silent, self._drain, self._starved),
            *(self._late, self._trim, self._queue, self._opening, self._ramp, self._verdict, self._probe, self._stay),
        )

    def start(self) -> WindowState:
        """Return the state before the first observation."""
        return WindowState(limit=self.bounds.clamp(self.bounds.initial))

    def decide(self, state: WindowState, seen: Observation) -> Decision:
        """Return what the first rule says that has something to say."""
        state = _with_round(_with_gauges(_with_answers(state, seen), seen), seen)
        return next(decision for rule in self._rules if (decision := rule(state, seen)))

    def _to(self, state: WindowState, seen: Observation, limit: float, rule: str, reason: str) -> Decision:
        """Return a decision for a limit, within all bounds; a limit that changes begins a new round."""
        new = self.bounds.clamp(limit, seen.memory_pages)
        if new != state.limit:
            state = replace(_new_round(state, seen), limit=new)
        return Decision(new, rule, reason, replace(state, preemptions=seen.gauges.preemptions))

    def _hold(self, state: WindowState, seen: Observation, rule: str, reason: str) -> Decision:
        """Stay, and begin the round anew: what happens now is no evidence."""
        return self._to(_new_round(state, seen), seen, state.limit, rule, reason)

    def _settle(self, state: WindowState, limit: float, probe_at: float, step: float = 0.25) -> WindowState:
        """Return the state of a window that has found its place, until the next probe."""
        state = replace(state, phase="steady", settled=self.bounds.clamp(limit), baseline=None, probe_at=probe_at)
        return replace(state, fresh=True, overshot=False, step=step)

    # --- cuts, and what forbids growth ---

    def _fixed(self, state: WindowState, seen: Observation) -> Decision | None:
        if self.bounds.least < self.bounds.most:
            return None
        return self._to(state, seen, state.limit, "fixed", "so many were asked for")

    def _refused(self, state: WindowState, seen: Observation) -> Decision | None:
        bad = seen.refused + seen.timeouts + (seen.failed if seen.failed > max(2, seen.in_flight / 10) else 0)
        if not bad:
            return None
        reason = f"{seen.refused} refused, {seen.timeouts} timed out, {seen.failed} failed"
        if seen.now < state.quiet_until:
            return self._hold(state, seen, "refused", f"{reason}; the last cut has yet to take effect")
        there = min(state.limit, max(1, seen.in_flight))
        few = bad <= there / 10
        goes_on = state.refused_at is not None and seen.now < state.quiet_until + 2 * _pause_s(state)
        state = replace(
            state,
            phase="start" if state.phase == "start" else "ramp",
            refused_at=there - bad if few else state.refused_at if goes_on else max(1, int(0.95 * there)),
            quiet_until=seen.now + _pause_s(state),
            queue_seen=False,
            step=1.0,
            probe_wait_s=min(PROBE_WAIT_S, 2 * state.probe_wait_s),
        )
        limit = there * (1 - min(0.5, max(0.1, bad / there)))
        return self._to(state, seen, min(state.limit, limit), "refused", reason)

    def _preempted(self, state: WindowState, seen: Observation) -> Decision | None:
        before, now = state.preemptions, seen.gauges.preemptions
        if before is None or now is None or now <= before:
            return None
        if seen.now < state.quiet_until:
            return self._hold(state, seen, "preempted", "again; the last cut has yet to take effect")
        limit = min(state.limit, 0.9 * (seen.gauges.running or seen.in_flight))
        state = self._settle(replace(state, quiet_until=seen.now + _pause_s(state)), limit, seen.now + 60)
        return self._to(state, seen, limit, "preempted", "the KV cache is too small for so many pages")

    def _memory(self, state: WindowState, seen: Observation) -> Decision | None:
        room = seen.memory_pages
        if room is None or state.limit <= max(self.bounds.least, room):
            return None
        if state.phase != "start":
            state = self._settle(state, room, seen.now + PROBE_AFTER_S)
        return self._to(state, seen, room, "memory", f"this host has room for {room} pages")

    def _silent(self, state: WindowState, seen: Observation) -> Decision | None:
        silence_s = seen.now - state.answered_at
        if not seen.done or silence_s <= max(5.0, 4 * state.latency_s):
            return None
        return self._hold(state, seen, "silent", f"no answer for {silence_s:.0f} s")

    def _drain(self, state: WindowState, seen: Observation) -> Decision | None:
        if seen.in_flight <= state.limit:
            return None
        return self._hold(state, seen, "drain", f"{seen.in_flight} in flight, {state.limit} wanted")

    def _starved(self, state: WindowState, seen: Observation) -> Decision | None:
        if seen.is_full:
            return None
        return self._hold(state, seen, "starved", f"{seen.in_flight} of {state.limit} places taken")

    def _late(self, state: WindowState, seen: Observation) -> Decision | None:
        took_s, answers = seen.now - state.round_at, seen.done - state.round_done
        if state.phase in {"start", "ramp"} and seen.now >= state.quiet_until:
            wait_s = state.latency_s
        elif answers >= 16 and took_s >= max(20.0, 1.2 * state.latency_s) and state.round_full_s >= 0.8 * took_s:
            wait_s = state.limit * took_s / answers
        else:
            wait_s = state.limit / state.rate if state.rate else 0.0
        if wait_s <= self.bounds.longest_wait_s:
            return None
        limit = 0.9 * state.limit * self.bounds.longest_wait_s / wait_s
        state = self._settle(state, limit, seen.now + 2 * wait_s)
        return self._to(state, seen, limit, "late", f"a page takes {wait_s:.0f} s")

    def _trim(self, state: WindowState, seen: Observation) -> Decision | None:
        if not seen.done or state.queued_since is None or seen.now - max(state.queued_since, state.round_at) < 1.5:
            return None
        most = 2.0 if (seen.gauges.kv_usage or 0) >= 0.97 else max(4.0, (seen.gauges.running or 0) / 8)
        waiting = seen.gauges.waiting or 0
        if waiting <= most:
            return None
        limit = state.limit - int(waiting - most / 2)
        state = replace(self._settle(state, limit, seen.now + PROBE_AFTER_S, step=1 / 32), queue_seen=True)
        return self._to(state, seen, limit, "trim", f"{waiting:.0f} pages wait in the engine")

    def _queue(self, state: WindowState, seen: Observation) -> Decision | None:
        if not seen.done or state.queued_since is None:
            return None
        if seen.now - state.queued_since >= max(2.0, state.latency_s):
            settled = self._settle(state, state.limit, seen.now + PROBE_AFTER_S, step=1 / 32)
            state = replace(settled, queue_seen=True, refused_at=None)
        return self._to(state, seen, state.limit, "queue", f"{seen.gauges.waiting or 0:.0f} pages wait in the engine")

    # --- growth ---

    def _opening(self, state: WindowState, seen: Observation) -> Decision | None:
        if state.phase != "start":
            return None
        age_s, since_s = seen.now - (state.started or seen.now), seen.now - state.stepped_at
        if seen.now < state.quiet_until:
            return self._to(state, seen, state.limit, "opening", "after a cut")
        if not seen.queue_is_empty or age_s < 1 or since_s < age_s / 2:
            more = min(state.limit, state.answers)
            return self._to(state, seen, state.limit + more, "opening", "the first pages are out")
        rate = ((seen.gauges.made_tokens or 0.0) - state.stepped_tokens) / since_s
        if rate and rate < 1.25 * state.token_rate:
            return self._to(state, seen, state.limit, "opening", "more pages don't make more tokens")
        state = replace(_stepped(state, seen), token_rate=rate)
        return self._to(state, seen, 2 * state.limit, "opening", "what we sent is running")

    def _ramp(self, state: WindowState, seen: Observation) -> Decision | None:
        if seen.now < state.quiet_until:
            return self._to(state, seen, state.limit, "hold", "after a cut")
        ran_empty = state.empty_since is not None and seen.now - state.empty_since >= 2
        if state.phase == "steady" and state.queue_seen and ran_empty:
            state = replace(state, phase="ramp", base_latency_s=max(state.latency_s, state.first_latency_s))
        if state.phase != "ramp":
            return None
        if state.refused_at is not None and state.limit >= state.refused_at:
            state = self._settle(state, state.limit, seen.now + state.probe_wait_s, step=1 / 16)
            return self._to(replace(state, refused_at=None), seen, state.limit, "brake", "more were refused")
        if state.refused_at is None and state.latency_s > 1.5 * state.base_latency_s:
            reason = f"a page takes {state.latency_s:.1f} s; {state.base_latency_s:.1f} s when the ramp began"
            state = replace(self._settle(state, state.limit, seen.now, step=0.5), overshot=True, queue_seen=False)
            return self._to(state, seen, state.limit, "brake", reason)
        most = state.refused_at or self.bounds.most
        running = seen.queue_is_empty and seen.done - state.stepped_done >= state.limit / 8
        if running and seen.now - state.stepped_at >= max(1.0, state.latency_s / 2):
            more = max(1, int(state.step * state.limit))
            state = replace(_stepped(state, seen), step=min(1.0, 2 * state.step))
            return self._to(state, seen, min(most, state.limit + more), "ramp", "what we sent is running")
        gain = 2 if state.latency_s < self.bounds.longest_wait_s / 4 else 1
        more = 0 if state.queue_seen else min(state.limit, gain * state.answers)
        return self._to(state, seen, min(most, state.limit + more), "ramp", f"{state.answers} answers")

    def _verdict(self, state: WindowState, seen: Observation) -> Decision | None:
        if state.phase != "probe" or state.rate is None or state.baseline is None:
            return None
        more, gain = state.limit / state.settled - 1, state.rate / state.baseline - 1
        reason = f"{100 * more:+.0f} % in flight, {100 * gain:+.0f} % throughput"
        needed = max(0.05, 0.1 * more) if more > 0 else -0.05
        if more > 0 and state.latency_s > CROWDED * state.first_latency_s:
            needed = max(0.1, 0.5 * more)
        if gain < needed:
            back = state.settled * (1 + max(0.05, 0.1 * more)) + 1 if more > 0 and state.fresh else state.settled
            return self._to(self._after_failure(state, seen, back, more), seen, back, "revert", reason)
        if more < 0:
            state = replace(self._settle(state, state.limit, seen.now + PROBE_AFTER_S), fresh=False)
        elif more < 0.2 or gain < 0.6 * more:
            state = replace(self._settle(state, state.limit, seen.now, min(0.5, 2 * state.step)), baseline=state.rate)
        else:
            state = replace(state, phase="ramp", base_latency_s=state.latency_s, step=1.0)
        state = replace(state, probe_wait_s=PROBE_AFTER_S, climbed=more > 0)
        return self._to(state, seen, state.limit, "confirm", reason)

    def _after_failure(self, state: WindowState, seen: Observation, back: float, more: float) -> WindowState:
        wait_s = max(state.probe_wait_s, 4 * state.latency_s)
        if more < 0:
            braked = state.step >= 0.5
            settled = self._settle(state, back, seen.now + (0 if braked else wait_s), state.step)
            return replace(settled, fresh=braked, climbed=False)
        settled = self._settle(state, back, seen.now + wait_s, step=max(1 / 16, state.step / 2))
        wait_s = min(PROBE_WAIT_S, 2 * state.probe_wait_s)
        return replace(settled, fresh=False, probe_wait_s=wait_s, overshot=state.climbed, climbed=False)

    def _probe(self, state: WindowState, seen: Observation) -> Decision | None:
        if state.phase != "steady" or state.queue_seen:
            return None
        if state.rate is not None and state.baseline is not None and state.rate > 1.1 * state.baseline:
            return self._to(
                replace(state, baseline=None, probe_at=seen.now), seen, state.limit, "hold", "it got faster"
            )
        state = replace(state, baseline=state.rate or state.baseline)
        if state.baseline is None or seen.now < state.probe_at:
            return self._to(state, seen, state.limit, "hold", "until the next probe")
        limit = self.bounds.clamp(max(state.limit + 1, state.limit * (1 + state.step)), seen.memory_pages)
        at_the_top = limit <= state.limit
        fewer = self.bounds.clamp(1 + 1.5 * state.baseline * state.first_latency_s)
        doubtful = state.overshot or (state.climbed and at_the_top)
        if doubtful and state.first_latency_s and fewer < 0.6 * state.limit:
            limit, question = fewer, "are fewer enough?"
        elif at_the_top:
            return None
        else:
            question = "is there more to be had?"
        return self._to(replace(state, phase="probe", overshot=False), seen, limit, "probe", question)

    def _stay(self, state: WindowState, seen: Observation) -> Decision:
        return self._to(state, seen, state.limit, "hold", "as it was")


# --- what is remembered ---


def _with_answers(state: WindowState, seen: Observation) -> WindowState:
    answers = seen.done - state.done
    if state.started is None and (seen.in_flight or seen.done):
        state = replace(state, started=seen.now, stepped_at=seen.now)
    if answers > 0:
        mean_s = (seen.latency_sum_s - state.latency_sum_s) / answers
        weight = answers / (answers + 16) if state.latency_s else 1.0
        latency_s = state.latency_s + weight * (mean_s - state.latency_s)
        state = replace(state, latency_s=latency_s, answered_at=seen.now)
    if state.phase == "start" and seen.first_latency_s:
        state = replace(state, phase="ramp", base_latency_s=seen.first_latency_s)
    if not state.first_latency_s and seen.first_latency_s:
        state = replace(state, first_latency_s=seen.first_latency_s)
    return replace(state, done=seen.done, latency_sum_s=seen.latency_sum_s, answers=max(0, answers))


def _with_gauges(state: WindowState, seen: Observation) -> WindowState:
    waiting = seen.gauges.waiting
    dry_since = (seen.now if state.dry_since is None else state.dry_since) if waiting == 0 else None
    dry_for_s = seen.now - dry_since if dry_since is not None else 0.0
    forgotten = waiting is None or dry_for_s > max(PROBE_AFTER_S, 2 * state.latency_s)
    return replace(
        state,
        queued_since=(state.queued_since or seen.now) if waiting else None,
        dry_since=dry_since,
        empty_since=(state.empty_since or seen.now) if seen.queue_is_empty else None,
        queue_seen=state.queue_seen and not forgotten,
    )


def _with_round(state: WindowState, seen: Observation) -> WindowState:
    """Go on with the round, or end it: its throughput is kept for this tick if it says something."""
    passed_s = seen.now - (seen.now if state.now is None else state.now)
    state = replace(state, now=seen.now, rate=None, round_full_s=state.round_full_s + passed_s * seen.full_share)
    took_s, answers = seen.now - state.round_at, seen.done - state.round_done
    if not state.round_size or took_s <= 0:
        return _new_round(state, seen)
    if answers < max(8, state.round_size) or (answers < ROUND_ANSWERS and took_s < ROUND_S):
        return state
    says_something = not state.settling and state.round_full_s >= 0.8 * took_s
    return replace(_new_round(state, seen), settling=False, rate=answers / took_s if says_something else None)


def _new_round(state: WindowState, seen: Observation) -> WindowState:
    return replace(
        state,
        round_at=seen.now,
        round_done=seen.done,
        round_size=max(1, seen.in_flight),
        round_full_s=0.0,
        settling=True,
        rate=None,
    )


def _stepped(state: WindowState, seen: Observation) -> WindowState:
    return replace(state, stepped_at=seen.now, stepped_done=seen.done, stepped_tokens=seen.gauges.made_tokens or 0.0)


def _pause_s(state: WindowState) -> float:
    return min(30.0, max(1.0, state.latency_s))


# --- what bounds us ---


def bounded_by(decision: Decision, seen: Observation, bounds: Bounds) -> str:
    """Say what keeps the run from being faster: `engine`, `preparation`, `source`, `memory` or `limit`.

    A window with free places is short of pages: of prepared ones while the threads that prepare have their hands full,
    else of rows; where no row is left, it is the engine that still has pages. A full one waits for the engine where the
    engine has a queue, refuses, or answers no faster when it is given more; else for memory, or for the window itself:
    its upper bound, or that it is still growing.
    """
    state = decision.state
    if not seen.is_full and seen.in_flight <= state.limit:
        if seen.preparing >= seen.threads:
            return "preparation"
        return "engine" if seen.rows_left == 0 else "source"
    at_the_top = decision.limit >= bounds.most
    slower = bool(state.first_latency_s) and state.latency_s > 1.5 * state.first_latency_s
    if seen.gauges.waiting or decision.rule in {"refused", "preempted", "silent", "late"} or slower:
        return "engine"
    if seen.memory_pages is not None and decision.limit >= seen.memory_pages:
        return "memory"
    return "limit" if at_the_top or state.phase in {"start", "ramp"} else "engine"
