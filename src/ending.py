"""How a run ends: what is in the output is counted, the card written, the blocks published, the exit code found."""

from __future__ import annotations

import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from .blocks import Whole, count_statuses
from .card import CardContents, card_text, write_card
from .columns import new_columns
from .errors import JobError, UsageError
from .flow import write_without_pages
from .hosted import find_runner
from .interrupt import Interrupted, Interrupts
from .job import Run, input_name, make_job, run_info, schema_of, start_counting
from .options import CommonOptions
from .preflight import preflight
from .report import Outcome, duration, say, say_to_programs
from .result import SOUND

AskAll = Callable[[Run, Sequence[int], ExitStack, Interrupts], None]


def carry_out(run: Run, ask_all: AskAll) -> int:
    """Check, ask about every page, take stock, publish; whatever happens, say so and return the exit code.

    `ask_all` writes the blocks whose numbers it is given. It gets a stack to put its engine on: what is on it is closed
    on every way out.
    """
    # A corrupt EXIF block is worth no line on stderr; a picture that can't be read is refused by name.
    warnings.filterwarnings("ignore", module="PIL")
    interrupts = Interrupts()
    message, code = "done", 0
    with interrupts.caught():
        try:
            preflight(run)
            try:
                _write_blocks(run, ask_all, interrupts)
            finally:
                take_stock(run)
            finish(run)
        except Interrupted as stop:
            message, code = f"{stop}; closed blocks are kept, the same command goes on", stop.exit_code
        except JobError as error:
            message, code = str(error), error.exit_code
            if interrupts.number:  # what else went wrong then is its consequence
                message, code = f"{Interrupted(interrupts.number)}; {error}", 128 + interrupts.number
        except ModuleNotFoundError as error:
            return refuse(run.script, run.options, no_module(error, run.script))
        except Exception as error:
            say_end(run, 1, f"{type(error).__name__}: {error}")
            raise
        if code and run.options.overwrite:
            message += " (without --overwrite, which starts anew)"
        if code:
            say(f"{run.script}: {message}")
        say_end(run, code, message)
    return code


def _write_blocks(run: Run, ask_all: AskAll, interrupts: Interrupts) -> None:
    with run.at.blocks.locked():
        if run.options.overwrite:
            run.at.blocks.remove_all()
        todo = [] if run.way.finishes else run.todo()
        if todo:
            run.runner = find_runner(os.environ, run.options.dollars_per_hour, run.started)
        start_counting(run, todo)
        run.at.blocks.get_ready(to_write=bool(todo))
        if not todo and not run.way.finishes:
            say("nothing is left to ask: all blocks are there (--overwrite starts anew)")
        if todo and not run.at.plan.num_rows:
            write_without_pages(make_job(run, todo))
        elif todo:
            with ExitStack() as stack:
                ask_all(run, todo, stack, interrupts)
    missing = run.missing() if run.way.finishes else []
    if missing:
        few = ", ".join(map(str, missing[:5])) + (", …" if len(missing) > 5 else "")
        raise UsageError(
            f"--finish: {len(missing)} of {len(run.at.plan)} blocks are not there ({few}); run without it first"
        )


def take_stock(run: Run) -> None:
    """Count what the closed blocks hold, whatever the end was, and write the card of a local output.

    Of an output on the Hub, or of a run that is one shard of several, that is done once all blocks are there; until
    then its own pages are counted.
    """
    at = run.at
    on_hub = run.output.on_hub is not None
    if on_hub or run.way.shard.count > 1 or run.way.finishes:
        run.missing_blocks = run.missing()
        if at.blocks.unpublished() or run.missing_blocks:
            run.statuses = Counter(run.tally.statuses if run.tally else {})
            return
    closed = at.blocks.closed()
    if not closed:
        return
    run.statuses = count_statuses(at.blocks, sorted(closed), run.options.output_column)
    if not on_hub:
        write_card(run.output.folder, card_contents(run))


