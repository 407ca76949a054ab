"""What machine this is, and the flags that follow from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from src.machine import GIB, Gpu, Machine, choose_flags, find_gpus, look_around, machine_line, read_gpus, usable_cores
from src.models import find_profile

PROFILE = find_profile("lightonai/LightOnOCR-2-1B").profile
L4 = Gpu("NVIDIA L4", 23034, "550.90.07")


def test_gpus_are_read_from_what_nvidia_smi_lists() -> None:
    listing = "NVIDIA L4, 23034, 550.90.07\nNVIDIA RTX PRO 6000, Blackwell, 97887, 575.57.08\n[N/A], [N/A], [N/A]\n\n"
    assert read_gpus(listing) == (L4, Gpu("NVIDIA RTX PRO 6000, Blackwell", 97887, "575.57.08"))


@pytest.mark.parametrize("script", ["exit 9\n", "echo 'NVIDIA-SMI has failed'; exit 0\n", "echo\n"])
def test_an_nvidia_smi_that_fails_is_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_gpus() == ()


def test_the_real_machine_can_be_looked_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'NVIDIA L4, 23034, 550.90.07'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    machine = look_around()
    assert machine.gpus == (L4,)
    assert machine.cores > 0
    assert "NVIDIA L4 (22 GiB, driver 550.90.07)" in str(machine)


@pytest.mark.parametrize(
    ("files", "share"),
    [
        ({"cpu.max": "50000 100000\n"}, 0.5),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "25000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 0.25),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu.max": "nonsense"}, None),
        ({}, None),
    ],
)
def test_cores_are_those_of_the_control_group(tmp_path: Path, files: dict[str, str], share: float | None) -> None:
    for name, text in files.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    bound = usable_cores(tmp_path / "nowhere")
    assert usable_cores(tmp_path) == (bound if share is None else share)


# a flavour → cores, GiB of memory → API servers
FLAVOURS = [(4, 15, 1), (8, 30, 2), (12, 46, 4), (12, 142, 4), (23, 256, 4), (2, 16, 1), (23, 8, 1)]


@pytest.mark.parametrize(("cores", "memory_gib", "servers"), FLAVOURS)
def test_api_servers_are_as_many_as_cores_and_memory_carry(cores: int, memory_gib: int, servers: int) -> None:
    choices = choose_flags(Machine((L4,), cores, memory_gib * GIB), PROFILE, ())
    words = [word for choice in choices for word in choice.words]
    assert words == ([] if servers == 1 else ["--api-server-count", str(servers)])


@pytest.mark.parametrize("users", [("--api-server-count", "1"), ("--api-server-count=8",), ("--api_server_count", "3")])
def test_the_users_own_flag_wins(users: tuple[str, ...]) -> None:
    assert choose_flags(Machine((L4,), 23, 256 * GIB), PROFILE, users) == []


def test_a_machine_without_a_gpu_gets_no_flags() -> None:
    machine = Machine((), 23, None)
    assert choose_flags(machine, PROFILE, ()) == []
    assert machine_line(machine, []) == "machine: no GPU; 23 cores, an unknown amount of memory → no flag of ours"


def test_one_line_says_what_was_chosen_and_why() -> None:
    machine = Machine((L4,), 8, 30 * GIB)
    line = machine_line(machine, choose_flags(machine, PROFILE, ()))
    assert line == (
        "machine: NVIDIA L4 (22 GiB, driver 550.90.07); 8 cores, 30 GiB of memory → --api-server-count 2 as one API "
        "server prepares about 12 pages/s, and 8 cores are enough for 2"
    )
