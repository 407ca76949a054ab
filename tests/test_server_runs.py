"""Whole runs of lighton-ocr-server.py against the stub: what the server counted, and what is on disk afterwards."""

from __future__ import annotations

import errno
import os
import random
import shlex
import shutil
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from src.blocks import BlockFolder, Target
from src.interrupt import ECHO_S, Interrupts
from src.models import find_profile
from src.question import page_seed
from tests.runs import (
    NEW_COLUMNS,
    ROOT,
    STUB,
    Ended,
    Running,
    assert_all_read,
    assert_input_is_kept,
    block_files,
    built_script,
    is_running,
    load,
    output_table,
    pages_dataset,
    picture,
    row_of,
    run_here,
    statuses,
    tag_of,
    wait_until,
    write_pages,
)
from tests.stub_vllm import DEFAULT_MODEL, StubVllm, read_journal, tagged_png

if TYPE_CHECKING:
    from collections.abc import Iterator

OPEN_BLOCKS = 5  # at most, with 16 in flight and 8 rows a block: three, and the two that 16 pages span


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stub") / "journal"


@pytest.fixture(scope="module")
def shared_stub(journal: Path) -> Iterator[StubVllm]:
    with StubVllm("--read-tag", "--journal", str(journal)) as stub:
        yield stub


