"""The memory that pages may take: control groups of both versions, the host, and what a page was seen to take."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from src.memory import HostMemory, PageMeasure, own_rss, read_memory

GIB = 1024**3
MIB = 1024**2
HOST = "MemTotal: 33554432 kB\nMemFree: 1048576 kB\nMemAvailable: 16777216 kB\n"  # 32 GiB, 16 free


def lay(root: Path, **files: str | int) -> Path:
    """Write files below a root; `__` in a name is a slash."""
    for name, content in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(content))
    return root


def group_v2(root: Path, where: str, limit: str | int, usage: int, inactive_file: int = 0) -> None:
    folder = root / "sys/fs/cgroup" / where
    folder.mkdir(parents=True, exist_ok=True)
    (root / "sys/fs/cgroup/cgroup.controllers").write_text("cpu memory")
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"anon 1\nfile 2\ninactive_file {inactive_file}\n")


def test_without_control_groups_the_host_counts(tmp_path: Path) -> None:
    assert read_memory(lay(tmp_path, proc__meminfo=HOST)) == HostMemory(32 * GIB, 16 * GIB)


def test_on_a_system_that_does_not_say_nothing_is_known(tmp_path: Path) -> None:
    assert read_memory(tmp_path) is None
    assert own_rss(tmp_path) is None


def test_an_old_kernel_says_only_what_is_free(tmp_path: Path) -> None:
    lay(tmp_path, proc__meminfo="MemTotal: 2097152 kB\nMemFree: 1048576 kB\nHugePages: none\n")
    assert read_memory(tmp_path) == HostMemory(2 * GIB, 1 * GIB)


def test_a_group_of_version_2_limits_and_its_file_cache_is_free(tmp_path: Path) -> None:
    lay(tmp_path, proc__meminfo=HOST, proc__self__cgroup="0::/job\n")
    group_v2(tmp_path, "job", 8 * GIB, 6 * GIB, inactive_file=3 * GIB)
    assert read_memory(tmp_path) == HostMemory(8 * GIB, 5 * GIB)


def test_a_group_without_a_limit_leaves_the_host(tmp_path: Path) -> None:
    lay(tmp_path, proc__meminfo=HOST, proc__self__cgroup="0::/job\n")
    group_v2(tmp_path, "job", "max", 6 * GIB)
    assert read_memory(tmp_path) == HostMemory(32 * GIB, 16 * GIB)


def test_the_tightest_of_nested_groups_counts(tmp_path: Path) -> None:
    lay(tmp_path, proc__meminfo=HOST, proc__self__cgroup="0::/slurm/job/step\n")
    group_v2(tmp_path, "slurm/job/step", "max", 1 * GIB)
    group_v2(tmp_path, "slurm/job", 4 * GIB, 2 * GIB)
    group_v2(tmp_path, "slurm", 30 * GIB, 29 * GIB)
    assert read_memory(tmp_path) == HostMemory(30 * GIB, 1 * GIB)


def test_in_a_container_whose_path_is_the_hosts_the_top_of_the_mount_counts(tmp_path: Path) -> None:
    lay(tmp_path, proc__meminfo=HOST, proc__self__cgroup="0::/kubepods/pod1/abc\n")
    group_v2(tmp_path, "", 2 * GIB, 1 * GIB)
    assert read_memory(tmp_path) == HostMemory(2 * GIB, 1 * GIB)


def test_groups_of_version_1_limit_too(tmp_path: Path) -> None:
    lay(tmp_path, proc__meminfo=HOST, proc__self__cgroup="5:cpu,cpuacct:/a\n4:memory:/docker/abc\n0::/docker/abc\n")
    memory = tmp_path / "sys/fs/cgroup/memory"
    inner = {"memory.limit_in_bytes": 4 * GIB, "memory.usage_in_bytes": 3 * GIB}
    lay(memory / "docker/abc", **inner)
    (memory / "docker/abc/memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {GIB}\n")
    lay(memory, **{"memory.limit_in_bytes": 9223372036854771712, "memory.usage_in_bytes": GIB})
    assert read_memory(tmp_path) == HostMemory(4 * GIB, 2 * GIB)


@pytest.mark.parametrize("content", ["", "max", "-1", "half a gigabyte", "0::"])
def test_files_that_make_no_sense_are_passed_over(content: str, tmp_path: Path) -> None:
    lay(tmp_path, proc__meminfo=HOST, proc__self__cgroup=content or "\n\n")
    group_v2(tmp_path, "", content, 1)
    (tmp_path / "sys/fs/cgroup/memory.stat").write_text(content)
    assert read_memory(tmp_path) == HostMemory(32 * GIB, 16 * GIB)


def test_a_reserve_is_kept_and_a_host_that_is_full_has_less_than_nothing() -> None:
    assert HostMemory(100 * GIB, 50 * GIB).for_pages == 48 * GIB
    assert HostMemory(10 * GIB, 5 * GIB).for_pages == 4 * GIB
    assert HostMemory(10 * GIB, 0).for_pages == -1 * GIB


def test_this_machine_can_be_read() -> None:
    memory = read_memory()
    assert memory is None or memory.available <= memory.limit


def measured(*looks: tuple[int, int]) -> float | None:
    measure = PageMeasure()
    for in_flight, rss in looks:
        measure.note(in_flight, rss)
    return measure.bytes_a_page()


def test_before_the_pages_in_flight_have_varied_nothing_is_known_of_them() -> None:
    assert measured() is None
    assert measured(*[(8, 300 * MIB)] * 50) is None


@given(st.integers(1, 30), st.lists(st.integers(0, 20 * MIB), min_size=40, max_size=40))
def test_a_page_is_measured_within_noise(mib: int, noise: list[int]) -> None:
    looks = [(8 * n, 200 * MIB + 8 * n * mib * MIB + noise[n]) for n in range(1, 40)]
    found = measured(*looks)
    assert found is not None
    assert abs(found - mib * MIB) <= 0.1 * mib * MIB + 0.5 * MIB


def test_memory_that_is_not_given_back_does_not_make_pages_look_smaller() -> None:
    up = [(n, 200 * MIB + n * 4 * MIB) for n in range(0, 128, 4)]
    down = [(n, 200 * MIB + 128 * 3 * MIB) for n in range(60, 0, -4)]
    found = measured(*up, *down)
    assert found is not None
    assert found == 4 * MIB


def test_a_page_that_seems_to_take_nothing_takes_something() -> None:
    assert measured(*[(n, 200 * MIB) for n in range(0, 128, 4)]) == 256 * 1024


def test_a_look_without_a_number_is_no_look() -> None:
    measure = PageMeasure()
    measure.note(3, None)
    assert measure.bytes_a_page() is None
