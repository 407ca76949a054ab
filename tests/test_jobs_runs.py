"""Whole runs by `--jobs N`: real processes with a job's environment share an output; one of them is killed."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.hub_here import forget_files, hub_here
from tests.hub_server import hub_env
from tests.runs import SATURATE, SCRIPT, Ended, run_here, tag_of, wait_until, write_pages
from tests.stub_vllm import install_fake_vllm

if TYPE_CHECKING:
    from collections.abc import Iterator

    import datasets

    from tests.hub_jobs import HostedJob
    from tests.hub_server import HubServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PAGES, BLOCK_ROWS = 32, 2
PATIENCE_S = 400.0


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    with hub_here(monkeypatch, tmp_path / "home") as server:
        server.put("me/pages", "data/train.parquet", write_pages(tmp_path / "train.parquet", PAGES).read_bytes())
        yield server


def submit(script: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[Ended, dict[str, Any]]:
    """Submit a run of this script, which can't be asked to read the canary page."""
    monkeypatch.setattr(sys, "argv", [str(script)])
    ended = run_here("me/pages", "me/text", "--block-rows", str(BLOCK_ROWS), *words, script=script)
    said: dict[str, Any] = json.loads(ended.stdout)
    return ended, said


def last_line(job: HostedJob) -> dict[str, Any]:
    """The JSON line of a job's last process."""
    said: dict[str, Any] = json.loads([line for line in job.log.splitlines() if line.startswith("{")][-1])
    return said


def load_text() -> datasets.Dataset:
    """The output as people load it."""
    import datasets as library

    forget_files()
    return library.load_dataset("me/text", split="train")


def assert_whole(hub: HubServer) -> None:
    """Each row once, in order, with the text of its own page."""
    loaded = load_text()
    assert loaded["id"][:] == list(range(1, PAGES + 1))
    assert loaded["markdown_status"][:] == ["ok"] * PAGES
    for number, text in zip(loaded["id"], loaded["markdown"], strict=True):
        assert f"tag {tag_of(number)}" in text


def blocks_anywhere(hub: HubServer) -> set[int]:
    """The numbers of the blocks that are on any branch of the output."""
    repo = hub.hub.repos.get(("dataset", "me/text"))
    names = [name for ref in dict(repo.refs) for name in repo.at(ref).files] if repo else []
    return {int(Path(name).stem.rpartition("-")[2]) for name in names if name.endswith(".parquet")}


def test_four_jobs_share_an_output_and_one_that_was_killed_is_started_again(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # In the third job's first process the last page hangs: it can't end before it is killed, with blocks committed.
    calm = tmp_path / "calm"
    hanging = f"hang,tag={tag_of(29)}"
    folder = tmp_path / "bin"
    folder.mkdir()
    stub = install_fake_vllm(folder, "--read-tag").rename(folder / "stub")
    vllm = folder / "vllm"
    vllm.write_text(f'#!/bin/sh\n[ -e {shlex.quote(str(calm))} ] || set -- --fault {hanging} "$@"\nexec {stub} "$@"\n')
    vllm.chmod(0o755)
    hub.jobs.path.insert(0, folder)
    words = ["--jobs", "4", "--flavor", "a10g-small", "--commit-minutes", "0"]
    ended, said = submit(SATURATE, monkeypatch, *words)
    assert ended.code == 0, ended
    third = hub.jobs.all[2]
    wait_until(lambda: any(number % 4 == 2 for number in blocks_anywhere(hub)), "a block of the third job", PATIENCE_S)
    calm.touch()
    third.kill()
    jobs = hub.jobs.wait(PATIENCE_S)
    assert [job.stage for job in jobs] == ["COMPLETED"] * 4, [job.log for job in jobs]
    assert [job.exit_codes for job in jobs] == [[0], [0], [-9, 0], [0]]
    assert_whole(hub)
    lines = [last_line(job) for job in jobs]
    assert lines[2]["rows_before"] > 0, "what was committed is not asked again"
    assert [line["rows_before"] + line["rows_done"] for line in lines] == [8, 8, 8, 8]
    for line in lines:
        assert (line["flavor"], line["dollars_per_hour"]) == ("a10g-small", 1.0)
        assert line["dollars"] > 0
        assert line["dollars_per_thousand_pages"] > 0
    assert "per 1,000 pages (a10g-small, $1.00 an hour, prices of today)" in hub.files("me/text")["README.md"].decode()
    # As the user follows it: the commands that were printed, by the real CLI.
    for command in commands_in(ended.stderr):
        done = hf(hub, tmp_path, *command)
        assert done.returncode == 0, done
        assert (f"me/pages: {PAGES} rows" if command[1] == "logs" else "COMPLETED") in done.stdout, done
    # The same command again has nothing left to submit.
    ended, said = submit(SATURATE, monkeypatch, *words)
    assert (ended.code, said["jobs"], len(hub.jobs.all)) == (0, [], 4), ended


def commands_in(text: str) -> list[list[str]]:
    """The `hf` commands that were printed, but for the one that stops a job."""
    found = [line[line.index("hf jobs") :].split() for line in text.splitlines() if ": " in line and " hf jobs" in line]
    assert [command[2] for command in found] == ["logs", "ps", "wait", "cancel"]
    return [command[1:] for command in found if command[2] != "cancel"]


def hf(hub: HubServer, home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the real `hf` command."""
    command = [str(Path(sys.executable).with_name("hf")), *words]
    return subprocess.run(command, env=hub_env(hub, home), cwd=home, capture_output=True, text=True, check=False)


def test_two_jobs_of_the_server_script_share_an_output(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install_fake_vllm(tmp_path, "--read-tag")
    hub.jobs.path.insert(0, tmp_path)
    words = ["--jobs", "2", "--flavor", "l4x1", "--attempts", "1", "--commit-minutes", "0"]
    ended, _ = submit(SCRIPT, monkeypatch, *words)
    assert ended.code == 0, ended
    jobs = hub.jobs.wait(PATIENCE_S)
    assert [job.stage for job in jobs] == ["COMPLETED"] * 2, [job.log for job in jobs]
    assert_whole(hub)
    assert {last_line(job)["flavor"] for job in jobs} == {"l4x1"}
