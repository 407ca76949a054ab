"""The drivers against a real `vllm-router` before two servers, one of which dies: no row is lost."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import datasets
import pyarrow.parquet as pq
import pytest
import requests
from rapidfuzz.distance import Levenshtein

from src import ready, workers
from src.gauges import parse_gauges
from src.workers import metrics_text, workers_behind
from tests.runs import (
    SATURATE,
    Running,
    assert_all_read,
    block_files,
    output_table,
    run_here,
    tag_of,
    wait_until,
    write_pages,
)
from tests.servers import READABLE
from tests.stub_vllm import DEFAULT_MODEL, StubVllm, read_journal
from tests.tiny_lightonocr.drawn import drawn_pages
from tests.vllm_cpu import TinyServer, free_port, serve_tiny

pytestmark = pytest.mark.slow  # other programs are started


needs_router = pytest.mark.skipif(
    importlib.util.find_spec("vllm_router") is None, reason="vllm-router is built for Linux on x86-64 only"
)
QUICK_TO_FORGIVE = ("--cb-timeout-duration-secs", "1", "--health-check-interval-secs", "1")


class Router:
    """A `vllm-router` before servers that run, for the length of a `with` block."""

    def __init__(self, log: Path, servers: Sequence[str], *options: str) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        ports = ["--port", str(port), "--prometheus-port", str(free_port())]
        words = ["--worker-urls", *servers, "--policy", "round_robin", *options]
        self._command = [sys.executable, "-m", "vllm_router.launch_router", *ports, *words]
        self._log = log

    def has_workers(self) -> bool:
        """Whether it would pass a request on."""
        assert self._process.poll() is None, self._log.read_text()
        try:
            return requests.get(f"{self.url}/readiness", timeout=5).ok
        except requests.ConnectionError:
            return False

    def __enter__(self) -> Self:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        wait_until(self.has_workers, "the router is ready")
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.wait()


def tags(journal: Path, outcome: str | None = None) -> list[str]:
    """The pages in a stub's journal, or those of them with this outcome; the canary page is none of ours."""
    entries = [entry for entry in read_journal(journal) if entry["tag"] < tag_of(0xFFFF)]
    return [entry["tag"] for entry in entries if outcome in (None, entry.get("outcome"))]


@needs_router
def test_a_server_behind_a_router_dies_in_mid_run_and_no_row_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "a-key")
    pages = write_pages(tmp_path / "pages.parquet", 120)

    def stub(name: str, *faults: str) -> StubVllm:
        timing = ("--read-tag", "--api-key", "a-key", "--max-num-seqs", "8", "--seconds-per-page", "0.02")
        files = ("--journal", str(tmp_path / f"{name}-journal"), "--arrivals", str(tmp_path / f"{name}-arrivals"))
        return StubVllm(*timing, *files, *(word for fault in (READABLE, *faults) for word in ("--fault", fault)))

    with (
        stub("short", "die,at=20") as short,
        stub("long") as long,
        Router(tmp_path / "router.log", [short.url, long.url]) as router,
    ):
        words = (pages, tmp_path / "out", "--server", router.url, "--block-rows", "32", "--concurrency", "16")
        ended = run_here(*words, "--confidence", canary=True)
        assert short.wait() == 1
        last_request = long.stats()["last_request"]

    assert ended.code == 0, ended.stderr
    assert ended.line["engine"] == "vllm 0.32.0"
    assert ended.line["statuses"]["ok"] == 120
    assert ended.line["restarts"] == 0
    assert f"{router.url}/v1 is a router before 2 servers" in ended.stderr
    assert "the canary page was read" in ended.stderr
    assert_all_read(output_table(tmp_path / "out").drop_columns(["markdown_confidence"]), range(1, 121))

    died_with = set(tags(tmp_path / "short-arrivals")) - set(tags(tmp_path / "short-journal", "200"))
    by_short, by_long = (tags(tmp_path / f"{name}-journal", "200") for name in ("short", "long"))
    assert died_with
    assert died_with <= set(by_long)
    assert set(by_short) | set(by_long) == {tag_of(number) for number in range(1, 121)}
    assert min(len(by_short), len(by_long)) > 0
    # the router rewrites each request: what the question is made of has to come through
    assert {"seed", "temperature", "top_p", "max_tokens", "logprobs", "repetition_detection"} <= set(last_request)


