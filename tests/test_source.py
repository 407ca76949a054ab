"""Sources: rows by address, whatever the files look like."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from src.beside import embed_pictures, path_inside
from src.errors import SourceError, UsageError
from src.parquet_rows import ParquetRows
from src.patience import Patience
from src.source import Source, choose_image_column, choose_rows, local_fingerprint, open_source
from src.splits import choose_split
from src.stream import StreamedRows, open_streamed
from tests.stub_vllm import tagged_png


def write_rows(path: Path, start: int, count: int, group: int) -> None:
    numbers = list(range(start, start + count))
    pq.write_table(
        pa.table({"id": numbers, "image": [b"%d" % number for number in numbers]}), path, row_group_size=group
    )


def ids(table: pa.Table) -> list[int]:
    found: list[int] = table["id"].to_pylist()
    return found


@pytest.fixture(scope="module")
def parquet_files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """700 rows in four files: row groups smaller and larger than a batch, an empty file among them."""
    folder = tmp_path_factory.mktemp("parquet")
    shapes = [(0, 10, 3), (10, 0, 5), (10, 490, 300), (500, 200, 64)]
    for number, (start, count, group) in enumerate(shapes):
        write_rows(folder / f"{number}.parquet", start, count, group)
    return [str(folder / f"{number}.parquet") for number in range(len(shapes))]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_sequence_of_reads_gives_the_rows_asked_for(parquet_files: list[str], data: st.DataObject) -> None:
    rows = ParquetRows(parquet_files)
    assert rows.num_rows == 700
    for _ in range(data.draw(st.integers(1, 5))):
        if data.draw(st.booleans()):
            start = data.draw(st.integers(0, 699))
            addresses: Any = range(start, data.draw(st.integers(start + 1, min(700, start + 300))))
        else:
            addresses = data.draw(st.lists(st.integers(0, 699), min_size=1, max_size=12))
        assert ids(rows.read(addresses)) == list(addresses)


def test_reading_on_opens_each_row_group_once(parquet_files: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[tuple[str, int]] = []
    original = ParquetRows._open

    def counted(self: ParquetRows, group: Any) -> Any:
        opened.append((group.file, group.index))
        return original(self, group)

    monkeypatch.setattr(ParquetRows, "_open", counted)
    rows = ParquetRows(parquet_files)
    for start in range(0, 700, 25):
        rows.read(range(start, min(700, start + 25)))
    assert len(opened) == len(set(opened)) == 4 + 2 + 4


def test_files_whose_columns_are_ordered_differently_fit_the_first(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": [0], "text": ["a"]}), tmp_path / "0.parquet")
    pq.write_table(pa.table({"text": pa.array(["b"], pa.large_string()), "id": [1]}), tmp_path / "1.parquet")
    table = ParquetRows([str(tmp_path / "0.parquet"), str(tmp_path / "1.parquet")]).read(range(2))
    assert table.to_pylist() == [{"id": 0, "text": "a"}, {"id": 1, "text": "b"}]


def test_a_file_that_goes_bad_in_mid_run_is_an_error_that_says_how_to_go_on(tmp_path: Path) -> None:
    path = tmp_path / "0.parquet"
    cells = [number.to_bytes(2, "big") * 100 for number in range(5000)]
    pq.write_table(pa.table({"id": range(5000), "image": cells}), path, compression="gzip", use_dictionary=False)
    rows = ParquetRows([str(path)])
    content = bytearray(path.read_bytes())
    content[100 : len(content) // 2] = b"\xff" * (len(content) // 2 - 100)
    path.write_bytes(content)
    with pytest.raises(SourceError, match=r"0\.parquet, row group 0.*run again to resume"):
        rows.read(range(5000))


def test_choosing_rows_is_a_function_of_the_seed() -> None:
    assert list(choose_rows(10, None, False, 0)) == list(range(10))
    assert list(choose_rows(10, 3, False, 0)) == [0, 1, 2]
    assert list(choose_rows(3, 10, False, 0)) == [0, 1, 2]
    drawn = list(choose_rows(1000, 100, True, 7))
    assert drawn == list(np.random.default_rng(7).permutation(1000)[:100])
    assert len(set(drawn)) == 100
    assert drawn != list(choose_rows(1000, 100, True, 8))


@pytest.mark.parametrize(
    ("there", "wanted", "chosen"), [(["a"], None, "a"), (["test", "train"], None, "train"), (["a", "b"], "b", "b")]
)
def test_the_split_is_the_wanted_the_only_one_or_train(there: list[str], wanted: str | None, chosen: str) -> None:
    assert choose_split(there, wanted) == chosen


@pytest.mark.parametrize(("there", "wanted"), [(["a", "b"], "c"), (["a", "b"], None)])
def test_an_unclear_split_is_refused_with_what_there_is(there: list[str], wanted: str | None) -> None:
    with pytest.raises(UsageError, match=r"--split.*a, b"):
        choose_split(there, wanted)


def test_the_image_column_is_found_by_name_then_by_type() -> None:
    features = datasets.Features({"scan": datasets.Image(), "id": datasets.Value("string")})
    assert choose_image_column(features.arrow_schema, None) == "scan"
    assert choose_image_column(pa.schema([("image", pa.binary()), ("x", pa.int8())]), None) == "image"
    assert choose_image_column(pa.schema([("image", pa.binary()), ("b", pa.large_binary())]), "b") == "b"
    with pytest.raises(UsageError, match=r"'id' holds no pictures but string"):
        choose_image_column(features.arrow_schema, "id")
    with pytest.raises(UsageError, match=r"no column 'page'.*takes one of: scan$"):
        choose_image_column(features.arrow_schema, "page")
    with pytest.raises(UsageError, match=r"--image-column: a, b"):
        choose_image_column(pa.schema([("a", pa.binary()), ("b", pa.binary())]), None)


@pytest.mark.parametrize("wanted", [None, "text", "page"])
def test_an_input_without_pictures_is_refused_and_no_column_of_it_is_suggested(wanted: str | None) -> None:
    with pytest.raises(UsageError, match=r"no column of pictures, only text \(string\), year \(int64\)") as refused:
        choose_image_column(pa.schema([("text", pa.string()), ("year", pa.int64())]), wanted)
    assert "--image-column" not in str(refused.value)


def test_a_fingerprint_moves_with_the_folder_but_not_with_its_content(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name / "sub").mkdir(parents=True)
        (tmp_path / name / "sub" / "a.png").write_bytes(b"abc")
    assert local_fingerprint(tmp_path / "one") == local_fingerprint(tmp_path / "two")
    (tmp_path / "two" / "sub" / "a.png").write_bytes(b"abcd")
    assert local_fingerprint(tmp_path / "one") != local_fingerprint(tmp_path / "two")


@pytest.fixture
def walled(tmp_path: Path) -> Path:
    """A folder with a file, and a secret outside it that a link inside points to."""
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "page.png").write_bytes(tagged_png(1))
    (tmp_path / "secret").write_bytes(b"secret")
    (inside / "link.png").symlink_to(tmp_path / "secret")
    (inside / "good-link.png").symlink_to(inside / "page.png")
    (inside / "loop").symlink_to(inside / "loop")
    os.mkfifo(inside / "pipe.png")
    (tmp_path / "inside-2").mkdir()
    (tmp_path / "inside-2" / "page.png").write_bytes(b"a neighbour whose name begins alike")
    return inside


@pytest.mark.parametrize("name", ["../secret", "link.png", "/etc/passwd", "/proc/self/environ", "../inside-2/page.png"])
def test_a_path_that_leaves_its_folder_is_not_opened(walled: Path, name: str) -> None:
    assert path_inside(name, [walled]) is None
    assert path_inside(str(walled / name), [walled]) is None


@pytest.mark.parametrize(
    "name", ["loop", "missing", "", ".", "page.png\0", "a" * 5000, "pipe.png", "\ud800", "https://example.org/1.png"]
)
def test_a_path_to_no_file_is_not_opened(walled: Path, name: str) -> None:
    assert path_inside(name, [walled]) is None
    assert path_inside(str(walled / name) if name else "", [walled]) is None


@pytest.mark.parametrize("name", ["page.png", "good-link.png", "./page.png", "../inside/page.png"])
def test_a_path_inside_is_opened(walled: Path, name: str) -> None:
    assert path_inside(name, [walled]) == walled / "page.png"
    assert path_inside(str(walled / name), [walled]) == walled / "page.png"
    assert path_inside(name, []) is None


def test_pictures_beside_the_table_are_embedded_and_others_stay_as_they_are(walled: Path) -> None:
    cells = [
        {"bytes": None, "path": str(walled / "page.png")},
        {"bytes": b"here", "path": "x.png"},
        {"bytes": None, "path": "/etc/passwd"},
        None,
        {"bytes": None, "path": None},
    ]
    table = pa.table({"image": pa.array(cells, datasets.Image().pa_type), "id": list(range(5))})
    embedded = embed_pictures(table, "image", [walled])
    assert embedded["image"].to_pylist() == [{"bytes": tagged_png(1), "path": "page.png"}, *cells[1:]]
    assert embedded["id"].equals(table["id"])
    assert embed_pictures(table.select(["id"]), "id", [walled]).equals(table.select(["id"]))


def opened(path: Path, **options: Any) -> Source:
    return open_source(str(path), **options)


def test_every_kind_of_local_input_gives_the_same_rows(tmp_path: Path) -> None:
    features = datasets.Features({"image": datasets.Image(), "id": datasets.Value("int64")})
    data = {"image": [{"bytes": tagged_png(n), "path": None} for n in range(5)], "id": list(range(5))}
    dataset = datasets.Dataset.from_dict(data, features=features)
    dataset.to_parquet(tmp_path / "one.parquet")
    dataset.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": dataset, "test": dataset.select([0])}).save_to_disk(tmp_path / "dict")
    (tmp_path / "folder" / "data").mkdir(parents=True)
    dataset.to_parquet(tmp_path / "folder" / "data" / "train-00000.parquet")
    for name in ("one.parquet", "saved", "dict", "folder"):
        source = opened(tmp_path / name)
        table = source.read(range(1, 4))
        assert (source.split, len(source.order)) == ("train", 5)
        assert table.column_names == ["image", "id"]
        assert ids(table) == [1, 2, 3]
        assert [cell["bytes"] for cell in table["image"].to_pylist()] == [tagged_png(n) for n in (1, 2, 3)]
        assert datasets.Features.from_arrow_schema(source.rows.schema) == features
    assert len(opened(tmp_path / "dict", split="test").order) == 1
    assert ids(opened(tmp_path / "saved", shuffle=True, seed=3, max_samples=2).read(range(2))) == list(
        choose_rows(5, 2, True, 3)
    )


def test_a_folder_of_images_is_read_in_the_order_of_names_with_their_bytes(tmp_path: Path) -> None:
    folder = tmp_path / "scans"
    folder.mkdir()
    for number in (2, 0, 1):
        (folder / f"{number}.png").write_bytes(tagged_png(number))
    table = opened(folder).read(range(3))
    assert table["image"].to_pylist() == [{"bytes": tagged_png(n), "path": f"{n}.png"} for n in range(3)]


def test_the_card_of_a_folder_names_its_splits(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for split, count in (("letters", 3), ("books", 4)):
        write_rows(tmp_path / "data" / f"{split}-0.parquet", 0, count, 2)
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files:\n"
        "  - {split: letters, path: data/letters-*}\n  - {split: books, path: data/books-*}\n---\n"
    )
    with pytest.raises(UsageError, match=r"which split\?.*letters, books"):
        opened(tmp_path)
    assert len(opened(tmp_path, split="books").order) == 4


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere/at/all", "no such file or folder"),
        ("./x", "no such file or folder"),
        ("a b", "no such file or folder"),
    ],
)
def test_an_input_that_is_not_there_is_refused(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        open_source(name)


def test_inputs_that_are_no_datasets_are_refused_with_their_name(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no")
    with pytest.raises(UsageError, match=r"notes\.txt.*not parquet"):
        opened(tmp_path / "notes.txt")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 but no more")
    with pytest.raises(UsageError, match=r"broken\.parquet"):
        opened(tmp_path / "broken.parquet")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"empty"):
        opened(tmp_path / "empty")


def test_a_split_without_rows_is_read_as_one(tmp_path: Path) -> None:
    write_rows(tmp_path / "none.parquet", 0, 0, 5)
    options: dict[str, Any]
    for options in ({}, {"max_samples": 5, "shuffle": True}):
        source = opened(tmp_path / "none.parquet", **options)
        assert len(source.order) == 0
        assert source.read(range(0)).schema.names == pq.read_schema(tmp_path / "none.parquet").names


class Flaky:
    """A file whose reads fail, beyond the footer, as often as `failures` says; what was read is counted."""

    def __init__(self, path: str, failures: list[Exception], opened: list[str]) -> None:
        self._file = Path(path).open("rb")  # noqa: SIM115 - closed below
        self._failures = failures
        self.closed = False
        opened.append(path)

    def read(self, size: int = -1) -> bytes:
        if self._failures and self._file.tell() < 1000:
            raise self._failures.pop()
        return self._file.read(size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()


@pytest.fixture
def far_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[ParquetRows, list[Exception], list[str]]:
    """Rows of two files that lie far away, the failures to come, and the files that were opened."""
    failures: list[Exception] = []
    opened: list[str] = []
    for number in range(2):
        write_rows(tmp_path / f"{number}.parquet", number * 200, 200, 200)

    def flaky(file: str) -> Flaky:
        return Flaky(file.removeprefix("far://"), failures, opened)

    monkeypatch.setattr("src.parquet_rows._open_file", flaky)
    monkeypatch.setattr("src.patience.FIRST_NETWORK_PAUSE_S", 0.01)
    rows = ParquetRows([f"far://{tmp_path / f'{n}.parquet'}" for n in range(2)], patience=Patience(0.5, 0.1))
    opened.clear()
    return rows, failures, opened


def test_a_row_group_that_breaks_off_is_opened_anew_and_read_on(
    far_rows: tuple[ParquetRows, list[Exception], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    rows, failures, opened = far_rows
    assert ids(rows.read(range(70))) == list(range(70))
    failures += [ConnectionError("gone"), TimeoutError("late")]
    assert ids(rows.read(range(150, 250))) == list(range(150, 250))
    assert not failures
    assert capsys.readouterr().err.count("fails for now") == 2
    assert len(opened) == 1 + 3, "the row group that broke, and no other, was opened again"


def test_a_source_that_stays_away_ends_the_run_with_what_to_do(
    far_rows: tuple[ParquetRows, list[Exception], list[str]],
) -> None:
    rows, failures, _ = far_rows
    failures += [ConnectionError("gone")] * 1000
    with pytest.raises(SourceError, match=r"row group 0, failed: gone; run again to resume"):
        rows.read(range(10))
    assert len(failures) > 900, "with pauses"
    failures[:] = [FileNotFoundError("no such file")] * 2
    with pytest.raises(SourceError, match="no such file"):
        rows.read(range(10))
    assert len(failures) == 1, "what can't pass is not tried again"


def test_a_far_file_whose_bytes_are_damaged_ends_the_run_soon_and_one_that_was_cut_on_its_way_does_not(
    far_rows: tuple[ParquetRows, list[Exception], list[str]],
) -> None:
    rows, failures, _ = far_rows
    failures += [OSError("Corrupt snappy compressed data.")] * 2
    assert ids(rows.read(range(10))) == list(range(10))
    failures += [OSError("Corrupt snappy compressed data.")] * 1000
    with pytest.raises(SourceError, match=r"row group 0, failed 3 times: Corrupt snappy .* upload it anew"):
        rows.read(range(200, 210))
    assert len(failures) == 997


def test_a_run_that_ends_waits_for_no_source(far_rows: tuple[ParquetRows, list[Exception], list[str]]) -> None:
    rows, failures, _ = far_rows
    failures += [ConnectionError("gone")] * 1000
    rows._patience.hurry(0.0)
    with pytest.raises(SourceError):
        rows.read(range(10))
    assert len(failures) == 999


def test_a_stream_that_breaks_is_opened_anew_at_the_row_where_it_stood(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("src.patience.FIRST_NETWORK_PAUSE_S", 0.01)
    opened: list[int] = []
    breaks_at = [30, 12]

    def stream(start: int) -> Any:
        opened.append(start)
        for row in range(start, 40):
            if breaks_at and row == breaks_at[-1]:
                breaks_at.pop()
                raise ConnectionError("gone")
            yield {"id": row}

    rows = StreamedRows(stream, pa.schema([("id", pa.int64())]), 50, "hf://datasets/me/x@1/", Patience(5.0, 0.1))
    assert ids(rows.read(range(8))) == list(range(8))
    assert ids(rows.read(range(10, 35))) == list(range(10, 35))
    assert opened == [0, 12, 30]
    assert ids(rows.read(range(5))) == list(range(5)), "a row before is read from a stream opened anew"
    assert opened == [0, 12, 30, 0]
    with pytest.raises(SourceError, match="ended at row 40, but has 50 rows by its card; give --max-samples 40"):
        rows.read(range(38, 45))


@pytest.mark.parametrize(
    "path", ["hf://datasets/me/x@1/../y@1/a.png", "hf://datasets/me/y@1/a.png", "/etc/passwd", None]
)
def test_a_stream_fetches_no_picture_from_elsewhere(path: str | None) -> None:
    cell = {"bytes": None, "path": path}
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    rows = StreamedRows(
        lambda start: iter([{"image": cell}]), pa.schema([("image", kind)]), 1, "hf://datasets/me/x@1/", Patience(0.0)
    )
    assert rows.read(range(1))["image"].to_pylist() == [cell]


def test_a_large_row_group_is_not_fetched_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, sizes = tmp_path / "large.parquet", [0]
    numbers = list(range(10_000))
    cells = [number.to_bytes(4, "big") * 250 for number in numbers]
    table = pa.table({"id": numbers, "image": cells})
    pq.write_table(table, path, compression="none", use_dictionary=False)  # one row group of several pages

    class Counted(Flaky):
        def read(self, size: int = -1) -> bytes:
            sizes.append(size)
            return super().read(size)

    monkeypatch.setattr("src.parquet_rows._open_file", lambda file: Counted(file, [], []))
    assert ParquetRows([str(path)]).read(range(10_000)).equals(table)
    assert max(sizes) > 9_900_000
    sizes.clear()
    monkeypatch.setattr("src.parquet_rows.MOST_READ_AHEAD_BYTES", 100_000)
    monkeypatch.setattr("src.parquet_rows.PIECE_BYTES", 100_000)
    rows = ParquetRows([str(path)])
    assert rows.read(range(10)).num_rows == 10
    assert sum(sizes) < 4_000_000
    assert rows.read(range(10_000)).equals(table)


class Builder:
    """What is looked at of a builder that streams `rows`."""

    def __init__(self, name: str, files: list[str], rows: list[dict[str, Any]], num_examples: int = 0) -> None:
        self.name = name
        self.config = SimpleNamespace(data_files={"train": files})
        self.info = SimpleNamespace(splits={"train": SimpleNamespace(num_examples=num_examples)})
        self._rows = rows

    def as_streaming_dataset(self, split: str) -> Any:
        return datasets.Dataset.from_list(self._rows, split=split).to_iterable_dataset()


@pytest.mark.parametrize(
    ("name", "files", "num_examples", "rows_found"),
    [
        ("imagefolder", ["hf://datasets/me/x@1/a.png"], 0, 3),
        ("imagefolder", ["hf://datasets/me/x@1/a.png", "hf://datasets/me/x@1/b.ZIP"], 3, None),
        ("webdataset", ["hf://datasets/me/x@1/a.tar"], 3, 3),
        ("webdataset", ["hf://datasets/me/x@1/a.tar"], 0, None),
    ],
)
def test_what_is_streamed_has_a_known_number_of_rows(
    name: str, files: list[str], num_examples: int, rows_found: int | None
) -> None:
    builder = Builder(name, files, [{"id": number} for number in range(3)], num_examples)
    rows = open_streamed(builder, "hf://datasets/me/x@1/", "train", Patience(0.0))
    assert (rows.num_rows if rows else None) == rows_found
    assert rows is None or ids(rows.read(range(1, 3))) == [1, 2]
