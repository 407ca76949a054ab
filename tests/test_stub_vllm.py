"""The stand-in for `vllm serve`: answers, time model, faults and counters, over real HTTP."""

from __future__ import annotations

import asyncio
import concurrent.futures
import hashlib
import io
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import requests
from PIL import Image

from tests.stub_vllm import DEFAULT_MODEL, StubVllm, data_url, install_fake_vllm, read_journal, tagged_png

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(30)

PAGE = tagged_png(1)
PAGE_HASH = hashlib.sha256(PAGE).hexdigest()


@pytest.fixture(scope="module")
def plain() -> Iterator[StubVllm]:
    with StubVllm() as stub:
        yield stub


@pytest.fixture
def stub(plain: StubVllm) -> Iterator[StubVllm]:
    """One stub for many tests: counted anew, without faults, for each of them."""
    plain.reset()
    yield plain
    plain.configure(faults=[], max_num_seqs=256, seconds_per_page=0, ceiling=0, health_status=200, metrics=True)


def body(url: str, **changes: object) -> dict[str, Any]:
    content = [{"type": "image_url", "image_url": {"url": url}}]
    request: dict[str, Any] = {"model": DEFAULT_MODEL, "messages": [{"role": "user", "content": content}]}
    return request | changes


def ask(stub: StubVllm, page: bytes = PAGE, timeout_s: float = 10, **changes: object) -> requests.Response:
    request = body(data_url(page), **changes)
    return requests.post(f"{stub.v1}/chat/completions", json=request, timeout=timeout_s)


def ask_all(stub: StubVllm, pages: list[bytes], threads: int = 16) -> list[int]:
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        return [response.status_code for response in pool.map(lambda page: ask(stub, page), pages)]


def text_of(response: requests.Response) -> str:
    text = response.json()["choices"][0]["message"]["content"]
    assert isinstance(text, str)
    return text


def gauges(stub: StubVllm) -> dict[str, float]:
    lines = requests.get(f"{stub.url}/metrics", timeout=5).text.splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


# -- answers


def test_a_page_comes_back_as_a_chat_completion_with_vllms_fields(stub: StubVllm) -> None:
    answer = ask(stub).json()
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert answer["model"] == DEFAULT_MODEL
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"].startswith(f"page {PAGE_HASH[:12]}\n56 x 28\n")
    usage = answer["usage"]
    assert usage["prompt_tokens"] > 2
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_the_text_depends_on_the_image_alone(stub: StubVllm) -> None:
    assert text_of(ask(stub, seed=1)) == text_of(ask(stub, seed=2))
    assert text_of(ask(stub)) != text_of(ask(stub, tagged_png(2)))


def test_more_pixels_are_more_prompt_tokens(stub: StubVllm) -> None:
    small, large = (ask(stub, tagged_png(1, 28 * n, 28 * n)).json()["usage"]["prompt_tokens"] for n in (1, 10))
    assert large - small == 99


def test_a_text_is_cut_at_max_tokens(stub: StubVllm) -> None:
    answer = ask(stub, max_tokens=5).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 5


def test_a_stream_carries_the_same_text_and_ends_with_done(stub: StubVllm) -> None:
    whole = text_of(ask(stub))
    lines = ask(stub, stream=True, stream_options={"include_usage": True}).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert lines[-2] == "data: [DONE]"
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"]) == whole
    assert chunks[-1]["usage"]["completion_tokens"] > 0


def test_the_small_endpoints_answer_as_vllm_does(stub: StubVllm) -> None:
    health = requests.get(f"{stub.url}/health", timeout=5)
    assert (health.status_code, health.content) == (200, b"")
    assert requests.get(f"{stub.url}/version", timeout=5).json() == {"version": "0.32.0"}
    (card,) = requests.get(f"{stub.v1}/models", timeout=5).json()["data"]
    assert (card["id"], card["root"], card["max_model_len"]) == (DEFAULT_MODEL, DEFAULT_MODEL, 16384)
    assert requests.get(f"{stub.url}/nothing", timeout=5).json()["error"]["code"] == 404