@pytest.fixture
def stub(shared_stub: StubVllm, journal: Path) -> StubVllm:
    """One server for many tests: counted anew and without faults for each."""
    shared_stub.configure(faults=[], seconds_per_page=0, ceiling=0, max_num_seqs=256)
    wait_until(lambda: shared_stub.stats()["in_flight"] == 0, "requests of the test before are gone")
    shared_stub.reset()
    journal.unlink(missing_ok=True)
    return shared_stub


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the pauses between attempts short."""
    monkeypatch.setattr(built_script(), "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(built_script(), "LONGEST_PAUSE_S", 0.1)


def stub_command(*options: str) -> str:
    """The stub, for `--serve-command`."""
    return shlex.join([sys.executable, str(STUB), *options])


# --- killed and stopped ----------------------------------------------------------------------------------------------


def test_a_run_killed_at_random_moments_loses_and_doubles_nothing_and_asks_again_only_for_open_blocks(
    tmp_path: Path, stub: StubVllm
) -> None:
    pages, out, rows = write_pages(tmp_path / "pages.parquet", 120), tmp_path / "out", 120
    words = [str(pages), str(out), "--server", stub.url, "--block-rows", "8", "--concurrency", "16"]
    stub.configure(ceiling=60, seconds_per_page=0.05)
    dice = random.Random(20)
    asked_before: set[str] = set()
    for moment in (dice.randint(1, 15), dice.randint(20, 40), dice.randint(10, 35)):
        closed = {int(file.stem[-6:]) for file in block_files(out)}
        stub.reset()
        stub.configure(faults=[f"hang,after={moment + 20}"])  # so that it can't end before it is killed
        with Running(*words) as run:
            wait_until_read(stub, moment)
            run.signal(signal.SIGKILL)
            assert run.wait().code == -signal.SIGKILL
        asked_before = check_what_was_asked(stub, closed, asked_before)
    closed = {int(file.stem[-6:]) for file in block_files(out)}
    assert 0 < len(closed) < 15
    stub.reset()
    stub.configure(faults=[], ceiling=0, seconds_per_page=0)
    ended = run_here(*words)
    assert ended.code == 0, ended
    asked = check_what_was_asked(stub, closed, asked_before)
    assert len(asked) == rows
    assert ended.line["rows_before"] == len(closed) * 8
    assert stub.stats()["requests"] == ended.line["rows_done"] == rows - len(closed) * 8
    assert_input_is_kept(pq.read_table(pages).combine_chunks(), output_table(out))
    assert_all_read(output_table(out), range(1, rows + 1))
    assert [file.name for file in block_files(out)] == [f"train-{number:06d}.parquet" for number in range(15)]
    assert not list((out / "data").glob("*.tmp")) + list((out / "data").glob(".*.tmp"))


def wait_until_read(stub: StubVllm, pages: int) -> None:
    wait_until(lambda: stub.stats()["completions"] >= pages, f"{pages} pages are read")


def check_what_was_asked(stub: StubVllm, closed: set[int], asked_before: set[str]) -> set[str]:
    """Nothing of a closed block was asked, nothing twice, and what was asked before lay in the blocks then open."""
    wait_until(lambda: stub.stats()["in_flight"] == 0, "the killed client's requests are gone")
    tags: dict[str, int] = stub.stats()["tags"]
    blocks = {tag: (int(tag, 16) - 1) // 8 for tag in tags}
    assert set(tags.values()) <= {1}
    assert not closed & set(blocks.values())
    again = {blocks[tag] for tag in tags if tag in asked_before}
    assert len(again) <= OPEN_BLOCKS
    return asked_before | set(tags)


def test_sigterm_keeps_the_closed_blocks_ends_the_spawned_server_and_the_same_command_finishes(tmp_path: Path) -> None:
    pages, out, journal = write_pages(tmp_path / "pages.parquet", 60), tmp_path / "out", tmp_path / "journal"
    serve = tmp_path / "serve.sh"
    script = f'exec {stub_command("--read-tag", "--journal", str(journal))} $(cat {tmp_path}/faults) "$@"\n'
    serve.write_text(script)
    (tmp_path / "faults").write_text("--fault hang,after=30")  # so that it can't end before it is stopped
    words = [str(pages), str(out), "--block-rows", "8", "--concurrency", "8", "--serve-command", f"sh {serve}"]
    with Running(*words) as run:
        wait_until(lambda: block_files(out) and len(read_journal(journal)) >= 12, "a block is closed")
        second = run_here(*words)
        run.signal(signal.SIGTERM)
        ended = run.wait()
    assert second.code == 2
    assert "another run is writing" in second.advice
    assert ended.code == 143
    assert "SIGTERM" in ended.line["message"]
    assert "the same command goes on" in ended.advice
    (server,) = {entry["pid"] for entry in read_journal(journal)}
    assert not is_running(server)
    closed = len(block_files(out))
    assert 0 < closed < 8
    loaded = load(out)
    assert loaded["id"][:] == list(range(1, closed * 8 + 1))
    assert set(loaded["markdown_status"]) == {"ok"}
    journal.unlink()
    (tmp_path / "faults").write_text("")
    again = run_here(*words)
    assert again.code == 0, again
    assert len(read_journal(journal)) == 60 - closed * 8
    assert_all_read(output_table(out), range(1, 61))
    assert load(out)["id"][:] == list(range(1, 61)), "load_dataset gave the unfinished output that it had cached"
    assert not any(is_running(entry["pid"]) for entry in read_journal(journal))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_another_signal_stops_a_run_in_the_same_way(
    tmp_path: Path, stub: StubVllm, number: signal.Signals, code: int
) -> None:
    pages, out = write_pages(tmp_path / "pages.parquet", 60), tmp_path / "out"
    stub.configure(faults=["hang,after=20"])

    def stop_it() -> None:
        wait_until(lambda: block_files(out), "a block is closed")
        os.kill(os.getpid(), number)

    with ThreadPoolExecutor(1) as pool:
        stopping = pool.submit(stop_it)
        ended = run_here(pages, out, "--server", stub.url, "--block-rows", "4", "--concurrency", "4")
        stopping.result()
    assert ended.code == code
    assert number.name in ended.line["message"]
    wait_until(lambda: stub.stats()["in_flight"] == 0, "its requests are given up")
    assert load(out).num_rows == len(block_files(out)) * 4 == sum(ended.line["statuses"].values())
    assert stub.stats()["requests"] < 60


def test_a_second_ctrl_c_ends_the_run_and_its_server_at_once(tmp_path: Path) -> None:
    pages, out, journal = write_pages(tmp_path / "pages.parquet", 30), tmp_path / "out", tmp_path / "journal"
    serve = stub_command("--ignore-sigterm", "--journal", str(journal), "--ceiling", "20", "--fault", "hang,after=8")
    with Running(pages, out, "--block-rows", "4", "--concurrency", "4", "--serve-command", serve) as run:
        wait_until(lambda: block_files(out), "a block is closed")
        run.signal(signal.SIGINT)
        # The first one has cancelled what hung, and waits for a server that won't go.
        wait_until(lambda: any(entry["outcome"] == "cancelled" for entry in read_journal(journal)), "it is handled")
        time.sleep(2 * ECHO_S)  # as a person, and not as a program that passes the first one on
        run.signal(signal.SIGINT)
        ended = run.wait()
    assert ended.code == 130
    assert ended.stdout == ""
    (server,) = {entry["pid"] for entry in read_journal(journal)}
    wait_until(lambda: not is_running(server), "the server is gone")


def test_a_run_stopped_while_its_server_starts_takes_the_server_with_it(tmp_path: Path) -> None:
    serve = f"sh -c 'echo $$ > {tmp_path}/pid; exec sleep 99'"

    def stop_it() -> None:
        wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "the server starts")
        os.kill(os.getpid(), signal.SIGTERM)

    with ThreadPoolExecutor(1) as pool:
        stopping = pool.submit(stop_it)
        ended = run_here(write_pages(tmp_path / "pages.parquet", 2), tmp_path / "out", "--serve-command", serve)
        stopping.result()
    assert ended.code == 143
    assert "SIGTERM" in ended.line["message"]
    assert not is_running(int((tmp_path / "pid").read_text()))


def test_a_spawned_server_does_not_outlive_a_run_that_is_killed(tmp_path: Path) -> None:
    serve = f"sh -c 'echo $$ > {tmp_path}/pid; exec sleep 99'"
    with Running(write_pages(tmp_path / "pages.parquet", 2), tmp_path / "out", "--serve-command", serve) as run:
        wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "the server starts")
        server = int((tmp_path / "pid").read_text())
        assert is_running(server)
        run.signal(signal.SIGKILL)
        run.wait()
    wait_until(lambda: not is_running(server), "the server is gone")


def test_a_hangup_that_nohup_ignores_is_not_taken_over() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts().caught():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


# --- what a server can do --------------------------------------------------------------------------------------------


FAILING = ["status=500,every=7", "reset,every=6", "half_close,every=6", "garbage,every=6", "status=503,every=5,late=1"]


@pytest.mark.usefixtures("quick_retries")
@pytest.mark.parametrize("fault", FAILING)
def test_pages_that_a_server_fails_on_are_asked_again_and_retries_are_what_it_counted(
    tmp_path: Path, stub: StubVllm, fault: str
) -> None:
    pages, out = write_pages(tmp_path / "pages.parquet", 40), tmp_path / "out"
    stub.configure(faults=[fault])
    ended = run_here(pages, out, "--server", stub.url, "--concurrency", "8", "--block-rows", "10")
    assert ended.code == 0, ended
    assert_all_read(output_table(out), range(1, 41))
    counted = stub.stats()
    assert counted["faults"][fault] > 4
    assert ended.line["retries"] == counted["faults"][fault]
    assert ended.line["requests"] == counted["requests"] == 40 + counted["faults"][fault]
    assert counted["max_in_flight"] <= 8
    assert all(len(set(seeds)) == 1 for seeds in counted["seeds"].values())
    assert {seeds[0] for seeds in counted["seeds"].values()} == {page_seed(0, row) for row in range(40)}


@pytest.mark.usefixtures("quick_retries")
def test_a_page_refused_with_retry_after_is_not_asked_again_before_that(
    tmp_path: Path, stub: StubVllm, journal: Path
) -> None:
    pages, out = write_pages(tmp_path / "pages.parquet", 12), tmp_path / "out"
    stub.configure(faults=["status=429,retry_after=1,first=6"])
    assert run_here(pages, out, "--server", stub.url).code == 0
    refused = [entry for entry in read_journal(journal) if entry["outcome"] == "429"]
    answered = {entry["tag"]: entry["time"] for entry in read_journal(journal) if entry["outcome"] == "200"}
    assert len(refused) == 6
    assert all(answered[entry["tag"]] - entry["time"] >= 0.99 for entry in refused)
    assert set(stub.stats()["tags"].values()) == {1, 2}
    assert_all_read(output_table(out), range(1, 13))


@pytest.mark.usefixtures("quick_retries")
def test_requests_that_a_stalled_server_does_not_answer_in_time_are_made_again(tmp_path: Path, stub: StubVllm) -> None:
    pages, out = write_pages(tmp_path / "pages.parquet", 24), tmp_path / "out"
    stub.configure(faults=["stall,seconds=1.5,at=9"])
    ended = run_here(pages, out, "--server", stub.url, "--concurrency", "4", "--request-timeout", "0.5")
    assert ended.code == 0, ended
    assert_all_read(output_table(out), range(1, 25))
    wait_until(lambda: stub.stats()["in_flight"] == 0, "all requests are over")
    assert ended.line["retries"] == stub.stats()["cancelled"] >= 4


@pytest.mark.parametrize("code", [400, 413, 422])
def test_a_page_that_is_refused_for_good_is_an_error_row_asked_once_and_its_neighbours_are_read(
    tmp_path: Path, stub: StubVllm, code: int
) -> None:
    pages, out = write_pages(tmp_path / "pages.parquet", 20), tmp_path / "out"
    stub.configure(faults=[f"status={code},tag={tag_of(5)},message=this page is too much"])
    ended = run_here(pages, out, "--server", stub.url, "--block-rows", "10")
    assert ended.code == 0, ended
    assert ended.line["statuses"] == {"ok": 19, "blank": 0, "truncated": 0, "repetition": 0, "error": 1}
    row = row_of(out, 5)
    assert row["markdown"] is None
    assert f"HTTP {code}" in row["markdown_error"]
    assert "this page is too much" in row["markdown_error"]
    assert [number for number, status in statuses(out).items() if status != "ok"] == [5]
    assert set(stub.stats()["tags"].values()) == {1}


def test_more_failures_than_allowed_end_with_exit_code_1_and_all_rows_written(tmp_path: Path, stub: StubVllm) -> None:
    pages, out = write_pages(tmp_path / "pages.parquet", 20), tmp_path / "out"
    stub.configure(faults=[f"status=400,tag={tag_of(5)}", f"status=400,tag={tag_of(6)}"])
    ended = run_here(pages, out, "--server", stub.url)
    assert ended.code == 1
    assert "2 of 20 pages failed" in ended.line["message"]
    assert output_table(out).num_rows == 20
    again = run_here(pages, out, "--server", stub.url, "--max-failure-rate", "0.1")
    assert again.code == 0
    assert stub.stats()["requests"] == 20


@pytest.mark.usefixtures("quick_retries")
def test_a_server_that_answers_nothing_but_errors_stops_the_run_and_nothing_is_lost(
    tmp_path: Path, stub: StubVllm
) -> None:
    pages, out = write_pages(tmp_path / "pages.parquet", 40), tmp_path / "out"
    words = [
        str(pages),
        str(out),
        "--server",
        stub.url,
        "--block-rows",
        "5",
        "--concurrency",
        "5",
        "--retry-for",
        "0.6",
    ]
    stub.configure(faults=["status=500,after=22,message=the engine is gone"])
    ended = run_here(*words)
    assert ended.code == 1
    assert "no page was answered" in ended.line["message"]
    assert "the engine is gone" in ended.line["message"]
    assert "the same command goes on" in ended.line["message"]
    closed = len(block_files(out))
    assert set(statuses(out).values()) == {"ok"}
    stub.configure(faults=[])
    stub.reset()
    assert run_here(*words).code == 0
    assert stub.stats()["requests"] == 40 - closed * 5
    assert_all_read(output_table(out), range(1, 41))


@pytest.mark.usefixtures("quick_retries")
def test_a_page_that_always_fails_while_others_are_read_becomes_an_error_row(tmp_path: Path, stub: StubVllm) -> None:
    pages, out = write_pages(tmp_path / "pages.parquet", 60), tmp_path / "out"
    stub.configure(faults=[f"status=500,tag={tag_of(7)}"], ceiling=60)
    ended = run_here(pages, out, "--server", stub.url, "--concurrency", "8", "--retry-for", "0.4")
    assert ended.code == 0, ended
    assert [number for number, status in statuses(out).items() if status != "ok"] == [7]
    assert "HTTP 500" in row_of(out, 7)["markdown_error"]
    counted = stub.stats()
    assert counted["tags"].pop(tag_of(7)) == ended.line["retries"] + 1 >= 3
    assert set(counted["tags"].values()) == {1}


@pytest.mark.usefixtures("quick_retries")
def test_a_page_that_always_fails_and_is_the_last_one_left_does_not_keep_the_run_from_ending(
    tmp_path: Path, stub: StubVllm
) -> None:
    pages, out = write_pages(tmp_path / "pages.parquet", 3), tmp_path / "out"
    stub.configure(faults=[f"status=500,tag={tag_of(3)}"])
    words = ["--block-rows", "1", "--concurrency", "1", "--retry-for", "0.3", "--max-failure-rate", "1"]
    ended = run_here(pages, out, "--server", stub.url, *words)
    assert ended.code == 0, ended
    assert list(statuses(out).values()) == ["ok", "ok", "error"]
    assert stub.stats()["requests"] == ended.line["requests"] + 1, "one small page of ours has shown that it answers"


@pytest.mark.usefixtures("quick_retries")
def test_a_server_that_dies_stops_the_run_and_one_in_its_place_finishes_it(tmp_path: Path) -> None:
    pages, out = write_pages(tmp_path / "pages.parquet", 40), tmp_path / "out"
    with StubVllm("--fault", "die,at=24") as first:
        words = [str(pages), str(out), "--server", first.v1, "--block-rows", "5"]
        words += ["--concurrency", "5", "--retry-for", "0.5"]
        ended = run_here(*words)
        assert first.wait() == 1
    assert ended.code == 1
    assert "connection failed" in ended.line["message"]
    closed = len(block_files(out))
    assert 0 < closed < 8
    assert set(statuses(out).values()) == {"ok"}
    with StubVllm("--read-tag", port=int(first.url.rpartition(":")[2])) as second:
        assert run_here(*words).code == 0
        assert second.stats()["requests"] == 40 - closed * 5
    assert output_table(out)["id"].to_pylist() == list(range(1, 41))
    assert set(statuses(out).values()) == {"ok"}


def test_a_spawned_server_that_dies_is_noticed_and_the_end_of_its_log_shown(tmp_path: Path) -> None:
    pages, out = write_pages(tmp_path / "pages.parquet", 40), tmp_path / "out"
    serve = stub_command("--fault", "die,at=24,code=3")
    words = ["--block-rows", "5", "--concurrency", "5", "--serve-command", serve, "--max-restarts", "0"]
    ended = run_here(pages, out, *words)
    assert ended.code == 1
    assert "the server ended by itself (exit code 3)" in ended.line["message"]
    assert "| INFO: scripted death, exit code 3" in ended.advice
    assert 0 < len(block_files(out)) < 8
    assert set(statuses(out).values()) == {"ok"}


def test_a_key_that_the_server_refuses_stops_the_run_before_the_first_page_and_the_right_one_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages, out = write_pages(tmp_path / "pages.parquet", 4), tmp_path / "out"
    with StubVllm("--api-key", "sesame") as stub:
        ended = run_here(pages, out, "--server", stub.url)
        assert ended.code == 1
        assert "refuses our key (HTTP 401)" in ended.line["message"]
        assert "--api-key-env" in ended.line["message"]
        assert stub.stats()["requests"] == 0
        monkeypatch.setenv("MY_KEY", "sesame")
        right = run_here(pages, out, "--server", stub.url, "--api-key-env", "MY_KEY")
        assert right.code == 0, right
        assert stub.stats()["requests"] == 4
    assert "sesame" not in right.stderr + right.stdout + "".join(output_table(out)["inference_info"].to_pylist())


@pytest.mark.parametrize(("code", "advice"), [(401, "--api-key-env"), (404, "Check --server and --model")])
def test_what_every_page_would_meet_stops_a_run_in_its_midst(
    tmp_path: Path, stub: StubVllm, code: int, advice: str
) -> None:
    pages, out = write_pages(tmp_path / "pages.parquet", 40), tmp_path / "out"
    stub.configure(faults=[f"status={code},after=22"])
    ended = run_here(pages, out, "--server", stub.url, "--block-rows", "5", "--concurrency", "5")
    assert ended.code == 1
    assert f"HTTP {code}" in ended.line["message"]
    assert advice in ended.line["message"]
    assert set(statuses(out).values()) == {"ok"}
    assert ended.line["retries"] == 0
    assert stub.stats()["requests"] < 40


def test_a_server_with_another_model_is_refused_before_the_first_page_with_the_option_that_takes_it(
    tmp_path: Path,
) -> None:
    pages, out = write_pages(tmp_path / "pages.parquet", 4), tmp_path / "out"
    with StubVllm("--served-model-name", "some/other", "--root", "some/path") as stub:
        ended = run_here(pages, out, "--server", stub.url)
        assert ended.code == 1
        assert f"serves some/other, not {DEFAULT_MODEL}" in ended.line["message"]
        assert "--model some/other" in ended.line["message"]
        assert stub.stats()["requests"] == 0
        assert run_here(pages, out, "--server", stub.url, "--model", "some/other").code == 0
        assert run_here(pages, tmp_path / "out2", "--server", stub.url, "--model", "some/path").code == 0
        assert stub.stats()["models"] == {"some/other": 8}


def test_whatever_text_comes_back_has_its_status_and_survives_on_disk(tmp_path: Path, stub: StubVllm) -> None:
    pages, out = write_pages(tmp_path / "pages.parquet", 9), tmp_path / "out"
    kinds = ["truncate", "repetition", "empty", "null", "surrogate", "long", "loop"]
    stub.configure(faults=[f"{kind},tag={tag_of(number)}" for number, kind in enumerate(kinds, 1)])
    ended = run_here(pages, out, "--server", stub.url, "--max-failure-rate", "1", "--retries-quality", "0")
    assert ended.code == 0, ended
    named = ["truncated", "repetition", "error", "error", "ok", "repetition", "repetition", "ok", "ok"]
    assert list(statuses(out).values()) == named
    texts: list[Any] = load(out)["markdown"][:]
    assert texts[2] is texts[3] is None
    assert "returned no text" in row_of(out, 3)["markdown_error"]
    assert texts[4].endswith("lone � and �, and a NUL \0.")
    assert texts[5] == ("x" * 99 + "\n") * 2000
    assert row_of(out, 6)["markdown_tokens"] == 50001
    assert ended.line["tokens"] == stub.stats()["generation_tokens"]
    assert ended.line["prompt_tokens"] == stub.stats()["prompt_tokens"]
    assert set(stub.stats()["tags"].values()) == {1}


def test_no_more_pages_are_in_flight_than_asked_for_and_a_slow_page_holds_up_no_other(
    tmp_path: Path, stub: StubVllm
) -> None:
    pages, out = write_pages(tmp_path / "pages.parquet", 60), tmp_path / "out"
    stub.configure(faults=[f"slow,seconds=1,tag={tag_of(1)}"], seconds_per_page=0.02)
    ended = run_here(pages, out, "--server", stub.url, "--concurrency", "6", "--block-rows", "10")
    assert ended.code == 0, ended
    assert 4 <= stub.stats()["max_in_flight"] <= 6
    assert_all_read(output_table(out), range(1, 61))


def test_the_request_is_the_trained_prompt_with_the_sampling_asked_for(tmp_path: Path, stub: StubVllm) -> None:
    pages = write_pages(tmp_path / "pages.parquet", 1)
    assert run_here(pages, tmp_path / "out", "--server", stub.url).code == 0
    asked = stub.stats()["last_request"]
    (message,) = asked["messages"]
    assert [part["type"] for part in message["content"]] == ["image_url"]
    assert {key: asked[key] for key in ("temperature", "top_p", "max_tokens", "seed")} == {
        "temperature": 0.2,
        "top_p": 0.9,
        "max_tokens": 4096,
        "seed": page_seed(0, 0),
    }
    own = ["--temperature", "0.5", "--top-p", "1", "--max-tokens", "100", "--seed", "7"]
    assert run_here(pages, tmp_path / "own", "--server", stub.url, *own).code == 0
    asked = stub.stats()["last_request"]
    assert (asked["temperature"], asked["top_p"], asked["max_tokens"], asked["seed"]) == (0.5, 1, 100, page_seed(7, 0))


# --- getting a server ------------------------------------------------------------------------------------------------


def test_without_vllm_and_without_a_server_the_run_ends_at_once_with_the_command_that_works(tmp_path: Path) -> None:
    own = ["me/scans", "me/scans text", "--max-samples", "5", "--", "--max-model-len", "9000"]
    with Running(*own, env={"PATH": str(tmp_path)}, canary=True) as run:
        ended = run.wait(timeout_s=5)
    assert ended.code == 1
    command = (
        "hf jobs uv run --image vllm/vllm-openai:v0.22.1 --flavor l4x1 -s HF_TOKEN --timeout 4h SCRIPT_URL "
        "me/scans 'me/scans text' --max-samples 5 -- --max-model-len 9000"
    )
    assert f"\n    {command}\n" in ended.stderr
    assert "no `vllm` command" in ended.line["message"]


@pytest.mark.parametrize("script", ["lighton-ocr-server.py", "lighton-ocr3-saturate.py", "lighton-ocr.py"])
def test_a_finished_output_needs_no_engine_any_more(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stub: StubVllm
) -> None:
    pages, out = write_pages(tmp_path / "pages.parquet", 5), tmp_path / "out"
    words = (pages, out, "--model", DEFAULT_MODEL, "--block-rows", "2")
    assert run_here(*words, "--server", stub.url).code == 0
    (out / "README.md").unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    again = run_here(*words, "--show", "1", script=ROOT / script)
    assert again.code == 0, again.stderr
    assert again.line["statuses"]["ok"] == again.line["rows_before"] == 5
    assert "nothing is left to ask" in again.stderr
    assert "page-0001.png (ok)" in again.stderr
    assert (out / "README.md").exists()

    block_files(out)[1].unlink()
    unfinished, anew = run_here(*words, script=ROOT / script), run_here(*words, "--overwrite", script=ROOT / script)
    assert (unfinished.code, anew.code) == (1, 1)
    assert "hf jobs uv run" in unfinished.stderr
    assert len(block_files(out)) == 2, "what is there is not removed where nothing can replace it"


def test_words_for_vllm_serve_that_nobody_would_read_are_refused(
    tmp_path: Path, stub: StubVllm, free_port: int
) -> None:
    pages, own = write_pages(tmp_path / "pages.parquet", 2), ("--", "--max-num-seqs", "8")
    running = run_here(pages, tmp_path / "out", "--server", stub.url, *own)
    remote = run_here(pages, tmp_path / "out", "--server", "http://gpu-box.example:8000", *own)
    command = run_here(pages, tmp_path / "out", "--serve-command", stub_command(), *own)
    assert (running.code, remote.code, command.code) == (2, 2, 2)
    assert f"{stub.url} runs already" in running.line["message"]
    assert "leave --max-num-seqs 8 out, or start that server with it" in remote.line["message"]
    assert "put --max-num-seqs 8 into the --serve-command" in command.line["message"]
    assert not stub.stats()["requests"]
    assert not (tmp_path / "out").exists()


def test_the_command_for_a_hosted_gpu_names_the_image_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("UV", "/opt/my tools/uv")
    ended = run_here("me/scans", "me/text", "--model", "lightonai/LightOnOCR-3-1B")
    assert ended.code == 1
    assert "--image vllm/vllm-openai:v0.32.0 " in ended.stderr
    assert "--serve-command \"'/opt/my tools/uv' run rapidocr-server.py\"" in ended.stderr


def test_a_local_address_where_nothing_runs_needs_vllm_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_port: int
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    pages = write_pages(tmp_path / "pages.parquet", 2)
    ended = run_here(pages, tmp_path / "out", "--server", f"http://127.0.0.1:{free_port}")
    assert ended.code == 1
    assert (
        f"nothing answers at http://127.0.0.1:{free_port}, and there is no `vllm` command on" in ended.line["message"]
    )
    assert f"Wait until 127.0.0.1:{free_port}/health answers." in ended.line["message"]
    assert "hf jobs uv run --image vllm/vllm-openai:v0.22.1" in ended.stderr


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@pytest.fixture
def fake_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder where a `vllm` on PATH notes its words and its environment, and then is the stub."""
    noted = tmp_path / "fake"
    noted.mkdir()
    script = noted / "vllm"
    script.write_text(
        f'#!/bin/sh\nprintf "%s\\0" "$@" > {noted}/argv\nenv -0 > {noted}/environment\n'
        f'exec {shlex.quote(sys.executable)} {shlex.quote(str(STUB))} "$@"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{noted}:/usr/bin:/bin")
    return noted


def noted_words(file: Path) -> list[str]:
    return file.read_text().split("\0")[:-1]


def test_vllm_is_started_with_the_profile_the_users_words_and_a_key_that_no_other_process_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_vllm: Path
) -> None:
    monkeypatch.setenv("VIRTUAL_ENV", "/nowhere")
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    monkeypatch.delenv("VLLM_USE_FLASHINFER_SAMPLER", raising=False)
    pages, own = write_pages(tmp_path / "pages.parquet", 4), ["--max-num-seqs", "2", "--x", "a b"]
    ended = run_here(pages, tmp_path / "out", "--", *own)
    assert ended.code == 0, ended
    words = noted_words(fake_vllm / "argv")
    port = words[5]
    profile = find_profile(DEFAULT_MODEL).profile
    start = ["serve", DEFAULT_MODEL, "--host", "127.0.0.1", "--port", port]
    assert words[:-2] == [*start, *profile.serve_args, *own]
    assert words[-2] == "--allowed-local-media-path"
    environment = dict(line.split("=", 1) for line in noted_words(fake_vllm / "environment"))
    key = environment["VLLM_API_KEY"]
    assert len(key) >= 32
    assert key not in ended.stderr + ended.stdout + " ".join(words)
    assert environment["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    assert not {"VIRTUAL_ENV", "PYTHONPATH"} & set(environment)
    assert ended.line["engine"] == "vllm 0.32.0"
    assert_all_read_by_status(tmp_path / "out", 4)


def assert_all_read_by_status(out: Path, rows: int) -> None:
    assert list(statuses(out).values()) == ["ok"] * rows


def test_vllm_is_started_at_the_port_asked_for_and_the_users_own_setting_of_the_sampler_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_vllm: Path, free_port: int
) -> None:
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "1")
    pages = write_pages(tmp_path / "pages.parquet", 2)
    place = ["--server", f"http://127.0.0.1:{free_port}/v1", "--model-revision", "v2"]
    assert run_here(pages, tmp_path / "out", *place).code == 0
    words = noted_words(fake_vllm / "argv")
    assert words[2:6] == ["--host", "127.0.0.1", "--port", str(free_port)]
    assert words[-4:-2] == ["--revision", "v2"]
    assert "VLLM_USE_FLASHINFER_SAMPLER=1" in noted_words(fake_vllm / "environment")


