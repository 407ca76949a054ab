"""The end of a job's time: where the pages will not be done by then, that is said once, and early."""

from __future__ import annotations

import asyncio
import time

from .report import Tally, duration, say

CHECK_EVERY_S = 0.5
JUDGE_AFTER_S = 60.0  # or after a tenth of the job's time: the first pages of a run are its slowest


async def watch_deadline(tally: Tally, ends_at: float | None) -> None:
    """Watch whether the run ends before `ends_at` (by `time.monotonic`), and say so once where it does not."""
    if ends_at is None:
        return
    begun = time.monotonic()
    judge_at = begun + min(JUDGE_AFTER_S, (ends_at - begun) / 10)
    while True:
        await asyncio.sleep(CHECK_EVERY_S)
        now = time.monotonic()
        words = overrun(tally, ends_at - now) if now >= judge_at else None
        if words:
            say(words)
            return


def overrun(tally: Tally, left_s: float) -> str | None:
    """Say that the pages will not be done in the time that is left; None where they will, or nobody knows."""
    needed_s = tally.eta_s()
    if needed_s is None or needed_s <= left_s:
        return None
    pages = round((needed_s - max(0.0, left_s)) * tally.pages_per_s())
    return (
        f"this job is stopped in {duration(max(0.0, left_s))}, but at {tally.pages_per_s():.2f} pages/s it needs "
        f"{duration(needed_s)}: about {pages} pages will be left. Closed blocks are kept and the same command goes on; "
        "more jobs (--jobs) or a longer --timeout end in one go"
    )
