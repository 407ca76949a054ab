"""Whole runs against the stub, for what decides which text a page gets, and which pictures become pages."""

from __future__ import annotations

import io
import json
import threading
from typing import TYPE_CHECKING, Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from src.question import page_seed
from src.reading import FRAME_SEPARATOR
from tests.runs import (
    NEW_COLUMNS,
    Ended,
    built_script,
    load,
    output_table,
    pages_dataset,
    run_here,
    tag_of,
    write_pages,
)
from tests.stub_vllm import StubVllm, tagged_png

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

GROUNDING_MODEL = "lightonai/LightOnOCR-3-0.8B"
GROUNDED = (
    "![header](0,0,1000,40)\nThe Daily Mill\n\n![text](10,50,990,400)\nFor \\$x\\$ and \\$5.\n\n"
    "![text+](10,400,990,500)\nGoes on.\n\n![code](10,510,990,600)\n\\$a\\$\n\n![figure](1,2,3,4)\n\n"
    "![page_number](400,960,600,1000)\n7"
)


@pytest.fixture(scope="module")
def shared_stub() -> Iterator[StubVllm]:
    with StubVllm("--read-tag", "--served-model-name", "lightonai/LightOnOCR-2-1B", GROUNDING_MODEL) as stub:
        yield stub


@pytest.fixture
def stub(shared_stub: StubVllm) -> StubVllm:
    shared_stub.configure(faults=[])
    shared_stub.reset()
    return shared_stub


def file_of(*frames: Image.Image, file_format: str = "TIFF") -> bytes:
    buffer = io.BytesIO()
    more = {"save_all": True, "append_images": frames[1:]} if len(frames) > 1 else {}
    frames[0].save(buffer, file_format, **more)
    return buffer.getvalue()


def inked(number: int, size: tuple[int, int] = (100, 140)) -> Image.Image:
    """A page with ink, its tag, and a size that the stub's text will show."""
    image = Image.open(io.BytesIO(tagged_png(number))).convert("RGB").resize(size, Image.Resampling.NEAREST)
    image.putpixel((0, 0), (number >> 16, number >> 8 & 255, number & 255))
    return image


def write_cells(path: Path, *cells: bytes) -> Path:
    """Write a dataset whose rows hold these files."""
    rows = range(1, len(cells) + 1)
    given = {row: {"bytes": cell, "path": None} for row, cell in zip(rows, cells, strict=True)}
    pq.write_table(pages_dataset(rows, given).with_format("arrow")[:], path)
    return path


def run_on(stub: StubVllm, pages: Path, out: Path, *words: str, code: int = 0) -> Ended:
    ended = run_here(pages, out, "--server", stub.url, "--max-failure-rate", "1", *words)
    assert ended.code == code, ended
    return ended


