"""No process that this one has started outlives it: a vLLM engine does not notice that its script was killed.

Measured with 0.32.0: after SIGKILL of the script its EngineCore and Worker run on, and hold the GPU. So a small
process watches over us. What is below us is written down while we live; when we are gone, what is left is ended.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

WATCHER = textwrap.dedent(
    """
    import os, signal, sys, time

    def processes():
        found = {}
        for name in os.listdir("/proc"):
            if name.isdigit():
                try:
                    with open(f"/proc/{name}/stat", errors="replace") as stat:
                        words = stat.read().rpartition(")")[2].split()
                    found[int(name)] = (int(words[1]), words[19], words[0])  # parent, start, state
                except (OSError, IndexError):
                    pass
        return found

    def shared_by(pid):
        try:
            with open(f"/proc/{pid}/maps", errors="replace") as maps:
                return {"/" + line.strip().partition("/")[2] for line in maps if "/dev/shm/" in line}
        except OSError:
            return set()

    parent, below, shared = int(sys.argv[1]), {}, set()
    while os.getppid() == parent:
        alive = processes()
        wanted = {parent}
        while True:
            more = {pid for pid, (its, _, _) in alive.items() if its in wanted} - wanted
            if not more:
                break
            wanted |= more
        for pid in wanted - {parent, os.getpid()}:
            below[pid] = alive[pid][1]
            shared |= shared_by(pid)
        time.sleep(0.5)
    for number, pause_s in ((signal.SIGTERM, 5), (signal.SIGKILL, 0)):
        give_up_at = time.monotonic() + pause_s
        alive = processes()
        for pid, start in below.items():
            if pid in alive and alive[pid][1] == start:
                try:
                    os.kill(pid, number)
                except OSError:
                    pass
        while time.monotonic() < give_up_at:
            alive = processes()
            if not any(pid in alive and alive[pid][1] == start and alive[pid][2] not in "ZX"
                       for pid, start in below.items()):
                break
            time.sleep(0.1)
    for file in shared if below else ():
        try:
            if os.path.dirname(file) == "/dev/shm" and os.stat(file).st_uid == os.geteuid():
                os.unlink(file)
        except OSError:
            pass
    """
)


def end_children_with_us() -> None:
    """Start the process that ends what we leave behind; nothing where there is no /proc."""
    if not Path("/proc/self/stat").exists():
        return
    command = [sys.executable, "-I", "-S", "-c", WATCHER, str(os.getpid())]
    watcher = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    watcher.returncode = 0  # it outlives us on purpose: Popen would warn of it
