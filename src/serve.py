"""The server: one that runs already, or `vllm serve` spawned here and ended with us.

A server that we spawn listens on loopback only, with a random key that it is given by environment, in a process group
of its own, its log in a file whose last lines stand in every error.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .ask import Endpoint
from .errors import EngineError, UsageError
from .report import duration, say

LOG_LINES_SHOWN = 20
POLL_S = 0.5
# Waits until our end of its stdin closes, as it does however we end, by SIGKILL too; then ends the group named in $0.
GUARD = 'read -r _; kill -TERM "-$0"; sleep 10; kill -KILL "-$0"'
# Variables by which `uv run` points Python at our environment: the server has its own.
OURS_ALONE = ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "UV", "UV_RUN_RECURSION_DEPTH", "VIRTUAL_ENV_PROMPT")


@dataclass(frozen=True)
class Wanted:
    """Which server is wanted: `url` that of a running one or None; `command` what to spawn instead of `vllm serve`."""

    model: str
    url: str | None = None
    command: str | None = None
    port: int | None = None
    api_key: str | None = None
    vllm_args: Sequence[str] = ()
    startup_timeout_s: float = 900.0
    hint: str = ""  # the command to show where no server can be had here


@dataclass(frozen=True)
class Server:
    """A server that answers. `engine` is what it says it is; `spawned` is the process if it is ours."""

    endpoint: Endpoint
    engine: str
    spawned: Spawned | None = None

    async def watch(self) -> None:
        """Return never; raise `EngineError` when the process that we spawned has ended."""
        while True:
            await asyncio.sleep(1.0)
            if self.spawned:
                self.spawned.check_alive()


class Spawned:
    """A server process of ours, in a process group of its own."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.log = Path(tempfile.mkdtemp(prefix="lighton-ocr-")) / "server.log"
        say(f"starting {shlex.join(command)}\n  its log: {self.log}")
        with self.log.open("wb") as log:
            try:
                self._process = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise EngineError(f"can't start {command[0]!r}: {error}; check --serve-command") from error
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", GUARD, str(self._process.pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def check_alive(self) -> None:
        """Raise `EngineError` with the end of its log if the process has ended."""
        code = self._process.poll()
        if code is not None:
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            raise EngineError(f"the server ended by itself ({how}). The end of its log, {self.log}:\n{self.log_tail()}")

    def log_tail(self) -> str:
        """Return the last lines of the log, indented."""
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:]
        return "\n".join(f"  | {line}" for line in lines) or "  (it wrote nothing)"

    def end(self, patience_s: float = 10.0) -> None:
        """End the process and all that it started: asked first, then killed."""
        for number, wait_s in ((signal.SIGTERM, patience_s), (signal.SIGKILL, 5.0)):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(wait_s)
        self._process.poll()
        self._guard.kill()
        self._guard.communicate()

    def kill(self) -> None:
        """Kill the process group at once, without waiting."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


def check_possible(wanted: Wanted) -> None:
    """Raise at once where no server is named and none can be spawned: no `vllm`, or a command that is none."""
    if wanted.url is not None:
        base_url(wanted.url)
    if wanted.command is not None:
        command_words(wanted.command)
    if wanted.url is None and wanted.command is None and shutil.which("vllm") is None:
        raise EngineError(f"no `vllm` command on this machine, and no --server to use.\n{wanted.hint}")


@contextlib.contextmanager
def running_server(wanted: Wanted) -> Iterator[Server]:
    """Use the server at `wanted.url`, or spawn one; a spawned one is ended on leaving.

    A local URL where nothing answers is where we spawn; a remote one is waited for and never shadowed.
    """
    check_possible(wanted)
    url = base_url(wanted.url) if wanted.url else None
    key = wanted.api_key or "EMPTY"
    if url and (is_up(url, key) or not is_local(url)):
        models = _wait_for_models(url, key, wanted.startup_timeout_s)
        yield Server(Endpoint(f"{url}/v1", key, served_id(models, wanted.model, url)), engine_name(url, models))
        return
    host, port = _address(url, wanted.port)
    check_port_is_free(host, port)
    key = secrets.token_urlsafe(24)
    command = server_command(wanted, host, port)
    # In a thread, where no signal can come between the start of the process and our knowing of it.
    starter = ThreadPoolExecutor(1)
    starting = starter.submit(Spawned, command, server_environment(key))
    try:
        spawned = starting.result()
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        models = _wait_for_models(url, key, wanted.startup_timeout_s, spawned)
        yield Server(
            Endpoint(f"{url}/v1", key, served_id(models, wanted.model, url)), engine_name(url, models), spawned
        )
    finally:
        starter.shutdown()
        starting.result().end()


def server_command(wanted: Wanted, host: str, port: int) -> list[str]:
    """Return the words that start the server: `vllm serve`, or the command that the user gave.

    In a command of the user's `{host}`, `{port}` and `{model}` are filled in; where it has no `{port}`, `--host` and
    `--port` go at its end, which vLLM, llama-server and rapidocr-server.py all take.
    """
    if wanted.command is None:
        if shutil.which("vllm") is None:
            raise EngineError(f"no `vllm` command on this machine to start at {host}:{port}.\n{wanted.hint}")
        return ["vllm", "serve", wanted.model, "--host", host, "--port", str(port), *wanted.vllm_args]
    words = command_words(wanted.command)
    filled = [_fill(word, {"host": host, "port": str(port), "model": wanted.model}) for word in words]
    if not any("{port}" in word for word in words):
        filled += ["--host", host, "--port", str(port)]
    return filled


def command_words(command: str) -> list[str]:
    """Split the user's command as a shell does."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UsageError(f"--serve-command {command!r} can't be read: {error}") from error
    if not words:
        raise UsageError("--serve-command is empty; give the command that starts the server")
    return words


