"""The offline script against the served one, and against batches of 16 with a barrier, on the real vLLM on CPU.

    uv run python bench/offline.py --pages 512

One run, the same drawn pages, the same checkpoint, greedy. Three contestants take turns, `--rounds` times, and the
median of each is reported: `lighton-ocr.py` (pages fed without a barrier), `lighton-ocr-server.py` with a `vllm serve`,
and `lighton-ocr.py` fed in chunks of 16, each of which drains before the next one starts. Speed is pages per second
from the first page on, as each script's own JSON line says: engine start-up is not in it. CPU seconds are those of
script and engine together, start-up included.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import datasets
import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.tiny_lightonocr.drawn import drawn_pages  # noqa: E402
from tests.vllm_cpu import CHECKPOINT, SERVED_NAME, cpu_engine_env, cpu_vllm, serve_tiny  # noqa: E402

SAMPLING = ("--temperature", "0", "--max-tokens", "400")
TINY = ("--model", str(CHECKPOINT), "--max-model-len", "4096", "--no-canary")
ENGINE = ("--", "--dtype", "bfloat16", "--enforce-eager", "--no-enable-chunked-prefill")
# Takes enqueue_chat away, so that the script falls back to chunks, as on an engine that has none.
WITHOUT_ENQUEUE = """
import runpy, sys, vllm
if __name__ == "__main__":
    del vllm.LLM.enqueue_chat
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


def write_pages(path: Path, count: int) -> None:
    """Write drawn pages to a parquet file."""
    features = datasets.Features({"image": datasets.Image()})
    images = [{"bytes": page.encoded(), "path": None} for page in drawn_pages(count, seed=3)]
    pq.write_table(datasets.Dataset.from_dict({"image": images}, features=features).with_format("arrow")[:], path)


@dataclass
class Contestant:
    """A way to read the pages, and what each round measured of it."""

    name: str
    pages_per_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Count the CPU seconds of all processes that begin and end within."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        yield
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.cpu_s.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)

    def run(self, *command: str) -> None:
        """Run a script and keep the speed that its JSON line tells."""
        done = subprocess.run(command, env=cpu_engine_env(), capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{command} ended with {done.returncode}:\n{done.stderr[-3000:]}")
        self.pages_per_s.append(json.loads(done.stdout.splitlines()[-1])["pages_per_second"])


def one_round(pages: Path, folder: Path, concurrency: int, contestants: Sequence[Contestant]) -> None:
    """Let each contestant read the pages once."""
    offline, served, batches = contestants
    python, script = str(cpu_vllm().python), str(ROOT / "lighton-ocr.py")
    in_flight = ("--concurrency", str(concurrency))
    with offline.turn():
        offline.run(python, script, str(pages), str(folder / "offline"), *TINY, *SAMPLING, *in_flight, *ENGINE)
    with batches.turn():
        words = (str(pages), str(folder / "batches"), *TINY, *SAMPLING, *in_flight, "--batch-size", "16", *ENGINE)
        batches.run(python, "-c", WITHOUT_ENQUEUE, script, *words)
    with served.turn(), serve_tiny(folder / "serve.log") as server:
        asking = ("--server", server.url, "--model", SERVED_NAME, "--no-canary")
        driver = str(ROOT / "lighton-ocr-server.py")
        served.run(sys.executable, driver, str(pages), str(folder / "served"), *SAMPLING, *in_flight, *asking)


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    contestants = [Contestant("offline"), Contestant("served"), Contestant("batches of 16")]
    with tempfile.TemporaryDirectory() as folder:
        pages = Path(folder) / "pages.parquet"
        write_pages(pages, options.pages)
        for number in range(options.rounds):
            place = Path(folder) / str(number)
            place.mkdir()
            one_round(pages, place, options.concurrency, contestants)
            print(f"round {number + 1}: " + ", ".join(f"{c.name} {c.pages_per_s[-1]:.2f} pages/s" for c in contestants))
    speed = {c.name: statistics.median(c.pages_per_s) for c in contestants}
    print(f"\n{'':16}{'pages/s':>10}{'of served':>12}{'CPU s':>10}")
    for c in contestants:
        print(
            f"{c.name:16}{speed[c.name]:10.2f}{speed[c.name] / speed['served']:12.3f}{statistics.median(c.cpu_s):10.1f}"
        )
    print(f"offline / batches of 16: {speed['offline'] / speed['batches of 16']:.3f}")
    if options.json:
        options.json.write_text(json.dumps([asdict(c) for c in contestants], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
