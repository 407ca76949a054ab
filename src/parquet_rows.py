"""Rows of parquet files, local or on the Hub, by address.

Footers are read first: file → row groups → rows. Then batch by batch out of the row groups, so that memory is flat
whatever the size of a row group, and a resumed run touches the row groups of its own rows only. What the Hub fails to
give is asked for again from where it broke off, for a while.
"""

from __future__ import annotations

import bisect
import itertools
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import SourceError, network_errors
from .patience import Patience

if TYPE_CHECKING:
    import pyarrow as pa

FOOTER_THREADS = 16
MOST_READ_AHEAD_BYTES = 128 * 1024**2  # a larger row group is not fetched whole but piece by piece
PIECE_BYTES = 8 * 1024**2
REMOTE_AHEAD_BYTES = 256 * 1024  # fetched beyond what is asked for; a row group is asked for in one piece
READS_OF_DAMAGED = 3  # before what can't be decoded is called damaged
BATCH_ROWS = 64  # rows decoded at once out of a row group: what bounds memory when a row group is a whole file


@dataclass(frozen=True)
class RowGroup:
    """One row group of one parquet file, and the address of its first row."""

    file: str
    index: int
    start: int
    num_rows: int


class ParquetRows:
    """Rows of parquet files, local paths or `hf://` addresses, read through their row groups."""

    def __init__(self, files: Sequence[str], features: Any = None, patience: Patience | None = None) -> None:
        self._patience = patience or Patience(0.0)
        with ThreadPoolExecutor(FOOTER_THREADS) as pool:
            try:
                footers = list(pool.map(lambda file: _footer_of(file, self._patience), files))
            except BaseException:
                self._patience.hurry(0.0)  # the pool waits for its threads
                raise
        self._groups = list(_row_groups(files, [footer.counts for footer in footers]))
        self._starts = [group.start for group in self._groups]
        self.num_rows = sum(group.num_rows for group in self._groups)
        self.schema: pa.Schema = footers[0].schema
        self.column_bytes = sum((footer.column_bytes for footer in footers), Counter[str]())
        if features is not None:  # a card's `dataset_info` says more than a file without metadata
            self.schema = self.schema.with_metadata({**(self.schema.metadata or {}), **features.arrow_schema.metadata})
        self._lock = threading.Lock()
        self._stream: tuple[int, Iterator[pa.RecordBatch], pa.Table] | None = None

    def read(self, addresses: Sequence[int]) -> pa.Table:
        """Read rows by address; cheapest is a range that goes on where the last read ended."""
        import pyarrow as pa

        with self._lock:
            if isinstance(addresses, range):
                return pa.concat_tables(self._run(addresses.start, addresses.stop))
            wanted = [int(address) for address in addresses]
            found: dict[int, pa.Table] = {}
            for address in sorted(set(wanted)):
                # a copy, for a slice would keep the whole batch in memory
                found[address] = pa.concat_tables(self._run(address, address + 1)).take([0])
            return pa.concat_tables([found[address] for address in wanted])

    def _run(self, start: int, stop: int) -> Iterator[pa.Table]:
        while start < stop:
            batch_start, batch = self._batch_at(start)
            part = batch.slice(start - batch_start, min(stop, batch_start + batch.num_rows) - start)
            yield part
            start += part.num_rows

    def _batch_at(self, address: int) -> tuple[int, pa.Table]:
        """Return (address of its first row, batch) of the batch that holds `address`, trying again where that helps."""
        import pyarrow as pa

        group = self._groups[bisect.bisect_right(self._starts, address) - 1]
        place = f"reading {group.file}, row group {group.index},"
        try:
            if "://" in group.file:
                damages = itertools.count(1)
                return self._patience.call(lambda: self._sought_from_afar(address, place, damages), place)
            return self._sought(address)
        except (*network_errors(), pa.ArrowInvalid) as error:
            raise SourceError(f"{place} failed: {error}; run again to resume") from error

    def _sought_from_afar(self, address: int, place: str, damages: Iterator[int]) -> tuple[int, pa.Table]:
        """Do as `_sought`. Bytes that pyarrow makes no sense of may have been cut on their way, but not every time."""
        try:
            return self._sought(address)
        except OSError as error:
            if type(error) is OSError and error.errno is None and next(damages) >= READS_OF_DAMAGED:
                raise SourceError(
                    f"{place} failed {READS_OF_DAMAGED} times: {error}; the file is damaged: upload it anew"
                ) from error
            raise

    def _sought(self, address: int) -> tuple[int, pa.Table]:
        """Go on in the open stream to the batch that holds `address`; a stream that breaks is opened anew next time."""
        if self._stream is None or not self._stream_reaches(address):
            group = self._groups[bisect.bisect_right(self._starts, address) - 1]
            self._stream = (group.start, self._open(group), self.schema.empty_table())
        start, batches, batch = self._stream
        self._stream = None
        while address >= start + batch.num_rows:
            start += batch.num_rows
            batch = self._fit(next(batches))
        self._stream = (start, batches, batch)
        return start, batch

    def _stream_reaches(self, address: int) -> bool:
        assert self._stream is not None
        group = self._groups[bisect.bisect_right(self._starts, address) - 1]
        return group.start <= self._stream[0] <= address and self._stream[0] < group.start + group.num_rows

    def _open(self, group: RowGroup) -> Iterator[pa.RecordBatch]:
        import pyarrow.parquet as pq

        with _open_file(group.file) as handle, pq.ParquetFile(handle) as file:
            reader = file
            if file.metadata.row_group(group.index).total_byte_size > MOST_READ_AHEAD_BYTES:
                # by itself pyarrow fetches a row group whole, which costs three times its size
                reader = pq.ParquetFile(handle, metadata=file.metadata, pre_buffer=False, buffer_size=PIECE_BYTES)
            yield from reader.iter_batches(batch_size=BATCH_ROWS, row_groups=[group.index])

    def _fit(self, batch: pa.RecordBatch) -> pa.Table:
        """Give a batch the schema of the first file: later files may order or widen their columns differently."""
        import pyarrow as pa

        table = pa.Table.from_batches([batch])
        if table.schema.equals(self.schema, check_metadata=True):
            return table
        return table.select(self.schema.names).cast(self.schema.remove_metadata()).cast(self.schema)


