"""Blocks of a Hub dataset: uploaded as they close, committed rarely, and found there by any machine.

A closed block is written to a local folder first, uploaded at once (which nobody sees), and becomes visible with the
next commit: every `commit_every_s` seconds, and at the end, whatever the end is. What is committed leaves the
local folder, so that the disk holds what is under way and no more. What could not be committed stays there, and the
next run on the machine commits it.
"""

from __future__ import annotations

import contextlib
import queue
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from .blocks import WHOLE, BlockFolder, Shard, Target, count_values, settings_in
from .errors import JobError, PublishError, network_errors
from .interrupt import Interrupted
from .patience import Patience
from .publish import read_card

if TYPE_CHECKING:
    import pyarrow as pa

MOST_IN_A_COMMIT = 200
MOST_STAGED = 400  # blocks that wait for upload or commit; beyond it closing a block waits, and so does the engine
MOST_STAGED_BYTES = 32 * 1024**3  # the same for their bytes; where the disk has less than twice that, half of it
PUBLISH_RETRY_S = 1800.0
LOOK_RETRY_S = 120.0
HURRY_S = 15.0  # what is tried again after a signal: whoever sends one kills soon
REMOTE_BLOCK_BYTES = 64 * 1024  # fetched at once of a block on the Hub: its footer, and the small columns of a block

LookedT = TypeVar("LookedT")


