"""A real Prometheus with the repository's configuration, pointed at a server of a test, and asked over its HTTP API."""

from __future__ import annotations

import contextlib
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import requests
import yaml

from tests.runs import PATIENCE_S, ROOT, wait_until
from tests.system_tools import system_tool
from tests.vllm_cpu import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

SERVING = ROOT / "serving"
SCRAPE_S = 1


@dataclass(frozen=True)
class Prometheus:
    """A running Prometheus."""

    url: str

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series that an expression gives now; an expression that Prometheus refuses fails the test."""
        answer = requests.get(f"{self.url}/api/v1/query", params={"query": expression}, timeout=30)
        said = answer.json()
        assert said["status"] == "success", f"{expression}: {said}"
        result: list[dict[str, Any]] = said["data"]["result"]
        return result

    def value(self, expression: str) -> float:
        """The value of the one series that an expression gives."""
        (series,) = self.query(expression)
        return float(series["value"][1])

    def wait_for_scrapes(self, count: int) -> None:
        """Wait until the target was read so often."""
        wait_until(lambda: bool(self.query(f"sum_over_time(up[10m]) >= {count}")), f"{count} scrapes")

    def metric_names(self) -> set[str]:
        """The names of all series that were ever scraped."""
        answer = requests.get(f"{self.url}/api/v1/label/__name__/values", timeout=30)
        return set(answer.json()["data"])

    def rules(self) -> dict[str, dict[str, Any]]:
        """The alert rules as they stand: state, health, last error."""
        groups = requests.get(f"{self.url}/api/v1/rules", timeout=30).json()["data"]["groups"]
        return {rule["name"]: rule for group in groups for rule in group["rules"]}


@contextlib.contextmanager
def watching(target: str, folder: Path) -> Iterator[Prometheus]:
    """Run Prometheus on serving/prometheus.yml, but for the address of the server and the pace."""
    config = yaml.safe_load((SERVING / "prometheus.yml").read_text())
    (scrape,) = config["scrape_configs"]
    assert scrape["static_configs"] == [{"targets": ["vllm:8000"]}]
    scrape["static_configs"] = [{"targets": [target.removeprefix("http://")]}]
    pace = f"{SCRAPE_S}s"
    config["global"] = {"scrape_interval": pace, "scrape_timeout": pace, "evaluation_interval": pace}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    (folder / "alerts.yml").write_bytes((SERVING / "alerts.yml").read_bytes())
    port = free_port()
    command = [
        system_tool("prometheus"),
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/series",
    ]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    with (folder / "prometheus.log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            _wait_until_ready(f"http://127.0.0.1:{port}", process, folder / "prometheus.log")
            yield Prometheus(f"http://127.0.0.1:{port}")
        finally:
            process.kill()


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    give_up_at = time.monotonic() + PATIENCE_S
    while process.poll() is None and time.monotonic() < give_up_at:
        with contextlib.suppress(requests.RequestException):
            if requests.get(f"{url}/-/ready", timeout=5).ok:
                return
        time.sleep(0.1)
    raise RuntimeError(f"Prometheus is not ready (exit code {process.poll()}):\n{log.read_text()[-3000:]}")