def rows_of(out: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = output_table(out).to_pylist()
    return rows


def fault(kind: str, **fields: Any) -> str:
    return json.dumps({"kind": kind, **fields})


# --- asked again -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["loop", "truncate", "repetition"])
def test_a_text_that_is_not_sound_is_asked_for_again_and_the_sound_one_kept(
    tmp_path: Path, stub: StubVllm, kind: str
) -> None:
    pages, out = write_pages(tmp_path / "pages.parquet", 3), tmp_path / "out"
    stub.configure(faults=[fault(kind, tag=tag_of(2), first=1)])
    ended = run_on(stub, pages, out)
    assert [row["markdown_status"] for row in rows_of(out)] == ["ok"] * 3
    assert ended.line["asked_again"] == 1
    assert ended.line["requests"] == stub.stats()["requests"] == 4
    assert ended.line["retries"] == 0
    assert ended.line["tokens"] == stub.stats()["generation_tokens"]
    assert "1 requests for a better text" in ended.stderr
    seeds = {tuple(seeds) for seeds in stub.stats()["seeds"].values()}
    assert seeds == {(page_seed(0, 0),), (page_seed(0, 1), page_seed(0, 1, 0, 1)), (page_seed(0, 2),)}


def test_a_page_that_stays_truncated_is_asked_for_more_and_warmer_and_the_longest_text_kept(
    tmp_path: Path, stub: StubVllm
) -> None:
    pages, out = write_pages(tmp_path / "pages.parquet", 1), tmp_path / "out"
    stub.configure(faults=[fault("truncate", at=2), fault("loop")])
    ended = run_on(stub, pages, out)
    (row,) = rows_of(out)
    assert row["markdown_status"] == "truncated"
    assert row["markdown"].startswith("page ")
    assert ended.line["asked_again"] == 2
    asked = stub.stats()["last_request"]
    assert asked["temperature"] == pytest.approx(0.6)
    assert asked["max_tokens"] > 4096  # what the second answer lacked, as far as the context allows
    assert asked["seed"] == page_seed(0, 0, 0, 2)


def test_retries_can_be_turned_off_and_the_texts_are_then_counted_as_failures(tmp_path: Path, stub: StubVllm) -> None:
    pages = write_pages(tmp_path / "pages.parquet", 4)
    stub.configure(faults=[fault("loop", tag=tag_of(1)), fault("truncate", tag=tag_of(2))])
    ended = run_here(pages, tmp_path / "out", "--server", stub.url, "--retries-quality", "0")
    assert ended.code == 1
    assert "2 of 4 pages failed" in ended.line["message"]
    assert ended.line["statuses"] == {"ok": 2, "blank": 0, "truncated": 1, "repetition": 1, "error": 0}
    assert stub.stats()["requests"] == 4
    assert "4 rows: 2 ok, 0 blank, 1 truncated, 1 repetition, 0 error" in (tmp_path / "out" / "README.md").read_text()


def test_a_retry_that_fails_does_not_cost_the_text_that_was_there(tmp_path: Path, stub: StubVllm) -> None:
    pages, out = write_pages(tmp_path / "pages.parquet", 1), tmp_path / "out"
    stub.configure(faults=[fault("truncate", at=1), fault("status", code=400)])
    run_on(stub, pages, out)
    (row,) = rows_of(out)
    assert row["markdown_status"] == "truncated"
    assert row["markdown_error"] is None


def test_vllm_is_told_to_stop_loops_itself_and_an_older_one_or_another_server_is_not(tmp_path: Path) -> None:
    pages = write_pages(tmp_path / "pages.parquet", 1)
    for version, knows_it in (("0.32.0", True), ("0.16.0", False)):
        with StubVllm("--version-string", version) as stub:
            run_on(stub, pages, tmp_path / version)
            assert ("repetition_detection" in stub.stats()["last_request"]) == knows_it


# --- the text --------------------------------------------------------------------------------------------------------


def test_grounding_gives_the_blocks_and_a_text_without_markers(tmp_path: Path, stub: StubVllm) -> None:
    pages, out = write_pages(tmp_path / "pages.parquet", 2), tmp_path / "out"
    stub.configure(faults=[fault("answer", text=GROUNDED, tag=tag_of(1))])
    words = ("--model", GROUNDING_MODEL, "--mode", "grounding", "--drop-labels", "header,page_number", "--keep-raw")
    ended = run_on(stub, pages, out, *words)
    (content,) = [message["content"] for message in stub.stats()["last_request"]["messages"]]
    assert content[1:] == [{"type": "text", "text": "grounding"}]
    assert output_table(out).schema.names[3:] == [*NEW_COLUMNS[:4], "markdown_blocks", "markdown_raw", NEW_COLUMNS[4]]
    first, second = load(out)
    assert first["markdown"] == "For $x$ and \\$5.\nGoes on.\n\n\\$a\\$\n\n![figure](1,2,3,4)"
    assert first["markdown_raw"] == GROUNDED
    assert [block["label"] for block in first["markdown_blocks"]] == ["header", "text", "code", "page_number"]
    assert first["markdown_blocks"][1] == {
        "label": "text",
        "bbox": [10, 50, 990, 500],
        "text": "For $x$ and \\$5.\nGoes on.",
    }
    assert ended.line["malformed_markers"] == 1
    assert second["markdown_blocks"] == []
    assert second["markdown"].startswith("page ")
    assert load(out).features["markdown_blocks"] == datasets.List(
        {
            "label": datasets.Value("string"),
            "bbox": datasets.List(datasets.Value("int32")),
            "text": datasets.Value("string"),
        }
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--mode", "grounding"), "has no mode 'grounding'"),
        (("--model", "lightonai/LightOnOCR-1B-1025", "--mode", "grounding"), "grounding came with LightOnOCR-3"),
        (("--drop-labels", "header"), "--drop-labels goes with --mode grounding"),
        (("--model", GROUNDING_MODEL, "--mode", "grounding", "--drop-labels", "heading"), "heading is no label"),
    ],
)
def test_what_makes_no_sense_together_is_a_usage_error(
    tmp_path: Path, stub: StubVllm, words: tuple[str, ...], told: str
) -> None:
    pages = write_pages(tmp_path / "pages.parquet", 1)
    assert told in run_on(stub, pages, tmp_path / "out", *words, code=2).advice
    assert stub.stats()["requests"] == 0


