"""serving/nginx.conf and serving/smoke.sh: nginx before a stub, and the smoke test against good and bad servers."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import subprocess
from typing import TYPE_CHECKING

import pytest
import requests
from PIL import Image

from src.models import catalogue
from tests.nginx import proxy, write_config
from tests.prometheus import SERVING
from tests.runs import ROOT, wait_until
from tests.stub_vllm import StubVllm, data_url, tagged_png
from tests.system_tools import system_tool
from tests.test_router import Router, needs_router

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow  # other programs are started


KEY = "sesame-8"
MB = 1024 * 1024
PAGE_TEXT = json.loads((ROOT / "examples/truth.json").read_text())["01-title.png"]
READS = json.dumps({"kind": "answer", "text": PAGE_TEXT})


@pytest.fixture(scope="module")
def stub() -> Iterator[StubVllm]:
    with StubVllm("--api-key", KEY, "--fault", READS) as running:
        yield running


@pytest.fixture(scope="module")
def front(stub: StubVllm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an nginx before the stub."""
    with proxy(stub.url, tmp_path_factory.mktemp("nginx")) as url:
        yield url


@pytest.fixture(autouse=True)
def _as_at_the_start(stub: StubVllm) -> None:
    stub.configure(faults=[READS], health_status=200, seconds_per_page=0.0)
    stub.reset()


def ask(url: str, image: bytes, key: str = KEY, **more: object) -> requests.Response:
    """Ask about a page."""
    content = [{"type": "image_url", "image_url": {"url": data_url(image)}}]
    question = {"model": catalogue()[3].model_id, "messages": [{"role": "user", "content": content}], **more}
    headers = {"Authorization": f"Bearer {key}"}
    return requests.post(f"{url}/v1/chat/completions", json=question, headers=headers, timeout=100)


