"""Rows of a Hub dataset that is not parquet, streamed: what has passed is not kept, and nothing is downloaded ahead.

A stream has no addresses. It is read forward; a row before the place where it stands, or a stream that broke, means
opening it anew and passing over the rows before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from .errors import SourceError, network_errors
from .report import say

if TYPE_CHECKING:
    import pyarrow as pa

RETRY_FOR_S = 600.0
LONGEST_STREAM_PAUSE_S = 30.0


class StreamedRows:
    """Rows of a stream, read forward. `open_stream` opens it at a row; `num_rows` is how many there are.

    `home` is the address below which the dataset's files lie: a picture that is an address there is fetched, any other
    address or path stays what it is.
    """

    def __init__(
        self, open_stream: Callable[[int], Iterator[dict[str, Any]]], schema: pa.Schema, num_rows: int, home: str
    ) -> None:
        self.schema = schema
        self.num_rows = num_rows
        self._open_stream = open_stream
        self._home = home
        self._stream: Iterator[dict[str, Any]] | None = None
        self._at = 0

    def read(self, addresses: Sequence[int]) -> pa.Table:
        """Read rows by address; cheapest is a range that goes on where the last read ended."""
        import pyarrow as pa

        wanted = [int(address) for address in addresses]
        found = {address: self._row(address) for address in sorted(set(wanted))}
        return pa.Table.from_pylist([found[address] for address in wanted], schema=self.schema)

    def _row(self, address: int) -> dict[str, Any]:
        give_up_at, pause_s = time.monotonic() + RETRY_FOR_S, 1.0
        while True:
            try:
                return self._fetched(self._next(address))
            except StopIteration:
                raise SourceError(
                    f"the input ended at row {self._at}, but has {self.num_rows} rows by its card; "
                    f"give --max-samples {self._at}"
                ) from None
            except network_errors() as error:
                self._stream = None
                if time.monotonic() > give_up_at:
                    raise SourceError(f"reading row {address} of the input: {error}; run again to resume") from error
                say(f"the input can't be read for now ({error}); trying again in {pause_s:.0f} s")
                time.sleep(pause_s)
                pause_s = min(LONGEST_STREAM_PAUSE_S, 2 * pause_s)

    def _next(self, address: int) -> dict[str, Any]:
        if self._stream is None or address < self._at:
            self._stream, self._at = self._open_stream(address), address
        while True:
            row = next(self._stream)
            self._at += 1
            if self._at > address:
                return row

    def _fetched(self, row: dict[str, Any]) -> dict[str, Any]:
        """Put the bytes of pictures that are addresses of this dataset's own files into their cells."""
        import fsspec

        for name, cell in row.items():
            if not isinstance(cell, dict) or set(cell) != {"bytes", "path"} or cell["bytes"] is not None:
                continue
            if str(cell["path"]).startswith(self._home):
                with fsspec.open(cell["path"], "rb") as file:
                    row[name] = {"bytes": file.read(), "path": cell["path"].rpartition("/")[2]}
        return row


def open_streamed(name: str, config: str | None, revision: str, split: str) -> StreamedRows | None:
    """Open a Hub dataset as a stream; None where nobody knows how many rows it has without downloading it all."""
    import datasets

    builder = datasets.load_dataset_builder(name, name=config, revision=revision)
    streamed = datasets.load_dataset(name, name=config, revision=revision, split=split, streaming=True).decode(False)
    splits = builder.info.splits or {}
    if split in splits and splits[split].num_examples:
        num_rows = int(splits[split].num_examples)
    elif builder.name == "imagefolder":
        num_rows = sum(1 for _ in streamed)  # names only: no picture is fetched
    else:
        return None
    features = streamed.features or streamed._resolve_features().features
    return StreamedRows(
        lambda start: iter(streamed.skip(start) if start else streamed),
        features.arrow_schema,
        num_rows,
        f"hf://datasets/{name}@{revision}/",
    )
