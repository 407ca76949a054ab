"""The server: one that runs already, or `vllm serve` spawned here and ended with us.

A server that we spawn listens on loopback only, with a random key that it is given by environment.
"""

from __future__ import annotations

import contextlib
import secrets
import shlex
import shutil
import socket
import tempfile
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from .ask import Endpoint
from .errors import EngineError, UsageError
from .ready import Ready, get_ready, is_up
from .report import say
from .spawn import Spawned, server_environment
from .transport import SharedFiles, shared_folder
from .trust import Trust, check_version, installed_versions
from .web import base_url, is_local

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
    own_words: Sequence[str] = ()  # what the user gave for `vllm serve`
    suggest: Callable[[], Sequence[str]] = (
        tuple  # asked for more of them before `vllm serve` is spawned: they come first
    )
    startup_timeout_s: float = 900.0
    keep: bool = False  # leave a server that we spawned running
    hint: str = ""  # the command to show where no server can be had here


@dataclass(frozen=True)
class Server:
    """A server that can be trusted; `keeper` starts it anew if it is ours."""

    ready: Ready
    keeper: Keeper | None = None

    @property
    def endpoint(self) -> Endpoint:
        """Where it answers."""
        return self.ready.endpoint

    @property
    def engine(self) -> str:
        """What it says it is, such as `vllm 0.32.0`."""
        return self.ready.engine

    @property
    def context_tokens(self) -> int | None:
        """What page and text may have together, where it says."""
        return self.ready.context_tokens


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
        wanted = self._wanted
        ready = get_ready(wanted.model, wanted.trust, self._url, self._key, wanted.startup_timeout_s, self)
        self.spawned.note_shared_memory()
        return Server(ready, self)

    @property
    def log(self) -> Path:
        """Where the server that was started last writes."""
        assert self.spawned is not None
        return self.spawned.log

    def log_words(self) -> str:
        """Name its log and show its last lines."""
        return self.spawned.log_words() if self.spawned else ""

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
    url = base_url(wanted.url) if wanted.url is not None else None
    if wanted.command is not None:
        command_words(wanted.command)
    _refuse_lost_words(wanted, url)
    if wanted.url is None and wanted.command is None and shutil.which("vllm") is None:
        raise EngineError(f"no `vllm` command on this machine, and no --server to use.\n{wanted.hint}")


def _refuse_lost_words(wanted: Wanted, url: str | None) -> None:
    """Raise `UsageError` where words for `vllm serve` were given, and none will be started by us."""
    words = shlex.join(wanted.own_words)
    if words and wanted.command is not None:
        raise UsageError(f"what stands after -- is for `vllm serve`: put {words} into the --serve-command itself")
    if words and url and _is_used_as_it_is(wanted, url):
        raise UsageError(
            f"{url} runs already, and what stands after -- is for one that we start: "
            f"leave {words} out, or start that server with it"
        )


def _is_used_as_it_is(wanted: Wanted, url: str) -> bool:
    """Whether the server at the URL is not ours to start: it is on another machine, or it answers."""
    return not is_local(url) or is_up(url, wanted.api_key or "EMPTY")


@contextlib.contextmanager
def running_server(wanted: Wanted) -> Iterator[Server]:
    """Use the server at `wanted.url`, or spawn one; a spawned one is ended on leaving.

    A local URL where nothing answers is where we spawn; a remote one is waited for and never shadowed.
    """
    check_possible(wanted)
    url = base_url(wanted.url) if wanted.url else None
    if url and _is_used_as_it_is(wanted, url):
        key = wanted.api_key or "EMPTY"
        yield Server(get_ready(wanted.model, wanted.trust, url, key, wanted.startup_timeout_s))
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


def server_command(wanted: Wanted, host: str, port: int) -> list[str]:
    """Return the words that start the server: `vllm serve`, or the command that the user gave.

    In a command of the user's `{host}`, `{port}` and `{model}` are filled in; where it has no `{port}`, `--host` and
    `--port` go at its end, which vLLM, llama-server and rapidocr-server.py all take.
    """
    if wanted.command is None:
        if shutil.which("vllm") is None:
            raise EngineError(
                f"nothing answers at {wanted.url}, and there is no `vllm` command on this machine to start at "
                f"{host}:{port}. Is the server that you mean still starting? Wait until {host}:{port}/health answers.\n"
                f"{wanted.hint}"
            )
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
