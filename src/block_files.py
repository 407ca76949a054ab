"""What the file of a block says of itself: the settings it was made with, and the values in a column of it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from .errors import UsageError

SETTINGS_KEY = b"lighton-ocr"  # where a block's parquet metadata holds the settings it was made with


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