@pytest.mark.parametrize(
    ("changes", "status", "kind", "param"),
    [
        ({"model": "other/model"}, 404, "NotFoundError", "model"),
        ({"messages": None}, 400, "Bad Request", "body.messages"),
        ({"max_tokens": 20_000}, 400, "BadRequestError", "max_tokens"),
        ({"max_tokens": 16_384}, 400, "BadRequestError", "input_tokens"),
    ],
)
def test_a_wrong_request_gets_vllms_error(
    stub: StubVllm, changes: dict[str, Any], status: int, kind: str, param: str
) -> None:
    response = ask(stub, **changes)
    error = response.json()["error"]
    assert response.status_code == status == error["code"]
    assert (error["type"], error["param"]) == (kind, param)
    assert stub.stats()["statuses"] == {str(status): 1}


def test_what_is_no_json_or_no_image_is_refused(stub: StubVllm) -> None:
    headers = {"Content-Type": "application/json"}
    broken = requests.post(f"{stub.v1}/chat/completions", data=b"{", headers=headers, timeout=5)
    assert (broken.status_code, broken.json()["error"]["type"]) == (400, "Bad Request")
    no_image = ask(stub, b"not an image")
    assert no_image.status_code == 400
    assert "Failed to load image" in no_image.json()["error"]["message"]


def test_an_api_key_guards_v1_only() -> None:
    with StubVllm(env={"VLLM_API_KEY": "secret"}) as stub:
        assert requests.get(f"{stub.url}/health", timeout=5).status_code == 200
        refused = requests.get(f"{stub.v1}/models", timeout=5)
        assert (refused.status_code, refused.json()) == (401, {"error": "Unauthorized"})
        allowed = requests.get(f"{stub.v1}/models", headers={"Authorization": "Bearer secret"}, timeout=5)
        assert allowed.status_code == 200


def test_local_files_are_read_only_under_the_allowed_directory(tmp_path: Path) -> None:
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    for place in (allowed, tmp_path):
        Image.new("RGB", (30, 30)).save(place / "page.bmp")
    with StubVllm("--allowed-local-media-path", str(allowed)) as stub:
        urls = [(place / "page.bmp").as_uri() for place in (allowed, tmp_path)]
        responses = [requests.post(f"{stub.v1}/chat/completions", json=body(url), timeout=5) for url in urls]
        assert [response.status_code for response in responses] == [200, 400]
        assert stub.stats()["formats"] == {"BMP": 1}
        assert stub.stats()["schemes"] == {"file": 1}


# -- time model


def test_no_more_than_max_num_seqs_run_and_the_others_wait(stub: StubVllm) -> None:
    stub.configure(max_num_seqs=2, seconds_per_page=0.15)
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(ask, stub, tagged_png(n)) for n in range(6)]
        while stub.stats()["in_flight"] < 6:
            time.sleep(0.005)
        seen = gauges(stub)
        assert all(answer.result().status_code == 200 for answer in answers)
    label = f'{{engine="0",model_name="{DEFAULT_MODEL}"}}'
    assert seen[f"vllm:num_requests_running{label}"] == 2
    assert seen[f"vllm:num_requests_waiting{label}"] == 4
    assert seen[f"vllm:kv_cache_usage_perc{label}"] == 1
    stats = stub.stats()
    assert (stats["max_running"], stats["max_in_flight"], stats["running"]) == (2, 6, 0)
    success = f'vllm:request_success_total{{engine="0",finished_reason="stop",model_name="{DEFAULT_MODEL}"}}'
    assert gauges(stub)[success] == 6


def test_completions_never_exceed_the_ceiling(stub: StubVllm) -> None:
    stub.configure(ceiling=50)
    assert ask_all(stub, [tagged_png(n) for n in range(25)]) == [200] * 25
    stats = stub.stats()
    assert stats["last_completion_at"] - stats["first_request_at"] >= 24 / 50