def _fill(word: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        word = word.replace(f"{{{name}}}", value)
    return word


def server_environment(key: str) -> dict[str, str]:
    """Return the environment of a spawned server: ours, without what `uv run` set for us, and the key."""
    environment = {name: value for name, value in os.environ.items() if name not in OURS_ALONE}
    # FlashInfer's sampler is compiled by nvcc, which the plain image lacks: engine start would crash.
    environment.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    return {**environment, "VLLM_API_KEY": key, "LLAMA_API_KEY": key}


def base_url(url: str) -> str:
    """Return `scheme://host:port/path` without a trailing `/v1`."""
    parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise UsageError(f"--server {url!r} is no URL; give one like http://127.0.0.1:8000")
    if parts.username or parts.password:
        raise UsageError(
            "--server holds a user name or password; give the key in the variable that --api-key-env names"
        )
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"


def is_local(url: str) -> bool:
    """Whether the URL names this machine's loopback."""
    host = urllib.parse.urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _address(url: str | None, port: int | None) -> tuple[str, int]:
    """Return where to spawn: the host and port of a local URL; else loopback and `port`, or a free one."""
    if url:
        parts = urllib.parse.urlsplit(url)
        return parts.hostname or "127.0.0.1", port or parts.port or 80
    if port:
        return "127.0.0.1", port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return "127.0.0.1", int(probe.getsockname()[1])


def check_port_is_free(host: str, port: int) -> None:
    """Raise `UsageError` where something listens on the port already."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UsageError(
                f"port {port} of {host} can't be used: {error.strerror}. "
                f"Use what runs there with --server http://{host}:{port}, or choose another --port"
            ) from error


def _get(url: str, key: str, timeout_s: float = 5.0) -> tuple[int, bytes]:
    """GET an address; return (status, body). Raises `OSError` where nothing answers."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"})  # noqa: S310 - http(s) only
    # a proxy named in the environment is not for loopback
    proxies = urllib.request.ProxyHandler({} if is_local(url) else None)
    opener = urllib.request.build_opener(_NoRedirect, proxies)
    try:
        with opener.open(request, timeout=timeout_s) as response:
            return int(response.status), response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: the key is for this server alone."""

    def redirect_request(self, *_: Any) -> None:
        """Refuse."""
        return


def is_up(url: str, key: str) -> bool:
    """Whether anything answers HTTP at the URL."""
    try:
        _get(f"{url}/v1/models", key)
    except (OSError, ValueError):
        return False
    return True


def _wait_for_models(
    url: str, key: str, startup_timeout_s: float, spawned: Spawned | None = None
) -> list[dict[str, Any]]:
    """Wait until the server lists its models. Patience is measured by progress: growth of the log, where it is ours."""
    last_sign, log_size, last_error = time.monotonic(), -1, "nothing answered"
    while True:
        if spawned:
            spawned.check_alive()
            size = spawned.log.stat().st_size
            if size != log_size:
                log_size, last_sign = size, time.monotonic()
        try:
            status, body = _get(f"{url}/v1/models", key)
            if status == 200:
                return _listed_models(body, url)
            if status in {401, 403}:
                raise EngineError(f"{url} refuses our key (HTTP {status}); set the variable that --api-key-env names")
            if status < 500:
                raise EngineError(f"{url}/v1/models answers HTTP {status}: no OpenAI-compatible server; check --server")
            last_error = f"HTTP {status}"
        except OSError as error:
            last_error = str(getattr(error, "reason", error))
        waited = time.monotonic() - last_sign
        if waited > startup_timeout_s:
            tail = f". The end of its log, {spawned.log}:\n{spawned.log_tail()}" if spawned else ""
            raise EngineError(
                f"{url} is not ready: {duration(waited)} without a sign of progress (--startup-timeout); "
                f"the last try: {last_error}{tail}"
            )
        time.sleep(POLL_S)


def _listed_models(body: bytes, url: str) -> list[dict[str, Any]]:
    try:
        models = json.loads(body)["data"]
        return [dict(model) for model in models if model["id"]]
    except (ValueError, LookupError, TypeError) as error:
        raise EngineError(f"{url}/v1/models is no list of models: {body[:200]!r}; check --server") from error


def served_id(models: Sequence[Mapping[str, Any]], wanted: str, url: str) -> str:
    """Return the id under which the wanted model is served; a server that speaks only others is refused."""
    for key in ("id", "root"):
        for model in models:
            if model.get(key) == wanted:
                return str(model["id"])
    served = ", ".join(str(model["id"]) for model in models) or "nothing"
    raise EngineError(f"{url} serves {served}, not {wanted}; to use what it serves give --model {served}")


def engine_name(url: str, models: Sequence[Mapping[str, Any]]) -> str:
    """Return what serves, as it names itself: owner and version, such as `vllm 0.32.0`."""
    owner = str(models[0].get("owned_by") or "unknown")
    try:
        status, body = _get(f"{url}/version", "")
        version = str(json.loads(body)["version"]) if status == 200 else ""
    except (OSError, ValueError, LookupError, TypeError):
        version = ""
    return f"{owner} {version}".strip()