@needs_router
def test_the_saturating_driver_counts_all_servers_behind_a_router(tmp_path: Path) -> None:
    pages, telemetry = write_pages(tmp_path / "pages.parquet", 200), tmp_path / "telemetry.jsonl"
    timing = ("--read-tag", "--max-num-seqs", "4", "--seconds-per-page", "0.1")
    with (
        StubVllm(*timing, "--fault", "die,at=70") as short,
        StubVllm(*timing) as long,
        Router(tmp_path / "router.log", [short.url, long.url]) as router,
    ):
        words = ("--server", router.url, "--model", DEFAULT_MODEL, "--telemetry", telemetry, "--block-rows", "64")
        ended = run_here(pages, tmp_path / "out", *words, script=SATURATE)
        assert short.wait() == 1
        seen = long.stats()

    assert ended.code == 0, ended.stderr
    assert_all_read(output_table(tmp_path / "out"), range(1, 201))
    lines = [json.loads(line) for line in telemetry.read_text().splitlines()]
    running = [line["running"] for line in lines if line["running"] is not None]
    assert max(running) > seen["max_running"] == 4
    assert running[-1] <= 4
    assert "no vLLM gauges" not in ended.stderr


@pytest.mark.slow
@needs_router
def test_when_all_servers_behind_a_router_are_dead_the_run_stops_and_goes_on_once_one_is_back(tmp_path: Path) -> None:
    pages, out = write_pages(tmp_path / "pages.parquet", 60), tmp_path / "out"
    with (
        StubVllm("--read-tag", "--fault", "die,at=21") as first,
        StubVllm("--read-tag", "--fault", "die,at=21") as second,
        Router(tmp_path / "router.log", [first.url, second.url], *QUICK_TO_FORGIVE) as router,
    ):
        words = (pages, out, "--server", router.url, "--block-rows", "8", "--concurrency", "2", "--retry-for", "1")
        stopped = run_here(*words)
        closed = len(block_files(out))
        with StubVllm("--read-tag", port=int(first.url.rpartition(":")[2])) as back:
            wait_until(router.has_workers, "the router has noticed that a server is back")
            finished = run_here(*words)
            asked = back.stats()["requests"]

    assert stopped.code == 1
    assert "no page was answered" in stopped.line["message"]
    assert 0 < closed < 8
    assert finished.code == 0, finished.stderr
    assert finished.line["rows_before"] == 8 * closed
    assert asked >= 60 - 8 * closed
    assert_all_read(output_table(out), range(1, 61))


@pytest.mark.engine
@needs_router
def test_a_real_vllm_behind_a_router_is_killed_in_mid_run_and_no_row_is_lost(
    vllm_server: TinyServer, tmp_path: Path
) -> None:
    drawn = drawn_pages(64, seed=64)
    features = datasets.Features({"id": datasets.Value("int64"), "image": datasets.Image()})
    images = [{"bytes": page.encoded(), "path": None} for page in drawn]
    pages = tmp_path / "pages.parquet"
    pq.write_table(
        datasets.Dataset.from_dict({"id": range(64), "image": images}, features=features).with_format("arrow")[:], pages
    )

    def answered_by(server: TinyServer) -> int:
        text = requests.get(f"{server.url.removesuffix('/v1')}/metrics", timeout=60).text
        return int(parse_gauges(text).succeeded or 0)

    with serve_tiny(tmp_path / "serve.log") as second:
        before = answered_by(vllm_server)
        urls = [server.url.removesuffix("/v1") for server in (vllm_server, second)]
        with Router(tmp_path / "router.log", urls) as router:
            words = (pages, tmp_path / "out", "--server", router.url, "--model", second.model, "--block-rows", "8")
            cold = ("--temperature", "0", "--max-tokens", "400", "--concurrency", "8")
            with Running(*words, *cold) as run:
                wait_until(lambda: answered_by(second) >= 4, "the second server answers pages", 600)
                os.killpg(second.process.pid, signal.SIGKILL)
                ended = run.wait(900)
        by_first = answered_by(vllm_server) - before

    assert ended.code == 0, ended.stderr
    assert ended.line["engine"] == "vllm 0.32.0"
    assert ended.line["statuses"]["ok"] == 64
    table = output_table(tmp_path / "out")
    assert table["id"].to_pylist() == list(range(64))
    errors = sum(map(Levenshtein.distance, table["markdown"].to_pylist(), [page.text for page in drawn]))
    assert errors <= 0.05 * sum(len(page.text) for page in drawn)
    assert 32 <= by_first < 64, "more than its half, as the other one died, and not all, as that answered some"


