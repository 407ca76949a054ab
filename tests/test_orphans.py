"""What a process has started is ended when it is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import ROOT, is_running, wait_until

SCRIPT = """
import subprocess, sys, time
sys.path.insert(0, {root!r})
from src.orphans import end_children_with_us
end_children_with_us()
child = subprocess.Popen(["sh", "-c", "trap '' TERM; sleep 600 & echo $! > {folder}/grandchild; wait; sleep 600"])
open("{folder}/child", "w").write(str(child.pid))
time.sleep({seconds})
child.kill()
"""


@pytest.mark.parametrize("how", ["killed", "terminated"])
def test_what_a_killed_process_had_started_is_ended_too(tmp_path: Path, how: str) -> None:
    code = SCRIPT.format(root=str(ROOT), folder=tmp_path, seconds=600)
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        files = [tmp_path / "child", tmp_path / "grandchild"]
        wait_until(lambda: all(file.exists() and file.read_text().strip() for file in files), "both run")
        pids = [int(file.read_text()) for file in files]
        wait_until(lambda: watcher_of(process.pid), "the watcher runs")
        watcher = watcher_of(process.pid)
        # it has looked when it has slept once
        subprocess.run(["sleep", "1.5"], check=True)
        process.send_signal(signal.SIGKILL if how == "killed" else signal.SIGTERM)
    wait_until(lambda: not any(is_running(pid) for pid in [*pids, *watcher]), "all are gone")


def watcher_of(pid: int) -> list[int]:
    """The watcher below a process."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid and "getppid" in (entry / "cmdline").read_text():
                found.append(int(entry.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found
