"""Whole runs of all three scripts against the stand-in for the Hub, with the real clients: what may go wrong.

Each scenario leaves the data whole: all rows once, in order, each with the text of its own page. The offline script
runs with the `vllm` of tests/fake_vllm, which has the stub answer.
"""

from __future__ import annotations

import io
import os
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from tests.hub_server import HubServer, hub_env
from tests.many_runs import with_fake_vllm
from tests.runs import (
    OFFLINE,
    SATURATE,
    SCRIPT,
    Ended,
    Running,
    assert_all_read,
    assert_input_is_kept,
    pages_dataset,
    tag_of,
    wait_until,
)
from tests.stub_vllm import DEFAULT_MODEL, StubVllm

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow  # other programs are started


FILES, ROWS_A_FILE = 4, 4
ROWS = FILES * ROWS_A_FILE
WORK = "unfinished-train"
# the fast tests run one script; what differs between the three is the engine, and how pages get there
THREE = [SCRIPT, pytest.param(SATURATE, marks=pytest.mark.slow), pytest.param(OFFLINE, marks=pytest.mark.slow)]
each_script = pytest.mark.parametrize("script", THREE, ids=lambda script: script.stem)


@pytest.fixture(scope="module")
def shared_stub() -> Iterator[StubVllm]:
    with StubVllm("--read-tag") as stub:
        yield stub


@pytest.fixture
def stub(shared_stub: StubVllm) -> StubVllm:
    """One server for many tests: counted anew and without faults for each."""
    shared_stub.configure(faults=[], seconds_per_page=0, ceiling=0, max_num_seqs=256)
    wait_until(lambda: shared_stub.stats()["in_flight"] == 0, "requests of the test before are gone")
    shared_stub.reset()
    return shared_stub


@pytest.fixture(scope="module")
def pages() -> pa.Table:
    """The rows of the input, each heavy enough to be told from a footer."""
    table = pages_dataset(range(1, ROWS + 1)).with_format("arrow")[:]
    noise = pa.array([os.urandom(50_000) for _ in range(ROWS)])
    return table.append_column("noise", noise).combine_chunks()


@pytest.fixture
def hub(pages: pa.Table) -> Iterator[HubServer]:
    """A Hub with the pages in files of a private dataset, `me/scans`."""
    with HubServer() as server:
        server.create("me/scans", private=True)
        for number in range(FILES):
            out = io.BytesIO()
            pq.write_table(pages.slice(number * ROWS_A_FILE, ROWS_A_FILE), out)
            server.put("me/scans", source_file(number), out.getvalue())
        yield server
        assert not server.unknown


def source_file(number: int) -> str:
    return f"data/train-{number:05d}-of-{FILES:05d}.parquet"


@dataclass(frozen=True)
class Machine:
    """A machine of its own: another home has other caches and another staging folder."""

    hub: HubServer
    stub: StubVllm
    home: Path

    def start(self, script: Path, *words: str, output: str = "me/text", token: str | None = None) -> Running:
        """Start a run there, with a block a file of the input, each committed as it closes."""
        self.home.mkdir(exist_ok=True)
        env = hub_env(self.hub, self.home, token or self.hub.token) | {"XDG_CACHE_HOME": str(self.home / "cache")}
        if script == OFFLINE:
            env = with_fake_vllm(env, self.stub.url)
        server = [] if script == OFFLINE else ["--server", self.stub.url]
        fixed = ["me/scans", output, *server, "--model", DEFAULT_MODEL, "--block-rows", str(ROWS_A_FILE)]
        return Running(*fixed, "--commit-minutes", "0", *words, env=env, script=script)

    def run(self, script: Path, *words: str, output: str = "me/text", token: str | None = None) -> Ended:
        """Run there to the end."""
        with self.start(script, *words, output=output, token=token) as running:
            return running.wait()


def blocks_on(hub: HubServer, revision: str = "main", repo: str = "me/text", start: str = "data/train") -> list[str]:
    """The block files of a split that are there now; none where there is no such revision."""
    found = hub.hub.repos.get(("dataset", repo))
    if found is None or not {revision, f"refs/heads/{revision}"} & found.refs.keys():
        return []
    return sorted(name for name in hub.files(repo, revision) if name.startswith(f"{start}-"))


