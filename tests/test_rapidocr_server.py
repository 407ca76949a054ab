"""The CPU endpoint, as a client meets it: a process of its own, spoken to over HTTP, with no way out to the network."""

from __future__ import annotations

import base64
import importlib.util
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import requests
from openai import OpenAI
from PIL import Image, ImageDraw, ImageFont, ImageOps
from rapidfuzz.distance import Levenshtein

from tests.test_serving_proxy import smoke

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

pytestmark = pytest.mark.slow  # other programs are started


ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "rapidocr-server.py"
PAGES = ROOT / "examples" / "pages"
TRUTH: dict[str, str] = json.loads((ROOT / "examples" / "truth.json").read_text(encoding="utf-8"))
KEY = "sesame-32"
LONGEST_EDGE_PX = 1540

# Put in the way of every connection that the server's process may try to make.
NO_NETWORK = """
import sys

def refuse(event, args):
    if event == "socket.connect":
        raise OSError(f"the server tried to connect to {args[1]}")

sys.addaudithook(refuse)
sys.stderr.write("no network\\n")
"""


@dataclass(frozen=True)
class Endpoint:
    """A running server, and how to speak to it."""

    process: subprocess.Popen[str]
    url: str
    log: list[str]
    key: str | None = None

    def get(self, path: str) -> requests.Response:
        return requests.get(self.url + path, headers=self.headers, timeout=60)

    def post(self, body: object) -> requests.Response:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return requests.post(self.url + "/v1/chat/completions", data=data, headers=self.headers, timeout=120)

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def metric(self, name: str) -> float:
        line = next(line for line in self.get("/metrics").text.splitlines() if line.startswith(f"vllm:{name}"))
        return float(line.split()[-1])

    def finished(self, reason: str) -> float:
        return self.metric(f'request_success_total{{engine="0",finished_reason="{reason}"')