# --- what is asked of a router, and what it may answer ---------------------------------------------------------------


def answers(pages: dict[str, tuple[int, bytes]]) -> Callable[..., tuple[int, bytes]]:
    """A `fetch` that knows these pages."""

    def fetch(url: str, key: str) -> tuple[int, bytes]:
        if url not in pages:
            raise ConnectionRefusedError(url)
        assert not key or url.startswith("http://router"), "a worker was told the key"
        return pages[url]

    return fetch


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ((404, b"{}"), ()),
        ((200, b"<html>"), ()),
        ((200, b"[]"), ()),
        ((200, b'{"workers": null}'), ()),
        ((200, b'{"workers": [{"id": 1}]}'), ()),
        ((200, b'{"workers": [{"url": "grpc://a:1"}, {"url": "file:///etc"}]}'), ()),
        ((200, b'{"workers": [{"url": "http://a:1"}, {"url": "http://b:2"}]}'), ("http://a:1", "http://b:2")),
        ((200, b'{"workers": [{"url": "http://a:1@0"}, {"url": "http://a:1@1"}]}'), ("http://a:1",)),
    ],
)
def test_a_router_is_known_by_its_list_of_workers(
    answer: tuple[int, bytes], expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "fetch", answers({"http://router/workers": answer}))
    assert workers_behind("http://router/v1") == expected
    assert workers_behind("http://elsewhere/v1") == ()


def page(running: int) -> tuple[int, bytes]:
    """A page of metrics."""
    return 200, f"vllm:num_requests_running {running}\nvllm:num_requests_waiting 1\n".encode()


@pytest.mark.parametrize(
    ("behind", "running"),
    [
        ((), 100.0),
        (("http://a:1", "http://b:2"), 12.0),
        (("http://a:1", "http://dead:3"), 5.0),
        (("http://dead:3",), None),
        (("http://127.0.0.1:1",), None),
    ],
    ids=["a server", "a router", "one is dead", "all are dead", "loopback of another machine"],
)
def test_the_gauges_of_all_workers_that_answer_count_and_never_those_that_the_router_passes_on(
    behind: tuple[str, ...], running: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = {
        "http://router/metrics": page(100),
        "http://a:1/metrics": page(5),
        "http://b:2/metrics": page(7),
        "http://127.0.0.1:1/metrics": page(9),
    }
    monkeypatch.setattr(workers, "fetch", answers(pages))
    text = asyncio.run(metrics_text("a-key", behind, "http://router/metrics"))
    assert parse_gauges(text or "").running == running


def test_the_version_is_asked_again_where_a_router_has_sent_the_question_to_a_dead_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replies: Iterator[tuple[int, bytes]] = iter([(502, b"Backend request failed"), (200, b'{"version": "0.32.0"}')])
    monkeypatch.setattr(ready, "fetch", lambda *_: next(replies))
    models: list[dict[str, Any]] = [{"owned_by": "vllm"}]
    assert ready.engine_name("http://router", models) == "vllm 0.32.0"
