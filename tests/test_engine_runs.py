"""The scripts on the real vLLM: the same 64 drawn pages served and offline, an engine killed, a server of our own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import datasets
import pyarrow.parquet as pq
import pytest
from rapidfuzz.distance import Levenshtein

from tests.runs import ROOT, Ended, block_files, is_running, output_table, wait_until
from tests.tiny_lightonocr.drawn import DrawnPage, drawn_pages
from tests.vllm_cpu import CHECKPOINT, CpuVllm, TinyServer, cpu_engine_env

pytestmark = pytest.mark.engine

PAGES = 64
COLD = ("--temperature", "0", "--max-tokens", "400", "--block-rows", "8", "--confidence")
WARM = ("--temperature", "0.2", "--top-p", "0.9", "--max-tokens", "400", "--block-rows", "8")
TINY = ("--model", str(CHECKPOINT), "--max-model-len", "4096")
TINY_ENGINE = ("--", "--dtype", "bfloat16", "--enforce-eager", "--no-enable-chunked-prefill")  # as in tests/vllm_cpu.py


@dataclass(frozen=True)
class Drawn:
    """The drawn pages, and the parquet file they lie in."""

    pages: list[DrawnPage]
    path: Path

    def cer(self, texts: Sequence[str]) -> float:
        """Errors per character over all pages."""
        errors = sum(Levenshtein.distance(text, page.text) for text, page in zip(texts, self.pages, strict=True))
        return errors / sum(len(page.text) for page in self.pages)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Drawn:
    pages = drawn_pages(PAGES, seed=64)
    features = datasets.Features({"id": datasets.Value("int64"), "image": datasets.Image()})
    images = [{"bytes": page.encoded(), "path": None} for page in pages]
    path = tmp_path_factory.mktemp("drawn") / "pages.parquet"
    table = datasets.Dataset.from_dict({"id": range(PAGES), "image": images}, features=features).with_format("arrow")[:]
    pq.write_table(table, path)
    return Drawn(pages, path)


@dataclass
class Script:
    """A built script at work in the engine's own environment."""

    process: subprocess.Popen[str]
    log: Path

    def wait(self) -> Ended:
        stdout, _ = self.process.communicate(timeout=900)
        return Ended(self.process.returncode, stdout, self.log.read_text())


def start(python: Path, script: str, *words: object, log: Path) -> Script:
    # the tiny model reads no font but its own: tests/test_engine_trust.py has a canary page for it
    command = [str(python), str(ROOT / script), "--no-canary", *map(str, words)]
    with log.open("w") as stderr:
        return Script(
            subprocess.Popen(command, env=cpu_engine_env(), stdout=subprocess.PIPE, stderr=stderr, text=True), log
        )


def texts_of(out: Path) -> list[str]:
    table = output_table(out)
    assert table["id"].to_pylist() == list(range(PAGES))
    assert set(table["markdown_status"].to_pylist()) == {"ok"}
    texts: list[str] = table["markdown"].to_pylist()
    return texts


def lowest_of(out: Path) -> list[float]:
    """How sure the engine was of the least sure place of each page."""
    lowest: list[float] = [sure["lowest"] for sure in output_table(out)["markdown_confidence"].to_pylist()]
    return lowest