def start(log: list[str], *arguments: str, key: str | None = None, path: Path | None = None) -> Endpoint:
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_API_KEY"}
    environment |= {"VLLM_API_KEY": key} if key else {}
    environment |= {"PYTHONPATH": str(path)} if path else {}
    command = [sys.executable, str(SCRIPT), "--port", "0", *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    for line in process.stderr:
        log.append(line)
        if found := re.search(r"listening on (http://[^/]+)/v1", line):
            return Endpoint(process, found[1], log, key)
    raise AssertionError("the server ended:\n" + "".join(log))


def stop(endpoint: Endpoint) -> None:
    endpoint.process.terminate()
    try:
        endpoint.process.wait(60)
    finally:
        endpoint.process.kill()
        endpoint.process.wait()
        assert endpoint.process.stderr is not None
        endpoint.log.append(endpoint.process.stderr.read())
        endpoint.process.stderr.close()


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("media")
    outside = tmp_path_factory.mktemp("outside")
    drawn("The way out").save(outside / "secret.png")
    drawn("Inside").save(directory / "inside.png")
    (directory / "deeper").mkdir()
    drawn("Deeper inside").save(directory / "deeper" / "page 1.png")
    (directory / "link.png").symlink_to(outside / "secret.png")
    (directory / "linked").symlink_to(outside)
    (directory.parent / (directory.name + "-sibling.png")).write_bytes((outside / "secret.png").read_bytes())
    return directory


@pytest.fixture(scope="module")
def endpoint(media: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    path = tmp_path_factory.mktemp("path")
    (path / "sitecustomize.py").write_text(NO_NETWORK)
    started = start([], "--threads", "2", "--allowed-local-media-path", str(media), key=KEY, path=path)
    yield started
    stop(started)


@pytest.fixture(scope="module")
def texts(endpoint: Endpoint) -> dict[str, str]:
    """What the server reads on each example page."""
    with ThreadPoolExecutor(4) as pool:
        answers = pool.map(lambda name: endpoint.post(asking(data_url(prepared(PAGES / name)))), TRUTH)
        return {name: text_of(answer) for name, answer in zip(TRUTH, answers, strict=True)}


def drawn(text: str, size: tuple[int, int] = (700, 160)) -> Image.Image:
    image = Image.new("RGB", size, "white")
    ImageDraw.Draw(image).text((60, 50), text, fill="black", font=ImageFont.load_default(48))
    return image


def data_url(image: Image.Image, kind: str = "PNG") -> str:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def asking(url: str, **more: object) -> dict[str, object]:
    content = [{"type": "image_url", "image_url": {"url": url}}]
    return {"model": "rapidocr", "messages": [{"role": "user", "content": content}], **more}


def text_of(response: requests.Response) -> str:
    assert response.status_code == 200, response.text
    text = response.json()["choices"][0]["message"]["content"]
    assert isinstance(text, str)
    return text


def error_of(response: requests.Response, status: int = 400) -> str:
    """Check that an error looks as vLLM's do, and return its message."""
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    assert isinstance(error["message"], str)
    return error["message"]


def prepared(path: Path) -> Image.Image:
    """Prepare a page in the plainest way: upright, on white, 8 bits, no longer than the model's edge."""
    with Image.open(path) as image:
        page = ImageOps.exif_transpose(image)
    if page.mode == "I;16":
        page = page.convert("I").point(lambda value: value / 257).convert("L")
    if page.mode == "RGBA":
        page = Image.alpha_composite(Image.new("RGBA", page.size, "white"), page)
    page = page.convert("RGB")
    page.thumbnail((LONGEST_EDGE_PX, LONGEST_EDGE_PX), Image.Resampling.LANCZOS)
    return page


def character_error_rate(text: str, true_text: str) -> float:
    text, true_text = " ".join(text.split()), " ".join(true_text.split())
    return Levenshtein.distance(text, true_text) / len(true_text)


# --- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, text in TRUTH.items() if text])
def test_a_clean_example_page_is_read_nearly_without_error(texts: dict[str, str], name: str) -> None:
    assert character_error_rate(texts[name], TRUTH[name]) <= 0.05, texts[name]


@pytest.mark.parametrize("name", ["05-letter-sideways.jpg", "06-transparent.png", "07-scan-16bit.png"])
def test_a_page_is_read_as_well_when_the_server_has_to_prepare_it(endpoint: Endpoint, name: str) -> None:
    url = f"data:image/*;base64,{base64.b64encode((PAGES / name).read_bytes()).decode()}"
    assert character_error_rate(text_of(endpoint.post(asking(url))), TRUTH[name]) <= 0.05


def test_a_blank_page_gives_empty_text(texts: dict[str, str]) -> None:
    assert texts["08-blank.jpg"] == ""


def test_accents_come_back(texts: dict[str, str]) -> None:
    assert set("éèàôîçüäößñ¿ãõêùåøæ") <= set(texts["04-accents.png"])


def test_two_columns_are_read_one_after_the_other_and_table_rows_across(texts: dict[str, str]) -> None:
    assert texts["02-columns.png"].index("cake in it") < texts["02-columns.png"].index("Visitors ask")
    assert "\nPoetry 138 152 126 203\n" in texts["03-table.png"]


def test_paragraphs_come_back_apart(texts: dict[str, str]) -> None:
    paragraphs = [" ".join(paragraph.split()) for paragraph in texts["01-title.png"].split("\n\n")]
    assert len(paragraphs) == len(TRUTH["01-title.png"].split("\n\n"))


def test_an_answer_has_the_shape_of_a_chat_completion(endpoint: Endpoint) -> None:
    answer = endpoint.post(asking(data_url(drawn("Hello reader")), temperature=0.2, max_tokens=4096, seed=1)).json()
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["model"] == "rapidocr"
    assert answer["choices"][0]["message"] == {
        "role": "assistant",
        "content": "Hello reader",
        "refusal": None,
        "tool_calls": [],
    }
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"] == {"prompt_tokens": 25 * 6, "completion_tokens": 3, "total_tokens": 25 * 6 + 3}


def test_the_openai_client_understands_it(endpoint: Endpoint) -> None:
    with OpenAI(base_url=endpoint.url + "/v1", api_key=KEY) as client:
        answer = client.chat.completions.create(**asking(data_url(drawn("Hello client"), "JPEG")))  # type: ignore[call-overload]
        assert answer.choices[0].message.content == "Hello client"
        assert [model.id for model in client.models.list()] == ["rapidocr"]
        streamed = asking(data_url(drawn("Hello stream"), "JPEG"), stream=True)
        chunks = list(client.chat.completions.create(**streamed))  # type: ignore[call-overload]
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == "Hello stream"
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices] == [None, "stop"]
    assert chunks[-1].usage.completion_tokens > 0


# --- what it says of itself ------------------------------------------------------------------------------------------


def test_the_smoke_test_of_endpoints_passes_on_it(endpoint: Endpoint) -> None:
    done = smoke(endpoint.url, VLLM_API_KEY=KEY)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| The Night Catalogue" in done.stdout


def test_it_says_that_it_is_not_lightonocr(endpoint: Endpoint) -> None:
    model = endpoint.get("/v1/models").json()["data"][0]
    assert model["id"] == "rapidocr"
    assert model["root"] == "rapidocr 3.10.0 PP-OCRv6 small"
    assert model["max_model_len"] == 16384
    assert "not LightOnOCR" in model["owned_by"]
    assert "This is not LightOnOCR" in "".join(endpoint.log)
    assert "This is not LightOnOCR" in SCRIPT.read_text()[:2000]


def test_no_connection_was_possible_while_it_loaded_its_models(endpoint: Endpoint) -> None:
    assert endpoint.log[0] == "no network\n"
    assert endpoint.get("/health").status_code == 200


def test_health_and_version_need_no_key(endpoint: Endpoint) -> None:
    health = requests.get(endpoint.url + "/health", timeout=10)
    assert (health.status_code, health.content) == (200, b"")
    assert "rapidocr" in requests.get(endpoint.url + "/version", timeout=10).json()["version"]


def test_the_metrics_have_the_names_of_vllm(endpoint: Endpoint) -> None:
    before = endpoint.finished("stop")
    endpoint.post(asking(data_url(drawn("One more"))))
    assert endpoint.finished("stop") == before + 1
    assert endpoint.metric("kv_cache_usage_perc") == 0.0
    assert endpoint.metric("num_requests_running") == 0.0
    assert endpoint.metric("num_requests_waiting") == 0.0


def test_help_needs_nothing_installed() -> None:
    command = [sys.executable, "-S", "-I", str(SCRIPT), "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert shown.startswith("usage: rapidocr-server.py")
    assert "VLLM_API_KEY" in shown


def test_an_option_may_not_be_abbreviated_and_no_key_be_given_as_one() -> None:
    for option in ("--thr", "--api-key"):
        done = subprocess.run([sys.executable, str(SCRIPT), option, "3"], capture_output=True, text=True, timeout=60)
        assert done.returncode == 2
        assert option in done.stderr


# --- the key ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer wrong", f"Basic {KEY}", KEY, f"Bearer {KEY}x"])
def test_without_the_key_v1_answers_401(endpoint: Endpoint, header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header}
    for response in (
        requests.get(endpoint.url + "/v1/models", headers=headers, timeout=10),
        requests.post(endpoint.url + "/v1/chat/completions", headers=headers, data=b"{}", timeout=10),
    ):
        assert response.status_code == 401
        assert response.json() == {"error": "Unauthorized"}


def test_the_key_is_never_shown(endpoint: Endpoint) -> None:
    assert KEY not in "".join(endpoint.log)
    assert KEY not in endpoint.get("/metrics").text + endpoint.get("/v1/models").text


# --- refusals --------------------------------------------------------------------------------------------------------


def test_another_model_is_not_found(endpoint: Endpoint) -> None:
    body = asking(data_url(drawn("x"))) | {"model": "lightonai/LightOnOCR-2-1B"}
    assert error_of(endpoint.post(body), 404) == "The model `lightonai/LightOnOCR-2-1B` does not exist."
    assert "does not exist" in error_of(endpoint.post(body | {"model": "\ud800"}), 404)


def test_an_unknown_path_and_a_wrong_method_are_errors_of_the_same_shape(endpoint: Endpoint) -> None:
    error_of(endpoint.get("/v1/nothing"), 404)
    error_of(endpoint.get("/v1/chat/completions"), 405)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        ([], "must be a JSON object"),
        ({"model": "rapidocr"}, "`messages`"),
        ({"messages": []}, "`messages`"),
        ({"messages": ["page"]}, "`messages`"),
        ({"messages": [{"role": "user", "content": "read this"}]}, "No image"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": 5}]}]}, "`url`"),
        (asking("data:image/png;base64,AAAA", n=2), "one answer"),
        (asking("data:image/png;base64,????"), "base64"),
        (asking("data:image/png,plain"), "data URL"),
        (asking("data:image/png;base64,"), "Failed to load image"),
        (asking("data:image/png;base64,AAAA"), "Failed to load image"),
        (asking("http://127.0.0.1:1/page.png"), "fetches nothing"),
        (asking("https://example.org/page.png"), "fetches nothing"),
        (asking("ftp://example.org/page.png"), "fetches nothing"),
        (asking("/etc/passwd"), "fetches nothing"),
        (asking("file://[half"), "names no file"),
        (asking("http://\ud800"), "fetches nothing"),
        (asking(""), "fetches nothing"),
    ],
)
def test_a_request_that_makes_no_sense_is_a_400_that_says_why(endpoint: Endpoint, body: object, message: str) -> None:
    assert message in error_of(endpoint.post(body))


def test_two_images_are_one_too_many(endpoint: Endpoint) -> None:
    part = {"type": "image_url", "image_url": {"url": data_url(drawn("x"))}}
    body = {"messages": [{"role": "user", "content": [part, part]}]}
    assert "At most 1 image" in error_of(endpoint.post(body))


def test_a_truncated_picture_is_a_400(endpoint: Endpoint) -> None:
    raw = (PAGES / "05-letter-sideways.jpg").read_bytes()[:20_000]
    url = f"data:image/jpeg;base64,{base64.b64encode(raw).decode()}"
    assert "Failed to load image" in error_of(endpoint.post(asking(url)))


def test_a_vector_format_is_not_opened(endpoint: Endpoint) -> None:
    url = "data:image/eps;base64," + base64.b64encode(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n").decode()
    assert "Failed to load image" in error_of(endpoint.post(asking(url)))


def test_too_many_pixels_are_refused_before_they_are_decoded(endpoint: Endpoint) -> None:
    message = error_of(endpoint.post(asking(data_url(Image.new("1", (20_000, 20_000))))))
    assert "20000 x 20000" in message
    assert "100 megapixels" in message


def test_a_body_that_is_too_large_is_a_413(endpoint: Endpoint) -> None:
    assert "67108864" in error_of(endpoint.post(b" " * (64 * 1024 * 1024 + 1)), 413)


# --- local files -----------------------------------------------------------------------------------------------------


def test_a_file_below_the_allowed_directory_is_read(endpoint: Endpoint, media: Path) -> None:
    assert text_of(endpoint.post(asking(f"file://{media}/inside.png"))) == "Inside"
    assert text_of(endpoint.post(asking(f"file://localhost{media}/inside.png"))) == "Inside"
    assert text_of(endpoint.post(asking((media / "deeper" / "page 1.png").as_uri()))) == "Deeper inside"


@pytest.mark.parametrize(
    "path",
    [
        "{media}/link.png",
        "{media}/linked/secret.png",
        "{media}/../outside0/secret.png",
        "{media}/deeper/../../outside0/secret.png",
        "{media}/%2e%2e/outside0/secret.png",
        "{media}-sibling.png",
        "{media}",
        "/etc/passwd",
        "",
    ],
)
def test_no_path_leads_out_of_the_allowed_directory(endpoint: Endpoint, media: Path, path: str) -> None:
    url = "file://" + path.format(media=media)
    assert "is not below `--allowed-local-media-path" in error_of(endpoint.post(asking(url)))


def test_a_file_that_is_not_there_or_not_an_image_is_a_400(endpoint: Endpoint, media: Path) -> None:
    (media / "notes.txt").write_text("not a picture")
    assert "There is no file" in error_of(endpoint.post(asking(f"file://{media}/none.png")))
    assert "There is no file" in error_of(endpoint.post(asking(f"file://{media}/deeper")))
    assert "Failed to load image" in error_of(endpoint.post(asking(f"file://{media}/notes.txt")))
    assert "names no file" in error_of(endpoint.post(asking(f"file://{media}/nul%00.png")))
    assert "local file" in error_of(endpoint.post(asking(f"file://elsewhere{media}/inside.png")))


# --- many at once ----------------------------------------------------------------------------------------------------


def test_eight_requests_on_two_threads_are_all_answered_and_two_run_at_a_time(endpoint: Endpoint) -> None:
    pages = [drawn(f"Page number {number}", (700 + number, 1000)) for number in range(8)]
    running, waiting = [0.0], [0.0]
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            running.append(endpoint.metric("num_requests_running"))
            waiting.append(endpoint.metric("num_requests_waiting"))
            time.sleep(0.02)

    watcher = threading.Thread(target=watch)
    watcher.start()
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda page: text_of(endpoint.post(asking(data_url(page)))), pages))
    done.set()
    watcher.join()
    assert texts == [f"Page number {number}" for number in range(8)]
    assert max(running) == 2.0
    assert max(waiting) >= 1.0
    assert endpoint.metric("num_requests_running") == endpoint.metric("num_requests_waiting") == 0.0


