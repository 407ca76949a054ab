"""Outputs in a bucket: collected where no reader looks, published whole, resumed by any machine and any script."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import datasets
import pyarrow as pa
import pytest

from src.blocks import BlockPlan, Target, Whole
from src.bucket_blocks import BucketBlocks
from src.card import CardContents, card_text
from src.errors import PublishError, UsageError
from src.hf_paths import HubPath
from src.publish import check_output_is_apart, choose_output
from tests.hub_here import forget_files, hub_here
from tests.hub_server import HubServer, hub_env
from tests.runs import SATURATE, SCRIPT, Running, assert_all_read, run_here, tag_of, wait_until, write_pages
from tests.stub_vllm import DEFAULT_MODEL, StubVllm

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.timeout(180)

SCHEMA = pa.schema({"markdown": pa.string(), "markdown_status": pa.string()})


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    with hub_here(monkeypatch, tmp_path / "home") as server:
        yield server


def blocks_in(tmp_path: Path, target: Target | None = None, path: str = "text") -> BucketBlocks:
    """The blocks of a split in a bucket, seen from a machine of its own."""
    at = HubPath("buckets", "me/out", None, path)
    return BucketBlocks(at, target or Target("train"), tmp_path, private=True, counted_column="markdown_status")


def table(*texts: str) -> pa.Table:
    return pa.table({"markdown": texts, "markdown_status": ["ok"] * len(texts)}, schema=SCHEMA)


def whole(plan: BlockPlan) -> Whole:
    contents = CardContents("me/scans", plan, {"ok": plan.num_rows}, {}, "uv run it")
    return Whole(
        plan, plan.num_rows, SCHEMA, lambda earlier, written: card_text(earlier, contents, written), SCHEMA.names
    )


def write(blocks: BucketBlocks, *texts: str, anew: bool = False) -> None:
    """Write block 0, 1, … of two rows each, whose texts begin as said."""
    with blocks.locked():
        if anew:
            blocks.remove_all()
        blocks.get_ready(to_write=True)
        for number, text in enumerate(texts):
            blocks.write(number, table(f"{text} 1", f"{text} 2"))


def as_read(config: str = "default", split: str = "train", path: str = "text") -> list[str]:
    """What a reader finds. `datasets` 5.2 keeps a bucket's file by its name alone, and has to be told to look again."""
    forget_files()
    address = f"hf://buckets/me/out/{path}"
    loaded = datasets.load_dataset(address, config, split=split, download_mode="force_redownload")
    return list(loaded["markdown"])


def readable(hub: HubServer) -> set[str]:
    return {path for path in hub.bucket_files("me/out") if "/.unfinished/" not in path}


# --- one split -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("refused", range(4))
def test_a_publish_that_is_refused_at_any_step_is_finished_by_the_same_command(
    hub: HubServer, tmp_path: Path, refused: int
) -> None:
    plan = BlockPlan(Target("train"), 4, 2)
    hub.buckets.put("me/out", "text/README.md", b"---\nlicense: cc0-1.0\n---\n\nOur letters.\n")
    hub.buckets.put("me/out", "text-of-others/train-000000.parquet", b"theirs")
    first = blocks_in(tmp_path / "here")
    write(first, "a", "b")
    assert readable(hub) == {"text/README.md", "text-of-others/train-000000.parquet"}
    assert first.closed() == blocks_in(tmp_path / "there").closed() == {0, 1}
    hub.fail("POST", "/me/out/batch", 403, skip=refused)
    if refused < 3:  # copies, card, tidying up
        with pytest.raises(PublishError, match=r"\.unfinished keeps all blocks; the same command goes on"):
            first.publish(whole(plan))
    second = blocks_in(tmp_path / "there")
    assert second.closed() == {0, 1}
    assert second.publish(whole(plan)) == f"{hub.url}/buckets/me/out/tree/text"
    assert as_read() == ["a 1", "a 2", "b 1", "b 2"]
    files = hub.bucket_files("me/out")
    names = {"README.md", "data/train-000000.parquet", "data/train-000001.parquet"}
    assert set(files) == {f"text/{name}" for name in names} | {"text-of-others/train-000000.parquet"}
    card = files["text/README.md"].decode()
    assert "license: cc0-1.0" in card
    assert "Our letters." in card
    done = len(hub.buckets.buckets["me/out"].batches)
    assert blocks_in(tmp_path / "elsewhere").publish(whole(plan))
    assert len(hub.buckets.buckets["me/out"].batches) == done, "what is published is published once"