def card_contents(run: Run) -> CardContents:
    """Return what the card says of this run."""
    counted = run.tally if run.tally and run.tally.done else None
    info = {key: value for key, value in run_info(run).items() if key not in {"column", "script"}}
    speed = f"{counted.pages_per_s():.2f} pages/s in the last run" if counted else None
    cost = run.runner.cost(counted.pages_per_s()) if counted else None
    return CardContents(
        input_name(run, run.at.source),
        run.at.plan,
        run.statuses,
        {**info, "speed": speed, "cost": cost},
        run.command(),
        tags=[Path(run.options.model).name, *(["hf-jobs"] if "JOB_ID" in os.environ else [])],
    )


def finish(run: Run) -> None:
    """Publish where that is asked for; show pages; raise `JobError` where too many pages failed."""
    publish_whole(run)
    for title, text in first_texts(run, run.options.show):
        say(f"\n── {title} ──\n{text}")
    column = run.options.output_column
    failed = sum(count for status, count in run.statuses.items() if status not in SOUND)
    share = failed / max(1, run.statuses.total())
    if share > run.options.max_failure_rate:
        raise JobError(
            f"{failed} of {run.statuses.total()} pages failed ({share:.1%}; --max-failure-rate is "
            f"{run.options.max_failure_rate:.1%}). All rows are written: see {column}_status and {column}_error"
        )


def publish_whole(run: Run) -> None:
    """Publish the split where all its blocks are there; else say where they are collected."""
    blocks, plan = run.at.blocks, run.at.plan
    if run.missing_blocks:
        say(
            f"{len(run.missing_blocks)} of {len(plan)} blocks are not there yet; the others are collected in "
            f"{blocks.collected()}, and whoever closes the last one publishes all"
        )
        return
    contents = card_contents(run)
    whole = Whole(
        plan,
        run.statuses.total(),
        schema_of(run),
        card=lambda earlier, written: card_text(earlier, contents, written),
        text_columns=new_columns(run.options.output_column),
        insists=run.way.finishes or bool(run.tally and run.tally.done),
    )
    where = blocks.publish(whole)
    if where:
        say(f"published: {where}")


def first_texts(run: Run, count: int) -> list[tuple[str, str]]:
    """Return (title, text) of the first `count` pages of the output."""
    text, status, error, _ = new_columns(run.options.output_column)
    image = None if run.way.results_only else run.at.source.image_column
    shown: list[tuple[str, str]] = []
    for number in sorted(run.at.blocks.closed()):
        if len(shown) >= count:
            break
        table = run.at.blocks.read(number, [text, status, error, *([image] if image else [])])
        for row in table.slice(0, count - len(shown)).to_pylist():
            cell = row.get(image)
            name = (cell.get("path") if isinstance(cell, dict) else None) or f"page {len(shown)}"
            shown.append((f"{name} ({row[status]})", row[text] or row[error] or ""))
    return shown


def no_module(error: ModuleNotFoundError, script: str) -> UsageError:
    """Say what to do where the script runs without what its header names."""
    return UsageError(f"there is no module {error.name!r} here; `uv run {script} …` brings what the script needs")


def refuse(script: str, options: CommonOptions, error: JobError) -> int:
    """Say, to people and to programs, why a run did not begin; return the exit code."""
    say(f"{script}: {error}")
    outcome = Outcome(
        input=options.input,
        output=options.output,
        split=None,
        model=options.model,
        engine=None,
        exit_code=error.exit_code,
        message=str(error),
        seconds=0.0,
        tally=None,
        statuses={},
    )
    say_to_programs(outcome.json_line())
    return error.exit_code


def say_end(run: Run, code: int, message: str) -> None:
    """Write the last line for people, and the JSON line for programs."""
    if run.tally and run.tally.done:
        counts = ", ".join(f"{count} {status}" for status, count in sorted(run.statuses.items()))
        took = duration(time.monotonic() - run.started)
        say(f"{run.tally.line()}; after {took}; in the output: {counts or 'nothing yet'}{run.tally.remarks()}")
    outcome = Outcome(
        input=run.options.input,
        output=str(run.output),
        split=run.opened.source.split if run.opened else None,
        model=run.options.model,
        engine=run.engine,
        exit_code=code,
        message=message,
        seconds=time.monotonic() - run.started,
        tally=run.tally,
        statuses=run.statuses,
        flavor=run.runner.flavor,
    )
    say_to_programs(outcome.json_line())
