"""The server: one that runs already, or `vllm serve` spawned here and ended with us.

A server that we spawn listens on loopback only, with a random key that it is given by environment. Ready means that
it lists the model, is none of the versions known to be bad, has the context for the largest page and has read the
canary.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import shlex
import shutil
import socket
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .ask import Endpoint
from .ask_canary import ask_server_about
from .errors import EngineError, UsageError
from .report import duration, say
from .spawn import LogReader, Spawned, server_environment
from .startup import is_progress, phase_of
from .transport import SharedFiles, shared_folder
from .trust import Trust, check_canary, check_context, check_version, installed_versions
from .web import base_url, fetch, is_local

POLL_S = 0.5
MEDIA_FLAG = "--allowed-local-media-path"
STOPPED = "the run was stopped while its server was starting"


@dataclass(frozen=True)
class Wanted:
    """Which server is wanted: `url` that of a running one or None; `command` what to spawn instead of `vllm serve`."""

    model: str
    trust: Trust
    url: str | None = None
    command: str | None = None
    port: int | None = None
    api_key: str | None = None
    vllm_args: Sequence[str] = ()
    suggest: Callable[[], Sequence[str]] = (
        tuple  # asked for more of them before `vllm serve` is spawned: they come first
    )
    startup_timeout_s: float = 900.0
    keep: bool = False  # leave a server that we spawned running
    hint: str = ""  # the command to show where no server can be had here


@dataclass(frozen=True)
class Server:
    """A server that answers. `engine` is what it says it is; `keeper` starts it anew if it is ours."""

    endpoint: Endpoint
    engine: str
    keeper: Keeper | None = None
    canary_s: float = 0.0  # how long it took to answer the canary page


class Keeper:
    """Keeps a server of ours: starts it, ends it, and starts it again at the same address. Its calls block."""

    def __init__(self, wanted: Wanted, host: str, port: int, pages: SharedFiles | None = None) -> None:
        self.spawned: Spawned | None = None
        self.pages = pages
        self._wanted = wanted
        self._host, self._port = host, port
        self._url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._key = secrets.token_urlsafe(24)
        self._command = server_command(wanted, host, port)
        self._environment = server_environment(self._key, self._command[0])
        self._folder = Path(tempfile.mkdtemp(prefix="lighton-ocr-"))
        self._starts = 0
        self._given_up = threading.Event()

    def start(self) -> Server:
        """Start the server and wait until it can be trusted; raise `EngineError` where it can't."""
        if self._given_up.is_set():
            raise EngineError(STOPPED)
        self._starts += 1
        log = self._folder / ("server.log" if self._starts == 1 else f"server-{self._starts}.log")
        if self._wanted.command is None and (versions := installed_versions(self._command[0], self._environment)):
            check_version(self._wanted.trust, *versions)
        sweep = [self.pages.folder] if self.pages else []
        self.spawned = Spawned(self._command, self._environment, log, self._wanted.trust.profile.image, sweep)
        server = get_ready(self._wanted, self._url, self._key, self)
        self.spawned.note_shared_memory()
        return server

    def check_alive(self) -> None:
        """Raise `EngineError` where the process has ended, or the run wants no server any more."""
        assert self.spawned is not None
        ended = self.spawned.how_it_ended()
        if self._given_up.is_set():
            raise EngineError(STOPPED)
        if ended:
            raise EngineError(ended)

    def end(self) -> None:
        """End the server and all that it started."""
        if self.spawned:
            self.spawned.end()

    def restart(self, pause_s: float) -> Server:
        """End what is left of a server that died or froze, and start it again."""
        if self.spawned:
            self.spawned.end(patience_s=3.0)
        self._given_up.wait(pause_s)
        return self.start()

    def kill(self) -> None:
        """Kill it at once, without waiting: the last thing done."""
        if self.spawned:
            self.spawned.kill()
        if self.pages:
            shutil.rmtree(self.pages.folder, ignore_errors=True)

    def give_up(self) -> None:
        """Make a start that is under way in another thread fail at once."""
        self._given_up.set()
        self.kill()

    def leave_running(self) -> None:
        """Let the server live on, and say how to use and how to end it."""
        assert self.spawned is not None
        key_file = self._folder / "api-key"
        key_file.touch(mode=0o600)
        key_file.write_text(self._key)
        self.spawned.release()
        say(
            f"the server is left running (--keep-server); use it with\n"
            f'  VLLM_API_KEY="$(cat {key_file})" … --server {self._url}\n'
            f"  its log: {self.spawned.log}\n  end it with: kill -- -{self.spawned.group}"
        )


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
        yield get_ready(wanted, url, key)
        return
    host, port = _address(url, wanted.port)
    check_port_is_free(host, port)
    with _shared_pages(wanted) as pages:
        if pages:
            flags = (MEDIA_FLAG, str(pages.folder))
            wanted = replace(wanted, vllm_args=(*wanted.vllm_args, *flags))
        keeper = Keeper(wanted, host, port, pages)
        try:
            yield keeper.start()
        except BaseException:
            keeper.end()
            raise
        if wanted.keep:
            keeper.leave_running()
        else:
            keeper.end()


