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
# image = "vllm/vllm-openai:v0.30.0"
# flavor = "a10g-large"
# timeout = "12h"
# secrets = ["HF_TOKEN"]
# env = { HF_HUB_DISABLE_PROGRESS_BARS = "1" }
# ///
"""Read millions of pages with LightOnOCR: a server kept full, blocks streamed in and out, stopped and resumed anywhere.

On a hosted GPU (the script is fetched by URL and runs alone):

    hf jobs uv run --image vllm/vllm-openai:v0.30.0 --flavor a10g-large -s HF_TOKEN --timeout 12h \\
        SCRIPT_URL namespace/scans namespace/scans-text --block-rows 1024

Several machines share an output: each is given its number, in any order, and may be killed and started again.

    uv run lighton-ocr3-saturate.py namespace/scans namespace/scans-text --num-shards 4 --shard-index 0

How many pages are in flight follows from what the server shows and delivers; --telemetry keeps each decision. Blocks of
a Hub output are uploaded as they close and committed every --commit-minutes to a branch of it: a run on another machine
finds them there, and whoever closes the last one publishes all. Columns, statuses and blocks are those of
lighton-ocr-server.py.

Caveat: a page counts as done when its block is closed. A killed run pays again for the blocks that were open.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from .driver import DriverOptions, drive, driver_hosting, import_client_ahead, wanted_server
from .ending import carry_out, no_module, refuse
from .errors import JobError, UsageError
from .flow import count_cores
from .interrupt import Interrupts
from .job import Run, begin, make_job
from .jobs import hand_out, wants_jobs
from .options import make_parser, option, parse_options
from .report import say
from .serve import Wanted, check_possible, running_server
from .steering import telemetry_file, verdict
from .window import Window
from .window_rules import Bounds

SCRIPT = "lighton-ocr3-saturate.py"
FLAVOR = "a10g-large"
FIRST_IN_FLIGHT = 8


@dataclass(frozen=True, kw_only=True)
class SaturateOptions(DriverOptions):
    """The options of lighton-ocr3-saturate.py."""

    model: str = option("lightonai/LightOnOCR-3-0.8B", "model", "model id or local checkpoint", metavar="ID")

    min_in_flight: int = option(1, "run", "fewest pages in flight", metavar="N", minimum=1, maximum=1000)
    max_in_flight: int = option(512, "run", "most pages in flight", metavar="N", minimum=1, maximum=1000)
    telemetry: str | None = option(
        None, "run", "file for each decision about the window, as JSON lines", metavar="FILE"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script; return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    assert __doc__ is not None
    parser = make_parser(
        SaturateOptions, prog=SCRIPT, description=__doc__, epilog="Everything after -- goes to `vllm serve` unchanged."
    )
    options = parse_options(parser, SaturateOptions, words)
    try:
        check_bounds(options)
        run = begin(SCRIPT, options, words, streams=True)
        if wants_jobs(options):
            return hand_out(run, driver_hosting(run, options, FLAVOR))
        wanted = wanted_server(run, options)
        if run.surely_asks():
            check_possible(wanted)
    except JobError as error:
        return refuse(SCRIPT, options, error)
    except ModuleNotFoundError as error:
        return refuse(SCRIPT, options, no_module(error, SCRIPT))
    return carry_out(run, functools.partial(saturate_server, options, wanted))


def check_bounds(options: SaturateOptions) -> None:
    """Raise `UsageError` where the window would have no size."""
    if options.min_in_flight > options.max_in_flight:
        raise UsageError(
            f"--min-in-flight {options.min_in_flight} is more than --max-in-flight {options.max_in_flight}"
        )


def saturate_server(
    options: SaturateOptions, wanted: Wanted, run: Run, todo: Sequence[int], stack: ExitStack, interrupts: Interrupts
) -> None:
    """Get a server and keep it full with the pages of the blocks `todo`."""
    import_client_ahead()
    server = stack.enter_context(running_server(wanted))
    if server.keeper:
        interrupts.last_will = server.keeper.kill
    run.engine, run.context_tokens = server.engine, server.context_tokens
    say(f"{server.engine} serves {server.endpoint.model} at {server.endpoint.base_url}")
    window = Window(bounds_of(options), ahead=2 * count_cores())
    job = make_job(run, todo)
    try:
        with telemetry_file(options.telemetry) as telemetry:
            interrupts.run(drive(job, run, options, server, window, telemetry))
    finally:
        say(verdict(window.seconds_bound))


def bounds_of(options: SaturateOptions) -> Bounds:
    """Return what the window may be."""
    return Bounds(
        least=options.min_in_flight,
        most=options.max_in_flight,
        initial=min(options.max_in_flight, max(options.min_in_flight, FIRST_IN_FLIGHT)),
        longest_wait_s=options.request_timeout / 2,
    )


if __name__ == "__main__":
    sys.exit(main())
