"""The bytes of a picture out of a dataset's cell; a path that stands there is never opened here."""

from __future__ import annotations

from typing import cast


class UnfitCellError(Exception):
    """The cell can't become a page; the message is the reason."""


def cell_bytes(cell: object) -> bytes:
    """Return the file in a cell: None, bytes, or an undecoded picture `{"bytes": …, "path": …}`.

    The bytes of pictures that lie beside the table are in their cells already (`src/beside.py`): a path that is left is
    one that must not be opened.
    """
    path: object = None
    if isinstance(cell, dict):
        fields = cast("dict[str, object]", cell)
        cell, path = fields.get("bytes"), fields.get("path")
    if cell is None and path is None:
        raise UnfitCellError("no picture in this row")
    if cell is None:
        raise UnfitCellError(
            f"the cell has a path and no bytes, and there is no such file in the input's own folder: {path!r}"
        )
    if not isinstance(cell, bytes | bytearray | memoryview):
        raise UnfitCellError(f"the cell holds no picture but {type(cell).__name__}")
    if len(cell) == 0:
        raise UnfitCellError("the picture has 0 bytes")
    return bytes(cell)
