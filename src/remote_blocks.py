"""Blocks of an output that lies on the Hub, by the verbs of a folder: some there, some here on their way.

Where they are there, how one is opened and how a split is published differs between datasets and buckets, and stands
in rooms of their own.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from .block_files import count_values, settings_in
from .blocks import WHOLE, BlockFolder, Shard, Target, Whole
from .errors import PublishError, network_errors
from .patience import Patience
from .uploads import HURRY_S, Carrier, Uploads

if TYPE_CHECKING:
    import pyarrow as pa

LOOK_RETRY_S = 120.0
REMOTE_BLOCK_BYTES = 64 * 1024  # fetched at once of a block on the Hub: its footer, and the small columns of a block

LookedT = TypeVar("LookedT")


class RemoteBlocks(ABC):
    """The blocks of one split of an output on the Hub. `counted_column` is one whose values are counted as blocks are
    written: of these the Hub need not be asked. `name` is how people call the output."""

    def __init__(
        self,
        name: str,
        target: Target,
        staging: Path,
        carrier: Carrier,
        *,
        counted_column: str = "",
        shard: Shard = WHOLE,
        commit_every_s: float,
    ) -> None:
        self.target = target
        self._name = name
        self._shard = shard
        self._counted_column = counted_column
        self._counted: dict[int, Counter[str]] = {}
        self._local = BlockFolder(staging, target, shard)
        self._uploads = Uploads(name, self._local, carrier, commit_every_s=commit_every_s, on_commit=self._note_commit)
        self._begins_anew = False
        self._there: dict[int, int] | None = None  # block → bytes; replaced, never changed: two threads read it

    @abstractmethod
    def _listed(self) -> dict[int, int]:
        """Return the blocks that are on the Hub, with their sizes."""

    @abstractmethod
    def _opened(self, number: int) -> Any:
        """Open a block that is on the Hub."""

    def _bytes_of(self, number: int) -> int:
        """Return the size of a block that is on the Hub."""
        size = self._on_hub().get(number)
        if size is None:
            raise PublishError(f"{self.where(number)} was removed by somebody; run again to write it anew")
        return size

    @abstractmethod
    def _open_to_write(self) -> None:
        """Make ready what blocks are collected in; fail where we may not write there."""

    @abstractmethod
    def publish(self, whole: Whole) -> str | None:
        """Make a whole split visible to its readers; return where it is."""

    @abstractmethod
    def collected(self) -> str:
        """Say where the blocks are that are there already."""

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

    def _note_commit(self, committed: Mapping[int, int]) -> None:
        self._there = {**self._on_hub(), **committed}

    def _looked(self, look: Callable[[], LookedT], what: str) -> LookedT:
        retry_for_s = HURRY_S if self._uploads.is_hurried else LOOK_RETRY_S
        try:
            return Patience(retry_for_s).call(look, f"{self._name}: {what}")
        except network_errors() as error:
            raise PublishError(f"{self._name}: {what} failed: {error}; run again to go on") from error

    def where(self, number: int) -> str:
        """Say where block `number` is, or will be."""
        return f"{self._name}: {self.target.block_name(number)}"

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

        def look_once() -> LookedT:
            with self._opened(number) as file:
                return look(file)

        def look_there() -> LookedT:
            from huggingface_hub.errors import EntryNotFoundError, RevisionNotFoundError

            try:
                return look_once()
            except (EntryNotFoundError, RevisionNotFoundError):  # another shard published, and put away what it was in
                self._there = None
                return look_once()

        return self._looked(look_there, f"reading {self.target.block_name(number)}")

    # What is written

    def unpublished(self) -> bool:
        """Whether closed blocks wait here for their commit."""
        return bool(self._closed_here())

    def remove_all(self) -> None:
        """Forget the blocks of this split. On the Hub they go when the first new one is written, and for readers when
        all new ones are there."""
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
        """Open what blocks are collected in, where that is needed, and send on their way those that an earlier run
        left here. Opening it shows, before any GPU time, whether we may write there."""
        leftovers = sorted(self._closed_here())
        if to_write or leftovers:
            self._looked(self._open_to_write, "opening what blocks are collected in")
        for number in leftovers:
            self._uploads.send(number)

    def write(self, number: int, table: pa.Table) -> None:
        """Write a block here and send it on its way; waits where too many are under way."""
        self._uploads.wait_for_room()
        self._local.write(number, table)
        if self._counted_column in table.schema.names:
            self._counted[number] = Counter(table[self._counted_column].to_pylist())
        self._uploads.send(number)
        self._uploads.raise_failure()
