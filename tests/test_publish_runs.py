"""Publishing, with the real clients in this process: what readers of a Hub dataset see, at every moment."""

from __future__ import annotations

import io
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from PIL import Image

from src.blocks import BlockPlan, Target, Whole
from src.card import CardContents, card_text
from src.hub_blocks import HubBlocks
from src.work_ref import Destination, PullRequest, branch_name
from tests.hub_here import be_on_machine, forget_files, hub_here
from tests.runs import (
    NEW_COLUMNS,
    PATIENCE_S,
    SATURATE,
    SCRIPT,
    Ended,
    assert_all_read,
    assert_input_is_kept,
    pages_dataset,
    run_here,
    tag_of,
    wait_until,
)
from tests.stub_vllm import DEFAULT_MODEL, StubVllm

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.hub_server import HubServer

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # the client's own uploads
SCRIPTS = [SCRIPT, SATURATE]


@pytest.fixture(scope="module")
def shared_stub() -> Iterator[StubVllm]:
    with StubVllm("--read-tag") as stub:
        yield stub


@pytest.fixture
def stub(shared_stub: StubVllm) -> StubVllm:
    """One server for many tests: counted anew and without faults for each."""
    shared_stub.configure(faults=[], seconds_per_page=0, ceiling=0, max_num_seqs=256)
    wait_until(lambda: shared_stub.stats()["in_flight"] == 0, "requests of the test before are gone")
    shared_stub.reset()
    return shared_stub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    with hub_here(monkeypatch, tmp_path / "home") as server:
        put_scans(server, tmp_path)
        yield server


