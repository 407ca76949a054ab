"""Blocks on their way to a Hub dataset, against an API that only remembers; and patience with one that refuses."""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import httpx2 as httpx
import pyarrow as pa
import pytest
from huggingface_hub import RepoFile

from src.blocks import Shard, Target
from src.commits import upload_files
from src.errors import EngineError, PublishError
from src.hub_blocks import HubBlocks
from src.interrupt import Interrupted
from src.patience import Patience, is_permanent, wished_pause_s
from src.work_ref import Destination

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TABLE = pa.table({"markdown": ["text"] * 3, "markdown_status": ["ok", "ok", "error"]})


class Api:
    """What is called of `HfApi`. `away` makes every call fail; `gate` holds commits back."""

    def __init__(self, staging: Path) -> None:
        self.staging = staging
        self.there: dict[str, int] = {}
        self.branches = {"main"}
        self.commits: list[list[str]] = []
        self.away = False
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self) -> Api:
        return self

    def _answer(self) -> None:
        if self.away:
            raise ConnectionError("nobody there")

    def list_repo_tree(self, *_: Any, **__: Any) -> list[Any]:
        self._answer()
        return [RepoFile(path=path, size=size, oid="0") for path, size in self.there.items()]  # type: ignore[no-untyped-call]

    def list_repo_refs(self, *_: Any, **__: Any) -> SimpleNamespace:
        self._answer()
        return SimpleNamespace(branches=[SimpleNamespace(name=name, target_commit="0") for name in self.branches])

    def create_repo(self, *_: Any, **__: Any) -> None:
        self._answer()

    def create_branch(self, _repo: str, *, branch: str, **_options: Any) -> None:
        self._answer()
        self.branches.add(branch)

    def preupload_lfs_files(self, *_: Any, **__: Any) -> None:
        self._answer()

    def create_commit(self, _repo: str, operations: list[Any], **_options: Any) -> None:
        self.gate.wait(10)
        self._answer()
        names = [operation.path_in_repo for operation in operations]
        assert all((self.staging / name).exists() for name in names), "a block left before its commit"
        self.there |= dict.fromkeys(names, 1)
        self.commits.append(names)


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    fake = Api(tmp_path)
    monkeypatch.setattr("huggingface_hub.HfApi", fake)
    monkeypatch.setattr("src.patience.FIRST_NETWORK_PAUSE_S", 0.01)
    monkeypatch.setattr("src.uploads.PUBLISH_RETRY_S", 0.2)
    monkeypatch.setattr("src.remote_blocks.LOOK_RETRY_S", 0.1)
    yield fake
    fake.gate.set()


def hub_blocks(tmp_path: Path, *, every_s: float = 1e6, shard: Shard | None = None) -> HubBlocks:
    place = Destination("me/text", Target("train"))
    return HubBlocks(place, tmp_path, shard=shard or Shard(), commit_every_s=every_s)


def write_and_raise(
    blocks: HubBlocks, number: int, error: BaseException, before: Callable[[], None] = lambda: None
) -> None:
    """A run that closes a block, and then ends in this way."""
    with blocks.locked():
        blocks.closed()
        before()
        blocks.write(number, TABLE)
        raise error


def staged(tmp_path: Path) -> list[int]:
    return sorted(int(file.stem[-6:]) for file in (tmp_path / "data").glob("train-*.parquet"))


