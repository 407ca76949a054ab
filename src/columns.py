"""The columns of a block: the input's own as they are, and those of the results beside them.

Their names, their types, and how results become rows and rows become results again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from .block_files import SETTINGS_KEY
from .blocks import INFO_COLUMN, ROW_COLUMN, Blocks
from .confidence import Confidence
from .errors import UsageError
from .grounding import Block
from .result import SOUND, PageResult

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class Extras:
    """Which columns are written beside those that always are."""

    blocks: bool = False
    raw: bool = False
    confidence: bool = False

    def names(self, output_column: str) -> tuple[str, ...]:
        """Name them."""
        wanted = {"blocks": self.blocks, "raw": self.raw, "confidence": self.confidence}
        return tuple(f"{output_column}_{name}" for name, is_wanted in wanted.items() if is_wanted)


NO_EXTRAS = Extras()


def new_columns(output_column: str, extras: Extras = NO_EXTRAS) -> tuple[str, ...]:
    """Name the columns that a run adds, but for `inference_info`, which it appends to; the extra ones stand last."""
    always = (output_column, f"{output_column}_status", f"{output_column}_error", f"{output_column}_tokens")
    return (*always, *extras.names(output_column))


def check_columns(
    schema: pa.Schema, output_column: str, *, results_only: bool = False, extras: Extras = NO_EXTRAS
) -> None:
    """Raise `UsageError` where the input has a column that the run would add."""
    if results_only and ROW_COLUMN in schema.names:
        raise UsageError(f"the input already has the column {ROW_COLUMN!r}, which --results-only adds; leave that out")
    clash = [column for column in new_columns(output_column, extras) if column in schema.names]
    if clash:
        raise UsageError(
            f"the input already has the column {', '.join(map(repr, clash))}; name another one with --output-column"
        )


def output_schema(
    schema: pa.Schema,
    output_column: str,
    settings: Mapping[str, Any],
    *,
    without: str | None = None,
    extras: Extras = NO_EXTRAS,
) -> pa.Schema:
    """Return the schema of the output: the input's columns as they are, the new ones after them, features kept.

    `without` names a column to leave out, the pictures; the row's place in the input's split stands there instead.
    """
    import datasets
    import pyarrow as pa

    text, status, error, tokens = new_columns(output_column)
    kept = [column for column in schema if column.name not in {INFO_COLUMN, without}]
    if without is not None:
        kept.append(pa.field(ROW_COLUMN, pa.int64()))
    strings = [pa.field(name, pa.string()) for name in (text, status, error)]
    added = [*strings, pa.field(tokens, pa.int32()), *_extra_fields(output_column, extras)]
    added.append(pa.field(INFO_COLUMN, pa.string()))
    features = datasets.Features.from_arrow_schema(schema)
    features = datasets.Features({column.name: features[column.name] for column in kept if column.name in features})
    others = pa.schema([column for column in [*kept, *added] if column.name not in features])
    features.update(datasets.Features.from_arrow_schema(others))
    metadata = {
        **(schema.metadata or {}),
        **features.arrow_schema.metadata,
        SETTINGS_KEY: json.dumps(settings, sort_keys=True).encode(),
    }
    return pa.schema([*kept, *added], metadata=metadata)


def _extra_fields(output_column: str, extras: Extras) -> list[pa.Field]:
    import pyarrow as pa

    block = pa.struct([("label", pa.string()), ("bbox", pa.list_(pa.int32())), ("text", pa.string())])
    types = {
        "blocks": pa.list_(block),
        "raw": pa.string(),
        "confidence": pa.struct([("mean", pa.float32()), ("lowest", pa.float32())]),
    }
    prefix = f"{output_column}_"
    return [pa.field(name, types[name.removeprefix(prefix)]) for name in extras.names(output_column)]


def block_table(
    rows: pa.Table,
    results: Sequence[PageResult],
    schema: pa.Schema,
    output_column: str,
    info: Mapping[str, Any],
    *,
    addresses: Sequence[int] = (),
    kept_info: Sequence[str | None] = (),
    extras: Extras = NO_EXTRAS,
) -> pa.Table:
    """Join rows and results, one each in the same order, to the table of a block.

    `addresses` are the rows' places in the input's split, wanted where the schema has `row_index`. `kept_info` has the
    `inference_info` of the rows whose results an earlier run left; None for those of this run.
    """
    import pyarrow as pa

    if len(results) != rows.num_rows:
        raise ValueError(f"{rows.num_rows} rows, but {len(results)} results")
    earlier = rows[INFO_COLUMN].to_pylist() if INFO_COLUMN in rows.schema.names else [None] * rows.num_rows
    values: dict[str, Any] = dict(
        zip(
            new_columns(output_column),
            (
                [_storable(result.text) for result in results],
                [result.status for result in results],
                [_storable(result.error) for result in results],
                [result.tokens for result in results],
            ),
            strict=True,
        )
    )
    for name in extras.names(output_column):
        values[name] = [_extra_values(result)[name.removeprefix(f"{output_column}_")] for result in results]
    values[INFO_COLUMN] = [
        kept or appended_info(before, info)
        for before, kept in zip(earlier, kept_info or [None] * rows.num_rows, strict=True)
    ]
    if ROW_COLUMN in schema.names and ROW_COLUMN not in rows.schema.names:  # the input may have one of its own
        values[ROW_COLUMN] = [int(address) for address in addresses]
    columns = [
        pa.chunked_array([pa.array(values[column.name], type=column.type)])
        if column.name in values
        else rows[column.name]
        for column in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def _extra_values(result: PageResult) -> dict[str, Any]:
    """Return what stands in the extra columns of a row."""
    blocks, sure = result.blocks, result.confidence
    return {
        "blocks": None
        if blocks is None
        else [{"label": one.label, "bbox": list(one.bbox), "text": storable(one.text)} for one in blocks],
        "raw": _storable(result.raw),
        "confidence": sure and {"mean": sure.mean, "lowest": sure.lowest},
    }


@dataclass(frozen=True)
class KeptRow:
    """What an earlier run left of a row: its result and its `inference_info`."""

    result: PageResult
    info: str | None


def kept_rows(blocks: Blocks, number: int, output_column: str, extras: Extras = NO_EXTRAS) -> list[KeptRow | None]:
    """Return what a closed block holds of each row; None for the rows that failed."""
    table = blocks.read(number, [*new_columns(output_column, extras), INFO_COLUMN])
    return [_kept_row(row, output_column) for row in table.to_pylist()]


def _kept_row(row: Mapping[str, Any], output_column: str) -> KeptRow | None:
    text, status, error, tokens = new_columns(output_column)
    if row[status] not in SOUND:
        return None
    blocks, sure = row.get(f"{output_column}_blocks"), row.get(f"{output_column}_confidence")
    result = PageResult(
        row[text],
        row[status],
        error=row[error],
        tokens=row[tokens],
        raw=row.get(f"{output_column}_raw"),
        blocks=None if blocks is None else tuple(_block_of(block) for block in blocks),
        confidence=sure and Confidence(sure["mean"], sure["lowest"], 0),
    )
    return KeptRow(result, row[INFO_COLUMN])


def _block_of(stored: Mapping[str, Any]) -> Block:
    return Block(stored["label"], cast("tuple[int, int, int, int]", tuple(stored["bbox"])), stored["text"])


def appended_info(before: str | None, info: Mapping[str, Any]) -> str:
    """Append this run's entry to a row's `inference_info`, a JSON list; what was no list is kept as its first entry."""
    try:
        entries = json.loads(before) if before else []
    except ValueError:
        entries = [before]
    return json.dumps([*(entries if isinstance(entries, list) else [entries]), dict(info)])


def storable(text: str) -> str:
    """Return text that UTF-8 can hold: halves of a surrogate pair joined, a half without its other one made U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _storable(text: str | None) -> str | None:
    return None if text is None else storable(text)
