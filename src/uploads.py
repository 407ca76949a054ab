"""Closed blocks on their way to the Hub, by a thread of their own: uploaded at once, committed rarely.

A closed block lies in a local folder first. It is uploaded, which nobody sees, and is there for other runs with the
next commit to the work ref: every `commit_every_s` seconds, and at the end, whatever the end is. What is committed
leaves the local folder, so that the disk holds what is under way and no more. What could not be committed stays
there, and the next run on the machine commits it.
"""

from __future__ import annotations

import contextlib
import queue
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .blocks import BlockFolder
from .errors import JobError, PublishError
from .interrupt import Interrupted
from .patience import Patience
from .work_ref import WorkRef

MOST_AT_ONCE = 32  # blocks uploaded with one question where to put them
MOST_IN_A_COMMIT = 200
MOST_STAGED = 400  # blocks that wait for upload or commit; beyond it closing a block waits, and so does the engine
MOST_STAGED_BYTES = 32 * 1024**3  # the same for their bytes; where the disk has less than twice that, half of it
PUBLISH_RETRY_S = 1800.0
HURRY_S = 15.0  # what is tried again after a signal: whoever sends one kills soon


class Uploads:
    """What is between a closed block and its commit. `on_commit` is told the blocks of each, with their sizes."""

    def __init__(
        self,
        repo_id: str,
        local: BlockFolder,
        work: WorkRef,
        *,
        commit_every_s: float,
        on_commit: Callable[[Mapping[int, int]], None],
    ) -> None:
        self.revision = ""  # of the work ref, once it is open
        self._repo_id = repo_id
        self._local = local
        self._work = work
        self._commit_every_s = commit_every_s
        self._on_commit = on_commit
        self._patience = Patience(PUBLISH_RETRY_S)
        self._waiting: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._uploaded: list[tuple[int, Any]] = []
        self._last_commit = time.monotonic()
        self._staged: dict[int, int] = {}  # block → bytes, of those that wait for upload or commit
        self._room = threading.Condition()
        self._most_bytes = MOST_STAGED_BYTES
        self._failure: PublishError | None = None
        self._thread: threading.Thread | None = None

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
        if self._thread is None:
            return
        if isinstance(first_error, Interrupted):
            self._patience.hurry(HURRY_S)
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
                f"publishing to {self._repo_id} failed: {type(error).__name__}: {error}. What is not there yet is kept "
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
            or 2 * sum(self._staged[number] for number, _ in self._uploaded) >= self._most_bytes
        )

    def _send(self, numbers: list[int]) -> None:
        from huggingface_hub import CommitOperationAdd

        names = {number: self._local.target.block_name(number) for number in numbers}
        additions = [CommitOperationAdd(name, self._local.path(number)) for number, name in names.items()]
        self._patience.call(
            lambda: self._on_work_ref(lambda revision: upload_files(self._repo_id, additions, revision)),
            f"uploading to {self._repo_id}",
        )
        self._uploaded += zip(numbers, additions, strict=True)

    def _commit(self) -> None:
        if not self._uploaded:
            return
        self._patience.call(lambda: self._on_work_ref(self._create_commit), f"committing to {self._repo_id}")
        committed, self._uploaded = self._uploaded, []
        self._last_commit = time.monotonic()
        self._on_commit({number: self._staged[number] for number, _ in committed})
        for number, _ in committed:
            self._local.path(number).unlink(missing_ok=True)
        with self._room:
            for number, _ in committed:
                del self._staged[number]
            self._room.notify_all()

    def _create_commit(self, revision: str) -> None:
        from huggingface_hub import HfApi

        HfApi().create_commit(
            self._repo_id,
            [addition for _, addition in self._uploaded],
            repo_type="dataset",
            revision=revision,
            commit_message=f"Blocks of split {self._local.target}: {len(self._uploaded)}",
        )

    def _on_work_ref(self, act: Callable[[str], None]) -> None:
        """Do something at the work ref, opened again where another shard has found all blocks there and published."""
        from huggingface_hub.errors import RevisionNotFoundError

        try:
            act(self.revision)
        except RevisionNotFoundError:
            self.revision = self._work.open()
            act(self.revision)


def upload_files(repo_id: str, additions: Sequence[Any], revision: str) -> None:
    """Upload files, which nobody sees before they are committed. Raises what the client does, but for `RuntimeError`:
    so it wraps whatever went wrong with one file, an address to upload to that has expired for one. Another try is
    given new addresses."""
    from huggingface_hub import HfApi

    try:
        HfApi().preupload_lfs_files(repo_id, additions, repo_type="dataset", revision=revision)
    except RuntimeError as error:
        cause = error.__cause__ or error
        if isinstance(cause, FileNotFoundError | PermissionError):
            raise cause from error
        status = getattr(getattr(cause, "response", None), "status_code", "no answer")
        raise ConnectionError(f"{error} ({type(cause).__name__}, {status})") from error
