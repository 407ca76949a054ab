"""The flow of a run, in process: a fake engine that fails, dawdles and refuses in any order."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from src.blocks import BlockFolder, BlockPlan, Target
from src.errors import EngineError, JobError, SourceError
from src.flow import Job, run_job
from src.pages import Page, PageLimits, Refusal
from src.question import Attempt, Question
from src.reader import Reading
from src.report import Tally
from src.result import PageResult
from src.source import Source
from src.window import fixed_window
from tests.stub_vllm import tagged_png

PNG = tagged_png(0)
QUESTION = Question("", 0.2, 0.9, 100, 7, {})


@dataclass
class TableRows:
    """Rows of a table in memory; `reads` says which addresses were asked for."""

    table: pa.Table
    reads: list[list[int]] = field(default_factory=list)
    fails_at: int | None = None

    def __post_init__(self) -> None:
        self.schema = self.table.schema
        self.num_rows = self.table.num_rows

    def read(self, addresses: Sequence[int]) -> pa.Table:
        self.reads.append(list(addresses))
        if self.fails_at in addresses:
            raise SourceError("the disk is gone; run again to resume")
        return self.table.take(list(addresses))


@dataclass
class FakeEngine:
    """Answers row n with `plan[n]`: a status, "raise" for a fault of the engine; after `steps` turns of the loop."""

    plan: dict[int, str] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)
    asked: list[int] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0

    def encode(self, page: Page, row: int, attempt: Attempt | None = None) -> int:
        return row

    async def ask(self, request: int, again: Callable[[], Awaitable[int | Refusal]]) -> PageResult:
        self.asked.append(request)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        for _ in range(self.steps.get(request, 0)):
            await asyncio.sleep(0)
        self.in_flight -= 1
        status = self.plan.get(request, "ok")
        if status == "raise":
            raise EngineError("the engine is gone; look at it")
        return PageResult(None if status == "error" else f"text of {request}", status, attempts=1, tokens=request)

    async def watch(self) -> None:
        await asyncio.Event().wait()


def pages(count: int, broken: set[int] = frozenset()) -> pa.Table:  # type: ignore[assignment]
    cells = [b"no picture" if index in broken else PNG for index in range(count)]
    return pa.table({"id": list(range(count)), "image": pa.array(cells, pa.binary())})


def job_of(rows: TableRows, output: Path, *, block_rows: int, order: Sequence[int] | None = None) -> Job:
    chosen = range(rows.num_rows) if order is None else order
    return Job(
        source=Source("here", "train", "image", rows, chosen, "fp", is_private=True),
        plan=BlockPlan(Target("train"), len(chosen), block_rows),
        blocks=BlockFolder(output, Target("train")),
        todo=(),
        reading=Reading(PageLimits(1540), QUESTION),
        output_column="markdown",
        settings={},
        info={},
    )


def run(job: Job, engine: FakeEngine, concurrency: int = 4) -> Tally:
    tally = Tally(job.plan.num_rows)
    missing = [number for number in range(len(job.plan)) if number not in job.blocks.closed()]
    job = replace(job, todo=missing)

    async def ask_all() -> None:
        await run_job(job, engine, tally, fixed_window(concurrency, ahead=2))

    with job.blocks.locked():
        asyncio.run(ask_all())
    return tally


def output_of(job: Job) -> list[dict[str, Any]]:
    tables = [pq.read_table(job.blocks.where(number)) for number in sorted(job.blocks.closed())]
    return [row for table in tables for row in table.to_pylist()]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_whatever_fails_when_each_row_is_there_once_in_order_with_its_input_unchanged(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 40), "rows")
    rows_at = st.integers(0, count - 1)
    statuses = data.draw(st.dictionaries(rows_at, st.sampled_from(["error", "truncated", "repetition"])), "answers")
    steps = data.draw(st.dictionaries(rows_at, st.integers(0, 30)), "delays")
    broken = data.draw(st.sets(rows_at), "broken pictures")
    falls = data.draw(st.lists(rows_at, max_size=3), "rows at which the engine falls, one run each")
    rows = TableRows(pages(count, broken))
    concurrency, block_rows = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 12))
    with tempfile.TemporaryDirectory() as folder:
        job = job_of(rows, Path(folder), block_rows=block_rows)
        for fall in falls:
            closed = job.blocks.closed()
            engine = FakeEngine({**statuses, fall: "raise"}, steps)
            try:
                run(job, engine, concurrency)
            except EngineError:
                assert fall not in broken
            assert job.blocks.closed() >= closed
        engine = FakeEngine(statuses, steps)
        before = job.blocks.closed()
        run(job, engine, concurrency)
        assert engine.most_in_flight <= concurrency
        assert len(engine.asked) == len(set(engine.asked))
        assert not [row for row in engine.asked if row // block_rows in before]
        output = output_of(job)
    assert [row["id"] for row in output] == list(range(count))
    assert [row["image"] for row in output] == rows.table["image"].to_pylist()
    for index, row in enumerate(output):
        assert row["markdown_status"] == ("error" if index in broken else statuses.get(index, "ok"))
        assert (row["markdown"] is None) == (row["markdown_status"] == "error")
        if row["markdown"] is not None:
            assert row["markdown"] == f"text of {index}"


def test_a_fault_of_the_engine_ends_the_run_and_closed_blocks_stay(tmp_path: Path) -> None:
    job = job_of(TableRows(pages(30)), tmp_path, block_rows=5)
    with pytest.raises(EngineError, match="the engine is gone"):
        run(job, FakeEngine({22: "raise"}, dict.fromkeys(range(30), 1)))
    assert 0 in job.blocks.closed()
    assert 4 not in job.blocks.closed()


def test_a_source_that_fails_in_mid_run_ends_it_with_its_own_error(tmp_path: Path) -> None:
    job = job_of(TableRows(pages(30), fails_at=17), tmp_path, block_rows=5)
    with pytest.raises(SourceError, match="the disk is gone"):
        run(job, FakeEngine())


def test_a_disk_that_is_full_is_told_with_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(TableRows(pages(3)), tmp_path, block_rows=5)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(BlockFolder, "write", full)
    with pytest.raises(JobError, match=r"train-000000\.parquet.*No space left.*run again"):
        run(job, FakeEngine())


def test_an_engine_whose_watch_raises_ends_the_run(tmp_path: Path) -> None:
    class Watched(FakeEngine):
        async def watch(self) -> None:
            raise EngineError("the server ended by itself")

    engine = Watched(steps={0: 10**9})
    with pytest.raises(EngineError, match="ended by itself"):
        run(job_of(TableRows(pages(3)), tmp_path, block_rows=5), engine)


def test_closed_blocks_are_not_even_read(tmp_path: Path) -> None:
    rows = TableRows(pages(20))
    job = job_of(rows, tmp_path, block_rows=5)
    run(job, FakeEngine())
    Path(job.blocks.where(2)).unlink()
    rows.reads.clear()
    engine = FakeEngine()
    run(job, engine)
    assert rows.reads == [[10, 11, 12, 13, 14]]
    assert sorted(engine.asked) == [10, 11, 12, 13, 14]


def test_one_slow_page_does_not_open_blocks_without_end(tmp_path: Path) -> None:
    rows = TableRows(pages(200))
    job = job_of(rows, tmp_path, block_rows=4)
    engine = FakeEngine(steps={0: 3000})
    open_at_most = 0
    written = BlockFolder.write

    def write(self: BlockFolder, number: int, table: pa.Table) -> None:
        nonlocal open_at_most
        open_at_most = max(open_at_most, len(rows.reads) - len(self.closed()))
        written(self, number, table)

    BlockFolder.write = write  # type: ignore[method-assign]
    try:
        run(job, engine)
    finally:
        BlockFolder.write = written  # type: ignore[method-assign]
    assert open_at_most <= 3 + 1 + 1
    assert [row["id"] for row in output_of(job)] == list(range(200))


def test_a_shuffled_run_keeps_its_own_order_and_asks_by_address(tmp_path: Path) -> None:
    order = [7, 3, 9, 1]
    job = job_of(TableRows(pages(10)), tmp_path, block_rows=3, order=order)
    engine = FakeEngine()
    run(job, engine)
    assert [row["id"] for row in output_of(job)] == order
    assert [row["markdown"] for row in output_of(job)] == [f"text of {row}" for row in order]


def test_the_tally_counts_what_happened(tmp_path: Path) -> None:
    job = job_of(TableRows(pages(10, broken={4})), tmp_path, block_rows=4)
    tally = run(job, FakeEngine({2: "truncated"}))
    assert (tally.done, tally.failed, tally.requests, tally.blocks) == (10, 2, 9, 3)
    assert dict(tally.statuses) == {"ok": 8, "truncated": 1, "error": 1}
    assert tally.tokens == sum(range(10)) - 4
