"""Measures lighton-ocr-server.py against a plain reference client: the same pages, the same stub server.

    python bench/driver.py                      32, 128 and 256 in flight, three rounds: about an hour
    python bench/driver.py --quick              one round, few pages: some ten minutes
    python bench/driver.py --only ours --in-flight 256 --rounds 1 --our-options="--block-rows 64"

For each number in flight the contestants take turns. The stub holds all pages until the window is full for the first
time, so it is, on any machine; then it answers. It runs in its own process and is not counted. What is counted is the
client's own: CPU seconds (user and system), and private memory (RssAnon, sampled; mapped files are the page cache's). A
run over one page is subtracted where it says "net": that is Python starting, and its libraries. Quote the ratios; the
seconds are those of one machine.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from bench.pages import scan, write_dataset  # noqa: E402
from tests.stub_vllm import StubVllm  # noqa: E402

MODEL = "lightonai/LightOnOCR-2-1B"
CONTESTANTS = ("reference", "ours")
DISTINCT_PAGES = 48
SECONDS_PER_PAGE_IN_FLIGHT = 0.1  # a client that prepares ten pages a second keeps the window full
MIB = 1024 * 1024


@dataclasses.dataclass(frozen=True)
class Measured:
    """What one run of a client cost, and what the server saw of it."""

    pages: int
    cpu_s: float
    peak_mib: float  # private memory
    peak_rss_mib: float  # with mapped files, as `time` shows it
    wall_s: float
    first_request_s: float
    most_in_flight: int
    distinct_pages: int


@dataclasses.dataclass(frozen=True)
class Figures:
    """What is said of a client at one number in flight: medians over the rounds, net of a run over one page."""

    cpu_s_a_page: float
    net_cpu_s_a_page: float
    peak_mib: float
    net_mib_in_flight: float
    pages_per_s: float
    first_request_s: float
    most_in_flight: float


def command_of(
    contestant: str, dataset: Path, output: Path, url: str, in_flight: int, our_options: list[str]
) -> list[str]:
    """The command line of a client."""
    script = {"ours": ROOT / "lighton-ocr-server.py", "reference": ROOT / "bench" / "reference_client.py"}[contestant]
    target = output if contestant == "ours" else output.with_suffix(".parquet")
    words = [sys.executable, str(script), str(dataset), str(target), "--server", url, "--model", MODEL]
    ours = ["--no-canary", *our_options] if contestant == "ours" else []
    return [*words, "--concurrency", str(in_flight), *ours]


def measure(
    contestant: str, dataset: Path, scratch: Path, pages: int, in_flight: int, our_options: list[str]
) -> Measured:
    """Run a client over a dataset against a fresh stub."""
    # No cache of an earlier run helps.
    environment = os.environ | {"HF_HOME": str(scratch / "hf"), "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    service_s = SECONDS_PER_PAGE_IN_FLIGHT * in_flight
    with StubVllm("--max-num-seqs", "0", "--seconds-per-page", str(service_s)) as stub:
        command = command_of(contestant, dataset, scratch / "out", stub.url, in_flight, our_options)
        started, started_at = time.monotonic(), time.time()
        log = (scratch / "log").open("w+")
        client = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        release = threading.Thread(target=release_when_full, args=(stub, min(pages, in_flight), in_flight), daemon=True)
        release.start()
        peak_kib, usage, code = wait_sampling(client.pid)
        client.returncode = code
        wall_s = time.monotonic() - started
        log.seek(0)
        text = log.read()
        log.close()
        if code:
            raise SystemExit(f"{contestant} ended with exit code {code}:\n{text}")
        seen = stub.stats()
    if seen["completions"] < pages:
        raise SystemExit(f"{contestant}: {seen['completions']} of {pages} pages were asked about:\n{text}")
    return Measured(
        pages=pages,
        cpu_s=usage.ru_utime + usage.ru_stime,
        peak_mib=peak_kib / 1024,
        peak_rss_mib=usage.ru_maxrss / 1024,
        wall_s=wall_s,
        first_request_s=seen["first_request_at"] - started_at,
        most_in_flight=seen["max_in_flight"],
        distinct_pages=seen["distinct_pages"],
    )


def release_when_full(stub: StubVllm, full: int, in_flight: int) -> None:
    """Let the stub begin to answer once so many pages wait there."""
    with contextlib.suppress(OSError):  # the client failed, and the stub is closed
        while stub.stats()["waiting"] < full:
            time.sleep(0.2)
        stub.configure(max_num_seqs=in_flight)


def wait_sampling(pid: int) -> tuple[int, Any, int]:
    """Wait for a process; return (peak of its private memory in KiB, its resource usage, its exit code)."""
    peak_kib = 0
    while True:
        ended, status, usage = os.wait4(pid, os.WNOHANG)
        if ended:
            return peak_kib, usage, os.waitstatus_to_exitcode(status)
        peak_kib = max(peak_kib, private_kib(pid))
        time.sleep(0.02)


def private_kib(pid: int) -> int:
    """How much memory of its own a process has."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("RssAnon:")), 0)