def descendants(pid: int) -> dict[int, str]:
    """Return the processes below a process, and what each calls itself."""
    parents: dict[int, int] = {}
    names: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                names[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
            except (FileNotFoundError, ProcessLookupError):
                continue
    found: dict[int, str] = {}
    below = [pid]
    while below:
        parent = below.pop()
        for child, its_parent in parents.items():
            if its_parent == parent:
                found[child] = names[child]
                below.append(child)
    return found


@pytest.fixture(scope="module")
def served(drawn: Drawn, vllm_server: TinyServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The texts of lighton-ocr-server.py, cold and warm."""
    texts = {}
    for name, sampling in (("cold", COLD), ("warm", WARM)):
        folder = tmp_path_factory.mktemp(f"served-{name}")
        words = (
            drawn.path,
            folder / "out",
            "--server",
            vllm_server.url,
            "--model",
            vllm_server.model,
            "--no-canary",
            *sampling,
        )
        ended = start(Path(sys.executable), "lighton-ocr-server.py", *words, log=folder / "log").wait()
        assert ended.code == 0, ended.stderr
        assert ended.line["engine"] == "vllm 0.32.0"
        texts[name] = texts_of(folder / "out")
    return texts


@dataclass(frozen=True)
class Killed:
    """An offline run whose engine was killed, and the run of the same command after it."""

    out: Path
    first: Ended
    blocks_after_first: list[str]
    second: Ended


@pytest.fixture(scope="module")
def killed(drawn: Drawn, cpu_engine: CpuVllm, tmp_path_factory: pytest.TempPathFactory) -> Killed:
    folder = tmp_path_factory.mktemp("offline-cold")
    out = folder / "out"
    # four pages at a time, so that the kill comes when some blocks are closed and some are not
    words = (drawn.path, out, *TINY, *COLD, "--concurrency", "4", *TINY_ENGINE)
    script = start(cpu_engine.python, "lighton-ocr.py", *words, log=folder / "first.log")
    wait_until(lambda: block_files(out) or script.process.poll() is not None, "a closed block", patience_s=600)
    engines = [pid for pid, name in descendants(script.process.pid).items() if "EngineCore" in name]
    assert engines, script.log.read_text()
    for pid in engines:
        os.kill(pid, signal.SIGKILL)
    first = script.wait()
    blocks = [file.name for file in block_files(out)]
    second = start(cpu_engine.python, "lighton-ocr.py", *words, log=folder / "second.log").wait()
    return Killed(out, first, blocks, second)


@pytest.fixture(scope="module")
def offline(
    drawn: Drawn, cpu_engine: CpuVllm, killed: Killed, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[str]]:
    """The texts of lighton-ocr.py, cold (from the run that was killed and finished) and warm."""
    assert killed.second.code == 0, killed.second.stderr
    folder = tmp_path_factory.mktemp("offline-warm")
    words = (drawn.path, folder / "out", *TINY, *WARM, *TINY_ENGINE)
    ended = start(cpu_engine.python, "lighton-ocr.py", *words, log=folder / "log").wait()
    assert ended.code == 0, ended.stderr
    return {"cold": texts_of(killed.out), "warm": texts_of(folder / "out")}


@pytest.mark.parametrize("sampling", ["cold", "warm"])
def test_both_scripts_read_the_pages_with_few_errors(
    drawn: Drawn, served: dict[str, list[str]], offline: dict[str, list[str]], sampling: str
) -> None:
    assert drawn.cer(served[sampling]) <= 0.05
    assert drawn.cer(offline[sampling]) <= 0.05


def test_at_temperature_zero_offline_and_served_texts_are_identical(
    served: dict[str, list[str]], offline: dict[str, list[str]]
) -> None:
    assert offline["cold"] == served["cold"]


def test_with_seeds_most_texts_are_identical_at_the_models_own_temperature(
    drawn: Drawn, served: dict[str, list[str]], offline: dict[str, list[str]], record_property: pytest.FixtureRequest
) -> None:
    same = sum(a == b for a, b in zip(served["warm"], offline["warm"], strict=True))
    record_property("identical_at_0.2", f"{same}/{PAGES}")  # type: ignore[operator]
    print(f"identical at temperature 0.2 with seeds: {same}/{PAGES}")
    assert same >= PAGES * 0.8
    assert len(set(served["warm"])) == PAGES


def test_a_killed_engine_ends_the_offline_run_with_its_closed_blocks_kept(killed: Killed) -> None:
    assert killed.first.code == 1
    assert "the engine has died" in killed.first.advice
    assert "the same command goes on" in killed.first.advice
    assert 0 < len(killed.blocks_after_first) < PAGES // 8
    assert killed.first.line["statuses"]["ok"] == 8 * len(killed.blocks_after_first)


def test_the_same_command_finishes_what_a_killed_engine_left(killed: Killed) -> None:
    assert killed.second.code == 0, killed.second.stderr
    line = killed.second.line
    assert line["rows_before"] == 8 * len(killed.blocks_after_first)
    assert line["rows_before"] + line["rows_done"] == PAGES
    assert line["statuses"]["ok"] == PAGES


def test_an_engine_that_does_not_know_a_flag_is_a_usage_error_before_it_starts(
    drawn: Drawn, cpu_engine: CpuVllm, tmp_path: Path
) -> None:
    words = (drawn.path, tmp_path / "out", *TINY, "--", "--max-model-length", "10")
    ended = start(cpu_engine.python, "lighton-ocr.py", *words, log=tmp_path / "log").wait()
    assert ended.code == 2
    assert "--max-model-length" in ended.advice


@pytest.fixture(scope="module")
def spawned(
    drawn: Drawn, cpu_engine: CpuVllm, served: dict[str, list[str]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Ended, Path, dict[int, str]]:
    """A run that spawns `vllm serve` itself, with the model's own SERVE_ARGS."""
    folder = tmp_path_factory.mktemp("spawned")
    words = (drawn.path, folder / "out", *TINY, *COLD, *TINY_ENGINE)
    script = start(Path(sys.executable), "lighton-ocr-server.py", *words, log=folder / "log")
    wait_until(lambda: block_files(folder / "out") or script.process.poll() is not None, "a block", patience_s=600)
    processes = descendants(script.process.pid)
    return script.wait(), folder / "out", processes


def test_a_spawned_vllm_gives_the_texts_of_one_that_ran_already_and_ends_with_the_script(
    spawned: tuple[Ended, Path, dict[int, str]], served: dict[str, list[str]], killed: Killed
) -> None:
    ended, out, processes = spawned
    assert ended.code == 0, ended.stderr
    assert texts_of(out) == served["cold"]
    assert lowest_of(out) == pytest.approx(lowest_of(killed.out), abs=0.02)
    assert all(0 < lowest <= 1 for lowest in lowest_of(out))
    assert any("EngineCore" in name for name in processes.values())
    wait_until(lambda: not [pid for pid in processes if is_running(pid)], "the end of vLLM's processes")