def test_a_client_that_hangs_up_while_waiting_costs_nothing(endpoint: Endpoint) -> None:
    before, read_before, clients = arrived(endpoint), endpoint.finished("stop"), 12
    body = json.dumps(asking(data_url(prepared(PAGES / "01-title.png")))).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
    host, port = endpoint.url.removeprefix("http://").split(":")
    connections = [socket.create_connection((host, int(port))) for _ in range(clients)]
    for connection in connections:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    while arrived(endpoint) < before + clients:
        time.sleep(0.01)
    for connection in connections:
        connection.close()
    while endpoint.metric("num_requests_running") + endpoint.metric("num_requests_waiting") > 0:
        time.sleep(0.05)
    while arrived(endpoint) < before + clients:
        time.sleep(0.05)
    assert endpoint.finished("stop") - read_before < clients
    assert text_of(endpoint.post(asking(data_url(drawn("Still here"))))) == "Still here"


def arrived(endpoint: Endpoint) -> float:
    """Count the requests that the server has taken in, whatever became of them."""
    now = endpoint.metric("num_requests_running") + endpoint.metric("num_requests_waiting")
    return now + endpoint.finished("stop") + endpoint.finished("abort")


# --- a process of its own --------------------------------------------------------------------------------------------


def test_without_a_key_or_a_directory_it_is_open_and_reads_no_file() -> None:
    endpoint = start([], "--threads", "1")
    try:
        assert endpoint.get("/v1/models").status_code == 200
        message = error_of(endpoint.post(asking(f"file://{PAGES}/01-title.png")))
        assert message == "Cannot load local files without `--allowed-local-media-path`."
        sigterm_ends_it_though_many_wait(endpoint)
    finally:
        stop(endpoint)
    assert "Traceback" not in "".join(endpoint.log)


