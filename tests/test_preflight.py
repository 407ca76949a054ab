"""What is refused before any GPU time: by each script, with the real clients, and with nothing created anywhere."""

from __future__ import annotations

import io
import random
import re
import shutil
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest

from src.patience import Patience
from src.room import bytes_of_row
from src.source import Source
from src.stream import StreamedRows
from tests.hub_server import HubServer, hub_env
from tests.hub_state import PR_TOKEN, READ_TOKEN, Token
from tests.many_runs import Words, many_runs, with_fake_vllm
from tests.runs import OFFLINE, SATURATE, SCRIPT, Ended, Running, pages_dataset, run_here, write_pages
from tests.stub_vllm import StubVllm

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SCRIPTS = [SCRIPT, SATURATE, OFFLINE]
CONFIGS = b"""---
configs:
- config_name: letters
  data_files: letters/*.parquet
- config_name: maps
  data_files: maps/*.parquet
---
"""
NO_TOKEN = {"HF_TOKEN": ""}

# case → (words before the script's own, what is set beside, what is said)
CASES: dict[str, tuple[list[str], dict[str, str], str]] = {
    "no token": (
        ["me/scans", "me/out"],
        NO_TOKEN,
        "output 'me/out' needs a token that can write, and there is none. Set HF_TOKEN (in a job: -s HF_TOKEN)",
    ),
    "a token that is none": (
        ["me/scans", "me/out"],
        {"HF_TOKEN": "hf_nobody"},
        "output 'me/out' needs a token that can write, and this one is of no use: Invalid user token.",
    ),
    "a token that reads": (
        ["me/scans", "me/out"],
        {"HF_TOKEN": READ_TOKEN},
        "output 'me/out': the token of 'me' can only read; use one that can write to 'me'",
    ),
    "a token for pull requests": (
        ["me/scans", "me/out"],
        {"HF_TOKEN": PR_TOKEN},
        "the token of 'me' may not write to 'me/out' (its permissions there: discussion.write, repo.content.read); "
        "give it write access to the contents of the repositories of 'me', or open a pull request with --create-pr",
    ),
    "a pull request on nothing": (
        ["me/scans", "me/out", "--create-pr"],
        {"HF_TOKEN": PR_TOKEN},
        "--create-pr: there is no dataset 'me/out' to open a pull request on, or the token may not see it; create it",
    ),
    "a pull request by a token that reads": (
        ["me/scans", "me/foreign", "--create-pr"],
        {"HF_TOKEN": READ_TOKEN},
        "output 'me/foreign': the token of 'me' can only read; use one that can write to 'me'",
    ),
    "a token for another dataset": (
        ["me/scans", "me/out"],
        {"HF_TOKEN": "hf_fine"},
        "the token of 'me' may not write to 'me/out' (its permissions there: none); give it write access",
    ),
    "a namespace of others": (
        ["me/scans", "other/out"],
        {},
        "the token is of 'me', who is no member of 'other' (but of: me, club); name an output of your own",
    ),
    "an organisation to read in": (["me/scans", "club/out"], {}, "'me' can only read in 'club' (role: read)"),
    "a name that can't be": (["me/scans", "me/a..b"], {}, "output 'me/a..b' can't be the name of a dataset"),
    "a gated input": (
        ["other/gated", "me/out"],
        {},
        "input 'other/gated' is gated, and 'me' was not let in, or has a token that may not read gated datasets: "
        "ask for access at {hub}/datasets/other/gated, or",
    ),
    "a gated input without a token": (
        ["other/gated", "{folder}/out"],
        NO_TOKEN,
        "is gated, and there is no token: ask for access at {hub}/datasets/other/gated, then set HF_TOKEN",
    ),
    "no such input": (
        ["me/nothing", "me/out"],
        {},
        "input 'me/nothing': no such dataset on the Hub, or a private one that 'me' can't see: check the name",
    ),
    "a private input": (
        ["me/secret", "{folder}/out"],
        NO_TOKEN,
        "no such dataset on the Hub, or a private one, which nobody sees without a token",
    ),
    "no such revision": (
        ["me/scans", "me/out", "--revision", "v9"],
        {},
        "input 'me/scans' has no revision 'v9'; --revision takes a commit, or one of: main, v1",
    ),
    "no such configuration": (
        ["me/many", "me/out", "--config", "charts"],
        {},
        "input 'me/many': no configuration 'charts'; choose one with --config: letters, maps",
    ),
    "which configuration": (
        ["me/many", "me/out"],
        {},
        "input 'me/many': which configuration? Name one with --config: letters, maps",
    ),
    "no such split": (
        ["me/scans", "me/out", "--split", "dev"],
        {},
        "no split 'dev' in the input; --split takes one of: train, test",
    ),
    "no such column": (
        ["me/scans", "me/out", "--image-column", "scan"],
        {},
        "no column 'scan' in the input; --image-column takes one of: image",
    ),
    "a column without pictures": (
        ["me/scans", "me/out", "--image-column", "kind"],
        {},
        "column 'kind' holds no pictures but int64; --image-column takes one of: image",
    ),
    "a column that is there": (
        ["me/scans", "me/out", "--output-column", "kind"],
        {},
        "the input already has the column 'kind'; name another one with --output-column",
    ),
    "an input without data": (["me/empty", "me/out"], {}, "doesn't contain any data files"),
    "an input that is a script": (["me/script", "me/out"], {}, "Dataset scripts are no longer supported"),
    "an output of somebody else": (
        ["me/scans", "me/foreign"],
        {},
        "me/foreign holds blocks that this script did not write; choose another output, or --overwrite them",
    ),
}


