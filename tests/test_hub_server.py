"""The stand-in for the Hub, as the real `huggingface_hub` and `datasets` see it, in processes of their own."""

from __future__ import annotations

import functools
import io
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import requests
from huggingface_hub import HfApi
from PIL import Image

from tests.hub_server import HubServer, hub_env
from tests.hub_state import PR_TOKEN, READ_TOKEN, WRITE_TOKEN, Token

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.timeout(90)

PRELUDE = """
import json, sys, io
from pathlib import Path
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, HfFileSystem
from huggingface_hub.errors import *
api = HfApi()
D = {"repo_type": "dataset"}
def error_of(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - whatever it is, the test looks at it
        status = getattr(getattr(error, "response", None), "status_code", None)
        return [type(error).__name__, status]
"""
DATASETS = "import datasets\n"


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server
        assert not server.unknown, "the client called what the stand-in does not have"


def client(hub: HubServer, home: Path, code: str, token: str | None = WRITE_TOKEN) -> Any:
    """Run `code` with the real clients, and give back what it left in `result`."""
    program = f"{PRELUDE}{code}\nprint(json.dumps(result))"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=hub_env(hub, home, token), cwd=home, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def error_of(call: Callable[..., Any], *args: Any, **options: Any) -> tuple[str, int | None] | None:
    """The error that a call of the client in this process ends with, and the status behind it."""
    try:
        call(*args, **options)
    except Exception as error:  # noqa: BLE001 - whatever it is, the test looks at it
        return type(error).__name__, getattr(getattr(error, "response", None), "status_code", None)
    return None


def png(color: str) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (20, 10), color).save(out, "PNG")
    return out.getvalue()


def parquet(rows: int, start: int = 0) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    numbers = list(range(start, start + rows))
    table = pa.table({"n": numbers, "payload": [bytes([n % 251]) * 2000 for n in numbers]})
    out = io.BytesIO()
    pq.write_table(table, out, row_group_size=10, compression="none", write_statistics=False)
    return out.getvalue()


# -- who may do what


def test_whoami_names_the_user_and_the_tokens_role(hub: HubServer, tmp_path: Path) -> None:
    code = f"""
def role(token):
    user = api.whoami(token=token)
    return [user["name"], user["auth"]["accessToken"]["role"]]
result = [role("{WRITE_TOKEN}"), role("{READ_TOKEN}"), error_of(api.whoami, token="hf_nobody")]
"""
    assert client(hub, tmp_path, code) == [["me", "write"], ["me", "read"], ["HfHubHTTPError", 401]]


def test_a_repo_is_created_once(hub: HubServer, tmp_path: Path) -> None:
    code = """
url = api.create_repo("me/out", private=True, **D)
again = error_of(api.create_repo, "me/out", **D)
api.create_repo("me/out", exist_ok=True, **D)
info = api.dataset_info("me/out")
result = [url.repo_id, again, info.private, [f.rfilename for f in info.siblings], len(info.sha)]
"""
    assert client(hub, tmp_path, code) == ["me/out", ["HfHubHTTPError", 409], True, [".gitattributes"], 40]
    assert hub.repo("me/out").private


def test_a_private_repo_is_hidden_from_those_outside(hub: HubServer, tmp_path: Path) -> None:
    hub.create("me/secret", private=True)
    hub.create("other/secret", private=True)
    code = """
result = [error_of(api.repo_info, name, **D) for name in ("me/secret", "other/secret", "me/missing")]
"""
    missing = "RepositoryNotFoundError"
    assert client(hub, tmp_path, code) == [None, [missing, 404], [missing, 404]]
    assert client(hub, tmp_path, code, token=None) == [[missing, 401]] * 3


def test_a_gated_repo_shows_itself_but_not_its_files(hub: HubServer, tmp_path: Path) -> None:
    hub.create("other/gated", gated=True)
    hub.put("other/gated", "a.txt", b"text")
    code = """
result = [api.repo_info("other/gated", **D).gated, error_of(api.auth_check, "other/gated", **D),
          error_of(api.hf_hub_download, "other/gated", "a.txt", **D)]
"""
    assert client(hub, tmp_path, code) == ["auto", ["GatedRepoError", 403], ["GatedRepoError", 403]]
    hub.repo("other/gated").granted.add("me")
    assert client(hub, tmp_path, code) == ["auto", None, None]


def test_a_read_token_can_neither_create_nor_commit(hub: HubServer, tmp_path: Path) -> None:
    hub.create("me/out")
    code = """
upload = dict(path_or_fileobj=b"x", path_in_repo="a.txt", repo_id="me/out", **D)
result = [error_of(api.create_repo, "me/new", **D), error_of(api.upload_file, **upload),
          error_of(api.auth_check, "me/out", write=True, **D), error_of(api.auth_check, "me/out", **D)]
"""
    refused = ["HfHubHTTPError", 403]
    assert client(hub, tmp_path, code, token=READ_TOKEN) == [refused, refused, refused, None]
    assert client(hub, tmp_path, code) == [None, None, None, None]


