"""Jobs of the Hub stand-in, as the real `huggingface_hub` sees them: submitted, listed, followed, executed."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.hub_server import HubServer, hub_env
from tests.hub_state import PR_TOKEN, READ_TOKEN, WRITE_TOKEN
from tests.runs import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

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
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server
        assert not server.unknown, "the client called what the stand-in does not have"


def client(hub: HubServer, home: Path, code: str, token: str | None = WRITE_TOKEN) -> Any:
    """Run `code` with the real client, and give back what it left in `result`."""
    command = [sys.executable, "-c", f"{PRELUDE}{code}\nprint(json.dumps(result))"]
    done = subprocess.run(command, env=hub_env(hub, home, token), cwd=home, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_job_is_submitted_followed_and_found_again(hub: HubServer, tmp_path: Path) -> None:
    code = """
job = run("import os; print(os.environ['A'], os.environ['S'], os.environ['JOB_ID'])", env={"A": "1"},
          secrets={"S": "2"}, flavor="l4x1", timeout="1h", attempts=2, name="n", labels={"shard": "0-of-1"})
done = api.wait_for_job(job.id, poll_interval=0.1)
log = list(api.fetch_job_logs(job_id=job.id, follow=True))
named = [found.id for found in api.list_jobs(labels={"name": "n", "shard": "0-of-1"}, status=["COMPLETED"])]
others = [found.id for found in api.list_jobs(labels={"name": "m"})]
running = [found.id for found in api.list_jobs(status="RUNNING")]
result = [job.id, str(done.status.stage), done.flavor, done.retry, list(done.secrets), log, named, others, running]
"""
    job, stage, flavor, retry, secrets, log, named, others, running = client(hub, tmp_path, code)
    assert (stage.rpartition(".")[2], flavor, retry, secrets) == ("COMPLETED", "l4x1", 1, ["S"])
    assert log == [f"1 2 {job}"]
    assert (named, others, running) == ([job], [], [])


def test_a_job_has_the_environment_of_a_job_and_nothing_of_who_started_it(hub: HubServer, tmp_path: Path) -> None:
    code = """
job = run("import os, json; print(json.dumps(dict(os.environ)))", flavor="a10g-small")
api.wait_for_job(job.id, poll_interval=0.1)
result = json.loads("".join(api.fetch_job_logs(job_id=job.id)))
"""
    found = client(hub, tmp_path, code)
    assert (found["ACCELERATOR"], found["CPU_CORES"], found["MEMORY"]) == ("gpu", "4", "15GB")
    assert found["HF_ENDPOINT"] == hub.url
    assert not {"HF_TOKEN", "HF_HOME", "VIRTUAL_ENV", "PYTHONPATH"} & set(found)
    assert found["HOME"] != str(tmp_path)


def test_a_job_that_fails_is_started_again_while_it_has_attempts_left(hub: HubServer, tmp_path: Path) -> None:
    code = """
jobs = [run("raise SystemExit(3)", attempts=2), run("raise SystemExit(4)")]
result = [[str(job.status.stage), job.status.message] for job in api.wait_for_job([job.id for job in jobs])]
"""
    ends = client(hub, tmp_path, code)
    assert [job.exit_codes for job in hub.jobs.all] == [[3, 3], [4]]
    assert [stage.rpartition(".")[2] for stage, _ in ends] == ["ERROR", "ERROR"]
    assert [message for _, message in ends] == ["exit code 3", "exit code 4"]


def test_a_job_whose_machine_is_gone_is_started_again(hub: HubServer, tmp_path: Path) -> None:
    client(hub, tmp_path, "run('import time; print(1, flush=True); time.sleep(60)', attempts=2); result = 0")
    (job,) = hub.jobs.all
    wait_until(lambda: job.log.endswith("\n1"), "the first try runs")
    job.kill()
    wait_until(lambda: job.log.endswith("\n1\n1"), "the second try runs")
    client(hub, tmp_path, f"api.cancel_job(job_id={job.id!r}); result = 0")
    hub.jobs.wait()
    assert (job.stage, len(job.exit_codes)) == ("CANCELED", 2)


def test_a_job_that_runs_too_long_is_asked_to_stop_and_then_stopped(hub: HubServer, tmp_path: Path) -> None:
    hub.jobs.grace_s = 0.5
    stubborn = "import signal, time; signal.signal(15, lambda *_: print('asked', flush=True)); time.sleep(60)"
    client(hub, tmp_path, f"run({stubborn + '; time.sleep(60)'!r}, timeout='2s', attempts=3); result = 0")
    (job,) = hub.jobs.wait()
    assert (job.stage, job.message) == ("ERROR", "Job timeout")
    assert job.exit_codes == [-9], "it is not started again"
    assert job.lines[-1]["data"] == "asked"


def test_who_may_not_run_jobs_is_refused(hub: HubServer, tmp_path: Path) -> None:
    code = "result = status_of(run, '')"
    assert client(hub, tmp_path, code, READ_TOKEN) == 403
    assert client(hub, tmp_path, code, PR_TOKEN) == 403
    assert client(hub, tmp_path, "result = status_of(run, '', namespace='others')") == 403
    hub.jobs.refuse(402, "no credit is left")
    assert client(hub, tmp_path, code) == 402
    assert hub.jobs.all == []


def test_the_hardware_is_listed_with_its_prices_a_minute(hub: HubServer, tmp_path: Path) -> None:
    code = """
hardware = {item.name: item for item in api.list_jobs_hardware(token=False)}
found = hardware["l4x1"]
result = [found.cpu, found.ram, found.accelerator.model, found.unit_cost_micro_usd, found.unit_label]
result.append(hardware["cpu-basic"].accelerator)
"""
    assert client(hub, tmp_path, code, token=None) == ["8 vCPU", "30 GB", "L4", 13333, "minute", None]