@pytest.fixture(scope="module")
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        seed(server)
        yield server
        assert not server.unknown


def seed(hub: HubServer) -> None:
    """The inputs that are there, and tokens beside the usual ones."""
    out = io.BytesIO()
    pq.write_table(pages_dataset(range(1, 4)).with_format("arrow")[:], out)
    page = out.getvalue()
    hub.put_all("me/scans", [(f"data/{split}-00000-of-00001.parquet", page) for split in ("train", "test")])
    hub.repo("me/scans").refs["refs/tags/v1"] = hub.commits("me/scans")[-1].oid
    hub.put_all("me/many", [("README.md", CONFIGS), ("letters/a.parquet", page), ("maps/a.parquet", page)])
    hub.create("other/gated", gated=True)
    hub.put("other/gated", "data/train.parquet", page)
    hub.create("me/secret", private=True)
    hub.put("me/secret", "data/train.parquet", page)
    hub.create("me/empty")
    hub.put("me/script", "script.py", b"pass\n")
    hub.put("me/foreign", "data/train-000000.parquet", page)
    hub.hub.orgs["club"] = {"me": "read"}
    hub.hub.tokens["hf_fine"] = Token("me", "fineGrained", {("dataset", "me/other"): ("repo.write",)})


@pytest.fixture(scope="module")
def refused(hub: HubServer, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[Path, str], Ended]:
    """How each script ends in each case: all of them in one process."""
    folder = tmp_path_factory.mktemp("refused")
    with StubVllm() as stub:
        runs, places = [], [(script, case) for script in SCRIPTS for case in CASES]
        for script, case in places:
            words, env, _ = CASES[case]
            engine = [] if script == OFFLINE else ["--server", stub.url]
            runs.append(Words([word.format(folder=folder) for word in words] + engine, script, env))
        env = with_fake_vllm(hub_env(hub, folder), stub.url)
        before = set(hub.hub.repos)
        ends = many_runs(runs, {**env, "XDG_CACHE_HOME": str(folder / "cache")})
        assert stub.stats()["requests"] == 0
    assert set(hub.hub.repos) == before, "what is refused creates nothing"
    assert not (folder / "out").exists()
    assert not list(folder.rglob("cache/lighton-ocr/*"))
    return dict(zip(places, ends, strict=True))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_what_can_not_end_well_is_refused_with_the_next_step(
    refused: dict[tuple[Path, str], Ended], hub: HubServer, script: Path, case: str
) -> None:
    ended = refused[script, case]
    assert ended.code == 2, ended
    assert CASES[case][2].format(hub=hub.url) in ended.line["message"]
    assert ended.advice.startswith(f"{script.name}: ")
    assert not [token for token in hub.hub.tokens if token in ended.stderr + ended.stdout]