def _open_file(file: str) -> Any:
    if "://" not in file:
        return Path(file).open("rb")
    from fsspec.core import url_to_fs

    filesystem, path = url_to_fs(file)
    return filesystem.open(path, "rb", block_size=REMOTE_AHEAD_BYTES)


@dataclass(frozen=True)
class Footer:
    """What a parquet file says of itself: the rows of each row group, and the bytes of each column, compressed."""

    counts: Sequence[int]
    schema: pa.Schema
    column_bytes: Counter[str]


def _footer_of(file: str, patience: Patience) -> Footer:
    return patience.call(lambda: _footer(file), f"reading {file}") if "://" in file else _footer(file)


def _footer(file: str) -> Footer:
    import pyarrow.parquet as pq

    sizes: Counter[str] = Counter()
    with _open_file(file) as handle, pq.ParquetFile(handle) as parquet:
        metadata = parquet.metadata
        groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
        for group in groups:
            for place in range(group.num_columns):
                chunk = group.column(place)
                sizes[chunk.path_in_schema.partition(".")[0]] += chunk.total_compressed_size
        return Footer([group.num_rows for group in groups], parquet.schema_arrow, sizes)


def _row_groups(files: Sequence[str], counts: Sequence[Sequence[int]]) -> Iterator[RowGroup]:
    start = 0
    for file, group_rows in zip(files, counts, strict=True):
        for index, num_rows in enumerate(group_rows):
            if num_rows:
                yield RowGroup(file, index, start, num_rows)
            start += num_rows
