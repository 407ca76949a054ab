"""Steering a run: twice a second the window is told what is seen, and each decision goes to the telemetry file.

At the end it says what bounded the run, and what to change.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from .errors import UsageError
from .gauges import Gauges
from .memory import PageMeasure, own_rss, read_memory
from .report import Tally, say
from .window import TICK_S, Window

# What to change, by what bounded the run.
ADVICE = {
    "engine": "the engine is the limit: a faster GPU, more of them (data parallel), or more shards",
    "preparation": "preparing the pages is the limit: a flavour with more cores, or more shards",
    "source": "reading the input is the limit: a faster disk or network, or several shards on several machines",
    "memory": "this machine's memory is the limit: a flavour with more of it, or a lower --max-in-flight elsewhere",
    "limit": "the window was still growing, or stood at --max-in-flight: a longer run, or a higher bound",
}


@dataclass
class Steering:
    """What moves a window: gauges of the engine, memory of the host, pages being prepared."""

    window: Window
    tally: Tally
    gauges: Callable[[], Gauges]
    threads: int
    telemetry: TextIO | None = None
    measure: PageMeasure = field(default_factory=PageMeasure)

    async def steer(self) -> None:
        """Observe and decide until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            self.tick()

    def tick(self) -> dict[str, Any]:
        """Observe and decide once; return the decision as it stands in the telemetry file."""
        memory = read_memory()
        self.measure.note(self.window.in_flight, own_rss())
        line = self.window.observe(
            gauges=self.gauges(),
            memory_available=memory.for_pages if memory else None,
            bytes_a_page=self.measure.bytes_a_page(),
            preparing=self.tally.preparing,
            threads=self.threads,
            rows_left=self.tally.rows_left,
        )
        self.tally.bounded_by = line["bounded_by"]
        if self.telemetry:
            self._keep(line, self.telemetry)
        return line

    def _keep(self, line: dict[str, Any], telemetry: TextIO) -> None:
        """Write a decision down; a full disk there is no reason to stop steering."""
        try:
            telemetry.write(json.dumps(line) + "\n")
            telemetry.flush()
        except OSError as error:
            self.telemetry = None
            say(f"--telemetry can't be written any more: {error.strerror}; the run goes on without it")


@contextmanager
def telemetry_file(path: str | None) -> Iterator[TextIO | None]:
    """Open the file for telemetry, to go on in it; None where none is wanted."""
    if path is None:
        yield None
        return
    try:
        file = Path(path).open("a", encoding="utf-8")  # noqa: SIM115 - closed below
    except OSError as error:
        raise UsageError(f"--telemetry {path!r} can't be written: {error.strerror}; name another file") from error
    try:
        yield file
    finally:
        with suppress(OSError):  # said when it was written
            file.close()


def verdict(seconds_bound: dict[str, float]) -> str:
    """Say what bounded the run for most of its time, and what to change."""
    total = sum(seconds_bound.values())
    if total <= 0:
        return "too short to say what bounded it"
    shares = sorted(seconds_bound.items(), key=lambda item: -item[1])
    words = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in shares if seconds / total >= 0.05)
    return f"bounded by {words}; {ADVICE[shares[0][0]]}"
