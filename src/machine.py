"""What machine this is, and which flags `vllm serve` gets because of it; the user's own flags win.

Asked without torch: GPUs of `nvidia-smi`, cores and memory of the control group. Only what was measured becomes a
flag. One API server decodes images for about 12 pages/s, and takes two to three cores for it; so where there are
cores and memory for more of them, there are up to four (field: +9 to +16 % on a100-large, rtx-pro-6000, a10g-large).
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .memory import read_memory
from .models import ModelProfile, serve_option

CORES_AN_API_SERVER = 3
MEMORY_AN_API_SERVER = 7 * 1024**3
MOST_API_SERVERS = 4
GIB = 1024**3


@dataclass(frozen=True)
class Gpu:
    """A GPU, as `nvidia-smi` names it; memory in MiB."""

    name: str
    memory_mib: int
    driver: str


@dataclass(frozen=True)
class Machine:
    """What there is to run on. `memory_bytes` is the limit of the control group or the host."""

    gpus: tuple[Gpu, ...]
    cores: float
    memory_bytes: int | None

    def __str__(self) -> str:
        memory = f"{self.memory_bytes / GIB:.0f} GiB of memory" if self.memory_bytes else "an unknown amount of memory"
        gpus = ", ".join(f"{gpu.name} ({gpu.memory_mib / 1024:.0f} GiB, driver {gpu.driver})" for gpu in self.gpus)
        return f"{gpus or 'no GPU'}; {self.cores:g} cores, {memory}"


@dataclass(frozen=True)
class Choice:
    """A flag that the machine suggests, and why."""

    words: tuple[str, ...]
    why: str


def look_around(root: Path = Path("/")) -> Machine:
    """Return what this machine has."""
    memory = read_memory(root)
    return Machine(find_gpus(), usable_cores(root), memory.limit if memory else None)


def find_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that `nvidia-smi` lists; none where it is not there or fails."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return read_gpus(done.stdout)


def read_gpus(listing: str) -> tuple[Gpu, ...]:
    """Read what `nvidia-smi` lists, one GPU a line; a line that is none is passed over."""
    gpus: list[Gpu] = []
    for line in listing.splitlines():
        name, memory, driver = [*(part.strip() for part in line.rsplit(",", 2)), "", ""][:3]
        if memory.isdecimal():
            gpus.append(Gpu(name, int(memory), driver))
    return tuple(gpus)


def usable_cores(root: Path = Path("/")) -> float:
    """Return how many cores we may use: those we are bound to, and no more than the control group's share."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    group = root / "sys/fs/cgroup"
    v2 = _numbers(group / "cpu.max")
    v1 = _numbers(group / "cpu/cpu.cfs_quota_us") + _numbers(group / "cpu/cpu.cfs_period_us")
    for quota in (v2, v1):
        if len(quota) == 2 and quota[0] > 0 and quota[1] > 0:
            return min(float(bound), round(quota[0] / quota[1], 2))
    return float(bound)


def _numbers(path: Path) -> list[int]:
    try:
        words = path.read_text().split()
    except OSError:
        return []
    return [int(word) for word in words if word.isdecimal()]


def choose_flags(machine: Machine, profile: ModelProfile, users: Sequence[str]) -> list[Choice]:
    """Return the flags that fit the machine, without those that the user or the profile has chosen."""
    choices: list[Choice] = []
    servers = _api_servers(machine)
    if servers > 1 and not _is_given("--api-server-count", users) and not serve_option(profile, "--api-server-count"):
        why = f"one API server prepares about 12 pages/s, and {machine.cores:g} cores are enough for {servers}"
        choices.append(Choice(("--api-server-count", str(servers)), why))
    return choices


def _api_servers(machine: Machine) -> int:
    if not machine.gpus:
        return 1
    by_memory = (machine.memory_bytes or 0) // MEMORY_AN_API_SERVER
    return int(max(1, min(MOST_API_SERVERS, machine.cores // CORES_AN_API_SERVER, by_memory)))


def _is_given(flag: str, words: Sequence[str]) -> bool:
    spelled = {flag, flag.replace("-", "_").replace("__", "--", 1)}
    return any(word.split("=", 1)[0] in spelled for word in words)


def machine_line(machine: Machine, choices: Sequence[Choice]) -> str:
    """Say in one line what there is, and what we chose because of it."""
    chosen = "; ".join(f"{' '.join(choice.words)} as {choice.why}" for choice in choices)
    return f"machine: {machine} → {chosen or 'no flag of ours'}"
