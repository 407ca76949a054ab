"""A run: what the options ask for, and what then has to be done."""

from __future__ import annotations

import datetime
import os
import shlex
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .blocks import DEFAULT_FOLDER, BlockFolder, BlockPlan, Blocks, statuses_of
from .bucket_blocks import BucketBlocks
from .columns import output_schema
from .errors import UsageError
from .flow import Job
from .hosted import Runner
from .hub_blocks import HubBlocks
from .models import ModelProfile, find_profile, prompt_words
from .options import CommonOptions
from .publish import Output, check_output_is_apart, choose_output
from .quality import extra_columns, quality_settings, reading_of, text_rules
from .question import Question
from .report import Tally, say
from .result import SOUND
from .source import Source
from .way import Way, way_of
from .work_ref import Destination

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class Opened:
    """What preflight found: the input, how it is cut into blocks, and where these lie."""

    source: Source
    plan: BlockPlan
    blocks: Blocks


@dataclass
class Run:
    """One run of a script: what is known of it so far, for its last words.

    `streams`: rows of a Hub input that is not parquet are streamed, where they can be.
    """

    script: str
    options: CommonOptions
    argv: Sequence[str]
    profile: ModelProfile
    question: Question
    output: Output
    way: Way = field(default_factory=Way)
    streams: bool = False
    engine: str | None = None
    context_tokens: int | None = None  # what the engine says its --max-model-len is
    opened: Opened | None = None
    tally: Tally | None = None
    statuses: Counter[str] = field(default_factory=Counter)
    missing_blocks: Sequence[int] = ()  # of all shards, at the end
    runner: Runner = field(default_factory=Runner)
    rows_again: int = 0  # rows of closed blocks that are asked about again
    started: float = field(default_factory=time.monotonic)

    @property
    def at(self) -> Opened:
        """What preflight opened."""
        assert self.opened is not None, "preflight comes first"
        return self.opened

    def todo(self) -> list[int]:
        """Return the numbers of the blocks to write: this run's that are missing; where asked, those with failures."""
        closed = self.at.blocks.closed()
        ours = [number for number in range(len(self.at.plan)) if self.way.shard.holds(number)]
        failed: dict[int, int] = {}
        if self.way.retry_failed:
            there = [number for number in ours if number in closed]
            for number, counts in statuses_of(self.at.blocks, there, self.options.output_column).items():
                failed[number] = sum(count for status, count in counts.items() if status not in SOUND)
        self.rows_again = sum(failed.values())
        return [number for number in ours if number not in closed or failed.get(number)]

    def surely_asks(self) -> bool:
        """Whether an engine is needed for all that can be told before anything is opened: no block is here yet."""
        blocks = self.output.folder / (self.options.output_config or DEFAULT_FOLDER)
        some_are_here = any(blocks.glob("*.parquet"))
        return self.options.overwrite or not (self.way.finishes or some_are_here)

    def missing(self) -> list[int]:
        """Return the numbers of the blocks that are not there, those of other shards too."""
        closed = self.at.blocks.closed()
        return [number for number in range(len(self.at.plan)) if number not in closed]

    def command(self) -> str:
        """Return the command line, as people type it."""
        return shlex.join(["uv", "run", self.script, *self.argv])


def begin(script: str, options: CommonOptions, argv: Sequence[str], *, streams: bool = False) -> Run:
    """Check the options against each other and the model; nothing is opened yet."""
    if options.private and options.public:
        raise UsageError("--private and --public exclude each other; give one of them")
    if options.overwrite and options.resume:
        raise UsageError("--overwrite and --resume exclude each other; give one of them")
    way = way_of(options, os.environ)
    _refuse_secrets(options)
    text_rules(options)
    match = find_profile(options.model)
    profile = match.profile
    if match.how != "catalogue":
        say(f"{options.model}: {match}")
    sampling = profile.sampling
    question = Question(
        words=prompt_words(profile, options.mode),
        temperature=sampling.temperature if options.temperature is None else options.temperature,
        top_p=sampling.top_p if options.top_p is None else options.top_p,
        max_tokens=options.max_tokens or sampling.max_tokens,
        seed=options.seed,
        chat_template_kwargs=dict(profile.chat_template_kwargs),
    )
    output = choose_output(options.output, options.work_dir, options.output_revision, options.create_pr)
    check_output_is_apart(output, options.input)
    return Run(script, options, argv, profile, question, output, way, streams)


