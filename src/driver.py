"""What the driver scripts share: their options for a server, and keeping it busy from a client without torch."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shlex
import shutil
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TextIO

from .ask import Asker, Failure
from .deadline import watch_deadline
from .flow import Job, count_cores, run_job
from .gauges import GaugeReader
from .job import Run, engine_args, hosted_command
from .loops import repetition_field
from .machine import choose_flags, look_around, machine_line
from .options import CommonOptions, option
from .report import beside, progress_shown, say
from .serve import Server, Wanted
from .steering import Steering
from .submission import Hosting
from .supervise import Supervisor, Vigilance
from .transport import IN_REQUEST
from .trust import required
from .web import is_local
from .window import Window
from .workers import metrics_text, workers_behind


@dataclass(frozen=True, kw_only=True)
class DriverOptions(CommonOptions):
    """What a driver script takes beside the common options: which server, and how patiently it is asked."""

    server: str | None = option(
        None,
        "engine",
        "server to use; where a local URL does not answer, vllm is started there (default: start one on a free port)",
        metavar="URL",
    )
    serve_command: str | None = option(
        None,
        "engine",
        "start this instead of `vllm serve`; {model}, {host} and {port} are filled in, or --host and --port added",
        metavar="CMD",
    )
    port: int | None = option(
        None, "engine", "port for the server we start (default: a free one)", metavar="N", minimum=1, maximum=65535
    )
    api_key_env: str = option("VLLM_API_KEY", "engine", "variable that holds the key of --server", metavar="VAR")
    startup_timeout: float = option(
        900.0, "engine", "seconds to wait for a server that shows no sign of progress", metavar="S", minimum=0.1
    )
    request_timeout: float = option(600.0, "engine", "seconds one request may take", metavar="S", minimum=0.1)
    retry_for: float = option(
        600.0, "engine", "seconds from its first failure on in which a page is asked again", metavar="S", minimum=0.0
    )
    stall_timeout: float = option(
        50.0,
        "engine",
        "seconds without a token and without a page, while pages are in flight, after which our server is started anew",
        metavar="S",
        minimum=0.1,
    )
    max_restarts: int = option(
        10, "engine", "how often a server of ours that died or froze is started again in a run", metavar="N", minimum=0
    )
    keep_server: bool = option(
        False, "engine", "leave the server that we start running when the run has ended well, and say how to use it"
    )


def driver_hosting(run: Run, options: DriverOptions, flavor: str) -> Hosting:
    """Say what a driver script needs as a job: a GPU and the model's image, unless others serve the model."""
    if options.server and not is_local(options.server):
        return Hosting(None, "cpu-upgrade", "", needs_gpu=False, key_variables=(options.api_key_env,))
    shape = "" if options.serve_command else "server"
    return Hosting(run.profile.image, flavor, shape, needs_gpu=options.serve_command is None)


def other_ways(environment: Mapping[str, str]) -> str:
    """Say what else could be done here. uv need not be on PATH: `uv run` tells in UV where it is."""
    uv = "uv" if shutil.which("uv") else shlex.quote(environment.get("UV") or "uv")
    return (
        "Here: install vLLM, or give --server URL, or try without a GPU: "
        f'--serve-command "{uv} run rapidocr-server.py" --model rapidocr'
    )


def wanted_server(run: Run, options: DriverOptions) -> Wanted:
    """Say which server is wanted, and how to get a machine that has one."""
    return Wanted(
        model=options.model,
        trust=required(run.profile, run.question, options, min(options.request_timeout, options.startup_timeout)),
        url=options.server,
        command=options.serve_command,
        port=options.port,
        api_key=os.environ.get(options.api_key_env),
        vllm_args=engine_args(run),
        own_words=options.vllm_args,
        suggest=functools.partial(suggested_flags, run),
        startup_timeout_s=options.startup_timeout,
        keep=options.keep_server,
        hint=hosted_command(run, run.profile.image, other_ways(os.environ)),
    )


def import_client_ahead() -> None:
    """Import the client of the API in a thread, so that this is done when the server has come up."""

    def import_client() -> None:
        with contextlib.suppress(ImportError):  # said where it is used
            import openai  # noqa: F401

    threading.Thread(target=import_client, daemon=True).start()


def suggested_flags(run: Run) -> tuple[str, ...]:
    """Return the flags that fit this machine, and say so."""
    machine = look_around()
    choices = choose_flags(machine, run.profile, run.options.vllm_args)
    say(machine_line(machine, choices))
    return tuple(word for choice in choices for word in choice.words)


async def drive(
    job: Job, run: Run, options: DriverOptions, server: Server, window: Window, telemetry: TextIO | None = None
) -> None:
    """Keep the server busy with the pages of the job, as many as the window has places, and show how it goes."""
    import openai

    tally = run.tally
    assert tally is not None
    timeout = openai.Timeout(options.request_timeout, connect=min(10.0, options.request_timeout))
    url = server.endpoint.base_url
    async with openai.AsyncOpenAI(
        base_url=url,
        api_key=server.endpoint.api_key,
        max_retries=0,
        timeout=timeout,
        # a proxy named in the environment is not for loopback
        http_client=openai.DefaultAsyncHttpxClient(trust_env=not is_local(url), timeout=timeout),
    ) as client:

        def note_retry(failure: Failure) -> None:
            tally.retry(failure.reason)
            window.trouble(failure.trouble)

        vigilance = Vigilance(options.stall_timeout, options.max_restarts)
        asker = Asker(
            client,
            server.endpoint.model,
            run.question,
            retry_for_s=options.retry_for,
            on_retry=note_retry,
            guard=Supervisor(server, vigilance, tally.restarted),
            transport=(server.keeper and server.keeper.pages) or IN_REQUEST,
            more=more_fields(server.engine, confidence=options.confidence),
        )
        workers = await asyncio.to_thread(workers_behind, url)
        if workers:
            say(f"{url} is a router before {len(workers)} servers: {', '.join(workers)}")
        gauges = GaugeReader(url, functools.partial(metrics_text, server.endpoint.api_key, workers), say)
        steering = Steering(window, tally, lambda: gauges.latest, count_cores(), telemetry)
        with beside(gauges.run(), steering.steer(), watch_deadline(tally, run.runner.ends_at)), progress_shown(tally):
            await run_job(job, asker, tally, window)


def more_fields(engine: str, *, confidence: bool) -> dict[str, Any]:
    """Return the fields of a request beyond the question: those that stop loops, and those that ask for confidence."""
    owner, _, version = engine.partition(" ")
    more: dict[str, Any] = dict(repetition_field(version)) if owner == "vllm" else {}
    return {**more, "logprobs": True, "top_logprobs": 0} if confidence else more