def test_a_token_for_pull_requests_can_only_open_them(hub: HubServer, tmp_path: Path) -> None:
    hub.create("other/out")
    code = """
upload = dict(path_or_fileobj=b"x", path_in_repo="a.parquet", repo_id="other/out", **D)
refused = error_of(api.upload_file, **upload)
opened = api.upload_file(create_pr=True, **upload)
api.upload_file(**(upload | {"path_in_repo": "b.txt"}), revision="refs/pr/1")
files = api.list_repo_files("other/out", revision="refs/pr/1", **D)
refs = api.list_repo_refs("other/out", include_pull_requests=True, **D)
result = [refused, opened.pr_num, files, [ref.ref for ref in refs.pull_requests]]
"""
    files = [".gitattributes", "a.parquet", "b.txt"]
    assert client(hub, tmp_path, code, token=PR_TOKEN) == [["HfHubHTTPError", 403], 1, files, ["refs/pr/1"]]
    assert list(hub.files("other/out")) == [".gitattributes"]


def test_a_fine_grained_token_may_do_what_its_scopes_say(hub: HubServer) -> None:
    hub.hub.orgs["lab"] = {"me": "write"}
    hub.hub.orgs["club"] = {"me": "read"}
    for name in ("me/out", "lab/out", "lab/other", "club/out"):
        hub.create(name)
    scoped = {("org", "lab"): ("repo.write",), ("dataset", "me/out"): ("repo.content.read", "repo.content.write")}
    hub.hub.tokens["hf_fine"] = Token("me", "fineGrained", scoped)

    def may(name: str, token: str) -> list[bool]:
        """Whether a commit goes there, and a new repository beside it."""
        api = HfApi(hub.url, token)
        upload = functools.partial(api.upload_file, path_or_fileobj=b"x", path_in_repo="a.txt", repo_type="dataset")
        beside = f"{name}-{token}"
        return [
            error_of(upload, repo_id=name) is None,
            error_of(api.create_repo, beside, repo_type="dataset") is None,
        ]

    assert may("me/out", "hf_fine") == [True, False]
    assert may("lab/out", "hf_fine") == [True, True]
    assert may("club/out", WRITE_TOKEN) == [False, False]
    assert may("lab/out", WRITE_TOKEN) == [True, True]
    user = HfApi(hub.url, "hf_fine").whoami()
    assert [(org["name"], org["roleInOrg"]) for org in user["orgs"]] == [("lab", "write"), ("club", "read")]
    assert user["auth"]["accessToken"]["fineGrained"]["scoped"][0] == {
        "entity": {"_id": "0" * 24, "type": "org", "name": "lab"},
        "permissions": ["repo.write"],
    }


def test_a_fine_grained_token_reads_a_gated_repo_only_where_it_says_so(hub: HubServer, tmp_path: Path) -> None:
    hub.create("other/gated", gated=True).granted.add("me")
    hub.put("other/gated", "a.txt", b"text")
    hub.hub.tokens["hf_fine"] = Token("me", "fineGrained", reads_gated=False)
    fetch = functools.partial(HfApi(hub.url, "hf_fine").hf_hub_download, cache_dir=tmp_path)
    assert error_of(fetch, "other/gated", "a.txt", repo_type="dataset") == ("GatedRepoError", 403)


# -- files and commits


def test_a_folder_is_uploaded_in_one_commit_and_only_once(hub: HubServer, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "data").mkdir(parents=True)
    contents = {"README.md": b"# hello\n", "data/a.parquet": b"PAR1" * 1000, "data/b.png": png("red"), "empty.txt": b""}
    for path, content in contents.items():
        (folder / path).write_bytes(content)
    code = """
api.create_repo("me/out", **D)
oids = [api.upload_folder(repo_id="me/out", folder_path="folder", commit_message="first", **D).oid for _ in range(2)]
path = api.hf_hub_download("me/out", "data/a.parquet", **D)
result = [oids[0] == oids[1], Path(path).read_bytes().decode(), sorted(api.list_repo_files("me/out", **D))]
"""
    listing = sorted([".gitattributes", *contents])
    assert client(hub, tmp_path, code) == [True, "PAR1" * 1000, listing]
    assert [commit.title for commit in hub.commits("me/out")] == ["initial commit", "first"]
    assert {path: content for path, content in hub.files("me/out").items() if path in contents} == contents
    assert hub.requests["PUT /lfs/objects/{oid}"] == 2


