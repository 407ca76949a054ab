"""The splits of a dataset: which one is read, and the one that save_to_disk wrote."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .errors import UsageError


def choose_split(there: Sequence[str], wanted: str | None, where: str = "the input") -> str:
    """Return the wanted split; or, where none is named, the only one, or `train`."""
    if wanted is not None:
        if wanted in there:
            return wanted
        raise UsageError(f"no split {wanted!r} in {where}; --split takes one of: {', '.join(there) or '(none found)'}")
    if len(there) == 1:
        return there[0]
    if "train" in there:
        return "train"
    raise UsageError(f"which split? Name one of {where} with --split: {', '.join(there) or '(none found)'}")


def is_saved(path: Path) -> bool:
    """Whether save_to_disk wrote this folder: one split, or several."""
    return any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))


def open_saved(path: Path, wanted: str | None, where: str = "the input") -> tuple[Any, str]:
    """Return (the split as a `datasets.Dataset`, its name) out of a folder that save_to_disk wrote."""
    import datasets

    saved = datasets.load_from_disk(str(path))
    if isinstance(saved, datasets.DatasetDict):
        split = choose_split(list(saved), wanted, where)
        return saved[split], split
    return saved, choose_split([str(saved.split or "train")], wanted, where)
