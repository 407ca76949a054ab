"""Runs of the driver scripts for tests: datasets, the built file as a process or in this one, its output."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from tests.stub_vllm import tagged_png

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import ModuleType

    import datasets

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "lighton-ocr-server.py"
SATURATE = ROOT / "lighton-ocr3-saturate.py"
OFFLINE = ROOT / "lighton-ocr.py"
STUB = ROOT / "tests" / "stub_vllm.py"
PATIENCE_S = 90.0  # how long a test waits before it gives up: never a measure of speed
NEW_COLUMNS = ["markdown", "markdown_status", "markdown_error", "markdown_tokens", "inference_info"]
JSON_KEYS = [
    "version",
    "exit_code",
    "message",
    "input",
    "output",
    "split",
    "model",
    "engine",
    "rows",
    "rows_before",
    "rows_done",
    "statuses",
    "requests",
    "retries",
    "restarts",
    "asked_again",
    "malformed_markers",
    "unread_frames",
    "prompt_tokens",
    "tokens",
    "seconds",
    "pages_per_second",
    "flavor",
    "dollars_per_hour",
    "dollars",
    "dollars_per_thousand_pages",
]


# --- datasets --------------------------------------------------------------------------------------------------------


def tag_of(number: int) -> str:
    """How the stub names the page `tagged_png(number)`, in `tags` and in faults."""
    return f"{number:06x}"


def picture(number: int, path: str | None = None) -> dict[str, Any]:
    """A cell with a page in it."""
    return {"bytes": tagged_png(number), "path": path or f"page-{number:04d}.png"}


def pages_dataset(numbers: Iterable[int], cells: Mapping[int, object] | None = None) -> datasets.Dataset:
    """A dataset of an id, a page and a label per number; `cells` are other cells, by the numbers of their rows."""
    import datasets

    rows = list(numbers)
    images = [(cells or {}).get(number, picture(number)) for number in rows]
    features = datasets.Features(
        {
            "id": datasets.Value("int64"),
            "image": datasets.Image(),
            "kind": datasets.ClassLabel(names=["letter", "ledger", "map"]),
        }
    )
    columns = {"id": rows, "image": images, "kind": [number % 3 for number in rows]}
    return datasets.Dataset.from_dict(columns, features=features)


def write_pages(path: Path, count: int, cells: Mapping[int, object] | None = None, *, row_group_size: int = 50) -> Path:
    """Write pages 1 to `count` to a parquet file; their tags are their numbers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pages_dataset(range(1, count + 1), cells).with_format("arrow")[:]
    pq.write_table(table, path, row_group_size=row_group_size)
    return path


# --- runs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """What a run left: its exit code and its streams."""

    code: int
    stdout: str
    stderr: str

    @property
    def line(self) -> dict[str, Any]:
        """The JSON line, which must be all there is on stdout."""
        assert self.stdout.count("\n") == 1, self
        assert self.stdout.endswith("\n"), self
        said: dict[str, Any] = json.loads(self.stdout)
        assert list(said) == JSON_KEYS
        assert said["exit_code"] == self.code
        return said

    @property
    def advice(self) -> str:
        """What stands on stderr, its white space made one: for phrases that may be wrapped."""
        return re.sub(r"\s+", " ", self.stderr)


def built_script(script: Path = SCRIPT) -> ModuleType:
    """The built file as a module: what is in it runs in this process, without the seconds that imports take."""
    return _loaded_script(script)


@functools.cache
def _loaded_script(script: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(script.stem.replace("-", "_"), script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def without_canary(words: Sequence[str | Path], canary: bool = False) -> list[str]:
    """The words of a command line, with `--no-canary` before them unless a canary is wanted."""
    return [*(() if canary else ("--no-canary",)), *map(str, words)]


def run_here(*words: str | Path, canary: bool = False, script: Path = SCRIPT) -> Ended:
    """Run the built file's `main` in this process; the stub can't read, so it is not asked about the canary page."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        try:
            code = int(built_script(script).main(without_canary(words, canary)))
        except SystemExit as end:
            code = int(end.code or 0)
    return Ended(code, stdout.getvalue(), stderr.getvalue())


class Running:
    """The built file in a process of its own, killed on leaving the `with` block if it still runs."""

    def __init__(
        self,
        *words: str | Path,
        env: Mapping[str, str] | None = None,
        canary: bool = False,
        script: Path = SCRIPT,
    ) -> None:
        command = [sys.executable, str(script), *without_canary(words, canary)]
        self._process = subprocess.Popen(
            command,
            env=os.environ if env is None else env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    def is_alive(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def wait(self, timeout_s: float = PATIENCE_S) -> Ended:
        """Wait for its end."""
        stdout, stderr = self._process.communicate(timeout=timeout_s)
        return Ended(self._process.returncode, stdout, stderr)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.is_alive():
            self._process.kill()
            self._process.communicate()
        for stream in (self._process.stdout, self._process.stderr):
            if stream:
                stream.close()


def wait_until(condition: Callable[[], object], what: str, patience_s: float = PATIENCE_S) -> None:
    """Wait for something to come true; fail where it does not."""
    give_up_at = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < give_up_at, f"waited in vain: {what}"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    """Whether there is such a process, and not only what is left of it until its parent asks."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


# --- outputs ---------------------------------------------------------------------------------------------------------


def block_files(out: Path, split: str = "train") -> list[Path]:
    """The closed blocks, in order."""
    return sorted((out / "data").glob(f"{split}-*.parquet"))


def output_table(out: Path, split: str = "train") -> pa.Table:
    """All rows of the closed blocks, as they lie on disk."""
    return pa.concat_tables([pq.read_table(file) for file in block_files(out, split)]).combine_chunks()


def load(out: Path, split: str = "train", name: str | None = None) -> datasets.Dataset:
    """The output as people load it."""
    import datasets

    return datasets.load_dataset(str(out), name, split=split)


def statuses(out: Path, split: str = "train") -> dict[int, str]:
    """Each row's status, by its id."""
    table = output_table(out, split)
    return dict(zip(table["id"].to_pylist(), table["markdown_status"].to_pylist(), strict=True))


def row_of(out: Path, number: int) -> dict[str, Any]:
    """The row with this id."""
    rows: list[dict[str, Any]] = output_table(out).to_pylist()
    return next(row for row in rows if row["id"] == number)


def assert_input_is_kept(table: pa.Table, out: pa.Table) -> None:
    """Each row once, in order, its input columns value for value and type for type, and the new ones after them."""
    assert out.schema.names == [*table.schema.names, *NEW_COLUMNS]
    for name in table.schema.names:
        assert out.schema.field(name).equals(table.schema.field(name)), name
        assert out[name].combine_chunks().equals(table[name].combine_chunks()), name


def assert_all_read(out: pa.Table, numbers: Sequence[int]) -> None:
    """Row by row, the text is that of the row's own page."""
    assert out["id"].to_pylist() == list(numbers)
    for number, text, status in zip(
        numbers, out["markdown"].to_pylist(), out["markdown_status"].to_pylist(), strict=True
    ):
        assert status == "ok", number
        assert f"tag {tag_of(number)}" in text
