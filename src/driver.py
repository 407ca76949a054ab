"""What the driver scripts share: their options for a server, and keeping it busy from a client without torch."""

from __future__ import annotations

import os
from dataclasses import dataclass

from .ask import Asker
from .flow import Job, run_job
from .job import Run, engine_args, hosted_command
from .options import CommonOptions, option
from .report import progress_shown
from .serve import Server, Wanted, is_local

OTHERWISE = (
    "Here: install vLLM, or give --server URL, or try without a GPU: "
    '--serve-command "uv run rapidocr-server.py" --model rapidocr'
)


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


def wanted_server(run: Run, options: DriverOptions) -> Wanted:
    """Say which server is wanted, and how to get a machine that has one."""
    return Wanted(
        model=options.model,
        url=options.server,
        command=options.serve_command,
        port=options.port,
        api_key=os.environ.get(options.api_key_env),
        vllm_args=engine_args(run),
        startup_timeout_s=options.startup_timeout,
        hint=hosted_command(run, run.profile.image, OTHERWISE),
    )


async def drive(job: Job, run: Run, options: DriverOptions, server: Server) -> None:
    """Keep the server busy with the pages of the job, and show how it goes."""
    import openai

    assert run.tally is not None
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
        asker = Asker(
            client,
            server.endpoint.model,
            run.question,
            retry_for_s=options.retry_for,
            on_retry=run.tally.retry,
            watch=server.watch,
        )
        with progress_shown(run.tally):
            await run_job(job, asker, run.tally)
