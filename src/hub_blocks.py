"""Blocks of a Hub dataset: uploaded as they close, committed rarely, and found there by any machine.

A closed block is written to a local folder first, uploaded at once (which nobody sees), and becomes visible with the
next commit: every `commit_every_s` seconds, and at the end, whatever the end is. What is committed leaves the local
folder, so that the disk holds what is under way and no more.
"""

from __future__ import annotations

import contextlib
import queue
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .blocks import SETTINGS_KEY, WHOLE, BlockFolder, Shard, block_name, block_number
from .errors import PublishError, network_errors
from .report import say

if TYPE_CHECKING:
    import pyarrow as pa

MOST_STAGED = 64  # blocks that wait for upload or commit; beyond it closing a block waits, and so does the engine
MOST_IN_A_COMMIT = 200
LONGEST_HUB_PAUSE_S = 60.0


@dataclass
class _Staged:
    """Blocks on their way to the Hub: `uploaded` ones wait for the next commit."""

    uploaded: list[Any] = field(default_factory=list)
    last_commit: float = field(default_factory=time.monotonic)


class HubBlocks:
    """The blocks of one split of a Hub dataset, by the same verbs as `BlockFolder`."""

    def __init__(
        self,
        repo_id: str,
        split: str,
        staging: Path,
        *,
        private: bool,
        shard: Shard = WHOLE,
        commit_every_s: float = 600.0,
        retry_for_s: float = 1800.0,
    ) -> None:
        self.repo_id = repo_id
        self.split = split
        self.commits = 0
        self._local = BlockFolder(staging, split, shard)
        self._private = private
        self._commit_every_s = commit_every_s
        self._retry_for_s = retry_for_s
        self._there: set[int] | None = None
        self._waiting: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._room = threading.Semaphore(MOST_STAGED)
        self._staged = _Staged()
        self._failure: PublishError | None = None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    # What is there

    def closed(self) -> set[int]:
        """Return the numbers of the blocks that are on the Hub, or lie here on their way to it."""
        if self._there is None:
            self._there = self._listed()
        return self._there | self._local.closed()

    def _listed(self) -> set[int]:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError

        try:
            entries = list(HfApi().list_repo_tree(self.repo_id, "data", repo_type="dataset"))
        except (RepositoryNotFoundError, EntryNotFoundError):
            return set()
        numbers = (block_number(self.split, entry.path.removeprefix("data/")) for entry in entries)
        return {number for number in numbers if number is not None}

    def where(self, number: int) -> str:
        """Say where block `number` is, or will be."""
        return f"{self.repo_id}: {block_name(self.split, number)}"

    def read(self, number: int, columns: list[str]) -> pa.Table:
        """Read some columns of a block; from the Hub only their bytes are fetched."""
        import pyarrow.parquet as pq

        if number in self._local.closed():
            return self._local.read(number, columns)
        with self._open(number) as file:
            return pq.read_table(file, columns=columns)

    def stored_settings(self) -> bytes | None:
        """Return what the first block that is there says of the settings it was made with; None if it says nothing."""
        import pyarrow.parquet as pq

        number = min(self._local.closed() or self.closed())
        if number in self._local.closed():
            return self._local.stored_settings()
        with self._open(number) as file:
            metadata: dict[bytes, bytes] = pq.read_schema(file).metadata or {}
        return metadata.get(SETTINGS_KEY)

    def _open(self, number: int) -> Any:
        from huggingface_hub import HfFileSystem

        return HfFileSystem().open(
            f"datasets/{self.repo_id}/{block_name(self.split, number)}", "rb", block_size=256 * 1024
        )

    # What is written

    def remove_all(self) -> None:
        """Remove the blocks of this split, here and, in one commit, on the Hub."""
        from huggingface_hub import CommitOperationDelete, HfApi

        self._local.remove_all()
        there = self._listed()
        if there:
            deletions = [CommitOperationDelete(block_name(self.split, number)) for number in sorted(there)]
            HfApi().create_commit(
                self.repo_id, deletions, repo_type="dataset", commit_message=f"Start split {self.split} anew"
            )
        self._there = set()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep a second run on this machine out of the staging folder, and upload what closes, until the end.

        Leaving, all that is closed is committed, whatever the way out is. Raises `PublishError` where that fails.
        """
        with self._local.locked():
            for number in sorted(self._local.closed()):  # closed by a run that could not publish them
                self._waiting.put(number)
            self._thread = threading.Thread(target=self._upload, name="upload", daemon=True)
            self._thread.start()
            try:
                yield
            finally:
                self.flush()

    def write(self, number: int, table: pa.Table) -> None:
        """Write a block here and send it on its way; waits where too many are under way."""
        while not self._room.acquire(timeout=1.0):
            self._raise_failure()
        self._local.write(number, table)
        self._waiting.put(number)
        self._raise_failure()

    def flush(self) -> None:
        """Wait until all that is closed is committed. Raises `PublishError` where it could not be."""
        if self._thread is None:
            return
        self._stopping.set()
        self._waiting.put(None)
        self._thread.join()
        self._thread = None
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure:
            raise self._failure

    # The thread that uploads

    def _upload(self) -> None:
        try:
            self._create_repo()
            while True:
                wait_s = max(0.0, self._staged.last_commit + self._commit_every_s - time.monotonic())
                with contextlib.suppress(queue.Empty):
                    number = self._waiting.get(timeout=wait_s if self._staged.uploaded else None)
                    if number is None:
                        break
                    self._send(number)
                due = time.monotonic() >= self._staged.last_commit + self._commit_every_s
                if self._staged.uploaded and (due or len(self._staged.uploaded) >= MOST_IN_A_COMMIT):
                    self._commit()
            self._commit()
        except Exception as error:  # noqa: BLE001 - the thread's end: the run must hear of it
            self._failure = PublishError(
                f"publishing to {self.repo_id} failed: {type(error).__name__}: {error}. What is not there yet is kept "
                f"in {self._local.root}; the same command publishes it without asking about a page again"
            )

    def _create_repo(self) -> None:
        from huggingface_hub import HfApi

        self._retried(
            lambda: HfApi().create_repo(self.repo_id, repo_type="dataset", private=self._private, exist_ok=True)
        )

    def _send(self, number: int) -> None:
        from huggingface_hub import CommitOperationAdd, HfApi

        addition = CommitOperationAdd(block_name(self.split, number), self._local.path(number))
        self._retried(lambda: HfApi().preupload_lfs_files(self.repo_id, [addition], repo_type="dataset"))
        self._staged.uploaded.append((number, addition))

    def _commit(self) -> None:
        from huggingface_hub import HfApi

        uploaded, self._staged.uploaded = self._staged.uploaded, []
        self._staged.last_commit = time.monotonic()
        if not uploaded:
            return
        additions = [addition for _, addition in uploaded]
        message = f"{len(additions)} blocks of split {self.split}"
        self._retried(
            lambda: HfApi().create_commit(self.repo_id, additions, repo_type="dataset", commit_message=message)
        )
        self.commits += 1
        for number, _ in uploaded:
            assert self._there is not None
            self._there.add(number)
            self._local.path(number).unlink()
            self._room.release()

    def _retried(self, action: Any) -> None:
        """Do what the Hub may refuse for a while: quotas, races of several writers, its own troubles."""
        give_up_at = time.monotonic() + self._retry_for_s
        pause_s = 1.0
        while True:
            try:
                action()
            except network_errors() as error:
                response = getattr(error, "response", None)
                status = getattr(response, "status_code", None)
                permanent = status is not None and status < 500 and status not in {408, 409, 412, 429}
                if permanent or time.monotonic() >= give_up_at:
                    raise
                wished = float(response.headers.get("retry-after") or 0) if response is not None else 0.0
                wait_s = max(wished, pause_s * random.uniform(0.5, 1.0))  # noqa: S311 - jitter, not a secret
                say(f"the Hub refuses for now ({error}); trying again in {wait_s:.0f} s")
                time.sleep(wait_s)
                pause_s = min(LONGEST_HUB_PAUSE_S, 2 * pause_s)
            else:
                return
