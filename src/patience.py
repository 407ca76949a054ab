"""Patience with the network: what fails for a while is tried again, within bounds.

The Hub refuses for many reasons that pass: quotas, races of several writers, its own troubles. How long it wants to
be left alone it says itself.
"""

from __future__ import annotations

import contextlib
import math
import random
import re
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from .errors import network_errors
from .report import say

ValueT = TypeVar("ValueT")
PASSING = frozenset({408, 409, 412, 425, 429})  # refusals below 500 that may pass
FIRST_NETWORK_PAUSE_S = 1.0
XET_REFUSAL = re.compile(r"HTTP status client error \((\d{3})\b")  # hf_xet 1.8 has no other word for it


class Patience:
    """For how long something is tried again. `hurry` shortens it, from any thread: the run has to end."""

    def __init__(self, retry_for_s: float, longest_pause_s: float = 60.0) -> None:
        self._retry_for_s = retry_for_s
        self._longest_pause_s = longest_pause_s
        self._hurried = threading.Event()
        self._last_moment = math.inf

    @property
    def is_hurried(self) -> bool:
        """Whether the run has to end soon."""
        return self._hurried.is_set()

    def hurry(self, within_s: float) -> None:
        """Try nothing again after so many seconds, and end the pause of now."""
        self._last_moment = min(self._last_moment, time.monotonic() + within_s)
        self._hurried.set()

    def call(self, action: Callable[[], ValueT], what: str) -> ValueT:
        """Do something that may fail for a while; raise its last error where it fails for good."""
        give_up_at = time.monotonic() + self._retry_for_s
        pause_s = FIRST_NETWORK_PAUSE_S
        while True:
            try:
                return action()
            except network_errors() as error:
                wait_s = max(wished_pause_s(error), pause_s * random.uniform(0.5, 1.0))  # noqa: S311 - jitter
                if is_permanent(error) or time.monotonic() >= min(give_up_at, self._last_moment):
                    raise
                say(f"{what} fails for now ({_in_short(error)}); trying again in {wait_s:.0f} s")
                if self.is_hurried:
                    time.sleep(min(wait_s, FIRST_NETWORK_PAUSE_S))
                else:
                    self._hurried.wait(wait_s)
                pause_s = min(self._longest_pause_s, 2 * pause_s)


def is_permanent(error: Exception) -> bool:
    """Whether trying again can't help: the Hub said no, or a file is not there."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    refused = XET_REFUSAL.search(str(error)) if status is None else None
    if refused:
        status = int(refused[1])
    if status is None:
        return isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError | NotADirectoryError)
    return bool(status < 500 and status not in PASSING)


def wished_pause_s(error: Exception) -> float:
    """Return the seconds after which the Hub wants to be asked again; 0 where it does not say."""
    headers: Any = getattr(getattr(error, "response", None), "headers", None)
    if headers is None:
        return 0.0
    with contextlib.suppress(ValueError):
        return max(0.0, float(headers.get("retry-after") or ""))
    from huggingface_hub.utils import parse_ratelimit_headers  # type: ignore[attr-defined]

    limit = parse_ratelimit_headers(headers)
    return float(limit.reset_in_seconds) if limit and not limit.remaining else 0.0


def _in_short(error: Exception) -> str:
    words = f"{type(error).__name__}: {error}".strip()
    return words.splitlines()[0][:300]
