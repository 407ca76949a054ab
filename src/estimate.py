"""What a run as jobs will take: hours and dollars, from a speed that somebody measured, or none at all."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from .errors import UsageError
from .flavors import measured_elsewhere, measured_speed
from .report import dollars_per_thousand, duration, rounded_dollars

UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
TIMEOUT_WITHOUT_ESTIMATE_S = 4 * 3600


@dataclass(frozen=True)
class Speed:
    """Pages a second of one job, and who says so."""

    pages_per_s: float
    basis: str


@dataclass(frozen=True)
class Estimate:
    """Time and money of a run as jobs. `pages` are those left to read, `longest_pages` those of the job with most."""

    pages: int
    longest_pages: int
    jobs: int
    speed: Speed
    dollars_per_hour: float | None

    @property
    def longest_s(self) -> float:
        """Seconds of the job with most pages, without those in which the engine starts."""
        return self.longest_pages / self.speed.pages_per_s

    @property
    def job_hours(self) -> float:
        """Hours of all jobs together."""
        return self.pages / self.speed.pages_per_s / 3600

    @property
    def dollars(self) -> float | None:
        """What all jobs cost together."""
        return None if self.dollars_per_hour is None else self.job_hours * self.dollars_per_hour

    @property
    def dollars_per_thousand_pages(self) -> float | None:
        """What a thousand pages cost."""
        price = self.dollars_per_hour
        return None if price is None else dollars_per_thousand(price, self.speed.pages_per_s)

    def __str__(self) -> str:
        money = ""
        if self.dollars is not None:
            money = f", ${self.dollars:.2f} in all, ${self.dollars_per_thousand_pages:.2f} per 1,000 pages"
        return (
            f"estimate: {self.pages} pages at {self.speed.pages_per_s:g} pages/s a job ({self.speed.basis}): "
            f"{duration(self.longest_s)} for the longest of {self.jobs}, {self.job_hours:.2f} job-hours{money}; "
            "the minutes in which engines start are not counted"
        )

    def as_json(self) -> dict[str, Any]:
        """Return the figures for programs (CONTRACT §4.2)."""
        return {
            "pages": self.pages,
            "pages_per_second": self.speed.pages_per_s,
            "basis": self.speed.basis,
            "longest_job_seconds": round(self.longest_s, 1),
            "job_hours": round(self.job_hours, 4),
            "dollars_per_hour": self.dollars_per_hour,
            "dollars": rounded_dollars(self.dollars),
            "dollars_per_thousand_pages": rounded_dollars(self.dollars_per_thousand_pages),
        }


def speed_of(model_id: str, flavor: str, shape: str, pages_per_second: float | None) -> Speed | None:
    """Return the user's figure, or the one on record for this very model, flavour and shape, or None."""
    if pages_per_second is not None:
        return Speed(pages_per_second, "--pages-per-second")
    stored = measured_speed(model_id, flavor, shape)
    return Speed(stored.pages_per_s, f"{stored.evidence}: {stored.conditions}") if stored else None


def no_speed(model_id: str, flavor: str, shape: str) -> str:
    """Say that no estimate is made, and what is on record."""
    elsewhere = "; ".join(f"on {row.flavor} {row}" for row in measured_elsewhere(model_id, shape))
    return (
        f"no estimate: no speed of {model_id} on {flavor} is on record, and none is invented; give --pages-per-second, "
        f"for instance of a run with --max-samples 500{f' (on record: {elsewhere})' if elsewhere else ''}"
    )


def timeout_for(estimate: Estimate | None) -> int:
    """Return after how many seconds to stop a job: half again what it needs and half an hour, in full hours."""
    if estimate is None:
        return TIMEOUT_WITHOUT_ESTIMATE_S
    return 3600 * math.ceil((1.5 * estimate.longest_s + 1800) / 3600)


def read_timeout(text: str) -> int:
    """Return the seconds of a time as `hf jobs` takes it: 5400, 90m, 4h, 2d."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    seconds = int(float(found[1]) * UNIT_S[found[2] or "s"]) if found else 0
    if seconds < 1:
        raise UsageError(f"--timeout {text!r} is no time; give it as 90m, 4h or 2d")
    return seconds


def timeout_words(seconds: int) -> str:
    """Return the seconds as people type them: 4h, 90m."""
    for unit in ("h", "m"):
        if seconds % UNIT_S[unit] == 0:
            return f"{seconds // UNIT_S[unit]}{unit}"
    return f"{seconds}s"
