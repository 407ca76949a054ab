"""How a page travels to the engine: as a data URL, or to a server of our own as a file in shared memory.

A file costs neither compression nor base64 nor megabytes of JSON, on either side. The pixels are the same on every
path.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from .pages import Page, data_url
from .report import say
from .spawn import SHARED_MEMORY

FOLDER_PREFIX = "lighton-ocr-pages-"
SHARE_USED = 0.5  # of what is free there when we begin
LEAST_BYTES = 64 * 1024**2  # with less there is no room for the pages in flight


def _nothing() -> None:
    """Release nothing."""


@dataclass(frozen=True)
class Address:
    """The URL under which the engine finds a page; `release` gives back what it takes, once the page is answered."""

    url: bytes
    release: Callable[[], None] = field(default=_nothing, compare=False)


class Transport(Protocol):
    """Makes pages reachable for the engine. Called from many threads."""

    def address(self, page: Page) -> Address:
        """Return the address of a page."""


class DataUrls:
    """Pages travel in the request itself."""

    def address(self, page: Page) -> Address:
        """Return a data URL."""
        return Address(data_url(page).encode())


IN_REQUEST = DataUrls()


class SharedFiles:
    """Pages travel as files in shared memory, `most_bytes` at a time; what does not fit, as data URLs."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self.folder = folder
        self._most_bytes = most_bytes
        self._taken = 0
        self._written = 0
        self._lock = threading.Lock()

    def address(self, page: Page) -> Address:
        """Write the page to a file and return its address; a data URL where there is no room."""
        suffix = "bmp" if page.original is None else "jpg"
        size = len(page.original or b"") or page.image.width * page.image.height * len(page.image.getbands()) + 4096
        with self._lock:
            if self._taken + size > self._most_bytes:
                return IN_REQUEST.address(page)
            self._taken += size
            self._written += 1
            path = self.folder / f"{self._written}.{suffix}"
        try:
            if page.original is None:
                page.image.save(path, "BMP")
            else:
                path.write_bytes(page.original)
        except OSError:
            self._release(path, size)
            return IN_REQUEST.address(page)
        return Address(f"file://{path}".encode(), lambda: self._release(path, size))

    def _release(self, path: Path, size: int) -> None:
        path.unlink(missing_ok=True)
        with self._lock:
            self._taken -= size


@contextlib.contextmanager
def shared_folder(place: Path = SHARED_MEMORY) -> Iterator[SharedFiles | None]:
    """Make a private folder in shared memory and remove it at the end; None where there is no room for one.

    Folders that killed runs left behind are removed first: their name holds the process they belonged to.
    """
    files = _make_folder(place)
    try:
        yield files
    finally:
        if files:
            shutil.rmtree(files.folder, ignore_errors=True)


def _make_folder(place: Path) -> SharedFiles | None:
    try:
        remove_orphans(place)
        free = shutil.disk_usage(place).free
        if free * SHARE_USED < LEAST_BYTES:
            say(f"{place} has {free // 1024**2} MB free: pages travel in the requests (--shm-size sets it)")
            return None
        folder = Path(tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{os.getpid()}-", dir=place))
    except OSError:
        return None
    return SharedFiles(folder, int(free * SHARE_USED))


def remove_orphans(place: Path) -> None:
    """Remove the folders of runs that are no more."""
    for folder in place.glob(f"{FOLDER_PREFIX}*-*"):
        owner = folder.name.removeprefix(FOLDER_PREFIX).partition("-")[0]
        if owner.isdecimal() and not Path(f"/proc/{owner}").exists() and folder.stat().st_uid == os.getuid():
            shutil.rmtree(folder, ignore_errors=True)
