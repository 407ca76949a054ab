"""The window: its rules one by one, its properties, its gate, and its course against simulated engines."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from src.gauges import Gauges
from src.window import Gate, Window, fixed_window
from src.window_rules import Bounds, Decision, Observation, Rules, WindowState, bounded_by
from tests.window_simulation import Course, Model, Simulation, becomes

RULES = set(re.findall(r"`(\w+)`", Rules.__doc__ or "")) - {"longest_wait_s"}


# --- the rules --------------------------------------------------------------------------------------------------------


def ready(limit: int = 64, **changes: Any) -> WindowState:
    """The state of a window that has been at its limit for a while, an engine that takes 2 s a page."""
    state = WindowState(
        limit=limit,
        phase="steady",
        now=99.5,
        done=1000,
        answered_at=99.5,
        latency_sum_s=2000.0,
        latency_s=2.0,
        base_latency_s=2.0,
        first_latency_s=2.0,
        started=0.0,
        settled=limit,
        round_at=90.0,
        round_done=990,
        round_size=limit,
        probe_at=1000.0,
    )
    return replace(state, **changes)


def sight(in_flight: int = 64, **changes: Any) -> Observation:
    """What is seen half a second later, ten answers on."""
    return replace(Observation(now=100.0, in_flight=in_flight, done=1010, latency_sum_s=2020.0), **changes)


def decided(state: WindowState, seen: Observation, bounds: Bounds | None = None) -> Decision:
    return Rules(bounds or Bounds()).decide(state, seen)


def outcome(state: WindowState, seen: Observation, bounds: Bounds | None = None) -> tuple[str, int]:
    decision = decided(state, seen, bounds)
    return decision.rule, decision.limit


def full(waiting: float, running: float = 60.0, **more: Any) -> Gauges:
    return Gauges(running=running, waiting=waiting, **more)


def test_refused_pages_cut_by_their_share_at_least_a_tenth_and_at_most_half() -> None:
    assert outcome(ready(), sight(refused=1)) == ("refused", 57)
    assert outcome(ready(), sight(refused=16)) == ("refused", 48)
    assert outcome(ready(), sight(timeouts=60)) == ("refused", 32)


def test_server_errors_cut_only_where_they_are_more_than_a_tenth() -> None:
    assert outcome(ready(), sight(failed=6)) == ("hold", 64)
    assert outcome(ready(), sight(failed=20)) == ("refused", 44)


def test_a_second_refusal_waits_until_the_cut_has_taken_effect() -> None:
    cut = decided(ready(), sight(refused=16))
    later = sight(in_flight=60, refused=24, now=101.0, done=1012)
    assert outcome(cut.state, later) == ("refused", 48)
    assert outcome(cut.state, replace(later, now=103.0)) == ("refused", 24)


def test_the_ramp_back_ends_where_pages_were_refused() -> None:
    state = ready(40, phase="ramp", refused_at=44)
    assert outcome(state, sight(40)) == ("ramp", 44)
    assert outcome(replace(state, limit=44), sight(44)) == ("brake", 44)


def test_preemption_leaves_a_tenth_fewer_than_run() -> None:
    state = ready(preemptions=3.0)
    assert outcome(state, sight(gauges=full(0, running=50, preemptions=4.0))) == ("preempted", 45)
    assert outcome(state, sight(gauges=full(0, preemptions=3.0)))[0] == "hold"
    assert outcome(ready(preemptions=None), sight(gauges=full(0, preemptions=4.0)))[0] == "hold"


def test_the_host_has_the_last_word_down_to_the_least() -> None:
    crowded = sight(memory_available=-(8 * 1024**2) * 10, bytes_a_page=8 * 1024**2)
    assert outcome(ready(), crowded) == ("memory", 54)
    assert outcome(ready(), crowded, Bounds(least=60)) == ("memory", 60)
    unmeasured = sight(memory_available=-(8 * 1024**2) * 14)
    assert outcome(ready(), unmeasured) == ("memory", 50)


def test_silence_is_no_evidence() -> None:
    silent = sight(now=110.0, done=1000, latency_sum_s=2000.0)
    assert outcome(ready(phase="ramp"), silent) == ("silent", 64)
    assert decided(ready(), silent).state.rate is None


def test_a_window_with_free_places_is_not_what_bounds_us() -> None:
    assert outcome(ready(phase="ramp"), sight(in_flight=30, full_share=0.2)) == ("starved", 64)


def test_after_a_cut_nothing_is_decided_until_the_pages_above_it_are_gone() -> None:
    assert outcome(ready(32, phase="ramp"), sight(in_flight=40)) == ("drain", 32)


def test_pages_that_take_too_long_are_too_many() -> None:
    late = sight(latency_sum_s=8000.0)  # the last ten took 600 s
    decision = decided(ready(latency_s=600.0, phase="ramp"), late)
    assert (decision.rule, decision.limit) == ("late", 28)
    assert outcome(decision.state, replace(late, in_flight=28, now=100.5))[1] == 28
    assert outcome(ready(latency_s=600.0), late)[0] == "hold"  # a steady window goes by its throughput


def test_more_than_can_be_answered_in_time_are_too_many() -> None:
    slow = ready(200, round_at=0.0, round_done=990, round_size=200, round_full_s=100.0)  # 20 answers in 100 s
    assert outcome(slow, sight(200)) == ("late", 54)
    assert outcome(replace(slow, limit=50), sight(50))[0] == "hold"


def test_a_long_queue_is_trimmed_to_a_short_one() -> None:
    queued = ready(80, queued_since=98.0)
    assert outcome(queued, sight(80, gauges=full(16, running=64))) == ("trim", 68)
    assert outcome(replace(queued, queued_since=99.5), sight(80, gauges=full(16, running=64))) == ("queue", 80)
    assert outcome(replace(queued, limit=68), sight(68, gauges=full(4, running=64, kv_usage=0.5))) == ("queue", 68)


def test_a_full_cache_leaves_room_for_a_shorter_queue() -> None:
    queued = ready(68, queued_since=98.0)
    assert outcome(queued, sight(68, gauges=full(4, running=64, kv_usage=0.99))) == ("trim", 65)


def test_a_queue_that_lasts_says_that_the_engine_is_full() -> None:
    state = ready(queued_since=97.0, phase="ramp")
    assert decided(state, sight(gauges=full(2))).state.queue_seen
    assert not decided(replace(state, queued_since=99.0), sight(gauges=full(2))).state.queue_seen


def test_an_engine_whose_queue_ran_empty_is_given_more_by_growing_steps() -> None:
    state = ready(queue_seen=True, step=1 / 32, empty_since=97.0, dry_since=97.0)
    first = decided(state, sight(gauges=full(0, running=63)))
    assert (first.rule, first.limit) == ("ramp", 66)
    second = decided(first.state, sight(66, now=101.5, done=1040, gauges=full(0, running=66)))
    assert (second.rule, second.limit) == ("ramp", 70)


def opening(limit: int = 8, **changes: Any) -> WindowState:
    return WindowState(limit=limit, now=9.5, started=2.0, stepped_at=4.0, **changes)


def test_before_the_first_answers_the_window_doubles_as_the_run_doubles_its_age() -> None:
    seen = Observation(now=10.0, in_flight=8, gauges=full(0, running=8))
    assert outcome(opening(), seen) == ("opening", 16)
    assert outcome(replace(opening(), stepped_at=7.0), seen) == ("opening", 8)
    assert outcome(opening(), replace(seen, gauges=full(1, running=7))) == ("opening", 8)


def test_before_the_first_answers_nothing_grows_without_gauges() -> None:
    assert outcome(opening(), Observation(now=10.0, in_flight=8)) == ("opening", 8)


def test_more_pages_that_do_not_make_more_tokens_are_not_followed_by_yet_more() -> None:
    state = opening(token_rate=100.0, stepped_tokens=1000.0)
    seen = Observation(now=10.0, in_flight=8)
    assert outcome(state, replace(seen, gauges=full(0, running=8, made_tokens=1660.0))) == ("opening", 8)
    assert outcome(state, replace(seen, gauges=full(0, running=8, made_tokens=1900.0))) == ("opening", 16)


def test_the_ramp_gives_two_places_for_each_answer() -> None:
    assert outcome(ready(phase="ramp"), sight()) == ("ramp", 84)


def test_the_ramp_doubles_where_all_that_was_sent_is_running() -> None:
    state = ready(phase="ramp", stepped_at=98.0, stepped_done=990)
    assert outcome(state, sight(gauges=full(0, running=64))) == ("ramp", 128)
    assert outcome(replace(state, stepped_at=99.5), sight(gauges=full(0, running=64))) == ("ramp", 84)
    assert outcome(replace(state, stepped_done=1009), sight(gauges=full(0, running=64))) == ("ramp", 84)


def test_the_ramp_is_braked_by_pages_that_take_longer() -> None:
    assert outcome(ready(phase="ramp", latency_s=4.0), sight(latency_sum_s=2040.0)) == ("brake", 64)


def probing(limit: int, settled: int = 64, **changes: Any) -> WindowState:
    """A probe whose second round ends at the next sight: 100 answers in 10 s."""
    state = ready(limit, phase="probe", settled=settled, baseline=8.0, round_done=900, now=99.5, round_full_s=9.5)
    return replace(state, settling=False, done=990, **changes)


def after_round(limit: int, answers: int) -> Observation:
    return Observation(now=100.0, in_flight=limit, done=900 + answers, latency_sum_s=2000.0 + 2 * (answers - 90))


@pytest.mark.parametrize(
    ("limit", "settled", "answers", "expected"),
    [
        (96, 64, 84, ("confirm", 96)),  # +50 % in flight, +5 % throughput
        (96, 64, 83, ("revert", 68)),
        (128, 64, 89, ("confirm", 128)),  # +100 %, +11 %
        (128, 64, 87, ("revert", 71)),
        (32, 64, 96, ("confirm", 32)),  # half in flight, throughput as it was
        (32, 64, 75, ("revert", 64)),
    ],
)
def test_a_probe_is_judged_by_the_throughput_it_brought(
    limit: int, settled: int, answers: int, expected: tuple[str, int]
) -> None:
    in_a_round = max(limit, 96)
    state = replace(probing(limit, settled), baseline=8.0 * in_a_round / answers)
    assert outcome(state, after_round(limit, in_a_round)) == expected


def test_a_probe_that_paid_in_proportion_starts_a_ramp() -> None:
    decision = decided(probing(96), after_round(96, 116))
    assert (decision.rule, decision.state.phase) == ("confirm", "ramp")
    assert decided(probing(96), after_round(96, 98)).state.phase == "steady"


def test_in_a_crowd_a_little_more_throughput_is_taken_for_noise() -> None:
    crowded = probing(96, latency_s=14.0)
    assert outcome(crowded, replace(after_round(96, 98), latency_sum_s=2000.0 + 14 * 8))[0] == "revert"


def test_failed_probes_are_tried_again_after_longer_and_longer() -> None:
    state = probing(96, probe_wait_s=60.0)
    failed = decided(replace(state, baseline=10.0), after_round(96, 100))
    assert failed.rule == "revert"
    assert failed.state.probe_at == 160.0
    assert failed.state.probe_wait_s == 120.0


def test_a_probe_is_made_when_its_time_has_come_and_throughput_is_known() -> None:
    state = ready(probe_at=99.0, step=0.25)
    assert outcome(state, sight()) == ("hold", 64)
    assert outcome(replace(state, baseline=20.0), sight()) == ("probe", 80)
    assert outcome(replace(state, baseline=20.0), sight(), Bounds(most=70)) == ("probe", 70)
    assert outcome(replace(state, baseline=20.0), sight(), Bounds(most=64)) == ("hold", 64)


def test_after_a_brake_fewer_are_tried_where_that_is_far_fewer() -> None:
    state = ready(200, probe_at=99.0, baseline=20.0, overshot=True)
    assert outcome(state, sight(200)) == ("probe", 61)


def test_a_fixed_window_stays_whatever_comes() -> None:
    bounds = Bounds(least=64, most=64, initial=64)
    assert outcome(Rules(bounds).start(), sight(refused=64, memory_available=-(10**12)), bounds) == ("fixed", 64)
    assert fixed_window(12).limit == 12


def test_the_first_limit_is_within_the_bounds() -> None:
    assert Rules(Bounds(least=10, most=20, initial=1)).start().limit == 10
    assert Rules(Bounds(least=1, most=4, initial=8)).start().limit == 4


# --- properties -------------------------------------------------------------------------------------------------------

counts = st.integers(0, 600)
seldom = st.sampled_from([0, 0, 0, 0, 1, 3, 200])
gauge = st.none() | st.sampled_from([0.0, 1.0, 3.0, 17.0, 64.0, 512.0])
all_bounds = st.builds(
    lambda least, more, initial, wait: Bounds(least, least + more, initial, wait),
    st.integers(1, 20),
    st.sampled_from([0, 1, 10, 100, 1000]),
    st.integers(1, 50),
    st.sampled_from([10.0, 300.0]),
)


@st.composite
def courses(draw: st.DrawFn) -> tuple[Bounds, list[Observation]]:
    """Bounds, and ticks in which anything is seen: no engine need make sense."""
    now = done = 0.0
    latency_sum_s = preemptions = tokens = 0.0
    first = draw(st.integers(1, 10))
    ticks = []
    for number in range(draw(st.integers(1, 60))):
        now += draw(st.sampled_from([0.0, 0.5, 0.5, 0.5, 5.0, 100.0]))
        answers = draw(st.sampled_from([0, 1, 8, 100]))
        done += answers
        latency_sum_s += answers * draw(st.sampled_from([0.01, 1.0, 2.0, 30.0, 900.0]))
        preemptions += draw(seldom)
        tokens += draw(seldom)
        known = draw(st.booleans())
        ticks.append(
            Observation(
                now=now,
                in_flight=draw(counts),
                ready=draw(counts),
                full_share=draw(st.sampled_from([0.0, 0.4, 1.0, 1.0, 1.0])),
                done=int(done),
                latency_sum_s=latency_sum_s,
                first_latency_s=latency_sum_s / done if done and number >= first else None,
                refused=draw(seldom),
                timeouts=draw(seldom),
                failed=draw(seldom),
                gauges=Gauges(draw(gauge), draw(gauge), draw(st.none() | st.floats(0, 1)), preemptions, tokens)
                if known
                else Gauges(),
                memory_available=draw(st.none() | st.integers(-(10**11), 10**12)),
                bytes_a_page=draw(st.none() | st.floats(0, 1e8)),
                preparing=draw(st.integers(0, 8)),
                threads=2,
            )
        )
    return draw(all_bounds), ticks


@settings(max_examples=80, deadline=None)
@given(courses())
def test_whatever_is_seen_the_limit_keeps_its_bounds_and_reacts_one_way(
    course: tuple[Bounds, list[Observation]],
) -> None:
    bounds, ticks = course
    rules = Rules(bounds)
    state = rules.start()
    for seen in ticks:
        decision = rules.decide(state, seen)
        assert decision == rules.decide(state, seen)
        assert bounds.least <= decision.limit <= bounds.most
        if seen.memory_pages is not None and bounds.least < bounds.most:
            assert decision.limit <= max(bounds.least, seen.memory_pages)
        troubled = seen.refused or seen.timeouts
        thrown_out = state.preemptions is not None and (seen.gauges.preemptions or 0) > state.preemptions
        if troubled or thrown_out or not seen.is_full or seen.in_flight > state.limit:
            assert decision.limit <= max(state.limit, bounds.least)
        assert decision.limit <= max(3 * state.limit, state.limit + 1, bounds.least)
        assert decision.rule in RULES
        assert decision.reason
        assert bounded_by(decision, seen, bounds) in {"engine", "preparation", "source", "memory", "limit"}
        state = decision.state


# --- what bounds us ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expected", "seen", "state"),
    [
        ("preparation", sight(10, full_share=0.1, preparing=6, threads=2), ready()),
        ("source", sight(10, full_share=0.1, preparing=0, threads=2), ready()),
        ("source", sight(10, full_share=0.1, preparing=0, threads=2, rows_left=1), ready()),
        ("engine", sight(10, full_share=0.1, preparing=0, threads=2, rows_left=0), ready()),
        ("preparation", sight(10, full_share=0.1, preparing=2, threads=2, rows_left=0), ready()),
        ("engine", sight(gauges=full(3)), ready(phase="ramp")),
        ("engine", sight(), ready()),
        ("engine", sight(refused=3), ready(phase="ramp")),
        ("limit", sight(), ready(phase="ramp")),
        ("memory", sight(memory_available=0, bytes_a_page=1.0), ready(phase="ramp")),
        ("limit", sight(512), ready(512)),
        ("engine", sight(512, latency_sum_s=2090.0), ready(512, latency_s=9.0)),
    ],
)
def test_what_bounds_the_run_is_named(expected: str, seen: Observation, state: WindowState) -> None:
    assert bounded_by(decided(state, seen), seen, Bounds()) == expected


# --- the gate and the window ------------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 4),
    st.lists(
        st.tuples(st.sampled_from(["enter", "enter", "leave", "cancel", "resize", "turn"]), st.integers(0, 6)),
        max_size=60,
    ),
)
def test_places_are_given_in_the_order_of_asking_and_none_is_lost(places: int, script: list[tuple[str, int]]) -> None:
    async def play() -> None:
        gate = Gate(places)
        inside: list[int] = []
        tasks: list[asyncio.Task[None]] = []
        doors: list[asyncio.Event] = []

        async def visit(number: int, door: asyncio.Event) -> None:
            await gate.enter()
            inside.append(number)
            try:
                await door.wait()
            finally:
                gate.leave()

        for action, value in script:
            most = max(gate.places, gate.taken)
            if action == "enter":
                doors.append(asyncio.Event())
                tasks.append(asyncio.create_task(visit(len(tasks), doors[-1])))
            elif action == "leave" and doors:
                doors[value % len(doors)].set()
            elif action == "cancel" and tasks:
                tasks[value % len(tasks)].cancel()
            elif action == "resize":
                gate.resize(1 + value)
                most = max(most, gate.places)
            else:
                await asyncio.sleep(0)
            assert gate.taken <= most
        assert inside == sorted(inside)
        gate.resize(1)
        for door in doors:
            door.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert inside == sorted(inside)
        assert gate.taken == gate.waiting == 0
        assert gate.try_enter()

    asyncio.run(play())


def test_a_place_given_at_the_moment_of_a_cancellation_goes_to_the_next() -> None:
    async def play() -> None:
        gate = Gate(1)
        assert gate.try_enter()
        one, two = (asyncio.create_task(gate.enter()) for _ in range(2))
        await asyncio.sleep(0)
        gate.leave()
        one.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await one
        await two
        assert gate.taken == 1

    asyncio.run(play())


def test_a_wider_window_lets_the_waiting_in_at_once_and_a_narrower_one_ends_none() -> None:
    async def play() -> None:
        now = 0.0
        window = Window(Bounds(least=1, most=64, initial=2), ahead=3, clock=lambda: now)
        tasks = [asyncio.create_task(window.acquire()) for _ in range(6)]
        await asyncio.sleep(0)
        assert (window.in_flight, window.ahead.places) == (2, 5)
        now = 2.0
        assert window.observe(Gauges(running=2, waiting=0))["limit"] == 2
        now = 4.0
        assert window.observe(Gauges(running=2, waiting=0))["limit"] == 4
        assert (window.in_flight, window.ahead.places) == (4, 7)
        window.trouble("refused")
        now = 4.5
        assert window.observe()["limit"] == 3
        assert window.in_flight == 4
        for task in tasks[:4]:
            window.release(await task)
        for task in tasks[4:]:
            window.release(await task)
        assert window.in_flight == 0

    asyncio.run(play())


def test_the_window_counts_answers_their_time_and_how_long_it_was_full() -> None:
    now = 10.0
    window = Window(Bounds(initial=2), clock=lambda: now)
    places = [window.try_acquire(), window.try_acquire()]
    assert places == [10.0, 10.0]
    assert window.try_acquire() is None
    now = 13.0
    window.release(10.0, tokens=5)
    now = 14.0
    window.release(10.0, answered=False)
    seen = window.observe()
    assert (seen["done"], seen["tokens"], seen["latency_s"], seen["full_share"]) == (1, 5, 3.0, 0.75)


def test_telemetry_is_json_and_says_what_was_decided_on_what() -> None:
    now = 0.0
    window = Window(Bounds(), clock=lambda: now)
    now = 1.0
    line = json.loads(json.dumps(window.observe(Gauges(running=1, waiting=2), 10**9, 1e6, 3, 2)))
    assert (line["at_s"], line["limit"], line["rule"], line["waiting"], line["bounded_by"]) == (
        1.0,
        8,
        "starved",
        2,
        "preparation",
    )
    assert window.seconds_bound == {"preparation": 1.0}


def test_the_docstring_names_each_rule_in_the_order_of_the_code() -> None:
    numbered = re.findall(r"^ +(\d+)\. +`(\w+)`", Rules.__doc__ or "", re.MULTILINE)
    code = [rule.__name__.removeprefix("_") for rule in Rules(Bounds())._rules]
    assert [int(number) for number, _ in numbered] == list(range(1, len(code) + 1))
    names = [{"confirm": "verdict", "hold": "stay"}.get(name, name) for _, name in numbered]
    assert names == code


# --- against simulated engines ----------------------------------------------------------------------------------------

ENGINES = {
    # slots are what bounds it
    "1 slot, 5/s": Model(1, 0.2),
    "1 slot, 0.33/s": Model(1, 3.0),
    "8 slots, 8/s": Model(8, 1.0),
    "32 slots, 16/s": Model(32, 2.0),
    "64 slots, 12.8/s": Model(64, 5.0),
    "120 slots, 60/s": Model(120, 2.0),
    "256 slots, 51/s": Model(256, 5.0),
    "36 slots, 0.3/s": Model(36, 120.0),
    "512 slots, 4.3/s": Model(512, 120.0),
    # something else is, as in the stub
    "ceiling 0.3/s": Model(64, 0.2, ceiling=0.3),
    "ceiling 8/s": Model(256, 1.0, ceiling=8.0),
    "ceiling 20/s": Model(256, 2.0, ceiling=20.0),
    "ceiling 42/s": Model(256, 2.0, ceiling=42.0),
    "ceiling 60/s": Model(512, 0.2, ceiling=60.0),
    # pages share the engine
    "shared, 8/s": Model(256, 1.0, knee=8.0, tokens_a_page=500),
    "shared, 40/s": Model(256, 2.0, knee=80.0, tokens_a_page=500),
    "slowing, 21/s": Model(128, 2.0, half=64.0, tokens_a_page=500),
}
FAST = [
    name
    for name, model in ENGINES.items()
    if model.seconds_a_page <= 2.0 and model.most_per_s() >= 5 and not model.half
]


@functools.cache
def course_of(name: str, gauges: bool) -> tuple[Course, float, float]:
    """The course of a run against an engine, how long it was, and the engine's ceiling."""
    model = replace(ENGINES[name], gauges=gauges)
    ceiling = model.most_per_s()
    seconds = max(300.0, (12 if gauges else 16) * model.seconds_a_page, 300 / ceiling)
    return Simulation(model).run(seconds), seconds, ceiling


