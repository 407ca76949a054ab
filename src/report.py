"""What a run tells: progress lines on stderr, the last JSON line on stdout, and the exit code."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from .result import SOUND, STATUSES, PageResult

if TYPE_CHECKING:
    from tqdm import tqdm

LINE_EVERY_S = 30.0


def say(text: str, stream: TextIO | None = None) -> None:
    """Print a line for people; that nobody reads it any more is no reason to stop."""
    target = stream or sys.stderr
    if target is None:  # closed by whoever started us
        return
    try:
        print(text, file=target, flush=True)
    except OSError:
        _silence(target)


def _silence(stream: TextIO) -> None:
    """Send a stream that can't be written any more nowhere, or Python fails once more when it flushes it at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def say_to_programs(line: str) -> None:
    """Write the last line, on stdout; where that can't be written, say so to people."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
    except OSError as error:
        say(f"the last line can't be written to stdout: {error}")
        _silence(sys.stdout)


@dataclass
class Tally:
    """What has happened so far. `rows_before` were in closed blocks when the run began."""

    rows: int
    rows_before: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    preparing: int = 0
    in_flight: int = 0
    blocks: int = 0
    requests: int = 0
    retries: int = 0
    restarts: int = 0
    asked_again: int = 0  # requests made because a text was cut off or looped
    malformed_markers: int = 0
    unread_frames: int = 0
    verbose: bool = False
    dollars_per_hour: float | None = None
    bounded_by: str = ""
    prompt_tokens: int = 0
    tokens: int = 0
    started: float = field(default_factory=time.monotonic)

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Count a page as in flight."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    def count(self, result: PageResult) -> None:
        """Count a page that is done."""
        self.statuses[result.status] += 1
        self.requests += result.attempts
        self.prompt_tokens += result.prompt_tokens or 0
        self.tokens += result.tokens or 0
        self.malformed_markers += result.malformed

    def left_out(self, result: PageResult) -> None:
        """Count what a text cost that is not kept, as a better one came back."""
        self.prompt_tokens += result.prompt_tokens or 0
        self.tokens += result.tokens or 0

    def frames_left_out(self, row: int, count: int) -> None:
        """Count the frames beside the first that nobody asks about, and say so once."""
        if not self.unread_frames:
            say(f"the picture in row {row} has {count} frames, and the first is read; --frames all reads them all")
        self.unread_frames += count - 1

    def retry(self, reason: str) -> None:
        """Count a request that will be made again."""
        self.retries += 1
        if self.verbose:
            say(f"asking again: {reason}")

    def restarted(self) -> None:
        """Count a start of a server that had died or frozen."""
        self.restarts += 1

    @property
    def done(self) -> int:
        """How many pages this run has finished."""
        return self.statuses.total()

    @property
    def failed(self) -> int:
        """How many pages this run could not get a sound text for."""
        return sum(count for status, count in self.statuses.items() if status not in SOUND)

    @property
    def rows_left(self) -> int:
        """How many rows nobody has begun with."""
        return max(0, self.rows - self.rows_before - self.done - self.in_flight - self.preparing)

    def pages_per_s(self) -> float:
        """Return the mean speed of this run."""
        return self.done / max(1e-9, time.monotonic() - self.started)

    def eta_s(self) -> float | None:
        """Return the seconds left at the mean speed so far; None before the first page."""
        return (self.rows - self.rows_before - self.done) / self.pages_per_s() if self.done else None

    def remarks(self) -> str:
        """Say what else happened that may need a look, each with a comma before it."""
        counts = {
            "requests for a better text": self.asked_again,
            "malformed markers kept as text": self.malformed_markers,
            "frames not read (--frames all)": self.unread_frames,
        }
        return "".join(f", {count} {what}" for what, count in counts.items() if count)

    def line(self) -> str:
        """Say where the run stands, in one plain line."""
        eta = self.eta_s()
        tokens_per_s = self.tokens / max(1e-9, time.monotonic() - self.started)
        return (
            f"{self.rows_before + self.done}/{self.rows} pages, {self.failed} failed, {self.in_flight} in flight, "
            f"{self.pages_per_s():.2f} pages/s, {tokens_per_s:.0f} tokens/s, "
            f"ETA {'?' if eta is None else duration(eta)}{self._bound_and_cost()}"
        )

    def _bound_and_cost(self) -> str:
        words = f", bounded by {self.bounded_by}" if self.bounded_by else ""
        dollars = self.dollars_per_thousand_pages()
        return words if dollars is None else f"{words}, ${dollars:.2f} per 1,000 pages"

    def dollars_per_thousand_pages(self) -> float | None:
        """Return what a thousand pages cost at the mean speed; None where no price is known."""
        if self.dollars_per_hour is None or not self.done:
            return None
        return dollars_per_thousand(self.dollars_per_hour, self.pages_per_s())


def dollars_per_thousand(dollars_per_hour: float, pages_per_s: float) -> float:
    """Return what a thousand pages cost on a machine of this price at this speed."""
    return 1000 * dollars_per_hour / 3600 / pages_per_s


def duration(seconds: float) -> str:
    """Say a duration as people do: 42s, 3m10s, 2h05m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


