"""Watchdog, canary and tidiness against the real vLLM: its engine killed and stopped, the script itself killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import datasets
import pyarrow.parquet as pq
import pytest
from rapidfuzz.distance import Levenshtein

from src.spawn import shared_files
from tests.runs import ROOT, Ended, Running, is_running, output_table, run_here, wait_until
from tests.test_engine_runs import descendants
from tests.tiny_lightonocr.drawn import drawn_pages, page_with
from tests.vllm_cpu import CHECKPOINT, CpuVllm, TinyServer, cpu_engine_env

pytestmark = pytest.mark.engine

PAGES = 60
CANARY = "Dear Sir or Ma,\nthe 14 sacks of\ngrain have come\nin good order."
PATIENCE_S = 600


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Drawn pages in a parquet file, and beside it a canary page that the tiny model can read."""
    folder = tmp_path_factory.mktemp("trust")
    features = datasets.Features(
        {"id": datasets.Value("int64"), "image": datasets.Image(), "truth": datasets.Value("string")}
    )
    pages = drawn_pages(PAGES, seed=5)
    columns = {
        "id": list(range(PAGES)),
        "image": [{"bytes": page.encoded(), "path": None} for page in pages],
        "truth": [page.text for page in pages],
    }
    table = datasets.Dataset.from_dict(columns, features=features).with_format("arrow")[:]
    pq.write_table(table, folder / "pages.parquet")
    (folder / "canary.png").write_bytes(page_with(CANARY).encoded())
    (folder / "canary.txt").write_text(CANARY)
    return folder


def canary_words(drawn: Path) -> list[str]:
    return ["--canary-page", str(drawn / "canary.png"), "--canary-text", str(drawn / "canary.txt")]


def run_words(drawn: Path, out: Path, *more: str) -> list[str]:
    words = [str(drawn / "pages.parquet"), str(out), "--model", str(CHECKPOINT), "--max-model-len", "4096"]
    words += ["--max-tokens", "400", "--concurrency", "4", "--block-rows", "5", *canary_words(drawn), *more]
    return [*words, "--", "--dtype", "bfloat16", "--enforce-eager", "--max-num-seqs", "4"]


def engine_processes(run: Running) -> list[int]:
    return [pid for pid, name in descendants(run.pid).items() if "EngineCore" in name]


def closed_blocks(out: Path) -> int:
    return len(list((out / "data").glob("*.parquet")))


def assert_all_read(out: Path) -> None:
    table = output_table(out)
    assert table["id"].to_pylist() == list(range(PAGES))
    assert set(table["markdown_status"].to_pylist()) == {"ok"}
    texts, truths = table["markdown"].to_pylist(), table["truth"].to_pylist()
    errors = sum(Levenshtein.distance(text, truth) for text, truth in zip(texts, truths, strict=True))
    assert errors / sum(map(len, truths)) <= 0.05


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (signal.SIGKILL, "the server (ended by itself|says that its engine is dead)"),
        (signal.SIGSTOP, "the server is frozen: no token and no page"),
    ],
)
def test_a_run_goes_on_when_its_engine_process_is_killed_or_stopped_and_leaves_nothing_behind(
    drawn: Path, cpu_engine: CpuVllm, tmp_path: Path, number: signal.Signals, told: str
) -> None:
    out = tmp_path / "out"
    words = run_words(drawn, out, "--stall-timeout", "5")
    with Running(*words, env=cpu_engine_env(), canary=True) as run:
        wait_until(lambda: closed_blocks(out) >= 2 or not run.is_alive(), "two blocks are closed", PATIENCE_S)
        processes = list(descendants(run.pid))
        shared = shared_files(processes)
        engines = engine_processes(run)
        assert engines, run.wait().stderr if not run.is_alive() else "no engine process"
        os.kill(engines[0], number)
        struck = time.monotonic()
        wait_until(lambda: not is_running(engines[0]) or not run.is_alive(), "it is noticed", PATIENCE_S)
        noticed_s = time.monotonic() - struck
        wait_until(lambda: set(engine_processes(run)) - set(engines) or not run.is_alive(), "a new one", PATIENCE_S)
        processes += list(descendants(run.pid))
        shared |= shared_files(processes)
        ended = run.wait(PATIENCE_S)
    print(f"\n{number.name}: gone after {noticed_s:.1f} s; {ended.line}")
    assert ended.code == 0, ended
    assert re.search(told, ended.stderr)
    assert ended.line["restarts"] == 1
    assert ended.stderr.count("the canary page was read") == 2
    # the four that were in flight; a server whose engine is gone refuses some before it ends
    assert PAGES < ended.line["requests"] == PAGES + ended.line["retries"] <= PAGES + 16
    assert {"weights", "ready"} <= set(re.findall(r"after \S+: (\w+)", ended.stderr))
    assert_all_read(out)
    wait_until(lambda: not any(is_running(pid) for pid in processes), "all its processes are gone")
    assert [file for file in shared if file.exists()] == []