def test_readers_see_the_old_split_until_the_new_one_is_whole_and_no_machine_mixes_them(
    hub: HubServer, tmp_path: Path
) -> None:
    write(blocks_in(tmp_path / "here"), "a", "b", "c")
    blocks_in(tmp_path / "here").publish(whole(BlockPlan(Target("train"), 6, 2)))
    assert as_read()[::2] == ["a 1", "b 1", "c 1"]
    write(blocks_in(tmp_path / "here"), "x", anew=True)
    assert as_read()[::2] == ["a 1", "b 1", "c 1"]
    other = blocks_in(tmp_path / "there")
    assert other.closed() == {0}
    plan = BlockPlan(Target("train"), 4, 2)
    with pytest.raises(PublishError, match="block 1 is gone"):
        other.publish(whole(plan))
    write(other, "x", "y")
    other.publish(whole(plan))
    assert as_read()[::2] == ["x 1", "y 1"]
    assert not [path for path in hub.bucket_files("me/out") if "/.unfinished/" in path or "000002" in path]
    write(blocks_in(tmp_path / "third"), "z")  # as --retry-failed does
    assert as_read()[::2] == ["x 1", "y 1"]
    blocks_in(tmp_path / "fourth").publish(whole(plan))
    assert as_read()[::2] == ["z 1", "y 1"]


def test_splits_and_configurations_of_one_folder_keep_to_themselves(hub: HubServer, tmp_path: Path) -> None:
    targets = [Target("train"), Target("train_b"), Target("train", "other")]
    for number, target in enumerate(targets):
        write(blocks_in(tmp_path / str(number), target, ""), target.split + target.config)
    for number, target in enumerate(targets):
        blocks_in(tmp_path / str(number), target, "").publish(whole(BlockPlan(target, 2, 2)))
    card = hub.bucket_files("me/out")["README.md"].decode()
    assert card.count("2 rows: 2 ok") == 3
    assert as_read("other", path="") == ["trainother 1", "trainother 2"]
    assert as_read(split="train", path="") == ["traindefault 1", "traindefault 2"]


def test_what_another_shard_collects_while_one_publishes_is_not_removed(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = blocks_in(tmp_path / "here"), blocks_in(tmp_path / "there")
    write(first, "old", "old", anew=True)
    look = first._verify

    def meanwhile(*seen: Any) -> None:
        look(*seen)
        write(second, "new")  # asked again about the rows of block 0

    monkeypatch.setattr(first, "_verify", meanwhile)
    plan = BlockPlan(Target("train"), 4, 2)
    first.publish(whole(plan))
    assert as_read() == ["old 1", "old 2", "old 1", "old 2"]
    third = blocks_in(tmp_path / "elsewhere")
    assert third.closed() == {0, 1}, "what readers see counts as done, too"
    third.publish(whole(plan))
    assert as_read() == ["new 1", "new 2", "old 1", "old 2"]
    assert not [path for path in hub.bucket_files("me/out") if "/.unfinished/" in path]


def test_a_block_that_a_reader_would_not_find_as_written_is_an_error_and_keeps_what_was_collected(
    hub: HubServer, tmp_path: Path
) -> None:
    blocks = blocks_in(tmp_path)
    write(blocks, "a", "b")
    plan = BlockPlan(Target("train"), 4, 2)
    wrong = Whole(plan, 4, SCHEMA.append(pa.field("more", pa.int64())), whole(plan).card, SCHEMA.names)
    with pytest.raises(PublishError, match="column 'more': written as Value"):
        blocks.publish(wrong)
    assert "text/.unfinished/data/train-000001.parquet" in hub.bucket_files("me/out")
    with pytest.raises(PublishError, match="hold 3 rows, and 4 are wanted; nothing is published"):
        blocks.publish(Whole(plan, 3, SCHEMA, whole(plan).card, SCHEMA.names))


def test_a_token_that_may_not_write_is_refused_before_a_page_is_asked_about(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.buckets.put("me/out", "a.txt", b"a")
    monkeypatch.setenv("HF_TOKEN", hub.read_token)
    blocks = blocks_in(tmp_path)
    with pytest.raises(PublishError, match="403"), blocks.locked():
        blocks.get_ready(to_write=True)
    assert list(hub.bucket_files("me/out")) == ["a.txt"]


# --- the name of an output -------------------------------------------------------------------------------------------


def test_an_address_of_an_output_is_a_dataset_at_a_branch_or_a_folder_of_a_bucket() -> None:
    dataset = choose_output("hf://datasets/me/text@side", None)
    assert (dataset.repo_id, dataset.revision, dataset.bucket) == ("me/text", "side", None)
    assert choose_output("hf://datasets/me/text", None, "side") == dataset
    bucket = choose_output("hf://buckets/me/out/text", None)
    assert (bucket.repo_id, bucket.on_hub, str(bucket)) == (None, "me/out", "hf://buckets/me/out/text")
    assert bucket.folder.name == "buckets--me--out--text"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("hf://datasets/me/text/data", {}, "leave /data out"),
        ("hf://datasets/me/text@a", {"revision": "b"}, "is at 'a', but --output-revision is 'b'"),
        ("hf://buckets/me/out", {"revision": "b"}, "a bucket has neither branches nor pull requests"),
        ("hf://buckets/me/out", {"create_pr": True}, "a bucket has neither branches nor pull requests"),
        ("hf://buckets/me/out/*.parquet", {}, "is a pattern"),
        ("hf://spaces/me/out", {}, "output 'hf://spaces/me/out' names a space"),
    ],
)
def test_an_address_that_can_not_be_written_to_is_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        choose_output(name, None, **options)


