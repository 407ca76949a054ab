"""Hosted runners: the flavours of Hugging Face Jobs, what an hour of each costs, and how fast they were measured.

From the stored page of August 2026 and the measurements on record, a test holds both equal to models.json. What the
Hub lists now (`hf jobs hardware`) goes before the stored prices.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

PRICES_OF = "August 2026"


@dataclass(frozen=True)
class Flavor:
    """A machine for hire. `vram_gb` is that of its GPUs together."""

    name: str
    gpu: str | None
    gpus: int
    vram_gb: int | None
    vcpus: int
    ram_gb: int
    dollars_per_hour: float

    def __str__(self) -> str:
        gpus = f"{self.gpus} x {self.gpu}, {self.vram_gb} GB" if self.gpu else "no GPU"
        return f"{self.name} ({gpus}; {self.vcpus} vCPU, {self.ram_gb} GB; ${self.dollars_per_hour:.2f} an hour)"


FLAVORS = (
    Flavor("cpu-basic", None, 0, None, 2, 16, 0.01),
    Flavor("cpu-upgrade", None, 0, None, 8, 32, 0.03),
    Flavor("t4-small", "T4", 1, 16, 4, 15, 0.40),
    Flavor("t4-medium", "T4", 1, 16, 8, 30, 0.60),
    Flavor("l4x1", "L4", 1, 24, 8, 30, 0.80),
    Flavor("l4x4", "L4", 4, 96, 48, 186, 3.80),
    Flavor("a10g-small", "A10G", 1, 24, 4, 15, 1.00),
    Flavor("a10g-large", "A10G", 1, 24, 12, 46, 1.50),
    Flavor("l40sx1", "L40S", 1, 48, 8, 62, 1.80),
    Flavor("a100-large", "A100", 1, 80, 12, 142, 2.50),
    Flavor("rtx-pro-6000", "RTX PRO 6000", 1, 96, 23, 256, 2.75),
    Flavor("h200", "H200", 1, 141, 23, 256, 5.00),
)


@dataclass(frozen=True)
class Measured:
    """A speed on record: pages a second of one model on one flavour, offline or through a server."""

    model_id: str
    flavor: str
    shape: str  # "offline" or "server"
    pages_per_s: float
    conditions: str
    evidence: str

    def __str__(self) -> str:
        return f"{self.pages_per_s:g} pages/s ({self.evidence}: {self.conditions})"


ON_L4 = "100 historical scans, concurrency 32"
ON_600_PAGES = "600 pages, saturating driver"

MEASURED = (
    Measured("lightonai/LightOnOCR-2-1B", "l4x1", "offline", 0.33, ON_L4, "field"),
    Measured("lightonai/LightOnOCR-2-1B", "l4x1", "server", 0.59, ON_L4, "field"),
    Measured("lightonai/LightOnOCR-3-0.8B", "a10g-small", "offline", 0.90, ON_600_PAGES, "field"),
    Measured("lightonai/LightOnOCR-3-0.8B", "a10g-small", "server", 2.2, ON_600_PAGES, "field"),
    Measured("lightonai/LightOnOCR-3-0.8B", "a100-large", "offline", 1.27, ON_600_PAGES, "field"),
    Measured("lightonai/LightOnOCR-3-0.8B", "a100-large", "server", 7.2, ON_600_PAGES, "field"),
)


def find_flavor(flavors: Iterable[Flavor], name: str | None) -> Flavor | None:
    """Return the flavour of this name, or None."""
    return next((flavor for flavor in flavors if flavor.name == name), None)


def matching_flavor(
    flavors: Iterable[Flavor], vcpus: float | None, ram_gb: float | None, gpus: Iterable[str]
) -> Flavor | None:
    """Return the one flavour that has these cores, this memory and these GPUs; None where none or several do.

    Memory may differ by a tenth: a machine keeps some for itself, and GB are taken for GiB.
    """
    if vcpus is None or ram_gb is None:
        return None
    names = list(gpus)
    fits = [
        flavor
        for flavor in flavors
        if flavor.vcpus == vcpus
        and abs(flavor.ram_gb - ram_gb) <= 0.1 * flavor.ram_gb
        and len(names) == flavor.gpus
        and all(_is_named(flavor.gpu or "", name) for name in names)
    ]
    return fits[0] if len(fits) == 1 else None


def _is_named(gpu: str, name: str) -> bool:
    """Whether a GPU's full name (`NVIDIA L4`, `NVIDIA A100-SXM4-80GB`) has the words of a short one: L40S is no L4."""
    words = [" ".join(text.upper().replace("-", " ").split()) for text in (gpu, name)]
    return f" {words[0]} " in f" {words[1]} "


def measured_speed(model_id: str, flavor: str, shape: str) -> Measured | None:
    """Return the speed on record for a model on a flavour, or None: a speed is never taken from another one's."""
    found = [row for row in MEASURED if (row.model_id, row.flavor, row.shape) == (model_id, flavor, shape)]
    return found[0] if found else None


def measured_elsewhere(model_id: str, shape: str) -> list[Measured]:
    """Return the speeds on record for a model on other flavours, to be named beside an unknown one."""
    return [row for row in MEASURED if (row.model_id, row.shape) == (model_id, shape)]
