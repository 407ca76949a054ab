"""Buckets of the stand-in, as the real `huggingface_hub` and `hf_xet` see them, in processes of their own."""

from __future__ import annotations

import random
import struct
from typing import TYPE_CHECKING

import pytest

from tests.hub_server import HubServer
from tests.hub_state import READ_TOKEN
from tests.test_hub_server import client
from tests.xet_cas import GROUPED_LZ4, LZ4, UNCOMPRESSED, Storage, parse_xorb

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.timeout(90)


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server
        assert not server.unknown, "the client called what the stand-in does not have"


def contents() -> dict[str, bytes]:
    """Files of every kind: none, few and many bytes, some that can't be compressed and some that can, in two ways."""
    return {
        "small.txt": b"hello",
        "empty": b"",
        "deep/er/random.bin": random.Random(7).randbytes(5 * 1024**2),
        "deep/lines.txt": b"".join(b"line %d of a text that repeats itself\n" % number for number in range(30_000)),
        "deep/floats.bin": b"".join(struct.pack("<f", number / 1000) for number in range(100_000)) + b"end",
    }


def test_what_is_uploaded_comes_back_byte_for_byte_by_every_way(hub: HubServer, tmp_path: Path) -> None:
    files = contents()
    for path, content in files.items():
        (tmp_path / "in" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / path).write_bytes(content)
    code = """
files = {str(file.relative_to("in")): file.read_bytes() for file in Path("in").rglob("*") if file.is_file()}
url = api.create_bucket("me/pages", private=True)
again = [error_of(api.create_bucket, "me/pages"), error_of(api.create_bucket, "me/pages", exist_ok=True)]
api.batch_bucket_files("me/pages", add=[(f"in/{path}", path) for path in files])
info = api.bucket_info("me/pages")
listed = {file.path: file.size for file in api.list_bucket_tree("me/pages", recursive=True)}
found = [file.path for file in api.get_bucket_paths_info("me/pages", ["small.txt", "missing"])]
fs = HfFileSystem()
read, piece = [], ""
for path, content in files.items():
    with fs.open(f"buckets/me/pages/{path}", "rb") as file:
        read.append(file.read() == content)
with fs.open("buckets/me/pages/deep/er/random.bin", "rb", block_size=65536) as file:
    file.seek(1_000_000)
    piece = file.read(100).hex()
api.download_bucket_files("me/pages", [(path, f"down/{path}") for path in files])
downloaded = [Path(f"down/{path}").read_bytes() == content for path, content in files.items()]
result = {
    "uri": url.uri.to_uri(), "again": again, "private": info.private, "count": info.total_files, "size": info.size,
    "listed": listed, "found": found, "top": fs.ls("hf://buckets/me/pages", detail=False),
    "globbed": fs.glob("buckets/me/pages/**/*.bin"), "read": read, "piece": piece, "downloaded": downloaded,
}
"""
    result = client(hub, tmp_path, code)
    assert hub.bucket_files("me/pages") == files
    assert result == {
        "uri": "hf://buckets/me/pages",
        "again": [["HfHubHTTPError", 409], None],
        "private": True,
        "count": 5,
        "size": sum(map(len, files.values())),
        "listed": {path: len(content) for path, content in files.items()},
        "found": ["small.txt"],
        "top": [f"buckets/me/pages/{name}" for name in ("deep", "empty", "small.txt")],
        "globbed": [f"buckets/me/pages/{name}" for name in ("deep/er/random.bin", "deep/floats.bin")],
        "read": [True] * 5,
        "piece": files["deep/er/random.bin"][1_000_000:1_000_100].hex(),
        "downloaded": [True] * 5,
    }
    schemes = {scheme for xorb in hub.buckets.storage.xorbs.values() for scheme in xorb.schemes}
    assert schemes == {UNCOMPRESSED, LZ4, GROUPED_LZ4}, "a way of storing chunks was not tried"
    assert hub.bytes_served["me/pages/deep/er/random.bin"] < 6 * 1024**2, "a range is not the whole file"