@contextmanager
def progress_shown(tally: Tally) -> Iterator[None]:
    """Show progress while the event loop works within: a bar on a terminal, a plain line every 30 s elsewhere."""
    with beside(_report_progress(tally)):
        yield


@contextmanager
def beside(*work: Coroutine[Any, Any, None]) -> Iterator[None]:
    """Let coroutines run beside what is within, and end them after it; what they raise is not heard."""
    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(one) for one in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()


async def _report_progress(tally: Tally) -> None:
    if sys.stderr is not None and sys.stderr.isatty():
        with suppress(OSError):
            await _show_bar(tally)
    while True:
        await asyncio.sleep(LINE_EVERY_S)
        say(tally.line())


async def _show_bar(tally: Tally) -> None:
    from tqdm import tqdm

    bar: tqdm[Any]
    with tqdm(total=tally.rows, initial=tally.rows_before, unit="page", file=sys.stderr, dynamic_ncols=True) as bar:
        try:
            while True:
                _move_bar(bar, tally)
                await asyncio.sleep(0.25)
        finally:
            _move_bar(bar, tally)


def _move_bar(bar: tqdm[Any], tally: Tally) -> None:
    bar.set_postfix_str(f"{tally.failed} failed, {tally.in_flight} in flight", refresh=False)
    bar.update(tally.rows_before + tally.done - bar.n)


@dataclass(frozen=True)
class Outcome:
    """How a run ended: what the last line on stdout says."""

    input: str
    output: str
    split: str | None
    model: str
    engine: str | None
    exit_code: int
    message: str
    seconds: float
    tally: Tally | None
    statuses: Mapping[str, int]
    flavor: str | None = None

    def json_line(self) -> str:
        """Return the JSON line; its keys are frozen (CONTRACT.md)."""
        tally = self.tally or Tally(rows=0)
        price = tally.dollars_per_hour
        return json.dumps(
            {
                "version": 1,
                "exit_code": self.exit_code,
                "message": self.message,
                "input": self.input,
                "output": self.output,
                "split": self.split,
                "model": self.model,
                "engine": self.engine,
                "rows": tally.rows,
                "rows_before": tally.rows_before,
                "rows_done": tally.done,
                "statuses": {status: self.statuses.get(status, 0) for status in STATUSES},
                "requests": tally.requests,
                "retries": tally.retries,
                "restarts": tally.restarts,
                "asked_again": tally.asked_again,
                "malformed_markers": tally.malformed_markers,
                "unread_frames": tally.unread_frames,
                "prompt_tokens": tally.prompt_tokens,
                "tokens": tally.tokens,
                "seconds": round(self.seconds, 3),
                "pages_per_second": round(tally.pages_per_s(), 4) if tally.done else 0.0,
                "flavor": self.flavor,
                "dollars_per_hour": price,
                "dollars": rounded_dollars(None if price is None else self.seconds * price / 3600),
                "dollars_per_thousand_pages": rounded_dollars(tally.dollars_per_thousand_pages()),
            }
        )


def rounded_dollars(dollars: float | None) -> float | None:
    """Return an amount for programs; None stays None."""
    return None if dollars is None else round(dollars, 4)
