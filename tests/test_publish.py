"""The output: where it goes, its card, and the Hub (a stand-in on loopback, the real clients)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet as pq
import pytest
import yaml
from huggingface_hub import DatasetCard

from src.blocks import BlockPlan, Target
from src.errors import UsageError
from src.publish import CARD_BEGIN, Output, card_text, check_output_is_apart, choose_output
from tests.hub_server import HubServer, hub_env
from tests.runs import SCRIPT, Ended, without_canary, write_pages
from tests.stub_vllm import StubVllm

PLAN = BlockPlan(Target("train"), 10, 4)


def card(earlier: str = "", plan: BlockPlan = PLAN, **statuses: int) -> str:
    return card_text(
        earlier,
        input_name="me/scans",
        plan=plan,
        statuses=statuses or {"ok": 10},
        facts={"model": "m", "nothing": None, "words": "a|b\nc"},
        command="uv run it",
    )


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
    assert data["tags"] == ["ocr", "uv-script"]
    assert "10 rows: 8 ok, 1 blank, 0 truncated, 0 repetition, 1 error" in text
    assert "| model | m |" in text
    assert "| words | a\\|b c |" in text
    assert "nothing" not in text
    assert "Unfinished" not in text


def test_an_unfinished_run_says_so() -> None:
    assert "**Unfinished**: 4 of 10 rows" in card(ok=4)


def test_writing_the_card_again_changes_nothing_and_keeps_what_people_wrote() -> None:
    once = card()
    assert card(once) == once
    people = once.replace("tags:", "license: cc0-1.0\ntags:\n- letters").replace(
        CARD_BEGIN, f"Our letters.\n\n{CARD_BEGIN}"
    )
    again = card(people + "\nWrite to us.\n", ok=9, error=1)
    assert "Our letters." in again
    assert "Write to us." in again
    assert again.count(CARD_BEGIN) == 1
    assert "9 ok" in again
    assert "10 ok" not in again
    data = DatasetCard(again).data.to_dict()  # type: ignore[no-untyped-call]
    assert data["license"] == "cc0-1.0"
    assert data["tags"] == ["letters", "ocr", "uv-script"]


def test_a_second_split_joins_the_first_and_other_configurations_stay() -> None:
    earlier = card().replace("configs:", "configs:\n- config_name: raw\n  data_files: raw/*.json")
    data = yaml.safe_load(card(earlier, BlockPlan(Target("test"), 1, 1), ok=1).split("---")[1])
    assert [config["config_name"] for config in data["configs"]] == ["default", "raw"]
    assert [file["split"] for file in data["configs"][0]["data_files"]] == ["train", "test"]


def test_a_readme_without_yaml_is_kept() -> None:
    text = card("# Hello\n\nJust words.\n")
    assert "Just words." in text
    assert yaml.safe_load(text.split("---")[1])["tags"]


# The Hub


def run_on(hub: HubServer, home: Path, *words: str, **env: str) -> Ended:
    home.mkdir(exist_ok=True)
    environment = {**hub_env(hub, home), "XDG_CACHE_HOME": str(home / "cache"), **env}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *without_canary(words)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def seed(hub: HubServer, tmp_path: Path, *, private: bool = False) -> Any:
    """Put a dataset of 10 pages on the Hub, in two files."""
    hub.create("me/scans", private=private)
    path = write_pages(tmp_path / "pages.parquet", 10, row_group_size=3)
    table = pq.read_table(path)
    for number in range(2):
        part = tmp_path / f"part-{number}.parquet"
        pq.write_table(table.slice(number * 5, 5), part, row_group_size=2)
        hub.put("me/scans", f"data/train-0000{number}-of-00002.parquet", part.read_bytes())
    return table


def published(hub: HubServer, repo: str, tmp_path: Path) -> datasets.Dataset:
    """Load what is on the Hub from its files, as they are there."""
    folder = tmp_path / "published"
    for name, content in hub.files(repo, "main").items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return datasets.load_dataset(str(folder), split="train", cache_dir=str(tmp_path / "published-cache"))


def test_from_hub_to_hub_in_one_commit_and_again_without_asking(tmp_path: Path) -> None:
    with HubServer() as hub, StubVllm() as stub:
        table = seed(hub, tmp_path, private=True)
        words = ("me/scans", "me/text", "--server", stub.url, "--block-rows", "4")
        ended = run_on(hub, tmp_path / "home", *words)
        assert ended.code == 0, ended.stderr
        assert stub.stats()["requests"] == 10
        blocks = {f"data/train-{number:06d}.parquet" for number in range(3)}
        assert set(hub.files("me/text", "main")) - {".gitattributes"} == {"README.md", *blocks}
        assert hub.repo("me/text").private
        dataset = published(hub, "me/text", tmp_path)
        assert dataset["id"] == table["id"].to_pylist()
        assert dataset.features["image"] == datasets.Image()
        assert set(dataset["markdown_status"]) == {"ok"}
        bare = dataset.cast_column("image", datasets.Image(decode=False))
        assert [cell["bytes"] for cell in bare["image"]] == [cell["bytes"] for cell in table["image"].to_pylist()]
        commits = len(hub.commits("me/text", "main"))

        again = run_on(hub, tmp_path / "home", *words)
        assert again.code == 0, again.stderr
        assert stub.stats()["requests"] == 10
        assert len(hub.commits("me/text", "main")) <= commits + 1

        other = run_on(hub, tmp_path / "home2", *words, "--seed", "5")
        assert other.code == 2
        assert "seed: was 0, now 5" in other.stderr
        assert stub.stats()["requests"] == 10


def test_a_failed_publish_keeps_the_blocks_and_the_same_command_publishes_them(tmp_path: Path) -> None:
    with HubServer() as hub, StubVllm() as stub:
        write_pages(tmp_path / "pages.parquet", 6)
        words = (str(tmp_path / "pages.parquet"), "me/text", "--server", stub.url, "--block-rows", "4", "--public")
        hub.fail("POST", "/commit/", 403, times=1)
        failed = run_on(hub, tmp_path / "home", *words)
        assert failed.code == 1
        assert "What is not there yet is kept in" in failed.advice
        assert failed.line["rows_done"] == 6
        ended = run_on(hub, tmp_path / "home", *words)
        assert ended.code == 0, ended.stderr
        assert stub.stats()["requests"] == 6
        assert not hub.repo("me/text").private
        assert len(published(hub, "me/text", tmp_path)) == 6


@pytest.mark.parametrize(("token", "words"), [(None, "needs a token that can write"), ("read", "can only read")])
def test_a_token_that_can_not_write_is_told_before_any_page_is_asked(
    tmp_path: Path, token: str | None, words: str
) -> None:
    with HubServer() as hub, StubVllm() as stub:
        write_pages(tmp_path / "pages.parquet", 2)
        env = {"HF_TOKEN": hub.read_token} if token else {"HF_TOKEN": "", "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1"}
        ended = run_on(hub, tmp_path / "home", str(tmp_path / "pages.parquet"), "me/text", "--server", stub.url, **env)
        assert ended.code == 2
        assert words in ended.advice
        assert stub.stats()["requests"] == 0
        assert hub.read_token not in ended.stderr
