"""What the stand-in for the Hub can be told to do wrong: refusals, quotas, URLs that expire, slow lines, held requests.

Nothing here looks at a clock but a quota's window: faults count requests, so that a test says exactly what happens.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import threading
import time
from typing import TYPE_CHECKING, Self

from tests.hub_state import HubError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiohttp import web

UPLOAD_PIECE_BYTES = 16 * 1024


@dataclasses.dataclass
class Failure:
    """A scripted refusal of requests whose method and path fit: of `times` of them, after `skip` that pass.

    One that is `late` comes when what was asked for has been done.
    """

    method: str
    path: str
    status: int
    times: int
    headers: Mapping[str, str]
    skip: int = 0
    late: bool = False

    def strikes(self, request: web.Request) -> bool:
        """Whether it is this request's turn; counts down."""
        if request.method != self.method or self.path not in request.path or not self.times:
            return False
        if self.skip:
            self.skip -= 1
            return False
        self.times -= 1
        return True


class Quota:
    """So many commits in a window of time, which opens with the first; then 429, with headers as the Hub's."""

    def __init__(self, commits: int, window_s: float) -> None:
        self.commits = commits
        self.window_s = window_s
        self.refused = 0
        self._taken: list[float] = []

    def refusal(self) -> dict[str, str] | None:
        """Take a commit out of the quota; the headers of a refusal where nothing is left."""
        now = time.monotonic()
        self._taken = [taken for taken in self._taken if now - taken < self.window_s]
        if len(self._taken) < self.commits:
            self._taken.append(now)
            return None
        self.refused += 1
        reset_s = int(self._taken[0] + self.window_s - now) + 1
        policy = f'"fixed window";"commits";q={self.commits};w={self.window_s:g}'
        return {"RateLimit": f'"commits";r=0;t={reset_s}', "RateLimit-Policy": policy}


class Hold:
    """Requests that wait, unanswered and without effect, until they are let go: the moment to kill who sent them."""

    def __init__(self, method: str, path: str) -> None:
        self.method = method
        self.path = path
        self.waiting = 0
        self._free = threading.Event()

    async def pass_through(self, request: web.Request) -> None:
        """Wait, if this request is one of those."""
        if self._free.is_set() or request.method != self.method or self.path not in request.path:
            return
        self.waiting += 1
        try:
            while not self._free.is_set():
                await asyncio.sleep(0.01)
                if request.transport is None or request.transport.is_closing():
                    raise HubError(503, "whoever asked is gone")
        finally:
            self.waiting -= 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._free.set()


class Uploads:
    """How large files come in: by addresses that may have expired, and at a bounded speed."""

    def __init__(self) -> None:
        self.bytes_per_s = 0.0
        self.bytes_received = 0
        self.expired = 0
        self._to_expire = 0
        self._numbers = itertools.count()
        self._dead: set[str] = set()

    def expire(self, times: int) -> None:
        """Let the next `times` addresses that are given out be refused when they are used."""
        self._to_expire += times

    def ticket(self) -> str:
        """Number an address."""
        ticket = str(next(self._numbers))
        if self._to_expire:
            self._to_expire -= 1
            self._dead.add(ticket)
        return ticket

    def is_dead(self, request: web.Request) -> bool:
        """Whether the address of this request has expired."""
        dead = request.query.get("ticket") in self._dead
        self.expired += dead
        return dead

    async def receive(self, request: web.Request) -> bytes:
        """Read a body, piece by piece where the line is slow."""
        pieces = []
        async for piece in request.content.iter_chunked(UPLOAD_PIECE_BYTES):
            pieces.append(piece)
            self.bytes_received += len(piece)
            if self.bytes_per_s:
                await asyncio.sleep(len(piece) / self.bytes_per_s)
        return b"".join(pieces)


class Faults:
    """All that is wrong with a stand-in."""

    def __init__(self) -> None:
        self.failures: list[Failure] = []
        self.holds: list[Hold] = []
        self.uploads = Uploads()
        self.quota: Quota | None = None

    def due(self, request: web.Request) -> Failure | None:
        """The scripted refusal of this request."""
        return next((failure for failure in self.failures if failure.strikes(request)), None)
