"""Rows of a dataset by address, undecoded.

A source knows how many rows it has and reads any of them as an Arrow table, every column as it is stored. Parquet is
read out of its row groups; anything else that `datasets` can load is streamed where that is asked for, or
memory-mapped by it.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from .beside import embed_pictures
from .errors import UsageError, network_errors
from .hf_paths import HubInput, look_at, parse_hub_path
from .parquet_rows import ParquetRows
from .patience import Patience
from .report import say
from .splits import choose_split, is_saved, open_saved
from .stream import open_streamed
from .unreadable import unreadable

if TYPE_CHECKING:
    import pyarrow as pa

OPEN_RETRY_S = 30.0
SOURCE_RETRY_S = 600.0
LONGEST_SOURCE_PAUSE_S = 30.0


class Rows(Protocol):
    """Rows by address. `read` gives the rows at `addresses`, in that order, with every column as it is stored."""

    schema: pa.Schema
    num_rows: int

    def read(self, addresses: Sequence[int]) -> pa.Table:
        """Read the rows at `addresses` (0 ≤ address < num_rows)."""


@dataclass(frozen=True)
class Source:
    """A split of a dataset, and which of its rows are wanted, in which order.

    `fingerprint` changes when the data changes (Hub: the commit; local: names and sizes of the files).
    `roots` are the folders in which a path that stands in a cell may be opened: none for data from elsewhere.
    `patience` is that with a Hub which fails to give the rows.
    """

    name: str
    split: str
    image_column: str
    rows: Rows
    order: Sequence[int]
    fingerprint: str
    is_private: bool
    roots: tuple[Path, ...] = ()
    patience: Patience = field(default_factory=lambda: Patience(SOURCE_RETRY_S, LONGEST_SOURCE_PAUSE_S))

    def read(self, positions: range) -> pa.Table:
        """Read the wanted rows at `positions` (0 ≤ position < len(order)); pictures beside the table are embedded."""
        if not positions:
            return self.rows.schema.empty_table()
        table = self.rows.read(self.order[positions.start : positions.stop])
        return embed_pictures(table, self.image_column, self.roots) if self.roots else table


def open_source(
    name: str,
    *,
    config: str | None = None,
    split: str | None = None,
    revision: str | None = None,
    image_column: str | None = None,
    max_samples: int | None = None,
    shuffle: bool = False,
    seed: int = 0,
    streaming: bool = False,
) -> Source:
    """Open a Hub dataset id, an `hf://` address, a folder of images, parquet, or what `save_to_disk` wrote.

    `streaming` says that a Hub dataset which is not parquet is to be streamed, where it can be, and not downloaded.
    Raises `UsageError` where the input, the configuration, the split or the column is not there: it lists what is.
    """
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    path = Path(name).expanduser()
    is_local = path.exists()
    patience = Patience(SOURCE_RETRY_S, LONGEST_SOURCE_PAUSE_S)
    at = None if is_local else parse_hub_path(name, revision)
    if not is_local and at is None:
        raise UsageError(
            f"input {name!r}: no such file or folder, and not a Hub dataset id (namespace/name) or hf:// address"
        )
    try:
        hub = Patience(OPEN_RETRY_S).call(functools.partial(look_at, at), f"looking at {name}") if at else None
        fingerprint, is_private = (hub.fingerprint, hub.is_private) if hub else (local_fingerprint(path), True)
        found = _open_rows(_Wanted(str(path) if is_local else name, config, split, hub, streaming, shuffle), patience)
    except (
        *network_errors(),
        ValueError,
        LookupError,
        RuntimeError,  # a dataset that is a script
        TypeError,  # what huggingface_hub 2.4 makes of a card that names files beside its bucket
        datasets.exceptions.DatasetsError,
    ) as error:
        repo_id = at.repo_id if at and not at.is_bucket else None
        raise unreadable(name, error, repo_id=repo_id, config=config, revision=at.revision if at else None) from error
    rows, split_name, paths_are_ours = found
    roots: tuple[Path, ...] = ()
    if is_local:
        roots = (path if path.is_dir() else path.parent,)
    elif hub and paths_are_ours:
        roots = _hub_roots(hub)
    return Source(
        name=name,
        split=split_name,
        image_column=choose_image_column(rows.schema, image_column),
        rows=rows,
        order=choose_rows(rows.num_rows, max_samples, shuffle, seed),
        fingerprint=fingerprint,
        is_private=is_private,
        roots=roots,
        patience=patience,
    )


def choose_rows(num_rows: int, max_samples: int | None, shuffle: bool, seed: int) -> Sequence[int]:
    """Which rows are wanted, in which order: addresses into a split of `num_rows` rows."""
    count = num_rows if max_samples is None else min(max_samples, num_rows)
    if not shuffle:
        return range(count)
    import numpy as np

    chosen: Sequence[int] = np.random.default_rng(seed).permutation(num_rows)[:count]  # type: ignore[assignment]
    return chosen


def choose_image_column(schema: pa.Schema, wanted: str | None) -> str:
    """Return the wanted column; or, where none is named, `image`, or the only column of images."""
    may = [name for name in schema.names if _may_hold_pictures(schema.field(name).type)]
    if not may:
        columns = ", ".join(f"{field.name} ({field.type})" for field in schema)
        raise UsageError(
            f"the input has no column of pictures, only {columns or 'none at all'}; "
            "give a folder of images, or a dataset whose pages are pictures"
        )
    column = _find_image_column(schema, wanted, may)
    if column not in may:
        kind = schema.field(column).type
        raise UsageError(
            f"column {column!r} holds no pictures but {kind}; --image-column takes one of: {', '.join(may)}"
        )
    return column


def _may_hold_pictures(kind: pa.DataType) -> bool:
    import pyarrow as pa

    if pa.types.is_struct(kind):
        return any(field.name == "bytes" for field in kind)
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_null(kind))


def _find_image_column(schema: pa.Schema, wanted: str | None, may: Sequence[str]) -> str:
    import datasets

    if wanted is not None:
        if wanted in schema.names:
            return wanted
        raise UsageError(f"no column {wanted!r} in the input; --image-column takes one of: {', '.join(may)}")
    if "image" in schema.names:
        return "image"
    features = datasets.Features.from_arrow_schema(schema)
    images = [column for column, feature in features.items() if isinstance(feature, datasets.Image)]
    if len(images) == 1:
        return str(images[0])
    raise UsageError(f"which column holds the pages? Name it with --image-column: {', '.join(may)}")


def local_fingerprint(path: Path) -> str:
    """Fingerprint a local input by the names and sizes of its files: it moves with the data, not with the folder."""
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    digest = hashlib.sha256()
    for file in files:
        relative = file.name if file == path else str(file.relative_to(path))
        digest.update(json.dumps([relative, file.stat().st_size]).encode())
    return f"files:{digest.hexdigest()[:32]}"


def _hub_roots(hub: HubInput) -> tuple[Path, ...]:
    """Where `datasets` puts the files of a Hub dataset that is a folder of images; those of a bucket are streamed."""
    import datasets
    from huggingface_hub.constants import HF_HUB_CACHE

    return (
        Path(HF_HUB_CACHE) / f"datasets--{hub.at.repo_id.replace('/', '--')}",
        Path(datasets.config.EXTRACTED_DATASETS_PATH),
    )


@dataclass(frozen=True)
class _Wanted:
    """Which rows are to be opened, and how they will be read."""

    name: str
    config: str | None
    split: str | None
    hub: HubInput | None
    streaming: bool
    shuffled: bool

    @property
    def loader(self) -> dict[str, Any]:
        """The arguments with which `datasets` opens it."""
        return self.hub.loader if self.hub else {"path": self.name}


def _open_rows(wanted: _Wanted, patience: Patience) -> tuple[Rows, str, bool]:
    """Return (rows, split name, whether paths in the cells come from `datasets` itself and not from the data)."""
    import datasets

    name, split, hub = wanted.name, wanted.split, wanted.hub
    path = Path(name)
    if hub is None and is_saved(path):
        saved, chosen = open_saved(path, split)
        return MappedRows(saved), chosen, False
    if hub is None and path.is_file():
        if path.suffix.lower() not in {".parquet", ".pq"}:
            raise UsageError(f"input {name!r} is a file but not parquet; give a parquet file, or the folder it lies in")
        chosen = choose_split(["train"], split)
        return ParquetRows([name]), chosen, False
    builder = datasets.load_dataset_builder(name=wanted.config, **wanted.loader)
    files = builder.config.data_files or {}
    chosen = choose_split([str(key) for key in files], split)
    if hub:
        hub.check_own(str(file) for file in files[chosen])
    if builder.name == "parquet":
        return ParquetRows([str(file) for file in files[chosen]], builder.info.features, patience), chosen, False
    if hub and (wanted.streaming or hub.at.is_bucket):
        streamed = _open_stream(builder, hub, chosen, wanted, patience)
        if streamed:
            return streamed, chosen, False
    if hub is None:
        _refuse_line_breaks(path)
    anew = {}
    if hub and hub.at.is_bucket:  # of which `datasets` 5.2 keeps files by name alone: they would never change
        anew = {"download_mode": "force_redownload", "verification_mode": "no_checks"}
    loaded = datasets.load_dataset(name=wanted.config, split=chosen, **wanted.loader, **anew)
    return MappedRows(loaded), chosen, builder.name == "imagefolder"


def _open_stream(builder: Any, hub: HubInput, split: str, wanted: _Wanted, patience: Patience) -> Rows | None:
    """Open what is not parquet as a stream, where that can be done; else say that it is downloaded.

    A folder of images in a bucket is streamed in any order: `datasets` would keep the files under other names.
    """
    of_bucket = hub.at.is_bucket and builder.name == "imagefolder"
    if of_bucket or (wanted.streaming and not wanted.shuffled):
        streamed = open_streamed(builder, f"{hub.at.root}/", split, patience)
        if streamed:
            return streamed
    if of_bucket:
        raise UsageError(f"{wanted.name}: pictures in a bucket are read one by one; unpack them there")
    reason = (
        "--shuffle reads it in another order"
        if wanted.shuffled
        else "how many rows it has stands nowhere, or it is packed"
    )
    say(f"{wanted.name} can't be streamed, for {reason}: downloading it")
    return None


def _refuse_line_breaks(folder: Path) -> None:
    """Refuse file names that `datasets` passes over in silence: a page would be missing, and nobody told."""
    for file in folder.rglob("*"):
        if "\n" in file.name or "\r" in file.name:
            raise UsageError(f"{str(file)!r}: `datasets` can't read a name with a line break; rename the file")


class MappedRows:
    """Rows of a `datasets.Dataset`, memory-mapped and not decoded."""

    def __init__(self, dataset: Any) -> None:
        self._table = dataset.with_format("arrow")
        self.num_rows: int = dataset.num_rows
        self.schema: pa.Schema = dataset.features.arrow_schema

    def read(self, addresses: Sequence[int]) -> pa.Table:
        """Read rows by address."""
        import pyarrow as pa

        if isinstance(addresses, range):
            table = self._table[addresses.start : addresses.stop]
        else:
            table = pa.concat_tables([self._table[int(address) : int(address) + 1] for address in addresses])
        return table.cast(self.schema)
