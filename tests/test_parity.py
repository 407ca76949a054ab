"""The comparison of two results: pure parts with known values, properties, and whole runs on small datasets."""

from __future__ import annotations

import io
import json
import random
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2 as httpx
import jiwer
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict, Features, Image, IterableDataset, Value
from hypothesis import given
from hypothesis import strategies as st

from src.compare import PageBatch, distance_histogram, match_ids, measure, worst_decile_mean
from src.diff import diff_rows, difference_excerpts, first_difference
from src.error_rates import paired_bootstrap, side_errors
from src.errors import UsageError
from src.findings import summarise_texts
from src.normalise import NORMALISATIONS, normaliser
from src.parity import main
from src.parity_source import describe_inference, locate
from src.visible import visible
from tests.hub_server import HubServer, hub_env

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

FEATURES = Features(
    {
        "page_id": Value("string"),
        "image": Image(),
        "truth": Value("string"),
        "markdown": Value("string"),
        "markdown_status": Value("string"),
        "markdown_error": Value("string"),
        "markdown_tokens": Value("int64"),
        "inference_info": Value("string"),
    }
)
SCRIPT = Path(__file__).parents[1] / "lighton-ocr-parity.py"
INFO = json.dumps([{"model": "an/older-model"}, {"model": "lightonai/LightOnOCR-2-1B", "script": "lighton-ocr.py"}])
PAGES = [f"# Page {number}\n\nThe quick brown fox {number} jumps over the lazy dog." for number in range(6)]


def result(texts: Sequence[str | None], ids: Sequence[str | None] | None = None, truths: Any = None) -> Dataset:
    """A result like those of our scripts; its pictures can't be decoded, so touching one would be noticed."""
    count = len(texts)
    return Dataset.from_dict(
        {
            "page_id": ids or [f"p{row}" for row in range(count)],
            "image": [{"bytes": b"not a picture", "path": None}] * count,
            "truth": truths or [None] * count,
            "markdown": list(texts),
            "markdown_status": ["error" if text is None else "ok" for text in texts],
            "markdown_error": ["OSError: broken" if text is None else None for text in texts],
            "markdown_tokens": [len(text or "") for text in texts],
            "inference_info": [INFO] * count,
        },
        features=FEATURES,
    )


