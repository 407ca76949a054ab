"""`--jobs N`: the run submitted as N Hugging Face Jobs of this very script, each with its shard, or only shown.

What is left to do is looked up first, so that the same command given again submits what is missing: shards whose
blocks are all there and shards whose job runs still are left alone.
"""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from .blocks import WHOLE
from .errors import JobError, SubmitError, UsageError, network_errors
from .estimate import no_speed, timeout_for, timeout_words
from .job import Run
from .jobs_plan import check_possible_there, plan_submission, reference, references, refusal
from .options import CommonOptions
from .preflight import preflight
from .report import duration, say, say_to_programs
from .submission import Hosting, ShardJob, Submission, plural, stray_options

if TYPE_CHECKING:
    from huggingface_hub import HfApi, JobInfo


@dataclass
class Handout:
    """What became of a command with --jobs, for its last words."""

    run: Run
    submission: Submission | None = None
    started: dict[int, JobInfo] = field(default_factory=dict)  # by shard

    def json_line(self, exit_code: int, message: str) -> str:
        """Return the JSON line; its keys are frozen (CONTRACT §4.2)."""
        run, order = self.run, self.submission
        opened = run.opened
        return json.dumps(
            {
                "version": 1,
                "exit_code": exit_code,
                "message": message,
                "input": run.options.input,
                "output": str(run.output),
                "split": opened.source.split if opened else None,
                "model": run.options.model,
                "rows": opened.plan.num_rows if opened else 0,
                "dry_run": run.options.dry_run,
                "name": order.name if order else None,
                "image": order.image if order else None,
                "flavor": order.flavor.name if order else None,
                "timeout_seconds": order.timeout_s if order else None,
                "attempts": order.attempts if order else None,
                "jobs": [self._entry(job) for job in order.jobs] if order else [],
                "running": [_described(index, info) for index, info in sorted(order.running.items())] if order else [],
                "estimate": order.estimate.as_json() if order and order.estimate else None,
            }
        )

    def _entry(self, job: ShardJob) -> dict[str, Any]:
        return {**_described(job.index, self.started.get(job.index)), "pages": job.pages, "arguments": list(job.words)}


def _described(index: int, info: JobInfo | None) -> dict[str, Any]:
    return {"shard": index, "id": reference(info) if info else None, "url": info.url if info else None}


def wants_jobs(options: CommonOptions) -> bool:
    """Whether the run is to be submitted as jobs; `UsageError` where its options do not fit that."""
    if options.jobs is None:
        stray = stray_options(options)
        if stray:
            raise UsageError(f"{', '.join(stray)}: of no use without --jobs N; give it too, or leave them out")
        return False
    if options.num_shards is not None or options.shard_index is not None:
        raise UsageError("--jobs gives each job its --num-shards and --shard-index; leave them out")
    if options.finish:
        raise UsageError("--finish asks no engine and needs no job; give it without --jobs")
    if options.overwrite:
        raise UsageError(
            "--overwrite in a job would start anew whenever the job is started again; choose another output or "
            "--output-config, or remove the old blocks first"
        )
    return True


def hand_out(run: Run, hosting: Hosting) -> int:
    """Submit the run as jobs, or show what would be; say so to people and to programs, and return the exit code."""
    handout, message, code = Handout(run), "done", 0
    run.way = replace(run.way, shard=WHOLE)
    try:
        check_possible_there(run)
        preflight(run)
        handout.submission = plan_submission(run, hosting)
        show(handout)
        if run.options.dry_run:
            say("nothing was submitted: --dry-run")
        else:
            submit(handout)
    except KeyboardInterrupt:
        message, code = f"interrupted; {_what_runs(handout)}", 130
    except JobError as error:
        message, code = str(error), error.exit_code
    except Exception as error:
        say_to_programs(handout.json_line(1, f"{type(error).__name__}: {error}"))
        raise
    if code:
        say(f"{run.script}: {message}")
    say_to_programs(handout.json_line(code, message))
    return code


