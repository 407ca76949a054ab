"""How a run goes about its blocks: shards, commits, the names of what it writes; whole runs with another target."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import datasets
import pyarrow.parquet as pq
import pytest

from src.blocks import Shard, Target
from src.errors import UsageError
from src.options import CommonOptions
from src.way import commit_every_s, shard_of, way_of
from tests.runs import SATURATE, SCRIPT, load, run_here, write_pages
from tests.stub_vllm import StubVllm

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NOBODY = "http://127.0.0.1:9"
OPTIONS = CommonOptions(input="in", output="out")


@pytest.fixture(scope="module")
def stub() -> Iterator[StubVllm]:
    with StubVllm("--read-tag") as server:
        yield server


def slurm(task: int, count: int, first: int = 0, step: int = 1) -> dict[str, str]:
    """The variables that Slurm sets for a task of an array."""
    values = {"ID": task, "COUNT": count, "MIN": first, "STEP": step}
    return {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in values.items()}


@pytest.mark.parametrize(
    ("options", "environment", "shard"),
    [
        ((None, None), {}, (0, 1)),
        ((8, 3), slurm(5, 6), (3, 8)),
        ((None, None), slurm(5, 6), (5, 6)),
        (
            (None, None),
            {"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_COUNT": "4", "SLURM_ARRAY_TASK_MIN": "2"},
            (3, 4),
        ),
        (
            (None, None),
            {
                "SLURM_ARRAY_TASK_ID": "20",
                "SLURM_ARRAY_TASK_COUNT": "3",
                "SLURM_ARRAY_TASK_MIN": "10",
                "SLURM_ARRAY_TASK_STEP": "5",
            },
            (2, 3),
        ),
        ((8, None), {"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_COUNT": "1", "SLURM_ARRAY_TASK_MIN": "5"}, (5, 8)),
    ],
)
def test_a_shard_is_what_the_options_or_a_slurm_array_say(
    options: tuple[int | None, int | None], environment: dict[str, str], shard: tuple[int, int]
) -> None:
    found = shard_of(*options, environment)
    assert (found.index, found.count) == shard


@pytest.mark.parametrize(
    "environment",
    [{"SLURM_ARRAY_TASK_ID": "5"}, {"SLURM_ARRAY_TASK_ID": "x", "SLURM_ARRAY_TASK_COUNT": "6"}],
)
def test_a_slurm_array_that_makes_no_shard_is_refused(environment: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="give --num-shards and --shard-index"):
        shard_of(None, None, environment)


@pytest.mark.parametrize(
    ("minutes", "shards", "seconds"),
    [(None, 1, 600), (None, 2, 600), (None, 4, 1200), (None, 100, 30_000), (0.0, 1, 0), (3.0, 8, 180)],
)
def test_all_shards_together_commit_twelve_times_an_hour_at_most_unless_told_otherwise(
    minutes: float | None, shards: int, seconds: float
) -> None:
    assert commit_every_s(minutes, Shard(0, shards)) == seconds
    assert minutes is not None or shards * 3600 / seconds <= 12


def test_what_is_written_is_named_after_the_input_unless_told_otherwise() -> None:
    assert way_of(OPTIONS, {}).target("train") == Target("train")
    named = way_of(replace(OPTIONS, output_config="letters", output_split="old.1"), {})
    assert named.target("train") == Target("old.1", "letters")


@pytest.mark.parametrize(
    "changes",
    [
        {"output_split": "a-b"},
        {"output_split": "../x"},
        {"output_split": ""},
        {"output_config": "a/b"},
        {"output_config": ".git"},
        {"output_config": "a--b"},
        {"output_config": ".."},
        {"output_config": "data"},
    ],
)
def test_a_name_that_can_not_be_one_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"--output-(split|config)"):
        way_of(replace(OPTIONS, **changes), {})


# --- whole runs ------------------------------------------------------------------------------------------------------


def test_two_configurations_and_two_splits_share_an_output(tmp_path: Path, stub: StubVllm) -> None:
    pages, out = write_pages(tmp_path / "pages.parquet", 5), tmp_path / "out"
    for config, split in (("old", "train"), ("old", "test"), ("default", "train")):
        words = ["--output-config", config, "--output-split", split, "--max-samples", str(len(split))]
        ended = run_here(pages, out, "--server", stub.url, *words)
        assert ended.code == 0, ended
    assert sorted(str(file.relative_to(out)) for file in out.glob("*/*.parquet")) == [
        "data/train-000000.parquet",
        "old/test-000000.parquet",
        "old/train-000000.parquet",
    ]
    assert load(out, name="old")["id"][:] == [1, 2, 3, 4, 5]
    assert load(out, "test", name="old")["id"][:] == [1, 2, 3, 4]
    assert load(out)["id"][:] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("script", [SCRIPT, SATURATE])
def test_a_split_without_rows_becomes_one_without_rows_and_needs_no_engine(tmp_path: Path, script: Path) -> None:
    table = pq.read_table(write_pages(tmp_path / "some.parquet", 2))
    pq.write_table(table.slice(0, 0), tmp_path / "none.parquet")
    words: list[str | Path] = [
        tmp_path / "none.parquet",
        tmp_path / "out",
        "--server",
        NOBODY,
        "--shuffle",
    ]
    ended = run_here(*words, script=script)
    assert ended.code == 0, ended
    assert ended.line["rows"] == 0
    block = pq.read_table(tmp_path / "out" / "data" / "train-000000.parquet")
    assert block.num_rows == 0
    assert block.schema.names[:3] == table.schema.names
    # `datasets` 5.2 loads no split without rows ("corresponds to no data!"), but streams one
    loaded = datasets.load_dataset(str(tmp_path / "out"), split="train", streaming=True)
    assert list(loaded) == []
    assert loaded.features["kind"].names == ["letter", "ledger", "map"]
    assert "0 rows: 0 ok" in (tmp_path / "out" / "README.md").read_text()
    assert run_here(*words, script=script).code == 0


def test_shards_share_an_output_of_the_server_script_and_the_last_step_writes_the_card(
    tmp_path: Path, stub: StubVllm
) -> None:
    pages, out = write_pages(tmp_path / "pages.parquet", 12), tmp_path / "out"
    words: list[str | Path] = [pages, out, "--server", stub.url, "--block-rows", "3"]
    assert run_here(*words, "--num-shards", "2", "--shard-index", "1").code == 0
    assert not (out / "README.md").exists()
    assert run_here(*words, "--finish").code == 2
    assert run_here(*words, "--num-shards", "2", "--shard-index", "0").code == 0
    (out / "README.md").unlink()
    ended = run_here(pages, out, "--block-rows", "3", "--finish")
    assert ended.code == 0, ended
    assert load(out)["id"][:] == list(range(1, 13))
