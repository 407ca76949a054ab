"""Chaos: what a run does when its server dies, freezes or errs, a table of Markdown on stdout.

    python bench/chaos.py [--pages 200] [--concurrency 16] [--stall-timeout 10] [FAULT ...]

Each fault befalls a fresh run of lighton-ocr-server.py with stub servers. `noticed` is the time from the fault to the
line in which the script says so, `back` to the first page answered after it; `asked twice` are requests beyond one a
page; `lost` are rows of the input without a row in the output or with an error that is not the page's own fault.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.runs import SCRIPT, block_files, output_table, tag_of, wait_until, write_pages
from tests.servers import READABLE, Server, fault
from tests.stub_vllm import read_journal

AT = 60  # the request at which it happens


@dataclass(frozen=True)
class Fault:
    """What happens: options of the first server, or a signal to it; and the words by which the script notices."""

    options: str
    notice: str
    signal: signal.Signals | None = None
    each_start: bool = False  # the servers after it have the fault too
    own_errors: int = 0  # rows whose error is the page's own fault


FAULTS = {
    "process exits": Fault(fault(f"die,at={AT}"), "ended by itself"),
    "process killed (SIGKILL)": Fault("", "ended by itself", signal.SIGKILL),
    "engine dead, process alive": Fault(fault(f"dead,at={AT}"), "says that its engine is dead"),
    "process stopped (SIGSTOP)": Fault("", "is frozen", signal.SIGSTOP),
    "whole server frozen": Fault(fault(f"stall,at={AT},seconds=900,hard=1"), "is frozen"),
    "engine stalls": Fault(fault(f"stall,at={AT},seconds=900"), "is frozen"),
    "engine stalls, no gauges": Fault(fault(f"stall,at={AT},seconds=900") + " --no-metrics", "is frozen"),
    "one page never answered": Fault(fault(f"hang,at={AT}"), "is frozen"),
    "a page that kills the engine": Fault(fault(f"die,tag={tag_of(AT)}"), "ended by itself", None, True, 1),
    "two pages that kill the engine": Fault(
        f"{fault(f'die,tag={tag_of(AT)}')} {fault(f'die,tag={tag_of(AT + 50)}')}", "ended by itself", None, True, 2
    ),
    "5 % of requests: HTTP 500": Fault(fault("status=500,every=20"), "", None, True),
    "5 % of requests: connection reset": Fault(fault("reset,every=20"), "", None, True),
}


@dataclass
class Told:
    """What the script says on stderr, line by line with its time."""

    lines: list[tuple[float, str]] = field(default_factory=list)

    def first(self, words: str) -> float | None:
        """When it said these words first."""
        return next((when for when, line in self.lines if words in line), None)


def read_lines(process: subprocess.Popen[str], told: Told) -> None:
    """Note each line of a process's stderr."""
    assert process.stderr is not None
    for line in process.stderr:
        told.lines.append((time.time(), line))


def run_one(name: str, what: Fault, options: argparse.Namespace) -> str:
    """Run the script under a fault; return the row of the table."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        here = Path(folder)
        speed = "--seconds-per-page 0.3"
        later = what.options if what.each_start else ""
        server = Server(here, f"{what.options} {fault(READABLE)} {speed}", f"{later} {fault(READABLE)} {speed}")
        pages = write_pages(here / "pages.parquet", options.pages)
        words = [sys.executable, str(SCRIPT), str(pages), str(here / "out"), *server.words]
        words += ["--concurrency", str(options.concurrency), "--stall-timeout", str(options.stall_timeout)]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        told = Told()
        reader = threading.Thread(target=read_lines, args=(process, told))
        reader.start()
        struck = time.time()
        if what.signal:
            wait_until(lambda: len(read_journal(server.journal)) >= AT, "pages are read")
            struck = time.time()
            os.kill(server.pids[0], what.signal)
        stdout = process.stdout.read() if process.stdout else ""
        process.wait()
        reader.join()
        said = json.loads(stdout)
        rows = output_table(here / "out").to_pylist() if block_files(here / "out") else []
        arrivals = read_journal(server.arrivals)
        if not what.signal:
            struck = moment(what, arrivals)
        noticed = told.first(what.notice) if what.notice else None
        answered = [entry["time"] for entry in read_journal(server.journal) if entry["outcome"] == "200"]
        back = next((when for when in sorted(answered) if noticed and when > noticed), None)
        errors = sum(row["markdown_status"] == "error" for row in rows)
        lost = options.pages - len(rows) + max(0, errors - what.own_errors)
        twice = said["requests"] - options.pages
        return (
            f"| {name} | {seconds(noticed, struck)} | {seconds(back, struck)} | {said['restarts']} | {twice} | "
            f"{errors} | {lost} | {said['exit_code']} |"
        )


def moment(what: Fault, arrivals: list[dict[str, object]]) -> float:
    """When the stub's own fault struck: at the arrival of its page, or of its request."""
    if "tag=" in what.options:
        return next(float(str(entry["time"])) for entry in arrivals if entry["tag"] == tag_of(AT))
    return float(str(arrivals[min(AT, len(arrivals)) - 1]["time"]))


def seconds(when: float | None, since: float) -> str:
    """A time since another, for the table."""
    return "–" if when is None else f"{max(0.0, when - since):.1f} s"


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=200)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--stall-timeout", type=float, default=10.0)
    parser.add_argument("fault", nargs="*", help="a part of the names of the faults to try (default: all)")
    options = parser.parse_args()
    print("| fault | noticed | back | restarts | asked twice | error rows | lost | exit code |")
    print("|---|---|---|---|---|---|---|---|")
    for name, what in FAULTS.items():
        if not options.fault or any(part in name for part in options.fault):
            print(run_one(name, what, options), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
