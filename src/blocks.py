"""Blocks of rows: their names, how one is written, and what is there already.

A split is cut into contiguous blocks of `block_rows` rows. A block is one parquet file, written once and whole, under
a name that is a function of its target and number: the files that exist are the state from which a run resumes.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from .block_files import count_values, settings_in
from .errors import UsageError

if TYPE_CHECKING:
    import pyarrow as pa

SETTINGS_READ = 64  # blocks whose settings are looked into when a run goes on
DEFAULT_CONFIG = "default"
DEFAULT_FOLDER = "data"
INFO_COLUMN = "inference_info"
ROW_COLUMN = "row_index"
COUNT_THREADS = 16  # blocks looked into at once: those of a Hub dataset are far away


@dataclass(frozen=True)
class Target:
    """Which split of which configuration of an output its blocks are."""

    split: str
    config: str = DEFAULT_CONFIG

    def __str__(self) -> str:
        return self.split if self.config == DEFAULT_CONFIG else f"{self.config}/{self.split}"

    @property
    def folder(self) -> str:
        """The folder of the configuration's blocks, relative to the output."""
        return DEFAULT_FOLDER if self.config == DEFAULT_CONFIG else self.config

    @property
    def pattern(self) -> str:
        """What the names of its blocks, and no others, match: as a card says it."""
        return f"{self.folder}/{self.split}-*.parquet"

    def block_name(self, number: int) -> str:
        """Return the name of a block's file, relative to the output."""
        return f"{self.folder}/{self.split}-{number:06d}.parquet"

    def block_number(self, name: str) -> int | None:
        """Return the number of the block in a file, named relative to the output; None if it is no block of ours."""
        match = re.fullmatch(rf"{re.escape(f'{self.folder}/{self.split}')}-(\d{{6}})\.parquet", name)
        return int(match[1]) if match else None


