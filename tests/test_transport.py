"""Transports: the same pixels on every path, bounded shared memory, and nothing left behind."""

from __future__ import annotations

import base64
import io
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from PIL import Image

from src.pages import Page, PageLimits, make_page
from src.transport import FOLDER_PREFIX, IN_REQUEST, Address, SharedFiles, remove_orphans, shared_folder
from tests.runs import SCRIPT, output_table, write_pages
from tests.strategies import images
from tests.stub_vllm import install_fake_vllm, read_journal


def pixels_at(address: Address) -> Image.Image:
    """Fetch a page as a server does: open what is there and convert it to RGB."""
    url = address.url.decode()
    if url.startswith("file://"):
        return Image.open(url.removeprefix("file://")).convert("RGB")
    content = base64.b64decode(url.partition("base64,")[2])
    return Image.open(io.BytesIO(content)).convert("RGB")


@settings(max_examples=60, deadline=None)
@given(image=images(modes=("L", "RGB")))
def test_a_page_has_the_same_pixels_on_every_path(image: Image.Image) -> None:
    page = Page(image, original=None)
    with shared_folder() as files:
        assert files is not None
        shared = files.address(page)
        assert shared.url.startswith(b"file://")
        assert pixels_at(shared).tobytes() == pixels_at(IN_REQUEST.address(page)).tobytes()
        assert pixels_at(shared).tobytes() == image.convert("RGB").tobytes()


def test_a_jpeg_that_needs_no_change_travels_as_it_is() -> None:
    buffer = io.BytesIO()
    Image.effect_noise((100, 60), 80).convert("RGB").save(buffer, "JPEG")
    page = make_page(buffer.getvalue(), PageLimits(1540))
    assert isinstance(page, Page)
    assert page.original == buffer.getvalue()
    with shared_folder() as files:
        assert files is not None
        address = files.address(page)
        assert Path(address.url.decode().removeprefix("file://")).read_bytes() == buffer.getvalue()


def page_of(width: int, height: int) -> Page:
    return Page(Image.new("L", (width, height), 200), original=None)


def test_released_pages_leave_no_file_and_make_room_for_others(tmp_path: Path) -> None:
    files = SharedFiles(tmp_path, most_bytes=3 * (100 * 100 + 4096))
    addresses = [files.address(page_of(100, 100)) for _ in range(5)]
    assert [address.url[:5] for address in addresses] == [b"file:"] * 3 + [b"data:"] * 2
    for address in addresses:
        address.release()
    assert list(tmp_path.iterdir()) == []
    assert files.address(page_of(100, 100)).url.startswith(b"file:")


def test_a_folder_that_can_not_be_written_makes_pages_travel_in_the_request(tmp_path: Path) -> None:
    files = SharedFiles(tmp_path / "gone", most_bytes=10**6)
    for _ in range(200):  # what failed takes no room
        assert files.address(page_of(100, 100)).url.startswith(b"data:")


def test_many_threads_share_the_room(tmp_path: Path) -> None:
    files = SharedFiles(tmp_path, most_bytes=4 * (50 * 50 + 4096))
    most = 0

    def send() -> None:
        nonlocal most
        for _ in range(40):
            address = files.address(page_of(50, 50))
            most = max(most, len(list(tmp_path.iterdir())))
            address.release()

    threads = [threading.Thread(target=send) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0 < most <= 4
    assert list(tmp_path.iterdir()) == []


def test_the_folder_is_private_and_goes_with_the_run(tmp_path: Path) -> None:
    with shared_folder(tmp_path) as files:
        assert files is not None
        assert stat.S_IMODE(files.folder.stat().st_mode) == 0o700
        files.address(page_of(30, 30))
    assert list(tmp_path.iterdir()) == []


def test_folders_of_dead_runs_are_removed_and_those_of_living_ones_kept(tmp_path: Path) -> None:
    dead = next(number for number in range(4_000_000, 4_100_000) if not Path(f"/proc/{number}").exists())
    names = [f"{FOLDER_PREFIX}{dead}-abc", f"{FOLDER_PREFIX}{os.getpid()}-abc", f"{FOLDER_PREFIX}x-abc", "other"]
    for name in names:
        (tmp_path / name).mkdir()
    remove_orphans(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[1:])


def test_too_little_shared_memory_is_said_and_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("src.transport.LEAST_BYTES", 2**60)
    with shared_folder(tmp_path) as files:
        assert files is None
    assert "pages travel in the requests" in capsys.readouterr().err
    with shared_folder(tmp_path / "nowhere") as files:
        assert files is None


def test_a_vllm_that_we_start_gets_its_pages_as_files(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    (tmp_path / "bin").mkdir()
    install_fake_vllm(tmp_path / "bin", "--read-tag", "--journal", str(journal), "--fault", "status=500,every=5")
    write_pages(tmp_path / "pages.parquet", 20)
    before = set(Path("/dev/shm").iterdir())
    env = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    command = [sys.executable, str(SCRIPT), str(tmp_path / "pages.parquet"), str(tmp_path / "out"), "--no-canary"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "--allowed-local-media-path /dev/shm/" in done.stderr
    table = output_table(tmp_path / "out")
    assert all(f"tag {number:06x}" in text for number, text in enumerate(table["markdown"].to_pylist(), 1))
    assert len(read_journal(journal)) > 20
    assert not [path for path in set(Path("/dev/shm").iterdir()) - before if path.name.startswith(FOLDER_PREFIX)]
