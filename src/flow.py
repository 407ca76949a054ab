"""The flow of a run: rows → pages → an engine → blocks, with everything bounded.

Preparation runs ahead of the engine in as many threads as there are cores; so many pages and no more are with the
engine; so many blocks and no more are open. Memory does not grow with the dataset.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic

from .blocks import BlockPlan, Blocks
from .columns import NO_EXTRAS, Extras, KeptRow, block_table, kept_rows, output_schema
from .errors import JobError
from .reader import Engine, Reader, Reading, RequestT
from .report import Tally
from .result import PageResult
from .source import Source
from .threads import Threads
from .window import Window

if TYPE_CHECKING:
    import pyarrow as pa

OPEN_BLOCK_BYTES = 2 * 1024**3  # beyond this no further block is opened while another is open


@dataclass(frozen=True)
class Job:
    """What a run has to do: from where, with what limits, to where.

    `todo` has the numbers of the blocks to write. One that is there already is written anew: its failed rows are asked
    about again, the others stay as they are.
    """

    source: Source
    plan: BlockPlan
    blocks: Blocks
    todo: Sequence[int]
    reading: Reading
    output_column: str
    settings: Mapping[str, Any]
    info: Mapping[str, Any]
    results_only: bool = False
    extras: Extras = NO_EXTRAS

    def schema(self) -> pa.Schema:
        """Return the schema of a block."""
        without = self.source.image_column if self.results_only else None
        schema = self.source.rows.schema
        return output_schema(schema, self.output_column, self.settings, without=without, extras=self.extras)


@dataclass
class OpenBlock:
    """A block whose pages are under way: `results` has one place a row, `missing` counts those still empty."""

    number: int
    addresses: Sequence[int]
    rows: pa.Table
    results: list[PageResult | None]
    kept_info: list[str | None]
    missing: int

    def put(self, index: int, result: PageResult) -> bool:
        """Put the result of a row in its place; return whether it was the last one."""
        self.results[index] = result
        self.missing -= 1
        return self.missing == 0


def count_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


async def run_job(job: Job, engine: Engine[RequestT], tally: Tally, window: Window) -> None:
    """Ask about every page of the job's blocks, as many at once as the window has places; return when all are written.

    Raises the first `JobError` of the engine, the source or the disk; blocks that were closed stay.
    """
    threads = Threads(count_cores(), job.reading.page_timeout_s)
    run = _Run(job, engine, tally, window, Reader(job.reading, engine, tally, window, threads))
    try:
        await run.to_the_end()
    except* JobError as group:
        raise _first(group) from None
    finally:
        threads.close()
        job.source.patience.hurry(0.0)  # or the end would wait for a Hub that is away


def _first(group: BaseExceptionGroup[JobError]) -> JobError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, JobError)
    return error


class _Run(Generic[RequestT]):
    """One run of a job: the tasks and what bounds them."""

    def __init__(
        self, job: Job, engine: Engine[RequestT], tally: Tally, window: Window, reader: Reader[RequestT]
    ) -> None:
        self._job = job
        self._engine = engine
        self._tally = tally
        self._reader = reader
        self._closed = job.blocks.closed()
        self._window = window
        self._open: dict[int, int] = {}  # block → bytes
        self._closed_one = asyncio.Event()

    async def to_the_end(self) -> None:
        """Run all pages beside the engine's watch."""
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(self._engine.watch())
            async with asyncio.TaskGroup() as pages:
                for number in self._job.todo:
                    await self._room_for_a_block()
                    await self._open_block(number, pages)
            watch.cancel()

    async def _room_for_a_block(self) -> None:
        # A slow page keeps its block open: three more than the pages in flight can span may be open beside it.
        block_rows = self._job.plan.block_rows
        while len(self._open) >= 3 + -(-self._window.limit // block_rows) or (
            self._open and sum(self._open.values()) > OPEN_BLOCK_BYTES
        ):
            self._closed_one.clear()
            with contextlib.suppress(TimeoutError):  # the window may have grown meanwhile
                async with asyncio.timeout(1.0):  # `wait_for` may swallow a cancellation before Python 3.12
                    await self._closed_one.wait()

    async def _open_block(self, number: int, pages: asyncio.TaskGroup) -> None:
        block = await asyncio.to_thread(self._read, number)
        self._open[number] = block.rows.nbytes
        if not block.missing:
            await self._close(block)
            return
        for index in [index for index, result in enumerate(block.results) if result is None]:
            await self._window.ahead.enter()
            await asyncio.sleep(0)  # a group that ends cancels us here, and not by an error of its own
            pages.create_task(self._page(block, index))

    def _read(self, number: int) -> OpenBlock:
        job = self._job
        positions = job.plan.positions(number)
        rows = job.source.read(positions)
        kept: Sequence[KeptRow | None] = [None] * rows.num_rows
        if number in self._closed:
            kept = kept_rows(job.blocks, number, job.output_column, job.extras)
        return OpenBlock(
            number,
            job.source.order[positions.start : positions.stop],
            rows,
            results=[row.result if row else None for row in kept],
            kept_info=[row.info if row else None for row in kept],
            missing=sum(row is None for row in kept),
        )

    async def _page(self, block: OpenBlock, index: int) -> None:
        def cell() -> object:
            return block.rows[self._job.source.image_column][index].as_py()

        try:
            result = await self._reader.read(cell, int(block.addresses[index]))
        finally:
            self._window.ahead.leave()
        self._tally.count(result)
        if block.put(index, result):
            await self._close(block)

    async def _close(self, block: OpenBlock) -> None:
        await asyncio.to_thread(write_block, self._job, block)
        self._tally.blocks += 1
        del self._open[block.number]
        self._closed_one.set()


def write_block(job: Job, block: OpenBlock) -> None:
    """Write a block of which all results are there."""
    results: Sequence[PageResult] = [result for result in block.results if result is not None]
    table = block_table(
        block.rows,
        results,
        job.schema(),
        job.output_column,
        job.info,
        addresses=block.addresses,
        kept_info=block.kept_info,
        extras=job.extras,
    )
    try:
        job.blocks.write(block.number, table)
    except OSError as error:
        raise JobError(f"writing {job.blocks.where(block.number)}: {error}; free some space and run again") from error


def write_without_pages(job: Job) -> None:
    """Write the one block of a split without rows: that needs no engine."""
    rows = job.source.read(range(0))
    write_block(job, OpenBlock(0, (), rows, results=[], kept_info=[], missing=0))
