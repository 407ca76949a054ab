"""What goes wrong around a run: closed streams, signals that come twice, and blocks that are not the run's own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from src.errors import UsageError
from src.interrupt import ECHO_S, Interrupted, Interrupts
from src.source import open_source
from tests.runs import SCRIPT, block_files, output_table, run_here, write_pages
from tests.stub_vllm import StubVllm, tagged_png


@pytest.fixture(scope="module")
def stub() -> Iterator[StubVllm]:
    with StubVllm() as server:
        yield server


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pages(tmp_path_factory.mktemp("pages") / "pages.parquet", 12)


@pytest.fixture
def words(stub: StubVllm, pages: Path, tmp_path: Path) -> tuple[str, ...]:
    """A run of twelve pages in three blocks."""
    return (str(pages), str(tmp_path / "out"), "--server", stub.url, "--block-rows", "4")


def buffered() -> dict[str, str]:
    """The environment of a person: here streams may be unbuffered, which hides what is lost at the end."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


def run_with(redirections: str, words: tuple[str, ...]) -> int:
    """Run the script as a shell starts it, with its streams redirected."""
    command = f'exec "$0" "$@" {redirections}'
    started = ["/bin/sh", "-c", command, sys.executable, str(SCRIPT), "--no-canary", *words]
    return subprocess.run(started, timeout=120, check=False, capture_output=True, env=buffered()).returncode


@pytest.mark.parametrize("redirections", [">&-", "2>&-", ">&- 2>&-", ">/dev/full", "2>/dev/full"])
def test_streams_that_are_closed_or_full_cost_no_page(
    words: tuple[str, ...], tmp_path: Path, redirections: str
) -> None:
    assert run_with(redirections, words) == 0
    assert len(output_table(tmp_path / "out")) == 12


def test_with_stderr_closed_stdout_still_has_the_json_line_alone(words: tuple[str, ...]) -> None:
    started = ["/bin/sh", "-c", 'exec "$0" "$@" 2>&-', sys.executable, str(SCRIPT), "--no-canary", *words]
    done = subprocess.run(started, timeout=120, check=True, capture_output=True, text=True, env=buffered())
    assert done.stdout.count("\n") == 1
    assert done.stdout.startswith('{"version": 1')


def test_nobody_reading_stderr_any_more_costs_no_page(words: tuple[str, ...], tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--no-canary", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=buffered()) as process:
        assert process.stderr is not None
        process.stderr.close()
        stdout = process.stdout.read() if process.stdout else b""
        assert process.wait(timeout=120) == 0
    assert stdout.startswith(b'{"version": 1')
    assert len(output_table(tmp_path / "out")) == 12


def test_a_signal_that_is_passed_on_to_us_again_is_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    now = 100.0
    monkeypatch.setattr("src.interrupt.time.monotonic", lambda: now)
    monkeypatch.setattr("src.interrupt.os._exit", ended.append)
    interrupts = Interrupts()
    with interrupts.caught(), pytest.raises(Interrupted):
        os.kill(os.getpid(), signal.SIGTERM)
    with interrupts.caught():
        os.kill(os.getpid(), signal.SIGTERM)
        assert ended == []
        now += ECHO_S
        with pytest.raises(Interrupted):
            os.kill(os.getpid(), signal.SIGTERM)
    assert ended == [143]


def test_a_block_of_another_run_is_noticed_wherever_it_lies(words: tuple[str, ...], tmp_path: Path) -> None:
    assert run_here(*words).code == 0
    other = (words[0], str(tmp_path / "other"), *words[2:], "--temperature", "0.9")
    assert run_here(*other).code == 0
    shutil.copy(block_files(tmp_path / "other")[1], block_files(tmp_path / "out")[1])
    ended = run_here(*words)
    assert ended.code == 2
    assert "temperature: was 0.9, now 0.2" in ended.advice


def test_a_block_beyond_the_last_is_refused_by_name(words: tuple[str, ...], tmp_path: Path) -> None:
    assert run_here(*words).code == 0
    last = block_files(tmp_path / "out")[-1]
    shutil.copy(last, last.with_name("train-000007.parquet"))
    ended = run_here(*words)
    assert ended.code == 2
    assert "train-000007.parquet lies beyond this output's last block, 2" in ended.advice


@pytest.mark.parametrize("content", [b"", b"PAR1 cut short"])
def test_a_block_that_is_no_parquet_file_is_named(words: tuple[str, ...], tmp_path: Path, content: bytes) -> None:
    assert run_here(*words).code == 0
    damaged = block_files(tmp_path / "out")[1]
    damaged.write_bytes(content)
    ended = run_here(*words)
    assert ended.code == 2
    assert f"{damaged} is no block of this output" in ended.advice
    damaged.unlink()
    assert run_here(*words).code == 0


def test_a_foreign_parquet_file_under_the_name_of_a_block_is_refused(words: tuple[str, ...], tmp_path: Path) -> None:
    assert run_here(*words).code == 0
    pq.write_table(pa.table({"x": [1]}), block_files(tmp_path / "out")[2])
    ended = run_here(*words)
    assert ended.code == 2
    assert "did not write" in ended.advice


def test_a_finished_run_says_that_nothing_is_left(words: tuple[str, ...]) -> None:
    assert run_here(*words).code == 0
    ended = run_here(*words)
    assert ended.code == 0
    assert "nothing is left to ask" in ended.advice


def test_a_file_name_that_datasets_would_pass_over_is_refused(tmp_path: Path) -> None:
    for name in ("1.png", "new\nline.png"):
        (tmp_path / name).write_bytes(tagged_png(1))
    with pytest.raises(UsageError, match="line break; rename"):
        open_source(str(tmp_path))


def test_a_name_that_is_no_text_is_refused_with_the_cause(tmp_path: Path) -> None:
    (tmp_path / "1.png").write_bytes(tagged_png(1))
    Path(os.fsdecode(bytes(tmp_path) + b"/\xff\xfe.png")).write_bytes(tagged_png(2))
    with pytest.raises(UsageError, match=r"Unicode.*check the path"):
        open_source(str(tmp_path))


def test_without_its_modules_the_script_says_how_to_run_it(words: tuple[str, ...]) -> None:
    started = [sys.executable, "-I", "-S", str(SCRIPT), "--no-canary", *words]
    done = subprocess.run(started, timeout=60, check=False, capture_output=True, text=True)
    assert done.returncode == 2
    assert "uv run lighton-ocr-server.py" in done.stderr
    assert done.stdout.count("\n") == 1
