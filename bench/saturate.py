"""lighton-ocr3-saturate.py against the package `saturate`, a window chosen by hand, and a plain client: how full?

    python bench/saturate.py                        all of it: about half an hour
    python bench/saturate.py --quick                one ceiling, short runs: some five minutes
    python bench/saturate.py --only data-url saturate --ceilings 20 --pages thumbnails

The stub server answers each page after 1.5 s and no more pages a second than its ceiling. Each contestant is given so
many seconds from its first request on; what counts as steady is the second half of them. Two kinds of pages: A4 scans,
where the CPU decides, and thumbnails, which cost nobody much, where the window decides. A contestant whose CPU was the
limit at one ceiling (client and stub had all cores, or one thread had a whole one) is not run at a higher one.
`CPU allows` is the pace at which that would be so. `others'` are cores that other programs took: it should be near 0.

    data-url  lighton-ocr3-saturate.py, to a server that runs already
    file      the same with a `vllm` that it starts itself: pages travel through shared memory
    hand      lighton-ocr-server.py, a fixed window of --hand pages in flight
    saturate  PyPI's saturate 0.2.0 (bench/saturate_peer.py), installed into a virtual environment of its own
    threads   the same, its request function in as many threads as there are cores
    reference bench/reference_client.py with --hand threads

CPU seconds, memory and the times of the answers are of the client alone, as the system and the stub's journal tell
them; the stub's own share of the machine is told beside them. Memory is private memory, and the files in shared memory.
A second table says what a page in flight holds: the growth from a few pages in flight to many, while the stub
answers none; what stands beside them, such as the rows of the open block, does not grow with them. Quote the ratios.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from bench.driver import MIB, MODEL, private_kib  # noqa: E402
from bench.pages import scan, write_dataset  # noqa: E402
from tests.stub_vllm import StubVllm, install_fake_vllm, read_journal  # noqa: E402
from tests.vllm_cpu import free_port  # noqa: E402

SATURATE_VERSION = "0.2.0"
SECONDS_A_PAGE = 1.5
SLOW_START_S = 4.0  # of a server that the client starts: vLLM takes longer
CORES = len(os.sched_getaffinity(0))
TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
DISTINCT_PAGES = 48
THUMBNAIL_PX = (132, 187)
KINDS = ("scans", "thumbnails")
# So many pages of a kind, and no more, were ever prepared a second on a core: a run's dataset need not be larger.
MOST_A_CORE = {"scans": 12.0, "thumbnails": 1000.0}
MOST_IN_FLIGHT = 512  # what windows may be: the last page must not be asked about before the time is up
REACHED = 0.9
REACHED_OVER_S = 2.0  # measured over so long a time
FULL = 0.97
IDLE_SHARE = 0.05
BUSY_SHARE, BUSY_THREAD = 0.85, 0.9  # of all cores, and of one: beyond that the CPU is the limit
PATIENCE_S = 120.0


# --- contestants -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Task:
    """What a client has to do: which pages, whom to ask, and how many at once where that is not its own affair."""

    pages: Path
    output: Path
    url: str
    window: int | None
    hand: int

    @property
    def words(self) -> list[str]:
        """What every client is told."""
        return [str(self.pages), str(self.output), "--server", self.url, "--model", MODEL]


@dataclasses.dataclass(frozen=True)
class Contestant:
    """A client: its command line, and whether it starts its server itself."""

    name: str
    command: Callable[[Task], list[str]]
    spawns: bool = False


def ours(task: Task) -> list[str]:
    """The script, to a server that runs."""
    script = [sys.executable, str(ROOT / "lighton-ocr3-saturate.py"), *task.words, "--no-canary"]
    window = [] if task.window is None else [str(task.window)]
    return [*script, *(word for n in window for word in ("--min-in-flight", n, "--max-in-flight", n))]


def hand(task: Task) -> list[str]:
    """The other script: its window stays as it was chosen."""
    script = str(ROOT / "lighton-ocr-server.py")
    return [sys.executable, script, *task.words, "--no-canary", "--concurrency", str(task.window or task.hand)]


def reference(task: Task) -> list[str]:
    """The plain client."""
    words = [str(task.pages), str(task.output.with_suffix(".parquet")), *task.words[2:]]
    script = str(ROOT / "bench" / "reference_client.py")
    return [sys.executable, script, *words, "--concurrency", str(task.window or task.hand)]


def saturate(workers: int) -> Callable[[Task], list[str]]:
    """The package, its request function on the event loop or in threads."""

    def command(task: Task) -> list[str]:
        window = ["--window", str(task.window)] if task.window else []
        # -P: beside the script lies a file that is called like the package
        script = [str(peer_python()), "-P", str(ROOT / "bench" / "saturate_peer.py"), *task.words]
        return [*script, "--prepare-workers", str(workers), *window]

    return command


CONTESTANTS = (
    Contestant("data-url", ours),
    Contestant("file", ours, spawns=True),
    Contestant("hand", hand),
    Contestant("saturate", saturate(0)),
    Contestant("threads", saturate(CORES)),
    Contestant("reference", reference),
)


def peer_python() -> Path:
    """Return the Python of a virtual environment with the package in it; make that where it is missing."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "lighton-ocr-bench"
    folder = cache / f"saturate-{SATURATE_VERSION}-py{sys.version_info.major}.{sys.version_info.minor}"
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run(["uv", "venv", "--quiet", "--python", sys.executable, str(folder)], check=True)
        wanted = [
            f"saturate[hf]=={SATURATE_VERSION}",
            "datasets==5.2.0",
            "pillow==13.0.0",
        ]  # as pyproject.toml has them
        subprocess.run(["uv", "pip", "install", "--quiet", "--python", str(python), *wanted], check=True)
        (folder / "complete").touch()
    return python


