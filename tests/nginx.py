"""A real nginx with serving/nginx.conf, in front of a server of a test."""

from __future__ import annotations

import contextlib
import subprocess
import time
from typing import TYPE_CHECKING

import requests

from tests.prometheus import SERVING
from tests.runs import PATIENCE_S
from tests.system_tools import system_tool
from tests.vllm_cpu import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

# where nginx keeps what is no business of the configuration: a user who is not root can't write to its own folders
FOLDERS = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")


def write_config(upstream: str, port: int, folder: Path, changes: Sequence[tuple[str, str]] = ()) -> Path:
    """Write serving/nginx.conf with other addresses, folders of its own, and the changes given; each must fit once."""
    config = (SERVING / "nginx.conf").read_text()
    own = "".join(f"  {name}_temp_path {folder}/{name};\n" for name in FOLDERS)
    ours = [
        ("server vllm:8000;", f"server {upstream.removeprefix('http://')};"),
        ("listen 8080;", f"listen 127.0.0.1:{port};"),
        ("pid /tmp/nginx.pid;", f"pid {folder}/nginx.pid;"),
        ("http {\n", f"http {{\n{own}"),
    ]
    for old, new in [*ours, *changes]:
        assert config.count(old) == 1, old
        config = config.replace(old, new)
    path = folder / "nginx.conf"
    path.write_text(config)
    return path


@contextlib.contextmanager
def proxy(upstream: str, folder: Path, changes: Sequence[tuple[str, str]] = ()) -> Iterator[str]:
    """Run nginx until the block ends; gives its URL."""
    port = free_port()
    config = write_config(upstream, port, folder, changes)
    command = [system_tool("nginx"), "-p", str(folder), "-e", "stderr", "-c", str(config), "-g", "daemon off;"]
    with (folder / "nginx.log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            _wait_until_up(f"http://127.0.0.1:{port}", process, folder / "nginx.log")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def _wait_until_up(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    give_up_at = time.monotonic() + PATIENCE_S
    while process.poll() is None and time.monotonic() < give_up_at:
        with contextlib.suppress(requests.RequestException):
            requests.get(url, timeout=5)
            return
        time.sleep(0.05)
    raise RuntimeError(f"nginx is not up (exit code {process.poll()}):\n{log.read_text()[-3000:]}")