def _refuse_secrets(options: CommonOptions) -> None:
    """Keys in the command line would end up in process lists, logs and the card."""
    for word in options.vllm_args:
        if word.split("=")[0] in {"--api-key", "--hf-token"}:
            raise UsageError(
                f"{word.split('=')[0]} does not belong on a command line: set HF_TOKEN in the environment; "
                "a server that we start is given a key of its own there"
            )


def blocks_of(run: Run, source: Source, plan: BlockPlan) -> Blocks:
    """Return the blocks of the output, wherever they lie."""
    output, way = run.output, run.way
    if output.repo_id:
        place = Destination(output.repo_id, plan.target, output.revision, is_private(run, source), output.create_pr)
        return HubBlocks(
            place,
            output.folder,
            counted_column=f"{run.options.output_column}_status",
            shard=way.shard,
            commit_every_s=way.commit_every_s,
        )
    if output.bucket:
        return BucketBlocks(
            output.bucket,
            plan.target,
            output.folder,
            private=is_private(run, source),
            counted_column=f"{run.options.output_column}_status",
            shard=way.shard,
        )
    return BlockFolder(output.folder, plan.target, way.shard)


def input_name(run: Run, source: Source) -> str:
    """Name the input for others: a local path says nothing to them."""
    return Path(run.options.input).name if source.roots else run.options.input


def is_private(run: Run, source: Source) -> bool:
    """Whether a new dataset or bucket is to be private: as the input, unless the user says otherwise."""
    return run.options.private or (source.is_private and not run.options.public)


def run_settings(run: Run) -> dict[str, Any]:
    """Return all that decides what the blocks hold: a resumed run must have the same."""
    options, question, source, plan = run.options, run.question, run.at.source, run.at.plan
    return {
        "input": source.fingerprint,
        "config": options.config,
        "split": source.split,
        "image_column": source.image_column,
        "rows": plan.num_rows,
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
        "results_only": run.way.results_only,
        **quality_settings(options),
    }


def schema_of(run: Run) -> pa.Schema:
    """Return the schema of the output."""
    without = run.at.source.image_column if run.way.results_only else None
    return output_schema(
        run.at.source.rows.schema,
        run.options.output_column,
        run_settings(run),
        without=without,
        extras=extra_columns(run.options),
    )


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
        **quality_settings(options),
        "flavor": run.runner.flavor or os.environ.get("ACCELERATOR"),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def hosted_command(run: Run, image: str, otherwise: str) -> str:
    """Return how to run the same on hosted GPUs, one or several, and `otherwise` what else could be done."""
    words = ["hf", "jobs", "uv", "run", "--image", image, "--flavor", "l4x1", "-s", "HF_TOKEN", "--timeout", "4h"]
    return (
        f"On a hosted GPU:\n\n    {shlex.join([*words, 'SCRIPT_URL', *run.argv])}\n\n"
        f"(SCRIPT_URL: the address of {run.script}, or its path here; input and output must be Hub datasets there.)\n"
        "On several at once: this command with --jobs 4 (and --dry-run, to see first what that takes).\n"
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


def start_counting(run: Run, todo: Sequence[int]) -> None:
    """Count from now on what this run does, beside what is done already."""
    at = run.at
    ours = [number for number in range(len(at.plan)) if run.way.shard.holds(number)]
    missing = set(todo) - at.blocks.closed()
    rows = sum(len(at.plan.positions(number)) for number in ours)
    rows_before = rows - sum(len(at.plan.positions(number)) for number in missing) - run.rows_again
    run.tally = Tally(rows, rows_before, verbose=run.options.verbose, dollars_per_hour=run.runner.dollars_per_hour)


def make_job(run: Run, todo: Sequence[int]) -> Job:
    """Return what has to be done, and start counting."""
    at = run.at
    start_counting(run, todo)
    assert run.tally is not None
    if run.tally.rows_before:
        say(f"{run.tally.rows_before} of {run.tally.rows} rows are done already; blocks to be written: {len(todo)}")
    return Job(
        source=at.source,
        plan=at.plan,
        blocks=at.blocks,
        todo=todo,
        reading=reading_of(run.options, run.profile, run.question, run.context_tokens),
        output_column=run.options.output_column,
        settings=run_settings(run),
        info=run_info(run),
        results_only=run.way.results_only,
        extras=extra_columns(run.options),
    )
