"""A run, from options to exit code: what every script that makes text does around its engine."""

from __future__ import annotations

import datetime
import os
import shlex
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .blocks import BlockFolder, BlockPlan, check_columns, check_settings_are_ours, new_columns
from .errors import JobError, UsageError
from .flow import Job
from .interrupt import Interrupted, Interrupts
from .models import ModelProfile, find_profile, prompt_words
from .options import CommonOptions
from .pages import PageLimits
from .publish import (
    Output,
    check_hub,
    check_output_is_apart,
    choose_output,
    count_statuses,
    publish,
    write_card,
)
from .question import Question
from .report import Outcome, Tally, duration, say
from .source import Source, open_source


@dataclass
class Run:
    """One run of a script: what is known of it so far, for its last words."""

    script: str
    options: CommonOptions
    argv: Sequence[str]
    profile: ModelProfile
    question: Question
    output: Output
    engine: str | None = None
    source: Source | None = None
    plan: BlockPlan | None = None
    tally: Tally | None = None
    statuses: Counter[str] = field(default_factory=Counter)
    started: float = field(default_factory=time.monotonic)

    @property
    def folder(self) -> BlockFolder:
        """The blocks of this run's split."""
        assert self.plan is not None
        return BlockFolder(self.output.folder, self.plan.split)

    def command(self) -> str:
        """Return the command line, as people type it."""
        return shlex.join(["uv", "run", self.script, *self.argv])


def begin(script: str, options: CommonOptions, argv: Sequence[str], mode: str = "text") -> Run:
    """Check the options against each other and the model; nothing is opened yet."""
    if options.private and options.public:
        raise UsageError("--private and --public exclude each other; give one of them")
    if options.overwrite and options.resume:
        raise UsageError("--overwrite and --resume exclude each other; give one of them")
    _refuse_secrets(options)
    match = find_profile(options.model)
    profile = match.profile
    if match.how != "catalogue":
        say(f"{options.model}: {match}")
    sampling = profile.sampling
    question = Question(
        words=prompt_words(profile, mode),
        temperature=sampling.temperature if options.temperature is None else options.temperature,
        top_p=sampling.top_p if options.top_p is None else options.top_p,
        max_tokens=options.max_tokens or sampling.max_tokens,
        seed=options.seed,
        chat_template_kwargs=dict(profile.chat_template_kwargs),
    )
    output = choose_output(options.output, options.work_dir)
    check_output_is_apart(output, options.input)
    return Run(script, options, argv, profile, question, output)


def _refuse_secrets(options: CommonOptions) -> None:
    """Keys in the command line would end up in process lists, logs and the card."""
    for word in options.vllm_args:
        if word.split("=")[0] in {"--api-key", "--hf-token"}:
            raise UsageError(
                f"{word.split('=')[0]} does not belong on a command line: set HF_TOKEN in the environment; "
                "a server that we start is given a key of its own there"
            )


def preflight(run: Run) -> None:
    """Open the input and check the output before any GPU time; raise `UsageError` where the run could not end well."""
    options = run.options
    run.source = open_source(
        options.input,
        config=options.config,
        split=options.split,
        revision=options.revision,
        image_column=options.image_column,
        max_samples=options.max_samples,
        shuffle=options.shuffle,
        seed=options.seed,
    )
    run.plan = BlockPlan(run.source.split, len(run.source.order), options.block_rows)
    check_columns(run.source.rows.schema, options.output_column)
    settings = run_settings(run)
    if run.folder.closed() and not options.overwrite:
        check_settings_are_ours(str(run.output.folder), run.folder.stored_settings(), settings)
    check_hub(run.output, run.plan.split, settings, overwrite=options.overwrite)
    say(f"{options.input}: {run.plan.num_rows} rows of split {run.plan.split!r} → {run.output}")