def test_a_large_file_travels_in_parts(hub: HubServer, tmp_path: Path) -> None:
    hub.create("me/out")
    hub.routes.multipart_from_bytes, hub.routes.multipart_chunk_bytes = 1000, 400
    content = bytes(range(256)) * 5
    (tmp_path / "a.parquet").write_bytes(content)
    code = """
api.upload_file(path_or_fileobj="a.parquet", path_in_repo="a.parquet", repo_id="me/out", **D)
result = None
"""
    client(hub, tmp_path, code)
    assert hub.files("me/out")["a.parquet"] == content
    assert hub.requests["PUT /lfs/parts/{oid}/{number}"] == 4


def test_a_commit_on_a_parent_that_moved_on_is_refused(hub: HubServer, tmp_path: Path) -> None:
    old = hub.put("me/out", "a.txt", b"1").oid
    new = hub.put("me/out", "a.txt", b"2").oid
    code = f"""
def commit(parent):
    operations = [CommitOperationAdd("b.txt", b"b"), CommitOperationDelete("a.txt")]
    return error_of(api.create_commit, "me/out", operations, commit_message="m", parent_commit=parent, **D)
result = [commit("{old}"), commit("{new}")]
"""
    assert client(hub, tmp_path, code) == [["HfHubHTTPError", 412], None]
    assert list(hub.files("me/out")) == [".gitattributes", "b.txt"]


def test_files_and_folders_are_deleted_by_commits(hub: HubServer, tmp_path: Path) -> None:
    hub.put_all("me/out", [("old/a.txt", b"a"), ("old/b.txt", b"b"), ("older.txt", b"c")])
    code = """
api.delete_folder("old", "me/out", **D)
result = [api.list_repo_files("me/out", **D), error_of(api.delete_file, "missing.txt", "me/out", **D)]
"""
    left, missing = client(hub, tmp_path, code)
    assert left == [".gitattributes", "older.txt"]
    assert missing == ["RemoteEntryNotFoundError", 404]


def test_branches_hold_their_own_files(hub: HubServer, tmp_path: Path) -> None:
    hub.put("me/out", "a.txt", b"main")
    code = """
api.create_branch("me/out", branch="side", **D)
api.upload_file(path_or_fileobj=b"side", path_in_repo="a.txt", repo_id="me/out", revision="side", **D)
titles = [commit.title for commit in api.list_repo_commits("me/out", revision="side", **D)]
result = [titles, error_of(api.repo_info, "me/out", revision="none", **D)]
"""
    titles, missing = client(hub, tmp_path, code)
    assert titles == ["Upload a.txt with huggingface_hub", "Add a.txt", "initial commit"]
    assert missing == ["RevisionNotFoundError", 404]
    assert hub.files("me/out")["a.txt"] == b"main"
    assert hub.files("me/out", "side")["a.txt"] == b"side"


def test_the_tree_is_listed_page_by_page_and_by_folder(hub: HubServer, tmp_path: Path) -> None:
    hub.put_all("me/out", [(f"data/{n:02}.parquet", b"%d" % n) for n in range(7)] + [("deep/er/x.txt", b"x")])
    hub.routes.tree_page_size = 3
    code = """
everything = [item.path for item in api.list_repo_tree("me/out", recursive=True, **D)]
top = [item.path for item in api.list_repo_tree("me/out", **D)]
info = api.get_paths_info("me/out", ["data/03.parquet", "deep", "none"], **D)
result = [len(everything), top, [item.path for item in info], info[0].lfs.size]
"""
    expected = [12, ["data", "deep", ".gitattributes"], ["data/03.parquet", "deep"], 1]
    assert client(hub, tmp_path, code) == expected


def test_a_ranged_read_serves_the_range_only(hub: HubServer, tmp_path: Path) -> None:
    hub.put("me/pages", "data/a.parquet", bytes(range(256)) * 400)
    code = """
with HfFileSystem().open("datasets/me/pages/data/a.parquet", block_size=0) as file:
    pass
file = HfFileSystem().open("datasets/me/pages/data/a.parquet", "rb", block_size=1000, cache_type="none")
file.seek(256 * 100 + 7)
result = [list(file.read(5)), file.size]
"""
    assert client(hub, tmp_path, code) == [[7, 8, 9, 10, 11], 102_400]
    assert hub.bytes_served["data/a.parquet"] == 5


