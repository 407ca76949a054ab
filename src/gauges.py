"""What a vLLM server says about itself: the gauges of its /metrics page, read every second."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

READ_EVERY_S = 1.0
READ_TIMEOUT_S = 2.0
STALE_S = 5.0  # older readings say nothing about now
TRIES = 3  # so many pages without a gauge, and there are none
SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(?P<labels>\{.*\})?\s+(?P<value>\S+)(\s+-?\d+)?\s*")


@dataclass(frozen=True)
class Gauges:
    """A reading, over all engines of the server; None where it does not say. The last four count from its start."""

    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None  # of the fullest engine, 0 to 1
    preemptions: float | None = None
    succeeded: float | None = None
    prompt_tokens: float | None = None
    made_tokens: float | None = None

    @property
    def known(self) -> bool:
        """Whether the server says how many requests run and wait."""
        return self.running is not None and self.waiting is not None


def parse_gauges(text: str) -> Gauges:
    """Read a page in Prometheus's text format; lines that are not understood are passed over."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for line in text.splitlines():
        sample = SAMPLE.fullmatch(line)
        if sample is None or not sample["name"].startswith("vllm:"):
            continue
        try:
            value = float(sample["value"])
        except ValueError:
            continue
        if math.isfinite(value):
            values[sample["name"].removeprefix("vllm:").removesuffix("_total")].append(value)

    def summed(name: str) -> float | None:
        return sum(values[name]) if name in values else None

    usage = values.get("kv_cache_usage_perc") or values.get("gpu_cache_usage_perc")  # the latter until 0.10
    return Gauges(
        running=summed("num_requests_running"),
        waiting=summed("num_requests_waiting"),
        kv_usage=max(usage) if usage else None,
        preemptions=summed("num_preemptions"),
        succeeded=summed("request_success"),
        prompt_tokens=summed("prompt_tokens"),
        made_tokens=summed("generation_tokens"),
    )


class GaugeReader:
    """Reads a server's gauges beside the run. `get` fetches a URL: its text, or None where there is no such page."""

    def __init__(
        self,
        base_url: str,
        get: Callable[[str], Awaitable[str | None]],
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.url = metrics_url(base_url)
        self._get = get
        self._say = say
        self._clock = clock
        self._last = Gauges()
        self._read_at = float("-inf")

    @property
    def latest(self) -> Gauges:
        """The last reading, or one that knows nothing where that is too old."""
        return self._last if self._clock() - self._read_at <= STALE_S else Gauges()

    async def read(self) -> bool:
        """Read once; return whether there were gauges. No error of the server's or the network's leaves this."""
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                text = await self._get(self.url)
        except Exception:  # noqa: BLE001 - gauges only help; a server that has none, or no time, is no reason to stop
            return False
        gauges = parse_gauges(text or "")
        if gauges.known:
            self._last, self._read_at = gauges, self._clock()
        return gauges.known

    async def run(self) -> None:
        """Read every second until cancelled; give up, and say so once, where the server has never shown any."""
        failures, seen = 0, False
        while seen or failures < TRIES:
            known = await self.read()
            seen = seen or known
            failures += not known
            await asyncio.sleep(READ_EVERY_S)
        self._say(f"{self.url} shows no vLLM gauges: the window goes by the answers alone")


def metrics_url(base_url: str) -> str:
    """Return where a server whose API is at `base_url` (with or without /v1) has its metrics."""
    return base_url.rstrip("/").removesuffix("/v1") + "/metrics"