@pytest.mark.parametrize(
    ("words", "text", "raw"),
    [
        ((), "$x$ for \\$5", None),
        (("--no-fix-dollars",), "\\$x\\$ for \\$5", None),
        (("--keep-raw",), "$x$ for \\$5", "\\$x\\$ for \\$5"),
    ],
)
def test_escaped_math_is_repaired_unless_that_is_turned_off_and_the_raw_text_kept_on_demand(
    tmp_path: Path, stub: StubVllm, words: tuple[str, ...], text: str, raw: str | None
) -> None:
    pages, out = write_pages(tmp_path / "pages.parquet", 1), tmp_path / "out"
    stub.configure(faults=[fault("answer", text="\\$x\\$ for \\$5")])
    run_on(stub, pages, out, *words)
    (row,) = rows_of(out)
    assert row["markdown"] == text
    assert row.get("markdown_raw") == raw
    assert json.loads(row["inference_info"])[-1]["fix_dollars"] is ("--no-fix-dollars" not in words)


def test_confidence_is_asked_for_and_stored_on_demand(tmp_path: Path, stub: StubVllm) -> None:
    pages, out = write_pages(tmp_path / "pages.parquet", 1), tmp_path / "out"
    run_on(stub, pages, out, "--confidence")
    assert stub.stats()["last_request"]["logprobs"] is True
    sure = rows_of(out)[0]["markdown_confidence"]
    assert 0.1 < sure["lowest"] < sure["mean"] < 0.91


def test_a_run_with_another_mode_of_reading_is_refused_on_the_same_output(tmp_path: Path, stub: StubVllm) -> None:
    pages, out = write_pages(tmp_path / "pages.parquet", 1), tmp_path / "out"
    run_on(stub, pages, out)
    for words in (("--keep-raw",), ("--frames", "all"), ("--no-skip-blank",), ("--retries-quality", "5")):
        assert words[0][2:].replace("-", "_").removeprefix("no_") in run_on(stub, pages, out, *words, code=2).stderr


def test_extra_columns_that_the_input_has_already_are_a_usage_error(tmp_path: Path, stub: StubVllm) -> None:
    table = pages_dataset([1]).with_format("arrow")[:].append_column("markdown_raw", pa.array(["mine"]))
    pq.write_table(table, tmp_path / "pages.parquet")
    run_on(stub, tmp_path / "pages.parquet", tmp_path / "out")
    assert "markdown_raw" in run_on(stub, tmp_path / "pages.parquet", tmp_path / "out2", "--keep-raw", code=2).advice


# --- pictures --------------------------------------------------------------------------------------------------------


def test_of_several_frames_the_first_is_read_with_a_warning_that_counts_them(tmp_path: Path, stub: StubVllm) -> None:
    many = file_of(inked(1), inked(2), inked(3))
    pages, out = write_cells(tmp_path / "pages.parquet", many, tagged_png(9)), tmp_path / "out"
    ended = run_on(stub, pages, out)
    assert stub.stats()["requests"] == 2
    assert "row 0 has 3 frames" in ended.stderr
    assert "--frames all" in ended.stderr
    assert ended.line["unread_frames"] == 2
    assert f"tag {tag_of(1)}" in rows_of(out)[0]["markdown"]


