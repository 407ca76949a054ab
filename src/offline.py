# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "datasets>=5.2.0",
#     "huggingface_hub>=2.4.0",
#     "pillow>=13.0.0",
#     "tqdm>=4.70.1",
#     "vllm==0.32.0",
# ]
#
# [tool.hf-jobs]
# image = "vllm/vllm-openai:v0.32.0"
# flavor = "l4x1"
# timeout = "4h"
# secrets = ["HF_TOKEN"]
# env = { HF_HUB_DISABLE_PROGRESS_BARS = "1" }
# ///
"""Read the pages of a dataset with LightOnOCR in one process: the vLLM engine lives in this script.

On a hosted GPU (the script is fetched by URL and runs alone):

    hf jobs uv run --image vllm/vllm-openai:v0.32.0 --flavor l4x1 -s HF_TOKEN --timeout 4h \\
        SCRIPT_URL namespace/scans namespace/scans-text

On a GPU of your own:

    uv run lighton-ocr.py scans/ out/

OUTPUT gets the input's rows in their order, all columns as they were, and four more: `markdown` (the text),
`markdown_status` (ok, blank, truncated, repetition, error), `markdown_error`, `markdown_tokens`; `inference_info` says
how. It is written in blocks of rows, data/<split>-<block>.parquet: a run that was killed goes on with the same command.
Blocks of a Hub dataset are collected on a branch of it while the run is under way, and published when all are there.

Caveat: one process prepares the pages for the engine, so a fast GPU is kept busier by lighton-ocr-server.py, which asks
the same questions and writes the same blocks.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from importlib.metadata import version
from typing import Any

from .canary import Canary
from .deadline import watch_deadline
from .ending import carry_out, no_module, refuse
from .engine import OfflineEngine
from .errors import EngineError, JobError, UsageError
from .flow import Job, count_cores, run_job
from .interrupt import Interrupts
from .job import Run, begin, engine_args, hosted_command, make_job
from .jobs import hand_out, wants_jobs
from .loops import repetition_field
from .models import DEFAULT_MODEL_ID
from .options import CommonOptions, make_parser, option, parse_options
from .orphans import end_children_with_us
from .question import Question, page_messages, page_sampling
from .report import beside, progress_shown, say
from .result import PageResult, result_of_answer
from .startup import explanation
from .submission import Hosting
from .trust import Trust, check_canary, check_context, check_version, required
from .window import Window, fixed_window

SCRIPT = "lighton-ocr.py"
FLAVOR = "l4x1"
IMAGE = "vllm/vllm-openai:v0.32.0"
OTHERWISE = "Against a running server, without a GPU: lighton-ocr-server.py --server URL"


@dataclass(frozen=True, kw_only=True)
class OfflineOptions(CommonOptions):
    """The options of lighton-ocr.py."""

    model: str = option(DEFAULT_MODEL_ID, "model", "model id or local checkpoint", metavar="ID")

    batch_size: int = option(
        512,
        "engine",
        "pages a chunk, where the engine can't be fed page by page (before enqueue_chat)",
        metavar="N",
        minimum=1,
    )
    concurrency: int = option(64, "run", "pages in the engine", metavar="N", minimum=1)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script; return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    assert __doc__ is not None
    parser = make_parser(
        OfflineOptions,
        prog=SCRIPT,
        description=__doc__,
        epilog="Everything after -- goes to the engine, as `vllm serve` takes it.",
    )
    options = parse_options(parser, OfflineOptions, words)
    try:
        run = begin(SCRIPT, options, words)
        if wants_jobs(options):
            return hand_out(run, Hosting(IMAGE, FLAVOR, "offline"))
        trust = required(run.profile, run.question, options)
        if run.surely_asks():
            check_engine(run, trust)
    except JobError as error:
        return refuse(SCRIPT, options, error)
    except ModuleNotFoundError as error:
        return refuse(SCRIPT, options, no_module(error, SCRIPT))
    return carry_out(run, functools.partial(ask_engine, options, trust))


def check_engine(run: Run, trust: Trust) -> None:
    """Raise `EngineError` where there is no vLLM, no device for it, or a bad version, before anything is downloaded."""
    prepare_environment()
    if importlib.util.find_spec("vllm") is None:
        raise EngineError(f"vLLM is not installed here.\n{hosted_command(run, IMAGE, OTHERWISE)}")
    from vllm.platforms import current_platform

    if not current_platform.device_type:
        raise EngineError(
            "vLLM finds no device on this machine: no GPU, and this is no CPU build of it.\n"
            + hosted_command(run, IMAGE, OTHERWISE)
        )
    check_version(trust, version("vllm"), version("transformers"))


def prepare_environment() -> None:
    """Set what vLLM reads from the environment, where the user has not."""
    # FlashInfer's sampler is compiled by nvcc, which the plain image lacks: engine start would crash.
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    # stdout is for the JSON line
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")


def engine_arguments(run: Run) -> dict[str, Any]:
    """Return the arguments of `LLM`: the words that `vllm serve` would get, read by vLLM's own parser.

    Raises `UsageError` where vLLM does not know one of them.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog=f"{SCRIPT} … --", add_help=False, exit_on_error=False))
    try:
        parsed, unknown = parser.parse_known_args(_without_server_words(engine_args(run)))
    except (argparse.ArgumentError, ValueError) as error:
        raise UsageError(f"the engine refuses its arguments: {error}") from error
    if unknown:
        raise UsageError(f"the engine does not know {shlex.join(unknown)}; see `vllm serve --help=all`")
    default = parser.parse_args([])
    changed = {
        item.name: getattr(parsed, item.name)
        for item in fields(EngineArgs)
        if getattr(parsed, item.name, None) != getattr(default, item.name, None)
    }
    return {**changed, "model": run.options.model}


