"""A real Prometheus reads the stub and the real vLLM: alerts and dashboard ask for gauges that are there."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest
import requests
import yaml

from tests.prometheus import SERVING, Prometheus, watching
from tests.runs import wait_until
from tests.stub_vllm import StubVllm, tagged_png
from tests.test_serving_proxy import ask, smoke
from tests.tiny_lightonocr.drawn import drawn_pages
from tests.vllm_cpu import CpuVllm, TinyServer, read_pages, serve_tiny

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow  # other programs are started


METRIC = re.compile(r"\b(?:vllm:\w+|up|ALERTS)\b")
# Prometheus makes these itself; a firing alert is not there while all is well.
OF_PROMETHEUS = {"up", "ALERTS"}
# Of real servers only: the stub and rapidocr-server.py count, but measure no times.
NOT_IN_THE_STUB = {
    "vllm:num_preemptions_total",
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:request_queue_time_seconds_bucket",
}


def alert_expressions() -> dict[str, str]:
    """Each alert's condition, by its name."""
    groups = yaml.safe_load((SERVING / "alerts.yml").read_text())["groups"]
    return {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}


def measured_part(expression: str) -> str:
    """The condition of an alert without its threshold: what has a value while all is well, too."""
    return re.sub(r"\s*(==|>|<)\s*(0|[\d.]+|clamp_min\(.*\))(?=\s|$)", "", expression)


def dashboard_queries() -> dict[str, str]:
    """Each query of the dashboard, by the title of its panel and its letter; Grafana's interval made a fixed one."""
    board = json.loads((SERVING / "grafana/dashboard.json").read_text())
    return {
        f"{panel['title']} {target['refId']}": target["expr"].replace("$__rate_interval", "1m")
        for panel in board["panels"]
        for target in panel["targets"]
    }


def names_in(expression: str) -> set[str]:
    """The metrics that an expression asks for."""
    return set(METRIC.findall(expression))


EXPRESSIONS = {
    name: measured_part(expression) for name, expression in alert_expressions().items()
} | dashboard_queries()


def test_the_part_of_an_alert_that_is_measured_is_found() -> None:
    assert measured_part("sum(a) > 0\nand sum(b) == 0") == "sum(a)\nand sum(b)"
    assert measured_part("sum by (x) (a) > clamp_min(sum by (x) (b), 1)") == "sum by (x) (a)"
    for name, expression in alert_expressions().items():
        assert measured_part(expression) != expression, name


def assert_all_have_series(prometheus: Prometheus, expressions: dict[str, str]) -> None:
    """Every expression is understood and has a value of something that was scraped."""
    empty = [name for name, expression in expressions.items() if not prometheus.query(expression)]
    assert empty == []


# --- the stub --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stub() -> Iterator[StubVllm]:
    with StubVllm("--max-num-seqs", "1") as running:
        yield running


@pytest.fixture(scope="module")
def prometheus(stub: StubVllm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    with watching(stub.url, tmp_path_factory.mktemp("prometheus")) as running:
        ask(stub.url, tagged_png(1), key="")
        running.wait_for_scrapes(2)
        ask(stub.url, tagged_png(2), key="")
        running.wait_for_scrapes(4)
        yield running


def test_every_metric_that_is_asked_for_is_one_of_the_stubs_or_of_real_servers_only(prometheus: Prometheus) -> None:
    asked = set().union(*map(names_in, [*alert_expressions().values(), *dashboard_queries().values()]))
    assert asked - prometheus.metric_names() - OF_PROMETHEUS == NOT_IN_THE_STUB


def test_alerts_and_panels_have_series_where_the_stub_has_the_metric(prometheus: Prometheus) -> None:
    there = {name: text for name, text in EXPRESSIONS.items() if not names_in(text) & NOT_IN_THE_STUB}
    assert len(there) > len(EXPRESSIONS) / 2
    assert_all_have_series(prometheus, there)
    for expression in EXPRESSIONS.values():
        prometheus.query(expression)  # Prometheus understands it


def test_the_numbers_are_those_that_the_server_counted(prometheus: Prometheus, stub: StubVllm) -> None:
    assert prometheus.value(dashboard_queries()["Pages so far A"]) == stub.stats()["completions"] == 2
    assert prometheus.value('up{job="vllm"}') == 1


def test_the_rules_are_in_health_and_quiet_while_all_is_well(prometheus: Prometheus) -> None:
    rules = prometheus.rules()
    wait_until(lambda: all(rule["health"] == "ok" for rule in prometheus.rules().values()), "all rules are evaluated")
    assert rules.keys() == alert_expressions().keys()
    assert {name: rule["state"] for name, rule in prometheus.rules().items() if rule["state"] != "inactive"} == {}


def test_a_server_that_dies_makes_its_alert_wait_to_fire(tmp_path: Path) -> None:
    with StubVllm() as mortal, watching(mortal.url, tmp_path) as prometheus:
        prometheus.wait_for_scrapes(1)
        mortal.kill()
        wait_until(lambda: prometheus.rules()["ServerDown"]["state"] == "pending", "ServerDown is pending")


# --- the real vLLM ---------------------------------------------------------------------------------------------------


@pytest.mark.engine
def test_every_alert_and_panel_has_series_of_the_real_vllm(vllm_server: TinyServer, tmp_path: Path) -> None:
    pages = [page.encoded() for page in drawn_pages(8)]
    with watching(vllm_server.url.removesuffix("/v1"), tmp_path) as prometheus:
        read_pages(vllm_server, pages)
        prometheus.wait_for_scrapes(2)
        read_pages(vllm_server, pages)
        prometheus.wait_for_scrapes(5)
        asked = set().union(*map(names_in, [*alert_expressions().values(), *dashboard_queries().values()]))
        assert asked - prometheus.metric_names() - OF_PROMETHEUS == set()
        assert_all_have_series(prometheus, EXPRESSIONS)
        assert prometheus.value(dashboard_queries()["Pages so far A"]) >= 16
        assert prometheus.value(dashboard_queries()["Seconds to a whole text A"]) > 0
        reasons = {series["metric"]["finished_reason"] for series in prometheus.query("vllm:request_success_total")}
        assert reasons == {"stop", "length", "abort", "error", "repetition"}
        assert {rule["health"] for rule in prometheus.rules().values()} == {"ok"}


@pytest.mark.engine
def test_the_smoke_test_passes_on_the_real_vllm_and_its_key_guards_the_api_alone(
    cpu_engine: CpuVllm, tmp_path: Path
) -> None:
    page = drawn_pages(2)[1]
    (tmp_path / "page.png").write_bytes(page.encoded())
    with serve_tiny(tmp_path / "serve.log", extra_env={"VLLM_API_KEY": "sesame-9"}) as server:
        base = server.url.removesuffix("/v1")
        done = smoke(base, str(tmp_path / "page.png"), page.text, VLLM_API_KEY="sesame-9")
        assert done.returncode == 0, done.stdout + done.stderr
        assert smoke(base, VLLM_API_KEY="wrong").returncode == 1
        codes = {
            path: requests.get(base + path, timeout=30).status_code for path in ("/v1/models", "/metrics", "/version")
        }
        assert codes == {"/v1/models": 401, "/metrics": 200, "/version": 200}
