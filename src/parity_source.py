"""Reading one of two results: its columns of text, from the Hub or a disk, without its pictures."""

from __future__ import annotations

import difflib
import json
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from .errors import SourceError, UsageError, network_errors
from .parity_options import SideOptions
from .splits import choose_split, is_saved, open_saved

FILE_FORMATS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv", ".arrow": "arrow"}
HUB_ID = re.compile(r"(?P<id>[\w.-]+(?:/[\w.-]+)?)(?:@(?P<revision>[\w./-]+))?")
MADE_BY_SHOWN = 3
MADE_BY_LETTERS = 160
ALIKE = 0.8  # names that are so much alike may be mistyped
HUB_READ_AHEAD_BYTES = 256 * 1024  # the default, 5 MB beyond every column of every row group, would be pictures

Report: TypeAlias = Callable[[str], None]


@dataclass(frozen=True)
class LoadedSide:
    """A side's columns of text as a memory-mapped `datasets.Dataset`, and what is known of it."""

    options: SideOptions
    split: str
    rows: Any
    made_by: tuple[str, ...]

    def has(self, column: str) -> bool:
        """Whether the column was there to be read."""
        return column in self.rows.column_names

    def values(self, column: str | None, rows: Sequence[int]) -> list[Any] | None:
        """The column's values at these rows; None if there is no such column."""
        if column is None or not self.has(column) or not rows:
            return None if column is None or not self.has(column) else []
        first, last = rows[0], rows[-1]
        in_order = last - first + 1 == len(rows) and all(row == first + index for index, row in enumerate(rows))
        part = self.rows[first : last + 1] if in_order else self.rows[list(rows)]
        return list(part[column])


def load_side(options: SideOptions, wanted: Sequence[str], folder: Path, report: Report) -> LoadedSide:
    """Read the text column with its companions and the `wanted` columns; pictures are never touched."""
    companions = [options.column + suffix for suffix in ("_status", "_error", "_tokens")]
    where = f"{options.name} ({options.source})"
    try:
        if is_saved(path := Path(options.source).expanduser()):
            rows, split = open_saved(path, options.split, where)
            columns = _choose_columns(rows.features, options, wanted, companions, where)
            made_by = _made_by(rows.select_columns(["inference_info"]) if "inference_info" in rows.features else None)
            return LoadedSide(options, split, rows.select_columns(columns), made_by)
        return _spool(options, wanted, companions, where, folder, report)
    except reading_errors() as error:
        raise UsageError(f"can't read {where}: {_in_words(error)}. Check the name, --config and --split") from error


def reading_errors() -> tuple[type[Exception], ...]:
    """What `datasets` raises where a source can't be read: it is not there, does not answer, or is damaged."""
    return (*network_errors(), ValueError)


def locate(source: str) -> dict[str, Any]:
    """The arguments of `load_dataset` for a path that exists, or else for a Hub id."""
    path = Path(source).expanduser()
    if path.is_dir():
        return {"path": str(path)}
    if path.is_file():
        if path.suffix not in FILE_FORMATS:
            raise UsageError(f"{source}: not one of {', '.join(FILE_FORMATS)}. Give the folder or a parquet file")
        return {"path": FILE_FORMATS[path.suffix], "data_files": str(path)}
    match = HUB_ID.fullmatch(source)
    if match is None or path.suffix in FILE_FORMATS or not _may_be_hub_id(match["id"]):
        raise UsageError(
            f"{source}: no such file or folder, and not a Hub dataset id (namespace/name or name@revision)"
            + _did_you_mean(path)
        )
    if match["revision"] is None and (meant := _did_you_mean(path)):
        raise UsageError(f"{source}: no such file or folder{meant} If a Hub dataset is meant: {source}@main")
    return {"path": match["id"], "revision": match["revision"]}


def _may_be_hub_id(name: str) -> bool:
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except ValueError:
        return False
    return True


def _did_you_mean(path: Path) -> str:
    """Name the neighbours of a path that is not there whose names are much like its own; empty where none are."""
    try:
        beside = [neighbour.name for neighbour in path.absolute().parent.iterdir()]
    except OSError:
        return ""
    close = difflib.get_close_matches(path.name, beside, cutoff=ALIKE)
    return f". Did you mean {' or '.join(str(path.parent / name) for name in close)}?" if close else ""


