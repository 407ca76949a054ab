"""What can be hired now, and for how much: the Hub's list of hardware, or the stored one where it can't be asked."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .errors import network_errors
from .flavors import FLAVORS, PRICES_OF, Flavor, find_flavor

if TYPE_CHECKING:
    from huggingface_hub import JobHardwareInfo

UNITS_AN_HOUR = {"second": 3600, "minute": 60, "hour": 1}


@dataclass(frozen=True)
class PriceList:
    """Flavours with their prices, and from when these are: "today", or the date of the stored page."""

    flavors: tuple[Flavor, ...]
    prices_of: str

    def find(self, name: str | None) -> Flavor | None:
        """Return the flavour of this name, or None."""
        return find_flavor(self.flavors, name)


STORED_PRICES = PriceList(FLAVORS, PRICES_OF)


def read_price_list() -> PriceList:
    """Ask the Hub what can be hired; no token is needed. Without an answer that can be read, what is stored counts."""
    from huggingface_hub import HfApi

    try:
        listed = tuple(_read_flavor(item) for item in HfApi().list_jobs_hardware())
    except no_answer():
        return STORED_PRICES
    return PriceList(listed, "today") if listed else STORED_PRICES


def no_answer() -> tuple[type[Exception], ...]:
    """Return what is raised where the Hub does not answer, refuses, or answers something else than expected."""
    return (*network_errors(), LookupError, TypeError, ValueError)


def _read_flavor(item: JobHardwareInfo) -> Flavor:
    """Read one entry: `8 vCPU`, `30 GB`, micro-dollars a minute."""
    gpu = item.accelerator
    return Flavor(
        name=item.name,
        gpu=gpu.model if gpu else None,
        gpus=int(read_number(gpu.quantity)) if gpu else 0,
        vram_gb=int(read_number(gpu.vram)) if gpu else None,
        vcpus=int(read_number(item.cpu)),
        ram_gb=int(read_number(item.ram)),
        dollars_per_hour=round(item.unit_cost_micro_usd * UNITS_AN_HOUR[item.unit_label] / 1e6, 3),
    )


def read_number(text: str) -> float:
    """Return the number that a text begins with; `ValueError` where it begins with none."""
    found = re.match(r"\s*(\d+(?:\.\d+)?)", text)
    if found is None:
        raise ValueError(f"{text!r} begins with no number")
    return float(found[1])