def published(hub: HubServer, revision: str = "main", repo: str = "me/text", start: str = "data/train") -> pa.Table:
    """The rows of a split as they are there now."""
    files = hub.files(repo, revision)
    tables = [pq.read_table(io.BytesIO(files[name])) for name in blocks_on(hub, revision, repo, start)]
    return pa.concat_tables(tables).combine_chunks()


def assert_whole(hub: HubServer, pages: pa.Table, revision: str = "main", repo: str = "me/text") -> None:
    """All rows once, in order, as they were, each with its text; the card names them and says that all are there."""
    table = published(hub, revision, repo)
    assert_input_is_kept(pages, table)
    assert_all_read(table, range(1, ROWS + 1))
    card = hub.files(repo, revision)["README.md"].decode()
    files = yaml.safe_load(card.split("---\n")[1])["configs"][0]["data_files"]
    assert {"split": "train", "path": "data/train-*.parquet"} in files
    assert f"{ROWS} rows: {ROWS} ok" in card


def assert_nothing_half(hub: HubServer, pages: pa.Table) -> None:
    """In every state that readers of main ever saw, the split is not there, or whole."""
    for commit in hub.commits("me/text"):
        blocks = [name for name in commit.files if name.startswith("data/train-")]
        assert len(blocks) in (0, FILES), commit.title


# --- killed ----------------------------------------------------------------------------------------------------------


@each_script
def test_killed_while_reading_and_killed_while_publishing_a_run_is_finished_from_other_machines(
    hub: HubServer, stub: StubVllm, pages: pa.Table, tmp_path: Path, script: Path
) -> None:
    # The last page of the last block hangs: the others are closed, uploaded and committed.
    stub.configure(faults=[f"hang,tag={tag_of(ROWS)}"])
    with Machine(hub, stub, tmp_path / "first").start(script) as first:
        wait_until(lambda: len(blocks_on(hub, WORK)) == FILES - 1, "all blocks but the last are collected")
        first.signal(signal.SIGKILL)
        first.wait()
    assert blocks_on(hub) == []
    assert hub.repo("me/text").private, "as the input is"
    wait_until(lambda: stub.stats()["in_flight"] == 0, "the killed run's requests are gone")

    stub.configure(faults=[])
    stub.reset()
    hub.bytes_served.clear()
    with hub.hold("POST", "/commit/main") as held:
        with Machine(hub, stub, tmp_path / "second").start(script) as second:
            wait_until(lambda: held.waiting, "all is uploaded, and the commit that publishes it has come")
            second.signal(signal.SIGKILL)
            second.wait()
        assert blocks_on(hub) == []
    assert stub.stats()["tags"] == {tag_of(number): 1 for number in range(ROWS - ROWS_A_FILE + 1, ROWS + 1)}
    for number in range(FILES):
        served = hub.bytes_served[source_file(number)]
        assert served < 80_000 if number < FILES - 1 else served > 200_000, "of finished blocks, the footers"
    wait_until(lambda: not held.waiting, "the killed run's commit is gone")

    stub.reset()
    ended = Machine(hub, stub, tmp_path / "third").run(script)
    assert ended.code == 0, ended
    assert (ended.line["rows_before"], ended.line["rows_done"], stub.stats()["requests"]) == (ROWS, 0, 0)
    assert_whole(hub, pages)
    assert_nothing_half(hub, pages)
    assert len(hub.commits("me/text")) == 2
    assert set(hub.repo("me/text").refs) == {"refs/heads/main"}, "the work branch is put away"


# --- a Hub that refuses ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@each_script
def test_a_hub_on_a_bad_day_costs_pauses_and_no_page(
    hub: HubServer, stub: StubVllm, pages: pa.Table, tmp_path: Path, script: Path
) -> None:
    quota = hub.limit_commits(2, window_s=4.0)
    hub.uploads.expire(1)
    hub.uploads.bytes_per_s = 2e6
    hub.fail("POST", "/preupload/", 503)
    hub.fail("PUT", "/lfs/objects/", 503, skip=1)
    hub.fail("PUT", "/lfs/objects/", 0, skip=2)
    hub.fail("POST", f"/commit/{WORK}", 0, late=True)
    hub.fail("POST", f"/commit/{WORK}", 429, skip=1, retry_after=1)
    hub.fail("POST", "/commit/main", 412, times=2)
    hub.fail("POST", "/commit/main", 0, late=True)
    ended = Machine(hub, stub, tmp_path / "home").run(script)
    assert ended.code == 0, ended
    assert quota.refused, "commits were refused, and waited for"
    assert hub.uploads.expired == 1
    assert "fails for now" in ended.stderr
    assert not [failure for failure in hub.routes.faults.failures if failure.times], "each fault has struck"
    assert stub.stats()["tags"] == {tag_of(number): 1 for number in range(1, ROWS + 1)}
    assert_whole(hub, pages)
    assert_nothing_half(hub, pages)
    assert set(hub.repo("me/text").refs) == {"refs/heads/main"}