# --- pages -----------------------------------------------------------------------------------------------------------


def thumbnail(number: int) -> bytes:
    """Draw page `number` and scale it down until preparing it costs nothing."""
    with Image.open(io.BytesIO(scan(number))) as page:
        file = io.BytesIO()
        page.resize(THUMBNAIL_PX).save(file, "JPEG", quality=80)
    return file.getvalue()


class Datasets:
    """Datasets of either kind and of any length, drawn once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._drawn: dict[str, list[bytes]] = {}

    def of(self, kind: str, rows: int) -> Path:
        """Return a dataset of so many rows."""
        place = self._folder / f"{kind}-{rows}"
        if not place.exists():
            draw = {"scans": scan, "thumbnails": thumbnail}[kind]
            drawn = self._drawn.setdefault(kind, [draw(number) for number in range(DISTINCT_PAGES)])
            write_dataset(place, (drawn[row % len(drawn)] for row in range(rows)))
        return place


# --- what the system tells -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Sample:
    """A look at a run: CPU seconds so far, bytes held now."""

    at: float
    cpu_s: float
    threads_s: dict[str, float]
    server_cpu_s: float
    idle_s: float  # of all cores
    held_mib: float
    in_flight: int


def look(pid: int, server_pid: int | None, url: str) -> Sample:
    """Look at a client and its server."""
    held = private_kib(pid) / 1024 + shared_bytes(pid) / MIB
    return Sample(
        at=time.time(),
        cpu_s=cpu_seconds(Path(f"/proc/{pid}/stat")),
        threads_s={task.name: cpu_seconds(task / "stat") for task in threads_of(pid)},
        server_cpu_s=cpu_seconds(Path(f"/proc/{server_pid}/stat")) if server_pid else 0.0,
        idle_s=sum(map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[4:6])) / TICKS_A_SECOND,
        held_mib=held,
        in_flight=requests_there(url),
    )


def cpu_seconds(stat: Path) -> float:
    """Return the CPU seconds of a process or thread; 0 where it is gone."""
    with contextlib.suppress(OSError):
        fields = stat.read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_A_SECOND
    return 0.0


def threads_of(pid: int) -> list[Path]:
    """Return the folders of a process's threads."""
    with contextlib.suppress(OSError):
        return list(Path(f"/proc/{pid}/task").iterdir())
    return []


