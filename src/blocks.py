"""Blocks of rows: their names, how one is written, and what is there already.

A split is cut into contiguous blocks of `block_rows` rows. A block is one parquet file, written once and whole, under
a name that is a function of split and number: the files that exist are the state from which a run resumes.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from .errors import UsageError

if TYPE_CHECKING:
    import pyarrow as pa

SETTINGS_KEY = b"lighton-ocr"  # where a block's parquet metadata holds the settings it was made with
SETTINGS_READ = 64  # blocks whose settings are looked into when a run goes on
INFO_COLUMN = "inference_info"
ROW_COLUMN = "row_index"
COUNT_THREADS = 16  # blocks looked into at once: those of a Hub dataset are far away


@dataclass(frozen=True)
class BlockPlan:
    """How a split of `num_rows` wanted rows is cut."""

    split: str
    num_rows: int
    block_rows: int

    def __len__(self) -> int:
        return -(-self.num_rows // self.block_rows)

    def positions(self, number: int) -> range:
        """Which of the wanted rows block `number` holds."""
        return range(number * self.block_rows, min(self.num_rows, (number + 1) * self.block_rows))


def block_name(split: str, number: int) -> str:
    """Return the name of a block's file, relative to the output."""
    return f"data/{split}-{number:06d}.parquet"


def block_number(split: str, file_name: str) -> int | None:
    """Return the number of the block that `data/`'s `file_name` holds, or None if it is no block of this split."""
    match = re.fullmatch(rf"{re.escape(split)}-(\d{{6}})\.parquet", file_name)
    return int(match[1]) if match else None


@dataclass(frozen=True)
class Shard:
    """One of several runs that share an output: its blocks are those whose number is `index` modulo `count`."""

    index: int = 0
    count: int = 1

    def holds(self, number: int) -> bool:
        """Whether block `number` is this shard's."""
        return number % self.count == self.index


WHOLE = Shard()


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


class BlockFolder:
    """The blocks of one split in a local folder; of a shard, other shards may be writing there too."""

    def __init__(self, root: Path, split: str, shard: Shard = WHOLE) -> None:
        self.root = root
        self.split = split
        self._shard = shard
        self._data = root / "data"

    def closed(self) -> set[int]:
        """Return the numbers of the blocks that are there."""
        if not self._data.is_dir():
            return set()
        numbers = (block_number(self.split, file.name) for file in self._data.iterdir())
        return {number for number in numbers if number is not None}

    def path(self, number: int) -> Path:
        """Where block `number` is, or will be."""
        return self.root / block_name(self.split, number)

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
        try:
            self._data.mkdir(parents=True, exist_ok=True)
            lock = (self._data / f".{self.split}-{self._shard.index}-of-{self._shard.count}.lock").open("w")
        except OSError as error:
            raise UsageError(f"output {str(self.root)!r} can't be written: {error.strerror}; name another") from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(
                    f"another run is writing split {self.split!r} of {self.root}; wait for it, or choose another output"
                ) from None
            for leftover in self._data.glob(f".{self.split}-*.tmp"):
                number = block_number(self.split, leftover.name[1:].removesuffix(".tmp"))
                if number is not None and self._shard.holds(number):
                    leftover.unlink(missing_ok=True)
            yield

    def write(self, number: int, table: pa.Table) -> None:
        """Write block `number`, whole or not at all."""
        import pyarrow.parquet as pq

        path = self.path(number)
        half = path.with_name(f".{path.name}.tmp")
        # Content-defined chunking lets the Hub store unchanged pictures once; 100 rows a group is what `datasets` takes
        # for images.
        pq.write_table(table, half, row_group_size=100, use_content_defined_chunking=True, write_page_index=True)
        with half.open("rb") as written:
            os.fsync(written.fileno())
        half.replace(path)


def settings_in(file: Any) -> bytes | None:
    """Return what a block says of the settings it was made with; None if it says nothing."""
    import pyarrow.parquet as pq

    with whole_block(file):
        metadata: dict[bytes, bytes] = pq.read_schema(file).metadata or {}
    return metadata.get(SETTINGS_KEY)


@contextmanager
def whole_block(file: Any) -> Iterator[None]:
    """Say which file it is that is no block, cut short or from elsewhere."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowInvalid, KeyError) as error:
        name = getattr(file, "path", file)
        raise UsageError(f"{name} is no block of this output ({error}); remove it, and run again") from error


def count_values(source: Any, column: str) -> Counter[str]:
    """Count the values in a column of strings; of row groups in which all are the same, the footer alone is read."""
    import pyarrow.parquet as pq

    counts: Counter[str] = Counter()
    with whole_block(source), pq.ParquetFile(source) as file:
        for group in range(file.metadata.num_row_groups):
            value = _only_value(file.metadata.row_group(group), column)
            if value is None:
                counts.update(file.read_row_group(group, [column])[column].to_pylist())
            else:
                counts[value] += file.metadata.row_group(group).num_rows
    return counts


def _only_value(group: Any, column: str) -> str | None:
    """Return the value that all rows of a row group have in a column, where the statistics in the footer say so."""
    places = (group.column(place) for place in range(group.num_columns - 1, -1, -1))  # ours stand last
    statistics = next((place.statistics for place in places if place.path_in_schema == column), None)
    if statistics is None or not statistics.has_min_max or statistics.null_count or statistics.min != statistics.max:
        return None
    return str(statistics.min)


def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """List the settings that differ, one line each."""
    return [
        f"{key}: was {json.dumps(was.get(key))}, now {json.dumps(now.get(key))}"
        for key in sorted({*was, *now})
        if was.get(key) != now.get(key)
    ]


def check_settings_are_ours(where: str, stored: bytes | None, settings: Mapping[str, Any]) -> None:
    """Raise `UsageError` with the differences where the blocks in `where` were made with other settings than these."""
    if stored is None:
        raise UsageError(
            f"{where} holds blocks that this script did not write; choose another output, or --overwrite them"
        )
    lines = differences(json.loads(stored), settings)
    if lines:
        raise UsageError(
            f"{where} holds blocks of a run with other settings:\n  "
            + "\n  ".join(lines)
            + "\nGive the same settings to resume it, choose another output, or --overwrite to start anew."
        )


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