def noise(pixels: int) -> bytes:
    """A page that PNG can't make smaller: about three bytes a pixel."""
    image = Image.frombytes("RGB", (1000, pixels // 1000), random.Random(7).randbytes(pixels // 1000 * 3000))
    buffer = io.BytesIO()
    image.save(buffer, "PNG", compress_level=0)
    return buffer.getvalue()


# --- nginx -----------------------------------------------------------------------------------------------------------


def test_nginx_accepts_its_configuration(tmp_path: Path) -> None:
    config = write_config("127.0.0.1:8000", 8080, tmp_path)
    command = [system_tool("nginx"), "-t", "-p", str(tmp_path), "-e", "stderr", "-c", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "test is successful" in done.stderr
    assert "[warn]" not in done.stderr


def test_a_page_of_five_megabytes_arrives_byte_for_byte(front: str, stub: StubVllm) -> None:
    page = noise(1_700_000)
    assert len(page) > 5_000_000
    answer = ask(front, page)
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["message"]["content"] == PAGE_TEXT
    assert list(stub.stats()["asks"]) == [hashlib.sha256(page).hexdigest()]


def test_a_body_of_sixty_megabytes_is_refused_in_words_that_a_client_understands(front: str, stub: StubVllm) -> None:
    answer = requests.post(f"{front}/v1/chat/completions", data=b" " * (60 * MB), timeout=100)
    assert answer.status_code == 413
    assert "smaller page" in answer.json()["error"]["message"]
    assert stub.stats()["paths"].get("/v1/chat/completions") is None


def test_the_key_is_passed_on_and_a_wrong_one_refused_by_the_server(front: str) -> None:
    assert ask(front, tagged_png(1)).status_code == 200
    assert ask(front, tagged_png(1), key="wrong").status_code == 401


@pytest.mark.parametrize("path", ["/metrics", "/stub/stats", "/"])
def test_what_the_key_does_not_guard_stays_inside(front: str, stub: StubVllm, path: str) -> None:
    answer = requests.get(front + path, timeout=30)
    assert answer.status_code == 404
    assert "only /v1" in answer.json()["error"]["message"]
    assert requests.get(stub.url + "/metrics", timeout=30).ok


def test_a_stream_comes_through_whole(front: str) -> None:
    events = [line for line in ask(front, tagged_png(2), stream=True).text.splitlines() if line]
    assert events[-1] == "data: [DONE]"
    texts = [json.loads(event.removeprefix("data: "))["choices"][0]["delta"].get("content") for event in events[:-1]]
    assert "".join(text or "" for text in texts) == PAGE_TEXT


def test_it_is_the_read_timeout_that_lets_slow_answers_live(stub: StubVllm, front: str, tmp_path: Path) -> None:
    stub.configure(faults=[], seconds_per_page=2.5)
    with proxy(stub.url, tmp_path, [("proxy_read_timeout 300s;", "proxy_read_timeout 1s;")]) as hasty:
        assert ask(hasty, tagged_png(3)).status_code == 504
    assert ask(front, tagged_png(3)).status_code == 200


@pytest.mark.slow
def test_an_answer_that_takes_longer_than_the_sixty_seconds_of_nginx_itself_arrives(front: str, stub: StubVllm) -> None:
    stub.configure(faults=[], seconds_per_page=65.0)
    assert ask(front, tagged_png(4)).status_code == 200


def test_the_client_is_told_of_each_failure_itself_and_asks_again_itself(front: str, stub: StubVllm) -> None:
    stub.configure(faults=["status=503,first=1"])
    assert ask(front, tagged_png(5)).status_code == 503
    assert stub.stats()["requests"] == 1


# --- the smoke test --------------------------------------------------------------------------------------------------


def smoke(url: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run serving/smoke.sh."""
    system_tool("curl")
    env = {name: value for name, value in os.environ.items() if name not in {"MODEL", "MAX_TOKENS", "PATIENCE"}}
    env |= {"VLLM_API_KEY": KEY, **environment}
    command = [str(SERVING / "smoke.sh"), url, *words]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=100, check=False)


def test_a_server_that_reads_passes_and_its_text_is_shown(stub: StubVllm) -> None:
    done = smoke(stub.v1)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split()[:2] for line in done.stdout.splitlines() if line.startswith("ok")] == [
        ["ok", "health"],
        ["ok", "models"],
        ["ok", "page"],
    ]
    assert "LightOnOCR-2-1B, engine 0.32.0" in done.stdout
    assert "| The Night Catalogue" in done.stdout
    assert "finish_reason stop" in done.stdout


def test_it_sends_the_page_as_it_is_with_the_trained_prompt_and_without_thinking(stub: StubVllm) -> None:
    smoke(stub.url)
    stats = stub.stats()
    page = (SERVING / "page.png").read_bytes()
    assert list(stats["asks"]) == [hashlib.sha256(page).hexdigest()]
    question = stats["last_request"]
    (message,) = question["messages"]
    assert [part["type"] for part in message["content"]] == ["image_url"]
    assert question["chat_template_kwargs"] == {"enable_thinking": False}
    assert question["temperature"] > 0


def test_its_own_page_is_within_the_edge_of_every_model() -> None:
    with Image.open(SERVING / "page.png") as page:
        assert max(page.size) <= min(profile.longest_edge_px for profile in catalogue())


def test_it_goes_through_nginx(front: str) -> None:
    done = smoke(f"{front}/")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_proxy_that_takes_small_bodies_only_is_named(stub: StubVllm, tmp_path: Path) -> None:
    with proxy(stub.url, tmp_path, [("client_max_body_size 50m;", "client_max_body_size 1k;")]) as narrow:
        assert_fails(smoke(narrow), "page", "413: the page is too large")


@pytest.mark.parametrize(
    ("faults", "check", "said"),
    [
        ([], "page", "only 0 of 8 words of the page are in the text"),
        (["loop"], "page", "never came to its end (finish_reason length)"),
        (["null"], "page", "the text is empty"),
        (["garbage"], "page", "the answer is no chat completion"),
        (["half_close"], "page", "the answer is nothing (curl:"),
        (["status=500,message=EngineCore died"], "page", "the answer is 500: {"),
    ],
)
def test_a_server_that_does_not_read_fails_and_is_told_why(
    stub: StubVllm, faults: list[str], check: str, said: str
) -> None:
    stub.configure(faults=faults)
    assert_fails(smoke(stub.url), check, said)


def test_a_server_that_is_loading_a_wrong_key_and_a_wrong_model_are_told_apart(stub: StubVllm) -> None:
    assert_fails(smoke(stub.url, VLLM_API_KEY="wrong"), "models", "answers 401: set VLLM_API_KEY")
    assert_fails(smoke(stub.url, MODEL="other"), "models", "other is not served; served: lightonai/LightOnOCR-2-1B")
    stub.configure(health_status=503)
    assert_fails(smoke(stub.url), "health", "503: it is still loading")


@needs_router
def test_a_router_that_misses_a_server_and_goes_on_with_the_other_passes(tmp_path: Path) -> None:
    with StubVllm("--fault", READS) as one, StubVllm("--fault", READS) as other:
        notices = ("--health-check-interval-secs", "1", "--health-failure-threshold", "1")
        with Router(tmp_path / "router.log", [one.url, other.url], *notices) as router:
            one.kill()
            wait_until(lambda: requests.get(f"{router.url}/health", timeout=30).status_code == 503, "it is missed")
            done = smoke(router.url)
    assert done.returncode == 0, done.stdout
    assert "a router that misses a server" in done.stdout


def test_where_nothing_listens_it_says_so() -> None:
    assert_fails(smoke("http://127.0.0.1:9"), "health", "answers nothing (curl:")


def test_a_page_and_words_of_ones_own_can_be_given(stub: StubVllm, tmp_path: Path) -> None:
    (tmp_path / "page one.png").write_bytes(tagged_png(6))
    page = str(tmp_path / "page one.png")
    assert smoke(stub.url, page).returncode == 0
    assert smoke(stub.url, page, "kettle").returncode == 0
    assert_fails(smoke(stub.url, page, "unicorn"), "page", "only 0 of 1 words")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([""], "no URL of an endpoint but ''"),
        (["localhost:8000"], "no URL of an endpoint but 'localhost:8000'"),
        (["http://127.0.0.1:9", "no-such-page.png"], "can't read the page no-such-page.png"),
        (["http://127.0.0.1:9", "a", "b", "c"], "4 words are too many"),
    ],
)
def test_wrong_words_are_a_usage_error(words: list[str], said: str) -> None:
    done = smoke(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr


def test_the_key_is_on_no_command_line(stub: StubVllm, tmp_path: Path) -> None:
    """Curl's place is taken by a script that writes down its words."""
    spy = tmp_path / "curl"
    spy.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >>"{tmp_path}/words"\nexec {system_tool("curl")} "$@"\n')
    spy.chmod(0o755)
    done = smoke(stub.url, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 0, done.stdout
    assert KEY not in (tmp_path / "words").read_text()


def assert_fails(done: subprocess.CompletedProcess[str], check: str, said: str) -> None:
    """It ended with 1, and its last line says what failed."""
    assert done.returncode == 1, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.split()[:2] == ["FAIL", check]
    assert said in last