def test_preflight_asks_the_hub_few_things_and_each_of_them_once(hub: HubServer, tmp_path: Path) -> None:
    hub.requests.clear()
    hub.bytes_served.clear()
    with StubVllm() as stub, Running("me/scans", "me/foreign", "--server", stub.url, env=hub_env(hub, tmp_path)) as run:
        assert run.wait().code == 2
    assert hub.requests["GET /api/whoami-v2"] == 1
    assert sum(hub.requests.values()) <= 20, hub.requests
    assert (
        sum(hub.requests[f"GET /api/{{kind}}/{{owner}}/{{name}}{rest}"] for rest in ("", "/revision/{revision}")) <= 4
    )
    assert set(hub.bytes_served) == {"data/train-00000-of-00001.parquet", "data/train-000000.parquet"}, "two footers"


# -- the disk


def rows_on(disk_bytes: int, monkeypatch: pytest.MonkeyPatch, *words: str | Path) -> Ended:
    """A run in this process, on a disk with so many bytes free."""
    usage = shutil.disk_usage("/")._replace(free=disk_bytes)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    return run_here(*words)


@pytest.mark.parametrize("kind", ["parquet", "folder", "saved"])
def test_an_output_that_does_not_fit_on_its_disk_is_refused_with_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    rng = random.Random(5)
    contents = {number: rng.randbytes(50_000) for number in range(1, 21)}
    noise = {number: {"bytes": content, "path": f"{number}.png"} for number, content in contents.items()}
    source = tmp_path / "pages"
    if kind == "parquet":
        source = write_pages(tmp_path / "pages.parquet", 20, noise)
    elif kind == "folder":
        source.mkdir()
        for number, content in contents.items():
            (source / f"{number}.png").write_bytes(content)
    else:
        pages_dataset(range(1, 21), noise).save_to_disk(source)
    with StubVllm() as stub:
        words: list[str | Path] = [source, tmp_path / "out" / "deep", "--server", stub.url, "--block-rows", "5"]
        ended = rows_on(900_000, monkeypatch, *words)
        assert ended.code == 2, ended
        assert re.search(
            r"20 rows need about 1\.\d MB in '\S+/out/deep', and 0\.9 MB are free on its disk;", ended.advice
        )
        assert not (tmp_path / "out").exists()
        assert rows_on(900_000, monkeypatch, *words, "--max-samples", "10", "--max-failure-rate", "1").code == 0
        if kind == "parquet":
            results: list[str | Path] = [
                source,
                tmp_path / "results",
                "--server",
                stub.url,
                "--results-only",
                "--max-failure-rate",
                "1",
            ]
            assert rows_on(900_000, monkeypatch, *results).code == 0
            more = rows_on(400_000, monkeypatch, *words[:2], "--overwrite", *words[2:])
            assert more.code == 2
            assert "and 0.9 MB are free" in more.advice, "what is overwritten makes room"


def test_a_stream_whose_size_nobody_knows_is_not_refused() -> None:
    schema = pages_dataset([1]).features.arrow_schema
    rows = StreamedRows(lambda _: iter(()), schema, 10**9, "hf://", Patience(0.0))
    assert bytes_of_row(Source("x", "train", "image", rows, range(10**9), "f", False)) is None
