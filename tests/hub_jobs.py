"""Jobs of the Hub stand-in: the routes that the real client calls, and jobs that are executed as real processes.

    hub.jobs.path.insert(0, folder)          # what stands before the system on a job's PATH: a fake vllm, nvidia-smi
    job = hub.jobs.all[0]
    job.kill()                               # its machine is gone; `attempts` starts it again
    hub.jobs.refuse(402, "no credit")        # submissions from now on; None lets them through again

`uv run SCRIPT …` and `python …` become this interpreter, in a fresh folder with a fresh HOME, and with the environment
that a job gets and nothing else. Volumes are buckets, copied beside it; words that begin with their mount path are
rewritten. A job that ends other than 0 is started again while it has attempts left; one that runs longer than
`timeoutSeconds` gets SIGTERM, and SIGKILL after `grace_s`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

ENDED = ("COMPLETED", "CANCELED", "ERROR", "DELETED")
SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"
# name, GPU, how many, GB of memory on them, vCPU, GB of memory, micro-dollars a minute
HARDWARE = [
    ("cpu-basic", "", 0, 0, 2, 16, 167),
    ("cpu-upgrade", "", 0, 0, 8, 32, 500),
    ("t4-small", "T4", 1, 16, 4, 15, 6667),
    ("t4-medium", "T4", 1, 16, 8, 30, 10000),
    ("l4x1", "L4", 1, 24, 8, 30, 13333),
    ("l4x4", "L4", 4, 96, 48, 186, 63333),
    ("a10g-small", "A10G", 1, 24, 4, 15, 16667),
    ("a10g-large", "A10G", 1, 24, 12, 46, 25000),
    ("a100-large", "A100", 1, 80, 12, 142, 41667),
    ("h200", "H200", 1, 141, 23, 256, 83333),
]


def describe_hardware(
    name: str, gpu: str, gpus: int, vram_gb: int, vcpus: int, ram_gb: int, micro_dollars: int
) -> dict[str, object]:
    """One entry of the list of hardware, as the Hub gives it."""
    accelerator = {
        "type": "gpu",
        "model": gpu,
        "quantity": str(gpus),
        "vram": f"{vram_gb} GB",
        "manufacturer": "Nvidia",
    }
    return {
        "name": name,
        "prettyName": f"Nvidia {gpu}" if gpu else "CPU",
        "cpu": f"{vcpus} vCPU",
        "ram": f"{ram_gb} GB",
        "ephemeralStorage": "100 GB",
        "accelerator": accelerator if gpu else None,
        "unitCostMicroUSD": micro_dollars,
        "unitCostUSD": micro_dollars / 1e6,
        "unitLabel": "minute",
    }


def now() -> str:
    """The time, as the Hub writes it."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@dataclasses.dataclass
