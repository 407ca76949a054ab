"""Whether what a run will write fits on its disk: asked before any GPU time, and answered with the numbers.

How much that is follows from the input: from what parquet files say of their columns, or from a few rows. Of a stream
nothing is known beforehand.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from .errors import UsageError
from .parquet_rows import ParquetRows
from .source import MappedRows, Source

TEXT_BYTES = 4096  # of a page's text and what stands beside it
STAGED_BLOCKS = 4  # of a Hub output: one is written while others wait for upload and commit
SAMPLED_ROWS = 16


def bytes_of_row(source: Source, without: str | None = None) -> float | None:
    """Return about how many bytes a row takes in a block, leaving out one column; None where nothing is known."""
    rows = source.rows
    if not len(source.order):
        return 0.0
    if isinstance(rows, ParquetRows):
        kept = sum(size for name, size in rows.column_bytes.items() if name != without)
        return kept / rows.num_rows + TEXT_BYTES
    if not isinstance(rows, MappedRows):
        return None
    step = max(1, len(source.order) // SAMPLED_ROWS)
    places = range(0, len(source.order), step)[:SAMPLED_ROWS]
    sampled = [source.read(range(place, place + 1)) for place in places]
    sizes = [int(table.drop_columns([without] if without else []).nbytes) for table in sampled]
    return sum(sizes) / len(sizes) + TEXT_BYTES


def check_room(folder: Path, rows: int, row_bytes: float, advice: str, freed: int = 0) -> None:
    """Raise `UsageError` where `rows` more rows do not fit on the disk of `folder`; `freed` bytes are to be removed."""
    needed = rows * row_bytes
    disk = shutil.disk_usage(_existing(folder))
    free = disk.free + freed
    if needed > free and disk.total:  # what has no size, such as /proc, is no disk: writing there says why it fails
        raise UsageError(
            f"{rows} rows need about {_in_gigabytes(needed)} in {str(folder)!r}, and {_in_gigabytes(free)} are free on "
            f"its disk; free some, or {advice}"
        )


def _in_gigabytes(size: float) -> str:
    """Write a number of bytes for people."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _existing(folder: Path) -> Path:
    """Return the folder, or the first above it that is there."""
    return next(path for path in [folder.absolute(), *folder.absolute().parents] if path.exists())
