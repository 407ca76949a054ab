"""The commands of README.md and SERVING.md that need no GPU and no account, run one after another as they stand there.

`uv run` is played by this test's own Python, `vllm` and `llama-server` by the stub, the Hub by its stand-in; hosts of
the pages are the stub's address. Everything else is real: scripts, options, folders, results, exit codes.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from src.models import DEFAULT_MODEL_ID
from tests.hub_server import HubServer, hub_env
from tests.runs import PATIENCE_S, ROOT, load, write_pages
from tests.servers import READABLE
from tests.stub_vllm import StubVllm, install_fake_vllm, tagged_png
from tests.system_tools import system_tool
from tests.test_doc_commands import ALL, PAGES, Command
from tools.doc_options import PARSERS

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

HOSTS = (
    "http://gpu-box:8000",
    "http://127.0.0.1:8000",
    "http://127.0.0.1:8080",
    "http://127.0.0.1:30000",
    "https://ADDRESS-THAT-WAS-PRINTED",
)
TEXT = json.loads((ROOT / "examples/truth.json").read_text())["01-title.png"]
# The canary page first: it has its size; every other page has the text of the smoke test's.
FAULTS = ("--fault", READABLE, "--fault", json.dumps({"kind": "answer", "text": TEXT}))


@dataclass(frozen=True)
class Sandbox:
    """A folder that looks like a clone, and the environment to run commands in it."""

    folder: Path
    environment: dict[str, str]
    server: str
    hub: HubServer

    def run(self, command: Command) -> subprocess.CompletedProcess[str]:
        """Run a command; what it would write is removed first, as commands of the page write to one `out/`."""
        words = [self._here(word) for word in command.words]
        if words[0].endswith("uv") and words[2] != "lighton-ocr-parity.py":
            shutil.rmtree(self.folder / words[4], ignore_errors=True)
            self.hub.hub.repos.pop(("dataset", words[4]), None)
        return subprocess.run(
            words,
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=10 * PATIENCE_S,
            check=False,
        )

    def _here(self, word: str) -> str:
        return self.server if word in HOSTS else word


def is_walked(command: Command) -> bool:
    """Whether it runs here: our scripts but the server that waits for others, and the smoke test."""
    script = command.words[2] if command.program == "uv" else ""
    return command.program == "serving/smoke.sh" or (script in PARSERS and script != "rapidocr-server.py")


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    folder = tmp_path_factory.mktemp("clone")
    for name in (*PARSERS, "examples", "serving"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "scans").mkdir()
    for number in (1, 2, 3):
        (folder / "scans" / f"{number}.png").write_bytes(tagged_png(number))
    programs = folder / "bin"
    (folder / ".uv" / "bin").mkdir(parents=True)
    programs.mkdir()
    for uv in (programs / "uv", folder / ".uv" / "bin" / "uv"):
        uv.write_text(f'#!/bin/sh\n[ "$1" = run ] && shift && exec {shlex.quote(sys.executable)} "$@"\n')
        uv.chmod(0o755)
    install_fake_vllm(programs, *FAULTS).rename(programs / "llama-server.stub")
    (programs / "llama-server").write_text(
        f'#!/bin/sh\nexec {shlex.quote(str(programs / "llama-server.stub"))} --served-model-name lighton-ocr "$@"\n'
    )
    (programs / "llama-server").chmod(0o755)
    install_fake_vllm(programs, *FAULTS)
    names = ("--served-model-name", DEFAULT_MODEL_ID, "rapidocr")
    with HubServer() as hub, StubVllm(*names, *FAULTS) as stub:
        hub.hub.orgs["namespace"] = {"me": "write"}
        hub.put_all("namespace/scans", [("data/train-00000-of-00001.parquet", parquet(folder))])
        home = folder / "home"
        environment = {
            **hub_env(hub, home),
            "PATH": os.pathsep.join([str(programs), os.environ["PATH"]]),
            "HOME": str(home),
            "XDG_CACHE_HOME": str(home / "cache"),
        }
        yield Sandbox(folder, environment, stub.url, hub)


def parquet(folder: Path) -> bytes:
    """A dataset of three pages, as a file of the Hub."""
    return write_pages(folder / "home" / "pages.parquet", 3).read_bytes()


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_work_one_after_another(sandbox: Sandbox, page: str) -> None:
    system_tool("curl")
    walked = [command for command in ALL if command.page == page and is_walked(command)]
    assert len(walked) >= 5
    for result in ("out-offline", "out-server", "out-gpu"):  # what a reader has from a run before
        done = sandbox.run(Command(page, 0, ("uv", "run", "lighton-ocr-server.py", "scans/", result)))
        assert done.returncode == 0, done.stderr
    for command in walked:
        done = sandbox.run(command)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr[-3000:]}"
        if command.words[2:3] == ("lighton-ocr-server.py",) and not command.words[4].startswith("namespace/"):
            assert set(load(sandbox.folder / command.words[4])["markdown_status"]) <= {"ok", "blank"}, command


def test_what_is_not_walked_is_a_server_or_needs_a_gpu_or_an_account_or_is_the_tests_themselves() -> None:
    rest = {
        " ".join(command.words[:3]) if command.program == "uv" else command.program
        for command in ALL
        if not is_walked(command)
    }
    assert rest <= {
        "uv run rapidocr-server.py",  # tests/test_rapidocr_server.py
        ".uv/bin/uv run pytest",  # this
        "python3",  # uv, by pip
        "serving/ascend.sh",  # tests/test_serving.py
        "vllm-router",  # tests/test_router.py
        "export",
        "promtool",  # run in tests/test_doc_commands.py
        "docker",
        "hf",
        "vllm",
    }