# -- faults


def test_a_status_fault_strikes_every_nth_request_with_retry_after(stub: StubVllm) -> None:
    stub.configure(faults=["status=429,retry_after=1.5,every=3"])
    responses = [ask(stub) for _ in range(6)]
    assert [response.status_code for response in responses] == [200, 200, 429, 200, 200, 429]
    assert responses[2].headers["Retry-After"] == "1.5"
    assert responses[2].json()["error"]["code"] == 429
    assert stub.stats()["faults"] == {"status=429,retry_after=1.5,every=3": 2}


def test_first_at_after_and_times_count_requests(stub: StubVllm) -> None:
    stub.configure(faults=["status=500,first=1", "status=502,at=3+4", "status=503,after=3,times=1"])
    assert [ask(stub).status_code for _ in range(6)] == [500, 200, 502, 502, 503, 200]


def test_a_fault_can_strike_the_first_ask_of_each_page(stub: StubVllm) -> None:
    stub.configure(faults=["status=500,first=1,per=page"])
    pages = [tagged_png(1), tagged_png(2), tagged_png(1), tagged_png(2)]
    assert [ask(stub, page).status_code for page in pages] == [500, 500, 200, 200]


def test_a_fault_can_be_bound_to_a_page_by_hash_tag_or_size(stub: StubVllm) -> None:
    stub.configure(faults=[f"status=500,page={PAGE_HASH[:10]}", "status=501,tag=000002", "status=502,size=28x28"])
    pages = [PAGE, tagged_png(2), tagged_png(3, 28, 28), tagged_png(4)]
    assert [ask(stub, page).status_code for page in pages] == [500, 501, 502, 200]


def test_dice_fall_the_same_way_for_one_seed(stub: StubVllm) -> None:
    def run() -> list[int]:
        stub.configure(faults=["status=500,p=0.5,seed=3"])
        return [ask(stub).status_code for _ in range(12)]

    once = run()
    assert run() == once
    assert set(once) == {200, 500}


@pytest.mark.parametrize("kind", ["reset", "half_close"])
def test_a_broken_connection_is_an_error_at_the_client(stub: StubVllm, kind: str) -> None:
    stub.configure(faults=[f"{kind},first=1"])
    with pytest.raises((requests.ConnectionError, requests.exceptions.ChunkedEncodingError)) as caught:
        ask(stub)
    assert ("reset" in str(caught.value)) == (kind == "reset")
    assert ask(stub).status_code == 200
    assert stub.stats()["resets"] == 1
    assert stub.stats()["completions"] == 1


def test_a_hanging_request_is_counted_as_cancelled_when_the_client_leaves(stub: StubVllm) -> None:
    stub.configure(faults=["hang,at=1"])
    with pytest.raises(requests.ReadTimeout):
        ask(stub, timeout_s=0.2)
    while (stats := stub.stats())["in_flight"]:
        time.sleep(0.01)
    assert (stats["cancelled"], stats["running"], stats["waiting"]) == (1, 0, 0)


def test_a_client_that_leaves_the_queue_takes_no_slot(stub: StubVllm) -> None:
    stub.configure(max_num_seqs=1, seconds_per_page=0.3)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        first = pool.submit(ask, stub)
        while not stub.stats()["running"]:
            time.sleep(0.005)
        with pytest.raises(requests.ReadTimeout):
            ask(stub, timeout_s=0.05)
        assert first.result().status_code == 200
    assert ask(stub).status_code == 200
    stats = stub.stats()
    assert (stats["cancelled"], stats["running"], stats["max_running"]) == (1, 0, 1)


def test_a_stall_holds_all_answers_while_health_stays_good(stub: StubVllm) -> None:
    stub.configure(faults=["stall,at=1,seconds=0.4"])
    started = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, stub)
        assert requests.get(f"{stub.url}/health", timeout=5).status_code == 200
        assert answer.result().status_code == 200
    assert time.monotonic() - started >= 0.4