def show(handout: Handout) -> None:
    """Say to people what is submitted, what it takes, and what of it may not do."""
    order, options = handout.submission, handout.run.options
    assert order is not None
    for index, info in sorted(order.running.items()):
        say(f"shard {index} runs already and is left alone: {reference(info)}")
    if not order.jobs and not order.running:
        say("nothing is left to ask: all blocks are there (--finish publishes what is not published yet)")
    if not order.jobs:
        return
    idle = (options.jobs or 1) - len(order.jobs) - len(order.running)
    if idle:
        blocks = plural(len(handout.run.at.plan), "block")
        say(f"{plural(idle, 'shard')} of {options.jobs} need no job: of {blocks} in all, none is left to them")
    for line in order.lines():
        say(line)
    if order.estimate is None:
        say(no_speed(options.model, order.flavor.name, order.shape))
    else:
        say(str(order.estimate))
        if order.estimate.longest_s > order.timeout_s:
            say(
                f"--timeout {timeout_words(order.timeout_s)} is too short for {duration(order.estimate.longest_s)} a "
                f"job: --timeout {timeout_words(timeout_for(order.estimate))} would do, or more jobs. What is done "
                "by then is kept, and the same command goes on"
            )
    gpus = order.flavor.gpus
    if gpus > 1 and not any("parallel-size" in word for word in options.vllm_args):
        remedy = f"; `-- --data-parallel-size {gpus}` uses all" if order.shape == "server" else ""
        say(f"{order.flavor.name} has {gpus} GPUs, of which the engine uses one{remedy}")


def submit(handout: Handout) -> None:
    """Submit the jobs, one after the other, and say how to follow them."""
    from huggingface_hub import HfApi

    order = handout.submission
    assert order is not None
    api = HfApi()
    # hf_xet, which takes a local script to the Hub, raises `RuntimeError` where the network fails
    failures: tuple[type[Exception], ...] = (*network_errors(), ValueError, RuntimeError)
    for job in order.jobs:
        try:
            info = _submit_one(api, order, job)
        except failures as error:
            raise SubmitError(
                f"shard {job.index} was not submitted: {refusal(error)}. {_what_runs(handout)}"
            ) from error
        handout.started[job.index] = info
        say(f"shard {job.index} of {job.count}: {reference(info)} {info.url}")
    infos = {**order.running, **handout.started}
    if not infos:
        return
    refs = references(list(infos.values()))
    namespace = handout.run.options.jobs_namespace
    where = f" --namespace {namespace}" if namespace else ""
    say(
        f"follow one:  hf jobs logs -f {reference(next(iter(infos.values())))}\n"
        f"see all:     hf jobs ps --all --name {order.name}{where}\n"
        f"wait:        hf jobs wait {refs}\n"
        f"stop one:    hf jobs cancel {reference(next(iter(infos.values())))}\n"
        "go on:       this command again: jobs that run are left alone, pages that are done are not asked again"
    )


def _submit_one(api: HfApi, order: Submission, job: ShardJob) -> JobInfo:
    with contextlib.redirect_stdout(sys.stderr), _without_experimental_warning():  # stdout is for the JSON line
        info: JobInfo = api.run_uv_job(
            str(order.script),
            script_args=list(job.words),
            image=order.image,
            env=order.environment,
            secrets=dict(order.secrets),
            flavor=order.flavor.name,
            timeout=order.timeout_s,
            attempts=order.attempts,
            name=order.name,
            labels=order.labels_of(job),
            namespace=order.namespace,
        )
    return info


@contextlib.contextmanager
def _without_experimental_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*experimental.*")
        yield


def _what_runs(handout: Handout) -> str:
    """Say which jobs of the command run now, and what can be done."""
    running = handout.submission.running if handout.submission else {}
    infos = [*running.values(), *handout.started.values()]
    if not infos:
        return "No job runs; the same command submits them"
    return (
        f"These run: {references(infos)}. The same command submits the rest and leaves them alone; "
        f"`hf jobs cancel {reference(infos[0])}` ends one"
    )
