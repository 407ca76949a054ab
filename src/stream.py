"""Rows of a Hub dataset that is not parquet, streamed: what has passed is not kept, and nothing is downloaded ahead.

A stream has no addresses. It is read forward; a row before the place where it stands, or a stream that broke, means
opening it anew and passing over the rows before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from .errors import SourceError, network_errors
from .patience import Patience

if TYPE_CHECKING:
    import pyarrow as pa


class StreamedRows:
    """Rows of a stream, read forward. `open_stream` opens it at a row; `num_rows` is how many there are.

    `home` is the address below which the dataset's files lie: a picture that is an address there is fetched, any other
    address or path stays what it is.
    """

    def __init__(
        self,
        open_stream: Callable[[int], Iterator[dict[str, Any]]],
        schema: pa.Schema,
        num_rows: int,
        home: str,
        patience: Patience,
    ) -> None:
        self.schema = schema
        self.num_rows = num_rows
        self._open_stream = open_stream
        self._home = home
        self._patience = patience
        self._stream: Iterator[dict[str, Any]] | None = None
        self._at = 0

    def read(self, addresses: Sequence[int]) -> pa.Table:
        """Read rows by address; cheapest is a range that goes on where the last read ended."""
        import pyarrow as pa

        wanted = [int(address) for address in addresses]
        found = {address: self._row(address) for address in sorted(set(wanted))}
        return pa.Table.from_pylist([found[address] for address in wanted], schema=self.schema)

    def _row(self, address: int) -> dict[str, Any]:
        place = f"reading row {address} of the input"
        try:
            row = self._patience.call(lambda: self._next(address), place)
            return self._patience.call(lambda: {name: self._fetched(cell) for name, cell in row.items()}, place)
        except StopIteration:
            raise SourceError(
                f"the input ended at row {self._at}, but has {self.num_rows} rows by its card; "
                f"give --max-samples {self._at}"
            ) from None
        except network_errors() as error:
            raise SourceError(f"{place} failed: {error}; run again to resume") from error

    def _next(self, address: int) -> dict[str, Any]:
        stream, self._stream = self._stream, None  # one that breaks is opened anew
        if stream is None or address < self._at:
            stream, self._at = self._open_stream(address), address
        while True:
            row = next(stream)
            self._at += 1
            if self._at > address:
                self._stream = stream
                return row

    def _fetched(self, cell: Any) -> Any:
        """Return a cell with the bytes in it of a picture that is an address of this dataset's own files."""
        if not isinstance(cell, dict) or set(cell) != {"bytes", "path"} or cell["bytes"] is not None:
            return cell
        address = str(cell["path"])
        if not address.startswith(self._home) or ".." in address.split("/"):
            return cell
        import fsspec

        with fsspec.open(address, "rb") as file:
            return {"bytes": file.read(), "path": address.rpartition("/")[2]}


def open_streamed(builder: Any, home: str, split: str, patience: Patience) -> StreamedRows | None:
    """Open a Hub dataset as a stream; None where that, or its number of rows, needs all of it to be downloaded.

    `home` is the address below which its files lie.
    """
    streamed = builder.as_streaming_dataset(split=split).decode(False)
    splits = builder.info.splits or {}
    is_folder = builder.name == "imagefolder"
    if is_folder and any(map(_is_packed, builder.config.data_files[split])):
        return None  # the addresses of its pictures are not those of files
    if split in splits and splits[split].num_examples:
        num_rows = int(splits[split].num_examples)
    elif is_folder:
        num_rows = sum(1 for _ in streamed)  # names only: no picture is fetched
    else:
        return None
    features = streamed.features or streamed._resolve_features().features
    return StreamedRows(
        lambda start: iter(streamed.skip(start) if start else streamed),
        features.arrow_schema,
        num_rows,
        home,
        patience,
    )


def _is_packed(file: str) -> bool:
    return str(file).lower().endswith((".zip", ".tar", ".gz", ".tgz", ".xz", ".bz2", ".zst", ".7z", ".rar"))
