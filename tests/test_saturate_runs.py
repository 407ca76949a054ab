"""Whole runs of lighton-ocr3-saturate.py against the stub and a stand-in Hub: what these counted, and what is left."""

from __future__ import annotations

import io
import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from PIL import Image

from tests.hub_server import HubServer, hub_env
from tests.runs import (
    NEW_COLUMNS,
    ROOT,
    SATURATE,
    Ended,
    Running,
    assert_all_read,
    assert_input_is_kept,
    block_files,
    built_script,
    load,
    output_table,
    pages_dataset,
    row_of,
    run_here,
    statuses,
    tag_of,
    wait_until,
    write_pages,
)
from tests.stub_vllm import DEFAULT_MODEL, StubVllm, tagged_png

if TYPE_CHECKING:
    from collections.abc import Iterator


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


def words_for(stub: StubVllm, *words: str | Path) -> list[str]:
    return ["--server", stub.url, "--model", DEFAULT_MODEL, *map(str, words)]


def saturate(stub: StubVllm, *words: str | Path) -> Ended:
    """A run in this process."""
    return run_here(*words_for(stub, *words), script=SATURATE)


def blocks_of(out: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in block_files(out)}


# --- the same as lighton-ocr-server.py -------------------------------------------------------------------------------


def test_the_blocks_are_those_of_the_server_script(tmp_path: Path, stub: StubVllm) -> None:
    blank = tmp_path / "blank.png"
    Image.new("RGB", (60, 60), "white").save(blank)
    cells = {3: None, 9: {"bytes": blank.read_bytes(), "path": "blank.png"}}
    pages = write_pages(tmp_path / "pages.parquet", 45, cells)
    stub.configure(faults=[f"status=400,tag={tag_of(7)}", f"truncate,tag={tag_of(20)}", f"empty,tag={tag_of(21)}"])
    words = ["--block-rows", "8", "--max-failure-rate", "0.2", "--shuffle", "--max-samples", "40", "--seed", "4"]
    served = run_here(*words_for(stub, pages, tmp_path / "served", *words))
    ended = saturate(stub, pages, tmp_path / "out", *words)
    assert (served.code, ended.code) == (0, 0), (served, ended)
    assert ended.line["statuses"] == served.line["statuses"]
    assert list(blocks_of(tmp_path / "out")) == list(blocks_of(tmp_path / "served"))
    for ours, theirs in zip(block_files(tmp_path / "out"), block_files(tmp_path / "served"), strict=True):
        ours_table, theirs_table = pq.read_table(ours), pq.read_table(theirs)
        assert ours_table.schema.equals(theirs_table.schema, check_metadata=True)
        assert ours_table.drop_columns("inference_info").equals(theirs_table.drop_columns("inference_info"))
    # The settings are the same, too: either script goes on where the other stopped.
    block_files(tmp_path / "served")[2].unlink()
    stub.reset()
    assert saturate(stub, pages, tmp_path / "served", *words).code == 0
    assert stub.stats()["distinct_pages"] <= 8
    assert output_table(tmp_path / "served").num_rows == 40


