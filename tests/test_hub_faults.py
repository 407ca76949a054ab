"""What the stand-in for the Hub can be told to do wrong, as the real client sees it."""

from __future__ import annotations

import functools
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import parse_ratelimit_headers  # type: ignore[attr-defined]

from tests.hub_server import HubServer
from tests.hub_state import WRITE_TOKEN
from tests.runs import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # the client's own uploads


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("huggingface_hub.utils._http.time", SimpleNamespace(sleep=lambda _: None))  # its pauses
    with HubServer() as server:
        server.create("me/out")
        yield server
        assert not server.unknown


def api(hub: HubServer) -> HfApi:
    return HfApi(hub.url, WRITE_TOKEN)


def upload(hub: HubServer, path: str, content: bytes = b"x") -> None:
    api(hub).upload_file(path_or_fileobj=content, path_in_repo=path, repo_id="me/out", repo_type="dataset")


def refusal(call: Callable[[], Any]) -> HfHubHTTPError:
    """The error of a call that the Hub refuses."""
    with pytest.raises(HfHubHTTPError) as caught:
        call()
    return caught.value


def status(error: HfHubHTTPError) -> int:
    return int(error.response.status_code)


def test_a_refusal_comes_when_it_is_due_as_often_as_it_was_scripted(hub: HubServer) -> None:
    hub.fail("POST", "/commit/", 412, times=2, skip=1)
    hub.fail("POST", "/commit/", 429, skip=1, retry_after=7)
    upload(hub, "1.txt")
    errors = [refusal(lambda: upload(hub, "2.txt")) for _ in range(3)]
    upload(hub, "2.txt")
    assert [status(error) for error in errors] == [412, 412, 429]
    assert errors[2].response.headers["Retry-After"] == "7"
    assert [commit.title for commit in hub.commits("me/out")[1:]] == [
        f"Upload {n}.txt with huggingface_hub" for n in "12"
    ]


def test_the_client_comes_again_by_itself_after_an_upload_that_failed(hub: HubServer) -> None:
    hub.fail("PUT", "/lfs/objects/", 503, times=2)
    hub.fail("PUT", "/lfs/objects/", 0, times=1)
    upload(hub, "a.parquet", b"content")
    assert hub.requests["PUT /lfs/objects/{oid}"] == 4
    assert hub.files("me/out")["a.parquet"] == b"content"


def test_a_commit_whose_answer_is_lost_has_been_made(hub: HubServer) -> None:
    hub.fail("POST", "/commit/", 0, late=True)
    with pytest.raises(Exception, match=r"[Dd]isconnected|reset"):
        upload(hub, "a.txt")
    assert list(hub.files("me/out")) == [".gitattributes", "a.txt"]


def test_a_quota_of_commits_says_when_it_opens_again(hub: HubServer) -> None:
    quota = hub.limit_commits(2, window_s=3600)
    upload(hub, "1.txt")
    upload(hub, "2.txt")
    error = refusal(lambda: upload(hub, "3.txt"))
    assert status(error) == 429
    limit = parse_ratelimit_headers(error.response.headers)
    assert limit is not None
    assert (limit.resource_type, limit.remaining, limit.limit, limit.window_seconds) == ("commits", 0, 2, 3600)
    assert 0 < limit.reset_in_seconds <= 3601
    assert quota.refused == 1
    quota.window_s = 0.0
    upload(hub, "3.txt")
    assert len(hub.commits("me/out")) == 1 + 3


def test_a_rate_limit_of_reading_is_waited_for_by_the_client(hub: HubServer) -> None:
    hub.fail("GET", "/tree/", 429, times=2, rate_limit=55)
    assert list(api(hub).list_repo_files("me/out", repo_type="dataset")) == [".gitattributes"]
    assert sum(count for route, count in hub.requests.items() if "/tree/" in route) == 3


def test_an_address_for_uploads_that_has_expired_is_asked_for_anew_by_the_next_try_only(hub: HubServer) -> None:
    addition = CommitOperationAdd("a.parquet", b"content")
    send = functools.partial(api(hub).preupload_lfs_files, "me/out", [addition], repo_type="dataset")
    hub.uploads.expire(2)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"Error while uploading 'a\.parquet'") as caught:
            send()
        assert isinstance(caught.value.__cause__, HfHubHTTPError)
        assert status(caught.value.__cause__) == 403
    send()
    assert (hub.uploads.expired, hub.requests["PUT /lfs/objects/{oid}"]) == (2, 3)
    api(hub).create_commit("me/out", [addition], commit_message="m", repo_type="dataset")
    assert hub.files("me/out")["a.parquet"] == b"content"


def test_parts_of_a_large_file_expire_too(hub: HubServer) -> None:
    hub.routes.multipart_from_bytes, hub.routes.multipart_chunk_bytes = 1000, 400
    hub.uploads.expire(1)
    with pytest.raises(RuntimeError, match=r"Error while uploading 'a\.parquet'"):
        upload(hub, "a.parquet", bytes(1200))
    upload(hub, "a.parquet", bytes(1200))
    assert hub.files("me/out")["a.parquet"] == bytes(1200)


def test_a_slow_line_lets_an_upload_through_piece_by_piece(hub: HubServer) -> None:
    content = bytes(10 * 1024 * 1024)
    hub.uploads.bytes_per_s = 1e6
    sender = threading.Thread(target=upload, args=(hub, "a.parquet", content))
    sender.start()
    wait_until(lambda: hub.uploads.bytes_received, "the first piece has come")
    assert hub.uploads.bytes_received < len(content)
    assert "a.parquet" not in hub.files("me/out")
    hub.uploads.bytes_per_s = 0.0
    sender.join()
    assert hub.files("me/out")["a.parquet"] == content


def test_a_request_that_is_held_has_no_effect_until_it_is_let_go(hub: HubServer) -> None:
    with hub.hold("POST", "/commit/") as held:
        sender = threading.Thread(target=upload, args=(hub, "a.txt"))
        sender.start()
        wait_until(lambda: held.waiting, "the commit has come")
        assert list(hub.files("me/out")) == [".gitattributes"]
    sender.join()
    assert list(hub.files("me/out")) == [".gitattributes", "a.txt"]


def test_tags_and_settings(hub: HubServer) -> None:
    upload(hub, "a.txt", b"1")
    client = api(hub)
    client.create_tag("me/out", tag="v1", repo_type="dataset")
    upload(hub, "a.txt", b"2")
    assert refusal(lambda: client.create_tag("me/out", tag="v1", repo_type="dataset")).response.status_code == 409
    assert hub.files("me/out", "v1")["a.txt"] == b"1"
    assert [tag.name for tag in client.list_repo_refs("me/out", repo_type="dataset").tags] == ["v1"]
    client.delete_tag("me/out", tag="v1", repo_type="dataset")
    assert status(refusal(lambda: client.delete_tag("me/out", tag="v1", repo_type="dataset"))) == 404
    client.update_repo_settings("me/out", private=True, gated="auto", repo_type="dataset")
    info = client.dataset_info("me/out")
    assert (info.private, info.gated) == (True, "auto")
    client.update_repo_settings("me/out", private=False, gated=False, repo_type="dataset")
    assert (hub.repo("me/out").private, hub.repo("me/out").gated) == (False, False)
