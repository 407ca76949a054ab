"""The flow of a run: rows → pages → an engine → blocks, with everything bounded.

Preparation runs ahead of the engine in as many threads as there are cores; so many pages and no more are with the
engine; so many blocks and no more are open. Memory does not grow with the dataset.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from .blocks import BlockPlan, Blocks, KeptRow, block_table, kept_rows, output_schema
from .errors import JobError
from .pages import Page, PageLimits, Refusal, make_page
from .report import Tally
from .result import PageResult, refused
from .source import Source
from .window import Window

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
    """What a run has to do: from where, with what limits, to where.

    `todo` has the numbers of the blocks to write. One that is there already is written anew: its failed rows are asked
    about again, the others stay as they are.
    """

    source: Source
    plan: BlockPlan
    blocks: Blocks
    todo: Sequence[int]
    limits: PageLimits
    output_column: str
    settings: Mapping[str, Any]
    info: Mapping[str, Any]
    results_only: bool = False

    def schema(self) -> pa.Schema:
        """Return the schema of a block."""
        without = self.source.image_column if self.results_only else None
        return output_schema(self.source.rows.schema, self.output_column, self.settings, without=without)


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
    with ThreadPoolExecutor(count_cores(), thread_name_prefix="prepare") as pool:
        run = _Run(job, engine, tally, window, pool)
        try:
            await run.to_the_end()
        except* JobError as group:
            raise _first(group) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
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
        self, job: Job, engine: Engine[RequestT], tally: Tally, window: Window, pool: ThreadPoolExecutor
    ) -> None:
        self._job = job
        self._engine = engine
        self._tally = tally
        self._pool = pool
        self._schema = job.schema()
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
            kept = kept_rows(job.blocks, number, job.output_column)
        return OpenBlock(
            number,
            job.source.order[positions.start : positions.stop],
            rows,
            results=[row.result if row else None for row in kept],
            kept_info=[row.info if row else None for row in kept],
            missing=sum(row is None for row in kept),
        )

    async def _page(self, block: OpenBlock, index: int) -> None:
        async def prepare() -> RequestT | Refusal:
            self._tally.preparing += 1
            try:
                return await asyncio.get_running_loop().run_in_executor(self._pool, self._prepare, block, index)
            finally:
                self._tally.preparing -= 1

        try:
            request = await prepare()
            if isinstance(request, Refusal):
                result = refused(request.status, request.reason)
            else:
                result = await self._ask(request, prepare)
        finally:
            self._window.ahead.leave()
        self._tally.count(result)
        if block.put(index, result):
            await self._close(block)

    async def _ask(self, request: RequestT, again: Callable[[], Awaitable[RequestT | Refusal]]) -> PageResult:
        since = await self._window.acquire()
        result = None
        try:
            with self._tally.asking():
                result = await self._engine.ask(request, again)
            return result
        finally:
            answered = result is not None and result.status != "error"
            self._window.release(since, answered, (result.tokens if result else None) or 0)

    def _prepare(self, block: OpenBlock, index: int) -> RequestT | Refusal:
        cell = block.rows[self._job.source.image_column][index].as_py()
        page = make_page(cell, self._job.limits)
        return page if isinstance(page, Refusal) else self._engine.encode(page, int(block.addresses[index]))

    async def _close(self, block: OpenBlock) -> None:
        await asyncio.to_thread(self._write, block)
        self._tally.blocks += 1
        del self._open[block.number]
        self._closed_one.set()

    def _write(self, block: OpenBlock) -> None:
        job = self._job
        results: Sequence[PageResult] = [result for result in block.results if result is not None]
        table = block_table(
            block.rows,
            results,
            self._schema,
            job.output_column,
            job.info,
            addresses=block.addresses,
            kept_info=block.kept_info,
        )
        try:
            job.blocks.write(block.number, table)
        except OSError as error:
            raise JobError(
                f"writing {job.blocks.where(block.number)}: {error}; free some space and run again"
            ) from error