def test_what_waits_for_its_commit_stays_bounded_and_is_committed_before_the_disk_is_full(
    tmp_path: Path, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("src.uploads.MOST_IN_A_COMMIT", 3)
    monkeypatch.setattr("src.uploads.MOST_STAGED", 4)
    blocks, most = hub_blocks(tmp_path), 0
    with blocks.locked():
        blocks.get_ready(to_write=True)
        for number in range(20):
            blocks.write(number, TABLE)
            most = max(most, len(staged(tmp_path)))
            assert blocks.closed() == set(range(number + 1))
    assert most <= 4
    assert list(itertools.chain(*api.commits)) == [f"data/train-{number:06d}.parquet" for number in range(20)]
    assert max(map(len, api.commits)) == 3
    assert staged(tmp_path) == []
    assert blocks.closed() == set(range(20))


def test_a_small_disk_is_not_filled(tmp_path: Path, api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("src.uploads.MOST_STAGED_BYTES", 5000)  # a block has more than 715
    blocks = hub_blocks(tmp_path)
    with blocks.locked():
        for number in range(10):
            blocks.write(number, TABLE)
            assert len(staged(tmp_path)) <= 7
    assert len(api.there) == 10


def test_a_block_is_never_missing_while_it_goes_from_here_to_there(tmp_path: Path, api: Api) -> None:
    blocks, written, done = hub_blocks(tmp_path, every_s=0.0), [0], threading.Event()
    missing: list[int] = []

    def watch() -> None:
        while not done.is_set():
            expected = set(range(written[0]))
            missing.extend(expected - blocks.closed())

    with blocks.locked():
        blocks.closed()
        watcher = threading.Thread(target=watch)
        watcher.start()
        for number in range(60):
            blocks.write(number, TABLE)
            written[0] = number + 1
    done.set()
    watcher.join()
    assert not missing
    assert len(api.commits) > 1


def test_a_hub_that_comes_back_gets_all_blocks(tmp_path: Path, api: Api) -> None:
    blocks = hub_blocks(tmp_path, every_s=0.0)
    with blocks.locked():
        blocks.closed()
        api.away = True
        blocks.write(0, TABLE)
        blocks.write(1, TABLE)
        time.sleep(0.05)
        assert staged(tmp_path) == [0, 1]
        api.away = False
    assert staged(tmp_path) == []
    assert len(api.there) == 2


def test_a_hub_that_stays_away_fails_the_run_and_the_next_one_publishes_what_was_kept(tmp_path: Path, api: Api) -> None:
    blocks = hub_blocks(tmp_path, every_s=0.0)

    def run() -> None:
        with blocks.locked():
            blocks.closed()
            api.away = True
            blocks.write(0, TABLE)
            while True:
                time.sleep(0.01)
                blocks.write(1, TABLE)

    with pytest.raises(PublishError, match=f"kept in {tmp_path}; the same command publishes it"):
        run()
    assert staged(tmp_path) == [0, 1]
    assert blocks.unpublished()
    api.away = False
    later = hub_blocks(tmp_path)
    assert later.closed() == {0, 1}
    with later.locked():
        later.get_ready(to_write=False)
    assert (len(api.commits), staged(tmp_path), len(api.there)) == (1, [], 2)


def test_what_else_went_wrong_is_said_too(tmp_path: Path, api: Api) -> None:
    error = EngineError("the engine fell")
    with pytest.raises(PublishError, match=r"the engine fell\nAnd publishing to me/text failed: ConnectionError"):
        write_and_raise(hub_blocks(tmp_path), 0, error, lambda: setattr(api, "away", True))


def test_a_signal_commits_what_is_closed_and_waits_for_no_hub_that_is_away(
    tmp_path: Path, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Interrupted):
        write_and_raise(hub_blocks(tmp_path), 0, Interrupted(15))
    assert list(api.there) == ["data/train-000000.parquet"]
    monkeypatch.setattr("src.uploads.PUBLISH_RETRY_S", 1e6)
    monkeypatch.setattr("src.uploads.HURRY_S", 0.1)
    with pytest.raises(PublishError):
        write_and_raise(hub_blocks(tmp_path), 1, Interrupted(15), lambda: setattr(api, "away", True))
    assert staged(tmp_path) == [1]


def test_a_signal_in_the_last_commit_does_not_cut_it_off(
    tmp_path: Path, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = hub_blocks(tmp_path)
    api.gate.clear()

    class Interrupting(threading.Thread):
        """Whoever waits for it first is interrupted."""

        interrupted = False

        def join(self, timeout: float | None = None) -> None:
            if not self.interrupted:
                self.interrupted = True
                threading.Timer(0.1, api.gate.set).start()
                raise Interrupted(15)
            super().join(timeout)

    def run() -> None:
        with blocks.locked():
            blocks.closed()
            blocks.write(0, TABLE)

    monkeypatch.setattr("src.uploads.threading.Thread", Interrupting)
    with pytest.raises(Interrupted):
        run()
    assert list(api.there) == ["data/train-000000.parquet"]


def test_a_shard_leaves_the_blocks_of_others_on_this_machine_alone(tmp_path: Path, api: Api) -> None:
    first, second = (hub_blocks(tmp_path, shard=Shard(index, 2)) for index in range(2))
    with first.locked():
        first.closed()
        first.write(0, TABLE)
        with second.locked():
            second.get_ready(to_write=True)
            assert second.closed() == set()
            second.write(1, TABLE)
        assert staged(tmp_path) == [0]
        assert list(api.there) == ["data/train-000001.parquet"]
    assert len(api.there) == 2
    assert first.closed() == {0, 1}, "others' blocks are seen at the end"


@pytest.mark.parametrize(
    ("cause", "seen"),
    [(ConnectionError("403"), ConnectionError), (None, ConnectionError), (FileNotFoundError("x"), FileNotFoundError)],
)
def test_what_the_client_wraps_of_an_upload_is_tried_again_unless_the_file_is_gone(
    monkeypatch: pytest.MonkeyPatch, cause: Exception | None, seen: type[OSError]
) -> None:
    def preupload(*_: Any, **__: Any) -> None:
        raise RuntimeError("Error while uploading 'a' to the Hub.") from cause

    monkeypatch.setattr("huggingface_hub.HfApi", lambda: SimpleNamespace(preupload_lfs_files=preupload))
    with pytest.raises(OSError, match=r"x|Error while uploading 'a' to the Hub\. \(\w+, no answer\)") as caught:
        upload_files("me/text", [], "main")
    assert type(caught.value) is seen
    assert is_permanent(caught.value) == (seen is FileNotFoundError)


# --- patience --------------------------------------------------------------------------------------------------------


def refusal(status: int, **headers: str) -> Exception:
    response = httpx.Response(status, headers={name.replace("_", "-"): value for name, value in headers.items()})
    error = ConnectionError(f"HTTP {status}")
    error.response = response  # type: ignore[attr-defined]
    return error


@pytest.mark.parametrize(
    ("error", "permanent"),
    [(refusal(status), True) for status in (400, 401, 403, 404, 413)]
    + [(refusal(status), False) for status in (408, 409, 412, 429, 500, 503)]
    + [(ConnectionError("HTTP status client error (403 Forbidden), domain: xet"), True)]
    + [(ConnectionError("HTTP status client error (429 Too Many Requests), domain: xet"), False)]
    + [(ConnectionError(), False), (TimeoutError(), False), (FileNotFoundError(), True), (PermissionError(), True)],
)
def test_what_may_pass_is_told_from_what_will_not(error: Exception, permanent: bool) -> None:
    assert is_permanent(error) == permanent


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (refusal(429, retry_after="17"), 17),
        (refusal(503, retry_after="Wed, 21 Oct 2026 07:28:00 GMT"), 0),
        (refusal(429, ratelimit='"api";r=0;t=55'), 55),
        (refusal(429, ratelimit='"api";r=9;t=55'), 0),
        (refusal(412), 0),
        (ConnectionError(), 0),
    ],
)
def test_the_pause_is_the_one_that_the_hub_wishes(error: Exception, seconds: float) -> None:
    assert wished_pause_s(error) == seconds


def test_patience_ends_at_its_bound_at_once_where_nothing_can_help_and_soon_in_a_hurry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("src.patience.FIRST_NETWORK_PAUSE_S", 0.01)
    tried: list[Exception] = []

    def failing(error: Exception) -> None:
        tried.append(error)
        raise error

    with pytest.raises(ConnectionError):
        Patience(0.1, 0.02).call(lambda: failing(ConnectionError("away")), "it")
    assert len(tried) > 3
    tried.clear()
    with pytest.raises(ConnectionError, match="HTTP 403"):
        Patience(1e6).call(lambda: failing(refusal(403)), "it")
    assert len(tried) == 1
    patience = Patience(1e6)
    threading.Timer(0.05, patience.hurry, (0.0,)).start()
    with pytest.raises(ConnectionError, match="HTTP 429"):
        patience.call(lambda: failing(refusal(429, retry_after="1000")), "it")
    assert patience.is_hurried
