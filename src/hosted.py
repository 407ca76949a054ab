"""The machine that a run is paid for: inside a Hugging Face Job its flavour, its price, and when the job is stopped.

The flavour is what the submission says (`--jobs` sets `LIGHTON_OCR_FLAVOR` and `LIGHTON_OCR_TIMEOUT_S`); else what
`ACCELERATOR` says, if that is one (it was seen as only `cpu` or `gpu`); else what the Hub tells about the job, if the
token may ask; else the one flavour with these cores, this memory and these GPUs. Where that is none, none is guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .flavors import Flavor, matching_flavor
from .hardware import PriceList, no_answer, read_number, read_price_list
from .machine import find_gpus
from .report import dollars_per_thousand

FLAVOR_VARIABLE = "LIGHTON_OCR_FLAVOR"
TIMEOUT_VARIABLE = "LIGHTON_OCR_TIMEOUT_S"


@dataclass(frozen=True)
class Runner:
    """What is known of the machine. `ends_at` is when it is taken away, by `time.monotonic`."""

    flavor: str | None = None
    dollars_per_hour: float | None = None
    prices_of: str | None = None
    ends_at: float | None = None

    def __str__(self) -> str:
        price = "" if self.dollars_per_hour is None else f"${self.dollars_per_hour:.2f} an hour"
        dated = f"{price}, prices of {self.prices_of}" if price and self.prices_of else price
        return ", ".join(word for word in (self.flavor, dated) if word)

    def cost(self, pages_per_s: float) -> str | None:
        """Say what a thousand pages cost at this speed; None where no price is known."""
        if self.dollars_per_hour is None or not pages_per_s:
            return None
        return f"${dollars_per_thousand(self.dollars_per_hour, pages_per_s):.2f} per 1,000 pages ({self})"


def find_runner(environment: Mapping[str, str], dollars_per_hour: float | None, started: float) -> Runner:
    """Find out where we run, inside of a job; elsewhere the user's price is all there is.

    `started` is when the run began: the job's time is counted from there.
    """
    if "JOB_ID" not in environment:
        return Runner(dollars_per_hour=dollars_per_hour)
    prices = read_price_list()
    found = _find_flavor(environment, prices)
    limit_s = environment.get(TIMEOUT_VARIABLE, "")
    ends_at = started + float(limit_s) if limit_s.isdecimal() else None
    if dollars_per_hour is not None:
        return Runner(found.name if found else None, dollars_per_hour, None, ends_at)
    if found is None:
        return Runner(ends_at=ends_at)
    return Runner(found.name, found.dollars_per_hour, prices.prices_of, ends_at)


def _find_flavor(environment: Mapping[str, str], prices: PriceList) -> Flavor | None:
    for variable in (FLAVOR_VARIABLE, "ACCELERATOR"):
        named = prices.find(environment.get(variable))
        if named:
            return named
    return prices.find(_flavor_of_job(environment["JOB_ID"])) or _flavor_by_shape(environment, prices)


def _flavor_of_job(job_id: str) -> str | None:
    """Ask the Hub about the job that we are; None where the token may not, or there is none."""
    from huggingface_hub import HfApi

    try:
        flavor = HfApi().inspect_job(job_id=job_id).flavor
    except no_answer():
        return None
    return str(getattr(flavor, "value", flavor))


def _flavor_by_shape(environment: Mapping[str, str], prices: PriceList) -> Flavor | None:
    try:
        vcpus, ram_gb = read_number(environment["CPU_CORES"]), read_number(environment["MEMORY"])
    except (KeyError, ValueError):
        return None
    gpus = [gpu.name for gpu in find_gpus()]
    if environment.get("ACCELERATOR") == "gpu" and not gpus:  # one that can't be seen makes no CPU flavour
        return None
    return matching_flavor(prices.flavors, vcpus, ram_gb, gpus)