def test_a_remote_server_is_waited_for_and_never_replaced_by_a_local_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_vllm: Path, free_port: int
) -> None:
    monkeypatch.setattr(built_script(), "is_local", lambda _url: False)
    pages = write_pages(tmp_path / "pages.parquet", 2)
    url = f"http://127.0.0.1:{free_port}"
    ended = run_here(pages, tmp_path / "out", "--server", url, "--startup-timeout", "0.2")
    assert ended.code == 1
    assert f"{url} is not ready" in ended.line["message"]
    assert "Connection refused" in ended.line["message"]
    assert not (fake_vllm / "argv").exists()


@pytest.mark.usefixtures("fake_vllm")
def test_a_port_that_is_taken_is_refused_with_both_ways_out(tmp_path: Path, stub: StubVllm) -> None:
    port = stub.url.rpartition(":")[2]
    ended = run_here(write_pages(tmp_path / "pages.parquet", 2), tmp_path / "out", "--port", port)
    assert ended.code == 2
    assert f"--server http://127.0.0.1:{port}" in ended.line["message"]
    assert "another --port" in ended.line["message"]
    assert stub.stats()["requests"] == 0


STARTS = {
    "is not there": ("/no/such/server --x", ["can't start '/no/such/server'", "check --serve-command"]),
    "is empty": ("", ["--serve-command is empty"]),
    "has a quote too many": ("server '", ["--serve-command"]),
    "ends at once": (
        stub_command("--die-at-start", "CUDA error: no device"),
        ["the server ended by itself (exit code 1)", "| CUDA error: no device"],
    ),
    "is never ready": (
        shlex.join([sys.executable, "-c", "import time; print('loading', flush=True); time.sleep(99)"]),
        ["is not ready", "without a sign of progress (--startup-timeout)", "| loading"],
    ),
    "serves something else": (
        stub_command("--served-model-name", "other", "--root", "there"),
        ["to use what it serves give --model oth"],
    ),
}


