"""Hosted runners: the flavours of Hugging Face Jobs and what an hour of each costs.

From the stored page of August 2026; the live list is `hf jobs hardware`.
"""

from __future__ import annotations

from collections.abc import Mapping

DOLLARS_PER_HOUR = {
    "cpu-basic": 0.01,
    "cpu-upgrade": 0.03,
    "t4-small": 0.40,
    "t4-medium": 0.60,
    "l4x1": 0.80,
    "l4x4": 3.80,
    "a10g-small": 1.00,
    "a10g-large": 1.50,
    "l40sx1": 1.80,
    "a100-large": 2.50,
    "rtx-pro-6000": 2.75,
    "h200": 5.00,
}


def price_here(environment: Mapping[str, str]) -> float | None:
    """Return what an hour costs where the job says which flavour it runs on; None elsewhere.

    `ACCELERATOR` is documented as the flavour, but was seen as only `cpu` or `gpu`.
    """
    return DOLLARS_PER_HOUR.get(environment.get("ACCELERATOR", ""))