def sigterm_ends_it_though_many_wait(endpoint: Endpoint) -> None:
    body = asking(data_url(prepared(PAGES / "01-title.png")))
    with ThreadPoolExecutor(30) as pool:
        answers = [pool.submit(endpoint.post, body) for _ in range(30)]
        while arrived(endpoint) < 25:
            time.sleep(0.01)
        endpoint.process.terminate()
        assert endpoint.process.wait(60) == -signal.SIGTERM
    statuses = [answer.result().status_code for answer in answers if answer.exception() is None]
    assert set(statuses) <= {200, 503}
    assert 503 in statuses


def test_a_port_that_is_taken_is_said_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, str(SCRIPT), "--port", port]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert f"port {port}" in done.stderr
    assert "--port" in done.stderr
    assert done.stderr.count("\n") == 1


# --- reading order ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rapidocr_server", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["rapidocr_server"] = module
    spec.loader.exec_module(module)
    return module


def stack(module: ModuleType, words: str, left: float, width: float, top: float = 100, pitch: float = 30) -> list[Any]:
    """Set words under each other, each as a line of its own."""
    return [
        module.Line(word, left, top + pitch * row, left + width, top + pitch * row + 22)
        for row, word in enumerate(words.split())
    ]


def test_columns_are_read_in_turn_below_their_title_and_above_their_foot(server_module: ModuleType) -> None:
    lines = stack(server_module, "a b c d e", 100, 400) + stack(server_module, "f g h i j", 560, 400)
    lines += [server_module.Line("Title", 250, 20, 800, 60), server_module.Line("Foot", 300, 400, 700, 422)]
    expected = ["Title", "a b c d e", "f g h i j", "Foot"]
    for given in (lines, lines[::-1]):
        assert [" ".join(block.split()) for block in server_module.reading_order(given).split("\n\n")] == expected