@pytest.mark.parametrize("how", STARTS)
def test_a_server_command_that_does_not_work_is_explained(tmp_path: Path, how: str) -> None:
    command, told = STARTS[how]
    pages = write_pages(tmp_path / "pages.parquet", 2)
    patience = "1.5" if how == "is never ready" else "60"
    ended = run_here(pages, tmp_path / "out", "--serve-command", command, "--startup-timeout", patience)
    assert ended.code in (1, 2)
    assert "Traceback" not in ended.stderr
    for words in told:
        assert words in ended.line["message"]


def test_a_server_that_takes_its_time_to_start_is_waited_for(tmp_path: Path) -> None:
    pages = write_pages(tmp_path / "pages.parquet", 4)
    serve = stub_command(
        "--slow-start", "0.5", "--health-before-ready", "1.5", "--model", "{model}", "--port", "{port}"
    )
    ended = run_here(pages, tmp_path / "out", "--serve-command", serve, "--model", "me/LightOnOCR-2-1B-mine")
    assert ended.code == 0, ended
    assert "me/LightOnOCR-2-1B-mine" in ended.stderr
    assert_all_read_by_status(tmp_path / "out", 4)


# --- usage -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def pages(tmp_path: Path) -> Path:
    return write_pages(tmp_path / "in" / "pages.parquet", 8)


