"""The flow of a run: rows → pages → an engine → blocks, with everything bounded.

Preparation runs ahead of the engine in as many threads as there are cores; so many pages and no more are with the
engine; so many blocks and no more are open. Memory does not grow with the dataset.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from .blocks import BlockFolder, BlockPlan, block_table, output_schema
from .errors import JobError
from .pages import Page, PageLimits, Refusal, make_page
from .report import Tally
from .result import PageResult, refused
from .source import Source

if TYPE_CHECKING:
    import pyarrow as pa

RequestT = TypeVar("RequestT")
OPEN_BLOCK_BYTES = 2 * 1024**3  # beyond this no further block is opened while another is open


class Engine(Protocol[RequestT]):
    """What answers pages. `encode` is work for a thread, `ask` waits for the answer and asks again where that may help.

    `watch` runs beside the pages and raises `EngineError` when the engine is gone.
    """

    def encode(self, page: Page, row: int) -> RequestT:
        """Make the request for the page in `row` of the split."""

    async def ask(self, request: RequestT, again: Callable[[], Awaitable[RequestT | Refusal]]) -> PageResult:
        """Return what became of the page."""

    def watch(self) -> Coroutine[Any, Any, None]:
        """Return never, or raise when the engine is gone."""


@dataclass(frozen=True)
class Job:
    """What a run has to do: from where, with what limits, to where."""

    source: Source
    plan: BlockPlan
    folder: BlockFolder
    limits: PageLimits
    output_column: str
    settings: Mapping[str, Any]
    info: Mapping[str, Any]
    concurrency: int

    def todo(self) -> list[int]:
        """Return the numbers of the blocks that are not there yet."""
        closed = self.folder.closed()
        return [number for number in range(len(self.plan)) if number not in closed]


@dataclass
class OpenBlock:
    """A block whose pages are under way."""

    number: int
    rows: pa.Table
    results: list[PageResult | None] = field(default_factory=list)

    def is_complete(self) -> bool:
        """Whether every row has its result."""
        return all(result is not None for result in self.results)


def count_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


async def run_job(job: Job, engine: Engine[RequestT], tally: Tally) -> None:
    """Ask about every page of every block that is not there yet; return when all blocks are written.

    Raises the first `JobError` of the engine, the source or the disk; blocks that were closed stay.
    """
    with ThreadPoolExecutor(count_cores(), thread_name_prefix="prepare") as pool:
        run = _Run(job, engine, tally, pool)
        try:
            await run.to_the_end()
        except* JobError as group:
            raise _first(group) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _first(group: BaseExceptionGroup[JobError]) -> JobError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, JobError)
    return error


class _Run(Generic[RequestT]):
    """One run of a job: the tasks and what bounds them."""

    def __init__(self, job: Job, engine: Engine[RequestT], tally: Tally, pool: ThreadPoolExecutor) -> None:
        self._job = job
        self._engine = engine
        self._tally = tally
        self._pool = pool
        self._schema = output_schema(job.source.rows.schema, job.output_column, job.settings)
        # A page holds its prepared form until it is sent: beside those in flight, two a core are ready or nearly so.
        self._rows_ahead = asyncio.Semaphore(job.concurrency + 2 * count_cores())
        self._in_flight = asyncio.Semaphore(job.concurrency)
        # A slow page keeps its block open: three more than the pages in flight can span may be open beside it.
        self._most_open = 3 + -(-job.concurrency // job.plan.block_rows)
        self._open: dict[int, int] = {}  # block → bytes
        self._closed_one = asyncio.Event()

    async def to_the_end(self) -> None:
        """Run all pages beside the engine's watch."""
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(self._engine.watch())
            async with asyncio.TaskGroup() as pages:
                for number in self._job.todo():
                    await self._room_for_a_block()
                    await self._open_block(number, pages)
            watch.cancel()

    async def _room_for_a_block(self) -> None:
        while len(self._open) >= self._most_open or (self._open and sum(self._open.values()) > OPEN_BLOCK_BYTES):
            self._closed_one.clear()
            await self._closed_one.wait()

    async def _open_block(self, number: int, pages: asyncio.TaskGroup) -> None:
        positions = self._job.plan.positions(number)
        rows = await asyncio.to_thread(self._job.source.read, positions)
        block = OpenBlock(number, rows, [None] * rows.num_rows)
        self._open[number] = rows.nbytes
        for index in range(rows.num_rows):
            await self._rows_ahead.acquire()
            pages.create_task(self._page(block, index, int(self._job.source.order[positions[index]])))

    async def _page(self, block: OpenBlock, index: int, row: int) -> None:
        async def prepare() -> RequestT | Refusal:
            return await asyncio.get_running_loop().run_in_executor(self._pool, self._prepare, block, index, row)

        try:
            request = await prepare()
            if isinstance(request, Refusal):
                result = refused(request.status, request.reason)
            else:
                async with self._in_flight:
                    with self._tally.asking():
                        result = await self._engine.ask(request, prepare)
        finally:
            self._rows_ahead.release()
        block.results[index] = result
        self._tally.count(result)
        if block.is_complete():
            await self._close(block)

    def _prepare(self, block: OpenBlock, index: int, row: int) -> RequestT | Refusal:
        cell = block.rows[self._job.source.image_column][index].as_py()
        page = make_page(cell, self._job.limits)
        return page if isinstance(page, Refusal) else self._engine.encode(page, row)

    async def _close(self, block: OpenBlock) -> None:
        await asyncio.to_thread(self._write, block)
        self._tally.blocks += 1
        del self._open[block.number]
        self._closed_one.set()

    def _write(self, block: OpenBlock) -> None:
        job = self._job
        results: Sequence[PageResult] = [result for result in block.results if result is not None]
        table = block_table(block.rows, results, self._schema, job.output_column, job.info)
        try:
            job.folder.write(block.number, table)
        except OSError as error:
            raise JobError(
                f"writing {job.folder.path(block.number)}: {error}; free some space and run again"
            ) from error
