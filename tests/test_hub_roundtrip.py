"""What goes in comes out: `load_dataset(OUTPUT)` through the stand-in is the input and the new columns, features too.

The input has what datasets have: several configurations, splits and files, columns of every shape. One process runs the
scripts, another is the reader, who compares features, order, and the bytes of the pictures.
"""

from __future__ import annotations

import datetime
import io
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import datasets
import pytest
import yaml

from tests.hub_server import HubServer, hub_env
from tests.many_runs import Words, many_runs, with_fake_vllm
from tests.runs import NEW_COLUMNS, OFFLINE, SATURATE, Ended, tag_of
from tests.stub_vllm import DEFAULT_MODEL, StubVllm, tagged_png

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

pytestmark = pytest.mark.slow

RICH = datasets.Features(
    {
        "id": datasets.Value("int64"),
        "image": datasets.Image(),
        "kind": datasets.ClassLabel(names=["letter", "ledger", "map"]),
        "where": {"shelf": datasets.Value("string"), "at": {"x": datasets.Value("float32")}},
        "parts": datasets.List({"name": datasets.Value("string"), "kind": datasets.ClassLabel(names=["a", "b"])}),
        "words": datasets.List(datasets.Value("string")),
        "box": datasets.List(datasets.Value("int32"), length=4),
        "grid": datasets.Array2D((2, 2), "int8"),
        "when": datasets.Value("timestamp[us, tz=UTC]"),
        "translations": datasets.Translation(languages=["en", "fr"]),
        "inset": datasets.Image(),
        "raw": datasets.Value("large_binary"),
    }
)
PLAIN = datasets.Features({"scan": datasets.Image(), "page": datasets.Value("int16")})
BARE = datasets.Features({"image": datasets.Image(), "kind": datasets.ClassLabel(names=["letter", "map"])})
FEATURES = {"rich": RICH, "plain": PLAIN, "bare": BARE}

# configuration → split → files, each the numbers of its rows
INPUT: dict[str, dict[str, list[range]]] = {
    "rich": {"train": [range(1, 4), range(4, 6)], "held.out": [range(6, 8)], "none": [range(0)]},
    "plain": {"test": [range(20, 23)]},
    "bare": {"train": [range(30, 32)]},  # its parquet says nothing of features: the card does
}
SPLITS = [(config, split) for config, splits in INPUT.items() for split in splits]

# Reads what it is told to, and says what it found; `seen` makes cells comparable, wherever their bytes lie.
READER = """
import json, sys
from pathlib import Path
import datasets, fsspec
def seen(value):
    if isinstance(value, dict) and set(value) == {"bytes", "path"}:
        content = value["bytes"]
        if content is None:
            with fsspec.open(value["path"], "rb") as file:
                content = file.read()
        return [content.hex(), value["path"] and Path(value["path"]).name]
    if isinstance(value, dict):
        return {name: seen(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [seen(one) for one in value]
    return value.hex() if isinstance(value, bytes) else str(value) if hasattr(value, "year") else value
def read(repo, config, split):
    streamed = datasets.load_dataset(repo, config, split=split, streaming=True)
    found = {"order": list(streamed.features), "features": streamed.features.to_dict()}
    found["configs"] = datasets.get_dataset_config_names(repo)
    found["streamed"] = [seen(row) for row in streamed.decode(False)]
    try:
        loaded = datasets.load_dataset(repo, config, split=split)
    except ValueError as error:
        return found | {"rows": str(error)}
    assert loaded.features == streamed.features
    for name, feature in loaded.features.items():
        if isinstance(feature, datasets.Image):
            loaded = loaded.cast_column(name, datasets.Image(decode=False))
    return found | {"rows": [seen(row) for row in loaded]}
print(json.dumps([read(*place) for place in json.load(sys.stdin)]))
"""