USAGE = {
    "unknown option": (["--sever", "http://x"], "unrecognized arguments: --sever"),
    "abbreviation": (["--max-sam", "3"], "unrecognized arguments: --max-sam"),
    "no number": (["--block-rows", "many"], "'many' is no whole number"),
    "too small": (["--concurrency", "0"], "0 is too small: 1 is the least"),
    "negative": (["--max-samples", "-1"], "is too small"),
    "not a number": (["--temperature", "nan"], "nan is too small"),
    "too large": (["--top-p", "1.5"], "1.5 is too large: 1 is the most"),
    "port": (["--port", "70000"], "70000 is too large"),
    "private and public": (["--private", "--public"], "exclude each other"),
    "overwrite and resume": (["--overwrite", "--resume"], "exclude each other"),
    "work dir": (["--work-dir", "w"], "--work-dir is for Hub outputs"),
}


@pytest.mark.parametrize("what", USAGE)
def test_a_command_line_that_does_not_fit_is_exit_code_2_and_touches_nothing(
    tmp_path: Path, pages: Path, stub: StubVllm, what: str
) -> None:
    words, told = USAGE[what]
    ended = run_here(pages, tmp_path / "out", "--server", stub.url, *words)
    assert ended.code == 2
    assert told in ended.advice
    assert not (tmp_path / "out").exists()
    assert stub.stats()["paths"].get("/v1/models") is None


