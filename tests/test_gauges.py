"""The gauges of a vLLM server: its page read, and a reader that never stands in the way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from src import gauges
from src.gauges import GaugeReader, Gauges, metrics_url, parse_gauges

PAGE = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="lightonai/LightOnOCR-2-1B"} 36.0
vllm:num_requests_running{engine="1",model_name="lightonai/LightOnOCR-2-1B"} 4.0
vllm:num_requests_waiting{engine="0",model_name="lightonai/LightOnOCR-2-1B"} 2.0
vllm:num_requests_waiting{engine="1",model_name="a } in \\" a name"} 1e0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 70.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.5
vllm:num_preemptions_total{engine="0"} 3.0
vllm:num_preemptions_created{engine="0"} 1.7e+09
vllm:prompt_tokens_total{engine="0"} 2384.0
vllm:generation_tokens_total{engine="0"} 1200.0 1767225600000
vllm:request_success_total{engine="0",finished_reason="stop"} 7.0
vllm:request_success_total{engine="0",finished_reason="length"} 2.0
http_requests_total{handler="/v1/chat/completions"} 9.0
"""


def test_the_page_is_summed_over_the_engines_and_the_fullest_cache_counts() -> None:
    assert parse_gauges(PAGE) == Gauges(
        running=40.0,
        waiting=3.0,
        kv_usage=0.5,
        preemptions=3.0,
        succeeded=9.0,
        prompt_tokens=2384.0,
        made_tokens=1200.0,
    )


def test_what_the_page_does_not_say_is_none_and_zero_is_zero() -> None:
    assert parse_gauges("vllm:num_requests_waiting 0.0\n") == Gauges(waiting=0.0)
    assert not parse_gauges("vllm:num_requests_waiting 0.0\n").known
    assert parse_gauges("vllm:num_requests_waiting 0\nvllm:num_requests_running 0").known


def test_the_older_name_of_the_cache_and_names_without_total_are_read() -> None:
    page = "vllm:gpu_cache_usage_perc 0.75\nvllm:num_preemptions 4\nvllm:generation_tokens 5"
    assert parse_gauges(page) == Gauges(kv_usage=0.75, preemptions=4.0, made_tokens=5.0)


def test_lines_that_are_no_numbers_are_passed_over() -> None:
    page = "vllm:num_requests_running NaN\nvllm:num_requests_running what\nvllm:num_requests_running{ 3\n<html>"
    assert parse_gauges(page) == Gauges()


@given(st.text() | st.text('vllm:num_requests_running{}=" \n0123.e+#,').map(lambda text: PAGE + text))
def test_no_page_makes_the_parser_stumble(text: str) -> None:
    parse_gauges(text)


@pytest.mark.parametrize("base", ["http://gpu-box:8000", "http://gpu-box:8000/", "http://gpu-box:8000/v1"])
def test_the_metrics_are_beside_the_api(base: str) -> None:
    assert metrics_url(base) == "http://gpu-box:8000/metrics"


class Source:
    """A server's pages in order, the last one again and again; an exception is raised."""

    def __init__(self, *pages: str | Exception | None) -> None:
        self.pages = list(pages)
        self.asked: list[str] = []

    async def __call__(self, url: str) -> str | None:
        self.asked.append(url)
        page = self.pages.pop(0) if len(self.pages) > 1 else self.pages[0]
        if isinstance(page, Exception):
            raise page
        return page


def reader_of(get: Callable[[str], Awaitable[str | None]], clock: Callable[[], float]) -> tuple[GaugeReader, list[str]]:
    said: list[str] = []
    return GaugeReader("http://gpu-box:8000/v1", get, said.append, clock), said


def test_a_reader_keeps_the_last_reading_until_it_is_too_old() -> None:
    now = 0.0
    reader, _ = reader_of(Source(PAGE, OSError("gone")), lambda: now)
    assert asyncio.run(reader.read())
    assert reader.latest.running == 40.0
    now = 4.0
    assert not asyncio.run(reader.read())
    assert reader.latest.running == 40.0
    now = 6.0
    assert reader.latest == Gauges()


@pytest.mark.parametrize("page", ["<html>not found</html>", "", None, OSError("no route"), ValueError("not UTF-8")])
def test_a_server_without_gauges_is_left_alone_after_some_tries_and_that_is_said_once(
    page: str | Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gauges, "READ_EVERY_S", 0.0)
    source = Source(page)
    reader, said = reader_of(source, lambda: 0.0)
    asyncio.run(reader.run())
    assert source.asked == ["http://gpu-box:8000/metrics"] * gauges.TRIES
    assert said == [
        "http://gpu-box:8000/metrics shows no vLLM gauges: the window goes by the answers alone",
    ]
    assert reader.latest == Gauges()


def test_a_server_that_had_gauges_is_asked_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gauges, "READ_EVERY_S", 0.0)
    reader, said = reader_of(Source(PAGE, *[OSError("restarting")] * 10, PAGE), lambda: 0.0)

    async def read_for_a_while() -> None:
        task = asyncio.create_task(reader.run())
        for _ in range(100):
            await asyncio.sleep(0)
        assert not task.done()
        task.cancel()

    asyncio.run(read_for_a_while())
    assert not said


def test_a_page_that_never_comes_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gauges, "READ_TIMEOUT_S", 0.01)

    async def never(url: str) -> str | None:
        await asyncio.Event().wait()
        return url

    reader, _ = reader_of(never, lambda: 0.0)
    assert not asyncio.run(reader.read())
