"""bench/endpoint.py: what it counts against the stub, what it refuses, and the figures that it makes of samples."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageDraw

from bench import closed_loop, endpoint
from bench.closed_loop import Answer, Enough, Level, RequestFailedError, Sample, read_stream, run_level
from bench.endpoint_report import fallen, figures, line, percentile, unlike, warnings
from tests.stub_vllm import DEFAULT_MODEL, StubVllm, completion_chunks
from tests.stub_vllm import Answer as StubAnswer
from tests.tiny_lightonocr.drawn import drawn_pages
from tests.vllm_cpu import TinyServer

pytestmark = pytest.mark.slow  # other programs are started


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of three small pages, one that is blank, and a file that is none."""
    folder = tmp_path_factory.mktemp("pages")
    for number in range(3):
        image = Image.new("L", (300, 200), "white")
        ImageDraw.Draw(image).text((20, 40), f"page {number}", fill="black")
        image.save(folder / f"page-{number}.png")
    Image.new("L", (300, 200), "white").save(folder / "blank.png")
    (folder / "notes.txt").write_text("no picture")
    return folder


def load(stub: StubVllm, pages: Path, *words: object, target: Path) -> tuple[int, dict[str, Any]]:
    """Run the load test; return its exit code and what it wrote to `target`."""
    code = endpoint.main([stub.url, "--pages", str(pages), "--json", str(target), *map(str, words)])
    return code, json.loads(target.read_text()) if target.exists() else {}


def without_faults(level: dict[str, Any]) -> dict[str, Any]:
    """A level of which only the counts are told."""
    return {name: level[name] for name in ("concurrency", "requests", "answered", "errors", "finish_reasons", "died")}


# --- whole runs ------------------------------------------------------------------------------------------------------