@pytest.mark.parametrize(
    ("kind", "reason", "marker"),
    [
        ("loop", "length", "and the and the and the"),
        ("truncate", "length", "page "),
        ("repetition", "repetition", "the same line again"),
        ("empty", "stop", ""),
        ("surrogate", "stop", "lone \ud800 and \udfff, and a NUL \x00."),
        ("long", "stop", "x" * 99),
    ],
)
def test_a_text_fault_changes_the_text_and_the_finish_reason(
    stub: StubVllm, kind: str, reason: str, marker: str
) -> None:
    stub.configure(faults=[kind])
    answer = ask(stub)
    assert answer.json()["choices"][0]["finish_reason"] == reason
    assert marker in text_of(answer)
    assert kind != "empty" or not text_of(answer)
    assert kind != "long" or len(text_of(answer)) == 200_000
    assert stub.stats()["finish_reasons"] == {reason: 1}


def test_an_answer_can_be_given_in_json_for_images_of_one_size(stub: StubVllm) -> None:
    stub.configure(faults=['{"kind": "answer", "text": "canary, as drawn", "size": "640x200"}'])
    assert text_of(ask(stub, tagged_png(0, 640, 200))) == "canary, as drawn"
    assert text_of(ask(stub)).startswith("page ")


def test_garbage_is_no_json(stub: StubVllm) -> None:
    stub.configure(faults=["garbage"])
    response = ask(stub)
    assert response.status_code == 200
    with pytest.raises(requests.JSONDecodeError):
        response.json()


def test_a_dead_engine_says_so_at_health_and_at_completions(stub: StubVllm) -> None:
    stub.configure(faults=["dead,at=1"])
    assert [ask(stub).status_code for _ in range(2)] == [500, 500]
    assert requests.get(f"{stub.url}/health", timeout=5).status_code == 503


def test_gauges_can_be_missing(stub: StubVllm) -> None:
    stub.configure(metrics=False)
    assert requests.get(f"{stub.url}/metrics", timeout=5).status_code == 404


@pytest.mark.parametrize("spec", ["nonsense", "status=500,evry=2", "status=500,every=x"])
def test_a_wrong_fault_or_setting_is_refused(stub: StubVllm, spec: str) -> None:
    url = f"{stub.url}/stub/config"
    assert requests.post(url, json={"faults": [spec]}, timeout=5).status_code == 400
    assert requests.post(url, json={"no_such_setting": 1}, timeout=5).status_code == 400
    assert ask(stub).status_code == 200


# -- counters


def test_pages_are_counted_by_hash_with_their_seeds_and_tags() -> None:
    with StubVllm("--read-tag", "--seeded-text", "--seconds-per-page", "0.01", "--unknown-flag", "7") as stub:
        texts = [text_of(ask(stub, tagged_png(n), seed=n)) for n in (1, 1, 0xABCDEF)]
        stats = stub.stats()
    assert "tag abcdef\nseed 11259375" in texts[2]
    assert (stats["requests"], stats["completions"], stats["distinct_pages"]) == (3, 3, 2)
    assert stats["asks"][PAGE_HASH] == 2
    assert stats["answered"] == stats["asks"]
    assert stats["seeds"][PAGE_HASH] == [1, 1]
    assert stats["tags"] == {"000001": 2, "abcdef": 1}
    assert stats["extras"] == ["--unknown-flag", "7"]
    assert stats["statuses"] == {"200": 3}


def test_the_last_request_is_kept_without_its_image(stub: StubVllm) -> None:
    ask(stub, temperature=0.25)
    last = stub.stats()["last_request"]
    assert last["temperature"] == 0.25
    assert len(json.dumps(last)) < 400


def test_the_counters_start_anew_after_a_reset(stub: StubVllm) -> None:
    ask(stub)
    stub.reset()
    stats = stub.stats()
    assert (stats["requests"], stats["asks"], stats["max_in_flight"]) == (0, {}, 0)


