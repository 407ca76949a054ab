"""The stub says what the real vLLM says: shapes of answers, errors and gauges; and its parser takes our flags."""

from __future__ import annotations

import base64
import json
import re
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from src.driver import more_fields
from src.loops import repetition_field
from src.models import catalogue
from tests.stub_vllm import StubVllm, tagged_png
from tests.tiny_lightonocr.drawn import page_with
from tests.vllm_cpu import CpuVllm, TinyServer, cpu_engine_env

pytestmark = pytest.mark.engine

Shape = Any


def shape_of(value: object) -> Shape:
    """Reduce a JSON value to its keys and types; lists to the shape of their first element."""
    if isinstance(value, dict):
        return {key: shape_of(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [shape_of(inner) for inner in value[:1]]
    return type(value).__name__


def question(model: str, image: bytes | None, **more: Any) -> dict[str, Any]:
    url = "http://127.0.0.1:9/x.png" if image is None else "data:image/png;base64," + base64.b64encode(image).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}]
    return {"model": model, "messages": [{"role": "user", "content": content}], "temperature": 0, **more}


@pytest.fixture(scope="module")
def stub(vllm_server: TinyServer) -> Iterator[StubVllm]:
    with StubVllm("--model", vllm_server.model, "--max-model-len", "2048", "--seconds-per-page", "0.01") as server:
        yield server


@pytest.fixture(scope="module")
def urls(vllm_server: TinyServer, stub: StubVllm) -> tuple[str, str]:
    return vllm_server.url, stub.v1


def both(urls: tuple[str, str], path: str, body: object = None) -> list[requests.Response]:
    if body is None:
        return [requests.get(f"{url.removesuffix('/v1')}{path}", timeout=60) for url in urls]
    return [requests.post(f"{url.removesuffix('/v1')}{path}", json=body, timeout=60) for url in urls]


@pytest.mark.parametrize("max_tokens", [400, 3])
def test_an_answer_has_the_same_shape_and_finish_reason(
    urls: tuple[str, str], vllm_server: TinyServer, stub: StubVllm, max_tokens: int
) -> None:
    stub.configure(faults=["truncate"] if max_tokens == 3 else [])
    image = page_with("Two words\nof ink 42").encoded()
    real, ours = both(urls, "/v1/chat/completions", question(vllm_server.model, image, max_tokens=max_tokens, seed=1))
    stub.configure(faults=[])
    assert (real.status_code, ours.status_code) == (200, 200)
    assert shape_of(ours.json()) == shape_of(real.json())
    assert [answer.json()["choices"][0]["finish_reason"] for answer in (real, ours)] == [
        "length" if max_tokens == 3 else "stop"
    ] * 2
    assert set(ours.headers) >= {"Content-Type", "Content-Length"}
    assert ours.headers["Content-Type"] == real.headers["Content-Type"]


def test_the_chosen_tokens_probabilities_have_the_same_shape(urls: tuple[str, str], vllm_server: TinyServer) -> None:
    more = more_fields("vllm 0.32.0", confidence=True)
    image = page_with("Two words\nof ink 42").encoded()
    real, ours = both(urls, "/v1/chat/completions", question(vllm_server.model, image, max_tokens=400, **more))
    assert (real.status_code, ours.status_code) == (200, 200), real.text
    assert shape_of(ours.json()) == shape_of(real.json())
    assert len(real.json()["choices"][0]["logprobs"]["content"]) == real.json()["usage"]["completion_tokens"]


def test_vllm_stops_a_loop_itself_where_the_request_says_so(vllm_server: TinyServer) -> None:
    limits = repetition_field("0.32.0")["repetition_detection"]
    texts = {}
    for name, min_count in (("ours", limits["min_count"]), ("strict", 5)):
        more = {"repetition_detection": {**limits, "min_count": min_count}, "max_tokens": 400}
        body = question(vllm_server.model, page_with("Grain\n" + "a" * 14).encoded(), **more)
        answer = requests.post(
            f"{vllm_server.url.removesuffix('/v1')}/v1/chat/completions", json=body, timeout=60
        ).json()
        texts[name] = (answer["choices"][0]["finish_reason"], answer["choices"][0]["message"]["content"])
    assert texts["ours"][0] == "stop"  # fourteen equal letters are no loop
    assert texts["strict"][0] == "repetition"
    assert texts["ours"][1].startswith(texts["strict"][1])


