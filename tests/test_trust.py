"""Whole runs of lighton-ocr-server.py against engines that die, freeze, loop and lie: what the server counted."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from src.canary import CANARY_SIZE_PX
from src.errors import EngineError
from src.models import find_profile
from src.question import Question
from src.trust import Trust, check_version
from tests.runs import (
    STUB,
    Ended,
    Running,
    assert_all_read,
    built_script,
    is_running,
    output_table,
    row_of,
    run_here,
    statuses,
    tag_of,
    wait_until,
    write_pages,
)
from tests.servers import READABLE, Server, assert_gone, fault
from tests.stub_vllm import StubVllm, read_journal, tagged_png

if TYPE_CHECKING:
    from collections.abc import Iterator

CANARY_SIZE = "{}x{}".format(*CANARY_SIZE_PX)


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the pauses between attempts and before a restart short."""
    for name, seconds in (("FIRST_PAUSE_S", 0.05), ("LONGEST_PAUSE_S", 0.1), ("LONGEST_BACKOFF_S", 0.05)):
        monkeypatch.setattr(built_script(), name, seconds)


@pytest.fixture
def pages(tmp_path: Path) -> Path:
    return write_pages(tmp_path / "pages.parquet", 40)


# --- the canary ------------------------------------------------------------------------------------------------------


def test_the_canary_page_is_asked_before_the_first_page_and_is_no_page_of_the_run(tmp_path: Path, pages: Path) -> None:
    with StubVllm("--read-tag", "--fault", READABLE) as stub:
        ended = run_here(pages, tmp_path / "out", "--server", stub.url, canary=True)
        counted = stub.stats()
    assert ended.code == 0, ended
    assert "the canary page was read" in ended.stderr
    assert ended.line["requests"] == 40
    assert counted["requests"] == 41
    assert counted["sizes"] == {CANARY_SIZE: 1, "56x28": 40}
    assert_all_read(output_table(tmp_path / "out"), range(1, 41))


UNREADABLE = {
    "it loops": ("loop", "it repeats itself: 'and the and the"),
    "it stops at a loop": ("repetition", "it repeats itself"),
    "it says nothing": ("empty", "the engine returned no text"),
    "it answers null": ("null", "the engine returned no text"),
    "it never stops": ("truncate", "it does not stop"),
    "it thinks": ('{"kind":"answer","text":"<think>A letter.</think>Harbour Office"}', "it thinks aloud"),
    "it draws lines": ('{"kind":"answer","text":"--- *** ---"}', "it read no letter"),
    "it reads something else": ('{"kind":"answer","text":"The quick brown fox."}', "of the characters are wrong"),
    "it tells a novel": (
        json.dumps({"kind": "answer", "text": " ".join(f"word{n * n}" for n in range(900))}),
        "it does not stop",
    ),
}


@pytest.mark.parametrize("how", UNREADABLE)
def test_an_engine_that_cannot_read_the_canary_is_refused_before_the_first_page(
    tmp_path: Path, pages: Path, how: str
) -> None:
    spec, told = UNREADABLE[how]
    with StubVllm("--fault", spec) as stub:
        ended = run_here(pages, tmp_path / "out", "--server", stub.url, canary=True)
        counted = stub.stats()
    assert ended.code == 1
    assert told in ended.line["message"]
    assert "the image vllm/vllm-openai:v0.22.1" in ended.line["message"]
    assert counted["sizes"] == {CANARY_SIZE: 2}
    assert not list((tmp_path / "out" / "data").glob("*.parquet"))


def test_one_unreadable_answer_is_not_held_against_an_engine(tmp_path: Path, pages: Path) -> None:
    with StubVllm("--fault", f"loop,first=1,size={CANARY_SIZE}", "--fault", READABLE) as stub:
        ended = run_here(pages, tmp_path / "out", "--server", stub.url, canary=True)
        seeds = [seeds for page, seeds in stub.stats()["seeds"].items() if len(seeds) == 2]
    assert ended.code == 0, ended
    (both,) = seeds
    assert both[0] != both[1]