# -- life and death


def test_sigterm_ends_it_at_once_with_a_request_in_flight() -> None:
    with StubVllm("--fault", "hang") as stub, concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, stub)
        while not stub.stats()["running"]:
            time.sleep(0.01)
        stub.terminate()
        assert stub.wait(2) == 0
        assert isinstance(answer.exception(), requests.ConnectionError)


def test_it_dies_after_n_completions_and_the_journal_outlives_it(tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    for _ in range(2):
        with StubVllm("--die-after", "2", "--journal", str(journal)) as stub:
            assert [ask(stub).status_code for _ in range(2)] == [200, 200]
            assert stub.wait() == 1
    assert [(line["outcome"], line["page"]) for line in read_journal(journal)] == [("200", PAGE_HASH)] * 4


def test_it_is_healthy_before_it_can_answer() -> None:
    with StubVllm("--health-before-ready", "60") as stub:
        assert requests.get(f"{stub.url}/health", timeout=5).status_code == 200
        assert ask(stub).status_code == 503


def test_a_death_at_start_shows_its_text() -> None:
    with pytest.raises(RuntimeError, match=r"exit code 1:\nCUDA driver too old"):
        StubVllm("--die-at-start", "CUDA driver too old").start()


def test_a_port_that_is_taken_ends_it(stub: StubVllm) -> None:
    with pytest.raises(RuntimeError, match="address already in use"):
        StubVllm(port=int(stub.url.rsplit(":", 1)[1])).start()


def test_a_slow_start_refuses_connections_until_it_listens(tmp_path: Path) -> None:
    stub = StubVllm("--slow-start", "0.5")
    started = time.monotonic()
    with stub:
        assert time.monotonic() - started >= 0.5
        assert ask(stub).status_code == 200


def test_it_can_stand_in_for_the_vllm_command(tmp_path: Path) -> None:
    command = [str(install_fake_vllm(tmp_path, "--seconds-per-page", "0.01")), "serve", "some/model"]
    flags = ["--host", "127.0.0.1", "--port", "0", "--limit-mm-per-prompt", '{"image": 1}']
    with subprocess.Popen(command + flags, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            url = json.loads(process.stdout.readline())["url"]
            model = requests.get(f"{url}/v1/models", timeout=5).json()["data"][0]["id"]
            extras = requests.get(f"{url}/stub/stats", timeout=5).json()["extras"]
        finally:
            process.kill()
    assert model == "some/model"
    assert extras == ["serve", "some/model", "--limit-mm-per-prompt", '{"image": 1}']
    version = subprocess.run([command[0], "--version"], capture_output=True, text=True, check=True)
    assert version.stdout == "0.32.0\n"


def test_help_names_the_fault_grammar() -> None:
    script = Path(__file__).with_name("stub_vllm.py")
    shown = subprocess.run([sys.executable, str(script), "--help"], capture_output=True, text=True, check=True)
    assert "status=CODE" in shown.stdout


def test_hundreds_of_large_requests_at_once_are_all_answered(stub: StubVllm) -> None:
    noise = Image.effect_noise((560, 560), 90)
    out = io.BytesIO()
    noise.save(out, "BMP")
    request = json.dumps(body(data_url(out.getvalue(), "image/bmp"))).encode()

    async def storm() -> list[int]:
        connector = aiohttp.TCPConnector(limit=0)
        headers = {"Content-Type": "application/json"}

        async def one(session: aiohttp.ClientSession) -> int:
            async with session.post(f"{stub.v1}/chat/completions", data=request, headers=headers) as response:
                await response.read()
                return response.status

        async with aiohttp.ClientSession(connector=connector) as session:
            return list(await asyncio.gather(*(one(session) for _ in range(200))))

    stub.configure(seconds_per_page=0.2)
    assert asyncio.run(storm()) == [200] * 200
    stats = stub.stats()
    assert stats["distinct_pages"] == 1
    assert stats["max_in_flight"] > 50