def test_three_columns_are_read_in_turn(server_module: ModuleType) -> None:
    lines = stack(server_module, "i j k l", 700, 250)
    lines += stack(server_module, "a b c d", 100, 250) + stack(server_module, "e f g h", 400, 250)
    assert server_module.reading_order(lines).split() == list("abcdefghijkl")


def test_columns_whose_lines_stand_at_different_heights_are_columns_still(server_module: ModuleType) -> None:
    lines = stack(server_module, "a b c d e", 100, 400) + stack(server_module, "f g h i", 560, 400, 113, 37)
    assert server_module.reading_order(lines).split() == list("abcdefghi")


def test_a_table_is_read_row_by_row(server_module: ModuleType) -> None:
    lines = [
        server_module.Line(f"{column}{row}", 100 + 200 * column, 100 + 40 * row, 160 + 200 * column, 122 + 40 * row)
        for column in range(4)
        for row in range(6)
    ]
    assert server_module.reading_order(lines) == "\n".join(" ".join(f"{c}{r}" for c in range(4)) for r in range(6))


def test_a_wide_gap_or_larger_letters_begin_a_new_paragraph(server_module: ModuleType) -> None:
    lines = stack(server_module, "a b c", 100, 500) + stack(server_module, "d e f", 100, 500, 215)
    assert server_module.reading_order(lines) == "a\nb\nc\n\nd\ne\nf"
    title = server_module.Line("T", 100, 50, 500, 90)
    assert server_module.reading_order([title, *lines]).startswith("T\n\na\nb")


def test_a_page_without_lines_is_empty_text(server_module: ModuleType) -> None:
    assert server_module.reading_order([]) == ""