def test_a_server_that_refuses_the_canary_is_told_apart_from_one_that_cannot_read(tmp_path: Path, pages: Path) -> None:
    with StubVllm("--fault", "status=400,message=no images here") as stub:
        ended = run_here(pages, tmp_path / "out", "--server", stub.url, canary=True)
    assert ended.code == 1
    assert "refuses the canary page: HTTP 400" in ended.line["message"]
    assert "no images here" in ended.line["message"]


def test_another_page_can_be_the_canary(tmp_path: Path, pages: Path) -> None:
    (tmp_path / "mine.png").write_bytes(tagged_png(77, 84, 84))
    (tmp_path / "mine.txt").write_text("My own words.\n")
    words = ["--canary-page", str(tmp_path / "mine.png"), "--canary-text", str(tmp_path / "mine.txt")]
    with StubVllm("--fault", '{"kind":"answer","text":"# My *own* words","size":"84x84"}') as stub:
        ended = run_here(pages, tmp_path / "out", "--server", stub.url, *words, canary=True)
        assert stub.stats()["sizes"]["84x84"] == 1
    assert ended.code == 0, ended


CANARIES = {
    "a page without its text": (["--canary-page", "{tmp}/c.png"], "go together"),
    "no such file": (["--canary-page", "{tmp}/x.png", "--canary-text", "{tmp}/c.txt"], "can't be read"),
    "no picture": (["--canary-page", "{tmp}/c.txt", "--canary-text", "{tmp}/c.txt"], "not a picture"),
    "no text": (["--canary-page", "{tmp}/c.png", "--canary-text", "{tmp}/empty.txt"], "holds no letters"),
}


@pytest.mark.parametrize("what", CANARIES)
def test_a_canary_page_that_is_none_is_refused_at_once(tmp_path: Path, pages: Path, what: str) -> None:
    words, told = CANARIES[what]
    (tmp_path / "c.png").write_bytes(tagged_png(1, 84, 84))
    (tmp_path / "c.txt").write_text("text")
    (tmp_path / "empty.txt").write_text("\n")
    filled = [word.format(tmp=tmp_path) for word in words]
    ended = run_here(pages, tmp_path / "out", "--server", "http://127.0.0.1:9", *filled, canary=True)
    assert ended.code == 2
    assert told in ended.advice


# --- version and context ---------------------------------------------------------------------------------------------


def test_a_version_known_to_be_bad_is_refused_with_the_reason_unless_insisted_on(tmp_path: Path, pages: Path) -> None:
    with StubVllm("--version-string", "0.27.1+cu129") as stub:
        ended = run_here(pages, tmp_path / "out", "--server", stub.url)
        assert ended.code == 1
        assert "vLLM 0.27.1+cu129 is known to be bad" in ended.line["message"]
        assert "loops" in ended.line["message"]
        assert "--allow-bad-engine" in ended.line["message"]
        assert stub.stats()["requests"] == 0
        assert run_here(pages, tmp_path / "out", "--server", stub.url, "--allow-bad-engine").code == 0