def _shared_pages(wanted: Wanted) -> AbstractContextManager[SharedFiles | None]:
    """Make a folder through which pages reach the vLLM that we start; none where it is not vLLM or has another one."""
    has_another = any(word.partition("=")[0] == MEDIA_FLAG for word in wanted.vllm_args)
    return contextlib.nullcontext() if wanted.command is not None or has_another else shared_folder()


def get_ready(wanted: Wanted, url: str, key: str, keeper: Keeper | None = None) -> Server:
    """Wait until the server lists its models, and return it once it has passed all that is required of it."""
    models = _wait_for_models(url, key, wanted.startup_timeout_s, keeper)
    endpoint = Endpoint(f"{url}/v1", key, served_id(models, wanted.model, url))
    engine, trust = engine_name(url, models), wanted.trust
    owner, _, version = engine.partition(" ")
    if owner == "vllm" and version:
        check_version(trust, version, serves=True)
    card = next(model for model in models if model["id"] == endpoint.model)
    check_context(trust, card.get("max_model_len"))
    alive: Callable[[], None] = keeper.check_alive if keeper else lambda: None
    canary_s = check_canary(trust, lambda canary, row: ask_server_about(endpoint, trust, canary, row, alive), engine)
    if trust.canary:
        say(f"the canary page was read in {canary_s:.1f} s")
    return Server(endpoint, engine, keeper, canary_s)


def server_command(wanted: Wanted, host: str, port: int) -> list[str]:
    """Return the words that start the server: `vllm serve`, or the command that the user gave.

    In a command of the user's `{host}`, `{port}` and `{model}` are filled in; where it has no `{port}`, `--host` and
    `--port` go at its end, which vLLM, llama-server and rapidocr-server.py all take.
    """
    if wanted.command is None:
        if shutil.which("vllm") is None:
            raise EngineError(f"no `vllm` command on this machine to start at {host}:{port}.\n{wanted.hint}")
        return [
            "vllm",
            "serve",
            wanted.model,
            "--host",
            host,
            "--port",
            str(port),
            *wanted.suggest(),
            *wanted.vllm_args,
        ]
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


def is_up(url: str, key: str) -> bool:
    """Whether anything answers HTTP at the URL."""
    try:
        fetch(f"{url}/v1/models", key)
    except (OSError, ValueError):
        return False
    return True


def _wait_for_models(
    url: str, key: str, startup_timeout_s: float, keeper: Keeper | None = None
) -> list[dict[str, Any]]:
    """Wait until the server lists its models. Patience is measured by progress, where its log tells of any."""
    started = last_sign = time.monotonic()
    spawned = keeper.spawned if keeper else None
    log = LogReader(spawned.log) if spawned else None
    phase, last_error = "start", "nothing answered"
    while True:
        if keeper:
            keeper.check_alive()
        for line in log.new_lines() if log else ():
            if is_progress(line):
                last_sign = time.monotonic()
            if (now_in := phase_of(line)) and now_in != phase:
                phase = now_in
                say(f"  after {duration(time.monotonic() - started)}: {phase}")
        try:
            status, body = fetch(f"{url}/v1/models", key)
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
            tail = f", in the phase {phase!r}. {spawned.log_words()}" if spawned else ""
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
        status, body = fetch(f"{url}/version", "")
        version = str(json.loads(body)["version"]) if status == 200 else ""
    except (OSError, ValueError, LookupError, TypeError):
        version = ""
    return f"{owner} {version}".strip()