class HubBlocks:
    """The blocks of one split of a Hub dataset, by the same verbs as `BlockFolder`.

    `first_card` makes, of the card that is there, one in which the split is named. It goes out with the first commit:
    what `load_dataset` needs has to stand there as long as the run is under way, too.
    """

    def __init__(
        self,
        repo_id: str,
        target: Target,
        staging: Path,
        *,
        private: bool,
        first_card: Callable[[str], str],
        shard: Shard = WHOLE,
        commit_every_s: float = 600.0,
    ) -> None:
        self.repo_id = repo_id
        self.target = target
        self._first_card = first_card
        self._local = BlockFolder(staging, target, shard)
        self._private = private
        self._shard = shard
        self._commit_every_s = commit_every_s
        self._patience = Patience(PUBLISH_RETRY_S)
        self._there: dict[int, int] | None = None  # block → bytes; replaced, never changed: two threads read it
        self._waiting: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._uploaded: list[tuple[int, Any]] = []
        self._last_commit = time.monotonic()
        self._card_names_us = False
        self._staged: dict[int, int] = {}  # block → bytes, of those that wait for upload or commit
        self._room = threading.Condition()
        self._most_bytes = MOST_STAGED_BYTES
        self._failure: PublishError | None = None
        self._thread: threading.Thread | None = None

    # What is there

    def closed(self) -> set[int]:
        """Return the numbers of the blocks that are on the Hub, or lie here on their way to it."""
        here = self._closed_here()  # before the others: a block goes from here to there
        return here | self._on_hub().keys()

    def _closed_here(self) -> set[int]:
        """Only this shard's: other shards of this machine share the folder, and publish their own."""
        return {number for number in self._local.closed() if self._shard.holds(number)}

    def _on_hub(self) -> dict[int, int]:
        if self._there is None:
            self._there = self._looked(self._listed, "listing its blocks")
        return self._there

    def _listed(self) -> dict[int, int]:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError

        found: dict[int, int] = {}
        try:
            for entry in HfApi().list_repo_tree(self.repo_id, self.target.folder, repo_type="dataset"):
                number = self.target.block_number(entry.path)
                if number is not None:
                    found[number] = int(getattr(entry, "size", 0))
        except (RepositoryNotFoundError, EntryNotFoundError):
            return {}
        return found

    def _looked(self, look: Callable[[], LookedT], what: str) -> LookedT:
        try:
            return Patience(LOOK_RETRY_S).call(look, f"{self.repo_id}: {what}")
        except network_errors() as error:
            raise PublishError(f"{self.repo_id}: {what} failed: {error}; run again to go on") from error

    def where(self, number: int) -> str:
        """Say where block `number` is, or will be."""
        return f"{self.repo_id}: {self.target.block_name(number)}"

    def read(self, number: int, columns: list[str]) -> pa.Table:
        """Read some columns of a block; from the Hub only their bytes are fetched."""
        import pyarrow.parquet as pq

        return self._with(number, lambda file: pq.read_table(file, columns=columns))

    def count(self, number: int, column: str) -> Counter[str]:
        """Count the values in a column of a block."""
        return self._with(number, lambda file: count_values(file, column))

    def stored_settings(self) -> list[bytes | None]:
        """Return what the first block here, and the first on the Hub, say of the settings they were made with."""
        firsts = {min(numbers) for numbers in (self._closed_here(), self._on_hub()) if numbers}
        return [self._with(number, settings_in) for number in sorted(firsts)]

    def _with(self, number: int, look: Callable[[Any], LookedT]) -> LookedT:
        """Look into a block's file, here or on the Hub."""
        if number in self._closed_here():
            with contextlib.suppress(FileNotFoundError):  # committed in this moment, and so removed here
                return look(self._local.path(number))

        def look_there() -> LookedT:
            with self._opened(number) as file:
                return look(file)

        return self._looked(look_there, f"reading {self.target.block_name(number)}")

    def _opened(self, number: int) -> Any:
        from huggingface_hub import HfFileSystem

        # Told the size, it lists no folder: that would cost as many requests as there are thousands of blocks, and go
        # stale.
        return HfFileSystem().open(
            f"datasets/{self.repo_id}/{self.target.block_name(number)}",
            "rb",
            size=self._on_hub()[number],
            block_size=REMOTE_BLOCK_BYTES,
        )

    # What is written

    def unpublished(self) -> bool:
        """Whether closed blocks wait here for being published."""
        return bool(self._closed_here())

    def remove_all(self) -> None:
        """Remove the blocks of this split, here and, in one commit, on the Hub."""
        from huggingface_hub import CommitOperationDelete, HfApi

        for number in self._closed_here():
            self._local.path(number).unlink()

        def remove_there() -> None:
            names = [self.target.block_name(number) for number in sorted(self._listed())]
            if names:
                HfApi().create_commit(
                    self.repo_id,
                    [CommitOperationDelete(name) for name in names],
                    repo_type="dataset",
                    commit_message=f"Start split {self.target} anew",
                )

        self._looked(remove_there, "removing the blocks that are there")
        self._there = {}

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep a second run on this machine out of the staging folder, and upload what closes, until the end.

        Leaving, all that is closed is committed, whatever the way out is. Raises `PublishError` where that fails.
        """
        with self._local.locked():
            self._most_bytes = min(MOST_STAGED_BYTES, shutil.disk_usage(self._local.root).free // 2)
            first_error = None
            try:
                yield
            except BaseException as error:
                first_error = error
                raise
            finally:
                self._end(first_error)
            self._there = None  # other shards have added theirs

    def get_ready(self, *, to_write: bool) -> None:
        """Create the dataset where it is missing, and send on their way the blocks that an earlier run left here.

        Creating it shows, before any GPU time, whether we may write there.
        """
        from huggingface_hub import HfApi

        leftovers = sorted(self._closed_here())
        if to_write or leftovers:
            self._looked(
                lambda: HfApi().create_repo(self.repo_id, repo_type="dataset", private=self._private, exist_ok=True),
                "creating it",
            )
        for number in leftovers:
            self._send_on_its_way(number)

    def write(self, number: int, table: pa.Table) -> None:
        """Write a block here and send it on its way; waits where too many are under way."""
        with self._room:
            while len(self._staged) >= MOST_STAGED or sum(self._staged.values()) >= self._most_bytes > 0:
                self._raise_failure()
                self._room.wait(1.0)
        self._local.write(number, table)
        self._send_on_its_way(number)
        self._raise_failure()

    def _send_on_its_way(self, number: int) -> None:
        with self._room:
            self._staged[number] = self._local.path(number).stat().st_size
        self._waiting.put(number)
        if self._thread is None:
            self._thread = threading.Thread(target=self._upload, name="upload", daemon=True)
            self._thread.start()

    def _end(self, first_error: BaseException | None) -> None:
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
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure:
            raise self._failure

    # The thread that uploads

    def _upload(self) -> None:
        try:
            while True:
                number = self._next_closed()
                if number is None:
                    break
                if number >= 0:
                    self._send(number)
                if self._uploaded and self._is_due():
                    self._commit()
            self._commit()
        except Exception as error:  # noqa: BLE001 - the thread's end: the run must hear of it
            self._failure = PublishError(
                f"publishing to {self.repo_id} failed: {type(error).__name__}: {error}. What is not there yet is kept "
                f"in {self._local.root}; the same command publishes it without asking about a page again"
            )
        finally:
            with self._room:
                self._room.notify_all()

    def _next_closed(self) -> int | None:
        """Wait for the next closed block; None at the end, −1 where a commit is due before it comes."""
        wait_s = max(0.0, self._last_commit + self._commit_every_s - time.monotonic())
        try:
            return self._waiting.get(timeout=wait_s if self._uploaded else None)
        except queue.Empty:
            return -1

    def _is_due(self) -> bool:
        since_s = time.monotonic() - self._last_commit
        return (
            since_s >= self._commit_every_s
            or (self._patience.is_hurried and since_s >= HURRY_S / 3)
            or len(self._uploaded) >= MOST_IN_A_COMMIT
            or 2 * sum(self._staged[number] for number, _ in self._uploaded) >= self._most_bytes
        )

    def _send(self, number: int) -> None:
        from huggingface_hub import CommitOperationAdd, HfApi

        addition = CommitOperationAdd(self.target.block_name(number), self._local.path(number))
        self._patience.call(
            lambda: HfApi().preupload_lfs_files(self.repo_id, [addition], repo_type="dataset"),
            f"uploading to {self.repo_id}",
        )
        self._uploaded.append((number, addition))

    def _commit(self) -> None:
        if not self._uploaded:
            return
        self._patience.call(self._create_commit, f"committing to {self.repo_id}")
        committed, self._uploaded = self._uploaded, []
        self._last_commit = time.monotonic()
        self._there = {**self._on_hub(), **{number: self._staged[number] for number, _ in committed}}
        for number, _ in committed:
            self._local.path(number).unlink(missing_ok=True)
        with self._room:
            for number, _ in committed:
                del self._staged[number]
            self._room.notify_all()

    def _create_commit(self) -> None:
        from huggingface_hub import CommitOperationAdd, HfApi

        operations = [addition for _, addition in self._uploaded]
        parent = None
        if not self._card_names_us:
            commit, earlier = read_card(self.repo_id)
            card = self._first_card(earlier)
            if card != earlier:
                operations.append(CommitOperationAdd("README.md", card.encode()))
                parent = commit  # a card that another run writes meanwhile must not be lost
        HfApi().create_commit(
            self.repo_id,
            operations,
            repo_type="dataset",
            commit_message=f"Blocks of split {self.target}: {len(self._uploaded)}",
            parent_commit=parent,
        )
        self._card_names_us = True
