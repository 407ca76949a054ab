"""Servers of stubs that a run spawns and starts again: what each of them is told to do, and what all of them saw."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

from src.canary import CANARY_LINES, CANARY_SIZE_PX
from tests.runs import STUB, is_running, wait_until
from tests.stub_vllm import read_journal

# the stub's answer to the canary page, as an engine that can read would give it
READABLE = json.dumps({"kind": "answer", "text": "\n".join(CANARY_LINES), "size": "{}x{}".format(*CANARY_SIZE_PX)})


class Server:
    """A `--serve-command` of stubs: each start has its own options, the last ones stay; a journal of them all.

    `$start` in the options is the number of the start, from 0.
    """

    def __init__(self, folder: Path, *starts: str) -> None:
        self.folder = folder / "server"
        self.folder.mkdir()
        self.journal = self.folder / "journal"
        self.arrivals = self.folder / "arrivals"
        for number, options in enumerate(starts):
            (self.folder / f"options-{number}").write_text(options)
        stub = shlex.join([sys.executable, str(STUB), "--read-tag", "--journal", str(self.journal)])
        stub += f" --arrivals {shlex.quote(str(self.arrivals))}"
        script = (
            f"cd {shlex.quote(str(self.folder))}\n"
            "echo $$ >> pids\nn=$(($(wc -l < pids) - 1))\nstart=$n\n"
            f"while [ ! -f options-$n ]; do n=$((n - 1)); done\n"
            f'eval "exec {stub} $(cat options-$n) \\"\\$@\\""\n'
        )
        (self.folder / "serve.sh").write_text(script)
        self.command = f"sh {shlex.quote(str(self.folder / 'serve.sh'))}"

    @property
    def words(self) -> list[str]:
        """The options that start it."""
        return ["--serve-command", self.command]

    @property
    def pids(self) -> list[int]:
        """The processes so far."""
        file = self.folder / "pids"
        return [int(line) for line in file.read_text().split()] if file.exists() else []

    def asked(self) -> dict[str, int]:
        """How often each page was asked about and the server lived to tell."""
        counts: dict[str, int] = {}
        for entry in read_journal(self.journal):
            counts[entry["tag"]] = counts.get(entry["tag"], 0) + 1
        return counts

    def answers(self) -> dict[str, int]:
        """How often each page was answered."""
        counts: dict[str, int] = {}
        for entry in read_journal(self.journal):
            if entry["outcome"] == "200":
                counts[entry["tag"]] = counts.get(entry["tag"], 0) + 1
        return counts


def fault(spec: str) -> str:
    """The options for a fault."""
    return f"--fault {shlex.quote(spec)}"


def assert_gone(server: Server) -> None:
    """None of its processes is left."""
    wait_until(lambda: not any(is_running(pid) for pid in server.pids), "the servers are gone")