def test_prompt_tokens_are_counted_alike_per_cell(urls: tuple[str, str], vllm_server: TinyServer) -> None:
    counted = []
    for page in [page_with("abcdefgh ijkl").encoded(), page_with("abcdefgh ijkl\nmnop qrst uvwx").encoded()]:
        answers = both(urls, "/v1/chat/completions", question(vllm_server.model, page, max_tokens=1))
        counted.append([answer.json()["usage"]["prompt_tokens"] for answer in answers])
    growth = [second - first for first, second in zip(*counted, strict=True)]
    assert growth[0] == growth[1] > 0


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"model": "somebody/else"}, id="a model that is not served"),
        pytest.param({"messages": "no list"}, id="a body that does not fit"),
        pytest.param({"max_tokens": 100_000}, id="more tokens than the context"),
        pytest.param({"temperature": -1}, id="a temperature out of range"),
        pytest.param({"image": b"no picture"}, id="a picture that can't be read"),
    ],
)
def test_a_refusal_has_the_same_status_and_shape(
    urls: tuple[str, str], vllm_server: TinyServer, stub: StubVllm, change: dict[str, Any]
) -> None:
    changes = dict(change)
    image = changes.pop("image", tagged_png(1))
    body = {**question(vllm_server.model, image, max_tokens=5), **changes}
    real, ours = both(urls, "/v1/chat/completions", body)
    assert real.status_code >= 400
    assert ours.status_code == real.status_code, (real.text, ours.text)
    assert shape_of(ours.json()) == shape_of(real.json())
    assert ours.json()["error"]["type"] == real.json()["error"]["type"]


def test_health_version_and_models_look_the_same(urls: tuple[str, str], vllm_server: TinyServer) -> None:
    real, ours = both(urls, "/health")
    assert (ours.status_code, ours.content) == (real.status_code, real.content) == (200, b"")
    real, ours = both(urls, "/version")
    assert ours.json() == real.json()
    real, ours = both(urls, "/v1/models")
    assert shape_of(ours.json()) == shape_of(real.json())
    assert [model["id"] for model in real.json()["data"]] == [vllm_server.model]


def test_the_gauges_and_counters_that_the_stub_shows_are_those_of_the_real_server(
    urls: tuple[str, str], vllm_server: TinyServer
) -> None:
    both(urls, "/v1/chat/completions", question(vllm_server.model, page_with("ink").encoded(), max_tokens=5))
    real, ours = (metrics_of(answer.text) for answer in both(urls, "/metrics"))
    assert {"vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"} <= set(ours)
    assert set(ours) <= set(real)
    for name, labels in ours.items():
        assert labels == real[name], name
    reasons = {"stop", "length", "abort", "error", "repetition"}
    assert reasons <= set(re.findall(r'finished_reason="(\w+)"', both(urls, "/metrics")[0].text))


def metrics_of(text: str) -> dict[str, set[str]]:
    """Return each metric of vLLM's and the labels it has."""
    found: dict[str, set[str]] = {}
    for line in text.splitlines():
        if match := re.match(r"(vllm:\w+)\{([^}]*)\}", line):
            found.setdefault(match[1], set()).update(re.findall(r"(\w+)=", match[2]))
    return found


@pytest.mark.timeout(600)
def test_the_real_parser_takes_the_serve_args_of_every_model(cpu_engine: CpuVllm) -> None:
    program = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
for words in json.load(sys.stdin):
    args = parser.parse_args(words)
    print(json.dumps([args.max_model_len, args.limit_mm_per_prompt, args.mm_processor_cache_gb,
                      args.enable_prefix_caching, args.default_chat_template_kwargs]))
"""
    profiles = catalogue()
    commands = [[profile.model_id, *profile.serve_args] for profile in profiles]
    done = subprocess.run(
        [str(cpu_engine.python), "-c", program],
        input=json.dumps(commands),
        env=cpu_engine_env() | {"VLLM_LOGGING_STREAM": "ext://sys.stderr"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    parsed = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(parsed) == len(profiles)
    for profile, (max_model_len, images, cache, prefix_caching, template) in zip(profiles, parsed, strict=True):
        assert str(max_model_len) in profile.serve_args
        assert (images, cache, prefix_caching) == ({"image": 1}, 0, False)
        assert template == (dict(profile.chat_template_kwargs) or None)