def test_files_are_replaced_copied_and_removed_and_each_failure_is_named(hub: HubServer, tmp_path: Path) -> None:
    hub.buckets.put("me/pages", "old.txt", b"old")
    hub.buckets.put("me/pages", "other.txt", b"other" * 50_000)
    hub.buckets.put("me/pages", "logs", b"")
    hub.buckets.put("me/pages", "logs_of_today/a.txt", b"a")
    hub.buckets.page_size = 2
    code = """
[other] = api.get_bucket_paths_info("me/pages", ["other.txt"])
api.batch_bucket_files("me/pages", add=[(b"new", "old.txt")], copy=[("bucket", "me/pages", other.xet_hash, "copy.txt")])
api.batch_bucket_files("me/pages", delete=["other.txt"])
partly = []
try:
    api.batch_bucket_files("me/pages", add=[(b"", "kept.txt")], delete=["missing.txt"])
except BucketBatchError as error:
    partly = error.failures
api.download_bucket_files("me/pages", [("copy.txt", "copy.txt")])
api.create_bucket("me/gone")
api.delete_bucket("me/gone")
result = {
    "partly": partly,
    "copy": Path("copy.txt").read_text() == "other" * 50_000,
    "below": [file.path for file in api.list_bucket_tree("me/pages", "logs")],
    "all": [file.path for file in api.list_bucket_tree("me/pages", recursive=True)],
    "gone": error_of(api.bucket_info, "me/gone"),
}
"""
    result = client(hub, tmp_path, code)
    assert result == {
        "partly": [{"path": "missing.txt", "error": "File not found"}],
        "copy": True,
        "below": ["logs", "logs_of_today"],  # by their letters, as the Hub compares them
        "all": ["copy.txt", "kept.txt", "logs", "logs_of_today/a.txt", "old.txt"],
        "gone": ["BucketNotFoundError", 404],
    }
    assert hub.bucket_files("me/pages")["old.txt"] == b"new"


def test_a_private_bucket_is_hidden_and_a_token_that_reads_can_not_write(hub: HubServer, tmp_path: Path) -> None:
    hub.buckets.put("other/pages", "a.txt", b"a")
    hub.buckets.put("other/secret", "a.txt", b"a")
    hub.buckets.put("me/pages", "a.txt", b"a")
    hub.buckets.buckets["other/secret"].private = True
    code = """
result = [
    error_of(api.bucket_info, "other/pages"),
    error_of(api.bucket_info, "other/secret"),
    error_of(HfFileSystem().open, "buckets/other/secret/a.txt"),
    error_of(api.batch_bucket_files, "me/pages", add=[(b"b", "b.txt")]),
    error_of(api.create_bucket, "me/more"),
]
"""
    assert client(hub, tmp_path, code, READ_TOKEN) == [
        None,
        ["BucketNotFoundError", 404],
        ["FileNotFoundError", None],
        ["ConnectionError", None],  # so hf_xet 1.8 calls a 403 of the route from which it has its token
        ["HfHubHTTPError", 403],
    ]
    assert list(hub.bucket_files("me/pages")) == ["a.txt"]


def test_what_is_damaged_is_refused() -> None:
    storage = Storage()
    name = storage.add_content(b"text" * 40_000)
    stored = storage.xorbs[name].stored
    assert b"".join(parse_xorb(stored).chunks(0, 3)) == b"text" * 40_000
    with pytest.raises(ValueError, match="chunk 2 has 28923 bytes where its header says 28928"):
        parse_xorb(stored[:-5])
    with pytest.raises(ValueError, match="without chunks"):
        parse_xorb(b"XETBLOB")
    shard = bytes(32) + struct.pack("<QQ", 2, 0)
    shard += bytes(32) + struct.pack("<IIQ", 0, 1, 0) + bytes(32) + struct.pack("<IIII", 0, 5, 0, 1)
    with pytest.raises(ValueError, match="no xorb 0000"):
        storage.add_shard(shard + b"\xff" * 32 + bytes(16))
