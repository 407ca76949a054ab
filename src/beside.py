"""Pictures that lie beside a table, put into its cells: only those that really lie in the input's own folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa


def embed_pictures(table: pa.Table, column: str, roots: Sequence[Path]) -> pa.Table:
    """Put the bytes of pictures that lie beside the table into its cells; a path outside `roots` stays a path.

    As `datasets` does when it pushes: the cell then holds the bytes and the bare name of the file.
    """
    import pyarrow as pa

    field = table.schema.field(column)
    if not pa.types.is_struct(field.type) or {child.name for child in field.type} != {"bytes", "path"}:
        return table
    if not any(cell["bytes"].as_py() is None and cell["path"].is_valid for cell in table[column] if cell.is_valid):
        return table
    chunks = [pa.array([_embedded(cell.as_py(), roots)], type=field.type) for cell in table[column]]
    return table.set_column(table.schema.names.index(column), field, pa.chunked_array(chunks, type=field.type))


def _embedded(cell: dict[str, Any] | None, roots: Sequence[Path]) -> dict[str, Any] | None:
    if cell is None or cell["bytes"] is not None or not cell["path"]:
        return cell
    inside = path_inside(cell["path"], roots)
    if inside is None:
        return cell
    try:
        return {"bytes": inside.read_bytes(), "path": Path(cell["path"]).name}
    except OSError:
        return cell


def path_inside(path: str, roots: Sequence[Path]) -> Path | None:
    """Return the real file behind `path` if it lies inside one of `roots`, symbolic links followed; else None."""
    for root in roots:
        try:
            real_root = root.resolve(strict=True)
            real = (real_root / path).resolve(strict=True)
        except (OSError, RuntimeError, ValueError):  # not there, a loop of links, a NUL in the name
            continue
        if real.is_relative_to(real_root) and real.is_file() and os.access(real, os.R_OK):
            return real
    return None