def _choose_columns(
    features: Any, options: SideOptions, wanted: Sequence[str], companions: Sequence[str], where: str
) -> list[str]:
    texts = [
        name for name, kind in features.items() if getattr(kind, "dtype", "") in ("string", "large_string", "null")
    ]
    for column in (options.column, *wanted):
        if column not in features or (column == options.column and column not in texts):
            problem = "is not text" if column in features else "is not there"
            raise UsageError(f"{where}: column {column!r} {problem}. Columns of text: {', '.join(texts) or 'none'}")
    return list(dict.fromkeys([options.column, *wanted, *(name for name in companions if name in features)]))


def _spool(
    options: SideOptions, wanted: Sequence[str], companions: Sequence[str], where: str, folder: Path, report: Report
) -> LoadedSide:
    """Stream the columns into an Arrow file of our own: any row can then be had, and memory stays flat."""
    from datasets import Dataset, Features, load_dataset_builder

    ahead = {"hf": {"block_size": HUB_READ_AHEAD_BYTES}}
    place = {**locate(options.source), "name": options.config, "storage_options": ahead}
    builder = load_dataset_builder(**place)
    streams = builder.as_streaming_dataset()
    split = choose_split([str(name) for name in streams], options.split, where)
    stream = streams[split]
    features = stream.features
    if features is None:  # JSON and CSV tell their columns only by their first rows
        features = Features.from_arrow_schema(next(iter(stream.with_format("arrow").iter(batch_size=1000))).schema)
    columns = _choose_columns(features, options, wanted, companions, where)
    read = [*columns, "inference_info"] if "inference_info" in features else columns
    if hasattr(builder.config, "columns"):  # parquet: the other columns are not even fetched
        stream = load_dataset_builder(**place, columns=read).as_streaming_dataset(split=split)
    stream, schema = stream.select_columns(read), Features({name: features[name] for name in read}).arrow_schema

    path = folder / f"{options.name}.arrow"
    made_by: dict[str, None] = {}
    try:
        rows = _write_stream(
            stream, schema, columns, path, made_by, lambda done: report(f"read {done:,} rows of {where}")
        )
    except reading_errors() as error:
        raise SourceError(
            f"{where} stopped being readable: {_in_words(error)}. The same command starts again"
        ) from error
    if rows == 0:
        raise UsageError(f"{where}: split {split!r} has no rows")
    return LoadedSide(options, split, Dataset.from_file(str(path)), tuple(made_by))


def _write_stream(
    stream: Any,
    schema: Any,
    columns: Sequence[str],
    path: Path,
    made_by: dict[str, None],
    progress: Callable[[int], None],
) -> int:
    import pyarrow as pa

    rows = 0
    kept = pa.schema([schema.field(column) for column in columns])
    with path.open("wb") as sink, pa.ipc.new_stream(sink, kept) as writer:
        for table in stream.with_format("arrow").iter(batch_size=1000):
            writer.write_table(table.select(columns).cast(kept))
            if "inference_info" in table.column_names:
                _note_makers(made_by, table["inference_info"].unique().to_pylist())
            rows += table.num_rows
            progress(rows)
    return rows


def _in_words(error: Exception) -> str:
    first = f"{type(error).__name__}: {error}".strip().split("\n")[0]
    return first.rstrip(".: ")


def _made_by(infos: Any) -> tuple[str, ...]:
    made_by: dict[str, None] = {}
    if infos is not None:
        for table in infos.with_format("arrow").iter(batch_size=1000):
            _note_makers(made_by, table["inference_info"].unique().to_pylist())
    return tuple(made_by)


def _note_makers(made_by: dict[str, None], infos: Sequence[object]) -> None:
    for info in infos:
        if len(made_by) < MADE_BY_SHOWN and (line := describe_inference(info)):
            made_by[line] = None


def describe_inference(info: object) -> str:
    """The last entry of an `inference_info` cell as `name=value` words; empty if it can't be read."""
    try:
        entries = json.loads(info) if isinstance(info, str) else None
    except ValueError:
        return ""
    entry = entries[-1] if isinstance(entries, list) and entries else entries
    if not isinstance(entry, dict):
        return ""
    words = [f"{key}={value}" for key, value in entry.items() if isinstance(value, str | int | float)]
    return textwrap.shorten(" ".join(words), MADE_BY_LETTERS, placeholder=" …")