def test_a_run_that_is_killed_takes_the_engine_with_it(drawn: Path, cpu_engine: CpuVllm, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with Running(*run_words(drawn, out), env=cpu_engine_env(), canary=True) as run:
        wait_until(lambda: closed_blocks(out) >= 1 or not run.is_alive(), "a block is closed", PATIENCE_S)
        processes = list(descendants(run.pid))
        shared = shared_files(processes)
        assert engine_processes(run)
        run.signal(signal.SIGKILL)
        run.wait()
    struck = time.monotonic()
    wait_until(lambda: not any(is_running(pid) for pid in processes), "all its processes are gone", PATIENCE_S)
    print(f"\nall {len(processes)} processes were gone after {time.monotonic() - struck:.1f} s")
    assert [file for file in shared if file.exists()] == []


def test_a_real_engine_is_trusted_by_what_it_reads(drawn: Path, vllm_server: TinyServer, tmp_path: Path) -> None:
    words = [str(drawn / "pages.parquet"), str(tmp_path / "out"), "--server", vllm_server.url, "--max-samples", "5"]
    words += ["--model", vllm_server.model, "--max-tokens", "400"]
    ended: Ended = run_here(*words, *canary_words(drawn), canary=True)
    assert ended.code == 0, ended
    assert "the canary page was read" in ended.stderr
    # it reads no font but its own: the page that we draw shows that it is no real LightOnOCR
    refused = run_here(words[0], tmp_path / "other", *words[2:], canary=True)
    assert refused.code == 1
    assert "can't be trusted" in refused.line["message"]
    assert not list((tmp_path / "other").rglob("*.parquet"))


def test_the_offline_engine_reads_the_canary_before_the_first_page(
    drawn: Path, cpu_engine: CpuVllm, tmp_path: Path
) -> None:
    words = [str(drawn / "pages.parquet"), str(tmp_path / "out"), "--model", str(CHECKPOINT), "--max-model-len", "4096"]
    words += ["--max-tokens", "400", "--max-samples", "5", *canary_words(drawn), "--", "--dtype", "bfloat16"]
    command = [str(cpu_engine.python), str(ROOT / "lighton-ocr.py"), *words, "--enforce-eager"]
    done = subprocess.run(
        command, env=cpu_engine_env(), capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    ended = Ended(done.returncode, done.stdout, done.stderr)
    assert ended.code == 0, ended
    assert "the canary page was read" in ended.stderr
    assert ended.line["requests"] == 5


def test_an_offline_run_that_is_killed_takes_the_engine_with_it(
    drawn: Path, cpu_engine: CpuVllm, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    words = [str(drawn / "pages.parquet"), str(out), "--no-canary", "--model", str(CHECKPOINT)]
    words += ["--max-model-len", "4096", "--max-tokens", "400", "--concurrency", "2", "--block-rows", "2"]
    command = [str(cpu_engine.python), str(ROOT / "lighton-ocr.py"), *words, "--", "--dtype", "bfloat16"]
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen([*command, "--enforce-eager"], env=cpu_engine_env(), stdout=log, stderr=log) as process,
    ):
        wait_until(lambda: closed_blocks(out) or process.poll() is not None, "a block is closed", PATIENCE_S)
        below = descendants(process.pid)
        shared = shared_files(list(below))
        time.sleep(2)  # the watcher has looked meanwhile
        process.kill()
    assert [name for name in below.values() if "EngineCore" in name], (tmp_path / "log").read_text()
    wait_until(lambda: not any(is_running(pid) for pid in below), "all its processes are gone", PATIENCE_S)
    wait_until(lambda: not any(file.exists() for file in shared), "its shared memory is gone")
