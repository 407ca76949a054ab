"""Closed blocks on their way to the Hub, by a thread of their own: uploaded at once, committed rarely.

A closed block lies in a local folder first. It is uploaded, which nobody sees, and is there for other runs with the
next commit: every `commit_every_s` seconds, and at the end, whatever the end is. What is committed leaves the local
folder, so that the disk holds what is under way and no more. What could not be committed stays there, and the next
run on the machine commits it. How a block is uploaded and committed is the carrier's.
"""

from __future__ import annotations

import contextlib
import queue
import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Protocol

from .blocks import BlockFolder
from .errors import JobError, PublishError
from .interrupt import Interrupted
from .patience import Patience

MOST_AT_ONCE = 32  # blocks uploaded with one question where to put them
MOST_IN_A_COMMIT = 200
MOST_STAGED = 400  # blocks that wait for upload or commit; beyond it closing a block waits, and so does the engine
MOST_STAGED_BYTES = 32 * 1024**3  # the same for their bytes; where the disk has less than twice that, half of it
PUBLISH_RETRY_S = 1800.0
HURRY_S = 15.0  # what is tried again after a signal: whoever sends one kills soon


class Carrier(Protocol):
    """Brings blocks to where they belong. Its methods raise what the client raises."""

    def upload(self, files: Mapping[int, Path]) -> None:
        """Upload some blocks."""

    def commit(self, numbers: Collection[int]) -> None:
        """Let other runs find the blocks that were uploaded."""


class Uploads:
    """What is between a closed block and its commit. `on_commit` is told the blocks of each, with their sizes."""

    def __init__(
        self,
        place: str,
        local: BlockFolder,
        carrier: Carrier,
        *,
        commit_every_s: float,
        on_commit: Callable[[Mapping[int, int]], None],
    ) -> None:
        self._place = place
        self._local = local
        self._carrier = carrier
        self._commit_every_s = commit_every_s
        self._on_commit = on_commit
        self._patience = Patience(PUBLISH_RETRY_S)
        self._waiting: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._uploaded: list[int] = []
        self._last_commit = time.monotonic()
        self._staged: dict[int, int] = {}  # block → bytes, of those that wait for upload or commit
        self._room = threading.Condition()
        self._most_bytes = MOST_STAGED_BYTES
        self._failure: PublishError | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_hurried(self) -> bool:
        """Whether the run was told to end, and has little time left."""
        return self._patience.is_hurried

    def measure_disk(self) -> None:
        """Find out how many bytes may wait here."""
        self._most_bytes = min(MOST_STAGED_BYTES, shutil.disk_usage(self._local.root).free // 2)

    def wait_for_room(self) -> None:
        """Wait where too many blocks are under way."""
        with self._room:
            while len(self._staged) >= MOST_STAGED or sum(self._staged.values()) >= self._most_bytes > 0:
                self.raise_failure()
                self._room.wait(1.0)

    def send(self, number: int) -> None:
        """Send a block on its way."""
        with self._room:
            self._staged[number] = self._local.path(number).stat().st_size
        self._waiting.put(number)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="upload", daemon=True)
            self._thread.start()

    def end(self, first_error: BaseException | None) -> None:
        """Wait until all that is closed is committed. Raises `PublishError` where it could not be."""
        if isinstance(first_error, Interrupted):
            self._patience.hurry(HURRY_S)
        if self._thread is None:
            return
        self._waiting.put(None)
        try:
            self._thread.join()
        except Interrupted:
            self._patience.hurry(HURRY_S)
            self._thread.join()
            raise
        finally:
            self._thread = None
        if self._failure and isinstance(first_error, JobError) and first_error is not self._failure:
            raise PublishError(f"{first_error}\nAnd {self._failure}") from first_error
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise what ended the thread, if anything did."""
        if self._failure:
            raise self._failure

    # The thread

    def _run(self) -> None:
        try:
            goes_on = True
            while goes_on:
                numbers, goes_on = self._next_closed()
                if numbers:
                    self._send(numbers)
                if self._uploaded and self._is_due():
                    self._commit()
            self._commit()
        except Exception as error:  # noqa: BLE001 - the thread's end: the run must hear of it
            self._failure = PublishError(
                f"publishing to {self._place} failed: {type(error).__name__}: {error}. What is not there yet is kept "
                f"in {self._local.root}; the same command publishes it without asking about a page again"
            )
        finally:
            with self._room:
                self._room.notify_all()

    def _next_closed(self) -> tuple[list[int], bool]:
        """Wait for closed blocks, or until a commit is due; return them, and whether more may come."""
        wait_s = max(0.0, self._last_commit + self._commit_every_s - time.monotonic())
        most = max(1, min(MOST_AT_ONCE, MOST_IN_A_COMMIT - len(self._uploaded)))
        numbers: list[int] = []
        with contextlib.suppress(queue.Empty):
            number = self._waiting.get(timeout=wait_s if self._uploaded else None)
            while number is not None:
                numbers.append(number)
                if len(numbers) == most:
                    return numbers, True
                number = self._waiting.get_nowait()
            return numbers, False
        return numbers, True

    def _is_due(self) -> bool:
        since_s = time.monotonic() - self._last_commit
        return (
            since_s >= self._commit_every_s
            or (self._patience.is_hurried and since_s >= HURRY_S / 3)
            or len(self._uploaded) >= MOST_IN_A_COMMIT
            or 2 * sum(self._staged[number] for number in self._uploaded) >= self._most_bytes
        )

    def _send(self, numbers: list[int]) -> None:
        files = {number: self._local.path(number) for number in numbers}
        self._patience.call(lambda: self._carrier.upload(files), f"uploading to {self._place}")
        self._uploaded += numbers

    def _commit(self) -> None:
        if not self._uploaded:
            return
        self._patience.call(lambda: self._carrier.commit(self._uploaded), f"committing to {self._place}")
        committed, self._uploaded = self._uploaded, []
        self._last_commit = time.monotonic()
        self._on_commit({number: self._staged[number] for number in committed})
        for number in committed:
            self._local.path(number).unlink(missing_ok=True)
        with self._room:
            for number in committed:
                del self._staged[number]
            self._room.notify_all()
