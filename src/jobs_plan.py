"""What jobs have to do: what is left of the run, which of its jobs run already, on what machine, and for how long."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from .blocks import WHOLE, Shard
from .errors import UsageError, network_errors
from .estimate import Estimate, read_timeout, speed_of, timeout_for
from .flavors import Flavor
from .hardware import PriceList, read_price_list
from .job import Run
from .submission import (
    DEFAULT_ATTEMPTS,
    Hosting,
    ShardJob,
    Submission,
    check_words,
    job_name,
    label_text,
    own_words,
    plural,
    words_of_shard,
)
from .work_ref import MAIN

if TYPE_CHECKING:
    from huggingface_hub import JobInfo

LIVE = ["RUNNING", "SCHEDULING"]
REFUSALS = {
    401: "the token does not work: set HF_TOKEN, or `hf auth login`",
    402: "jobs are paid in advance: add credit, or take another --flavor",
    403: "the token, or the account, may not run jobs there: take one that may, or --jobs-namespace ORGANISATION",
}


def check_possible_there(run: Run) -> None:
    """Refuse what a job could not read or write: it sees the Hub, and nothing of this machine."""
    name = run.options.input
    if Path(name).expanduser().exists():
        raise UsageError(
            f"--jobs: the input {name!r} is here, where no job can read it; upload it first, "
            f"`hf upload NAMESPACE/NAME {shlex.quote(name)} --repo-type dataset`, and give that name as the input"
        )
    if run.output.on_hub is None:
        raise UsageError(
            f"--jobs: the output {str(run.output)!r} is a folder, and a job's disk goes with the job; "
            "name a Hub dataset, NAMESPACE/NAME, or hf://buckets/NAMESPACE/NAME"
        )
    if not Path(sys.argv[0]).is_file():
        raise UsageError(f"--jobs: the script must be a file to be submitted, and {sys.argv[0]!r} is none")
    own, rest = own_words(run.argv)
    check_words([*own, *rest], Path.cwd())


def plan_submission(run: Run, hosting: Hosting) -> Submission:
    """Find out what is left for jobs to do, on what, for how long, and what that costs."""
    options = run.options
    count = options.jobs or 1
    own, rest = own_words(run.argv)
    name = job_name(run.script, [*own, *rest], count)
    labels = {
        "script": label_text(Path(run.script).stem),
        "model": label_text(options.model),
        "output": label_text(_destination(run)),
        "split": label_text(str(run.at.plan.target)),
    }
    namespace = find_namespace(options.jobs_namespace)
    running = running_jobs(name, labels, namespace) if namespace else {}
    jobs = tuple(job for job in shard_jobs(run, count) if job.index not in running)
    prices = read_price_list()
    flavor = choose_flavor(prices, options.flavor or hosting.flavor, hosting)
    estimate = make_estimate(run, hosting, flavor, jobs)
    return Submission(
        script=Path(sys.argv[0]),
        name=name,
        image=hosting.image,
        flavor=flavor,
        timeout_s=read_timeout(options.timeout) if options.timeout else timeout_for(estimate),
        attempts=options.attempts or DEFAULT_ATTEMPTS,
        namespace=namespace,
        labels=labels,
        secrets=_secrets(hosting),
        shape=hosting.shape,
        jobs=jobs,
        running=running,
        estimate=estimate,
    )


def _destination(run: Run) -> str:
    """Name what the jobs write to: two branches of one dataset are two things."""
    at = "pull-request" if run.output.create_pr else run.output.revision
    return str(run.output) if at == MAIN else f"{run.output}@{at}"


def shard_jobs(run: Run, count: int) -> list[ShardJob]:
    """Return a job for each shard that has pages left to read."""
    found: list[ShardJob] = []
    for index in range(count):
        run.way = replace(run.way, shard=Shard(index, count))
        missing = set(run.todo()) - run.at.blocks.closed()
        pages = sum(len(run.at.plan.positions(number)) for number in missing) + run.rows_again
        if pages or missing:
            found.append(ShardJob(index, count, pages, words_of_shard(run.argv, index, count)))
    run.way = replace(run.way, shard=WHOLE)
    return found


def find_namespace(given: str | None) -> str | None:
    """Return for whom the jobs run: as the user says, or the token's user; None without a token."""
    from huggingface_hub import HfApi

    if not hub_token():
        return None
    try:
        return given or str(HfApi().whoami()["name"])
    except network_errors() as error:
        raise UsageError(f"the Hub does not say whose the token is: {refusal(error)}") from error


def running_jobs(name: str, labels: dict[str, str], namespace: str) -> dict[int, JobInfo]:
    """Return the jobs of this command that run already, by shard; refuse to meddle with those of another one."""
    from huggingface_hub import HfApi

    wanted = {key: labels[key] for key in ("output", "split")}
    try:
        live = list(HfApi().list_jobs(status=list(LIVE), labels=wanted, namespace=namespace))
    except network_errors() as error:
        raise UsageError(f"the jobs that run already can't be listed: {refusal(error)}") from error
    ours = [info for info in live if info.labels and info.labels.get("name") == name and "shard" in info.labels]
    others = [info for info in live if info not in ours]
    if others:
        raise UsageError(
            f"{plural(len(others), 'job')} of another command write to this output now; wait for them, "
            f"`hf jobs wait {references(others)}`, or cancel them, `hf jobs cancel …`"
        )
    return {int((info.labels or {})["shard"].partition("-")[0]): info for info in ours}


def choose_flavor(prices: PriceList, name: str, hosting: Hosting) -> Flavor:
    """Return the flavour of this name; refuse one that is not offered, or has no GPU where one is needed."""
    flavor = prices.find(name)
    if flavor is None:
        names = ", ".join(flavor.name for flavor in prices.flavors if flavor.gpu or not hosting.needs_gpu)
        raise UsageError(f"--flavor {name!r} is not offered; there are {names} (`hf jobs hardware`)")
    if hosting.needs_gpu and not flavor.gpu:
        raise UsageError(f"--flavor {name!r} has no GPU, and the engine needs one; see `hf jobs hardware`")
    return flavor


def make_estimate(run: Run, hosting: Hosting, flavor: Flavor, jobs: Sequence[ShardJob]) -> Estimate | None:
    """Return what the jobs will take, or None where nobody has measured that."""
    speed = speed_of(run.options.model, flavor.name, hosting.shape, run.options.pages_per_second)
    if speed is None or not jobs:
        return None
    pages = [job.pages for job in jobs]
    return Estimate(sum(pages), max(pages), len(jobs), speed, flavor.dollars_per_hour)


def hub_token() -> str | None:
    """Return the token of this machine, if there is one."""
    from huggingface_hub import get_token

    token: str | None = get_token()
    return token


def _secrets(hosting: Hosting) -> dict[str, str]:
    values = {"HF_TOKEN": hub_token(), **{name: os.environ.get(name) for name in hosting.key_variables}}
    return {name: value for name, value in values.items() if value}


def refusal(error: Exception) -> str:
    """Say why the Hub refused, and what to do about it."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    advice = REFUSALS.get(status or 0)
    told = getattr(error, "server_message", None) or str(error).strip().splitlines()[0]
    words = f"{type(error).__name__}{f' {status}' if status else ''}: {told}"
    return f"{words} ({advice})" if advice else words


def reference(info: JobInfo) -> str:
    """Name a job as the commands of `hf jobs` take it, whoever's it is."""
    return f"{info.owner.name}/{info.id}"


def references(infos: Sequence[JobInfo]) -> str:
    """Name several jobs."""
    return " ".join(reference(info) for info in infos)