def written(folder: Path, name: str, data: Dataset) -> str:
    """The dataset as a folder with a card and parquet files."""
    home = folder / name
    (home / "data").mkdir(parents=True)
    half = max(1, len(data) // 2)
    for number, rows in enumerate((range(half), range(half, len(data)))):
        data.select(rows).to_parquet(home / "data" / f"train-{number:05}.parquet")
    card = (
        "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: data/train-*.parquet\n---\n"
    )
    (home / "README.md").write_text(card, encoding="utf-8")
    return str(home)


def compared(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    """The JSON of a run that must succeed."""
    assert main([*argv, "--json"]) == 0
    record: dict[str, Any] = json.loads(capsys.readouterr().out)
    return record


def similarity(text_a: str, text_b: str) -> float:
    """What is measured of one pair of texts."""
    return 1 - float(measure([PageBatch([text_a], [text_b])], normaliser([])).distance[0])


# --- distances --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text_a", "text_b", "expected"),
    [("", "", 1.0), ("abcd", "abcd", 1.0), ("abcd", "abcx", 0.75), ("ab", "", 0.0), ("kitten", "sitting", 1 - 3 / 7)],
)
def test_similarity_is_one_minus_edits_over_the_longer_text(text_a: str, text_b: str, expected: float) -> None:
    assert similarity(text_a, text_b) == pytest.approx(expected)


@given(st.text(), st.text())
def test_similarity_is_symmetric_and_between_0_and_1(text_a: str, text_b: str) -> None:
    assert similarity(text_a, text_b) == similarity(text_b, text_a)
    assert 0 <= similarity(text_a, text_b) <= 1


@given(st.text(), st.text())
def test_similarity_is_1_only_for_the_same_text(text_a: str, text_b: str) -> None:
    assert similarity(text_a, text_a) == 1
    assert (similarity(text_a, text_b) == 1) == (text_a == text_b)


def test_error_rates_have_known_values() -> None:
    errors = side_errors(
        ["abcd efgh", "one two three four", "", ""], ["abcx efgh", "one three four five six", "", "x y"]
    )
    assert errors.cer().tolist() == pytest.approx([1 / 9, 13 / 18, 0, 1])
    assert errors.wer().tolist() == pytest.approx([1 / 2, 3 / 4, 0, 1])
    assert errors.word_edits.tolist() == [1, 3, 0, 2]


@given(
    st.lists(st.sampled_from(["ab", "cd", "ef"]), min_size=1, max_size=8),
    st.lists(st.sampled_from(["ab", "cd", "ef"]), max_size=8),
)
def test_error_rates_are_those_of_jiwer(truth_words: list[str], words: list[str]) -> None:
    truth, text = " ".join(truth_words), " ".join(words)
    errors = side_errors([truth], [text])
    assert errors.wer()[0] == pytest.approx(jiwer.wer(truth, text))
    assert errors.cer()[0] == pytest.approx(jiwer.cer(truth, text))


@given(st.text(), st.text(), st.sets(st.sampled_from(list(NORMALISATIONS))))
def test_cer_is_0_only_for_texts_that_are_equal_after_normalisation(truth: str, text: str, names: set[str]) -> None:
    normalise = normaliser(sorted(names))
    scores = measure([PageBatch([text], [truth], [truth])], normalise)
    assert (scores.errors_a.cer()[0] == 0) == (normalise(truth) == normalise(text))
    assert scores.errors_b.cer()[0] == 0


def test_a_null_text_is_counted_apart_and_is_an_empty_text_to_the_truth() -> None:
    scores = measure(
        [PageBatch(["ab", None, None, ""], [None, "ab", None, ""], ["ab", "ab", "ab", ""])], normaliser([])
    )
    summary = summarise_texts(scores)
    assert (summary.pages, summary.no_text_a, summary.no_text_b, summary.no_text_both) == (1, 1, 1, 1)
    assert (summary.identical, summary.similarity_mean) == (1, 1)
    assert summary.similarity_mean_missing_as_0 == pytest.approx(1 / 3)
    assert scores.errors_a.cer().tolist() == [0, 1, 1, 0]
    assert scores.errors_b.cer().tolist() == [1, 0, 1, 0]


def test_measuring_in_batches_gives_what_one_batch_gives() -> None:
    texts, others = [*PAGES, None], [*PAGES[1:], PAGES[0], "x"]
    truths, statuses = [*PAGES, None], [*["ok"] * 6, None]
    whole = measure([PageBatch(texts, others, truths, statuses, statuses)], normaliser(["case"]))
    parts = measure(
        [
            PageBatch(
                texts[i : i + 2],
                others[i : i + 2],
                truths[i : i + 2],
                statuses[i : i + 2],
                statuses[i : i + 2],
            )
            for i in range(0, 7, 2)
        ],
        normaliser(["case"]),
    )
    assert np.array_equal(whole.distance, parts.distance, equal_nan=True)
    assert whole.errors_a.cer().tolist() == parts.errors_a.cer().tolist()
    assert whole.statuses == parts.statuses == {("ok", "ok"): 6, ("(none)", "(none)"): 1}


def test_lengths_beyond_twice_are_counted_and_an_empty_page_is_among_them() -> None:
    scores = measure([PageBatch(["a" * 10] * 4 + [""], ["a" * 21, "a" * 20, "a" * 4, "", "a"])], normaliser([]))
    summary = summarise_texts(scores)
    assert summary.length_beyond_2x == 4
    assert summary.length_ratio_median == 2


@pytest.mark.parametrize(
    ("names", "before", "after"),
    [
        ("nfc", "e\u0301", "é"),
        ("nfkc", "ﬁne", "fine"),
        ("whitespace", " a\n\n b\t", "a b"),
        ("case", "Straße", "strasse"),
        ("quotes", "\u201ea\u201c \u2019s \u00abb\u00bb", '"a" \'s "b"'),
        ("dashes", "1\u20132\u20143", "1-2-3"),
        (
            "markdown,whitespace",
            "## A **b**, _c_ [d](http://x) snake_case\n- e\\$\n\n| f | g |\n|---|:-:|",
            "A b, c d snake_case e$ f g",
        ),
        ("markdown,whitespace", "```python\nx = 1\n```\na<br>b", "x = 1 a b"),
    ],
)
def test_normalisations_do_what_help_says(names: str, before: str, after: str) -> None:
    assert normaliser(names.split(","))(before) == after


def test_normalisations_are_applied_in_one_order_whatever_order_they_are_named_in() -> None:
    text = "## A\n\n* B\u2019s"
    assert normaliser(["whitespace", "markdown", "quotes"])(text) == normaliser(["quotes", "markdown", "whitespace"])(
        text
    )


def test_histogram_counts_every_page_once_with_identical_pages_apart() -> None:
    assert distance_histogram(np.array([0, 0, 0.001, 0.0011, 0.5, 0.51, 6.0])) == (2, 1, 1, 0, 0, 0, 0, 1, 2)


def test_worst_decile_is_a_tenth_of_the_pages_rounded_up() -> None:
    assert worst_decile_mean(np.array([0.5])) == 0.5
    assert worst_decile_mean(np.array([0.0] * 10 + [1.0, 0.5])) == 0.75


def test_bootstrap_interval_holds_the_mean_and_depends_on_the_seed_alone() -> None:
    differences = np.array([-0.1, 0.0, 0.02, 0.05, 0.01] * 20)
    interval = paired_bootstrap(differences, 2000, seed=1)
    assert interval == paired_bootstrap(differences, 2000, seed=1)
    assert interval != paired_bootstrap(differences, 2000, seed=2)
    assert interval.low < interval.mean < interval.high
    # The standard error of the mean is known: the interval is about 3.92 of them wide.
    assert interval.high - interval.low == pytest.approx(3.92 * differences.std() / 10, rel=0.1)
    assert paired_bootstrap(np.zeros(3), 100, 0) == paired_bootstrap(np.zeros(3), 100, 5)


@given(st.text(max_size=30), st.text(max_size=30))
def test_first_difference_is_where_the_texts_part(text_a: str, text_b: str) -> None:
    at = first_difference(text_a, text_b)
    assert text_a[:at] == text_b[:at]
    assert text_a[at : at + 1] != text_b[at : at + 1] or text_a == text_b


# --- matching ---------------------------------------------------------------------------------------------------------


def test_ids_that_are_missing_twice_or_null_are_reported_and_not_compared() -> None:
    match = match_ids(["a", "b", "c", "c", None, "e"], ["e", "b", "b", "d", "c"])
    assert (match.rows_a, match.rows_b) == ([5], [0])
    assert (match.only_a, match.only_b) == (["a"], ["d"])
    assert (match.duplicates_a, match.duplicates_b) == (["c"], ["b"])
    assert (match.null_ids_a, match.null_ids_b) == (1, 0)


@given(st.lists(st.integers(0, 12)), st.lists(st.integers(0, 12)), st.randoms(use_true_random=False))
def test_matching_by_id_does_not_depend_on_the_order_of_rows(
    ids_a: list[int], ids_b: list[int], draw: random.Random
) -> None:
    shuffled = draw.sample(ids_b, len(ids_b))
    match, other = match_ids(ids_a, ids_b), match_ids(ids_a, shuffled)
    assert match.rows_a == other.rows_a
    assert [ids_b[row] for row in match.rows_b] == [shuffled[row] for row in other.rows_b]
    assert sorted(match.only_b) == sorted(other.only_b)


# --- a readable difference --------------------------------------------------------------------------------------------


@given(st.text("ab \n\u65e5", max_size=60), st.text("ab \n\u65e5", max_size=60))
def test_a_difference_holds_both_texts_where_nothing_is_folded(text_a: str, text_b: str) -> None:
    rows = diff_rows(text_a, text_b)
    if any(row.skipped for row in rows):
        return
    for text, sides in ((text_a, [row.left for row in rows]), (text_b, [row.right for row in rows])):
        lines = "\n".join("".join(segment.text for segment in side) for side in sides)
        assert lines == text
    assert any(row.changed for row in rows) == (text_a != text_b)


def test_equal_lines_away_from_a_change_are_folded() -> None:
    lines = [f"line {number}" for number in range(20)]
    rows = diff_rows("\n".join(lines), "\n".join([*lines[:10], "LINE 10", *lines[11:]]))
    assert [row.skipped for row in rows] == [9, 0, 0, 0, 8]
    assert [segment.text for segment in rows[2].left if segment.changed] == ["line"]


def test_a_page_that_loops_is_compared_without_an_explosion() -> None:
    rows = diff_rows("\n".join(PAGES), "the sum paid " * 20_000)
    assert any(row.changed for row in rows)


def test_excerpts_are_one_line_that_can_not_steer_a_terminal() -> None:
    at, excerpt_a, excerpt_b = difference_excerpts("same\n\x1b[31mred", "same\n\u202eblue")
    assert at == 5
    assert excerpt_a == "same⏎␛[31mred"
    assert excerpt_b == "same⏎\ufffdblue"
    assert difference_excerpts(None, "x") == (None, "(no text)", "x")
    assert visible("\x9b") == "\ufffd"


# --- reading ----------------------------------------------------------------------------------------------------------


def test_a_source_is_a_path_if_there_is_one_and_else_a_hub_id(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").touch()
    assert locate(str(tmp_path)) == {"path": str(tmp_path)}
    assert locate(str(tmp_path / "a.parquet"))["path"] == "parquet"
    assert locate("me/scans") == {"path": "me/scans", "revision": None}
    assert locate("me/scans@refs/pr/1") == {"path": "me/scans", "revision": "refs/pr/1"}
    for wrong in ("./nowhere", "/no/where/at/all", "gone.parquet", "a b/c"):
        with pytest.raises(UsageError, match="no such file"):
            locate(wrong)


def test_a_mistyped_path_is_refused_at_once_and_what_was_meant_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out-offline").mkdir()
    (tmp_path / "out-server").mkdir()
    monkeypatch.chdir(tmp_path)
    for wrong, meant in (
        ("out-offlin", "out-offline"),
        ("out-serve", "out-server"),
        ("./out-serve", "out-server"),
        (f"{tmp_path}/out-servers", f"{tmp_path}/out-server"),
    ):
        with pytest.raises(UsageError, match=rf"no such file or folder.*Did you mean {meant}"):
            locate(wrong)
    assert locate("out-offlin@main") == {"path": "out-offlin", "revision": "main"}
    assert locate("squad") == {"path": "squad", "revision": None}
    for impossible in ("a--b", "-scans", "scans.git", "x" * 97, "me/.scans"):
        with pytest.raises(UsageError, match="not a Hub dataset id"):
            locate(impossible)


def test_a_long_description_ends_with_a_word() -> None:
    described = describe_inference(json.dumps([{"model": "m", "engine": "word " * 60, "script": "s"}]))
    assert len(described) <= 160
    assert described.startswith("model=m engine=word word")
    assert described.endswith("word …")


def test_inference_info_is_described_by_its_last_entry_and_never_trusted() -> None:
    assert describe_inference(INFO) == "model=lightonai/LightOnOCR-2-1B script=lighton-ocr.py"
    for odd in (None, "", "not json", "[]", "3", "[[1]]", '["x"]'):
        assert describe_inference(odd) == ""


# --- whole runs -------------------------------------------------------------------------------------------------------


def test_two_folders_are_compared_and_no_picture_is_touched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other: list[str | None] = [*PAGES[:3], PAGES[3].replace("fox", "f0x"), None, PAGES[5] * 4]
    a, b = written(tmp_path, "a", result(PAGES)), written(tmp_path, "b", result(other))
    record = compared(capsys, a, b)
    assert record["version"] == 1
    assert record["match"].pop("examples") == {}
    assert record["match"].pop("by") == "row number"
    assert record["match"].pop("both") == 6
    assert set(record["match"].values()) == {0}
    texts = record["texts"]
    assert (texts["pages"], texts["identical"], texts["no_text_b"], texts["length_beyond_2x"]) == (5, 3, 1, 1)
    assert record["statuses"] == {"ok": {"error": 1, "ok": 5}}
    assert record["a"]["tokens"] == sum(map(len, PAGES))
    assert record["a"]["made_by"] == ["model=lightonai/LightOnOCR-2-1B script=lighton-ocr.py"]
    assert [page["page"] for page in record["worst"]] == ["row 4", "row 5", "row 3"]
    assert record["worst"][0]["error_b"] == "OSError: broken"
    assert record["worst"][2]["first_difference"] == PAGES[3].index("fox") + 1
    assert "text_a" not in record["worst"][0]


def test_the_table_goes_to_stdout_and_fits_100_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = [*PAGES[:5], "x" * 500]
    data = result(PAGES, truths=PAGES)
    data.to_parquet(tmp_path / "a.parquet")
    result(other).to_parquet(tmp_path / "b.parquet")
    assert main([str(tmp_path / "a.parquet"), str(tmp_path / "b.parquet"), "--truth", "truth"]) == 0
    streams = capsys.readouterr()
    assert streams.err == ""
    lines = streams.out.replace(str(tmp_path), "").splitlines()
    assert max(map(len, lines)) <= 100
    assert "byte-identical      5 (83.3 %) of 6 pages with text on both sides" in lines
    assert any(line.startswith("A ") and line.split()[1:] == ["0.0000"] * 6 for line in lines)


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "saved", "saved dict"])
def test_every_local_form_of_a_dataset_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    data = result(PAGES)
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        data.to_parquet(path)
    elif kind == "jsonl":
        data.remove_columns("image").to_json(path)
    else:
        (DatasetDict({"train": data}) if kind == "saved dict" else data).save_to_disk(str(path))
    record = compared(capsys, str(path), written(tmp_path, "b", data))
    assert (record["texts"]["identical"], record["worst"]) == (6, [])
    assert record["a"]["made_by"] == record["b"]["made_by"] != []