class HostedJob:
    """A job: what was asked for, the process that does it, and what became of it."""

    id: str
    namespace: str
    spec: Mapping[str, Any]
    folder: Path
    labels: dict[str, str]
    stage: str = "SCHEDULING"
    message: str | None = None
    created: str = dataclasses.field(default_factory=now)
    started: str | None = None
    finished: str | None = None
    exit_codes: list[int] = dataclasses.field(default_factory=list)
    lines: list[dict[str, str]] = dataclasses.field(default_factory=list)
    process: subprocess.Popen[str] | None = None

    @property
    def environment(self) -> dict[str, str]:
        """The variables that were asked for, without the secrets."""
        return dict(self.spec.get("environment") or {})

    @property
    def words(self) -> list[str]:
        """The command, as it was submitted."""
        return [*self.spec["command"], *self.spec.get("arguments", ())]

    @property
    def log(self) -> str:
        """All that its processes wrote, stdout and stderr."""
        return "\n".join(line["data"] for line in self.lines)

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will happen."""
        return self.stage in ENDED

    def kill(self) -> None:
        """Take its machine away: the process is gone without a word."""
        self._signal(signal.SIGKILL)

    def end(self, stage: str, message: str, grace_s: float) -> None:
        """End it for good: SIGTERM, and after `grace_s` SIGKILL."""
        if self.has_ended:
            return
        self.stage, self.message = stage, message
        self._signal(signal.SIGTERM)
        threading.Timer(grace_s, self.kill).start()

    def _signal(self, number: signal.Signals) -> None:
        process = self.process
        if process is not None and process.poll() is None:
            process.send_signal(number)

    def write(self, text: str) -> None:
        """Add a line to the log."""
        self.lines.append({"timestamp": now(), "data": text})

    def describe(self) -> dict[str, object]:
        """What the Hub says about it; of secrets the names alone."""
        spec = self.spec
        return {
            "id": self.id,
            "createdAt": self.created,
            "startedAt": self.started,
            "finishedAt": self.finished,
            "dockerImage": spec.get("dockerImage"),
            "spaceId": spec.get("spaceId"),
            "command": spec["command"],
            "arguments": spec.get("arguments", []),
            "environment": self.environment,
            "secrets": dict.fromkeys(spec.get("secrets") or {}, "***"),
            "flavor": spec["flavor"],
            "labels": self.labels,
            "volumes": spec.get("volumes", []),
            "status": {"stage": self.stage, "message": self.message},
            "owner": {"id": "0" * 24, "name": self.namespace, "type": "user"},
            "initiator": {"type": "user", "id": "0" * 24, "name": self.namespace},
            "retry": spec.get("attempts", 1) - 1,
        }


class JobsPlace:
    """Where jobs run, and the routes by which they are submitted and looked at.

    `check` refuses who may not act for a namespace; `files_of` gives the files of a bucket.
    """

    def __init__(self, check: Callable[[web.Request, str], None]) -> None:
        self._check = check
        self.files_of: Callable[[str], Mapping[str, bytes]] = lambda bucket: {}
        self._refusal: tuple[int, str] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="hub-jobs-")
        self._threads: list[threading.Thread] = []
        self.all: list[HostedJob] = []
        self.path: list[str | Path] = []
        self.hardware = [describe_hardware(*row) for row in HARDWARE]
        self.accelerator = "gpu"  # what a job on a GPU finds in ACCELERATOR; seen so, though documented as the flavour
        self.grace_s = 10.0
        self.accepts = 10**9  # submissions before the next ones are refused
        self.executes = True  # False: jobs are said to run, and nothing does

    def routes(self) -> list[web.RouteDef]:
        """What the clients call."""
        job = "/api/jobs/{namespace}/{job}"
        return [
            web.get("/api/jobs/hardware", self._list_hardware),
            web.get("/api/agent-harnesses", self._no_agents),  # asked by `hf` before all else
            web.post("/api/jobs/{namespace}", self._submit),
            web.get("/api/jobs/{namespace}", self._list),
            web.get(job, self._inspect),
            web.get(job + "/logs", self._logs),
            web.post(job + "/cancel", self._cancel),
            web.put(job + "/labels", self._relabel),
        ]

    def refuse(self, status: int | None, message: str = "") -> None:
        """Refuse submissions from now on; None lets them through."""
        self._refusal = None if status is None else (status, message)

    def wait(self, patience_s: float = 120.0) -> list[HostedJob]:
        """Wait until every job has ended."""
        give_up_at = time.monotonic() + patience_s
        for thread in list(self._threads):
            thread.join(max(0.0, give_up_at - time.monotonic()))
            assert not thread.is_alive(), [(job.id, job.stage, job.log) for job in self.all]
        return self.all

    def close(self) -> None:
        """End what runs still, and remove what it left."""
        for job in self.all:
            job.stage = job.stage if job.has_ended else "CANCELED"
            job.kill()
        for thread in self._threads:
            thread.join(10)
        self._folder.cleanup()

    # -- what the clients call

    async def _list_hardware(self, request: web.Request) -> web.Response:
        return web.json_response(self.hardware)

    async def _no_agents(self, request: web.Request) -> web.Response:
        return web.json_response({})

    async def _submit(self, request: web.Request) -> web.Response:
        namespace, spec = request.match_info["namespace"], await request.json()
        self._check(request, namespace)
        if self._refusal or len(self.all) >= self.accepts:
            status, message = self._refusal or (503, "no machine is free")
            return web.json_response({"error": message}, status=status, headers={"X-Error-Message": message})
        number = len(self.all)
        folder = Path(self._folder.name) / str(number)
        job = HostedJob(f"{number:024x}", namespace, spec, folder, dict(spec.get("labels") or {}))
        self.all.append(job)
        if not self.executes:
            job.stage, job.started = "RUNNING", now()
            return web.json_response(job.describe())
        thread = threading.Thread(target=self._execute, args=(job, f"http://{request.host}"), daemon=True)
        self._threads.append(thread)
        thread.start()
        return web.json_response(job.describe())

    async def _list(self, request: web.Request) -> web.Response:
        self._check(request, request.match_info["namespace"])
        stages, labels = request.query.getall("stage", []), request.query.getall("label", [])
        found = [
            job.describe()
            for job in self.all
            if job.namespace == request.match_info["namespace"]
            and (not stages or job.stage in stages)
            and all(label in {f"{key}={value}" for key, value in job.labels.items()} for label in labels)
        ]
        return web.json_response(found)

    def _job(self, request: web.Request) -> HostedJob:
        self._check(request, request.match_info["namespace"])
        names = request.match_info
        for job in self.all:
            if (job.namespace, job.id) == (names["namespace"], names["job"]):
                return job
        raise web.HTTPNotFound(text="{}", content_type="application/json")

    async def _inspect(self, request: web.Request) -> web.Response:
        return web.json_response(self._job(request).describe())

    async def _cancel(self, request: web.Request) -> web.Response:
        job = self._job(request)
        job.end("CANCELED", "canceled", self.grace_s)
        return web.json_response(job.describe())

    async def _relabel(self, request: web.Request) -> web.Response:
        job = self._job(request)
        job.labels = dict((await request.json())["labels"])
        return web.json_response(job.describe())

    async def _logs(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events: what is there, and what comes until the job ends."""
        job = self._job(request)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        tail = request.query.get("tail")
        at = max(0, len(job.lines) - int(tail)) if tail else 0
        while True:
            is_last = job.has_ended
            for line in job.lines[at:]:
                await response.write(f"data: {json.dumps(line)}\n\n".encode())
                at += 1
            if is_last:
                return response
            await asyncio.sleep(0.05)

    # -- what happens to a job

    def _execute(self, job: HostedJob, endpoint: str) -> None:
        words = self._at_home(job, list(job.words))
        give_up_after_s = float(job.spec.get("timeoutSeconds") or 30 * 60)
        watchdog = threading.Timer(give_up_after_s, job.end, ("ERROR", "Job timeout", self.grace_s))
        watchdog.daemon = True
        watchdog.start()
        job.write(f"===== Job started at {now()} =====")
        job.started = job.started or now()
        for attempt in range(job.spec.get("attempts", 1)):
            if job.has_ended:
                break
            job.stage = "RUNNING"
            code = self._run_once(job, words, endpoint, job.folder / f"attempt-{attempt}")
            job.exit_codes.append(code)
            if code == 0:
                break
        watchdog.cancel()
        job.finished = now()
        if not job.has_ended:
            job.message = None if job.exit_codes[-1] == 0 else f"exit code {job.exit_codes[-1]}"
            job.stage = "COMPLETED" if job.exit_codes[-1] == 0 else "ERROR"

    def _at_home(self, job: HostedJob, words: list[str]) -> list[str]:
        """Lay the volumes beside the job, and return its command with their paths and this interpreter."""
        if words[:2] == ["uv", "run"]:
            words = [sys.executable, *words[2:]]
        elif words[0] == "python":
            words = [sys.executable, *words[1:]]
        for number, volume in enumerate(job.spec.get("volumes") or []):
            mount, place = volume["mountPath"].rstrip("/") + "/", job.folder / f"volume-{number}"
            prefix = f"{volume['path']}/" if volume.get("path") else ""
            _copy(self.files_of(volume["source"]), prefix, place)
            words = [f"{place}/{word.removeprefix(mount)}" if word.startswith(mount) else word for word in words]
        return words

    def _run_once(self, job: HostedJob, words: list[str], endpoint: str, home: Path) -> int:
        home.mkdir(parents=True)
        with subprocess.Popen(
            words,
            env=self._environment(job, endpoint, home),
            cwd=home,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            job.process = process
            assert process.stdout is not None
            for line in process.stdout:
                job.write(line.rstrip("\n"))
        return process.returncode

    def _environment(self, job: HostedJob, endpoint: str, home: Path) -> dict[str, str]:
        hardware = next((item for item in self.hardware if item["name"] == job.spec["flavor"]), None)
        machine = {}
        if hardware:
            machine = {
                "ACCELERATOR": self.accelerator if hardware["accelerator"] else "cpu",
                "CPU_CORES": str(hardware["cpu"]).split()[0],
                "MEMORY": str(hardware["ram"]).replace(" ", ""),
            }
        return {
            "PATH": os.pathsep.join([*map(str, self.path), SYSTEM_PATH]),
            "HOME": str(home),
            "LANG": "C.UTF-8",
            "JOB_ID": job.id,
            **machine,
            "HF_ENDPOINT": endpoint,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1,localhost",
            **job.environment,
            **(job.spec.get("secrets") or {}),
        }


def _copy(files: Mapping[str, bytes], prefix: str, place: Path) -> None:
    place.mkdir(parents=True, exist_ok=True)
    for path in _below(files, prefix):
        target = place / path.removeprefix(prefix)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(files[path])


def _below(files: Mapping[str, bytes], prefix: str) -> Iterable[str]:
    return (path for path in files if path.startswith(prefix))