@pytest.mark.slow
def test_four_processes_of_three_scripts_publish_into_one_dataset_at_once(
    hub: HubServer, stub: StubVllm, tmp_path: Path
) -> None:
    writers = [
        (SCRIPT, "train", None),
        (OFFLINE, "test", None),
        (SATURATE, "train", "second"),
        (SCRIPT, "test", "second"),
    ]
    with hub.hold("POST", "/commit/main") as held:
        runs = []
        for number, (script, split, config) in enumerate(writers):
            words = ["--output-split", split, *(["--output-config", config] if config else [])]
            runs.append(Machine(hub, stub, tmp_path / f"home{number}").start(script, *words))
        try:
            wait_until(lambda: held.waiting == len(writers), "all four are about to publish")
            assert not [name for name in hub.files("me/text") if name.endswith(".parquet")]
        finally:
            held.__exit__()
            ends = [run.wait() for run in runs]
    assert [ended.code for ended in ends] == [0, 0, 0, 0], ends
    assert sum("412" in ended.stderr for ended in ends) >= 3, "one was first, and the others made it anew"
    assert len(hub.commits("me/text")) == 1 + len(writers)
    card = hub.files("me/text")["README.md"].decode()
    configs = yaml.safe_load(card.split("---\n")[1])["configs"]
    named = {(config["config_name"], file["split"]) for config in configs for file in config["data_files"]}
    assert named == {(config or "default", split) for _, split, config in writers}
    assert card.count(f"{ROWS} rows: {ROWS} ok") == len(writers)
    for _, split, config in writers:
        assert_all_read(published(hub, start=f"{config or 'data'}/{split}"), range(1, ROWS + 1))
    assert set(hub.repo("me/text").refs) == {"refs/heads/main"}


# --- a token that may only propose -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_pull_request_is_handed_from_script_to_script(
    hub: HubServer, stub: StubVllm, pages: pa.Table, tmp_path: Path
) -> None:
    hub.repo("me/scans").private = False
    hub.hub.orgs["library"] = {}
    hub.create("library/text")
    token = hub.pr_token
    refused = Machine(hub, stub, tmp_path / "home").run(SCRIPT, output="library/text", token=token)
    assert refused.code == 2
    assert "or open a pull request with --create-pr" in refused.advice
    hanging = {SCRIPT: 2 * ROWS_A_FILE, OFFLINE: 3 * ROWS_A_FILE}
    for script, row in hanging.items():
        # the last page of a block hangs, and so do those of the blocks after it
        stub.configure(faults=[f"hang,tag={tag_of(number)}" for number in range(row, ROWS + 1)])
        home = tmp_path / script.stem
        with Machine(hub, stub, home).start(script, "--create-pr", output="library/text", token=token) as run:
            closed = row // ROWS_A_FILE - 1
            wait_until(
                lambda: len(blocks_on(hub, "refs/pr/1", "library/text")) == closed,  # noqa: B023 - at once
                "what can be read is proposed",
            )
            run.signal(signal.SIGTERM)
            assert run.wait().code == 143
        wait_until(lambda: stub.stats()["in_flight"] == 0, "the stopped run's requests are gone")
    stub.configure(faults=[])
    ended = Machine(hub, stub, tmp_path / "last").run(SATURATE, "--create-pr", output="library/text", token=token)
    assert ended.code == 0, ended
    assert ended.line["rows_before"] == 2 * ROWS_A_FILE
    assert_whole(hub, pages, "refs/pr/1", "library/text")
    assert set(hub.repo("library/text").refs) == {"refs/heads/main", "refs/pr/1"}
    assert set(hub.files("library/text")) == {".gitattributes"}