INPUTS = {
    "missing file": (["./no/such/scans"], ["'./no/such/scans': no such file or folder", "not a Hub dataset id"]),
    "unreachable Hub dataset": (["me/scans"], ["'me/scans' can't be read as a dataset"]),  # asked for half a minute
    "text file": (["{tmp}/notes.txt"], ["is a file but not parquet"]),
    "broken parquet": (["{tmp}/broken.parquet"], ["can't be read as a dataset", "broken.parquet"]),
    "folder of texts": (["{tmp}/texts"], ["no column of pictures, only text (string)"]),
    "empty folder": (["{tmp}/empty"], ["can't be read as a dataset"]),
    "split": (["{tmp}/in", "--split", "test"], ["no split 'test'", "takes one of: train"]),
    "config": (["{tmp}/in", "--config", "letters"], ["letters", "default"]),
    "column": (["{tmp}/in", "--image-column", "page"], ["no column 'page'", "--image-column takes one of: image"]),
    "column of numbers": (["{tmp}/in", "--image-column", "id"], ["'id' holds no pictures"]),
}


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=pytest.mark.slow if "unreachable" in what else ()) for what in INPUTS]
)
def test_an_input_that_does_not_fit_is_refused_with_what_there_is(
    tmp_path: Path, pages: Path, stub: StubVllm, what: str
) -> None:
    (tmp_path / "notes.txt").write_text("no pages")
    (tmp_path / "broken.parquet").write_bytes(pages.read_bytes()[:-20])
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("no page")
    (tmp_path / "empty").mkdir()
    (name, *words), told = INPUTS[what]
    ended = run_here(name.format(tmp=tmp_path), tmp_path / "out", "--server", stub.url, *words)
    assert ended.code == 2, ended
    for part in told:
        assert part in ended.line["message"]
    assert not (tmp_path / "out").exists()
    assert stub.stats()["requests"] == 0


OUTPUTS = {
    "the input": ("{tmp}/in", "overlap"),
    "in the input": ("{tmp}/in/out", "overlap"),
    "around the input": ("{tmp}", "overlap"),
    "a file": ("{tmp}/notes.txt", "is a file"),
    "below a file": ("{tmp}/notes.txt/out", "can't be written"),
    "where nobody may write": ("/proc/out", "can't be written"),
}