def _without_server_words(words: Sequence[str]) -> list[str]:
    """Leave out what only a server takes: the template's arguments go with each page here."""
    kept = list(words)
    while "--default-chat-template-kwargs" in kept:
        place = kept.index("--default-chat-template-kwargs")
        del kept[place : place + 2]
    return kept


def ask_engine(
    options: OfflineOptions, trust: Trust, run: Run, todo: Sequence[int], stack: ExitStack, interrupts: Interrupts
) -> None:
    """Start the engine and have it read the pages of the blocks `todo`."""
    check_engine(run, trust)
    arguments = engine_arguments(run)
    import vllm

    end_children_with_us()
    say(f"starting vLLM {vllm.__version__} with {run.options.model}")
    try:
        llm = vllm.LLM(**arguments)
    except Exception as error:
        why = explanation(str(error), run.profile.image)
        told = f"{why}\n" if why else ""
        raise EngineError(f"the engine did not start: {told}{type(error).__name__}: {error}") from error
    run.engine = f"vllm {vllm.__version__}"
    run.context_tokens = llm.llm_engine.vllm_config.model_config.max_model_len
    stack.callback(shut_down, llm)
    check_context(trust, run.context_tokens)
    check_canary(trust, functools.partial(ask_about_canary, llm, vllm.SamplingParams, run.question), run.engine)
    engine = OfflineEngine(
        llm,
        run.question,
        functools.partial(vllm.SamplingParams, **more_sampling(vllm.__version__, confidence=options.confidence)),
        batch_size=options.batch_size,
        is_death=is_engine_death,
        is_gone=functools.partial(is_engine_gone, llm),
    )
    stack.callback(engine.stop)
    window = fixed_window(options.concurrency, ahead=2 * count_cores())
    interrupts.run(feed(make_job(run, todo), run, engine, window))


def more_sampling(vllm_version: str, *, confidence: bool) -> dict[str, Any]:
    """Return the sampling beyond the question: what stops loops, and what asks for confidence."""
    more: dict[str, Any] = {"logprobs": 0} if confidence else {}
    for name, limits in repetition_field(vllm_version).items():
        from vllm.sampling_params import RepetitionDetectionParams

        more[name] = RepetitionDetectionParams(**limits)
    return more


def ask_about_canary(
    llm: Any, make_sampling: Callable[..., Any], question: Question, canary: Canary, row: int
) -> PageResult:
    """Have the engine read the canary page."""
    asked = replace(question, max_tokens=canary.max_tokens)
    messages = page_messages(asked, {"type": "image_pil", "image_pil": canary.page.image.convert("RGB")})
    (output,) = llm.chat(
        [messages],
        [make_sampling(**page_sampling(asked, row))],
        use_tqdm=False,
        chat_template_kwargs=dict(question.chat_template_kwargs) or None,
    )
    completion = output.outputs[0]
    return result_of_answer(
        completion.text,
        completion.finish_reason,
        tokens=len(completion.token_ids),
        prompt_tokens=len(output.prompt_token_ids or ()),
        attempts=1,
        latency_s=0.0,
    )


async def feed(job: Job, run: Run, engine: OfflineEngine, window: Window) -> None:
    """Keep the engine busy with the pages of the job, and show how it goes."""
    assert run.tally is not None
    with beside(watch_deadline(run.tally, run.runner.ends_at)), progress_shown(run.tally):
        await run_job(job, engine, run.tally, window)


def is_engine_death(error: Exception) -> bool:
    """Whether the exception means that the engine is gone, and not that it refuses a page."""
    from vllm.v1.engine.exceptions import EngineDeadError

    return isinstance(error, EngineDeadError)


def is_engine_gone(llm: Any) -> bool:
    """Whether vLLM has noticed that a process of the engine is gone."""
    core = getattr(llm.llm_engine, "engine_core", None)
    return bool(getattr(getattr(core, "resources", None), "engine_dead", False))


def shut_down(llm: Any) -> None:
    """End the engine's processes."""
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    sys.exit(main())