# --- shards ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_four_shards_share_an_output_and_one_that_was_killed_goes_on(tmp_path: Path, stub: StubVllm) -> None:
    rows, block_rows = 160, 5
    pages, out = write_pages(tmp_path / "pages.parquet", rows), tmp_path / "out"
    words = words_for(stub, pages, out, "--block-rows", str(block_rows), "--num-shards", "4", "--shard-index")
    # Of the third shard two pages of its last block hang, so that it can't end before it is killed.
    stub.configure(ceiling=100, faults=[f"hang,tag={tag_of(rows - 6)}", f"hang,tag={tag_of(rows - 7)}"])
    runs = [Running(*words, str(index), script=SATURATE) for index in range(4)]
    try:
        wait_until(lambda: len(of_shard(out, 2)) >= 3, "the third shard has closed some blocks")
        runs[2].signal(signal.SIGKILL)
        ends = [run.wait() for run in runs]
    finally:
        for run in runs:
            run.__exit__()
    assert [end.code for end in ends] == [0, 0, -signal.SIGKILL, 0], ends
    assert [end.line["rows_done"] for end in ends if end.code == 0] == [40, 40, 40]
    assert not (out / "README.md").exists(), "the card is for whoever finds all blocks there"
    assert [len(of_shard(out, index)) for index in (0, 1, 3)] == [8, 8, 8]
    closed = of_shard(out, 2)
    assert closed < set(range(2, 32, 4))
    before = blocks_of(out)
    wait_until(lambda: stub.stats()["in_flight"] == 0, "the killed run's requests are gone")
    stub.reset()
    stub.configure(faults=[], ceiling=0)
    ended = run_here(*words, "2", script=SATURATE)
    assert ended.code == 0, ended
    asked = {(int(tag, 16) - 1) // block_rows for tag in stub.stats()["tags"]}
    assert asked == set(range(2, 32, 4)) - closed
    assert stub.stats()["requests"] == ended.line["rows_done"] == len(asked) * block_rows
    assert before.items() <= blocks_of(out).items()
    assert_all_read(output_table(out), range(1, rows + 1))
    assert ended.line["statuses"]["ok"] == rows
    assert f"{rows} rows: {rows} ok" in (out / "README.md").read_text()
    assert load(out)["id"][:] == list(range(1, rows + 1))


def of_shard(out: Path, index: int) -> set[int]:
    return {number for file in block_files(out) if (number := int(file.stem[-6:])) % 4 == index}


def test_the_last_step_is_refused_while_blocks_are_missing_and_writes_the_card_afterwards(
    tmp_path: Path, stub: StubVllm
) -> None:
    pages, out = write_pages(tmp_path / "pages.parquet", 12), tmp_path / "out"
    words = [str(pages), str(out), "--block-rows", "3", "--num-shards", "2", "--shard-index"]
    assert saturate(stub, *words, "1").code == 0
    refused = saturate(stub, *words[:-3], "--finish")
    assert refused.code == 2
    assert "--finish: 2 of 4 blocks are not there (0, 2); run without it first" in refused.advice
    assert not (out / "README.md").exists()
    assert saturate(stub, *words, "0").code == 0
    (out / "README.md").unlink()
    asked = stub.stats()["requests"]
    ended = run_here(*words[:-3], "--model", DEFAULT_MODEL, "--finish", script=SATURATE)  # needs no server
    assert ended.code == 0, ended
    assert (ended.line["rows"], ended.line["rows_before"], ended.line["rows_done"]) == (12, 12, 0)
    assert "12 rows: 12 ok" in (out / "README.md").read_text()
    assert stub.stats()["requests"] == asked == 12


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num-shards", "4"], "--num-shards and --shard-index go together"),
        (["--shard-index", "0"], "--num-shards and --shard-index go together"),
        (["--num-shards", "4", "--shard-index", "4"], "shards count from 0"),
        (["--num-shards", "4", "--shard-index", "1", "--overwrite"], "--overwrite would remove the blocks of other"),
        (["--num-shards", "0", "--shard-index", "0"], "0 is too small"),
        (["--overwrite", "--retry-failed"], "--overwrite and --retry-failed exclude each other"),
        (["--overwrite", "--finish"], "--overwrite and --finish exclude each other"),
        (["--retry-failed", "--finish"], "--retry-failed and --finish exclude each other"),
        (["--min-in-flight", "9", "--max-in-flight", "8"], "--min-in-flight 9 is more than --max-in-flight 8"),
        (["--commit-minutes", "-1"], "-1 is too small"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_anything_is_done(
    tmp_path: Path, stub: StubVllm, words: list[str], message: str
) -> None:
    ended = saturate(stub, tmp_path / "pages.parquet", tmp_path / "out", *words)
    assert ended.code == 2
    assert message in ended.advice
    assert not (tmp_path / "out").exists()


# --- what is written -------------------------------------------------------------------------------------------------


def test_results_only_leaves_the_pictures_out_and_says_which_row_a_text_belongs_to(
    tmp_path: Path, stub: StubVllm
) -> None:
    pages, out = write_pages(tmp_path / "pages.parquet", 30), tmp_path / "out"
    words = [
        str(pages),
        str(out),
        "--block-rows",
        "7",
        "--results-only",
        "--shuffle",
        "--seed",
        "3",
        "--max-samples",
        "20",
    ]
    ended = saturate(stub, *words, "--show", "2")
    assert ended.code == 0, ended
    dataset = load(out)
    assert dataset.column_names == ["id", "kind", "row_index", *NEW_COLUMNS]
    assert dataset["row_index"][:] == [number - 1 for number in dataset["id"]]
    assert dataset["row_index"][:] != sorted(dataset["row_index"])
    assert_all_read(output_table(out), dataset["id"][:])
    assert dataset.features["kind"].names == ["letter", "ledger", "map"]
    assert sum(map(len, blocks_of(out).values())) < 40_000
    with_pictures = saturate(stub, *[word for word in words if word != "--results-only"])
    assert with_pictures.code == 2
    assert "results_only: was true, now false" in with_pictures.advice
    again = saturate(stub, out, tmp_path / "again", "--results-only", "--image-column", "markdown")
    assert again.code == 2, "a column of texts is no column of pages"


def test_failed_rows_are_asked_about_again_and_only_their_blocks_are_written_anew(
    tmp_path: Path, stub: StubVllm
) -> None:
    pages, out = write_pages(tmp_path / "pages.parquet", 32, {12: None}), tmp_path / "out"
    words = [str(pages), str(out), "--block-rows", "4", "--max-failure-rate", "0.5"]
    stub.configure(faults=[f"status=400,tag={tag_of(5)}", f"truncate,tag={tag_of(20)}"])
    assert saturate(stub, *words).code == 0
    assert {number: status for number, status in statuses(out).items() if status != "ok"} == {
        5: "error",
        12: "error",
        20: "truncated",
    }
    before, info = blocks_of(out), row_of(out, 6)["inference_info"]
    times = {file.name: file.stat().st_mtime_ns for file in block_files(out)}
    stub.configure(faults=[])
    stub.reset()
    assert saturate(stub, *words).code == 0
    assert stub.stats()["requests"] == 0, "a run that only resumes asks about no closed block"
    ended = saturate(stub, *words, "--retry-failed", "--temperature", "0.5")
    assert ended.code == 2, "the question must stay the same"
    ended = saturate(stub, *words, "--retry-failed")
    assert ended.code == 0, ended
    assert stub.stats()["tags"] == {tag_of(5): 1, tag_of(20): 1}
    assert (ended.line["rows"], ended.line["rows_before"], ended.line["rows_done"]) == (32, 29, 3)
    assert [number for number, status in statuses(out).items() if status != "ok"] == [12]
    assert_input_is_kept(pq.read_table(pages).combine_chunks(), output_table(out))
    touched = {f"train-{(number - 1) // 4:06d}.parquet" for number in (5, 12, 20)}
    for name, content in blocks_of(out).items():
        same = content == before[name] and (out / "data" / name).stat().st_mtime_ns == times[name]
        assert same == (name not in touched), name
    assert row_of(out, 6)["inference_info"] == info
    assert len(json.loads(row_of(out, 5)["inference_info"])) == 1
    assert "| ok" not in (out / "README.md").read_text()
    assert "32 rows: 31 ok" in (out / "README.md").read_text()


# --- what it says ----------------------------------------------------------------------------------------------------


def test_telemetry_the_progress_line_and_the_verdict(
    tmp_path: Path, stub: StubVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = built_script(SATURATE)
    monkeypatch.setattr(script, "LINE_EVERY_S", 0.3)
    monkeypatch.setattr(script, "TICK_S", 0.1)
    stub.configure(ceiling=60, seconds_per_page=0.1, max_num_seqs=4)
    pages, telemetry = write_pages(tmp_path / "pages.parquet", 100), tmp_path / "telemetry.jsonl"
    words = [
        "--telemetry",
        str(telemetry),
        "--dollars-per-hour",
        "3.6",
        "--max-in-flight",
        "12",
        "--min-in-flight",
        "2",
    ]
    ended = saturate(stub, pages, tmp_path / "out", *words)
    assert ended.code == 0, ended
    assert 4 <= stub.stats()["max_in_flight"] <= 12
    lines: list[dict[str, Any]] = [json.loads(line) for line in telemetry.read_text().splitlines()]
    assert len(lines) >= 5
    rules = (ROOT / "src" / "window_rules.py").read_text()
    for line in lines:
        assert 2 <= line["limit"] <= 12
        assert f'"{line["rule"]}"' in rules, line
        assert line["bounded_by"] in script.ADVICE, line
    progress = [line for line in ended.stderr.splitlines() if "/100 pages, " in line]
    assert len(progress) >= 2
    for words_of_line in (
        " failed, ",
        " in flight, ",
        " pages/s, ",
        " tokens/s, ",
        "ETA ",
        "bounded by ",
        "per 1,000 pages",
    ):
        assert words_of_line in progress[-2], progress
    (verdict,) = [line for line in ended.stderr.splitlines() if line.startswith("bounded by ")]
    assert any(advice in verdict for advice in script.ADVICE.values())
    other = saturate(stub, pages, tmp_path / "other", "--telemetry", str(tmp_path / "nowhere" / "t.jsonl"))
    assert other.code == 2
    assert "--telemetry" in other.advice
    full = saturate(stub, pages, tmp_path / "full", "--telemetry", "/dev/full")
    assert full.code == 0, full.stderr
    assert full.stderr.count("--telemetry can't be written any more: No space left on device") == 1


def test_a_server_without_gauges_is_filled_all_the_same(tmp_path: Path) -> None:
    with StubVllm("--read-tag", "--no-metrics", "--seconds-per-page", "0.05", "--max-num-seqs", "32") as bare:
        pages = write_pages(tmp_path / "pages.parquet", 200)
        ended = saturate(bare, pages, tmp_path / "out")
        assert ended.code == 0, ended
        assert bare.stats()["max_in_flight"] > 8
        assert_all_read(output_table(tmp_path / "out"), range(1, 201))


# --- the Hub ---------------------------------------------------------------------------------------------------------


def machine(hub: HubServer, home: Path) -> dict[str, str]:
    """The environment of a machine of its own: another home has other caches and another staging folder."""
    home.mkdir(exist_ok=True)
    return {**hub_env(hub, home), "XDG_CACHE_HOME": str(home / "cache")}


def on_hub(stub: StubVllm, env: dict[str, str], *words: str | Path) -> Ended:
    with Running(*words_for(stub, *words), env=env, script=SATURATE) as run:
        return run.wait()


def seed_scans(hub: HubServer, tmp_path: Path, files: int, rows: int) -> pa.Table:
    """Put pages on the Hub, in files of `rows` rows, each of them heavy enough to be told from a footer."""
    table = pages_dataset(range(1, files * rows + 1)).with_format("arrow")[:]
    noise = pa.array([os.urandom(50_000) for _ in range(table.num_rows)])
    table = table.append_column("noise", noise)
    for number in range(files):
        part = tmp_path / f"part-{number}.parquet"
        pq.write_table(table.slice(number * rows, rows), part)
        hub.put("me/scans", f"data/letters-{number:05d}-of-{files:05d}.parquet", part.read_bytes())
    return table


def blocks_on(hub: HubServer, repo: str, revision: str = "main") -> dict[str, bytes]:
    """The block files as they are there now."""
    return {name: content for name, content in hub.files(repo, revision).items() if name.startswith("data/")}


def download(hub: HubServer, repo: str, folder: Path) -> Path:
    """The output, as files."""
    for name, content in hub.files(repo).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def staged(env: dict[str, str]) -> list[Path]:
    """Blocks that wait on this machine."""
    return sorted(Path(env["XDG_CACHE_HOME"]).glob("lighton-ocr/*/data/*.parquet"))


def assert_never_half(hub: HubServer, repo: str, split: str) -> None:
    """In every state that the output was in, its blocks are whole, and the card names their split."""
    for commit in hub.commits(repo):
        blocks = [name for name in commit.files if name.startswith("data/")]
        for name in blocks:
            pq.read_metadata(io.BytesIO(commit.files[name].content))
        if blocks:
            card = yaml.safe_load(commit.files["README.md"].content.decode().split("---")[1])
            assert {"split": split, "path": f"data/{split}-*.parquet"} in card["configs"][0]["data_files"]


@pytest.mark.slow
def test_four_shards_commit_to_one_hub_dataset_at_once_and_one_that_was_killed_goes_on(
    tmp_path: Path, stub: StubVllm
) -> None:
    with HubServer() as hub:
        table = seed_scans(hub, tmp_path, files=8, rows=4)
        hub.repo("me/scans").private = True
        words = ["me/scans", "me/text", "--block-rows", "4", "--num-shards", "4", "--shard-index"]
        # Of shard 2 (blocks 2 and 6) the last page hangs; what the Hub refuses for a while is tried again.
        stub.configure(faults=[f"hang,tag={tag_of(28)}"])
        hub.fail("POST", "/commit/", 412, times=2)
        hub.fail("POST", "/commit/", 429, times=1, retry_after=1)
        hub.fail("PUT", "/lfs/objects/", 503, times=2)
        homes = [machine(hub, tmp_path / f"home{index // 2}") for index in range(4)]  # two share a staging folder
        runs = [Running(*words_for(stub, *words, str(n)), env=homes[n], script=SATURATE) for n in range(4)]
        try:
            wait_until(lambda: [file.stem for file in staged(homes[2])] == ["letters-000002"], "a block is staged")
            ends = [runs[n].wait() for n in (0, 1, 3)]
            runs[2].signal(signal.SIGKILL)
            runs[2].wait()
        finally:
            for run in runs:
                run.__exit__()
        assert [end.code for end in ends] == [0, 0, 0], ends
        collected = blocks_on(hub, "me/text", "unfinished-letters")
        assert {int(name[-14:-8]) for name in collected} == {0, 1, 3, 4, 5, 7}
        assert set(hub.files("me/text")) == {".gitattributes"}, "readers see nothing yet"
        assert [file.name for file in staged(homes[2])] == ["letters-000002.parquet"]
        wait_until(lambda: stub.stats()["in_flight"] == 0, "the killed run's requests are gone")
        stub.reset()
        stub.configure(faults=[])
        ended = on_hub(stub, homes[2], *words, "2")
        assert ended.code == 0, ended
        assert stub.stats()["tags"] == {tag_of(number): 1 for number in range(25, 29)}
        assert ended.line["statuses"]["ok"] == 32
        assert not staged(homes[0]) + staged(homes[2])
        assert hub.repo("me/text").private
        assert [commit.title for commit in hub.commits("me/text")] == ["initial commit", "Text of split letters"]
        assert "refs/heads/unfinished-letters" not in hub.repo("me/text").refs
        assert_never_half(hub, "me/text", "letters")
        assert "32 rows: 32 ok" in hub.files("me/text")["README.md"].decode()
        out = download(hub, "me/text", tmp_path / "published")
        assert_input_is_kept(table.combine_chunks(), output_table(out, "letters"))
        assert_all_read(output_table(out, "letters"), range(1, 33))
        assert load(out, "letters")["id"][:] == list(range(1, 33))
        assert not hub.unknown


def test_a_run_that_is_terminated_commits_and_another_machine_goes_on_with_the_bytes_of_its_own_blocks_only(
    tmp_path: Path, stub: StubVllm
) -> None:
    with HubServer() as hub:
        table = seed_scans(hub, tmp_path, files=6, rows=4)
        words = ["me/scans", "me/text", "--block-rows", "4", "--max-in-flight", "4"]
        here, there = machine(hub, tmp_path / "here"), machine(hub, tmp_path / "there")
        stub.configure(faults=[f"hang,tag={tag_of(12)}"])
        with Running(*words_for(stub, *words), env=here, script=SATURATE) as run:
            wait_until(lambda: len(staged(here)) >= 2, "two blocks are closed")
            assert not hub.hub.repos.get(("dataset", "me/text")) or not blocks_on(hub, "me/text")
            run.signal(signal.SIGTERM)
            ended = run.wait()
        assert ended.code == 143, ended
        assert "SIGTERM" in ended.line["message"]
        before = blocks_on(hub, "me/text", "unfinished-letters")
        closed = {int(name[-14:-8]) for name in before}
        assert {0, 1} <= closed
        assert 2 not in closed
        assert not staged(here)
        assert not blocks_on(hub, "me/text")

        other = on_hub(stub, there, *words, "--max-tokens", "99")
        assert other.code == 2
        assert "max_tokens: was" in other.advice

        wait_until(lambda: stub.stats()["in_flight"] == 0, "the stopped run's requests are gone")
        stub.reset()
        stub.configure(faults=[])
        hub.bytes_served.clear()
        hub.fail("GET", "/data/letters-00004", 425)  # which the Hub's own client does not try again
        hub.fail("GET", "/data/letters-00005", 0)
        ended = on_hub(stub, there, *words)
        assert ended.code == 0, ended
        assert ended.line["rows_before"] == 4 * len(closed)
        assert "letters-00004-of-00006.parquet fails for now" in ended.stderr
        rest = {tag_of(number) for number in range(1, 25) if (number - 1) // 4 not in closed}
        assert set(stub.stats()["tags"]) == rest
        for number in range(6):
            served = hub.bytes_served[f"data/letters-{number:05d}-of-00006.parquet"]
            assert served < 80_000 if number in closed else 200_000 < served < 400_000, hub.bytes_served
        assert all(hub.bytes_served[name] < 140_000 for name in before if "000000" not in name), "the footers"
        assert before.items() <= blocks_on(hub, "me/text").items()
        assert_never_half(hub, "me/text", "letters")
        out = download(hub, "me/text", tmp_path / "published")
        assert_input_is_kept(table.combine_chunks(), output_table(out, "letters"))


@pytest.mark.slow
def test_a_hub_that_refuses_a_commit_costs_no_page_and_the_same_command_publishes_the_rest(
    tmp_path: Path, stub: StubVllm
) -> None:
    with HubServer() as hub:
        pages, env = write_pages(tmp_path / "pages.parquet", 12), machine(hub, tmp_path / "home")
        hub.put("me/text", "README.md", b"---\nlicense: cc0-1.0\n---\n\nOur letters.\n")
        words = [str(pages), "me/text", "--block-rows", "4", "--commit-minutes", "0", "--max-failure-rate", "0.2"]
        stub.configure(faults=[f"status=400,tag={tag_of(5)}"])
        hub.fail("POST", "/commit/", 403, times=1)
        failed = on_hub(stub, env, *words)
        assert failed.code == 1
        assert f"kept in {env['XDG_CACHE_HOME']}/lighton-ocr/me--text; the same command publishes it" in failed.advice
        assert "403" in failed.line["message"]
        assert len(hub.commits("me/text")) == 2
        asked = set(stub.stats()["tags"])
        kept = {int(file.stem[-6:]) for file in staged(env)}
        assert kept

        ended = on_hub(stub, env, *words)
        assert ended.code == 0, ended
        again = {tag: count for tag, count in stub.stats()["tags"].items() if count > 1}
        assert not {tag for tag in again if (int(tag, 16) - 1) // 4 in kept}, "a block that was kept is not asked again"
        assert len(asked) + ended.line["requests"] == sum(stub.stats()["tags"].values())
        assert not staged(env)
        assert ended.line["statuses"]["error"] == 1
        assert len(hub.commits("me/text")) == 2 + 1, "all blocks and the card"
        assert_never_half(hub, "me/text", "train")
        card = hub.files("me/text")["README.md"].decode()
        assert "Our letters." in card
        assert "license: cc0-1.0" in card
        assert "12 rows: 11 ok" in card

        before = blocks_on(hub, "me/text")
        stub.configure(faults=[])
        stub.reset()
        retried = on_hub(stub, machine(hub, tmp_path / "other"), *words, "--retry-failed")
        assert retried.code == 0, retried
        assert stub.stats()["tags"] == {tag_of(5): 1}
        after = blocks_on(hub, "me/text")
        assert [name for name in before if before[name] != after[name]] == ["data/train-000001.parquet"]
        assert retried.line["statuses"]["ok"] == 12
        assert "12 rows: 12 ok" in hub.files("me/text")["README.md"].decode()

        anew = on_hub(stub, env, *words, "--overwrite", "--block-rows", "6")
        assert anew.code == 0, anew
        assert sorted(blocks_on(hub, "me/text")) == ["data/train-000000.parquet", "data/train-000001.parquet"]
        assert_all_read(output_table(download(hub, "me/text", tmp_path / "published")), range(1, 13))


@pytest.mark.slow
def test_a_folder_of_pictures_on_the_hub_is_streamed_and_a_resumed_run_fetches_only_its_own(
    tmp_path: Path, stub: StubVllm
) -> None:
    with HubServer() as hub:
        for number in range(1, 10):
            hub.put("me/photos", f"page-{number:02d}.png", tagged_png(number))
        env, out = machine(hub, tmp_path / "home"), tmp_path / "out"
        words = ["me/photos", str(out), "--block-rows", "2"]
        ended = on_hub(stub, env, *words)
        assert ended.code == 0, ended
        assert ended.line["rows"] == 9
        assert stub.stats()["tags"] == {tag_of(number): 1 for number in range(1, 10)}
        table = output_table(out)
        assert table["image"].to_pylist() == [
            {"bytes": tagged_png(number), "path": f"page-{number:02d}.png"} for number in range(1, 10)
        ]
        assert not list((tmp_path / "home" / "hf").rglob("*.png")), "nothing was downloaded"
        block_files(out)[3].unlink()
        hub.bytes_served.clear()
        assert on_hub(stub, env, *words).code == 0
        assert {name for name, count in hub.bytes_served.items() if count} == {"page-07.png", "page-08.png"}
        assert output_table(out).equals(
            table.set_column(
                table.schema.names.index("inference_info"), "inference_info", output_table(out)["inference_info"]
            )
        )
