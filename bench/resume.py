"""What a resumed run of millions of rows costs before its first request, and while it runs.

    uv run python bench/resume.py --rows 2000000

A dataset of tiny pages is written once (20 files, row groups of 100 rows, stored plainly so that reading shows). Then
lighton-ocr3-saturate.py is started on outputs of which no, a tenth, half and nine tenths of the blocks are closed, and
stopped by SIGTERM after some pages. All in one run, real subprocesses, against the stub. Each line: seconds and CPU
seconds from the start of the process to the first request that the server sees; bytes read until then, beside those of
the input's files that a reader of all finished rows would read; peak memory then, and after the pages; seconds from
SIGTERM to the end, in which the closed blocks are counted.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pyarrow as pa
import pyarrow.parquet as pq

from tests.runs import SATURATE, Running, block_files, pages_dataset, wait_until
from tests.stub_vllm import DEFAULT_MODEL, StubVllm

FILES = 20
GROUP_ROWS = 100
BLOCK_ROWS = 256
SHARES = (0.0, 0.1, 0.5, 0.9)


@dataclass(frozen=True)
class Usage:
    """What a process has used."""

    cpu_s: float
    read_mb: float
    peak_mb: float


def usage(pid: int) -> Usage:
    """Read it from /proc."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    io = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return Usage(cpu_s, int(io["rchar"]) / 1e6, int(status["VmHWM"].split()[0]) / 1e3)


def write_input(folder: Path, rows: int) -> None:
    """Write the rows: one batch over and over, its ids counted on."""
    folder.mkdir(parents=True)
    batch = pages_dataset(range(1, GROUP_ROWS + 1)).with_format("arrow")[:]
    per_file = rows // FILES
    for number in range(FILES):
        path = folder / f"train-{number:05d}-of-{FILES:05d}.parquet"
        with pq.ParquetWriter(path, batch.schema, use_dictionary=False, compression="none") as writer:
            for start in range(number * per_file, (number + 1) * per_file, GROUP_ROWS):
                ids = pa.array(range(start, start + GROUP_ROWS), pa.int64())
                writer.write_table(batch.set_column(0, batch.schema.field(0), ids), row_group_size=GROUP_ROWS)


def command(stub: StubVllm, source: Path, out: Path) -> list[str]:
    """The words of a run."""
    words = [str(source), str(out), "--server", stub.url, "--model", DEFAULT_MODEL, "--results-only"]
    return [*words, "--block-rows", str(BLOCK_ROWS)]


def template_block(stub: StubVllm, source: Path, folder: Path) -> Path:
    """Have the script write a block, with the settings of the whole run in it."""
    with Running(*command(stub, source, folder), script=SATURATE) as run:
        wait_until(lambda: block_files(folder), "the first block")
        run.signal(signal.SIGKILL)
        run.wait()
    return block_files(folder)[0]


def measure(stub: StubVllm, source: Path, out: Path, pages: int) -> dict[str, float]:
    """Resume a run, let it read some pages, stop it."""
    stub.reset()
    started = time.monotonic()
    with Running(*command(stub, source, out), script=SATURATE) as run:
        while not stub.stats()["requests"]:
            time.sleep(0.02)
        first_s, first = time.monotonic() - started, usage(run.pid)
        wait_until(lambda: stub.stats()["requests"] >= pages, "some pages", 300)
        later = usage(run.pid)
        stopped = time.monotonic()
        run.signal(signal.SIGTERM)
        ended = run.wait(300)
    assert ended.code == 143, ended.stderr
    return {
        "first_request_s": first_s,
        "first_request_cpu_s": first.cpu_s,
        "read_mb": first.read_mb,
        "peak_mb": first.peak_mb,
        "peak_after_pages_mb": later.peak_mb,
        "stop_s": time.monotonic() - stopped,
        "rows_before": float(ended.line["rows_before"]),
    }


def main() -> int:
    """Measure, print a line each, and a JSON line at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2_000_000, help="rows of the dataset, a multiple of 2,000")
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES, help="shares of the blocks that are closed")
    parser.add_argument("--pages", type=int, default=1000, help="pages to read after the first request")
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="bench-resume-"))
    results = []
    try:
        source = work / "in"
        write_input(source, options.rows)
        input_mb = sum(file.stat().st_size for file in source.iterdir()) / 1e6
        print(f"{options.rows} rows, {input_mb:.0f} MB, blocks of {BLOCK_ROWS} rows")
        with StubVllm("--ceiling", "200") as stub:
            template = template_block(stub, source, work / "template")
            for share in options.shares:
                out = work / f"out-{share}"
                (out / "data").mkdir(parents=True)
                for number in range(int(share * options.rows / BLOCK_ROWS)):
                    os.link(template, out / "data" / f"train-{number:06d}.parquet")
                result = measure(stub, source, out, options.pages)
                results.append({"done": share, **{name: round(value, 2) for name, value in result.items()}})
                print(
                    f"{share:4.0%} done: first request after {result['first_request_s']:.1f} s "
                    f"({result['first_request_cpu_s']:.1f} CPU s), {result['read_mb']:.0f} MB read "
                    f"(finished rows: {share * input_mb:.0f} MB), peak {result['peak_mb']:.0f} MB, "
                    f"{result['peak_after_pages_mb']:.0f} MB after {options.pages} pages; "
                    f"stopped in {result['stop_s']:.1f} s",
                    flush=True,
                )
    finally:
        shutil.rmtree(work)
    print(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
