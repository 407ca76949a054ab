"""How much memory pages in flight may take: the container's or the host's limit, and what a page was seen to take.

A container's limit is that of its control group and of each group around it; file cache that the kernel would give
back does not count as used.
"""

from __future__ import annotations

import itertools
import os
import statistics
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

RESERVE_SHARE = 0.1  # of the limit, kept free for all that is not a page in flight
MOST_RESERVED = 2 * 1024**3
NO_LIMIT = 2**60  # cgroup v1 says "no limit" with a number like this


@dataclass(frozen=True)
class HostMemory:
    """The limit that comes first, in bytes, and what is left below it."""

    limit: int
    available: int

    @property
    def for_pages(self) -> int:
        """The bytes that pages may still take; negative where the reserve is touched already."""
        return self.available - min(MOST_RESERVED, int(RESERVE_SHARE * self.limit))


def read_memory(root: Path = Path("/")) -> HostMemory | None:
    """Return the tightest of the host's and the control groups' memory; None where the system does not say."""
    found = [_meminfo(root), *(_group_v2(group) for group in _groups(root, "")), *_groups_v1(root)]
    known = [memory for memory in found if memory]
    return min(known, key=lambda memory: memory.for_pages) if known else None


def own_rss(root: Path = Path("/")) -> int | None:
    """Return the bytes of memory that this process holds."""
    statm = _text(root / "proc/self/statm").split()
    return int(statm[1]) * os.sysconf("SC_PAGE_SIZE") if len(statm) > 1 and statm[1].isdecimal() else None


def _meminfo(root: Path) -> HostMemory | None:
    lines = (line.split() for line in _text(root / "proc/meminfo").splitlines())
    kib = {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) > 1 and words[1].isdecimal()}
    total = kib.get("MemTotal")
    available = kib.get("MemAvailable", kib.get("MemFree"))
    return HostMemory(total * 1024, available * 1024) if total and available is not None else None


def _groups(root: Path, controller: str) -> list[Path]:
    """Return the folders of our control group and of those around it, innermost first; "" is version 2."""
    mount = root / "sys/fs/cgroup" / controller
    if not controller and not (mount / "cgroup.controllers").exists():
        mount = root / "sys/fs/cgroup/unified"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, names, where = [*line.split(":", 2), "", ""][:3]
        if controller in names.split(","):
            inner = PurePosixPath(where.lstrip("/"))
            # in a container the path may be the host's, and only the mount's top is there
            return [mount / group for group in (inner, *inner.parents) if (mount / group).is_dir()]
    return [mount] if mount.is_dir() else []


def _group_v2(group: Path) -> HostMemory | None:
    return _group_memory(group, "memory.max", "memory.current", "inactive_file")


def _groups_v1(root: Path) -> list[HostMemory | None]:
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    return [_group_memory(group, *names) for group in _groups(root, "memory")]


def _group_memory(group: Path, limit_name: str, usage_name: str, cache_name: str) -> HostMemory | None:
    limit, usage = _number(group / limit_name), _number(group / usage_name)
    if limit is None or usage is None or limit >= NO_LIMIT:
        return None
    stat = dict(line.split()[:2] for line in _text(group / "memory.stat").splitlines() if len(line.split()) == 2)
    cache = stat.get(cache_name, "0")
    used = max(0, usage - (int(cache) if cache.isdecimal() else 0))
    return HostMemory(limit, limit - used)


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None  # "max" is no limit


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


class PageMeasure:
    """What a page in flight takes: how this process's memory grew while more and more pages were in flight.

    Only looks at which more pages were in flight than ever before are kept: memory that pages gave back often stays
    with the process, so what is seen afterwards says little. The median slope over all pairs of these looks is robust
    against one that caught a garbage collection or a block being written. Less than `least` is not believed.
    """

    def __init__(self, least: int = 256 * 1024) -> None:
        self._least = least
        self._records: list[tuple[int, int]] = []

    def note(self, in_flight: int, rss: int | None) -> None:
        """Take a look."""
        if rss is not None and (not self._records or in_flight > self._records[-1][0]):
            self._records.append((in_flight, rss))

    def bytes_a_page(self) -> float | None:
        """Return the bytes a page in flight takes; None before enough was seen to say that."""
        records = self._records[:: max(1, len(self._records) // 24)]
        if len(records) < 4:
            return None
        pairs = itertools.combinations(records, 2)
        slopes = [(more[1] - fewer[1]) / (more[0] - fewer[0]) for fewer, more in pairs]
        return max(float(self._least), statistics.median(slopes))