def shared_bytes(pid: int) -> int:
    """Return the size of the pages that lie in shared memory for a client's server."""
    total = 0
    for file in Path("/dev/shm").glob(f"lighton-ocr-pages-{pid}-*/*"):
        with contextlib.suppress(OSError):
            total += file.stat().st_size
    return total


def fetch(url: str) -> str | None:
    """Fetch a text; None where nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            text: str = response.read().decode()
            return text
    except OSError:
        return None


def requests_there(url: str) -> int:
    """Return how many requests the server has: its gauges say so."""
    gauges = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
    lines = (fetch(f"{url}/metrics") or "").splitlines()
    return int(sum(float(line.split()[-1]) for line in lines if line.startswith(gauges)))


# --- one run ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Run:
    """A client under way, and what was seen of it."""

    client: subprocess.Popen[bytes]
    url: str
    log: Path
    journal: Path
    arrivals: Path
    started_at: float
    ready_at: float
    server_pid: int | None = None
    samples: list[Sample] = dataclasses.field(default_factory=list)

    def look(self) -> Sample:
        """Look once more."""
        self.samples.append(look(self.client.pid, self.server_pid, self.url))
        return self.samples[-1]

    def first_request_at(self) -> float | None:
        """When the first request came, None before."""
        arrived = read_journal(self.arrivals)[:1]
        return arrived[0]["time"] if arrived else None

    def check(self) -> None:
        """Fail where the client has failed."""
        if self.client.poll():
            raise SystemExit(
                f"{self.client.args!r} ended with {self.client.returncode}:\n{self.log.read_text()[-3000:]}"
            )


@contextlib.contextmanager
def running(who: Contestant, pages: Path, stub_options: Sequence[str], window: int | None, size: int) -> Iterator[Run]:
    """Run a client against a stub in a folder of its own, until the block ends."""
    with tempfile.TemporaryDirectory(prefix="bench-run-") as scratch, contextlib.ExitStack() as stack:
        here = Path(scratch)
        journal, arrivals, log = here / "journal", here / "arrivals", here / "log"
        told = ["--journal", str(journal), "--arrivals", str(arrivals), *stub_options]
        environment = os.environ | {"HF_HOME": str(here / "hf"), "HF_HUB_OFFLINE": "1", "VLLM_API_KEY": ""}
        server_pid = None
        if who.spawns:
            port = free_port()
            url = f"http://127.0.0.1:{port}"
            install_fake_vllm(here, *told, "--slow-start", str(SLOW_START_S))
            environment["PATH"] = f"{here}{os.pathsep}{environment['PATH']}"
        else:
            stub = stack.enter_context(StubVllm(*told))
            url, server_pid = stub.url, stub.pid
        command = who.command(Task(pages, here / "out", url, window, size))
        started_at = time.time()
        with log.open("wb") as output:
            client = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        run = Run(client, url, log, journal, arrivals, started_at, started_at, server_pid)
        stack.callback(end, client)
        if who.spawns:
            wait_for(lambda: fetch(f"{url}/health") is not None, run)
            run.ready_at = time.time()
            run.server_pid = json.loads(fetch(f"{url}/stub/stats") or "{}").get("pid")
        yield run


def end(client: subprocess.Popen[bytes]) -> None:
    """End a client; one that started a server takes it along."""
    for sign, patience_s in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 20.0)):
        client.send_signal(sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            client.wait(patience_s)
            return


def wait_for(condition: Callable[[], object], run: Run) -> None:
    """Wait for something to come true, looking at the run all the while."""
    give_up_at = time.time() + PATIENCE_S
    while not condition():
        run.check()
        if time.time() > give_up_at:
            raise SystemExit(f"{run.client.args!r} was waited for in vain:\n{run.log.read_text()[-3000:]}")
        time.sleep(0.02)


# --- how full, how soon ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Figures:
    """What is said of a client at one ceiling."""

    ceiling: float
    kind: str
    client: str
    pages_per_s: float
    share: float
    reached_s: float | None  # from the first request; None: not within the run
    own_reached_s: float | None  # the same for nine tenths of its own steady pace
    first_request_s: float  # from the start; from its server being ready, where it starts that itself
    cpu_ms_a_page: float
    client_cores: float
    server_cores: float
    others_cores: float
    idle_cores: float
    busiest_thread: float
    most_in_flight: int
    peak_mib: float
    peak_mib_in_flight: float  # all that it held beyond the first request, by the most in flight
    cpu_allows: float  # pages a second with all cores for client and stub, or with a whole core for its busiest thread
    cpu_bound: bool
    disturbed: bool  # it fell short, and others had the cores


def time_run(who: Contestant, ceiling: float, kind: str, pages: Path, options: argparse.Namespace) -> Figures:
    """Let a client run for so many seconds from its first request on."""
    model = ["--ceiling", str(ceiling), "--seconds-per-page", str(SECONDS_A_PAGE), "--max-num-seqs", "256"]
    with running(who, pages, model, None, options.hand) as run:
        wait_for(run.first_request_at, run)
        first_at = run.first_request_at() or 0.0
        run.look()
        while time.time() < first_at + options.seconds and run.client.poll() is None:
            time.sleep(0.25)
            run.look()
        run.check()
        answers = sorted(line["time"] for line in read_journal(run.journal) if line["outcome"] == "200")
        last_arrival = read_journal(run.arrivals)[-1]["time"]
    until = min(first_at + options.seconds, last_arrival)
    return figures(who, ceiling, kind, run, answers, first_at, until)


def figures(
    who: Contestant, ceiling: float, kind: str, run: Run, answers: list[float], first_at: float, until: float
) -> Figures:
    """Take the second half of a run as its steady state."""
    steady = [sample for sample in run.samples if (first_at + until) / 2 <= sample.at <= until]
    begin, last = steady[0], steady[-1]
    passed_s = last.at - begin.at
    done = sum(begin.at < answer <= last.at for answer in answers)
    threads = [after - begin.threads_s.get(name, 0.0) for name, after in last.threads_s.items()]
    pace = done / passed_s
    idle, busiest = (last.idle_s - begin.idle_s) / passed_s, max(threads, default=0.0) / passed_s
    client, server = (last.cpu_s - begin.cpu_s) / passed_s, (last.server_cpu_s - begin.server_cpu_s) / passed_s
    is_busy = client + server >= BUSY_SHARE * CORES or busiest >= BUSY_THREAD
    most = max(sample.in_flight for sample in run.samples)
    peak = max(sample.held_mib for sample in run.samples)
    return Figures(
        ceiling=ceiling,
        kind=kind,
        client=who.name,
        pages_per_s=pace,
        share=pace / ceiling,
        reached_s=seconds_to(REACHED * ceiling, answers, first_at),
        own_reached_s=seconds_to(REACHED * pace, answers, first_at),
        first_request_s=first_at - run.ready_at,
        cpu_ms_a_page=1000 * (last.cpu_s - begin.cpu_s) / max(1, done),
        client_cores=client,
        server_cores=server,
        others_cores=max(0.0, CORES - idle - client - server),
        idle_cores=idle,
        busiest_thread=busiest,
        most_in_flight=most,
        peak_mib=peak,
        peak_mib_in_flight=(peak - run.samples[0].held_mib) / max(1, most),
        cpu_allows=pace / max((client + server) / CORES, busiest, 1e-9),
        cpu_bound=pace < FULL * ceiling and is_busy,
        disturbed=pace < FULL * ceiling and not is_busy and idle < IDLE_SHARE * CORES,
    )


def seconds_to(pace: float, answers: list[float], first_at: float) -> float | None:
    """Return how long after the first request answers came at this pace for the first time."""
    needed = pace * REACHED_OVER_S
    for index, answer in enumerate(answers):
        before = next(earlier for earlier in range(index + 1) if answers[earlier] > answer - REACHED_OVER_S)
        if index + 1 - before >= needed:
            return answer - first_at
    return None


COLUMNS: tuple[tuple[str, Callable[[Figures], str]], ...] = (
    ("pages/s", lambda f: f"{f.pages_per_s:.2f}"),
    ("of ceiling", lambda f: f"{f.share:.1%}"),
    ("90 % after s", lambda f: "–" if f.reached_s is None else f"{f.reached_s:.1f}"),
    ("of own s", lambda f: "–" if f.own_reached_s is None else f"{f.own_reached_s:.1f}"),
    ("1st req. s", lambda f: f"{f.first_request_s:.1f}"),
    ("CPU ms/page", lambda f: f"{f.cpu_ms_a_page:.0f}"),
    ("cores", lambda f: f"{f.client_cores:.2f}"),
    ("stub's", lambda f: f"{f.server_cores:.2f}"),
    ("others'", lambda f: f"{f.others_cores:.2f}"),
    ("CPU allows", lambda f: f"{f.cpu_allows:.1f}"),
    ("in flight", lambda f: f"{f.most_in_flight}"),
    ("peak MiB", lambda f: f"{f.peak_mib:.0f}"),
)


def line_of(f: Figures) -> str:
    """One line of the table."""
    bound = f"  CPU-bound at {f.pages_per_s:.1f} pages/s" if f.cpu_bound else ""
    bound += "  disturbed: other programs had the cores" if f.disturbed else ""
    cells = "".join(f"{cell(f):>{max(10, len(title) + 2)}}" for title, cell in COLUMNS)
    return f"{f.ceiling:>7g}  {f.client:<10}{cells}{bound}"


HEAD = f"{'ceiling':>7}  {'client':<10}" + "".join(f"{title:>{max(10, len(title) + 2)}}" for title, _ in COLUMNS)


def compare_speed(chosen: list[Contestant], data: Datasets, options: argparse.Namespace) -> list[Figures]:
    """Run everybody at every ceiling, one kind of pages after the other."""
    found: list[Figures] = []
    for kind in options.pages:
        print(
            f"\n{kind}, {options.seconds:g} s from the first request, load {os.getloadavg()[0]:.1f}\n{HEAD}", flush=True
        )
        bound: set[str] = set()
        for ceiling in options.ceilings:
            for who in chosen:
                if who.name in bound:
                    print(f"{ceiling:>7g}  {who.name:<10}  CPU-bound below that")
                    continue
                pace = min(ceiling, MOST_A_CORE[kind] * CORES)
                pages = data.of(kind, int(pace * options.seconds) + MOST_IN_FLIGHT)
                of_it = time_run(who, ceiling, kind, pages, options)
                print(line_of(of_it), flush=True)
                found.append(of_it)
                if of_it.cpu_bound:
                    bound.add(who.name)
    return found


# --- what a page in flight holds -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Held:
    """Memory of a client, in MiB: with one page of a dataset of one, and with few and many in flight of a large one."""

    client: str
    few: int
    many: int
    one_page: float
    with_few: float
    with_many: float
    peak_with_many: float

    @property
    def a_page(self) -> float:
        """What one more page in flight holds."""
        return (self.with_many - self.with_few) / (self.many - self.few)

    @property
    def at_peak(self) -> float:
        """Everything beyond the start at the peak, by the pages in flight."""
        return (self.peak_with_many - self.one_page) / self.many

    @property
    def beside(self) -> float:
        """What stands beside the pages: the rows of the open block, and whatever else a large dataset brings."""
        return self.with_few - self.few * self.a_page - self.one_page


def hold(who: Contestant, pages: Path, in_flight: int) -> tuple[float, float]:
    """Return (MiB held with so many in flight and none answered, their peak on the way)."""
    model = ["--max-num-seqs", "0", "--kv-cache-usage", "0.1"]
    with running(who, pages, model, in_flight, in_flight) as run:

        def is_full() -> bool:
            return run.look().in_flight >= in_flight

        wait_for(is_full, run)
        time.sleep(1.5)  # the last body goes out, and what runs ahead of it is made
        held = run.look().held_mib
        return held, max(sample.held_mib for sample in run.samples)


def compare_memory(chosen: list[Contestant], data: Datasets, options: argparse.Namespace) -> list[Held]:
    """Hold few and many pages in flight."""
    few, many = options.held
    head = ("MiB/in flight", "all, at peak", "beside", "one page", f"with {few}", f"with {many}")
    print(f"\nscans in flight, none answered, load {os.getloadavg()[0]:.1f}")
    print(f"{'client':<10}" + "".join(f"{title:>15}" for title in head), flush=True)
    found = []
    for who in chosen:
        one_page, _ = hold(who, data.of("scans", 1), 1)
        with_few, _ = hold(who, data.of("scans", 3 * many), few)
        with_many, peak = hold(who, data.of("scans", 3 * many), many)
        held = Held(who.name, few, many, one_page, with_few, with_many, peak)
        values = (held.a_page, held.at_peak, held.beside, one_page, with_few, with_many)
        print(f"{who.name:<10}" + "".join(f"{value:>15.2f}" for value in values), flush=True)
        found.append(held)
    return found


# --- everything ------------------------------------------------------------------------------------------------------


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    names = [who.name for who in CONTESTANTS]
    parser.add_argument("--ceilings", type=float, nargs="+", metavar="PAGES/S", help="default: 8 20 42, --quick 8")
    parser.add_argument("--pages", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="CLIENT", help=", ".join(names))
    parser.add_argument(
        "--seconds", type=float, metavar="S", help="from the first request on (default: 40, --quick 20)"
    )
    parser.add_argument("--hand", type=int, default=128, metavar="N", help="the window chosen by hand (default: 128)")
    parser.add_argument("--held", type=int, nargs=2, default=(16, 96), metavar="N", help="in flight (default: 16 96)")
    parser.add_argument("--skip", choices=("speed", "memory"), help="leave one table out")
    parser.add_argument("--quick", action="store_true", help="short")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all that was measured")
    options = parser.parse_args()
    options.ceilings = sorted(options.ceilings or ([8.0] if options.quick else [8.0, 20.0, 42.0]))
    options.seconds = options.seconds or (20.0 if options.quick else 40.0)
    return options


def main() -> int:
    """Run the benchmark."""
    options = parse_options()
    chosen = [who for who in CONTESTANTS if who.name in options.only]
    if {"saturate", "threads"} & set(options.only):
        peer_python()
    found: dict[str, Any] = {
        "cores": CORES,
        "hand": options.hand,
        "seconds": options.seconds,
        "load": [os.getloadavg()],
    }
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        data = Datasets(Path(scratch))
        if options.skip != "speed":
            found["speed"] = [dataclasses.asdict(f) for f in compare_speed(chosen, data, options)]
        if options.skip != "memory":
            # `hand` holds what `data-url` holds; `saturate` makes no 96 pages on its loop before its own time-outs
            alone = [who for who in chosen if who.name not in {"hand", "saturate"}]
            held = compare_memory(alone, data, options)
            found["memory"] = [dataclasses.asdict(h) | {"a_page": h.a_page, "at_peak": h.at_peak} for h in held]
    found["load"].append(os.getloadavg())
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
