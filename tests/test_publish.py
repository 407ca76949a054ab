"""The output: where it goes, and its card."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from huggingface_hub import DatasetCard

from src.blocks import BlockPlan, Target
from src.card import CardContents, card_text, size_category
from src.errors import UsageError
from src.publish import Output, check_output_is_apart, choose_output

BEGIN = "<!-- lighton-ocr default/train,"
PLAN = BlockPlan(Target("train"), 10, 4)


def card(earlier: str = "", plan: BlockPlan = PLAN, **statuses: int) -> str:
    contents = CardContents(
        "me/scans",
        plan,
        statuses or {"ok": 10},
        {"nothing": None, "words": "a|b\nc", "none": [], "labels": ["a", "b"], "fixed": True, "model": "m"},
        "uv run it",
        tags=["LightOnOCR-2-1B"],
    )
    return card_text(earlier, contents)


def test_a_bare_name_is_a_folder_and_a_slashed_one_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert choose_output("out", None) == Output(Path("out"))
    assert choose_output("./me/text", None) == Output(Path("me/text"))
    assert choose_output("me/text", None) == Output(tmp_path / "cache/lighton-ocr/me--text", repo_id="me/text")
    assert choose_output("me/text", "work") == Output(Path("work"), repo_id="me/text")
    (tmp_path / "me").mkdir()
    assert choose_output("me/text", None) == Output(Path("me/text"))
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is a file"):
        choose_output("file", None)
    with pytest.raises(UsageError, match="--work-dir is for Hub outputs"):
        choose_output("out", "work")


@pytest.mark.parametrize(("output", "source"), [("a", "a"), ("a/b", "a"), ("a", "a/b")])
def test_input_and_output_may_not_overlap(tmp_path: Path, output: str, source: str) -> None:
    (tmp_path / source).mkdir(parents=True)
    with pytest.raises(UsageError, match="overlap"):
        check_output_is_apart(Output(tmp_path / output), str(tmp_path / source))


def test_a_file_beside_the_output_may_be_read(tmp_path: Path) -> None:
    (tmp_path / "in.parquet").touch()
    check_output_is_apart(Output(tmp_path / "out"), str(tmp_path / "in.parquet"))
    check_output_is_apart(Output(tmp_path), str(tmp_path / "in.parquet"))


def test_a_hub_dataset_is_not_published_over_itself() -> None:
    with pytest.raises(UsageError, match="input and output are both 'me/scans'"):
        check_output_is_apart(Output(Path("x"), "me/scans"), "me/scans")


def test_the_card_has_the_yaml_that_load_dataset_needs_and_says_what_happened() -> None:
    text = card(ok=8, error=1, blank=1)
    data = yaml.safe_load(text.split("---")[1])
    assert data["configs"] == [
        {"config_name": "default", "data_files": [{"split": "train", "path": "data/train-*.parquet"}]}
    ]
    assert data["tags"] == ["LightOnOCR-2-1B", "ocr", "uv-script"]
    assert data["size_categories"] == ["n<1K"]
    assert "Source dataset: `me/scans`" in text
    assert "10 rows: 8 ok, 1 blank, 0 truncated, 0 repetition, 1 error" in text
    assert "| model | m |\n| words | a\\|b c |\n| labels | a, b |\n| fixed | yes |\n\n" in text
    assert "nothing" not in text
    assert "Unfinished" not in text


def test_an_unfinished_run_says_so() -> None:
    assert "**Unfinished**: 4 of 10 rows" in card(ok=4)


def test_writing_the_card_again_changes_nothing_and_keeps_what_people_wrote() -> None:
    once = card()
    assert card(once) == once
    people = once.replace("tags:", "license: cc0-1.0\ntags:\n- letters").replace(BEGIN, f"Our letters.\n\n{BEGIN}")
    again = card(people + "\nWrite to us.\n", ok=9, error=1)
    assert "Our letters." in again
    assert "Write to us." in again
    assert again.count(BEGIN) == 1
    assert "9 ok" in again
    assert "10 ok" not in again
    data = DatasetCard(again).data.to_dict()  # type: ignore[no-untyped-call]
    assert data["license"] == "cc0-1.0"
    assert data["tags"] == ["LightOnOCR-2-1B", "letters", "ocr", "uv-script"]


def test_a_second_split_joins_the_first_and_other_configurations_stay() -> None:
    earlier = card().replace("configs:", "configs:\n- config_name: raw\n  data_files: raw/*.json")
    data = yaml.safe_load(card(earlier, BlockPlan(Target("test"), 1, 1), ok=1).split("---")[1])
    assert [config["config_name"] for config in data["configs"]] == ["default", "raw"]
    assert [file["split"] for file in data["configs"][0]["data_files"]] == ["train", "test"]


def test_a_readme_without_yaml_is_kept() -> None:
    text = card("# Hello\n\nJust words.\n")
    assert "Just words." in text
    assert yaml.safe_load(text.split("---")[1])["tags"]


def test_each_split_has_a_section_and_publishing_one_leaves_the_others_alone() -> None:
    letters = BlockPlan(Target("train", "letters"), 2000, 4)
    text = card(card(card()), letters, ok=1999, error=1)
    again = card(text, ok=9, error=1)
    assert "1999 ok" in again
    assert "9 ok, 0 blank, 0 truncated, 0 repetition, 1 error" in again
    assert again.count("# Text of me/scans") == 2
    data = yaml.safe_load(again.split("---")[1])
    assert [config["config_name"] for config in data["configs"]] == ["default", "letters"]
    assert data["configs"][1]["data_files"] == [{"split": "train", "path": "letters/train-*.parquet"}]
    assert data["size_categories"] == ["1K<n<10K"]
    assert card(again, ok=9, error=1) == again


@pytest.mark.parametrize("head", ["license: [", "only words", "a: b: c"])
def test_yaml_that_nobody_can_read_is_kept_as_text(head: str) -> None:
    text = card(f"---\n{head}\n---\n\n# Mine\n")
    assert yaml.safe_load(text.split("---\n")[1])["configs"]
    assert f"{head}\n---\n\n# Mine" in text
    assert card(text) == text


def test_one_tag_and_one_path_need_be_in_no_list() -> None:
    head = "tags: history\nconfigs:\n- config_name: default\n  data_files: pages/*.csv\n"
    data = yaml.safe_load(card(f"---\n{head}---\n", plan=BlockPlan(Target("test"), 10, 4)).split("---")[1])
    assert data["tags"] == ["LightOnOCR-2-1B", "history", "ocr", "uv-script"]
    assert data["configs"][0]["data_files"] == [
        {"split": "train", "path": ["pages/*.csv"]},
        {"split": "test", "path": "data/test-*.parquet"},
    ]


def test_what_people_say_of_the_size_is_kept() -> None:
    earlier = "---\nsize_categories:\n- 1M<n<10M\n---\n\nOurs.\n"
    assert yaml.safe_load(card(earlier).split("---")[1])["size_categories"] == ["1M<n<10M"]


def test_features_that_an_older_run_left_in_the_card_go_and_those_of_other_configurations_stay() -> None:
    infos = "dataset_info:\n- config_name: default\n  features: []\n- config_name: raw\n  features: []\n"
    data = yaml.safe_load(card(f"---\n{infos}---\n").split("---")[1])
    assert [info["config_name"] for info in data["dataset_info"]] == ["raw"]
    assert "dataset_info" not in yaml.safe_load(card("---\ndataset_info:\n  features: []\n---\n").split("---")[1])


@pytest.mark.parametrize(
    ("rows", "category"),
    [(0, "n<1K"), (999, "n<1K"), (1000, "1K<n<10K"), (99_999, "10K<n<100K"), (10**6, "1M<n<10M"), (10**9, "1B<n<10B")],
)
def test_the_size_of_a_dataset_is_said_as_cards_have_it(rows: int, category: str) -> None:
    assert size_category(rows) == category


def test_an_output_may_be_another_branch_or_a_pull_request(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    at = choose_output("me/text", None, "v2/new")
    assert (at.revision, at.folder.name) == ("v2/new", "me--text--at--v2--new")
    assert choose_output("me/text", None, None, create_pr=True).folder.name == "me--text--pr"
    for revision in ("refs/pr/1", "a" * 40, "a b", "", "x..y"):
        with pytest.raises(UsageError, match="is no name of a branch"):
            choose_output("me/text", None, revision)
    with pytest.raises(UsageError, match="--create-pr goes to main"):
        choose_output("me/text", None, "v2", create_pr=True)
    with pytest.raises(UsageError, match="--output-revision is for Hub outputs"):
        choose_output("out", None, "v2")
    with pytest.raises(UsageError, match="--create-pr is for Hub outputs"):
        choose_output("out", None, create_pr=True)