@pytest.mark.parametrize(
    ("read", "written"),
    [
        ("hf://datasets/me/scans@v1/data", "me/scans"),
        ("me/scans", "hf://datasets/me/scans@side"),
        ("hf://buckets/me/b", "hf://buckets/me/b/text"),
        ("hf://buckets/me/b/in/*.parquet", "hf://buckets/me/b/in/text"),
    ],
)
def test_an_output_in_its_own_input_is_refused(read: str, written: str) -> None:
    with pytest.raises(UsageError, match=r"overlap|are both"):
        check_output_is_apart(choose_output(written, None), read)
    check_output_is_apart(choose_output("hf://buckets/me/b/text", None), "hf://buckets/me/b/in")


# --- whole runs ------------------------------------------------------------------------------------------------------


def test_a_run_reads_a_bucket_and_writes_to_it_and_asks_nothing_again(hub: HubServer, tmp_path: Path) -> None:
    hub.buckets.put("me/out", "in/pages.parquet", write_pages(tmp_path / "pages.parquet", 6).read_bytes())
    with StubVllm("--read-tag") as stub:
        words = ["--server", stub.url, "--model", DEFAULT_MODEL, "--block-rows", "4"]
        for _ in range(2):
            ended = run_here("hf://buckets/me/out/in", "hf://buckets/me/out/text", *words)
            assert ended.code == 0, ended
            assert stub.stats()["requests"] == 6
    assert ended.line["rows_before"] == 6
    assert all(f"tag {tag_of(number)}" in text for number, text in enumerate(as_read(), 1))
    assert len(as_read()) == 6


@pytest.mark.slow
def test_a_run_from_bucket_to_bucket_that_is_killed_is_finished_on_another_machine_by_another_script(
    tmp_path: Path,
) -> None:
    with HubServer() as hub, StubVllm("--read-tag") as stub:
        for number in range(4):
            pages = write_pages(tmp_path / f"{number}.parquet", 4 * number + 4).read_bytes()
            hub.buckets.put("me/scans", f"in/{number}.parquet", pages)
        hub.buckets.buckets["me/scans"].private = True
        read, written = "hf://buckets/me/scans/in/[12].parquet", "hf://buckets/me/text"
        words = ["--server", stub.url, "--model", DEFAULT_MODEL, read, written, "--block-rows", "4"]
        here, there = (
            {**hub_env(hub, tmp_path / name), "XDG_CACHE_HOME": str(tmp_path / name / "cache")}
            for name in ("here", "there")
        )
        stub.configure(faults=[f"hang,tag={tag_of(12)}"])
        with Running(*words, "--max-in-flight", "4", env=here, script=SATURATE) as run:
            wait_until(
                lambda: "me/text" in hub.buckets.buckets and len(collected(hub)) >= 3, "three blocks are collected"
            )
            run.signal(signal.SIGKILL)
            run.wait()
        assert hub.buckets.buckets["me/text"].private
        assert not [path for path in hub.bucket_files("me/text") if not path.startswith(".unfinished/")]
        closed = collected(hub)
        wait_until(lambda: stub.stats()["in_flight"] == 0, "the killed run's requests are gone")
        stub.reset()
        stub.configure(faults=[])
        with Running(*words, "--max-tokens", "9", env=there, script=SCRIPT) as run:
            refused = run.wait()
        assert refused.code == 2, refused
        assert "max_tokens: was" in refused.advice
        with Running(*words, env=there, script=SCRIPT) as run:
            ended = run.wait()
        assert ended.code == 0, ended
        assert ended.line["rows_before"] == 4 * len(closed)
        assert sum(stub.stats()["tags"].values()) == 20 - 4 * len(closed)
        assert f"published: {hub.url}/buckets/me/text" in ended.stderr
        names = {f"data/train-{number:06d}.parquet" for number in range(5)}
        assert set(hub.bucket_files("me/text")) == {"README.md", *names}
        loaded = load_elsewhere(hub, tmp_path, "hf://buckets/me/text")
        assert_all_read(loaded, [*range(1, 9), *range(1, 13)])
        assert not hub.unknown


def collected(hub: HubServer) -> list[str]:
    return [path for path in hub.bucket_files("me/text") if path.endswith(".parquet")]


def load_elsewhere(hub: HubServer, tmp_path: Path, address: str) -> pa.Table:
    """What `load_dataset` gives in this process, whose clients then take the stand-in for the Hub."""
    from tests.hub_here import be_on_machine, point_clients_at

    with pytest.MonkeyPatch.context() as monkeypatch:
        point_clients_at(hub, monkeypatch)
        be_on_machine(monkeypatch, tmp_path / "reader")
        return datasets.load_dataset(address, split="train").with_format("arrow")[:]