def row_of(shape: str, number: int) -> dict[str, Any]:
    """A row in which every column has something; where the number is a multiple of three, little."""
    picture = {"bytes": tagged_png(number), "path": f"{number}.png"}
    if shape == "plain":
        return {"scan": picture, "page": number}
    if shape == "bare":
        return {"image": picture, "kind": number % 2}
    empty = number % 3 == 0
    return {
        "id": number,
        "image": picture,
        "kind": None if empty else number % 3,
        "where": {"shelf": f"ß{number}", "at": {"x": number / 4}},
        "parts": [] if empty else [{"name": "p", "kind": 1}, {"name": None, "kind": 0}],
        "words": None if empty else ["one", "", "drei"],
        "box": [number, 1, 2, 3],
        "grid": [[number, 1], [2, 3]],
        "when": datetime.datetime(2026, 7, number, 12, tzinfo=datetime.UTC),
        "translations": {"en": "page", "fr": "la page"},
        "inset": None if empty else {"bytes": tagged_png(900 + number), "path": None},
        "raw": bytes([number]) * 3,
    }


def parquet_of(shape: str, numbers: Sequence[int]) -> bytes:
    """A file of rows, as `datasets` writes it; the one of bare ones without a word of features."""
    import pyarrow.parquet as pq

    rows = [row_of(shape, number) for number in numbers]
    columns = {name: [row[name] for row in rows] for name in FEATURES[shape]}
    table = datasets.Dataset.from_dict(columns, features=FEATURES[shape]).with_format("arrow")[:]
    table = table.replace_schema_metadata(None) if shape == "bare" else table
    out = io.BytesIO()
    with pq.ParquetWriter(out, table.schema) as writer:
        if table.num_rows:  # a row group without rows is more than `datasets` can read
            writer.write_table(table)
    return out.getvalue()


def file_of(config: str, split: str, number: int) -> str:
    return f"{config}/{split}-{number:05d}.parquet"


@pytest.fixture(scope="module")
def hub() -> Iterator[HubServer]:
    """A Hub with the input in parquet, `me/scans`, and one that is a folder of pictures, `me/folder`."""
    configs = [
        {
            "config_name": config,
            "data_files": [{"split": split, "path": f"{config}/{split}-*.parquet"} for split in splits],
        }
        for config, splits in INPUT.items()
    ]
    info = {"config_name": "bare", "features": BARE._to_yaml_list()}
    card = f"---\n{yaml.safe_dump({'configs': configs, 'dataset_info': [info]})}---\n"
    with HubServer() as server:
        server.put("me/scans", "README.md", card.encode())
        for config, splits in INPUT.items():
            for split, files in splits.items():
                for number, numbers in enumerate(files):
                    server.put("me/scans", file_of(config, split, number), parquet_of(config, numbers))
        for number in (40, 41):
            server.put("me/folder", f"page-{number}.png", tagged_png(number))
        notes = "file_name,shelf,year\npage-40.png,A,1911\npage-41.png,B,1912\n"
        server.put("me/folder", "metadata.csv", notes.encode())
        yield server
        assert not server.unknown