def figures(runs: list[Measured], start: Measured, in_flight: int) -> Figures:
    """Take medians, and the start away."""

    def median(value: Any) -> float:
        return statistics.median(float(value(run)) for run in runs)

    return Figures(
        cpu_s_a_page=median(lambda run: run.cpu_s / run.pages),
        net_cpu_s_a_page=median(lambda run: (run.cpu_s - start.cpu_s) / (run.pages - start.pages)),
        peak_mib=median(lambda run: run.peak_mib),
        net_mib_in_flight=median(lambda run: (run.peak_mib - start.peak_mib) / min(in_flight, run.pages)),
        pages_per_s=median(lambda run: run.pages / run.wall_s),
        first_request_s=median(lambda run: run.first_request_s),
        most_in_flight=median(lambda run: run.most_in_flight),
    )


def compare(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Run everything; return all that was measured."""
    scans = [scan(number) for number in range(DISTINCT_PAGES)]
    our_options = shlex.split(options.our_options)
    contestants = [options.only] if options.only else list(CONTESTANTS)
    one_page = write_dataset(scratch / "pages-1", scans[:1])
    starts = {}
    for contestant in contestants:
        runs = [run_once(contestant, one_page, 1, 1, our_options) for _ in range(options.rounds)]
        starts[contestant] = sorted(runs, key=lambda run: run.cpu_s)[len(runs) // 2]
    found: dict[str, Any] = {"start": {name: dataclasses.asdict(run) for name, run in starts.items()}, "in_flight": {}}
    print(HEAD, flush=True)
    for in_flight in options.in_flight:
        pages = options.pages or (in_flight + in_flight // 4 if options.quick else 3 * in_flight)
        repeated = (scans[number % len(scans)] for number in range(pages))
        dataset = write_dataset(scratch / f"pages-{in_flight}", repeated)
        runs_of: dict[str, list[Measured]] = {contestant: [] for contestant in contestants}
        for _ in range(options.rounds):
            for contestant, runs in runs_of.items():
                runs.append(run_once(contestant, dataset, pages, in_flight, our_options))
        medians = {name: figures(runs, starts[name], in_flight) for name, runs in runs_of.items()}
        for contestant, of_it in medians.items():
            print(line(str(in_flight), contestant, dataclasses.astuple(of_it)), flush=True)
        if len(medians) == len(CONTESTANTS):
            pairs = zip(*(dataclasses.astuple(medians[name]) for name in ("ours", "reference")), strict=True)
            ratios = tuple(ours / max(1e-9, reference) for ours, reference in pairs)
            print(line("", "ratio", ratios), flush=True)
        found["in_flight"][in_flight] = {
            name: {"figures": dataclasses.asdict(medians[name]), "runs": [dataclasses.asdict(run) for run in runs]}
            for name, runs in runs_of.items()
        }
    return found


def run_once(contestant: str, dataset: Path, pages: int, in_flight: int, our_options: list[str]) -> Measured:
    """One run in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="bench-run-") as scratch:
        return measure(contestant, dataset, Path(scratch), pages, in_flight, our_options)


HEAD = f"{'in flight':>9}  {'client':<10}" + "".join(
    f"{title:>14}"
    for title in ("CPU s/page", "net CPU s/page", "peak MiB", "net MiB/flight", "pages/s", "1st request s", "most seen")
)


def line(in_flight: str, contestant: str, values: tuple[float, ...]) -> str:
    """One line of the table."""
    return f"{in_flight:>9}  {contestant:<10}" + "".join(f"{value:>14.3f}" for value in values)


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--in-flight", type=int, nargs="+", default=[32, 128, 256], metavar="N")
    parser.add_argument("--pages", type=int, metavar="N", help="pages a run (default: three for each in flight)")
    parser.add_argument("--rounds", type=int, metavar="N", help="runs of each client (default: 3, --quick 1)")
    parser.add_argument("--only", choices=CONTESTANTS, help="one client alone")
    parser.add_argument("--our-options", default="", metavar="WORDS", help="more options for lighton-ocr-server.py")
    parser.add_argument("--quick", action="store_true", help="one round, five quarters of a window of pages")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all that was measured")
    options = parser.parse_args()
    options.rounds = options.rounds or (1 if options.quick else 3)
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        found = compare(options, Path(scratch))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
