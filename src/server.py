# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "datasets>=5.2.0",
#     "huggingface_hub>=2.4.0",
#     "openai>=3.57.0",
#     "pillow>=13.0.0",
#     "tqdm>=4.70.1",
# ]
#
# [tool.hf-jobs]
# image = "vllm/vllm-openai:v0.22.1"
# flavor = "l4x1"
# secrets = ["HF_TOKEN"]
# ///
"""Read the pages of a dataset with LightOnOCR: `vllm serve` beside it, or any server that speaks its API.

On a hosted GPU (the script is fetched by URL and runs alone):

    hf jobs uv run --image vllm/vllm-openai:v0.22.1 --flavor l4x1 -s HF_TOKEN --timeout 4h \\
        SCRIPT_URL namespace/scans namespace/scans-text

On a GPU of your own with vLLM installed, or against a server that runs (no GPU, no torch):

    uv run lighton-ocr-server.py scans/ out/
    uv run lighton-ocr-server.py scans/ out/ --server http://gpu-box:8000

OUTPUT gets the input's rows in their order, all columns as they were, and four more: `markdown` (the text),
`markdown_status` (ok, blank, truncated, repetition, error), `markdown_error`, `markdown_tokens`; `inference_info` says
how. It is written in blocks of rows, data/<split>-<block>.parquet: a run that was killed goes on with the same command.

Caveat: at the models' own temperatures two runs of a page may differ. Read `markdown_status` before trusting a text.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from .ask import Asker
from .errors import JobError
from .flow import Job, run_job
from .interrupt import Interrupts
from .job import Run, begin, carry_out, engine_args, hosted_command, make_job, refuse
from .models import DEFAULT_MODEL_ID
from .options import CommonOptions, make_parser, option, parse_options
from .report import progress_shown, say
from .serve import Server, Wanted, check_possible, is_local, running_server

SCRIPT = "lighton-ocr-server.py"
OTHERWISE = (
    "Here: install vLLM, or give --server URL, or try without a GPU: "
    '--serve-command "uv run rapidocr-server.py" --model rapidocr'
)


@dataclass(frozen=True, kw_only=True)
class ServerOptions(CommonOptions):
    """The options of lighton-ocr-server.py."""

    model: str = option(DEFAULT_MODEL_ID, "model", "model id or local checkpoint", metavar="ID")

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
    concurrency: int = option(64, "run", "pages in flight", metavar="N", minimum=1, maximum=1000)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script; return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    assert __doc__ is not None
    parser = make_parser(
        ServerOptions, prog=SCRIPT, description=__doc__, epilog="Everything after -- goes to `vllm serve` unchanged."
    )
    options = parse_options(parser, ServerOptions, words)
    try:
        run = begin(SCRIPT, options, words)
        wanted = wanted_server(run, options)
        check_possible(wanted)
    except JobError as error:
        return refuse(SCRIPT, options, error)
    return carry_out(run, functools.partial(ask_server, options, wanted))


def wanted_server(run: Run, options: ServerOptions) -> Wanted:
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


def ask_server(options: ServerOptions, wanted: Wanted, run: Run, stack: ExitStack, interrupts: Interrupts) -> None:
    """Get a server and have it read every page that has no result yet."""
    server = stack.enter_context(running_server(wanted))
    if server.spawned:
        interrupts.last_will = server.spawned.kill
    run.engine = server.engine
    say(f"{server.engine} serves {server.endpoint.model} at {server.endpoint.base_url}")
    interrupts.run(drive(make_job(run, options.concurrency), run, options, server))


async def drive(job: Job, run: Run, options: ServerOptions, server: Server) -> None:
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


if __name__ == "__main__":
    sys.exit(main())