@pytest.mark.parametrize("gauges", [True, False], ids=["gauges", "answers alone"])
@pytest.mark.parametrize("name", ENGINES)
def test_every_ceiling_is_reached_and_kept(name: str, gauges: bool) -> None:
    course, seconds, ceiling = course_of(name, gauges)
    late = (0.6 * seconds, seconds)
    assert course.rate(*late) >= 0.97 * ceiling
    assert min(course.limits_in(0, seconds)) >= 1
    assert max(course.limits_in(0, seconds)) <= Bounds().most


@pytest.mark.parametrize("gauges", [True, False], ids=["gauges", "answers alone"])
@pytest.mark.parametrize("name", FAST)
def test_nine_tenths_of_a_fast_ceiling_are_there_within_ten_seconds_of_the_first_answer(
    name: str, gauges: bool
) -> None:
    course, _, ceiling = course_of(name, gauges)
    assert course.seconds_to(0.9 * ceiling, over_s=2.0) <= 10.0


@pytest.mark.parametrize("gauges", [True, False], ids=["gauges", "answers alone"])
@pytest.mark.parametrize("name", [*FAST, "64 slots, 12.8/s"])
def test_at_a_constant_ceiling_the_window_stays_nearly_still(name: str, gauges: bool) -> None:
    course, seconds, _ = course_of(name, gauges)
    limits = sorted(course.limits_in(0.6 * seconds, seconds))
    middle = limits[len(limits) // 2]
    assert sum(abs(limit - middle) <= max(1, 0.15 * middle) for limit in limits) >= 0.75 * len(limits)
    assert limits[-1] <= max(middle + 2, 1.6 * middle)


def test_where_pages_take_two_minutes_the_gauges_spare_the_wait_for_answers() -> None:
    course, _, ceiling = course_of("512 slots, 4.3/s", gauges=True)
    assert max(course.limits_in(0, 60)) >= 0.9 * 512
    assert course.seconds_to(0.9 * ceiling, over_s=20.0) <= 60
    blind, _, _ = course_of("512 slots, 4.3/s", gauges=False)
    assert blind.seconds_to(0.9 * ceiling, over_s=20.0) <= 750


def test_with_gauges_the_engine_keeps_a_small_queue() -> None:
    course, seconds, _ = course_of("64 slots, 12.8/s", gauges=True)
    queues = [d["waiting"] for (at, _), d in zip(course.limits, course.decisions, strict=True) if at > seconds / 2]
    assert 0.5 <= sum(queues) / len(queues) <= 8


CHANGES: dict[str, tuple[Model, dict[str, Any], float]] = {
    "half the slots": (Model(64, 2.0), {"slots": 32}, 16.0),
    "twice the slots": (Model(32, 2.0), {"slots": 64}, 32.0),
    "half the ceiling": (Model(256, 2.0, ceiling=40.0), {"ceiling": 20.0}, 20.0),
    "twice the ceiling": (Model(256, 2.0, ceiling=20.0), {"ceiling": 40.0}, 40.0),
    "the gauges are gone": (Model(64, 2.0), {"gauges": False}, 32.0),
    "the gauges are gone, and twice the slots": (Model(32, 2.0), {"gauges": False, "slots": 64}, 32.0),
}


@pytest.mark.parametrize("gauges", [True, False], ids=["gauges", "answers alone"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_ceiling_that_moves_is_followed(name: str, gauges: bool) -> None:
    model, change, ceiling = CHANGES[name]
    course = Simulation(replace(model, gauges=gauges), script=((100, becomes(**change)),)).run(400)
    assert course.rate(250, 400) >= 0.97 * ceiling


@pytest.mark.parametrize("gauges", [True, False], ids=["gauges", "answers alone"])
@pytest.mark.parametrize("kind", ["refused", "timeout", "failed"])
def test_a_storm_of_refusals_shrinks_the_window_and_it_recovers(kind: str, gauges: bool) -> None:
    script = ((100, becomes(refuses=kind)), (110, becomes(refuses="")))
    course = Simulation(Model(64, 2.0, gauges=gauges), script=script).run(240)
    before = course.limits_in(90, 100)[-1]
    assert min(course.limits_in(100, 112)) <= before / 2
    assert course.rate(120, 130) >= 0.9 * 32
    assert course.rate(170, 240) >= 0.97 * 32


@pytest.mark.parametrize("gauges", [True, False], ids=["gauges", "answers alone"])
def test_a_server_that_refuses_above_a_number_is_kept_just_below_it(gauges: bool) -> None:
    course = Simulation(Model(64, 2.0, refuse_above=40, gauges=gauges)).run(400)
    assert course.rate(100, 400) >= 0.95 * 20
    refusals = sum(d["refused"] for d in course.decisions)
    assert refusals <= 0.01 * len(course.finished)


@pytest.mark.parametrize("gauges", [True, False], ids=["gauges", "answers alone"])
def test_a_frozen_engine_is_waited_for_and_the_window_is_what_it_was(gauges: bool) -> None:
    script = ((100, becomes(frozen=True)), (130, becomes(frozen=False)))
    course = Simulation(Model(64, 2.0, gauges=gauges), script=script).run(260)
    assert "silent" in course.rules(100, 130)
    assert min(course.limits_in(100, 135)) >= 64
    assert course.rate(132, 142) >= 0.95 * 32
    assert course.rate(190, 260) >= 0.97 * 32


def test_preemptions_shrink_the_window_and_it_recovers() -> None:
    script = ((100, becomes(preemptions=7.0)),)
    course = Simulation(Model(64, 2.0, preemptions=0.0), script=script).run(400)
    assert 50 <= min(course.limits_in(100, 110)) <= 58
    assert course.rate(250, 400) >= 0.97 * 32


@pytest.mark.parametrize("gauges", [True, False], ids=["gauges", "answers alone"])
def test_a_client_too_slow_for_the_engine_is_not_taken_for_a_ceiling(gauges: bool) -> None:
    sim = Simulation(Model(64, 2.0, gauges=gauges), supply=10.0)
    course = sim.run(200)
    assert course.rate(50, 200) >= 0.99 * 10
    assert max(course.limits_in(0, 200)) <= 64
    assert max(sim.window.seconds_bound, key=lambda bound: sim.window.seconds_bound[bound]) == "source"


@pytest.mark.parametrize("gauges", [True, False], ids=["gauges", "answers alone"])
def test_the_hosts_memory_bounds_the_window_also_when_it_shrinks(gauges: bool) -> None:
    sim: Simulation
    sim = Simulation(Model(64, 2.0, gauges=gauges), memory=lambda in_flight: (40 if sim.now < 100 else 20) - in_flight)
    course = sim.run(200)
    assert max(course.limits_in(0, 100)) == 40
    assert max(course.limits_in(100.5, 200)) == 20
    assert course.rate(120, 200) >= 0.97 * 10
    assert sim.window.seconds_bound["memory"] > 100


@pytest.mark.parametrize("gauges", [True, False], ids=["gauges", "answers alone"])
def test_the_window_keeps_between_least_and_most(gauges: bool) -> None:
    bounds = Bounds(least=12, most=24)
    script = ((100, becomes(refuses="refused")), (120, becomes(refuses="")))
    course = Simulation(Model(64, 2.0, gauges=gauges), bounds, script=script).run(200)
    assert min(course.limits_in(0, 200)) == 12
    assert max(course.limits_in(0, 200)) == 24


def test_pages_that_would_wait_too_long_are_fewer() -> None:
    course = Simulation(Model(2, 20.0, gauges=False), Bounds(initial=16, longest_wait_s=60.0)).run(2000)
    assert "late" in course.rules()
    assert max(course.limits_in(1000, 2000)) <= 10
    assert course.rate(1000, 2000) >= 0.97 * 0.1
