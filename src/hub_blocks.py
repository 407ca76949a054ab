"""Blocks of a Hub dataset, by the verbs of a folder: found on the work ref by any machine, and published from there.

Where there is no work ref, the blocks on the target branch are those that are there.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from .blocks import WHOLE, BlockFolder, Shard, Whole, count_values, settings_in
from .errors import PublishError, network_errors
from .patience import Patience
from .publish import blocks_at, publish
from .uploads import Uploads
from .verify import verify
from .work_ref import Destination, has_branch, work_ref

if TYPE_CHECKING:
    import pyarrow as pa

LOOK_RETRY_S = 120.0
REMOTE_BLOCK_BYTES = 64 * 1024  # fetched at once of a block on the Hub: its footer, and the small columns of a block

LookedT = TypeVar("LookedT")


class HubBlocks:
    """The blocks of one split of a Hub dataset. `counted_column` is one whose values are counted as blocks are written:
    of these the Hub need not be asked."""

    def __init__(
        self,
        place: Destination,
        staging: Path,
        *,
        counted_column: str = "",
        shard: Shard = WHOLE,
        commit_every_s: float = 600.0,
    ) -> None:
        self.place = place
        self._shard = shard
        self._counted_column = counted_column
        self._counted: dict[int, Counter[str]] = {}
        self._work = work_ref(place)
        self._local = BlockFolder(staging, place.target, shard)
        self._uploads = Uploads(
            place.repo_id, self._local, self._work, commit_every_s=commit_every_s, on_commit=self._note_commit
        )
        self._begins_anew = False
        self._at = place.revision
        self._there: dict[int, int] | None = None  # block → bytes; replaced, never changed: two threads read it

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
        self._at = self._work.find() or self.place.revision
        return {number: block.size for number, block in blocks_at(self.place, self._at).items()}

    def _note_commit(self, committed: Mapping[int, int]) -> None:
        self._there = {**self._on_hub(), **committed}

    def _looked(self, look: Callable[[], LookedT], what: str) -> LookedT:
        try:
            return Patience(LOOK_RETRY_S).call(look, f"{self.place}: {what}")
        except network_errors() as error:
            raise PublishError(f"{self.place}: {what} failed: {error}; run again to go on") from error

    def where(self, number: int) -> str:
        """Say where block `number` is, or will be."""
        return f"{self.place}: {self.place.target.block_name(number)}"

    def read(self, number: int, columns: list[str]) -> pa.Table:
        """Read some columns of a block; from the Hub only their bytes are fetched."""
        import pyarrow.parquet as pq

        return self._with(number, lambda file: pq.read_table(file, columns=columns))

    def count(self, number: int, column: str) -> Counter[str]:
        """Count the values in a column of a block."""
        if column == self._counted_column and number in self._counted:
            return self._counted[number]
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

        return self._looked(look_there, f"reading {self.place.target.block_name(number)}")

    def _opened(self, number: int) -> Any:
        from huggingface_hub import HfFileSystem

        # Told the size, it lists no folder: that would cost as many requests as there are thousands of blocks, and go
        # stale.
        return HfFileSystem().open(
            f"datasets/{self.place.repo_id}/{self.place.target.block_name(number)}",
            "rb",
            revision=self._at,
            size=self._on_hub()[number],
            block_size=REMOTE_BLOCK_BYTES,
        )

    # What is written

    def unpublished(self) -> bool:
        """Whether closed blocks wait here for their commit."""
        return bool(self._closed_here())

    def remove_all(self) -> None:
        """Forget the blocks of this split. On the Hub they go when the first new one is written, and for readers of the
        target branch when all new ones are there."""
        for number in self._closed_here():
            self._local.path(number).unlink()
        self._begins_anew = True
        self._there = {}

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep a second run on this machine out of the staging folder, and upload what closes, until the end.

        Leaving, all that is closed is committed, whatever the way out is. Raises `PublishError` where that fails.
        """
        from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

        with self._local.locked():
            disable_progress_bars()  # those of uploads would break the lines that people read
            self._uploads.measure_disk()
            first_error = None
            try:
                yield
            except BaseException as error:
                first_error = error
                raise
            finally:
                self._uploads.end(first_error)
            self._there = None  # other shards have added theirs

    def get_ready(self, *, to_write: bool) -> None:
        """Open the work ref where it is needed, and send on their way the blocks that an earlier run left here.

        Opening it shows, before any GPU time, whether we may write there.
        """
        leftovers = sorted(self._closed_here())
        if to_write or leftovers:
            self._looked(self._open_work_ref, "opening the ref that blocks are collected on")
        for number in leftovers:
            self._uploads.send(number)

    def _open_work_ref(self) -> None:
        repo_id, revision = self.place.repo_id, self.place.revision
        starts_empty = self._begins_anew or (self._work.find() is None and not has_branch(repo_id, revision))
        self._at = self._uploads.revision = self._work.open(anew=self._begins_anew)
        if starts_empty:
            self._remove_inherited()

    def _remove_inherited(self) -> None:
        """Remove the blocks that the work ref has from where it began."""
        from huggingface_hub import CommitOperationDelete, HfApi

        inherited = [self.place.target.block_name(number) for number in sorted(blocks_at(self.place, self._at))]
        if inherited:
            HfApi().create_commit(
                self.place.repo_id,
                [CommitOperationDelete(name) for name in inherited],
                repo_type="dataset",
                revision=self._at,
                commit_message=f"Start split {self.place.target} anew",
            )

    def write(self, number: int, table: pa.Table) -> None:
        """Write a block here and send it on its way; waits where too many are under way."""
        self._uploads.wait_for_room()
        self._local.write(number, table)
        if self._counted_column in table.schema.names:
            self._counted[number] = Counter(table[self._counted_column].to_pylist())
        self._uploads.send(number)
        self._uploads.raise_failure()

    def publish(self, whole: Whole) -> str | None:
        """Make the split visible to readers, in one commit, and look at it as they do; return its address.

        Raises `PublishError` where that fails, or where a reader would not find what is expected.
        """
        collected = self._looked(self._work.find, "looking for what is collected")
        if collected or whole.insists:
            kept = f"{place_of(self.place, collected)} keeps all blocks; the same command goes on"
            published = publish(self.place, self._work, whole, kept)
            first = self.read(0, list(whole.text_columns)).slice(0, 1).to_pylist()
            verify(self.place, published, whole, first, kept)
            self._looked(self._work.close, "putting away the ref that blocks were collected on")
        return self._looked(self._work.address, "asking for its address")

    def collected(self) -> str:
        """Say where the blocks are that are there already."""
        return place_of(self.place, None if self._at == self.place.revision else self._at)


def place_of(place: Destination, collected: str | None) -> str:
    """Name the ref of a dataset on which blocks are."""
    return f"{place.repo_id}@{collected}" if collected else str(place)