@pytest.mark.parametrize("what", OUTPUTS)
def test_an_output_that_cannot_be_is_refused_before_any_page(
    tmp_path: Path, pages: Path, stub: StubVllm, what: str
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    name, told = OUTPUTS[what]
    ended = run_here(pages.parent, name.format(tmp=tmp_path), "--server", stub.url)
    assert ended.code == 2, ended
    assert told in ended.advice
    assert sorted(tmp_path.rglob("*")) == before
    assert stub.stats()["requests"] == 0


def test_a_read_only_output_is_refused(tmp_path: Path, pages: Path, stub: StubVllm) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    (tmp_path / "out").mkdir(mode=0o555)
    ended = run_here(pages, tmp_path / "out", "--server", stub.url)
    assert ended.code == 2
    assert "can't be written" in ended.line["message"]


def test_a_column_that_is_there_already_is_not_written_over(tmp_path: Path, pages: Path, stub: StubVllm) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert run_here(pages, first, "--server", stub.url).code == 0
    ended = run_here(first, second, "--server", stub.url)
    assert ended.code == 2
    assert "already has the column 'markdown'" in ended.line["message"]
    assert run_here(first, second, "--server", stub.url, "--output-column", "again", "--seed", "3").code == 0
    loaded = load(second)
    assert loaded["markdown"][:] == loaded["again"][:]
    assert loaded.column_names[-9:] == [
        *NEW_COLUMNS[:4],
        "again",
        "again_status",
        "again_error",
        "again_tokens",
        "inference_info",
    ]
    assert loaded[0]["inference_info"].count('"script"') == 2


def test_a_run_with_other_settings_into_the_same_output_is_refused_with_what_differs(
    tmp_path: Path, pages: Path, stub: StubVllm
) -> None:
    out = tmp_path / "out"
    assert run_here(pages, out, "--server", stub.url, "--block-rows", "4").code == 0
    stub.reset()
    other = ["--server", stub.url, "--block-rows", "2", "--temperature", "0.7"]
    ended = run_here(pages, out, *other)
    assert ended.code == 2
    assert "block_rows: was 4, now 2" in ended.line["message"]
    assert "temperature: was 0.2, now 0.7" in ended.line["message"]
    assert "--overwrite" in ended.line["message"]
    assert stub.stats()["requests"] == 0
    write_pages(pages, 9)
    changed = run_here(pages, out, "--server", stub.url, "--block-rows", "4")
    assert changed.code == 2
    assert "rows: was 8, now 9" in changed.line["message"]
    assert "input: was" in changed.line["message"]


def test_overwrite_starts_anew_and_leaves_other_splits_and_files_alone(
    tmp_path: Path, pages: Path, stub: StubVllm
) -> None:
    out = tmp_path / "out"
    assert run_here(pages, out, "--server", stub.url, "--block-rows", "2").code == 0
    other_split = out / "data" / "test-000000.parquet"
    shutil.copy(out / "data" / "train-000000.parquet", other_split)
    (out / "notes.txt").write_text("mine")
    card = out / "README.md"
    card.write_text(card.read_text() + "\nWhat I wrote below.\n")
    ended = run_here(pages, out, "--server", stub.url, "--block-rows", "5", "--overwrite")
    assert ended.code == 0, ended
    assert [file.name for file in block_files(out)] == ["train-000000.parquet", "train-000001.parquet"]
    assert other_split.exists()
    assert (out / "notes.txt").read_text() == "mine"
    assert "What I wrote below." in card.read_text()
    assert stub.stats()["requests"] == 16
    assert_all_read(output_table(out), range(1, 9))


def test_a_second_run_into_the_same_output_is_refused_while_the_first_one_writes(
    tmp_path: Path, pages: Path, stub: StubVllm
) -> None:
    out = tmp_path / "out"
    with BlockFolder(out, Target("train")).locked():
        ended = run_here(pages, out, "--server", stub.url, "--overwrite")
    assert ended.code == 2
    assert "another run is writing split 'train'" in ended.line["message"]
    assert stub.stats()["requests"] == 0
    assert run_here(pages, out, "--server", stub.url).code == 0


def test_a_finished_run_asks_nothing_again_and_needs_no_server(
    tmp_path: Path, pages: Path, stub: StubVllm, monkeypatch: pytest.MonkeyPatch, free_port: int
) -> None:
    out = tmp_path / "out"
    assert run_here(pages, out, "--server", stub.url).code == 0
    files = {file: file.read_bytes() for file in block_files(out)}
    monkeypatch.setenv("PATH", str(tmp_path))
    ended = run_here(pages, out, "--server", f"http://127.0.0.1:{free_port}", "--show", "1")
    assert ended.code == 0, ended
    assert ended.line["statuses"]["ok"] == 8
    assert "── page-0001.png (ok) ──\npage " in ended.stderr
    assert stub.stats()["requests"] == 8
    assert files == {file: file.read_bytes() for file in block_files(out)}


def test_a_row_group_that_cannot_be_read_stops_the_run_and_keeps_what_was_closed(
    tmp_path: Path, stub: StubVllm
) -> None:
    pages, out = write_pages(tmp_path / "pages.parquet", 40, row_group_size=20), tmp_path / "out"
    content = bytearray(pages.read_bytes())
    start = pq.ParquetFile(pages).metadata.row_group(1).column(1).data_page_offset
    content[start : start + 64] = b"\xff" * 64
    pages.write_bytes(content)
    ended = run_here(pages, out, "--server", stub.url, "--block-rows", "5", "--concurrency", "5")
    assert ended.code == 1, ended
    assert "row group 1" in ended.line["message"]
    assert ended.line["statuses"]["ok"] == output_table(out).num_rows > 0
    assert "Traceback" not in ended.stderr


def test_a_full_disk_stops_the_run_and_keeps_what_was_closed(
    tmp_path: Path, stub: StubVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages, out = write_pages(tmp_path / "pages.parquet", 20), tmp_path / "out"
    write = built_script().BlockFolder.write

    def fill_up(folder: BlockFolder, number: int, table: pa.Table) -> None:
        if number == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(folder, number, table)

    words = [str(pages), str(out), "--server", stub.url, "--block-rows", "5"]
    with monkeypatch.context() as patch:
        patch.setattr(built_script().BlockFolder, "write", fill_up)
        ended = run_here(*words)
    assert ended.code == 1, ended
    assert "No space left on device" in ended.line["message"]
    assert "run again" in ended.line["message"]
    assert not (out / "data" / "train-000002.parquet").exists()
    assert run_here(*words).code == 0
    assert_all_read(output_table(out), range(1, 21))


def test_some_rows_in_an_order_drawn_by_the_seed_are_the_same_rows_every_time(tmp_path: Path, stub: StubVllm) -> None:
    pages = write_pages(tmp_path / "pages.parquet", 40)
    orders = {}
    for name, seed in (("a", "5"), ("b", "5"), ("c", "6")):
        words = ["--max-samples", "12", "--shuffle", "--seed", seed, "--block-rows", "5"]
        ended = run_here(pages, tmp_path / name, "--server", stub.url, *words)
        assert ended.line["rows"] == ended.line["rows_done"] == 12
        orders[name] = output_table(tmp_path / name)["id"].to_pylist()
        assert_all_read(output_table(tmp_path / name), orders[name])
    assert orders["a"] == orders["b"] != orders["c"]
    assert orders["a"] != sorted(orders["a"])
    assert len(set(orders["a"])) == 12
    assert stub.stats()["requests"] == 36


def test_the_first_rows_are_taken_where_no_order_is_drawn(tmp_path: Path, stub: StubVllm) -> None:
    pages = write_pages(tmp_path / "pages.parquet", 40)
    assert run_here(pages, tmp_path / "out", "--server", stub.url, "--max-samples", "7").code == 0
    assert_all_read(output_table(tmp_path / "out"), range(1, 8))
    assert stub.stats()["requests"] == 7


# --- inputs ----------------------------------------------------------------------------------------------------------


def write_images(folder: Path) -> None:
    folder.mkdir(parents=True)
    for number in (1, 2, 3):
        (folder / f"{number}.png").write_bytes(tagged_png(number))
    page = Image.new("L", (60, 40), "white")
    page.paste("black", (5, 5, 30, 12))
    page.save(folder / "4.jpg")


def test_a_folder_of_images_is_read_in_order_and_a_broken_one_is_an_error_row(tmp_path: Path, stub: StubVllm) -> None:
    write_images(tmp_path / "in")
    (tmp_path / "in" / "2.png").write_bytes(tagged_png(2)[:-30])
    ended = run_here(tmp_path / "in", tmp_path / "out", "--server", stub.url, "--max-failure-rate", "0.3")
    assert ended.code == 0, ended
    loaded = load(tmp_path / "out").cast_column("image", datasets.Image(decode=False))
    names = ["1.png", "2.png", "3.png", "4.jpg"]
    assert [cell["path"] for cell in loaded["image"]] == names
    assert [cell["bytes"] for cell in loaded["image"]] == [(tmp_path / "in" / name).read_bytes() for name in names]
    assert loaded["markdown_status"][:] == ["ok", "error", "ok", "ok"]
    assert "can't be decoded" in loaded["markdown_error"][1]
    counted = stub.stats()
    assert counted["requests"] == 3
    assert counted["formats"] == {"PNG": 2, "JPEG": 1}
    assert str(tmp_path) not in str(loaded.to_dict()) + (tmp_path / "out" / "README.md").read_text().split("```")[0]


def test_subfolders_named_after_classes_stay_class_labels(tmp_path: Path, stub: StubVllm) -> None:
    for number, kind in enumerate(("letter", "map", "map"), 1):
        (tmp_path / "in" / kind).mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / kind / f"{number}.png").write_bytes(tagged_png(number))
    assert run_here(tmp_path / "in", tmp_path / "out", "--server", stub.url).code == 0
    loaded, given = load(tmp_path / "out"), datasets.load_dataset(str(tmp_path / "in"), split="train")
    assert loaded.features["label"] == given.features["label"] == datasets.ClassLabel(names=["letter", "map"])
    assert loaded["label"][:] == given["label"][:] == [0, 1, 1]
    assert [f"tag {tag_of(number)}" in text for number, text in enumerate(loaded["markdown"], 1)] == [True] * 3


def rich_dataset() -> datasets.Dataset:
    """Five rows with every kind of column that may lie beside a page."""
    rows = range(1, 6)
    features = datasets.Features(
        {
            "id": datasets.Value("int32"),
            "image": datasets.Image(),
            "kind": datasets.ClassLabel(names=["letter", "map"]),
            "words": datasets.List(datasets.Value("string")),
            "source": {"archive": datasets.Value("string"), "box": {"number": datasets.Value("int16")}},
            "lines": datasets.List(
                {"text": datasets.Value("string"), "bbox": datasets.List(datasets.Value("float32"))}
            ),
            "when": datasets.Value("timestamp[ms]"),
            "note": datasets.Value("large_string"),
            "raw": datasets.Value("binary"),
            "vector": datasets.Array2D((2, 2), "float32"),
            "thumbs": datasets.List(datasets.Image()),
        }
    )
    columns = {
        "id": list(rows),
        "image": [picture(number) for number in rows],
        "kind": [number % 2 for number in rows],
        "words": [None if number == 2 else ["a", "é\0"] * number for number in rows],
        "source": [{"archive": "A", "box": {"number": number}} for number in rows],
        "lines": [[{"text": "t", "bbox": [0.5, 1.0]}] * (number - 1) for number in rows],
        "when": [number * 1000 for number in rows],
        "note": ["n" * number for number in rows],
        "raw": [bytes([number, 0, 255]) for number in rows],
        "vector": [[[1.0, 2.0], [3.0, float(number)]] for number in rows],
        "thumbs": [[picture(number + 100)] for number in rows],
    }
    return datasets.Dataset.from_dict(columns, features=features)


@pytest.mark.parametrize("how", ["parquet file", "parquet folder", "saved", "saved splits"])
def test_every_kind_of_column_comes_out_as_it_went_in(tmp_path: Path, stub: StubVllm, how: str) -> None:
    given, source, words = rich_dataset(), tmp_path / "in", ["--block-rows", "2"]
    match how:
        case "parquet file":
            source = tmp_path / "pages.parquet"
            given.to_parquet(source)
        case "parquet folder":
            source.mkdir()
            given.select(range(3)).to_parquet(source / "train-00000-of-00002.parquet")
            given.select(range(3, 5)).to_parquet(source / "train-00001-of-00002.parquet")
        case "saved":
            given.save_to_disk(source)
        case _:
            both = datasets.DatasetDict({"train": given.select([0]), "validation": given})
            both.save_to_disk(source)
            words += ["--split", "validation"]
    split = "validation" if how == "saved splits" else "train"
    ended = run_here(source, tmp_path / "out", "--server", stub.url, *words)
    assert ended.code == 0, ended
    assert ended.line["split"] == split
    loaded = load(tmp_path / "out", split)
    assert loaded.column_names == [*given.column_names, *NEW_COLUMNS]
    assert {name: loaded.features[name] for name in given.column_names} == dict(given.features)
    table = given.with_format("arrow")[:]
    out = loaded.select_columns(given.column_names).with_format("arrow")[:]
    assert out.cast(table.schema).equals(table)
    assert stub.stats()["requests"] == 5
    assert_all_read(output_table(tmp_path / "out", split), range(1, 6))


def test_a_folder_of_configurations_and_splits_gives_the_one_that_is_asked_for(tmp_path: Path, stub: StubVllm) -> None:
    source = tmp_path / "in"
    for config, split, first in (("letters", "train", 10), ("letters", "test", 20), ("maps", "train", 30)):
        (source / config).mkdir(parents=True, exist_ok=True)
        pages_dataset(range(first, first + 3)).to_parquet(source / config / f"{split}.parquet")
    (source / "README.md").write_text(
        "---\nconfigs:\n- config_name: letters\n  data_files:\n  - split: train\n    path: letters/train.parquet\n"
        "  - split: test\n    path: letters/test.parquet\n- config_name: maps\n  data_files:\n  - split: train\n"
        "    path: maps/train.parquet\n---\nMine.\n"
    )
    words = ["--server", stub.url, "--config", "letters"]
    assert run_here(source, tmp_path / "out", *words, "--split", "test").code == 0
    assert run_here(source, tmp_path / "out", *words).code == 0
    assert_all_read(output_table(tmp_path / "out", "test"), range(20, 23))
    assert load(tmp_path / "out")["id"][:] == [10, 11, 12]
    assert load(tmp_path / "out", "test")["id"][:] == [20, 21, 22]
    unnamed = run_here(source, tmp_path / "other", "--server", stub.url)
    assert unnamed.code == 2
    assert "letters" in unnamed.line["message"]
    assert "maps" in unnamed.line["message"]
    wrong = run_here(source, tmp_path / "other", *words, "--split", "dev")
    assert wrong.code == 2
    assert "train, test" in wrong.line["message"]


def test_a_path_in_a_cell_is_opened_only_inside_the_dataset(tmp_path: Path, stub: StubVllm) -> None:
    secret = tmp_path / "secret.png"
    secret.write_bytes(tagged_png(0xABCDEF))
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "inside.png").write_bytes(tagged_png(77))
    (tmp_path / "in" / "link.png").symlink_to(secret)
    paths = ["/etc/passwd", str(secret), "../secret.png", "link.png", "inside.png"]
    cells = {number: {"bytes": None, "path": path} for number, path in enumerate(paths, 2)}
    write_pages(tmp_path / "in" / "pages.parquet", 7, cells)
    words = ["--server", stub.url, "--max-failure-rate", "1"]
    ended = run_here(tmp_path / "in" / "pages.parquet", tmp_path / "out", *words)
    assert ended.code == 0, ended
    assert list(statuses(tmp_path / "out").values()) == ["ok", "error", "error", "error", "error", "ok", "ok"]
    counted = stub.stats()
    assert sorted(counted["tags"]) == [tag_of(1), tag_of(7), tag_of(77)]
    written = b"".join(file.read_bytes() for file in block_files(tmp_path / "out"))
    assert secret.read_bytes() not in written
    assert b"root:" not in written
    assert output_table(tmp_path / "out")["image"].to_pylist()[1] == cells[2]


