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
# timeout = "4h"
# secrets = ["HF_TOKEN"]
# env = { HF_HUB_DISABLE_PROGRESS_BARS = "1" }
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
Blocks of a Hub dataset are collected on a branch of it while the run is under way, and published when all are there.

Caveat: at the models' own temperatures two runs of a page may differ. Read `markdown_status` before trusting a text.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from .driver import DriverOptions, drive, driver_hosting, import_client_ahead, wanted_server
from .ending import carry_out, no_module, refuse
from .errors import JobError
from .flow import count_cores
from .interrupt import Interrupts
from .job import Run, begin, make_job
from .jobs import hand_out, wants_jobs
from .models import DEFAULT_MODEL_ID
from .options import make_parser, option, parse_options
from .report import say
from .serve import Wanted, check_possible, running_server
from .window import fixed_window

SCRIPT = "lighton-ocr-server.py"
FLAVOR = "l4x1"


@dataclass(frozen=True, kw_only=True)
class ServerOptions(DriverOptions):
    """The options of lighton-ocr-server.py."""

    model: str = option(DEFAULT_MODEL_ID, "model", "model id or local checkpoint", metavar="ID")

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
        if wants_jobs(options):
            return hand_out(run, driver_hosting(run, options, FLAVOR))
        wanted = wanted_server(run, options)
        if run.surely_asks():
            check_possible(wanted)
    except JobError as error:
        return refuse(SCRIPT, options, error)
    except ModuleNotFoundError as error:
        return refuse(SCRIPT, options, no_module(error, SCRIPT))
    return carry_out(run, functools.partial(ask_server, options, wanted))


def ask_server(
    options: ServerOptions, wanted: Wanted, run: Run, todo: Sequence[int], stack: ExitStack, interrupts: Interrupts
) -> None:
    """Get a server and have it read the pages of the blocks `todo`."""
    import_client_ahead()
    server = stack.enter_context(running_server(wanted))
    if server.keeper:
        interrupts.last_will = server.keeper.kill
    run.engine, run.context_tokens = server.engine, server.context_tokens
    say(f"{server.engine} serves {server.endpoint.model} at {server.endpoint.base_url}")
    window = fixed_window(options.concurrency, ahead=2 * count_cores())
    interrupts.run(drive(make_job(run, todo), run, options, server, window))


if __name__ == "__main__":
    sys.exit(main())
