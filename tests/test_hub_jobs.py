"""Jobs of the Hub stand-in, as the real `huggingface_hub` sees them: submitted, listed, followed, executed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from tests.hub_here import hub_here
from tests.hub_state import PR_TOKEN, READ_TOKEN, WRITE_TOKEN
from tests.runs import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.hub_server import HubServer

pytestmark = pytest.mark.timeout(90)

PRELUDE = """
import json
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
api = HfApi()
def run(code, **more):
    return api.run_job(image="python:3.12", command=["python", "-c", code], **more)
def status_of(call, *args, **more):
    try:
        call(*args, **more)
    except HfHubHTTPError as error:
        return error.response.status_code
"""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    with hub_here(monkeypatch, tmp_path / "home") as server:
        yield server


def client(code: str, token: str | None = WRITE_TOKEN) -> Any:
    """Run `code` with the real client, and give back what it left in `result`."""
    scope: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HF_TOKEN", token or "")
        exec(PRELUDE + code, scope)
    return scope["result"]


def test_a_job_is_submitted_followed_and_found_again(hub: HubServer) -> None:
    code = """
job = run("import os; print(os.environ['A'], os.environ['S'], os.environ['JOB_ID'])", env={"A": "1"},
          secrets={"S": "2"}, flavor="l4x1", timeout="1h", attempts=2, name="n", labels={"shard": "0-of-1"})
done = api.wait_for_job(job.id, poll_interval=0.1)
log = list(api.fetch_job_logs(job_id=job.id, follow=True))
finished = {"labels": {"name": "n", "shard": "0-of-1"}, "status": ["COMPLETED"]}
named = [found.id for found in api.list_jobs(**finished, namespace="me")]
others = [found.id for found in api.list_jobs(labels={"name": "m"}, namespace="me")]
running = [found.id for found in api.list_jobs(status="RUNNING", namespace="me")]
result = [job.id, str(done.status.stage), done.flavor, done.retry, list(done.secrets), log, named, others, running]
"""
    job, stage, flavor, retry, secrets, log, named, others, running = client(code)
    assert (stage.rpartition(".")[2], flavor, retry, secrets) == ("COMPLETED", "l4x1", 1, ["S"])
    assert log == [f"1 2 {job}"]
    assert (named, others, running) == ([job], [], [])


def test_a_job_has_the_environment_of_a_job_and_nothing_of_who_started_it(hub: HubServer) -> None:
    code = """
job = run("import os, json; print(json.dumps(dict(os.environ)))", flavor="a10g-small")
api.wait_for_job(job.id, poll_interval=0.1)
result = json.loads("".join(api.fetch_job_logs(job_id=job.id)))
"""
    found = client(code)
    assert (found["ACCELERATOR"], found["CPU_CORES"], found["MEMORY"]) == ("gpu", "4", "15GB")
    assert found["HF_ENDPOINT"] == hub.url
    assert not {"HF_TOKEN", "HF_HOME", "VIRTUAL_ENV", "PYTHONPATH"} & set(found)
    assert found["HOME"] != os.environ["HOME"]


def test_a_job_that_fails_is_started_again_while_it_has_attempts_left(hub: HubServer) -> None:
    code = """
jobs = [run("raise SystemExit(3)", attempts=2), run("raise SystemExit(4)")]
result = [[str(job.status.stage), job.status.message] for job in api.wait_for_job([job.id for job in jobs])]
"""
    ends = client(code)
    assert [job.exit_codes for job in hub.jobs.all] == [[3, 3], [4]]
    assert [stage.rpartition(".")[2] for stage, _ in ends] == ["ERROR", "ERROR"]
    assert [message for _, message in ends] == ["exit code 3", "exit code 4"]


def test_a_job_whose_machine_is_gone_is_started_again(hub: HubServer) -> None:
    client("run('import time; print(1, flush=True); time.sleep(60)', attempts=2); result = 0")
    (job,) = hub.jobs.all
    wait_until(lambda: job.log.endswith("\n1"), "the first try runs")
    job.kill()
    wait_until(lambda: job.log.endswith("\n1\n1"), "the second try runs")
    client(f"api.cancel_job(job_id={job.id!r}); result = 0")
    hub.jobs.wait()
    assert (job.stage, len(job.exit_codes)) == ("CANCELED", 2)


def test_a_job_that_runs_too_long_is_asked_to_stop_and_then_stopped(hub: HubServer) -> None:
    hub.jobs.grace_s = 0.5
    stubborn = "import signal, time; signal.signal(15, lambda *_: print('asked', flush=True)); time.sleep(60)"
    client(f"run({stubborn + '; time.sleep(60)'!r}, timeout='2s', attempts=3); result = 0")
    (job,) = hub.jobs.wait()
    assert (job.stage, job.message) == ("ERROR", "Job timeout")
    assert job.exit_codes == [-9], "it is not started again"
    assert job.lines[-1]["data"] == "asked"


def test_who_may_not_run_jobs_is_refused(hub: HubServer) -> None:
    code = "result = status_of(run, '')"
    assert client(code, READ_TOKEN) == 403
    assert client(code, PR_TOKEN) == 403
    assert client("result = status_of(run, '', namespace='others')") == 403
    hub.jobs.refuse(402, "no credit is left")
    assert client(code) == 402
    assert hub.jobs.all == []


def test_the_hardware_is_listed_with_its_prices_a_minute(hub: HubServer) -> None:
    code = """
hardware = {item.name: item for item in api.list_jobs_hardware(token=False)}
found = hardware["l4x1"]
result = [found.cpu, found.ram, found.accelerator.model, found.unit_cost_micro_usd, found.unit_label]
result.append(hardware["cpu-basic"].accelerator)
"""
    assert client(code, token=None) == ["8 vCPU", "30 GB", "L4", 13333, "minute", None]