def put_scans(hub: HubServer, tmp_path: Path, rows: int = 10) -> pa.Table:
    """Put a dataset of pages on the Hub, in two files."""
    table = pages_dataset(range(1, rows + 1)).with_format("arrow")[:]
    for number in range(2):
        part = tmp_path / f"part-{number}.parquet"
        pq.write_table(table.slice(number * rows // 2, rows // 2), part, row_group_size=2)
        hub.put("me/scans", f"data/train-0000{number}-of-00002.parquet", part.read_bytes())
    return table


def run(stub: StubVllm, *words: str, script: Path = SCRIPT, output: str = "me/text") -> Ended:
    forget_files()
    return run_here(
        "me/scans", output, "--server", stub.url, "--model", DEFAULT_MODEL, "--block-rows", "4", *words, script=script
    )


def blocks_on(hub: HubServer, repo: str = "me/text", revision: str = "main", folder: str = "data/") -> dict[str, bytes]:
    return {name: content for name, content in hub.files(repo, revision).items() if name.startswith(folder)}


def branches(hub: HubServer, repo: str = "me/text") -> set[str]:
    return {ref.removeprefix("refs/heads/") for ref in hub.repo(repo).refs if ref.startswith("refs/heads/")}


def as_read(split: str = "train", name: str | None = None, revision: str | None = None) -> datasets.Dataset:
    """What people get who load the output now."""
    forget_files()
    return datasets.load_dataset("me/text", name, split=split, revision=revision)


def card_of(hub: HubServer, revision: str = "main") -> tuple[dict[str, Any], str]:
    """The YAML and the text of the output's card."""
    _, head, text = hub.files("me/text", revision)["README.md"].decode().split("---\n", 2)
    return yaml.safe_load(head), text


@pytest.mark.parametrize("script", SCRIPTS)
def test_from_hub_to_hub_in_one_commit_and_again_without_asking(
    hub: HubServer, stub: StubVllm, tmp_path: Path, script: Path
) -> None:
    hub.repo("me/scans").private = True
    ended = run(stub, "--show", "1", script=script)
    assert ended.code == 0, ended
    assert " (ok) ──" in ended.stderr
    assert [commit.title for commit in hub.commits("me/text")] == ["initial commit", "Text of split train"]
    assert branches(hub) == {"main"}
    assert hub.repo("me/text").private
    assert len(blocks_on(hub)) == 3
    dataset = as_read()
    assert dataset.column_names == ["id", "image", "kind", *NEW_COLUMNS]
    table = datasets.load_dataset("me/scans", split="train").with_format("arrow")[:]
    assert_input_is_kept(table.combine_chunks(), dataset.with_format("arrow")[:].combine_chunks())
    assert_all_read(dataset.with_format("arrow")[:], range(1, 11))
    assert stub.stats()["requests"] == 10

    again = run(stub, script=script)
    assert again.code == 0, again
    assert again.line["statuses"]["ok"] == 10
    assert (len(hub.commits("me/text")), stub.stats()["requests"]) == (2, 10)
    other = run(stub, "--seed", "5", script=script)
    assert other.code == 2
    assert "seed: was 0, now 5" in other.stderr


# --- a publish that is cut off ---------------------------------------------------------------------------------------


def test_a_publish_that_is_refused_keeps_all_blocks_and_the_same_command_publishes_them_from_another_machine(
    hub: HubServer, stub: StubVllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.fail("POST", "/commit/main", 403)
    failed = run(stub)
    assert failed.code == 1
    assert "me/text@unfinished-train keeps all blocks; the same command goes on" in failed.advice
    assert set(hub.files("me/text")) == {".gitattributes"}
    assert len(blocks_on(hub, revision="unfinished-train")) == 3
    be_on_machine(monkeypatch, tmp_path / "other")
    ended = run(stub, script=SATURATE)
    assert ended.code == 0, ended
    assert stub.stats()["requests"] == 10
    assert as_read()["id"][:] == list(range(1, 11))
    assert branches(hub) == {"main"}


def test_a_publish_that_ends_before_its_branch_is_removed_is_finished_by_the_same_command_without_a_commit(
    hub: HubServer, stub: StubVllm
) -> None:
    hub.fail("DELETE", "/branch/", 403)
    failed = run(stub)
    assert failed.code == 1
    assert branches(hub) == {"main", "unfinished-train"}
    commits = hub.commits("me/text")
    ended = run(stub)
    assert ended.code == 0, ended
    assert branches(hub) == {"main"}
    assert hub.commits("me/text") == commits
    assert stub.stats()["requests"] == 10


def test_a_token_that_expires_in_mid_run_leaves_the_blocks_here_and_the_same_command_goes_on(
    hub: HubServer, stub: StubVllm
) -> None:
    token = hub.hub.tokens[hub.token]

    def expire() -> None:
        wait_until(lambda: stub.stats()["completions"] >= 2, "the run is under way")
        del hub.hub.tokens[hub.token]

    stub.configure(ceiling=8)
    with ThreadPoolExecutor(1) as pool:
        expiring = pool.submit(expire)
        failed = run(stub, "--commit-minutes", "0")
        expiring.result()
    assert failed.code == 1
    assert "401" in failed.line["message"]
    assert "the same command publishes it without asking about a page again" in failed.advice
    hub.hub.tokens[hub.token] = token
    asked = stub.stats()["requests"]
    stub.configure(ceiling=0)
    ended = run(stub)
    assert ended.code == 0, ended
    assert ended.line["rows_before"] >= 4
    assert stub.stats()["requests"] - asked == 10 - ended.line["rows_before"]
    assert_all_read(as_read().with_format("arrow")[:], range(1, 11))


# --- over an older run -----------------------------------------------------------------------------------------------


def test_starting_anew_changes_nothing_for_readers_until_all_is_there_and_then_the_features_are_the_new_ones(
    hub: HubServer, stub: StubVllm
) -> None:
    assert run(stub, "--output-column", "words").code == 0
    assert "words" in as_read().features
    before = blocks_on(hub)
    earlier = hub.files("me/text")["README.md"].decode()
    said = "---\ndataset_info:\n- config_name: default\n  features:\n  - name: words\n    dtype: string\n"
    hub.put("me/text", "README.md", (said + earlier.removeprefix("---\n") + "\nOur letters.\n").encode())

    hub.fail("POST", "/commit/unfinished-train", 403, skip=1)  # the first one takes the old blocks away there
    half = run(stub, "--overwrite", "--block-rows", "6")
    assert half.code == 1
    assert blocks_on(hub) == before
    assert blocks_on(hub, revision="unfinished-train") == {}
    ended = run(stub, "--overwrite", "--block-rows", "6", "--results-only")
    assert ended.code == 0, ended
    assert sorted(blocks_on(hub)) == ["data/train-000000.parquet", "data/train-000001.parquet"]
    dataset = as_read()
    assert dataset.column_names == ["id", "kind", "row_index", *NEW_COLUMNS]
    assert "dataset_info" not in card_of(hub)[0]
    assert "Our letters." in card_of(hub)[1]
    for commit in hub.commits("me/text"):
        blocks = {name: blob.content for name, blob in commit.files.items() if name.startswith("data/")}
        assert blocks in ({}, before, blocks_on(hub)), "half a split was to be seen"
    assert branches(hub) == {"main"}


def test_rows_that_failed_are_published_anew_in_one_commit_and_other_blocks_are_not_touched(
    hub: HubServer, stub: StubVllm
) -> None:
    stub.configure(faults=[f"status=400,tag={tag_of(5)}"])
    assert run(stub, "--max-failure-rate", "0.5").code == 0
    before = blocks_on(hub)
    stub.configure(faults=[])
    stub.reset()
    ended = run(stub, "--retry-failed")
    assert ended.code == 0, ended
    assert stub.stats()["tags"] == {tag_of(5): 1}
    after = blocks_on(hub)
    assert [name for name in before if before[name] != after[name]] == ["data/train-000001.parquet"]
    assert len(hub.commits("me/text")) == 3
    assert "10 rows: 10 ok" in card_of(hub)[1]


def test_what_a_reader_would_not_find_as_it_was_written_is_an_error_and_the_blocks_stay_collected(
    hub: HubServer, stub: StubVllm, tmp_path: Path
) -> None:
    other = tmp_path / "other.parquet"
    pq.write_table(pa.table({"id": [1], "price": [2.5]}), other)
    hub.put("me/text", "data/prices-000000.parquet", other.read_bytes())
    card = (
        "---\nconfigs:\n- config_name: default\n  data_files:\n  - {split: prices, path: data/prices-*.parquet}\n---\n"
    )
    hub.put("me/text", "README.md", card.encode())
    failed = run(stub)
    assert failed.code == 1, failed
    assert "a reader of it does not find what was written" in failed.line["message"]
    assert "column 'price': written as None" in failed.line["message"]
    assert branches(hub) == {"main", "unfinished-train"}
    ended = run(stub, "--output-config", "text")
    assert ended.code == 0, ended
    assert as_read(name="text")["id"][:] == list(range(1, 11))
    assert stub.stats()["requests"] == 20


# --- another branch, another configuration, a pull request -----------------------------------------------------------


def test_configurations_splits_and_branches_are_published_beside_each_other(hub: HubServer, stub: StubVllm) -> None:
    assert run(stub, "--max-samples", "4").code == 0
    named = run(stub, "--output-config", "old", "--output-split", "letters", "--max-samples", "5")
    assert named.code == 0, named
    aside = run(stub, "--output-revision", "v2", "--max-samples", "6")
    assert aside.code == 0, aside
    assert "/datasets/me/text/tree/v2" in aside.stderr
    assert branches(hub) == {"main", "v2"}
    assert [as_read()["id"][:], as_read("letters", "old")["id"][:]] == [[1, 2, 3, 4], [1, 2, 3, 4, 5]]
    assert as_read(revision="v2")["id"][:] == [1, 2, 3, 4, 5, 6]
    data, text = card_of(hub)
    assert [config["config_name"] for config in data["configs"]] == ["default", "old"]
    assert "4 rows: 4 ok" in text
    assert "5 rows: 5 ok" in text
    assert data["size_categories"] == ["n<1K"]
    assert {"ocr", "uv-script", DEFAULT_MODEL.rpartition("/")[2]} <= set(data["tags"])
    assert "hf-jobs" not in data["tags"]


def test_a_pull_request_is_a_draft_until_all_blocks_are_there_and_there_is_never_a_second_one(
    hub: HubServer, stub: StubVllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    none = run(stub, "--create-pr")
    assert none.code == 2, none
    assert "me/text" in none.line["message"]
    hub.hub.orgs["library"] = {}
    repo = hub.create("library/text")
    monkeypatch.setenv("HF_TOKEN", hub.pr_token)
    words = ["--create-pr", "--num-shards", "2", "--shard-index"]
    assert run(stub, *words, "1", output="library/text").code == 0
    (draft,) = hub.discussions.of(repo).values()
    assert (draft.status, draft.title) == ("draft", "Text of split train, read by LightOnOCR")
    assert list(blocks_on(hub, "library/text", "refs/pr/1")) == ["data/train-000001.parquet"]
    be_on_machine(monkeypatch, tmp_path / "other")
    ended = run(stub, *words, "0", output="library/text", script=SATURATE)
    assert ended.code == 0, ended
    assert f"published: {hub.url}/datasets/library/text/discussions/1" in ended.stderr
    assert [one.status for one in hub.discussions.of(repo).values()] == ["open"]
    assert set(hub.files("library/text")) == {".gitattributes"}, "main is for its owner to change"
    forget_files()
    proposed = datasets.load_dataset("library/text", split="train", revision="refs/pr/1")
    assert_all_read(proposed.with_format("arrow")[:], range(1, 11))
    commits = hub.commits("library/text", "refs/pr/1")
    assert run(stub, "--create-pr", output="library/text").code == 0
    assert hub.commits("library/text", "refs/pr/1") == commits
    hub.discussions.merge(repo, 1)
    assert run(stub, "--create-pr", output="library/text").code == 0
    assert (len(hub.discussions.of(repo)), stub.stats()["requests"]) == (1, 10)


def test_the_card_of_a_pull_request_is_of_the_run_that_it_proposes(hub: HubServer, stub: StubVllm) -> None:
    assert run(stub).code == 0
    assert run(stub, "--create-pr", "--overwrite", "--temperature", "0.7", "--max-samples", "6").code == 0
    assert "10 rows: 10 ok" in card_of(hub)[1]
    _, text = card_of(hub, "refs/pr/1")
    assert "6 rows: 6 ok" in text
    assert "| temperature | 0.7 |" in text


def test_of_two_pull_requests_opened_at_once_the_first_is_kept(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    repo = hub.create("library/text")
    monkeypatch.setenv("HF_TOKEN", hub.pr_token)
    ours = PullRequest(Destination("library/text", Target("train"), create_pr=True))
    hub.discussions.add(repo, ours.title, "somebody", status="draft")
    hub.discussions.add(repo, ours.title, "me", status="draft")
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(PullRequest, "find", lambda _: None)  # as it was when this run looked
        assert ours.open() == "refs/pr/2"
    assert {num: one.status for num, one in hub.discussions.of(repo).items()} == {1: "draft", 2: "draft", 3: "closed"}
    assert (ours.find(), ours.open()) == ("refs/pr/2", "refs/pr/2")


@pytest.mark.parametrize(
    ("place", "name"),
    [
        (Destination("me/text", Target("train")), "unfinished-train"),
        (Destination("me/text", Target("train", "old-letters")), "unfinished-old-letters-train"),
        (Destination("me/text", Target("train"), "v2/new"), "unfinished-train--at--v2--new"),
    ],
)
def test_the_branch_on_which_blocks_are_collected_is_named_after_what_they_are_for(
    place: Destination, name: str
) -> None:
    assert branch_name(place) == name


def test_the_last_step_writes_a_card_that_was_removed_and_asks_nothing(hub: HubServer, stub: StubVllm) -> None:
    assert run(stub).code == 0
    hub.put("me/text", "README.md", b"Our letters.\n")
    ended = run_here("me/scans", "me/text", "--model", DEFAULT_MODEL, "--block-rows", "4", "--finish")
    assert ended.code == 0, ended
    assert "10 rows: 10 ok" in card_of(hub)[1]
    assert "Our letters." in card_of(hub)[1]
    assert as_read()["id"][:] == list(range(1, 11))
    assert stub.stats()["requests"] == 10


# --- several at once -------------------------------------------------------------------------------------------------


def test_four_writers_publish_at_once_and_no_card_loses_the_configuration_of_another(
    hub: HubServer, tmp_path: Path
) -> None:
    table = pa.table({"markdown": ["a", "b"], "markdown_status": ["ok", "ok"]})

    def publish_one(number: int) -> str | None:
        target = Target(f"part{number % 2}", f"config{number // 2}")
        blocks = HubBlocks(Destination("me/text", target), tmp_path / "staging", counted_column="markdown_status")
        plan = BlockPlan(target, 2, 2)
        with blocks.locked():
            blocks.get_ready(to_write=True)
            blocks.write(0, table)
        ready.wait(PATIENCE_S)
        contents = CardContents("me/scans", plan, {"ok": 2}, {}, "uv run it")
        return blocks.publish(
            Whole(
                plan,
                2,
                table.schema,
                lambda earlier, written: card_text(earlier, contents, written),
                table.schema.names,
            )
        )

    ready = threading.Barrier(4)
    hub.fail("POST", "/commit/main", 412, times=2)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(publish_one, range(4))) == [f"{hub.url}/datasets/me/text"] * 4
    assert len(hub.commits("me/text")) == 5
    data, text = card_of(hub)
    assert {(config["config_name"], file["split"]) for config in data["configs"] for file in config["data_files"]} == {
        (f"config{config}", f"part{part}") for config in range(2) for part in range(2)
    }
    assert text.count("2 rows: 2 ok") == 4
    for config in range(2):
        for part in range(2):
            assert as_read(f"part{part}", f"config{config}")["markdown"][:] == ["a", "b"]
    assert branches(hub) == {"main"}


TWO_BLOCKS = BlockPlan(Target("train"), 4, 2)
TEXTS = pa.schema({"markdown": pa.string()})


def two_blocks() -> Whole:
    contents = CardContents("me/scans", TWO_BLOCKS, {"ok": 4}, {}, "uv run it")
    return Whole(TWO_BLOCKS, 4, TEXTS, lambda earlier, written: card_text(earlier, contents, written), TEXTS.names)


def texts(*values: str) -> pa.Table:
    return pa.table({"markdown": values}, schema=TEXTS)


def two_runs(tmp_path: Path) -> tuple[HubBlocks, HubBlocks]:
    """Two runs on one split, on two machines; the first has collected all, and the second knows it."""
    place = Destination("me/text", TWO_BLOCKS.target)
    first, second = (HubBlocks(place, tmp_path / str(index)) for index in range(2))
    with first.locked():
        first.get_ready(to_write=True)
        for number in range(2):
            first.write(number, texts("a", "b"))
    assert second.closed() == {0, 1}
    return first, second


def test_a_shard_that_still_writes_when_another_has_published_collects_anew_and_publishes_again(
    hub: HubServer, tmp_path: Path
) -> None:
    first, second = two_runs(tmp_path)
    with second.locked():
        second.get_ready(to_write=True)
        first.publish(two_blocks())
        assert branches(hub) == {"main"}
        second.write(1, texts("c", "d"))
    assert branches(hub) == {"main", "unfinished-train"}
    assert as_read()["markdown"][:] == ["a", "b", "a", "b"]
    second.publish(two_blocks())
    assert as_read()["markdown"][:] == ["a", "b", "c", "d"]
    assert branches(hub) == {"main"}


def test_what_another_shard_collects_while_one_publishes_is_not_put_away_unpublished(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = two_runs(tmp_path)
    close = first._work.close

    def close_late(published: str) -> None:
        with second.locked():
            second.get_ready(to_write=True)
            second.write(1, texts("c", "d"))
        close(published)

    monkeypatch.setattr(first._work, "close", close_late)
    first.publish(two_blocks())
    assert as_read()["markdown"][:] == ["a", "b", "a", "b"]
    second.publish(two_blocks())
    assert as_read()["markdown"][:] == ["a", "b", "c", "d"]
    assert branches(hub) == {"main"}


def test_two_shards_that_find_all_blocks_publish_once_and_neither_fails(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = two_runs(tmp_path)
    find = second._work.find

    def find_before_it_is_put_away() -> str | None:
        found = find()
        if found:
            first.publish(two_blocks())
        return found

    assert second.count(0, "markdown") == {"a": 1, "b": 1}
    monkeypatch.setattr(second._work, "find", find_before_it_is_put_away)
    assert second.publish(two_blocks()) == f"{hub.url}/datasets/me/text"
    assert second.count(0, "markdown") == {"a": 1, "b": 1}, "its branch is gone, and the blocks are on main"
    assert len(hub.commits("me/text")) == 2
    assert branches(hub) == {"main"}


def test_a_card_that_the_hub_does_not_hand_out_is_not_taken_for_none(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("src.patience.FIRST_NETWORK_PAUSE_S", 0.01)
    hub.put("me/text", "README.md", b"---\nlicense: mit\n---\n\n# Of people\n")
    first, _ = two_runs(tmp_path)
    hub.fail("HEAD", "README.md", 403, times=1)  # which the client does not try again
    first.publish(two_blocks())
    data, text = card_of(hub)
    assert data["license"] == "mit"
    assert "# Of people" in text


# --- what it costs ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_of_10_000_pages_makes_few_commits_and_no_request_a_row(
    hub: HubServer, stub: StubVllm, tmp_path: Path
) -> None:
    picture = io.BytesIO()
    Image.new("L", (40, 40), 255).save(picture, "PNG")  # blank, so that the engine is not what takes the time
    cell = {"bytes": picture.getvalue(), "path": "blank.png"}
    features = datasets.Features({"image": datasets.Image()})
    table = pa.table({"image": [cell] * 10_000}, schema=features.arrow_schema)
    table = table.append_column("id", pa.array(range(10_000)))  # so that no two blocks are the same
    pq.write_table(table, tmp_path / "pages.parquet", row_group_size=1000)
    hub.requests.clear()
    words = ["--server", stub.url, "--model", DEFAULT_MODEL]
    ended = run_here(tmp_path / "pages.parquet", "me/text", *words)
    assert ended.code == 0, ended
    assert ended.line["statuses"]["blank"] == 10_000
    blocks = len(blocks_on(hub))
    commits = sum(count for route, count in hub.requests.items() if "/commit/" in route)
    print(f"{blocks} blocks, {commits} commits, {hub.requests.total()} requests: {dict(hub.requests)}")
    assert blocks == 40
    assert commits <= 2 + ended.line["seconds"] / 600
    assert hub.requests.total() <= 60 + 4 * blocks, "an upload of a block takes four, and the rest does not grow"
