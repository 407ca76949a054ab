"""Blocks: how a split is cut, what a block holds, and from what a run resumes."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from src.block_files import check_settings_are_ours, differences
from src.blocks import BlockFolder, BlockPlan, Target
from src.columns import (
    Extras,
    appended_info,
    block_table,
    check_columns,
    kept_rows,
    new_columns,
    output_schema,
    storable,
)
from src.confidence import Confidence
from src.errors import UsageError
from src.grounding import Block
from src.result import PageResult

SETTINGS = {"model": "m", "seed": 0}


def rows_of(count: int) -> pa.Table:
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "label": datasets.ClassLabel(names=["book", "letter"]),
            "nested": {"a": datasets.Value("int64"), "b": datasets.List(datasets.Value("string"))},
        }
    )
    data = {
        "image": [{"bytes": bytes([index % 256]) * 3, "path": f"{index}.png"} for index in range(count)],
        "label": [index % 2 for index in range(count)],
        "nested": [{"a": index, "b": ["x"] * (index % 3)} for index in range(count)],
    }
    return pa.table(data, schema=features.arrow_schema)


def written(tmp_path: Path, rows: pa.Table, results: list[PageResult], info: dict[str, Any] | None = None) -> Path:
    folder = BlockFolder(tmp_path, Target("train"))
    schema = output_schema(rows.schema, "markdown", SETTINGS)
    with folder.locked():
        folder.write(0, block_table(rows, results, schema, "markdown", info or {"model": "m"}))
    return folder.path(0)


@given(num_rows=st.integers(0, 5000), block_rows=st.integers(1, 700))
def test_blocks_partition_any_split_exactly(num_rows: int, block_rows: int) -> None:
    plan = BlockPlan(Target("train"), num_rows, block_rows)
    positions = [position for number in range(len(plan)) for position in plan.positions(number)]
    assert positions == list(range(num_rows))
    if num_rows:
        assert all(0 < len(plan.positions(number)) <= block_rows for number in range(len(plan)))
    else:
        assert len(plan) == 1, "a split without rows is one block without rows"
    names = [plan.target.block_name(number) for number in range(len(plan))]
    assert names == sorted(set(names))
    assert [plan.target.block_number(name) for name in names] == list(range(len(plan)))


@pytest.mark.parametrize(
    "name",
    [
        "data/train-1.parquet",
        "data/train_x-000001.parquet",
        "data/train-000001.parquet.tmp",
        "data/README.md",
        "other/train-000001.parquet",
        "train-000001.parquet",
    ],
)
def test_what_is_no_block_of_this_split_is_none(name: str) -> None:
    assert Target("train").block_number(name) is None


def test_a_configuration_has_a_folder_of_its_own() -> None:
    letters = Target("train", "letters")
    assert letters.block_name(1) == "letters/train-000001.parquet"
    assert letters.block_number("letters/train-000001.parquet") == 1
    assert letters.block_number("data/train-000001.parquet") is None


def test_a_block_holds_the_input_columns_as_they_were_and_features_are_kept(tmp_path: Path) -> None:
    rows = rows_of(5)
    path = written(tmp_path, rows, [PageResult("text", "ok", tokens=3)] * 5)
    there = pq.read_table(path)
    for column in rows.schema.names:
        assert there[column].combine_chunks().equals(rows[column].combine_chunks())
    loaded = datasets.load_dataset("parquet", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
    expected = datasets.Features.from_arrow_schema(rows.schema)
    assert {name: loaded.features[name] for name in expected} == dict(expected)
    assert loaded["markdown_tokens"][0] == 3


@given(st.lists(st.text(st.characters(codec=None), max_size=300), min_size=1, max_size=8))
def test_any_text_survives_the_round_trip(texts: list[str]) -> None:
    rows = pa.table({"image": [b""] * len(texts)})
    schema = output_schema(rows.schema, "markdown", SETTINGS)
    table = block_table(rows, [PageResult(text, "ok") for text in texts], schema, "markdown", {})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    back = pq.read_table(pa.BufferReader(sink.getvalue()))["markdown"].to_pylist()
    assert back == [storable(text) for text in texts]
    for text, stored in zip(texts, back, strict=True):
        if not any("\ud800" <= character <= "\udfff" for character in text):
            assert stored == text


def test_a_very_long_text_with_nul_survives(tmp_path: Path) -> None:
    text = "\0" + "é" * 200_000 + "\0"
    path = written(tmp_path, rows_of(1), [PageResult(text, "ok")])
    assert pq.read_table(path)["markdown"].to_pylist() == [text]


@pytest.mark.parametrize(
    ("text", "stored"),
    [("\ud83d\ude00", "😀"), ("a\ud83d", "a\ufffd"), ("\ude00b", "\ufffdb"), ("\ud83dxy", "\ufffdxy")],
)
def test_surrogates_are_joined_or_replaced_one_by_one(text: str, stored: str) -> None:
    assert storable(text) == stored


grounding_blocks = st.builds(
    Block,
    st.sampled_from(["text", "table"]),
    st.tuples(*[st.integers(0, 1000)] * 4),
    st.text(st.characters(codec="utf-8"), max_size=20),
)
read_pages = st.builds(
    PageResult,
    st.text(st.characters(codec="utf-8")),
    st.just("ok"),
    tokens=st.integers(0, 9),
    raw=st.text(st.characters(codec="utf-8")),
    blocks=st.lists(grounding_blocks, max_size=3).map(tuple),
    confidence=st.none() | st.builds(Confidence, st.just(0.5), st.just(0.25), st.just(0)),
)


@settings(max_examples=40, deadline=None)
@given(results=st.lists(read_pages, min_size=1, max_size=4), extras=st.builds(Extras, *[st.booleans()] * 3))
def test_what_a_block_keeps_of_a_page_is_what_was_read(results: list[PageResult], extras: Extras) -> None:
    rows = rows_of(len(results))
    schema = output_schema(rows.schema, "markdown", SETTINGS, extras=extras)
    with tempfile.TemporaryDirectory() as folder:
        blocks = BlockFolder(Path(folder), Target("train"))
        with blocks.locked():
            blocks.write(0, block_table(rows, results, schema, "markdown", {}, extras=extras))
        kept = kept_rows(blocks, 0, "markdown", extras)
        loaded = pq.read_schema(blocks.path(0))
    assert [row and row.result for row in kept] == [
        replace(
            result,
            raw=result.raw if extras.raw else None,
            blocks=result.blocks if extras.blocks else None,
            confidence=result.confidence if extras.confidence else None,
        )
        for result in results
    ]
    assert tuple(loaded.names[-len(new_columns("markdown", extras)) - 1 : -1]) == new_columns("markdown", extras)
    assert set(datasets.Features.from_arrow_schema(loaded)) == set(loaded.names)


def test_an_error_row_has_no_text_but_a_reason(tmp_path: Path) -> None:
    path = written(tmp_path, rows_of(2), [PageResult(None, "error", error="bad \ud800"), PageResult("", "blank")])
    table = pq.read_table(path)
    assert table["markdown"].to_pylist() == [None, ""]
    assert table["markdown_status"].to_pylist() == ["error", "blank"]
    assert table["markdown_error"].to_pylist() == ["bad \ufffd", None]


def test_results_that_do_not_match_the_rows_are_never_written() -> None:
    rows = rows_of(2)
    with pytest.raises(ValueError, match="2 rows, but 1 results"):
        block_table(rows, [PageResult("x", "ok")], output_schema(rows.schema, "markdown", {}), "markdown", {})


def test_inference_info_is_appended_to_what_an_earlier_run_left(tmp_path: Path) -> None:
    rows = rows_of(2).append_column("inference_info", pa.array([json.dumps([{"model": "earlier"}]), None]))
    path = written(tmp_path, rows, [PageResult("x", "ok")] * 2, {"model": "now"})
    table = pq.read_table(path)
    assert [json.loads(entry) for entry in table["inference_info"].to_pylist()] == [
        [{"model": "earlier"}, {"model": "now"}],
        [{"model": "now"}],
    ]
    assert table.schema.names.count("inference_info") == 1


@pytest.mark.parametrize(("before", "entries"), [("not json", ["not json"]), ('{"a": 1}', [{"a": 1}]), ("", [])])
def test_what_was_no_list_becomes_the_first_entry(before: str, entries: list[Any]) -> None:
    assert json.loads(appended_info(before, {"b": 2})) == [*entries, {"b": 2}]


def test_a_column_clash_names_the_column_and_the_option() -> None:
    schema = pa.schema([("image", pa.binary()), ("markdown_status", pa.string())])
    with pytest.raises(UsageError, match=r"'markdown_status'.*--output-column"):
        check_columns(schema, "markdown")
    check_columns(schema, "text")


def test_differences_name_each_setting_with_both_values() -> None:
    assert differences({"a": 1, "b": None, "c": 2}, {"a": 1, "b": "x", "d": 3}) == [
        'b: was null, now "x"',
        "c: was 2, now null",
        "d: was null, now 3",
    ]


def test_blocks_of_other_settings_are_refused_and_of_the_same_accepted(tmp_path: Path) -> None:
    written(tmp_path, rows_of(1), [PageResult("x", "ok")])
    (stored,) = BlockFolder(tmp_path, Target("train")).stored_settings()
    check_settings_are_ours("here", stored, SETTINGS)
    with pytest.raises(UsageError, match=r"seed: was 0, now 1\n.*--overwrite"):
        check_settings_are_ours("here", stored, {**SETTINGS, "seed": 1})
    with pytest.raises(UsageError, match="did not write"):
        check_settings_are_ours("here", None, SETTINGS)


def test_only_whole_blocks_count_and_leftovers_are_swept(tmp_path: Path) -> None:
    folder = BlockFolder(tmp_path, Target("train"))
    (tmp_path / "data").mkdir()
    half = tmp_path / "data" / ".train-000001.parquet.tmp"
    half.write_bytes(b"half")
    other = tmp_path / "data" / ".test-000001.parquet.tmp"
    other.write_bytes(b"of another split, perhaps being written")
    with folder.locked():
        assert folder.closed() == set()
        assert not half.exists()
        assert other.exists()


def test_a_second_run_into_the_same_split_is_refused(tmp_path: Path) -> None:
    with (
        BlockFolder(tmp_path, Target("train")).locked(),
        pytest.raises(UsageError, match="another run is writing split 'train'"),
        BlockFolder(tmp_path, Target("train")).locked(),
    ):
        pass
    with BlockFolder(tmp_path, Target("train")).locked(), BlockFolder(tmp_path, Target("test")).locked():
        pass


def test_overwriting_removes_the_blocks_of_this_split_alone(tmp_path: Path) -> None:
    path = written(tmp_path, rows_of(1), [PageResult("x", "ok")])
    others = [path.with_name("test-000000.parquet"), path.with_name("notes.txt")]
    for other in others:
        other.write_bytes(b"keep")
    BlockFolder(tmp_path, Target("train")).remove_all()
    assert not path.exists()
    assert all(other.exists() for other in others)