@pytest.mark.slow
def test_from_the_hub_the_text_is_fetched_and_the_pictures_are_not(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    pictures = [random.Random(row).randbytes(200_000) for row in range(40)]
    rows = {"image": [{"bytes": data, "path": None} for data in pictures], "markdown": [PAGES[0]] * 40}
    pq.write_table(pa.table(rows), buffer, row_group_size=20)
    with HubServer() as hub:
        for name in ("me/a", "me/b"):
            hub.put(name, "data/train-00000.parquet", buffer.getvalue())
        command = [sys.executable, str(SCRIPT), "me/a", "me/b@main", "--json"]
        run = subprocess.run(
            command, env=hub_env(hub, tmp_path), capture_output=True, text=True, timeout=120, check=False
        )
        assert run.returncode == 0, run.stderr
        record = json.loads(run.stdout)
        assert (record["texts"]["identical"], record["b"]["source"]) == (40, "me/b@main")
        assert 0 < hub.bytes_served["data/train-00000.parquet"] < len(buffer.getvalue()) / 4

        gone = subprocess.run(
            [*command[:2], "me/a", "me/gone"],
            env=hub_env(hub, tmp_path),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert (gone.returncode, "can't read B (me/gone)" in gone.stderr) == (2, True)


def test_a_network_that_fails_before_the_first_row_is_a_clean_refusal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*args: object, **options: object) -> None:
        raise httpx.ConnectError("no route to the Hub")

    monkeypatch.setattr("datasets.load_dataset_builder", unreachable)
    assert main(["me/a", "me/b"]) == 2
    told = capsys.readouterr().err
    assert "can't read A (me/a): ConnectError: no route to the Hub. Check the name" in told


@pytest.mark.parametrize("error", [httpx.ReadError("cut off"), httpx.RemoteProtocolError(""), OSError("cut off.")])
def test_a_result_that_breaks_off_half_way_is_a_clean_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    whole = IterableDataset.iter

    def broken(stream: IterableDataset, batch_size: int) -> Iterator[Any]:
        yield next(whole(stream, batch_size))
        raise error

    home = written(tmp_path, "a", result(PAGES))
    monkeypatch.setattr(IterableDataset, "iter", broken)
    assert main([home, home]) == 1
    reason = f"{type(error).__name__}: {error}".rstrip(".: ")
    told = f"A ({home}) stopped being readable: {reason}. The same command starts again\n"
    assert capsys.readouterr() == ("", f"lighton-ocr-parity.py: {told}")


def test_rows_matched_by_id_may_stand_in_any_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = result(PAGES)
    mixed = data.select([3, 1, 5, 0, 2])
    record = compared(capsys, written(tmp_path, "a", data), written(tmp_path, "b", mixed), "--id-column", "page_id")
    assert record["texts"]["identical"] == 5
    assert (record["match"]["both"], record["match"]["only_a"], record["match"]["examples"]) == (
        5,
        1,
        {"only_a": ["p4"]},
    )


def test_two_columns_of_one_dataset_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = written(tmp_path, "a", result(PAGES, truths=[*PAGES[:5], "other"]))
    record = compared(capsys, home, home, "--column-b", "truth")
    assert (record["texts"]["identical"], record["statuses"], record["b"]["tokens"]) == (5, {}, None)


def test_against_a_truth_the_side_with_fewer_errors_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    noisy = [page.replace("o", "0") for page in PAGES]
    a = written(tmp_path, "a", result(PAGES, truths=[*PAGES[:5], None]))
    b = written(tmp_path, "b", result(noisy))
    record = compared(capsys, a, b, "--truth", "truth", "--bootstrap", "500")["truth"]
    assert (record["pages"], record["pages_without_truth"], record["better_a"], record["equal"]) == (5, 1, 5, 0)
    assert record["cer_a"]["mean"] == 0 < record["cer_b"]["mean"]
    assert record["cer_difference"]["high"] < 0
    assert record["cer_difference"]["resamples"] == 500
    assert main([a, b, "--truth", "truth", "--fail-cer-diff", "0.01"]) == 1
    assert main([b, a, "--truth-file", str(tmp_path / "gone.json")]) == 2


def test_a_truth_file_names_pages_by_id(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = written(tmp_path, "a", result(PAGES))
    truths = tmp_path / "truth.json"
    truths.write_text(json.dumps({"p1": PAGES[1], "p2": PAGES[2].upper(), "elsewhere": "x"}), encoding="utf-8")
    argv = [home, home, "--id-column", "page_id", "--truth-file", str(truths)]
    assert compared(capsys, *argv)["truth"]["cer_a"]["mean"] > 0
    record = compared(capsys, *argv, "--normalise", "case")
    assert (record["truth"]["pages"], record["truth"]["cer_a"]["mean"]) == (2, 0)
    assert record["normalisations"] == ["case"]


def test_a_limit_on_similarity_counts_a_lost_text_as_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = written(tmp_path, "a", result(PAGES)), written(tmp_path, "b", result([*PAGES[:3], None, None, None]))
    assert main([a, b, "--fail-below", "0.5"]) == 0
    assert main([a, b, "--fail-below", "0.51"]) == 1
    assert "mean similarity 0.5000 is below 0.51" in capsys.readouterr().err


def test_what_does_not_fit_is_refused_with_the_next_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = written(tmp_path, "a", result(PAGES)), written(tmp_path, "b", result(PAGES[:4], ids=list("wxyz")))
    for argv, message in (
        ([a, b], "A has 6 rows and B 4: row numbers don't say which belong together. Give --id-column NAME"),
        ([a, b, "--id-column", "page_id"], "no id in common"),
        ([a, a, "--column-b", "text"], "column 'text' is not there. Columns of text: page_id, truth, markdown"),
        ([a, a, "--column-a", "image"], "column 'image' is not text"),
        ([a, a, "--id-column", "page"], "column 'page' is not there"),
        ([a, a, "--split-b", "test"], f"no split 'test' in B ({a}); --split takes one of: train"),
        ([a, a, "--truth", "truth"], "no page has one"),
        ([a, str(tmp_path / "nowhere")], "no such file or folder"),
    ):
        assert main(argv) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        ["a"],
        ["a", "b", "--normalise", "nonsense"],
        ["a", "b", "--truth", "t", "--truth-file", "f"],
        ["a", "b", "--fail-cer-diff", "0.1"],
        ["a", "b", "--bootstrap", "0"],
        ["a", "b", "--html", "/no/such/folder/x.html"],
        ["a", "b", "--wor", "3"],
    ],
)
def test_usage_errors_exit_with_2_before_anything_is_read(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    assert stopped.value.code == 2


def test_help_describes_every_normalisation(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert all(f"{name} -" in told for name in NORMALISATIONS)


# --- the page ---------------------------------------------------------------------------------------------------------


class PageChecker(HTMLParser):
    """Checks that tags close in order, and collects the tags and whatever could load something."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.loads: list[tuple[str, str | None]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.loads += [pair for pair in attrs if pair[0] in ("src", "href", "action") or pair[0].startswith("on")]
        if tag not in ("meta", "rect"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_well_formed_loads_nothing_and_shows_hostile_text_as_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = '<script>alert(1)</script> </div> &amp; "><img src=x onerror=alert(2)> \x1b[31m ]]> <!-- \x00'
    ids = [hostile, *(f"p{row}" for row in range(1, 8))]
    a = result(
        [PAGES[0] + hostile, *PAGES[1:], None, "a <b>lone</b> text"], ids=ids, truths=[hostile, *PAGES[1:], None, "x"]
    )
    b = result([hostile + PAGES[0], *(page * 300 for page in PAGES[1:]), None, None], ids=ids)
    a = a.map(lambda row: {"markdown_error": hostile, "markdown_status": "</td>"}, features=a.features)
    page = tmp_path / "page.html"
    argv = [written(tmp_path, "a", a), written(tmp_path, "b<i>", b), "--id-column", "page_id", "--truth", "truth"]
    assert main([*argv, "--html", str(page)]) == 0
    assert "\x1b" not in capsys.readouterr().out
    source = page.read_text(encoding="utf-8")
    checker = PageChecker()
    checker.feed(source)
    checker.close()
    assert checker.open == []
    assert checker.loads == []
    assert not checker.seen & {"script", "img", "link", "iframe", "b<i>", "i"}
    assert "<script>alert(1)</script>" in checker.text
    assert "a <b>lone</b> text" in checker.text
    assert "url(" not in source
    assert "http" not in source.replace("http-equiv", "")
    assert not any(ord(character) < 32 and character != "\n" for character in source)
    assert len(source) < 400_000  # eight pages, some of 20,000 characters: what is long is cut
