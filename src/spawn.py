"""A server process of ours: in a process group of its own, its log in a file, and never alive after us.

Beside the server, in its group and started before it, waits a shell that reads from a pipe which only we hold. When
we die in whatever way, SIGKILL included, the pipe ends and the shell ends the group: the server and all it started.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from .errors import EngineError
from .report import say
from .startup import explanation

LOG_LINES_SHOWN = 20
LOG_BYTES_READ = 512 * 1024
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where vLLM's processes share pages of memory
# Variables by which `uv run` points Python at our environment: the server has its own.
OURS_ALONE = ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "UV", "UV_RUN_RECURSION_DEPTH", "VIRTUAL_ENV_PROMPT")
GUARD = (
    "trap '' TERM INT HUP QUIT PIPE; read -r word; [ \"$word\" = release ] && exit 0; "
    'rm -rf -- "$@"; kill -TERM 0; sleep 8; kill -KILL 0'
)


class Spawned:
    """A server process of ours. `image` is the one to recommend where this machine's vLLM does not fit.

    `sweep` is what the guard removes when we die without having done so.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        image: str = "",
        sweep: Sequence[Path] = (),
    ) -> None:
        self.log = log
        self._image = image
        self._shared: set[Path] = set()
        say(f"starting {shlex.join(command)}\n  its log: {log}")
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", GUARD, "guard", *map(str, sweep)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )
        self.group = self._guard.pid
        try:
            with log.open("wb") as output:
                self._process = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    process_group=self.group,
                )
        except OSError as error:
            self._end_guard()
            raise EngineError(f"can't start {command[0]!r}: {error}; check --serve-command") from error

    def how_it_ended(self) -> str | None:
        """Say how and why the process has ended, with the end of its log; None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        why = explanation(self.log_text(), self._image, killed=code == -signal.SIGKILL)
        return f"the server ended by itself ({how}){': ' if why else ''}{why}. {self.log_words()}"

    def log_text(self) -> str:
        """Return the end of the log."""
        with self.log.open("rb") as log:
            log.seek(max(0, self.log.stat().st_size - LOG_BYTES_READ))
            return log.read().decode(errors="replace")

    def log_words(self) -> str:
        """Name the log and show its last lines."""
        lines = self.log_text().splitlines()[-LOG_LINES_SHOWN:]
        tail = "\n".join(f"  | {line}" for line in lines) or "  (it wrote nothing)"
        return f"The end of its log, {self.log}:\n{tail}"

    def note_shared_memory(self) -> None:
        """Remember what the group has in shared memory, to remove it should the group be killed."""
        self._shared |= shared_files(group_members(self.group))

    def end(self, patience_s: float = 10.0) -> None:
        """End the process and all that it started: asked first, then killed; nothing of it stays in shared memory."""
        self._send(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience_s)
            give_up_at = time.monotonic() + 3.0  # what tidies up after the server gets its time too
            while time.monotonic() < give_up_at and set(group_members(self.group)) - {self.group}:
                time.sleep(0.05)
        self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)
        self._end_guard()

    def kill(self) -> None:
        """Kill the process group at once, without waiting."""
        self.note_shared_memory()
        self._send(signal.SIGKILL)
        for file in self._shared:
            with contextlib.suppress(OSError):
                file.unlink()

    def release(self) -> None:
        """Let the server live on without us."""
        assert self._guard.stdin is not None
        self._guard.stdin.write(b"release\n")
        self._end_guard()
        self._process.returncode = 0  # ours no more: Popen would warn of a child that still runs

    def _send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.group, number)

    def _end_guard(self) -> None:
        assert self._guard.stdin is not None
        with contextlib.suppress(OSError):
            self._guard.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._guard.wait(1.0)
            return
        self._guard.kill()
        self._guard.wait()


class LogReader:
    """Reads a log that grows, line by line; what a progress bar writes over counts as lines too."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0

    def new_lines(self) -> Iterator[str]:
        """Give what was written since the last call."""
        with self._path.open("rb") as log:
            log.seek(self._read)
            new = log.read(LOG_BYTES_READ)
        self._read += len(new)
        yield from new.decode(errors="replace").replace("\r", "\n").splitlines()


def group_members(group: int) -> list[int]:
    """Return the processes of a group that run; none where there is no /proc."""
    members: list[int] = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, its_group = entry.read_text(errors="replace").rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                members.append(int(entry.parent.name))
    return members


def shared_files(processes: Sequence[int]) -> set[Path]:
    """Return the files in shared memory, of the user's own, that these processes have mapped."""
    found: set[Path] = set()
    for process in processes:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{process}/maps").read_text(errors="replace").splitlines():
                name = line.partition("/")[2]
                if name.startswith("dev/shm/") and not name.endswith(" (deleted)"):
                    found.add(Path(f"/{name}"))
    return {file for file in found if file.parent == SHARED_MEMORY and _is_ours(file)}


def _is_ours(file: Path) -> bool:
    try:
        return file.stat().st_uid == os.geteuid()
    except OSError:
        return False


def server_environment(key: str, program: str) -> dict[str, str]:
    """Return the environment of a spawned server: ours, without what `uv run` set for us, and the key.

    `program` is what will be started: where it does not lie among our own programs, those go from PATH, so that the
    server finds its Python and not ours.
    """
    environment = {name: value for name, value in os.environ.items() if name not in OURS_ALONE}
    ours = Path(sys.prefix, "bin")
    found = shutil.which(program)
    if sys.prefix != sys.base_prefix and found and Path(found).parent != ours:
        kept = [part for part in environment.get("PATH", "").split(os.pathsep) if Path(part) != ours]
        environment["PATH"] = os.pathsep.join(kept)
    # FlashInfer's sampler is compiled by nvcc, which the plain image lacks: engine start would crash.
    environment.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    return {**environment, "VLLM_API_KEY": key, "LLAMA_API_KEY": key}