def test_cells_without_a_page_are_rows_with_a_reason_or_blank(tmp_path: Path, stub: StubVllm) -> None:
    empty = Image.new("RGB", (60, 60), "white")
    empty.save(tmp_path / "blank.png")
    blank = {"bytes": (tmp_path / "blank.png").read_bytes(), "path": "blank.png"}
    cells = {2: None, 3: {"bytes": b"", "path": "e.png"}, 4: blank}
    pages = write_pages(tmp_path / "pages.parquet", 5, cells)
    ended = run_here(pages, tmp_path / "out", "--server", stub.url, "--max-failure-rate", "0.5")
    assert ended.code == 0, ended
    assert list(statuses(tmp_path / "out").values()) == ["ok", "error", "error", "blank", "ok"]
    assert row_of(tmp_path / "out", 2)["markdown_error"] == "no picture in this row"
    assert row_of(tmp_path / "out", 4)["markdown"] == ""
    assert stub.stats()["requests"] == 2
    assert_input_is_kept(pq.read_table(pages).combine_chunks(), output_table(tmp_path / "out"))


def test_a_plain_column_of_bytes_is_a_column_of_pages_too(tmp_path: Path, stub: StubVllm) -> None:
    table = pa.table({"id": [1, 2, 3], "scan": [tagged_png(1), tagged_png(2), b"no picture"]})
    pq.write_table(table, tmp_path / "pages.parquet")
    words = ["--server", stub.url, "--image-column", "scan", "--max-failure-rate", "0.5"]
    ended = run_here(tmp_path / "pages.parquet", tmp_path / "out", *words)
    assert ended.code == 0, ended
    assert list(statuses(tmp_path / "out").values()) == ["ok", "ok", "error"]
    assert_input_is_kept(table.combine_chunks(), output_table(tmp_path / "out"))


# --- what it says ----------------------------------------------------------------------------------------------------


def test_a_run_says_one_json_line_on_stdout_and_everything_else_on_stderr(pages: Path, stub: StubVllm) -> None:
    out = pages.parent.parent / "out"
    with Running(pages, out, "--server", stub.url, "--show", "2", "--verbose") as run:
        ended: Ended = run.wait()
    said = ended.line
    assert ended.code == 0
    assert said["version"] == 1
    assert said["output"] == str(out)
    assert said["engine"] == "vllm 0.32.0"
    assert (said["rows"], said["rows_before"], said["rows_done"], said["requests"]) == (8, 0, 8, 8)
    assert said["statuses"] == {"ok": 8, "blank": 0, "truncated": 0, "repetition": 0, "error": 0}
    assert "8/8 pages, 0 failed" in ended.stderr