def test_all_frames_are_read_with_a_seed_each_and_their_texts_joined(tmp_path: Path, stub: StubVllm) -> None:
    blank = Image.new("RGB", (100, 140), "white")
    pages = write_cells(tmp_path / "pages.parquet", file_of(inked(1), inked(2), blank, inked(3)), file_of(blank, blank))
    ended = run_on(stub, pages, tmp_path / "out", "--frames", "all")
    first, second = rows_of(tmp_path / "out")
    texts = first["markdown"].split(FRAME_SEPARATOR)
    assert [f"tag {tag_of(number)}" in text for number, text in zip((1, 2, 9, 3), texts, strict=True)] == [
        True,
        True,
        False,
        True,
    ]
    assert texts[2] == ""
    assert (first["markdown_status"], second["markdown_status"]) == ("ok", "blank")
    assert first["markdown_tokens"] == stub.stats()["generation_tokens"] == ended.line["tokens"]
    assert {seed for seeds in stub.stats()["seeds"].values() for seed in seeds} == {
        page_seed(0, 0),
        page_seed(0, 0, 1),
        page_seed(0, 0, 3),
    }
    assert ended.line["unread_frames"] == 0
    assert ended.line["requests"] == 3


def test_a_picture_of_several_frames_is_as_sound_as_its_worst_one(tmp_path: Path, stub: StubVllm) -> None:
    pages, out = write_cells(tmp_path / "pages.parquet", file_of(inked(1), inked(2))), tmp_path / "out"
    words = ("--frames", "all", "--keep-raw", "--retries-quality", "0")
    stub.configure(faults=[fault("truncate", tag=tag_of(2))])
    run_on(stub, pages, out, *words)
    assert rows_of(out)[0]["markdown_status"] == "truncated"
    stub.configure(faults=[fault("status", code=400, tag=tag_of(2))])
    run_on(stub, pages, tmp_path / "out2", *words)
    (row,) = rows_of(tmp_path / "out2")
    assert (row["markdown"], row["markdown_status"]) == (None, "error")
    assert row["markdown_error"].startswith("frame 2 of 2: HTTP 400")
    assert f"tag {tag_of(1)}" in row["markdown_raw"]


def test_limits_on_pictures_are_rows_with_a_reason_and_can_be_moved(tmp_path: Path, stub: StubVllm) -> None:
    noise = Image.effect_noise((300, 400), 60).convert("RGB")
    whole = file_of(noise, file_format="JPEG")
    blank = file_of(Image.new("RGB", (100, 140), "white"), file_format="PNG")
    pages = write_cells(tmp_path / "pages.parquet", whole, whole[: len(whole) // 2], blank)
    run_on(stub, pages, tmp_path / "out")
    assert [row["markdown_status"] for row in rows_of(tmp_path / "out")] == ["ok", "error", "blank"]
    run_on(stub, pages, tmp_path / "out2", "--allow-truncated", "--no-skip-blank", "--max-pixels", "120000")
    assert [row["markdown_status"] for row in rows_of(tmp_path / "out2")] == ["ok", "ok", "ok"]
    ended = run_on(stub, pages, tmp_path / "out3", "--max-pixels", "119999")
    assert ended.line["statuses"]["error"] == 2
    assert (
        "300x400 is 120,000 pixels, more than the limit of 119,999" in rows_of(tmp_path / "out3")[0]["markdown_error"]
    )


def test_no_text_on_a_page_without_ink_that_was_asked_about_is_blank(tmp_path: Path, stub: StubVllm) -> None:
    blank = file_of(Image.new("RGB", (100, 140), "white"), file_format="PNG")
    pages = write_cells(tmp_path / "pages.parquet", blank)
    stub.configure(faults=[fault("empty")])
    run_on(stub, pages, tmp_path / "out", "--no-skip-blank")
    assert stub.stats()["requests"] == 1
    assert (rows_of(tmp_path / "out")[0]["markdown"], rows_of(tmp_path / "out")[0]["markdown_status"]) == ("", "blank")


def test_a_picture_that_takes_too_long_is_refused_by_name_and_holds_up_no_other(
    tmp_path: Path, stub: StubVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages, released = write_pages(tmp_path / "pages.parquet", 8), threading.Event()
    make_page = built_script().make_page

    def make_slowly(cell: dict[str, Any], *limits: Any, **frame: Any) -> object:
        if cell["bytes"] == tagged_png(2):
            released.wait(60)
        return make_page(cell, *limits, **frame)

    monkeypatch.setattr(built_script(), "make_page", make_slowly)
    try:
        run_on(stub, pages, tmp_path / "out", "--page-timeout", "1")
    finally:
        released.set()
    assert [row["markdown_status"] for row in rows_of(tmp_path / "out")] == ["ok", "error", *["ok"] * 6]
    assert rows_of(tmp_path / "out")[1]["markdown_error"] == "the picture was not decoded within 1 s (--page-timeout)"