@pytest.fixture(scope="module")
def env(hub: HubServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    home = tmp_path_factory.mktemp("home")
    return hub_env(hub, home) | {"XDG_CACHE_HOME": str(home / "cache")}


@pytest.fixture(scope="module")
def stub() -> Iterator[StubVllm]:
    with StubVllm("--read-tag") as server:
        yield server


@pytest.fixture(scope="module")
def read(hub: HubServer, stub: StubVllm, env: dict[str, str]) -> Mapping[tuple[str, str, str], dict[str, Any]]:
    """What a reader finds, by dataset, configuration and split: the inputs, and what the scripts made of them."""
    engine = ["--server", stub.url, "--model", DEFAULT_MODEL, "--block-rows", "2"]
    runs = []
    for config, split in SPLITS:
        column = ["--image-column", "scan"] if config == "plain" else []
        words = ["me/scans", "me/text", "--config", config, "--split", split, "--output-config", config, *column]
        runs.append(Words(words + engine))
    runs.append(Words(["me/folder", "me/pages", *engine]))
    for script in (SATURATE, OFFLINE):
        words = ["me/scans", f"me/{script.stem}", "--config", "rich", "--split", "train", "--output-split", "pages"]
        runs.append(Words(words + (engine[2:] if script == OFFLINE else engine), script))
    for ended in many_runs(runs, with_fake_vllm(env, stub.url)):
        assert ended.code == 0, ended
    places = [(repo, config, split) for repo in ("me/scans", "me/text") for config, split in SPLITS]
    places += [(repo, "default", "train") for repo in ("me/folder", "me/pages")]
    places += [(f"me/{script.stem}", "default", "pages") for script in (SATURATE, OFFLINE)]
    return dict(zip(places, as_read(env, places), strict=True))


def as_read(env: Mapping[str, str], places: Sequence[tuple[str, str, str]]) -> list[dict[str, Any]]:
    """What `load_dataset` gives in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", READER],
        env=dict(env),
        input=json.dumps(places),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def assert_round_trip(came_in: dict[str, Any], came_out: dict[str, Any], numbers: Sequence[int]) -> None:
    """The columns that came in are there as they were, in their order, then the new ones, with the page's own text."""
    strings, int32 = {"dtype": "string", "_type": "Value"}, {"dtype": "int32", "_type": "Value"}
    new = dict.fromkeys(NEW_COLUMNS, strings) | {"markdown_tokens": int32}
    assert came_out["order"] == [*came_in["order"], *NEW_COLUMNS]
    assert came_out["features"] == came_in["features"] | new
    if not numbers:
        # `datasets` 5.2 loads no split without rows, ours or anybody's; it streams it
        assert came_in["rows"] == came_out["rows"] == 'Instruction "none" corresponds to no data!'
        assert came_in["streamed"] == came_out["streamed"] == []
        return
    assert [{name: row[name] for name in came_in["order"]} for row in came_out["rows"]] == came_in["rows"]
    assert [row["markdown_status"] for row in came_out["rows"]] == ["ok"] * len(numbers)
    for number, row in zip(numbers, came_out["rows"], strict=True):
        assert f"tag {tag_of(number)}" in row["markdown"]
    assert came_out["streamed"] == came_out["rows"]


@pytest.mark.parametrize(("config", "split"), SPLITS)
def test_each_split_of_each_configuration_comes_back_as_it_was(
    read: Mapping[tuple[str, str, str], dict[str, Any]], config: str, split: str
) -> None:
    numbers = [number for file in INPUT[config][split] for number in file]
    came_in, came_out = read["me/scans", config, split], read["me/text", config, split]
    assert datasets.Features.from_dict(came_in["features"]) == FEATURES[config]
    assert set(came_out["configs"]) == set(INPUT)
    assert_round_trip(came_in, came_out, numbers)


def test_a_folder_of_pictures_comes_back_with_their_bytes_and_names(
    read: Mapping[tuple[str, str, str], dict[str, Any]],
) -> None:
    assert_round_trip(read["me/folder", "default", "train"], read["me/pages", "default", "train"], [40, 41])


@pytest.mark.parametrize("script", [SATURATE, OFFLINE], ids=lambda script: script.stem)
def test_the_other_scripts_give_the_same_dataset(
    read: Mapping[tuple[str, str, str], dict[str, Any]], script: Path
) -> None:
    came_out = read[f"me/{script.stem}", "default", "pages"]
    assert_round_trip(read["me/scans", "rich", "train"], came_out, range(1, 6))
    served = read["me/text", "rich", "train"]
    assert came_out["features"] == served["features"]
    # what the stub reads beside the page's tag follows from how the page was encoded
    rows = [
        [{**row, "inference_info": None, "markdown": None, "markdown_tokens": None} for row in one["rows"]]
        for one in (served, came_out)
    ]
    assert rows[0] == rows[1]


def test_publishing_over_an_older_run_of_another_shape_gives_the_new_one_to_who_has_read_the_old(
    hub: HubServer, stub: StubVllm, env: dict[str, str]
) -> None:
    engine = ["--server", stub.url, "--model", DEFAULT_MODEL, "--block-rows", "2"]
    old = ["me/scans", "me/again", "--config", "rich", "--split", "train", "--keep-raw"]
    new = ["me/scans", "me/again", "--config", "plain", "--output-split", "train", "--image-column", "scan"]

    def run(*words: str) -> Ended:
        (ended,) = many_runs([Words([*words, *engine])], env)
        return ended

    assert run(*old).code == 0
    place = ("me/again", "default", "train")
    (before,) = as_read(env, [place])
    assert len(before["rows"]) == 5
    assert "markdown_raw" in before["order"]
    refused = run(*new)
    assert refused.code == 2
    assert 'config: was "rich", now "plain"' in refused.advice
    assert run(*new, "--overwrite").code == 0
    came_in, came_out = as_read(env, [("me/scans", "plain", "test"), place])
    assert_round_trip(came_in, came_out, range(20, 23))
    assert len([name for name in hub.files("me/again") if name.endswith(".parquet")]) == 2