def test_a_vllm_on_path_that_is_known_to_be_bad_is_refused_before_it_is_started(
    tmp_path: Path, pages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python3"
    python.write_text("#!/bin/sh\necho 0.30.0 5.17.2\n")
    vllm = tmp_path / "vllm"
    vllm.write_text(f"#!{python}\nstarted\n")
    for program in (python, vllm):
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    ended = run_here(pages, tmp_path / "out")
    assert ended.code == 1
    assert "vLLM 0.30.0 with transformers 5.17.2 is known to be bad" in ended.line["message"]
    assert "PixtralRotaryEmbedding" in ended.line["message"]
    assert "starting" not in ended.stderr


PAIRS = [
    ("0.27.1", "5.16.1", False, True),
    ("0.27.1", "5.16.1", True, True),
    ("0.27.10", "5.16.1", False, False),
    ("0.30.0", "5.17.0", False, True),
    ("0.30.0", "5.16.1", False, False),
    ("0.30.0", None, False, False),  # what is not known is left to the start, whose log tells
    ("0.30.0", None, True, False),  # it serves the model, so it is not the pair that can't
    ("0.32.0", "5.19.0", False, False),
]


@pytest.mark.parametrize(("vllm", "transformers", "serves", "refused"), PAIRS)
def test_a_pair_is_refused_where_it_is_known_to_be_bad(
    vllm: str, transformers: str | None, serves: bool, refused: bool
) -> None:
    profile = find_profile("lightonai/LightOnOCR-2-1B").profile
    trust = Trust(profile, Question("", 0.2, 0.9, 4096, 0, {}), canary=None)
    if refused:
        with pytest.raises(EngineError, match=r"known to be bad.*--allow-bad-engine"):
            check_version(trust, vllm, transformers, serves=serves)
    else:
        check_version(trust, vllm, transformers, serves=serves)
    check_version(replace(trust, allow_bad_engine=True), vllm, transformers, serves=serves)


def test_a_context_too_small_for_the_largest_page_is_refused_with_the_sum(tmp_path: Path, pages: Path) -> None:
    with StubVllm("--max-model-len", "7000") as stub:
        ended = run_here(pages, tmp_path / "out", "--server", stub.url)
        assert ended.code == 2
        assert "1540x1540 px are 3025 tokens" in ended.line["message"]
        assert "4096 of text (--max-tokens) = 7185, and --max-model-len is 7000" in ended.line["message"]
        assert "at most --max-tokens 3911" in ended.line["message"]
        assert stub.stats()["requests"] == 0
        assert run_here(pages, tmp_path / "out", "--server", stub.url, "--max-tokens", "3911").code == 0


# --- the start -------------------------------------------------------------------------------------------------------


def test_the_phases_of_the_start_are_told(tmp_path: Path, pages: Path) -> None:
    lines = [
        "INFO 11-30 11:15:02 [weight_utils.py:533] Time spent downloading weights for x: 12.5 seconds",
        "(Worker pid=11891) INFO 11-30 11:15:02 [default_loader.py:501] Loading weights took 0.01 seconds",
        "INFO 11-30 11:15:02 [backends.py:1167] Dynamo bytecode transform time: 7.20 s",
        "Capturing CUDA graphs (decode, FULL):  50%|#####     | 1/2",
    ]
    echo = "; ".join(f"echo {shlex.quote(line)}; sleep 0.6" for line in lines)
    stub = shlex.join([sys.executable, str(STUB)])
    (tmp_path / "serve.sh").write_text(f'{echo}\nexec {stub} "$@"\n')
    # each line is a sign of progress: together they take longer than the patience
    words = ["--serve-command", f"sh {tmp_path}/serve.sh", "--startup-timeout", "2"]
    ended = run_here(pages, tmp_path / "out", *words)
    assert ended.code == 0, ended
    told = re.findall(r"after \d+s: (\w+)", ended.stderr)
    assert told[:4] == ["download", "weights", "compile", "graphs"]


def test_a_log_that_only_repeats_itself_is_no_progress(tmp_path: Path, pages: Path) -> None:
    line = "DEBUG 11-30 11:15:02 [utils.py:785] Waiting for 1 local, 0 remote core engine proc(s) to start."
    (tmp_path / "serve.sh").write_text(f"while :; do echo '{line}'; sleep 0.2; done\n")
    words = ["--serve-command", f"sh {tmp_path}/serve.sh", "--startup-timeout", "1.5"]
    ended = run_here(pages, tmp_path / "out", *words)
    assert ended.code == 1
    assert "without a sign of progress (--startup-timeout)" in ended.line["message"]


def test_a_start_that_fails_is_explained_by_its_log_and_is_not_tried_again(tmp_path: Path, pages: Path) -> None:
    text = (
        "(EngineCore_DP0 pid=6880) ValueError: To serve at least one request with the models's max seq len (131072), "
        "(4.54 GiB KV cache is needed, which is larger than the available KV cache memory (1.71 GiB)."
    )
    server = Server(tmp_path, f"--die-at-start {shlex.quote(text)}")
    ended = run_here(pages, tmp_path / "out", *server.words)
    assert ended.code == 1
    assert "does not hold one page of --max-model-len" in ended.line["message"]
    assert "To serve at least one request" in ended.line["message"]
    assert len(server.pids) == 1


# --- the watchdog ----------------------------------------------------------------------------------------------------

FAULTS = {
    "exit": (fault("die,at=17,code=3"), "the server ended by itself (exit code 3)"),
    "exit in the midst of many": (fault("die,at=17") + " --seconds-per-page 0.1", "ended by itself (exit code 1)"),
    "exit after an answer": ("--die-after 13", "ended by itself (exit code 1)"),
    "an engine that is dead behind its server": (fault("dead,at=17"), "the server says that its engine is dead"),
    "stall": (fault("stall,at=17,seconds=600"), "no token and no page came from it"),
    "stall without gauges": (
        fault("stall,at=17,seconds=600") + " --no-metrics",
        "no token and no page came from it",
    ),
    "freeze of the whole server": (fault("stall,at=17,seconds=600,hard=1"), "its API does not answer"),
    "one page that is never answered": (fault("hang,at=17"), "no token and no page came from it"),
}


@pytest.mark.parametrize("how", FAULTS)
def test_a_server_that_dies_or_freezes_is_started_again_and_no_row_is_lost(
    tmp_path: Path, pages: Path, how: str
) -> None:
    options, told = FAULTS[how]
    server = Server(tmp_path, f"{options} {fault(READABLE)}", fault(READABLE))
    words = ["--concurrency", "8", "--block-rows", "10", "--stall-timeout", "1.5"]
    ended = run_here(pages, tmp_path / "out", *words, *server.words, canary=True)
    assert ended.code == 0, ended
    assert told in ended.stderr
    assert ended.line["restarts"] == 1
    assert ended.line["statuses"]["ok"] == 40
    assert_all_read(output_table(tmp_path / "out"), range(1, 41))
    assert ended.stderr.count("the canary page was read") == 2
    twice = [tag for tag, times in server.asked().items() if times > 1 and tag != "fafafa"]
    assert len(twice) <= 8
    assert 40 <= ended.line["requests"] <= 40 + ended.line["retries"] <= 56
    assert_gone(server)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_run_in_its_own_process_survives_that_its_server_is_killed_or_stopped(
    tmp_path: Path, pages: Path, number: signal.Signals
) -> None:
    server = Server(tmp_path, "--ceiling 20", "")
    words = ["--concurrency", "8", "--block-rows", "10", "--stall-timeout", "2", *server.words]
    with Running(pages, tmp_path / "out", *words) as run:
        wait_until(lambda: len(read_journal(server.journal)) >= 5, "five pages are read")
        os.kill(server.pids[0], number)
        ended = run.wait()
    assert ended.code == 0, ended
    assert ended.line["restarts"] == 1
    assert_all_read(output_table(tmp_path / "out"), range(1, 41))
    assert_gone(server)


def test_a_page_that_kills_the_server_is_tried_alone_and_then_quarantined(tmp_path: Path, pages: Path) -> None:
    server = Server(tmp_path, f"{fault(f'die,tag={tag_of(7)}')} --seconds-per-page 0.05")
    words = ["--concurrency", "6", "--block-rows", "10", *server.words]
    ended = run_here(pages, tmp_path / "out", *words)
    assert ended.code == 0, ended
    assert ended.line["restarts"] == 3
    assert [number for number, status in statuses(tmp_path / "out").items() if status != "ok"] == [7]
    assert "quarantined: the server died 3 times" in row_of(tmp_path / "out", 7)["markdown_error"]
    assert "row 6 is quarantined" in ended.stderr
    assert set(server.answers().values()) == {1}


def test_two_pages_that_kill_the_server_cost_no_other_page(tmp_path: Path, pages: Path) -> None:
    faults = " ".join(fault(f"die,tag={tag_of(number)}") for number in (3, 25))
    server = Server(tmp_path, f"{faults} --seconds-per-page 0.02")
    ended = run_here(pages, tmp_path / "out", "--concurrency", "4", *server.words)
    assert [number for number, status in statuses(tmp_path / "out").items() if status != "ok"] == [3, 25]
    assert ended.code == 0, ended
    assert ended.line["restarts"] <= 6


def test_restarts_end_and_closed_blocks_stay(tmp_path: Path, pages: Path) -> None:
    server = Server(tmp_path, fault("die,at=17"), fault("die,at=2"))
    words = ["--concurrency", "4", "--block-rows", "4", "--max-restarts", "2", *server.words]
    ended = run_here(pages, tmp_path / "out", *words)
    assert ended.code == 1
    assert "was started again 2 times (--max-restarts), and in vain" in ended.line["message"]
    assert "ended by itself" in ended.line["message"]
    assert len(server.pids) == 3
    assert 0 < output_table(tmp_path / "out").num_rows < 40
    assert set(statuses(tmp_path / "out").values()) == {"ok"}
    assert_gone(server)


def test_a_restart_that_fails_is_tried_again(tmp_path: Path, pages: Path) -> None:
    server = Server(tmp_path, fault("die,at=17"), "--die-at-start 'CUDA out of memory'", "")
    ended = run_here(pages, tmp_path / "out", "--concurrency", "4", *server.words)
    assert ended.code == 0, ended
    assert ended.line["restarts"] == 2
    assert "the GPU's memory is full" in ended.stderr
    assert_all_read(output_table(tmp_path / "out"), range(1, 41))


def test_a_server_that_comes_back_unreadable_is_not_trusted(tmp_path: Path, pages: Path) -> None:
    server = Server(tmp_path, f"{fault(READABLE)} {fault('die,at=17')}", fault("loop"))
    words = ["--concurrency", "4", "--block-rows", "4", "--max-restarts", "1", *server.words]
    ended = run_here(pages, tmp_path / "out", *words, canary=True)
    assert ended.code == 1
    assert "can't be trusted" in ended.line["message"]
    assert set(statuses(tmp_path / "out").values()) == {"ok"}


def test_a_foreign_server_that_freezes_is_named_and_waited_for(tmp_path: Path, pages: Path) -> None:
    with StubVllm("--read-tag", "--fault", "stall,at=17,seconds=3") as stub:
        words = ["--server", stub.url, "--concurrency", "4", "--stall-timeout", "1"]
        ended = run_here(pages, tmp_path / "out", *words)
        assert stub.stats()["requests"] == 40
    assert ended.code == 0, ended
    assert ended.advice.count("it is not ours to restart, so we wait") == 1
    assert ended.line["restarts"] == 0


# --- tidiness --------------------------------------------------------------------------------------------------------


def server_with_a_child(folder: Path, *options: str) -> tuple[str, Path]:
    """A server that ignores SIGTERM, and a child of it that does too; the file gets their numbers."""
    stub = shlex.join([sys.executable, str(STUB), "--ignore-sigterm", *options])
    (folder / "serve.sh").write_text(
        f"trap '' TERM\nsleep 600 & echo $! > {folder}/child.new\necho $$ >> {folder}/child.new\n"
        f'mv {folder}/child.new {folder}/children\nexec {stub} "$@"\n'
    )
    return f"sh {folder}/serve.sh", folder / "children"


def group_of(pid: int) -> int:
    return os.getpgid(pid)


def test_a_run_that_is_killed_leaves_no_server_behind(tmp_path: Path, pages: Path) -> None:
    command, children = server_with_a_child(tmp_path, "--fault", "hang,after=3")
    with Running(pages, tmp_path / "out", "--serve-command", command, "--block-rows", "1") as run:
        wait_until(lambda: list((tmp_path / "out" / "data").glob("*.parquet")), "a block is closed")
        pids = [int(line) for line in children.read_text().split()]
        assert all(is_running(pid) for pid in pids)
        assert os.getpgid(pids[0]) == os.getpgid(pids[1]) != os.getpgid(0)
        run.signal(signal.SIGKILL)
        run.wait()
    wait_until(lambda: not any(is_running(pid) for pid in pids), "the server and its child are gone")


@pytest.mark.slow
def test_a_run_that_is_killed_while_its_server_starts_leaves_none_behind(tmp_path: Path, pages: Path) -> None:
    command, children = server_with_a_child(tmp_path, "--slow-start", "600")
    with Running(pages, tmp_path / "out", "--serve-command", command) as run:
        wait_until(children.exists, "the server is starting")
        run.signal(signal.SIGKILL)
        run.wait()
    pids = [int(line) for line in children.read_text().split()]
    wait_until(lambda: not any(is_running(pid) for pid in pids), "the server and its child are gone")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_stopped_while_it_restarts_its_server_ends(
    tmp_path: Path, pages: Path, number: signal.Signals
) -> None:
    server = Server(tmp_path, fault("die,at=17"), "--slow-start 600")
    with Running(pages, tmp_path / "out", "--concurrency", "4", *server.words) as run:
        wait_until(lambda: len(server.pids) == 2, "the second server is starting")
        run.signal(number)
        ended = run.wait()
    assert ended.code == 128 + number, ended
    assert_gone(server)


def test_a_server_that_is_kept_runs_on_and_can_be_used_as_told(
    tmp_path: Path, pages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(tmp_path, "")
    ended = run_here(pages, tmp_path / "out", "--keep-server", *server.words)
    assert ended.code == 0, ended
    told = re.search(r'VLLM_API_KEY="\$\(cat (\S+)\)" … --server (\S+)', ended.stderr)
    group = re.search(r"end it with: kill -- -(\d+)", ended.stderr)
    assert told
    assert group
    try:
        key_file = Path(told[1])
        assert key_file.stat().st_mode & 0o077 == 0
        assert is_running(server.pids[0])
        monkeypatch.setenv("VLLM_API_KEY", key_file.read_text())
        again = run_here(pages, tmp_path / "again", "--server", told[2])
        assert again.code == 0, again
        assert len(server.pids) == 1
        assert key_file.read_text() not in ended.stderr + ended.stdout
    finally:
        subprocess.run(["kill", "--", f"-{group[1]}"], check=True)
    assert_gone(server)


def test_a_server_is_not_kept_by_a_run_that_fails(tmp_path: Path, pages: Path) -> None:
    server = Server(tmp_path, fault("status=401,after=9"))
    ended = run_here(pages, tmp_path / "out", "--keep-server", *server.words)
    assert ended.code == 1
    assert_gone(server)


def test_the_log_is_kept_and_named_and_each_start_has_its_own(tmp_path: Path, pages: Path) -> None:
    server = Server(tmp_path, fault("die,at=17"), "")
    ended: Ended = run_here(pages, tmp_path / "out", *server.words)
    assert ended.code == 0, ended
    first, second = (Path(name) for name in re.findall(r"its log: (\S+)", ended.stderr))
    assert (first.name, second.name) == ("server.log", "server-2.log")
    assert "scripted death" in first.read_text()
    assert "scripted death" not in second.read_text()


def test_the_server_finds_its_own_python_and_not_ours(
    tmp_path: Path, pages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = Path(sys.prefix) / "bin"
    if sys.prefix == sys.base_prefix:
        pytest.skip("not in a virtual environment")
    (tmp_path / "vllm").write_text(f'#!/bin/sh\nenv > {tmp_path}/environment\nexec {sys.executable} {STUB} "$@"\n')
    (tmp_path / "vllm").chmod(0o755)
    monkeypatch.setenv("PATH", f"{ours}:{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("VIRTUAL_ENV", sys.prefix)
    monkeypatch.setenv("UV_RUN_RECURSION_DEPTH", "1")
    assert run_here(pages, tmp_path / "out").code == 0
    environment = dict(
        line.split("=", 1) for line in (tmp_path / "environment").read_text().splitlines() if "=" in line
    )
    assert environment["PATH"] == f"{tmp_path}:/usr/bin:/bin"
    assert not {"VIRTUAL_ENV", "UV_RUN_RECURSION_DEPTH"} & set(environment)


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    file = Path("/dev/shm") / f"psm_test_{os.getpid()}"
    yield file
    file.unlink(missing_ok=True)


def test_what_a_killed_server_had_in_shared_memory_is_removed(tmp_path: Path, pages: Path, shared_memory: Path) -> None:
    holder = (
        "import mmap, os, time\n"
        f"file = os.open({str(shared_memory)!r}, os.O_RDWR | os.O_CREAT, 0o600)\n"
        "os.ftruncate(file, 4096); mapped = mmap.mmap(file, 4096); time.sleep(600)\n"
    )
    (tmp_path / "holder.py").write_text(holder)
    stub = shlex.join([sys.executable, str(STUB), "--slow-start", "1"])
    (tmp_path / "serve.sh").write_text(f'trap "" TERM\n{sys.executable} {tmp_path}/holder.py &\nexec {stub} "$@"\n')
    ended = run_here(pages, tmp_path / "out", "--serve-command", f"sh {tmp_path}/serve.sh")
    assert ended.code == 0, ended
    assert not shared_memory.exists()