def test_a_range_beyond_the_end_is_refused_and_an_etag_names_the_content(hub: HubServer) -> None:
    commit = hub.put("me/pages", "a.txt", b"hello")
    url = f"{hub.url}/datasets/me/pages/resolve/main/a.txt"
    assert requests.get(url, headers={"Range": "bytes=9-"}, timeout=5).status_code == 416
    part = requests.get(url, headers={"Range": "bytes=-2"}, timeout=5)
    assert (part.status_code, part.content, part.headers["Content-Range"]) == (206, b"lo", "bytes 3-4/5")
    head = requests.head(url, timeout=5)
    assert head.headers["X-Repo-Commit"] == commit.oid
    # what `git hash-object` says
    assert head.headers["ETag"] == '"b6fc4c620b67d95f953a5c1c1230aaab5db5a1b0"'


def test_a_scripted_failure_strikes_and_the_client_comes_again(hub: HubServer, tmp_path: Path) -> None:
    hub.create("me/out")
    hub.fail("POST", "/commit/", 429, retry_after=1)
    hub.fail("PUT", "/lfs/objects/", 503)
    code = """
upload = dict(path_or_fileobj=b"x", path_in_repo="a.parquet", repo_id="me/out", **D)
result = [error_of(api.upload_file, **upload), error_of(api.upload_file, **upload)]
"""
    assert client(hub, tmp_path, code) == [["HfHubHTTPError", 429], None]
    assert hub.requests["PUT /lfs/objects/{oid}"] == 2


# -- datasets

CARD = b"""---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train-*.parquet
  - split: test
    path: data/test-*.parquet
- config_name: small
  data_files: data/test-*.parquet
---
"""


def test_a_parquet_dataset_with_configs_is_loaded_and_streamed(hub: HubServer, tmp_path: Path) -> None:
    shards = [("data/train-0.parquet", parquet(60)), ("data/train-1.parquet", parquet(30, 60))]
    hub.put_all("me/pages", [("README.md", CARD), *shards, ("data/test-0.parquet", parquet(5, 900))])
    code = f"""{DATASETS}
streamed = datasets.load_dataset("me/pages", split="train", streaming=True)
first = next(iter(streamed))["n"]
builder = datasets.load_dataset_builder("me/pages", "small")
whole = datasets.load_dataset("me/pages")
result = [first, list(builder.config.data_files), datasets.get_dataset_config_names("me/pages"),
          {{name: split["n"][:] for name, split in whole.items()}}]
"""
    first, splits, configs, numbers = client(hub, tmp_path, code)
    assert (first, splits, configs) == (0, ["train"], ["default", "small"])
    assert numbers == {"train": list(range(90)), "test": list(range(900, 905))}


def test_one_row_group_costs_its_own_bytes_and_the_footer(hub: HubServer, tmp_path: Path) -> None:
    content = parquet(500)
    hub.put("me/pages", "data/train-0.parquet", content)
    code = """
import pyarrow.parquet as pq
with HfFileSystem().open("datasets/me/pages/data/train-0.parquet", cache_type="none") as file:
    table = pq.ParquetFile(file, pre_buffer=False).read_row_group(30, use_threads=False)  # no thread to end with
result = table["n"].to_pylist()
"""
    assert client(hub, tmp_path, code) == list(range(300, 310))
    assert hub.bytes_served["data/train-0.parquet"] < len(content) / 5


def test_a_private_image_folder_is_loaded_with_a_token_only(hub: HubServer, tmp_path: Path) -> None:
    hub.create("me/scans", private=True)
    hub.put_all("me/scans", [("train/a.png", png("red")), ("train/b.png", png("blue"))])
    code = f"""{DATASETS}
def load():
    pages = datasets.load_dataset("me/scans", split="train")
    return [list(image.size) for image in pages["image"]]
result = error_of(load) or load()
"""
    assert client(hub, tmp_path, code) == [[20, 10], [20, 10]]
    other = tmp_path / "other"
    other.mkdir()
    assert client(hub, other, code, token=None)[0] == "DatasetNotFoundError"


def test_what_is_pushed_comes_back_with_its_features(hub: HubServer, tmp_path: Path) -> None:
    code = f"""{DATASETS}
from PIL import Image
features = datasets.Features({{"image": datasets.Image(), "kind": datasets.ClassLabel(names=["a", "b"]),
                              "boxes": datasets.List({{"label": datasets.Value("string")}})}})
rows = {{"image": [Image.new("RGB", (4, 4))] * 3, "kind": [0, 1, 0], "boxes": [[], [{{"label": "x"}}], []]}}
datasets.Dataset.from_dict(rows, features=features).push_to_hub("me/out", private=True, split="pages")
back = datasets.load_dataset("me/out", split="pages")
result = [back.features == features, back["kind"][:], back["boxes"][1]]
"""
    assert client(hub, tmp_path, code) == [True, [0, 1, 0], [{"label": "x"}]]
    assert hub.repo("me/out").private
