"""Work that takes too long is given up, and the threads that do it are replaced."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Iterator

import pytest

from src.errors import JobError
from src.threads import MOST_STUCK, Threads, TooSlowError


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """What stuck work waits for; set at the end, so that no thread outlives its test for long."""
    event = threading.Event()
    yield event
    event.set()


def test_no_more_work_is_done_at_once_than_there_are_threads_and_in_the_order_of_asking() -> None:
    begun: list[int] = []
    at_once: list[int] = []
    working: set[int] = set()
    lock = threading.Lock()

    def work(number: int) -> int:
        with lock:
            begun.append(number)
            working.add(number)
            at_once.append(len(working))
        with lock:
            working.remove(number)
        return number * 2

    async def all_of_it() -> list[int]:
        threads = Threads(3, 60.0)
        done = await asyncio.gather(*(threads.run(functools.partial(work, number)) for number in range(40)))
        threads.close()
        return done

    assert asyncio.run(all_of_it()) == [number * 2 for number in range(40)]
    assert max(at_once) <= 3
    assert sorted(begun) == list(range(40))


def test_what_the_work_raises_is_raised() -> None:
    async def fail() -> None:
        await Threads(1, 60.0).run(lambda: 1 // 0)

    async def time_out_by_itself() -> None:
        def work() -> None:
            raise TimeoutError("a disk of its own")

        await Threads(1, 60.0).run(work)

    with pytest.raises(ZeroDivisionError):
        asyncio.run(fail())
    with pytest.raises(TimeoutError, match="a disk of its own"):
        asyncio.run(time_out_by_itself())


def test_work_that_is_stuck_is_given_up_and_the_one_thread_replaced(release: threading.Event) -> None:
    async def some_stuck() -> list[str]:
        threads = Threads(1, 0.05)
        outcomes = []
        for number in range(4):
            try:
                patience = threads.run(lambda: release.wait(60)) if number % 2 else threads.run(lambda: "done")
                outcomes.append(str(await patience))
            except TooSlowError:
                outcomes.append("too slow")
        return outcomes

    assert asyncio.run(some_stuck()) == ["done", "too slow", "done", "too slow"]


def test_so_many_stuck_at_once_end_the_run(release: threading.Event) -> None:
    async def all_stuck() -> int:
        threads = Threads(4, 0.01)
        for number in range(MOST_STUCK + 1):
            with pytest.raises(TooSlowError if number < MOST_STUCK else JobError):
                await threads.run(lambda: release.wait(60))
        return number

    assert asyncio.run(all_stuck()) == MOST_STUCK


def test_a_thread_whose_work_is_no_longer_waited_for_is_not_given_other_work(release: threading.Event) -> None:
    async def cancel_and_go_on() -> str:
        threads = Threads(1, 60.0)
        waiting = asyncio.create_task(threads.run(lambda: release.wait(60)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        return await threads.run(lambda: "done")

    assert asyncio.run(cancel_and_go_on()) == "done"
