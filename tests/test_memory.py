"""Memory stays flat: it depends on how many pages are in flight, never on how many rows there are."""

from __future__ import annotations

import io
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.runs import SCRIPT, block_files
from tests.stub_vllm import StubVllm

if TYPE_CHECKING:
    from collections.abc import Sequence

MIB = 1024 * 1024
NOTE_BYTES = 4096
BLOCK_ROWS = 256
# After its first fifth a run of 100,000 rows (660 MiB) took on 5 MiB. With 10,000 rows the first fifth is over before
# the allocator has found its size: there the same run took on 7 to 43 MiB.
MOST_GROWTH_MIB = 40.0


def tiny_page(number: int) -> bytes:
    """A PNG of 28×28 to 32×32 px of noise, which can't be packed: 2 to 3 KiB, no two alike."""
    side = 28 + number % 5
    noise = np.random.default_rng(number).integers(0, 256, (side, side, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "PNG", compress_level=1)
    return file.getvalue()


def write_rows(folder: Path, count: int, files: int = 4, row_group_size: int = 1000) -> int:
    """Write rows of a tiny page and a note to parquet files; return how many bytes they hold."""
    folder.mkdir()
    written = 0
    image = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    schema = pa.schema({"id": pa.int64(), "image": image, "note": pa.binary()})
    for file, numbers in enumerate(np.array_split(np.arange(count), files)):
        with pq.ParquetWriter(folder / f"train-{file:05d}.parquet", schema, compression="none") as writer:
            for start in range(0, len(numbers), row_group_size):
                part = [int(number) for number in numbers[start : start + row_group_size]]
                images = [{"bytes": tiny_page(number), "path": None} for number in part]
                notes = [np.random.default_rng(number).bytes(NOTE_BYTES) for number in part]
                table = pa.table({"id": part, "image": images, "note": notes}, schema=schema)
                writer.write_table(table)
                written += table.nbytes
    return written


def resident_mib(pid: int) -> float:
    """The memory of a process; 0 where it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS:")), 0.0)


def memory_by_progress(run: subprocess.Popen[bytes], out: Path, blocks: int) -> list[tuple[float, float]]:
    """Watch a run to its end: (share of the blocks that are closed, MiB) again and again."""
    seen = []
    while run.poll() is None:
        seen.append((len(block_files(out)) / blocks, resident_mib(run.pid)))
        time.sleep(0.05)
    return [(share, mib) for share, mib in seen if mib]


def growth_mib(seen: Sequence[tuple[float, float]]) -> float:
    """How much the highest peak is above the highest peak until a fifth of the blocks were closed."""
    assert any(0.1 <= share <= 0.2 for share, _ in seen), "the first fifth of the run was not seen"
    assert any(share >= 0.9 for share, _ in seen), "the end of the run was not seen"
    return max(mib for _, mib in seen) - max(mib for share, mib in seen if share <= 0.2)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hundred_thousand_rows_take_no_more_memory_than_the_first_fifth_of_them(tmp_path: Path) -> None:
    rows = 100_000
    held_mib = write_rows(tmp_path / "in", rows) / MIB
    assert held_mib > 1.5 * MOST_GROWTH_MIB, "a run that kept all rows must fail here"
    out, log = tmp_path / "out", tmp_path / "log"
    with StubVllm() as server, log.open("wb") as stderr:
        words = [sys.executable, str(SCRIPT), str(tmp_path / "in"), str(out), "--server", server.url, "--no-canary"]
        with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=stderr) as run:
            try:
                seen = memory_by_progress(run, out, -(-rows // BLOCK_ROWS))
            finally:
                run.kill()
        asked = server.stats()
    assert run.returncode == 0, log.read_text()
    assert asked["distinct_pages"] == asked["requests"] == rows
    ids = [number for file in block_files(out) for number in pq.read_table(file, columns=["id"])["id"].to_pylist()]
    assert ids == list(range(rows))
    print("GROWTH", growth_mib(seen), held_mib, seen[:: max(1, len(seen) // 12)])
    assert growth_mib(seen) < MOST_GROWTH_MIB, seen[:: max(1, len(seen) // 20)]