def test_levels_are_counted_as_the_server_counts_them(
    pages: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = ("status=500,at=30+40+50", "reset,at=60", "garbage,at=70", "slow,seconds=0.3,every=19")
    words = [word for fault in faults for word in ("--fault", fault)]
    with StubVllm("--seconds-per-page", "0.01", *words) as stub:
        code, result = load(stub, pages, "--concurrency", "1,4", "--requests", 100, target=tmp_path / "load.json")
        seen = stub.stats()

    assert code == 0
    one, four = result["levels"]
    assert without_faults(one) == {
        "concurrency": 1,
        "requests": 100,
        "answered": 95,
        "errors": {"HTTP 500": 3, "connection": 1, "no completion": 1},
        "finish_reasons": {"stop": 95},
        "died": False,
    }
    assert one["error_share"] == 0.05
    assert 100 <= four["requests"] == four["answered"] <= 103  # what was in flight at the end counts too
    assert seen["max_in_flight"] == 4
    assert seen["requests"] == 4 + one["requests"] + four["requests"]  # four to warm up
    assert seen["distinct_pages"] == 3
    assert seen["models"] == {DEFAULT_MODEL: seen["requests"]}
    assert all(len(set(seeds)) == len(seeds) for seeds in seen["seeds"].values()), "each request has its own seed"
    assert seen["last_request"]["stream"] is True

    for level in (one, four):
        latency, first = level["latency_s"], level["first_token_s"]
        assert 0 < latency["p50"] <= latency["p90"] <= latency["max"]
        assert 0 < first["p50"] <= latency["p50"]
        assert level["client_cpu_share"] > 0
        assert level["tokens_per_s"] > level["pages_per_s"] > 0
    assert one["latency_s"]["p99"] is None, "95 answers tell no p99"
    assert four["latency_s"]["p50"] < four["latency_s"]["p99"] <= four["latency_s"]["max"]
    assert result["engine"] == "vllm 0.32.0"
    told = capsys.readouterr()
    assert not told.out, "the JSON went to the file"
    assert "blank.png is left out: no ink on the page" in told.err
    assert "3 × HTTP 500, 1 × connection, 1 × no completion" in told.err


def test_an_endpoint_that_dies_in_mid_run_ends_it_with_what_was_measured(
    pages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(closed_loop, "PAUSE_AFTER_FAILURE_S", 0.0)
    target = tmp_path / "load.json"
    with StubVllm("--fault", "die,at=60") as stub:
        code, result = load(stub, pages, "--concurrency", "1,2,4", "--requests", 50, "--warm-up", 1, target=target)
        assert stub.wait() == 1

    assert code == 1
    assert [level["concurrency"] for level in result["levels"]] == [1, 2]
    one, two = result["levels"]
    assert not one["died"]
    assert one["answered"] == 50
    assert two["died"]
    assert 7 <= two["answered"] <= 8
    assert set(two["errors"]) == {"connection"}
    assert "the endpoint did nothing but fail in the end" in capsys.readouterr().err


def test_a_baseline_is_kept_or_the_figure_that_fell_is_named(
    pages: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after, plot = tmp_path / "before.json", tmp_path / "after.json", tmp_path / "load.png"
    words = ("--concurrency", "2", "--requests", 20, "--check-against", before)
    with StubVllm() as stub:
        _, baseline = load(stub, pages, *words[:4], "--plot", plot, target=before)
        easy = scaled(baseline, pages_per_s=0.001, tokens_per_s=0.001, latency_s=1000, first_token_s=1000)
        before.write_text(json.dumps(easy))
        kept, result = load(stub, pages, *words, "--plot", tmp_path / "load.svg", target=after)
        before.write_text(json.dumps(scaled(easy, pages_per_s=1e6)))
        fell, worse = load(stub, pages, *words, target=after)
        other_model = easy | {"settings": easy["settings"] | {"max_tokens": 17}}
        before.write_text(json.dumps(other_model))
        requests = stub.stats()["requests"]
        capsys.readouterr()
        unlike_code, _ = load(stub, pages, *words, target=tmp_path / "never.json")
        assert stub.stats()["requests"] == requests, "what can't be compared is not measured"

    assert kept == 0
    assert result["fallen"] == []
    assert fell == 1
    (words_of_it,) = worse["fallen"]
    assert words_of_it.startswith("at 2 in flight pages_per_s fell from ")
    assert unlike_code == 2
    assert "max_tokens was 17 and is 4096" in capsys.readouterr().err
    assert not (tmp_path / "never.json").exists()
    with Image.open(plot) as drawn:
        assert min(drawn.size) > 500
        assert len(drawn.convert("RGB").getcolors(1 << 20) or ()) > 10
    assert "baseline" in (tmp_path / "load.svg").read_text()


@pytest.mark.engine
def test_the_real_vllm_streams_its_first_token_long_before_the_answer_is_whole(
    vllm_server: TinyServer, tmp_path: Path
) -> None:
    for number, page in enumerate(drawn_pages(4, seed=4)):
        (tmp_path / f"{number}.png").write_bytes(page.encoded())
    target = tmp_path / "load.json"
    words = ("--concurrency", "1,4", "--requests", "12", "--max-tokens", "200", "--warm-up", "1")
    assert endpoint.main([vllm_server.url, "--pages", str(tmp_path), "--json", str(target), *words]) == 0
    result = json.loads(target.read_text())
    assert result["engine"] == "vllm 0.32.0"
    for level in result["levels"]:
        assert level["answered"] == level["requests"] >= 12
        assert level["first_token_s"]["p50"] < level["latency_s"]["p50"]
        assert level["tokens_per_s"] > 10 * level["pages_per_s"], "the usage comes at the end of the stream"
        assert level["finish_reasons"]["stop"] > 0


def scaled(result: dict[str, Any], **factors: float) -> dict[str, Any]:
    """A result whose figures are so many times what they are."""

    def times(value: Any, factor: float) -> Any:
        if isinstance(value, dict):
            return {name: times(one, factor) for name, one in value.items()}
        return None if value is None else value * factor

    levels = [
        {name: times(value, factors.get(name, 1.0)) if name in factors else value for name, value in level.items()}
        for level in result["levels"]
    ]
    return result | {"levels": levels}


def test_an_endpoint_that_does_not_stream_or_is_not_there_is_named_before_any_level(
    pages: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_KEY", "right")
    with StubVllm("--api-key", "right", "--fault", "status=400,first=2") as stub:
        target = tmp_path / "load.json"
        refused, _ = load(stub, pages, target=target)
        words = ("--api-key-env", "A_KEY", "--concurrency", "1", "--requests", 3, "--warm-up", 2)
        no_stream, _ = load(stub, pages, *words, target=target)
        plain, result = load(stub, pages, *words, "--no-stream", target=target)
        asked_plainly = stub.stats()["last_request"]
    gone, _ = load(stub, pages, target=tmp_path / "gone.json")

    assert (refused, no_stream, plain, gone) == (1, 1, 0, 1)
    assert "stream" not in asked_plainly
    (level,) = result["levels"]
    assert level["answered"] == 3
    assert level["first_token_s"]["p50"] is None
    assert level["latency_s"]["p50"] is not None
    told = capsys.readouterr().err
    assert "set the variable that --api-key-env names" in told
    assert "none of 2 requests to warm up was answered, the last: HTTP 400; does it stream?" in told
    assert "start the server first" in told


def test_a_result_that_can_not_be_written_is_on_stdout(pages: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with StubVllm() as stub:
        words = ["--pages", str(pages), "--concurrency", "1", "--requests", "2", "--json", "/dev/full"]
        assert endpoint.main([stub.url, *words]) == 1
    told = capsys.readouterr()
    assert json.loads(told.out)["levels"][0]["answered"] == 2
    assert "can't be written" in told.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--concurrency", "0"], "a whole number from 1 on"),
        (["--concurrency", "8..2"], "the first is the larger one"),
        (["--requests", "many"], "a whole number from 1 on"),
        (["--seconds", "nan"], "seconds above 0"),
        (["--tolerance", "1"], "a share from 0"),
        (["--json", "no/such/folder.json"], "--json no/such/folder.json can't be written"),
        (["--plot", "load.txt"], "give a name that ends in .pdf, .png, .svg"),
        (["--check-against", "no-such.json"], "is no result of an earlier --json"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_anything_is_asked(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = endpoint.main(["http://127.0.0.1:9", *words])
    except SystemExit as end:
        code = int(end.code or 0)
    assert code == 2
    assert said in capsys.readouterr().err


def test_concurrencies_are_a_list_or_double() -> None:
    assert endpoint.concurrencies("4,1,2,2") == [1, 2, 4]
    assert endpoint.concurrencies("1..32") == [1, 2, 4, 8, 16, 32]
    assert endpoint.concurrencies("3..20") == [3, 6, 12, 20]
    assert endpoint.concurrencies("5..5") == [5]


# --- the closed loop -------------------------------------------------------------------------------------------------

TEXT = Answer(None, "stop", 10, 5)


def test_the_load_stays_whole_until_it_is_enough_and_what_is_in_flight_then_is_waited_for() -> None:
    in_flight = most = asked = 0

    async def ask() -> Answer:
        nonlocal in_flight, most, asked
        asked += 1
        in_flight += 1
        most = max(most, in_flight)
        for _ in range(3 + asked % 5):
            await asyncio.sleep(0)
        in_flight -= 1
        return TEXT

    level = asyncio.run(run_level(ask, 4, Enough(requests=50)))
    assert most == 4
    assert in_flight == 0
    assert 50 <= asked == len(level.samples) <= 53
    assert max(sample.ended_s for sample in level.samples) >= level.stopped_s


def test_a_level_by_time_ends_though_every_request_would_be_answered() -> None:
    async def ask() -> Answer:
        await asyncio.sleep(0.001)
        return TEXT

    level = asyncio.run(run_level(ask, 2, Enough(seconds=0.05)))
    assert level.stopped_s >= 0.05
    assert len(level.samples) >= 2


def test_failures_in_between_are_no_death_but_nothing_else_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closed_loop, "PAUSE_AFTER_FAILURE_S", 0.0)

    def asking(fails: Callable[[int], bool]) -> closed_loop.Ask:
        numbers = itertools.count()

        async def ask() -> Answer:
            if fails(next(numbers)):
                raise RequestFailedError("HTTP 503")
            return TEXT

        return ask

    often = asyncio.run(run_level(asking(lambda number: number % 10 > 0), 1, Enough(requests=200)))
    assert not often.died
    assert len(often.samples) == 200
    dead = asyncio.run(run_level(asking(lambda number: number >= 7), 1, Enough(requests=200)))
    assert dead.died
    assert len(dead.samples) == 7 + closed_loop.LEAST_FAILURES_OF_DEATH


# --- streams ---------------------------------------------------------------------------------------------------------


def events(*chunks: object, end: bytes = b"data: [DONE]\n\n") -> bytes:
    """A stream of server-sent events."""
    return b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks) + end


def read(content: bytes, cuts: Sequence[int] = ()) -> Answer:
    """Read a stream that comes in pieces; the clock tells which piece is being read."""
    at = 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal at
        edges = [0, *sorted(cut % (len(content) + 1) for cut in cuts), len(content)]
        for start, end in itertools.pairwise(edges):
            at += 1
            yield content[start:end]

    return asyncio.run(read_stream(pieces(), clock=lambda: float(at)))


STREAM = events(*completion_chunks(StubAnswer("one line\nanother\n", "stop", 96, 5), "a-model", with_usage=True))


@given(st.lists(st.integers(0, 5000), max_size=30))
def test_a_stream_is_read_however_it_is_cut(cuts: list[int]) -> None:
    answer = read(STREAM, cuts)
    assert (answer.finish_reason, answer.prompt_tokens, answer.tokens) == ("stop", 96, 5)
    assert answer.first_token_at is not None


def test_the_first_token_is_the_first_text_and_not_the_role_before_it() -> None:
    role_ends = STREAM.index(b"one line")
    assert read(STREAM, [10, role_ends - 5, role_ends + 60]).first_token_at == 3.0
    empty = events(*completion_chunks(StubAnswer("", "stop", 96, 1), "a-model", with_usage=True))
    assert read(empty).first_token_at is None


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (STREAM.removesuffix(b"data: [DONE]\n\n"), "broken off"),
        (b"", "broken off"),
        (events({"error": {"message": "EngineDeadError"}}), "error in the stream"),
        (b"data: {half\n\ndata: [DONE]\n\n", "no completion"),
        (b"data: [1]\n\ndata: [DONE]\n\n", "no completion"),
    ],
)
def test_a_stream_that_brings_no_whole_answer_is_a_failure(content: bytes, kind: str) -> None:
    with pytest.raises(RequestFailedError, match=kind):
        read(content)


def test_a_stream_without_usage_tells_no_tokens() -> None:
    chunks = completion_chunks(StubAnswer("text", "length", 96, 5), "a-model", with_usage=False)
    assert read(events(*chunks)) == Answer(1.0, "length", None, None)


# --- figures ---------------------------------------------------------------------------------------------------------


def test_percentiles_are_values_that_were_measured_and_are_told_only_where_enough_were() -> None:
    assert percentile([], 50) is None
    assert percentile([3.0], 50) is None
    assert percentile([4.0, 1.0], 50) == 1.0
    assert percentile(range(1, 10), 90) is None
    assert percentile(range(10, 0, -1), 90) == 9
    assert percentile(range(99), 99) is None
    assert percentile(range(1, 101), 99) == 99
    assert percentile(range(1, 1001), 99) == 990


@given(st.lists(st.floats(0, 1000), min_size=1, max_size=300))
def test_percentiles_are_ordered_and_so_many_percent_do_not_exceed_them(values: list[float]) -> None:
    known = [(percent, value) for percent in (50, 90, 99) if (value := percentile(values, percent)) is not None]
    assert [value for _, value in known] == sorted(value for _, value in known)
    for percent, value in known:
        assert sum(one <= value for one in values) * 100 >= percent * len(values)
        assert sum(one < value for one in values) * 100 < percent * len(values)


def level_of(*samples: Sample, stopped_s: float, concurrency: int = 2, cpu_s: float = 0.1) -> Level:
    """A level of ten seconds."""
    return Level(concurrency, list(samples), stopped_s, wall_s=10.0, client_cpu_s=cpu_s, died=False)


def answered(started_s: float, ended_s: float, tokens: int | None = 100, reason: str = "stop") -> Sample:
    """A request that was answered."""
    return Sample(started_s, ended_s, answer=Answer(None, reason, 10, tokens), first_token_s=0.5)


def test_throughput_counts_up_to_the_last_answer_under_the_whole_load_and_latency_counts_all() -> None:
    samples = [answered(0, 2), answered(0, 2), answered(2, 4), answered(2, 4), answered(4, 9), Sample(4, 5, "timeout")]
    found = figures(level_of(*samples, stopped_s=5.0))
    assert found["window_s"] == 4.0
    assert found["pages_per_s"] == 1.0
    assert found["tokens_per_s"] == 100.0
    assert found["latency_s"]["max"] == 5.0, "the slow answer after the end of the load is not left out"
    assert found["requests"] == 6
    assert found["errors"] == {"timeout": 1}
    assert found["error_share"] == pytest.approx(1 / 6, abs=1e-4)
    assert "–" in line(found)


def test_tokens_that_are_not_told_of_every_answer_make_no_figure() -> None:
    found = figures(level_of(answered(0, 1), answered(0, 1, tokens=None), stopped_s=2.0))
    assert found["tokens_per_s"] is None
    assert found["pages_per_s"] == 2.0


def test_a_level_without_an_answer_has_figures_of_nothing() -> None:
    found = figures(level_of(Sample(0, 1, "HTTP 500"), stopped_s=2.0))
    assert found["pages_per_s"] == 0.0
    assert found["latency_s"] == {"p50": None, "p90": None, "p99": None, "mean": None, "max": None}
    assert line(found).endswith("1 × HTTP 500")


def test_a_busy_client_and_texts_that_were_cut_off_are_warned_of() -> None:
    busy, cut = warnings(figures(level_of(answered(0, 1, reason="length"), answered(0, 1), stopped_s=2.0, cpu_s=9.0)))
    assert "this client used 90% of a core" in busy
    assert "1 of 2 texts were cut off by --max-tokens" in cut
    assert not warnings(figures(level_of(answered(0, 1), stopped_s=2.0)))


def result_of(**changes: Any) -> dict[str, Any]:
    """A result of one level."""
    spread = {"p50": 1.0, "p90": 2.0, "p99": None}
    level = {"concurrency": 4, "pages_per_s": 10.0, "tokens_per_s": 900.0, "latency_s": spread, "error_share": 0.0}
    return {"levels": [level | {"first_token_s": dict(spread)} | changes]}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, []),
        ({"pages_per_s": 9.1, "latency_s": {"p50": 1.09, "p90": 2.19}}, []),
        ({"pages_per_s": 1000.0, "latency_s": {"p50": 0.1, "p90": 0.1}}, []),
        ({"concurrency": 5, "pages_per_s": 0.1}, []),
        ({"pages_per_s": 8.9}, ["at 4 in flight pages_per_s fell from 10 to 8.9 (-11%)"]),
        ({"latency_s": {"p50": 1.0, "p90": 2.3}}, ["at 4 in flight latency_s.p90 rose from 2 to 2.3 (+15%)"]),
        ({"tokens_per_s": None}, ["at 4 in flight tokens_per_s was 900 and can't be told any more"]),
        ({"error_share": 0.02}, ["at 4 in flight error_share rose from 0.0% to 2.0%"]),
    ],
)
def test_what_fell_by_more_than_the_tolerance_is_named(changes: dict[str, Any], said: list[str]) -> None:
    assert fallen(result_of(**changes), result_of(), 0.1) == said


def test_a_baseline_of_other_settings_is_told_apart() -> None:
    assert unlike({"model": "a", "pages": 3}, {"settings": {"model": "a", "pages": 3}}) == []
    assert unlike({"model": "a", "pages": 3}, {"settings": {"model": "b", "stream": True}}) == [
        "model was 'b' and is 'a'",
        "pages was None and is 3",
        "stream was True and is None",
    ]