def run_settings(run: Run) -> dict[str, Any]:
    """Return all that decides what the blocks hold: a resumed run must have the same."""
    assert run.source is not None
    assert run.plan is not None
    options, question = run.options, run.question
    return {
        "input": run.source.fingerprint,
        "config": options.config,
        "split": run.plan.split,
        "image_column": run.source.image_column,
        "rows": run.plan.num_rows,
        "shuffle_seed": options.seed if options.shuffle else None,
        "block_rows": options.block_rows,
        "output_column": options.output_column,
        "model": options.model,
        "model_revision": options.model_revision,
        "prompt": question.words,
        "temperature": question.temperature,
        "top_p": question.top_p,
        "max_tokens": question.max_tokens,
        "seed": question.seed,
        "longest_edge_px": run.profile.longest_edge_px,
    }


def run_info(run: Run) -> dict[str, Any]:
    """Return this run's entry in `inference_info`."""
    options, question = run.options, run.question
    return {
        "column": options.output_column,
        "model": options.model,
        "model_revision": options.model_revision,
        "engine": run.engine,
        "script": run.script,
        "prompt": question.words,
        "temperature": question.temperature,
        "top_p": question.top_p,
        "max_tokens": question.max_tokens,
        "seed": question.seed,
        "longest_edge_px": run.profile.longest_edge_px,
        "flavor": os.environ.get("ACCELERATOR"),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def hosted_command(run: Run, image: str, otherwise: str) -> str:
    """Return how to run the same job on a hosted GPU, and `otherwise` what else could be done."""
    words = ["hf", "jobs", "uv", "run", "--image", image, "--flavor", "l4x1", "-s", "HF_TOKEN", "--timeout", "4h"]
    return (
        f"On a hosted GPU:\n\n    {shlex.join([*words, 'SCRIPT_URL', *run.argv])}\n\n"
        f"(SCRIPT_URL: the address of {run.script}, or its path here; input and output must be Hub datasets there.)\n"
        f"{otherwise}"
    )


def engine_args(run: Run) -> tuple[str, ...]:
    """Return the engine's arguments, as `vllm serve` takes them: the profile's, then the user's; the last one wins."""
    options = run.options
    named = {
        "--revision": options.model_revision,
        "--max-model-len": options.max_model_len,
        "--gpu-memory-utilization": options.gpu_memory_utilization,
    }
    words = [word for flag, value in named.items() if value is not None for word in (flag, str(value))]
    return (*run.profile.serve_args, *words, *options.vllm_args)


def make_job(run: Run, concurrency: int) -> Job:
    """Return what has to be done, and start counting."""
    assert run.source is not None
    assert run.plan is not None
    job = Job(
        source=run.source,
        plan=run.plan,
        folder=run.folder,
        limits=PageLimits(run.profile.longest_edge_px),
        output_column=run.options.output_column,
        settings=run_settings(run),
        info=run_info(run),
        concurrency=concurrency,
    )
    todo = job.todo()
    rows_before = run.plan.num_rows - sum(len(run.plan.positions(number)) for number in todo)
    run.tally = Tally(run.plan.num_rows, rows_before, verbose=run.options.verbose)
    if rows_before:
        say(f"{rows_before} rows are in closed blocks already; {len(todo)} of {len(run.plan)} blocks are left")
    return job


def is_complete(run: Run) -> bool:
    """Whether every block is there."""
    assert run.plan is not None
    return len(run.folder.closed()) >= len(run.plan)


def take_stock(run: Run) -> None:
    """Count what the closed blocks hold and write the card: at the end, whatever the end was."""
    if run.plan is None or not run.folder.closed():
        return
    run.statuses = count_statuses(run.folder, run.options.output_column)
    speed = f"{run.tally.pages_per_s():.2f} pages/s in the last run" if run.tally and run.tally.done else None
    info = {key: value for key, value in run_info(run).items() if key not in {"column", "script"}}
    write_card(
        run.output,
        # a local path says nothing to others
        input_name=Path(run.options.input).name if run.source and run.source.roots else run.options.input,
        plan=run.plan,
        statuses=run.statuses,
        facts={**info, "speed": speed},
        command=run.command(),
    )


def finish(run: Run) -> None:
    """Publish where that is asked for; show pages; raise `JobError` where too many pages failed."""
    assert run.plan is not None
    assert run.source is not None
    if run.output.repo_id:
        private = run.options.private or (run.source.is_private and not run.options.public)
        where = publish(run.output, run.plan.split, private=private, overwrite=run.options.overwrite)
        say(f"published: {where}")
    for title, text in first_texts(run, run.options.show):
        say(f"\n── {title} ──\n{text}")
    column = run.options.output_column
    failed = sum(count for status, count in run.statuses.items() if status not in {"ok", "blank"})
    share = failed / run.plan.num_rows
    if share > run.options.max_failure_rate:
        raise JobError(
            f"{failed} of {run.plan.num_rows} pages failed ({share:.1%}; --max-failure-rate is "
            f"{run.options.max_failure_rate:.1%}). All rows are written: see {column}_status and {column}_error"
        )


def first_texts(run: Run, count: int) -> list[tuple[str, str]]:
    """Return (title, text) of the first `count` pages of the output."""
    import pyarrow.parquet as pq

    assert run.source is not None
    text, status, error, _ = new_columns(run.options.output_column)
    shown: list[tuple[str, str]] = []
    for number in sorted(run.folder.closed()):
        if len(shown) >= count:
            break
        table = pq.read_table(run.folder.path(number), columns=[run.source.image_column, text, status, error])
        for row in table.slice(0, count - len(shown)).to_pylist():
            cell = row[run.source.image_column]
            name = (cell.get("path") if isinstance(cell, dict) else None) or f"page {len(shown)}"
            shown.append((f"{name} ({row[status]})", row[text] or row[error] or ""))
    return shown


def carry_out(run: Run, ask_all: Callable[[Run, ExitStack, Interrupts], None]) -> int:
    """Check, ask about every page, take stock, publish; whatever happens, say so and return the exit code.

    `ask_all` writes the blocks that are missing. It gets a stack to put its engine on: what is on it is closed on every
    way out.
    """
    # A corrupt EXIF block is worth no line on stderr; a picture that can't be read is refused by name.
    warnings.filterwarnings("ignore", module="PIL")
    interrupts = Interrupts()
    message, code = "done", 0
    with interrupts.caught():
        try:
            preflight(run)
            with run.folder.locked():
                if run.options.overwrite:
                    run.folder.remove_all()
                try:
                    if not is_complete(run):
                        with ExitStack() as stack:
                            ask_all(run, stack, interrupts)
                finally:
                    take_stock(run)
                finish(run)
        except Interrupted as stop:
            message, code = f"{stop}; closed blocks are kept, the same command goes on", stop.exit_code
        except JobError as error:
            message, code = str(error), error.exit_code
            if interrupts.number:  # what else went wrong then is its consequence
                message, code = f"{Interrupted(interrupts.number)}; {error}", 128 + interrupts.number
        except Exception as error:
            say_end(run, 1, f"{type(error).__name__}: {error}")
            raise
        if code:
            say(f"{run.script}: {message}")
        say_end(run, code, message)
    return code


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
    sys.stdout.write(outcome.json_line() + "\n")
    sys.stdout.flush()
    return error.exit_code


def say_end(run: Run, code: int, message: str) -> None:
    """Write the last line for people, and the JSON line for programs."""
    if run.tally and run.tally.done:
        counts = ", ".join(f"{count} {status}" for status, count in sorted(run.statuses.items()))
        took = duration(time.monotonic() - run.started)
        say(f"{run.tally.line()}; after {took}; in the output: {counts or 'nothing yet'}")
    outcome = Outcome(
        input=run.options.input,
        output=str(run.output),
        split=run.plan.split if run.plan else None,
        model=run.options.model,
        engine=run.engine,
        exit_code=code,
        message=message,
        seconds=time.monotonic() - run.started,
        tally=run.tally,
        statuses=run.statuses,
    )
    sys.stdout.write(outcome.json_line() + "\n")
    sys.stdout.flush()
