"""The bytes of a picture out of a dataset's cell, which must not make us open files of this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from pathlib import Path


class UnfitCellError(Exception):
    """The cell can't become a page; the message is the reason."""


def cell_bytes(cell: object, root: Path | None) -> bytes:
    """Return the file in a cell: None, bytes, or an undecoded picture `{"bytes": …, "path": …}`.

    A path is opened only if `root`, the folder of a local dataset, is given and the file really lies inside it.
    """
    path: object = None
    if isinstance(cell, dict):
        fields = cast("dict[str, object]", cell)
        cell, path = fields.get("bytes"), fields.get("path")
    if cell is None and path is None:
        raise UnfitCellError("no picture in this row")
    if cell is None:
        return _file_bytes(path, root)
    if not isinstance(cell, bytes | bytearray | memoryview):
        raise UnfitCellError(f"the cell holds no picture but {type(cell).__name__}")
    if len(cell) == 0:
        raise UnfitCellError("the picture has 0 bytes")
    return bytes(cell)


def _file_bytes(path: object, root: Path | None) -> bytes:
    """Read a file named by the dataset, which must not make us read files of this machine that aren't its own."""
    if not isinstance(path, str):
        raise UnfitCellError(f"the cell's path is no text but {type(path).__name__}")
    if root is None:
        raise UnfitCellError(f"the cell has a path and no bytes; a path is opened only in a local dataset: {path!r}")
    try:
        inside = root.resolve(strict=True)
        real = (inside / path).resolve(strict=True)
    except (OSError, ValueError, RuntimeError) as error:  # not there, a NUL in the name, a loop of links
        raise UnfitCellError(f"the picture's file can't be found: {path!r} ({type(error).__name__})") from error
    if not real.is_relative_to(inside):
        raise UnfitCellError(f"the picture's file lies outside the dataset's folder and is not opened: {path!r}")
    if not real.is_file():
        raise UnfitCellError(f"the picture's path is no regular file: {path!r}")
    return real.read_bytes()
