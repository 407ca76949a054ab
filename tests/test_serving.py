"""serving/: its files fit each other and models.json, and the programs that they are for accept them."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from src.models import catalogue, find_profile
from tests.prometheus import SERVING
from tests.runs import ROOT
from tests.system_tools import system_tool

if TYPE_CHECKING:
    from pathlib import Path

UNIT_TESTS = ROOT / "tests" / "alerts.test.yml"
COMPOSE = SERVING / "docker-compose.yml"
NEEDED = {"VLLM_API_KEY": "sesame", "GRAFANA_PASSWORD": "sesame"}
GRID_COLUMNS = 24


def run(*command: str | Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, with its output."""
    environment = {name: value for name, value in os.environ.items() if name not in NEEDED} | (env or {})
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)


# --- Prometheus: configuration and alerts ----------------------------------------------------------------------------


def test_prometheus_accepts_its_configuration_and_the_alerts() -> None:
    done = run(system_tool("promtool"), "check", "config", SERVING / "prometheus.yml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_alerts_fire_and_are_quiet_as_their_unit_tests_say() -> None:
    done = run(system_tool("promtool"), "test", "rules", UNIT_TESTS)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_unit_test_in_which_it_fires_and_one_in_which_it_is_quiet() -> None:
    alerts = [rule["alert"] for group in read_yaml(SERVING / "alerts.yml")["groups"] for rule in group["rules"]]
    tests = [one for test in read_yaml(UNIT_TESTS)["tests"] for one in test["alert_rule_test"]]
    assert sorted({test["alertname"] for test in tests if test["exp_alerts"]}) == sorted(alerts)
    assert sorted({test["alertname"] for test in tests if not test["exp_alerts"]}) == sorted(alerts)


# --- Docker Compose --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    """The services as Docker Compose understands them, checked by its own schema."""
    done = run(system_tool("docker-compose"), "-f", COMPOSE, "config", env=NEEDED)
    assert done.returncode == 0, done.stderr
    resolved: dict[str, Any] = yaml.safe_load(done.stdout)["services"]
    return resolved


def test_the_model_is_served_with_the_image_and_the_flags_of_its_profile(services: dict[str, Any]) -> None:
    vllm = services["vllm"]
    model, *flags = vllm["command"]
    match = find_profile(model)
    assert match.how == "catalogue"
    assert vllm["image"] == match.profile.image
    assert vllm["entrypoint"] == ["vllm", "serve"]
    assert flags == [*match.profile.serve_args, "--host", "0.0.0.0", "--port", "8000"]


def test_nothing_listens_beyond_loopback_and_vllm_is_not_published_at_all(services: dict[str, Any]) -> None:
    assert "ports" not in services["vllm"]
    published = [port for service in services.values() for port in service.get("ports", [])]
    assert len(published) == 3
    assert all(str(port).startswith("127.0.0.1:") for port in published), published


@pytest.mark.parametrize("name", sorted(NEEDED))
def test_without_a_key_or_a_password_nothing_starts(name: str) -> None:
    others = {key: value for key, value in NEEDED.items() if key != name}
    done = run(system_tool("docker-compose"), "-f", COMPOSE, "config", env=others)
    assert done.returncode != 0
    assert "set it to the" in done.stderr


def test_the_services_find_each_other(services: dict[str, Any]) -> None:
    (scrape,) = read_yaml(SERVING / "prometheus.yml")["scrape_configs"]
    assert scrape["static_configs"] == [{"targets": ["vllm:8000"]}]
    assert "server vllm:8000;" in (SERVING / "nginx.conf").read_text()
    (source,) = read_yaml(SERVING / "grafana/provisioning/datasources/prometheus.yml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert source["jsonData"]["timeInterval"] == read_yaml(SERVING / "prometheus.yml")["global"]["scrape_interval"]
    (provider,) = read_yaml(SERVING / "grafana/provisioning/dashboards/files.yml")["providers"]
    mounts = [str(volume).split(":")[:2] for volume in services["grafana"]["volumes"]]
    assert any(inside.startswith(f"{provider['options']['path']}/") for _, inside in mounts)
    assert services["nginx"]["depends_on"] == {"vllm": {"condition": "service_healthy"}}
    assert {"vllm", "prometheus"} <= services.keys()


def test_every_file_that_is_mounted_is_there(services: dict[str, Any]) -> None:
    sources = [str(mount).split(":")[0] for service in services.values() for mount in service.get("volumes", [])]
    files = [source for source in sources if source.startswith("/")]
    assert len(files) == 5
    assert [source for source in files if not os.path.exists(source)] == []  # noqa: PTH110 - words of Docker's


def test_every_image_is_pinned_and_prometheus_and_nginx_are_those_of_the_tests(services: dict[str, Any]) -> None:
    tags = {name: service["image"].partition(":")[2] for name, service in services.items()}
    assert all(re.fullmatch(r"v?\d+\.\d+\.\d+", tag) for tag in tags.values()), tags
    debian = [run(system_tool("prometheus"), "--version"), run(system_tool("nginx"), "-v")]
    said = " ".join(done.stdout + done.stderr for done in debian)
    if "debian" in said:  # elsewhere other versions are installed
        assert f"version {tags['prometheus'].removeprefix('v')}" in said
        assert f"nginx/{tags['nginx']}" in said


# --- Grafana ---------------------------------------------------------------------------------------------------------


def test_the_panels_lie_side_by_side_and_ask_the_provisioned_source() -> None:
    board = json.loads((SERVING / "grafana/dashboard.json").read_text())
    (source,) = read_yaml(SERVING / "grafana/provisioning/datasources/prometheus.yml")["datasources"]
    panels = board["panels"]
    assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1))
    assert len({panel["title"] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["type"] in {"stat", "timeseries"}
        assert panel["description"]
        asked = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
        assert asked == [{"type": source["type"], "uid": source["uid"]}] * len(asked)
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= GRID_COLUMNS
    for one, other in itertools.combinations([panel["gridPos"] for panel in panels], 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or below, (one, other)


# --- Ascend ----------------------------------------------------------------------------------------------------------


def test_ascend_sh_starts_vllm_with_the_recorded_environment_and_the_users_words_last(tmp_path: Path) -> None:
    fake = tmp_path / "vllm"
    fake.write_text('#!/bin/sh\nenv\nprintf "word %s\\n" "$@"\n')
    fake.chmod(0o755)
    here = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "ASCEND_RT_VISIBLE_DEVICES": "3"}
    done = run(SERVING / "ascend.sh", "--port", "9000", env=here)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    platforms = json.loads((ROOT / "models.json").read_text())["platforms"]
    (ascend,) = [platform for platform in platforms if platform["id"] == "ascend"]
    recorded = {name: value for fact in ascend["environment"] for name, value in fact["value"].items()}
    recorded["ASCEND_RT_VISIBLE_DEVICES"] = "3"  # the user's own
    assert {f"{name}={value}" for name, value in recorded.items()} <= set(lines)
    words = [line.removeprefix("word ") for line in lines if line.startswith("word ")]
    assert words[0] == "serve"
    assert words[1] in {profile.model_id for profile in catalogue()}
    assert words[-2:] == ["--port", "9000"]
    (flags,) = [shlex.split(fact["value"]) for fact in ascend["flags"]]
    for flag, value in zip(flags, [*flags[1:], ""], strict=True):
        if flag.startswith("--"):
            assert words[words.index(flag) + 1] == value or value.startswith("--"), flag


def test_ascend_sh_without_vllm_says_what_is_missing(tmp_path: Path) -> None:
    for tool in ("sh", "env"):
        (tmp_path / tool).symlink_to(f"/bin/{tool}")
    done = run(SERVING / "ascend.sh", env={"PATH": str(tmp_path)})
    assert done.returncode == 2
    assert "install vLLM-Ascend" in done.stderr


def read_yaml(path: Path) -> Any:
    """Read a YAML file."""
    return yaml.safe_load(path.read_text())