@dataclass(frozen=True)
class BlockPlan:
    """How a split of `num_rows` wanted rows is cut; one without rows is one block without rows."""

    target: Target
    num_rows: int
    block_rows: int

    def __len__(self) -> int:
        return max(1, -(-self.num_rows // self.block_rows))

    def positions(self, number: int) -> range:
        """Which of the wanted rows block `number` holds."""
        return range(number * self.block_rows, min(self.num_rows, (number + 1) * self.block_rows))


@dataclass(frozen=True)
class Shard:
    """One of several runs that share an output: its blocks are those whose number is `index` modulo `count`."""

    index: int = 0
    count: int = 1

    def holds(self, number: int) -> bool:
        """Whether block `number` is this shard's."""
        return number % self.count == self.index


WHOLE = Shard()


@dataclass(frozen=True)
class Whole:
    """A split of which all blocks are there, as its readers have to find it.

    `rows` are those that were counted; `card` makes the card out of the earlier one, and of when the last block was
    written where that has to stand there; `insists` says that it has to be written anew; `text_columns` are the small
    ones, of which a row is compared.
    """

    plan: BlockPlan
    rows: int
    schema: pa.Schema
    card: Callable[[str, str], str]
    text_columns: Sequence[str]
    insists: bool = False


class Blocks(Protocol):
    """The blocks of one split of an output, wherever they lie."""

    def closed(self) -> set[int]:
        """Return the numbers of the blocks that are there."""

    def where(self, number: int) -> str:
        """Say where block `number` is, or will be."""

    def read(self, number: int, columns: list[str]) -> pa.Table:
        """Read some columns of a block."""

    def count(self, number: int, column: str) -> Counter[str]:
        """Count the values in a column of a block."""

    def stored_settings(self) -> list[bytes | None]:
        """Return what blocks that are there say of the settings they were made with; None if one says nothing."""

    def unpublished(self) -> bool:
        """Whether closed blocks wait here for being published."""

    def remove_all(self) -> None:
        """Remove the blocks of this split, and nothing else."""

    def get_ready(self, *, to_write: bool) -> None:
        """Find out whether blocks can be written, where that is asked; go on with what an earlier run left behind."""

    def locked(self) -> AbstractContextManager[None]:
        """Keep a second run out of what this one writes, and leave nothing half done behind."""

    def write(self, number: int, table: pa.Table) -> None:
        """Write block `number`, whole or not at all."""

    def publish(self, whole: Whole) -> str | None:
        """Make a whole split visible to its readers; return where it is, or None where it was visible all along."""

    def collected(self) -> str:
        """Say where the blocks are that are there already."""


class BlockFolder:
    """The blocks of one split in a local folder; of a shard, other shards may be writing there too."""

    def __init__(self, root: Path, target: Target, shard: Shard = WHOLE) -> None:
        self.root = root
        self.target = target
        self._shard = shard
        self._folder = root / target.folder

    def closed(self) -> set[int]:
        """Return the numbers of the blocks that are there."""
        if not self._folder.is_dir():
            return set()
        numbers = (self._number(file.name) for file in self._folder.iterdir())
        return {number for number in numbers if number is not None}

    def _number(self, file_name: str) -> int | None:
        return self.target.block_number(f"{self.target.folder}/{file_name}")

    def path(self, number: int) -> Path:
        """Where block `number` is, or will be."""
        return self.root / self.target.block_name(number)

    def where(self, number: int) -> str:
        """Say where block `number` is, or will be."""
        return str(self.path(number))

    def read(self, number: int, columns: list[str]) -> pa.Table:
        """Read some columns of a block."""
        import pyarrow.parquet as pq

        return pq.read_table(self.path(number), columns=columns)

    def count(self, number: int, column: str) -> Counter[str]:
        """Count the values in a column of a block."""
        return count_values(self.path(number), column)

    def stored_settings(self) -> list[bytes | None]:
        """Return what blocks that are there say of the settings they were made with; None if one says nothing.

        Of very many, the first, the last and some between are looked into.
        """
        closed = sorted(self.closed())
        looked_into = {*closed[:: max(1, len(closed) // SETTINGS_READ)], *closed[-1:]}
        return list(dict.fromkeys(settings_in(self.path(number)) for number in sorted(looked_into)))

    def unpublished(self) -> bool:
        """Blocks of a folder have nowhere to go."""
        return False

    def remove_all(self) -> None:
        """Remove the blocks of this split, and nothing else."""
        for number in self.closed():
            self.path(number).unlink()

    def get_ready(self, *, to_write: bool) -> None:
        """Nothing is to be done: the lock has shown that blocks can be written."""

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep a second run out of this split; sweep up what a killed one left half-written."""
        split = self.target.split
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            lock = (self._folder / f".{split}-{self._shard.index}-of-{self._shard.count}.lock").open("w")
        except OSError as error:
            raise UsageError(f"output {str(self.root)!r} can't be written: {error.strerror}; name another") from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(
                    f"another run is writing split {split!r} of {self.root}; wait for it, or choose another output"
                ) from None
            for leftover in self._folder.glob(f".{split}-*.tmp"):
                number = self._number(leftover.name[1:].removesuffix(".tmp"))
                if number is not None and self._shard.holds(number):
                    leftover.unlink(missing_ok=True)
            yield

    def publish(self, whole: Whole) -> str | None:
        """Blocks of a folder were visible all along."""
        return None

    def collected(self) -> str:
        """Say where the blocks are."""
        return str(self.root)

    def write(self, number: int, table: pa.Table) -> None:
        """Write block `number`, whole or not at all."""
        import pyarrow.parquet as pq

        path = self.path(number)
        half = path.with_name(f".{path.name}.tmp")
        # Content-defined chunking lets the Hub store unchanged pictures once.
        with pq.ParquetWriter(half, table.schema, use_content_defined_chunking=True, write_page_index=True) as writer:
            if table.num_rows:  # `datasets` 5.2 can't read a row group without rows
                writer.write_table(table, row_group_size=100)  # what `datasets` takes for images
        with half.open("rb") as written:
            os.fsync(written.fileno())
        half.replace(path)


def count_statuses(blocks: Blocks, numbers: Iterable[int], output_column: str) -> Counter[str]:
    """Count the statuses of all rows in some closed blocks."""
    counts: Counter[str] = Counter()
    for block_counts in statuses_of(blocks, numbers, output_column).values():
        counts.update(block_counts)
    return counts


def statuses_of(blocks: Blocks, numbers: Iterable[int], output_column: str) -> dict[int, Counter[str]]:
    """Count the statuses in each of some closed blocks."""
    column = f"{output_column}_status"
    wanted = list(numbers)
    with ThreadPoolExecutor(COUNT_THREADS) as pool:
        return dict(zip(wanted, pool.map(lambda number: blocks.count(number, column), wanted), strict=True))
