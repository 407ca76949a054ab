"""Inputs at `hf://` addresses: what is read, what it is known by, and what a card can't reach."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import zipfile
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from src.errors import UsageError
from src.hf_paths import HubPath, parse_hub_path
from tests.hub_server import HubServer, hub_env
from tests.runs import ROOT, write_pages
from tests.stub_vllm import tagged_png

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(120)

Asked = tuple[str, dict[str, Any]]

CARD = b"""---
configs:
- config_name: default
  data_files:
  - {split: train, path: data/train-*.parquet}
  - {split: test, path: data/test-*.parquet}
- config_name: maps
  data_files: data/test-*.parquet
---
"""
OPEN = """
import json, sys
from src.errors import JobError
from src.source import open_source
def opened(name, **options):
    try:
        source = open_source(name, **options)
        cells = source.read(range(len(source.order)))["image"].to_pylist()
        pictures = sorted([cell["path"], len(cell["bytes"] or b"")] for cell in cells)
        rows = type(source.rows).__name__
        return [rows, source.split, len(cells), source.is_private, source.fingerprint, pictures[:2]]
    except JobError as error:
        return [type(error).__name__, str(error)]
print(json.dumps([opened(name, **options) for name, options in json.loads(sys.argv[1])]))
"""


def opened(hub: HubServer, home: Path, *asked: Asked) -> list[list[Any]]:
    """What `open_source` makes of some inputs, in one process with the real clients."""
    command = [sys.executable, "-c", OPEN, json.dumps(asked)]
    env = {**hub_env(hub, home), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, cwd=home, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answers: list[list[Any]] = json.loads(done.stdout.splitlines()[-1])
    return answers


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("squad", HubPath("datasets", "squad")),
        ("me/scans", HubPath("datasets", "me/scans")),
        ("hf://datasets/me/scans", HubPath("datasets", "me/scans")),
        ("hf://datasets/me/scans@v1/data/*.parquet", HubPath("datasets", "me/scans", "v1", "data/*.parquet")),
        ("hf://datasets/me/scans@a%2Fb/data", HubPath("datasets", "me/scans", "a/b", "data")),
        ("hf://datasets/me/scans@refs/pr/7/data", HubPath("datasets", "me/scans", "refs/pr/7", "data")),
        ("hf://buckets/me/scans/2026", HubPath("buckets", "me/scans", None, "2026")),
        ("no such thing", None),
        ("a/b/c", None),
    ],
)
def test_an_address_says_what_where_and_at_which_revision(name: str, read: HubPath | None) -> None:
    assert parse_hub_path(name) == read


@given(
    st.sampled_from(["me/scans", "an-org/b.c_d"]),
    st.none()
    | st.from_regex(r"[a-z0-9][a-z0-9./-]{0,8}[a-z0-9]", fullmatch=True).filter(lambda text: "//" not in text),
    st.lists(st.from_regex(r"[a-z0-9@*_-]{1,8}", fullmatch=True), max_size=3),
)
def test_an_address_that_is_written_out_is_read_as_the_same(name: str, revision: str | None, parts: list[str]) -> None:
    at = HubPath("datasets", name, revision, "/".join(parts))
    assert parse_hub_path(str(at)) == at


@pytest.mark.parametrize(
    ("name", "revision", "message"),
    [
        ("hf://datasets/me/scans@v1", "v2", "is at 'v1', but --revision is 'v2'"),
        ("hf://buckets/me/scans", "v2", "a bucket has no revisions; leave --revision v2 out"),
        ("hf://buckets/me/scans@v1", None, "do not support a revision"),
        ("hf://me/model", None, "names a model; give hf://datasets/namespace/name"),
        ("hf://spaces/me/app", None, "names a space"),
        ("hf://dataset/me/scans", None, "must be plural"),
        ("hf://datasets/scans", None, "namespace/name"),
        ("hf://buckets/me/scans/../secret", None, "'..' leads nowhere"),
    ],
)
def test_an_address_that_holds_no_dataset_is_refused(name: str, revision: str | None, message: str) -> None:
    with pytest.raises(UsageError, match=message.replace(".", r"\.").replace("[", r"\[")):
        parse_hub_path(name, revision)


@pytest.mark.parametrize(
    ("here", "there", "overlap"),
    [
        ("hf://buckets/me/b", "hf://buckets/me/b/out", True),
        ("hf://buckets/me/b/out", "hf://buckets/me/b/out", True),
        ("hf://buckets/me/b/in", "hf://buckets/me/b/out", False),
        ("hf://buckets/me/b/in", "hf://buckets/me/b/in-2026", False),
        ("hf://buckets/me/b/in/*.parquet", "hf://buckets/me/b/in/text", True),
        ("hf://buckets/me/b/in", "hf://buckets/me/other/in", False),
        ("hf://buckets/me/b", "hf://datasets/me/b", False),
        ("hf://datasets/me/b/in", "hf://datasets/me/b@side/out", True),
    ],
)
def test_places_overlap_where_one_holds_the_other(here: str, there: str, overlap: bool) -> None:
    first, second = parse_hub_path(here), parse_hub_path(there)
    assert first is not None
    assert second is not None
    assert first.overlaps(second) == second.overlaps(first) == overlap


def zip_of(picture: bytes) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("1.png", picture)
    return packed.getvalue()


def fill(hub: HubServer, tmp_path: Path) -> None:
    """The same files in a dataset and in a bucket, both private."""
    files = {"README.md": CARD, **{f"photos/{number}.png": tagged_png(number) for number in (1, 2)}}
    for name, count in (("train-0", 3), ("train-1", 2), ("test-0", 4)):
        files[f"data/{name}.parquet"] = write_pages(tmp_path / f"{name}.parquet", count).read_bytes()
    for path, content in files.items():
        hub.put("me/scans", path, content)
        hub.buckets.put("me/scans", path, content)
    hub.repo("me/scans").private = hub.buckets.buckets["me/scans"].private = True


def test_a_dataset_a_folder_a_file_and_a_pattern_are_read_from_repositories_and_from_buckets_alike(
    tmp_path: Path,
) -> None:
    asked: list[Asked] = [
        ("", {"split": "train"}),
        ("", {"config": "maps"}),
        ("/data", {"split": "test"}),
        ("/data/train-1.parquet", {}),
        ("/data/train-*.parquet", {"shuffle": True}),
        ("/photos", {"streaming": True}),
        ("/photos/*.png", {"shuffle": True}),
    ]
    with HubServer() as hub:
        fill(hub, tmp_path)
        commit = hub.repo("me/scans").at("main").oid
        hub.repo("me/scans").refs["refs/heads/a/b"] = commit
        hub.put("me/scans", "data/train-9.parquet", b"no parquet: this must not be read")
        roots = ("hf://datasets/me/scans@a%2Fb", "hf://buckets/me/scans")
        answers = opened(hub, tmp_path, *((f"{root}{path}", options) for root in roots for path, options in asked))
        of_repo, of_bucket = answers[: len(asked)], answers[len(asked) :]
        assert not hub.unknown
    pages = [["page-0001.png", 125], ["page-0002.png", 125]]
    photos = [["1.png", 125], ["2.png", 125]]
    whats = [answer[1:4] + answer[5:] for answer in of_repo]
    assert whats == [
        ["train", 5, True, [["page-0001.png", 125]] * 2],
        ["train", 4, True, pages],
        ["test", 4, True, pages],
        ["train", 2, True, pages],
        ["train", 5, True, [["page-0001.png", 125]] * 2],
        ["train", 2, True, photos],
        ["train", 2, True, photos],
    ]
    assert [answer[1:4] + answer[5:] for answer in of_bucket] == whats
    assert [answer[0] for answer in of_bucket] == ["ParquetRows"] * 5 + ["StreamedRows"] * 2
    assert [answer[4] for answer in of_repo[:3]] == [f"hub:me/scans@{commit}"] * 2 + [f"hub:me/scans@{commit}/data"]
    assert of_bucket[0][4] == of_bucket[1][4]
    assert len({answer[4] for answer in of_bucket}) == len(asked) - 1


def test_a_bucket_is_known_by_its_files_and_their_hashes_and_what_is_not_there_is_named(tmp_path: Path) -> None:
    photos: Asked = ("hf://buckets/me/scans/photos/*.png", {})
    tests: Asked = ("hf://buckets/me/scans/data/test-0.parquet", {})
    with HubServer() as hub:
        fill(hub, tmp_path)
        hub.buckets.put("me/scans", "packed/photos.zip", zip_of(tagged_png(1)))
        before, of_tests, packed, missing, mixed, no_bucket, no_split = opened(
            hub,
            tmp_path,
            photos,
            tests,
            ("hf://buckets/me/scans/packed", {}),
            ("hf://buckets/me/scans/nowhere", {}),
            ("hf://datasets/me/scans/**", {}),
            ("hf://buckets/me/none", {}),
            ("hf://buckets/me/scans", {"split": "maps"}),
        )
        assert len(tagged_png(2)) == len(tagged_png(1)), "the hash tells them apart, not the size"
        hub.buckets.put("me/scans", "photos/1.png", tagged_png(2))
        hub.buckets.put("me/scans", "data/test-1.parquet", b"another file")
        after, still = opened(hub, tmp_path, photos, tests)
    assert before[4].startswith("bucket:hf://buckets/me/scans/photos/*.png:")
    assert after[4] != before[4]
    assert still[4] == of_tests[4]
    assert packed[1] == "hf://buckets/me/scans/packed: pictures in a bucket are read one by one; unpack them there"
    assert "there is no file at hf://buckets/me/scans/nowhere" in missing[1]
    assert "names files of several kinds: md, parquet, png" in mixed[1]
    assert "input 'hf://buckets/me/none'" in no_bucket[1]
    assert "--split takes one of: train, test" in no_split[1]


def test_a_card_reaches_no_file_outside_its_dataset_or_bucket(tmp_path: Path) -> None:
    with HubServer() as hub:
        secret = write_pages(tmp_path / "secret.parquet", 2)
        hub.put("me/secret", "a.parquet", secret.read_bytes())
        hub.buckets.put("me/secret", "a.parquet", secret.read_bytes())
        elsewhere = [
            str(secret),
            os.path.relpath(secret, tmp_path),
            "hf://datasets/me/secret@main/a.parquet",
            "hf://buckets/me/secret/a.parquet",
            f"{hub.url}/datasets/me/secret/resolve/main/a.parquet",
            "../secret/a.parquet",
            "../secret@main/a.parquet",
        ]
        for number, path in enumerate(elsewhere):
            card = f"---\nconfigs:\n- config_name: default\n  data_files: {path}\n---\n".encode()
            hub.put(f"me/trap-{number}", "README.md", card)
            hub.buckets.put(f"me/trap-{number}", "README.md", card)
        numbers = range(len(elsewhere))
        answers = opened(
            hub,
            tmp_path,
            *((f"me/trap-{number}", {}) for number in numbers),
            *((f"hf://buckets/me/trap-{number}", {}) for number in numbers),
        )
        assert [answer[0] for answer in answers] == ["UsageError"] * 2 * len(elsewhere), answers
        named = [answer[1] for answer in answers if "names a file that lies elsewhere" in answer[1]]
        assert len(named) >= 3
        assert not hub.bytes_served["a.parquet"]
        assert not hub.bytes_served["me/secret/a.parquet"]
